"""Versions as safetensors files in a directory that all nodes share, or at another URL of fsspec (`backend: disk`).

A file appears under its name only once it is complete. The engines of a node map it and share the pages. A file of
another storage is fetched once per node: the first process that needs it copies it into the temporary directory, and
the copy is deleted when the last process has ended its use. bfloat16 values are uint16 in arrays and BF16 in files, so
other programs can read the files.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
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

    @property
    def name(self) -> str:
        """The name of the file, which no other file has."""
        return self.url.rpartition("/")[2]

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
                write_tensors(part, chunk)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)  # what a full disk leaves would keep it full
        else:
            files.pipe_file(path, b"".join(_content(chunk)))  # object stores show an object once it is complete
        # An absolute URL, because engines have other working directories.
        return cls(str(files.unstrip_protocol(path)))

    def get(self, *, in_memory: bool = False) -> Mapping[str, NDArray[Any]]:
        """Map the file, or this node's copy of it. Blocking. The arrays are read-only.

        Args:
            in_memory: Read a file of another storage into memory instead of copying it to this node.

        Raises:
            OSError: the file is missing or cannot be read, or the node has no room for a copy.
            ValueError: the file is damaged.
        """
        files, path = fsspec.url_to_fs(self.url)
        try:
            if isinstance(files, LocalFileSystem):
                return read_tensors(Path(path))
            if in_memory:
                return _arrays(files.cat_file(path))
            return node_copy(self.name, lambda part: files.get_file(path, str(part)))
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


def _map(file: int) -> mmap.mmap:
    return mmap.mmap(file, 0, access=mmap.ACCESS_READ)


def node_copy(name: str, write: Callable[[Path], object]) -> dict[str, NDArray[Any]]:
    """Map this node's copy of the file `name`. If there is none, `write` writes it to the path that it is given, while
    other processes wait. The copy has a shared lock while it is in use."""
    folder = Path(tempfile.gettempdir()) / f"asyncrl-weights-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user; set TMPDIR to a directory of your own")
    copy = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process fetches, and the others wait for it
        try:
            file = os.open(copy, os.O_RDONLY)
        except FileNotFoundError:
            _delete_unused(folder)
            part = copy.with_name(f"{copy.name}.part")
            try:
                write(part)
                part.replace(copy)
            finally:
                part.unlink(missing_ok=True)
            file = os.open(copy, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        content = _map(file)
    except BaseException:
        _release(copy, file)
        raise
    weakref.finalize(content, _release, copy, file)
    return _arrays(content)


def _release(copy: Path, file: int) -> None:
    """Delete the copy, which is the open file, if no other process uses it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_nlink:  # otherwise another process has deleted it, and `copy` may be a new one
            copy.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(file)


def _delete_unused(folder: Path) -> None:
    """Delete copies of processes that were killed. The caller has the folder's lock."""
    for path in filter(lambda path: _NAME.fullmatch(path.name), folder.iterdir()):
        with suppress(FileNotFoundError):
            _release(path, os.open(path, os.O_RDONLY))


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Map the tensors of a safetensors file. Raises `OSError`; `ValueError`, `KeyError` or `TypeError` if it is
    damaged."""
    with path.open("rb") as stream:
        return _arrays(_map(stream.fileno()))


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensors into a safetensors file. Blocking. Raises `OSError`."""
    with path.open("wb") as stream:
        stream.writelines(_content(tensors))


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
