"""A record, the stored result of one stage at one step, and its file format. Pure.

    manifest.json         {"schema", "role", "step", "fingerprint", "origin", "content", "tensors", "crc32"}
    tensors.safetensors   the arrays (`asyncrl.storage.array_bytes`), each with its checksum

The manifest is written last. It contains the length of the tensors' file and the checksum of that file's header, and
ends with a checksum of the manifest. A record that is torn, damaged or mixed from two is detected before its data is
used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.text import MAX_FILE_DEPTH, check_depth, parse_file, shown
from asyncrl.storage.array_bytes import DamageError, decode, encode
from skip.fingerprint import Fingerprint

SCHEMA = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
MAX_MANIFEST_BYTES = 256 << 20
MAX_TENSORS_BYTES = 16 << 30
MAX_SECONDS = 2**53
"""Latest time of a record: larger floats are not exact."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class MalformedRecordError(DamageError):
    """The bytes have the right checksum, but asyncrl does not write such a record."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a record."""

    recorded_at: float
    """Unix seconds."""
    host: str
    oldest_version: int | None = None
    """Oldest and newest version of the policy over all tokens in the record; None: no policy was involved."""
    newest_version: int | None = None
    code: str = ""
    """Version of the package."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The stored form of a result; a role converts results to it and back."""

    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """1-D; int32, float32, bool or uint8."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON types only."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One step of one role."""

    role: str
    step: int
    fingerprint: Fingerprint
    origin: Origin
    content: Content


def to_files(record: Record) -> tuple[bytes, list[memoryview]]:
    """Return the manifest's bytes and the buffers of the tensors' file.

    Raises:
        TypeError, ValueError: the content cannot be stored, because `data` is not JSON, contains NaN or is nested too
            deeply, an array has another dtype, or a file would be too large.
    """
    arrays = {name: _flat(name, array) for name, array in record.content.arrays.items()}
    buffers = encode(arrays, {})
    tensors_bytes = sum(map(len, buffers))
    manifest = {
        "schema": SCHEMA,
        "role": record.role,
        "step": record.step,
        "fingerprint": dict(record.fingerprint),
        "origin": {name: getattr(record.origin, name) for name in Origin.__slots__},
        "content": dict(record.content.data),
        "tensors": {"bytes": tensors_bytes, "crc32": f"{zlib.crc32(buffers[0]):08x}"},
    }
    check_depth(manifest, MAX_FILE_DEPTH)
    # Each key has a line. `indent` would take ten times as long, as it is not implemented in C.
    lines = [f' "{key}": {_encode(value)}' for key, value in manifest.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    body += f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()
    if len(body) > MAX_MANIFEST_BYTES or tensors_bytes > MAX_TENSORS_BYTES:
        raise ValueError(
            f"its files would have {len(body)} and {tensors_bytes} bytes; {MAX_MANIFEST_BYTES} and {MAX_TENSORS_BYTES} "
            "are allowed"
        )
    return body, buffers


def from_files(manifest: bytes, tensors: NDArray[np.uint8]) -> Record:
    """Return the record after verifying all checksums; its arrays are read-only views of `tensors`.

    Raises:
        DamageError: it is torn, damaged, mixed from two records, or not a record (`MalformedRecordError`); the message
            says which.
    """
    parsed = _read_manifest(manifest)
    blob = decode(tensors)
    head = 8 + int.from_bytes(tensors[:8].tobytes(), "little")
    if parsed["tensors"] != {"bytes": tensors.size, "crc32": f"{zlib.crc32(tensors[:head].data):08x}"}:
        raise DamageError(f"{TENSORS} is not the file that {MANIFEST} describes")
    arrays = {name: blob.array(name, dtype) for name, dtype in blob.dtypes().items()}
    origin, content = Origin(**parsed["origin"]), Content(arrays, parsed["content"])
    return Record(parsed["role"], parsed["step"], parsed["fingerprint"], origin, content)


def _read_manifest(manifest: bytes) -> dict[str, Any]:
    """Return the parsed manifest, with its checksum and structure checked. Raises as `from_files` does."""
    body, mark, seal = manifest.rpartition(b',\n "crc32": "')
    if not mark or seal != f'{zlib.crc32(body):08x}"\n}}\n'.encode():
        raise DamageError(f"{MANIFEST} is torn or damaged")
    try:
        parsed = parse_file(manifest)
    except ValueError as error:
        raise MalformedRecordError(f"{MANIFEST} cannot be interpreted: {error}") from error
    if parsed.get("schema") != SCHEMA:
        raise DamageError(
            f"{MANIFEST} has schema {shown(parsed.get('schema'))}, and this version reads schema {SCHEMA}"
        )
    match parsed:
        case {
            "role": str(),
            "step": int(),
            "fingerprint": dict(),
            "origin": {
                "recorded_at": int() | float() as recorded_at,
                "host": str(),
                "oldest_version": int() | None,
                "newest_version": int() | None,
                "code": str(),
                **others,
            },
            "content": dict(),
            "tensors": {"bytes": int(), "crc32": str()},
        } if not others and 0 <= recorded_at <= MAX_SECONDS:
            return parsed
    raise MalformedRecordError(f"{MANIFEST} is not the manifest of a record: a value is missing or has another type")


def _flat(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1:
        raise ValueError(f"array {name} has {array.ndim} dimensions, not one; keep its shape in `data`")
    return np.ascontiguousarray(array)
