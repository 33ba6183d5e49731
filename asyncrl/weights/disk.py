"""Versions as safetensors files in a directory that all nodes share, or at another URL of fsspec (`backend: disk`).

A file appears under its name only once it is complete. Local files are mapped into the engines, which share the pages;
others are read. bfloat16 values are uint16 in arrays and BF16 in files, so other programs can read the files.
"""

from __future__ import annotations

import json
import mmap
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

_NAME = re.compile(r"asyncrl-[0-9a-f]{32}\.safetensors(\.part)?")
"""The names of files that this module has made."""
_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The types of arrays and of tensors in files."""
_ARRAYS = {stored: np.dtype(name) for name, stored in _TYPES.items()}


class DiskChunk(NamedTuple):
    """Some tensors of a version in one file."""

    url: str

    @classmethod
    def put(cls, directory: str, chunk: Mapping[str, NDArray[Any]]) -> DiskChunk:
        """Write a chunk into a new file of the directory. Blocking.

        Raises:
            OSError: the filesystem is full or failing.
        """
        url = f"{directory.rstrip('/')}/asyncrl-{uuid.uuid4().hex}.safetensors"
        files, path = fsspec.url_to_fs(url)
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(files, LocalFileSystem):
            part = Path(f"{path}.part")
            try:
                with part.open("wb") as stream:
                    stream.writelines(_content(chunk))
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)  # what a full disk leaves would keep it full
        else:
            files.pipe_file(path, b"".join(_content(chunk)))  # object stores show an object once it is complete
        # An absolute URL, because engines have other working directories.
        return cls(str(files.unstrip_protocol(path)))

    def get(self) -> Mapping[str, NDArray[Any]]:
        """Map or read the file. Blocking. The arrays are read-only.

        Raises:
            OSError: the file is missing or cannot be read.
            ValueError: the file is damaged.
        """
        files, path = fsspec.url_to_fs(self.url)
        content: Any
        try:
            if isinstance(files, LocalFileSystem):
                with Path(path).open("rb") as stream:
                    content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                content = files.cat_file(path)
            return _arrays(content)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.url} is damaged ({type(error).__name__}: {error})") from error

    def drop(self) -> None:
        """Delete the file; engines that have mapped it keep its pages. Blocking. Raises `OSError`."""
        files, path = fsspec.url_to_fs(self.url)
        with suppress(FileNotFoundError):
            files.rm_file(path)


def stored_chunks(directory: str) -> list[DiskChunk]:
    """Return the chunks of earlier versions in a directory, for example of a Trainer that has died. Blocking."""
    files, path = fsspec.url_to_fs(directory)
    with suppress(FileNotFoundError):
        names = [str(name).rpartition("/")[2] for name in files.ls(path, detail=False)]
        return [
            DiskChunk(str(files.unstrip_protocol(f"{path.rstrip('/')}/{name}")))
            for name in names
            if _NAME.fullmatch(name)
        ]
    return []


def _content(chunk: Mapping[str, NDArray[Any]]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file: the length of the header, the header, and the tensors. Larger elements
    come first, so that all are aligned."""
    ordered = sorted(chunk.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header, begin = {}, 0
    for name, array in ordered:
        offsets = [begin, begin + array.nbytes]
        header[name] = {"dtype": _TYPES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        begin += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, array in ordered:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _arrays(content: Any) -> dict[str, NDArray[Any]]:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    arrays = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        begin, end = item["data_offsets"]
        dtype = _ARRAYS[item["dtype"]]
        flat = np.frombuffer(content, dtype, (end - begin) // dtype.itemsize, 8 + length + begin)
        arrays[name] = flat.reshape(item["shape"])
    return arrays
