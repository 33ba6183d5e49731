"""Encodes arrays and texts as a safetensors file with checksums, and decodes it. Pure.

    8 bytes   length of the header
    header    {"__metadata__": {"crc32": …, "checksums": …, texts}, name: {dtype, shape, data_offsets}, …}, padding
    data      the arrays end to end

Any safetensors reader can read it. `crc32` covers the rest of the header, `checksums` has one for each array (XXH3,
64 bits, which takes a twentieth of a CRC's time), and the lengths must add up, so a torn or damaged file is detected
before its data is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BEGIN = b'{"__metadata__":{"crc32":"'
_DATA_ALIGNMENT = 8


class DamageError(Exception):
    """The bytes differ from those that were written. The message describes the damage."""


class _ArrayEntry(NamedTuple):
    dtype: np.dtype[Any]
    start: int
    """Offset in the data."""
    end: int
    checksum: str


class Blob:
    """Decoded texts and arrays. The checksum of an array is verified on first access."""

    def __init__(self, texts: Mapping[str, str], places: Mapping[str, _ArrayEntry], data: NDArray[np.uint8]) -> None:
        self.texts = texts
        self._places = places
        self._data = data
        self._taken: dict[str, NDArray[Any] | DamageError] = {}

    def __len__(self) -> int:
        return len(self._places)

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return the dtype of each array by name."""
        return {name: place.dtype for name, place in self._places.items()}

    def length(self, name: str) -> int:
        """Return the number of elements of the array; 0: there is no such array."""
        place = self._places.get(name)
        return (place.end - place.start) // place.dtype.itemsize if place else 0

    def array(self, name: str, dtype: type[np.generic] | np.dtype[Any]) -> NDArray[Any]:
        """Return the array as a read-only 1-D view.

        Raises:
            DamageError: the array is missing, or has another checksum or dtype.
        """
        if name not in self._taken:
            try:
                self._taken[name] = self._take(name, np.dtype(dtype))
            except DamageError as error:
                self._taken[name] = error
        taken = self._taken[name]
        if isinstance(taken, DamageError):
            raise taken
        return taken

    def _take(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        place = self._places.get(name)
        if place is None:
            raise DamageError(f"there is no {name}")
        if place.dtype != dtype:
            raise DamageError(f"{name} is {place.dtype}, not {dtype}")
        raw = self._data[place.start : place.end]
        if (found := xxh3_64_hexdigest(raw.data)) != place.checksum:
            raise DamageError(f"checksum of {name} differs: {found}, {place.checksum} was written")
        if dtype == np.bool_ and raw.size and raw.max() > 1:
            raise DamageError(f"{name} has bytes other than 0 and 1")
        view = raw.view(dtype)
        view.flags.writeable = False
        return view


def encode(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> list[memoryview]:
    """Return the buffers to write one after another. `arrays` are 1-D, contiguous and int32, float32, bool or uint8;
    they are not copied.

    Raises:
        ValueError: the texts exceed the limit of a header.
        TypeError: an array has another dtype.
    """
    # Wide dtypes come first, so that each array is aligned to its width.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for name, array in ordered:
        if array.dtype not in _NAMES:
            raise TypeError(f"array {name} is of {array.dtype}; supported are {', '.join(map(str, _NAMES))}")
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": [len(array)], "data_offsets": [start, end]}
    checksums = {name: xxh3_64_hexdigest(array.data) for name, array in ordered}
    header = _dump({"__metadata__": {"crc32": "", "checksums": _dump(checksums), **texts}, **entries}).encode()
    rest = header[len(_BEGIN) :]
    rest += b" " * (-(len(_BEGIN) + 8 + len(rest)) % _DATA_ALIGNMENT)
    num_bytes = len(_BEGIN) + 8 + len(rest)
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {num_bytes} bytes; {MAX_HEADER_BYTES} is the limit of safetensors")
    head = num_bytes.to_bytes(8, "little") + _BEGIN + _checksum(rest).encode() + rest
    return [memoryview(head), *(array.data.cast("B") for _, array in ordered if array.nbytes)]


def decode(data: NDArray[np.uint8]) -> Blob:
    """Decode the output of `encode`. Arrays are views of `data` and verified on first access.

    Raises:
        DamageError: the data is torn, or its header is damaged or of another format.
    """
    if data.size < 8:
        raise DamageError(f"torn: {data.size} bytes")
    num_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if num_bytes > min(data.size - 8, MAX_HEADER_BYTES) or num_bytes % _DATA_ALIGNMENT:
        raise DamageError(f"torn or damaged: {data.size} bytes, and a header of {num_bytes}")
    header = data[8 : 8 + num_bytes].tobytes()
    begin, checksum, rest = header[: len(_BEGIN)], header[len(_BEGIN) : len(_BEGIN) + 8], header[len(_BEGIN) + 8 :]
    if begin != _BEGIN or _checksum(rest).encode() != checksum:
        raise DamageError("checksum of the header differs")
    try:
        texts, checksums, entries = _read_header(header)
        places = _read_places(entries, checksums, data.size - 8 - num_bytes)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"the header cannot be interpreted: {error}") from error
    return Blob(texts, places, data[8 + num_bytes :])


def _read_header(header: bytes) -> tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]:
    parsed = json.loads(header)
    metadata = parsed.pop("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata is not text")
    if "checksums" not in metadata:
        raise ValueError("there are no checksums")
    checksums = json.loads(metadata["checksums"])
    if not isinstance(checksums, dict) or checksums.keys() != parsed.keys():
        raise ValueError("its checksums do not belong to its arrays")
    return metadata, checksums, parsed


def _read_places(entries: Mapping[str, Any], checksums: Mapping[str, Any], data_bytes: int) -> dict[str, _ArrayEntry]:
    """Parse the entries; raise ValueError unless the arrays are contiguous and fill `data_bytes` exactly."""
    places: dict[str, _ArrayEntry] = {}
    at = 0
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": [int(length)], "data_offsets": [int(start), int(end)]}:
                pass
            case _:
                raise ValueError(f"its entry for {name} does not describe an array with one dimension")
        size = _DTYPES[dtype].itemsize if dtype in _DTYPES else 0
        if not size or length < 0 or start != at or start % size or end - start != length * size:
            raise ValueError(f"{name}: {length} elements of {dtype} cannot lie at bytes {start} to {end}")
        places[name] = _ArrayEntry(_DTYPES[dtype], start, end, str(checksums[name]))
        at = end
    if at != data_bytes:
        raise ValueError(f"its arrays have {at} bytes, and the data has {data_bytes}")
    return places


def _checksum(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
