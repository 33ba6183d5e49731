"""Random access to the rows of data files, in bounded memory.

    .jsonl, .ndjson    one JSON object in each line
    .json              a list of objects, or JSON lines
    .parquet           converted once to an Arrow file in the cache

JSON files are read where they are: an index in the cache has the place of each row, and a checksum. A row that changes
after its file was indexed is an error.
"""

from __future__ import annotations

import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pyarrow.parquet import ParquetFile

from asyncrl.core.failures import DataError
from asyncrl.core.text import parse_json
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.files import DataFile, content_digest
from rollouter.user_code import shown

_FORMAT = "1"
"""Changes if the files of this module have another format."""
_BATCH_ROWS = 100
_INDEX, _TABLE, _ENDS = "index.npy", "rows.arrow", "ends.npy"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb"|[\[\]{},]", re.DOTALL)


class RowSpan(NamedTuple):
    """Where a JSON file has a row."""

    start: int
    """In bytes, as `length`."""
    length: int
    number: int
    """Number of the line, or of the entry of a list, from 1."""


class IndexedRows(ABC):
    """The rows of one file."""

    def __init__(self, file: DataFile, content: str) -> None:
        self.file = file
        self.content = content
        """A digest of the file's content."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Mapping[str, Any]:
        """Return a raw row. Raises `DataError` if it cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Return file and row number, for messages."""


def open_rows(file: DataFile, cache: DataCache, content: str | None = None) -> IndexedRows:
    """Index or convert a file, unless the cache has it.

    Args:
        content: the digest of the content, if it is known.

    Raises:
        DataError: the file cannot be read; the message names it.
        ConfigError, DiskFullError: the cache cannot be written.
    """
    content = content_digest(file.path) if content is None else content
    key = f"{content}-{file.suffix.removeprefix('.')}-{_FORMAT}"
    kind = _TableRows if file.suffix == ".parquet" else _JsonRows
    if entry := cache.find("rows", key):
        try:
            return kind(file, content, entry)
        except (OSError, ValueError, pa.ArrowException):  # damaged: make it again
            cache.discard(entry)
    with cache.building() as begun:
        if kind is _JsonRows:
            _write_index(file, begun / _INDEX)
        else:
            _write_table(file, begun / _TABLE)
        return kind(file, content, cache.commit(begun, "rows", key))


# ------------------------------------------------------------------------------------------------ JSON


class _JsonRows(IndexedRows):
    def __init__(self, file: DataFile, content: str, entry: Path) -> None:
        super().__init__(file, content)
        self._index: NDArray[np.int64] = np.load(entry / _INDEX, mmap_mode="r").view(np.ndarray)
        self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        self._unit = "entry" if is_list_file(file) else "line"

    def __len__(self) -> int:
        return len(self._index)

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def row(self, index: int) -> Mapping[str, Any]:
        start, length, _, checksum = self._index[index].tolist()
        raw = os.pread(self._descriptor, length, start)
        if _checksum(raw) != checksum:
            raise DataError(
                f"{self.where(index)}: the file has changed since the run began, so the run no longer has its prompts; "
                "restore it, and continue with resume=auto"
            )
        return json_row(raw, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.file.name}, {self._unit} {self._index[index, 2]}"


def json_row(row: str | bytes, where: str) -> Mapping[str, Any]:
    """Return the raw row that is written as JSON.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        value = parse_json(row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: {shown(value, 80)} is not a JSON object")
    return value


def json_spans(file: DataFile) -> Iterator[RowSpan]:
    """Yield the place of each row of a JSON file in its order.

    Raises:
        DataError: a list does not end, or something follows it.
        OSError: the file cannot be read.
    """
    if not is_list_file(file):
        yield from _line_spans(file)
        return
    with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield from list_spans(content, file.name)


def read_spans(file: DataFile) -> Iterator[tuple[bytes, RowSpan]]:
    """Yield the text and the place of each row of a JSON file. Raises as `json_spans`."""
    with file.path.open("rb") as stream:
        for span in json_spans(file):
            stream.seek(span.start)
            yield stream.read(span.length), span


def is_list_file(file: DataFile) -> bool:
    """Return whether a file has its rows in a JSON list."""
    if file.suffix != ".json":
        return False
    with file.path.open("rb") as stream:
        return is_list(stream.read(4096))


def is_list(head: bytes) -> bool:
    """Return whether a .json file that begins so is a list; otherwise it has one object in each line."""
    return head.lstrip().startswith(b"[")


def _line_spans(file: DataFile) -> Iterator[RowSpan]:
    start = 0
    with file.path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield RowSpan(start, len(line.rstrip(b"\r\n")), number)
            start += len(line)


def list_spans(content: bytes | mmap.mmap, name: str) -> Iterator[RowSpan]:
    """Find the entries of a list by its brackets and commas outside of strings; what is in them is parsed later. Raises
    `DataError` after the last complete entry if the list does not end, or something follows it."""
    depth, number, begun, end = 0, 0, 0, None
    for token in _TOKEN.finditer(content):
        match token[0]:
            case b"[" | b"{":
                depth += 1
                if depth == 1:
                    begun = token.end()
            case b"]" | b"}":
                depth -= 1
                if depth == 0:
                    end = token
                    break
            case b"," if depth == 1:
                number += 1
                yield _entry(content, begun, token.start(), number)
                begun = token.end()
    if end is None or end[0] != b"]":
        raise DataError(f"{name}: it is not JSON: the list that begins it does not end")
    if content[end.end() : end.end() + 4096].strip():
        raise DataError(f"{name}: it is not JSON: something follows the list")
    last = _entry(content, begun, end.start(), number + 1)
    if number or last.length:
        yield last


def _entry(content: bytes | mmap.mmap, start: int, end: int, number: int) -> RowSpan:
    while start < end and content[start : start + 1].isspace():
        start += 1
    while end > start and content[end - 1 : end].isspace():
        end -= 1
    return RowSpan(start, end - start, number)


def _write_index(file: DataFile, target: Path) -> None:
    """Write the index of a JSON file, int64 `[rows, 4]`: the fields of `RowSpan` and a checksum."""
    blocks: list[NDArray[np.int64]] = []
    block: list[tuple[int, int, int, int]] = []
    try:
        for raw, span in read_spans(file):
            block.append((*span, _checksum(raw)))
            if len(block) == 100_000:
                blocks.append(np.array(block, np.int64))
                block.clear()
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read as {file.suffix}: {error}") from error
    blocks.append(np.array(block, np.int64).reshape(-1, 4))
    np.save(target, np.concatenate(blocks))


def _checksum(row: bytes) -> int:
    return xxhash.xxh3_64_intdigest(row) >> 1


# ------------------------------------------------------------------------------------------------ Parquet


class _TableRows(IndexedRows):
    def __init__(self, file: DataFile, content: str, entry: Path) -> None:
        super().__init__(file, content)
        self._ends: NDArray[np.int64] = np.load(entry / _ENDS)
        # Not memory-mapped: pages of a map would count as memory of the process.
        self._reader = pa.ipc.open_file(pa.OSFile(str(entry / _TABLE)))
        if self._reader.num_record_batches != len(self._ends):
            raise ValueError(f"{entry / _TABLE} has {self._reader.num_record_batches} of {len(self._ends)} batches")
        self._last: tuple[int, pa.RecordBatch | None] = (-1, None)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> Mapping[str, Any]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        last, batch = self._last
        if last != number or batch is None:
            batch = self._reader.get_batch(number)
            self._last = (number, batch)
        first = int(self._ends[number - 1]) if number else 0
        row: dict[str, Any] = batch.slice(index - first, 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        return f"{self.file.name}, row {index + 1}"


def table_batches(source: Any, name: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, which is a path or an open file, without its dictionaries.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with ParquetFile(source, pre_buffer=False) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                columns = [
                    column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                    for column in batch.columns
                ]
                yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: cannot be read as .parquet: {error}") from error


def _write_table(file: DataFile, target: Path) -> None:
    writer, sizes = None, []
    try:
        for batch in table_batches(file.path, file.name):
            if writer is None:
                writer = pa.ipc.new_file(str(target), batch.schema)
            writer.write_batch(batch)
            sizes.append(batch.num_rows)
        if writer is None:
            with pa.ipc.new_file(str(target), pa.schema([])):
                pass
    finally:
        if writer is not None:
            writer.close()
    np.save(target.with_name(_ENDS), np.cumsum(np.array(sizes, np.int64)))
