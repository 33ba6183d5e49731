"""What is kept of one stage at one step, and its bytes. Pure.

    manifest.json         {"schema", "role", "step", "fingerprint", "origin", "content", "tensors", "crc32"}
    tensors.safetensors   the arrays (`asyncrl.blobs`), each with its checksum

The manifest comes last when a record is written, names the length and the header's checksum of the tensors, and ends
with a checksum of itself: what is torn, damaged or put together from two records is seen before anything of it is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.blobs import DamageError, decode, encode
from skip.fingerprint import Fingerprint

SCHEMA = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a record. Kept for people, and for whoever has to know under which weights it was made."""

    recorded_at: float
    """Unix seconds."""
    host: str
    oldest_version: int | None = None
    """Of the policy, over all tokens in the record; None: no policy had a part in it."""
    newest_version: int | None = None
    code: str = ""
    """Version of the package."""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a role makes of a result, and makes a result of again."""

    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """1-D; int32, float32 or bool."""
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
    """The manifest's bytes, and the buffers of the tensors' file.

    Raises:
        TypeError, ValueError: the content is none that can be kept: an object in `data` that JSON has not, NaN among
            its numbers, or arrays of another dtype.
    """
    arrays = {name: _flat(name, array) for name, array in record.content.arrays.items()}
    buffers = encode(arrays, {})
    manifest = {
        "schema": SCHEMA,
        "role": record.role,
        "step": record.step,
        "fingerprint": dict(record.fingerprint),
        "origin": {name: getattr(record.origin, name) for name in Origin.__slots__},
        "content": dict(record.content.data),
        "tensors": {"bytes": sum(map(len, buffers)), "crc32": f"{zlib.crc32(buffers[0]):08x}"},
    }
    # A line for each key. `indent` would be nicer still, and takes ten times as long: it is not in C.
    lines = [f' "{key}": {_encode(value)}' for key, value in manifest.items()]
    return _sealed("{\n" + ",\n".join(lines)), buffers


def from_files(manifest: bytes, tensors: NDArray[np.uint8]) -> Record:
    """What `to_files` made bytes of; the arrays are read-only views of `tensors`, all of them checked.

    Raises:
        DamageError: torn, damaged, of two records, or none at all; the message says what is wrong.
    """
    parsed = read_manifest(manifest)
    blob = decode(tensors)
    told = parsed["tensors"]
    head = 8 + int.from_bytes(tensors[:8].tobytes(), "little")
    if told != {"bytes": tensors.size, "crc32": f"{zlib.crc32(tensors[:head].data):08x}"}:
        raise DamageError(f"{TENSORS} is not the file that {MANIFEST} is about")
    arrays = {name: blob.array(name, dtype) for name, dtype in blob.dtypes().items()}
    return _record(parsed, arrays)


def describe(manifest: bytes) -> Record:
    """The record without its arrays.

    Raises:
        DamageError: as `from_files`.
    """
    return _record(read_manifest(manifest), {})


def read_manifest(manifest: bytes) -> dict[str, Any]:
    """The parsed manifest, its checksum and its shape checked.

    Raises:
        DamageError: it is damaged, of another schema, or none.
    """
    body, mark, seal = manifest.rpartition(b',\n "crc32": "')
    if not mark or seal != f'{zlib.crc32(body):08x}"\n}}\n'.encode():
        raise DamageError(f"{MANIFEST} is torn or damaged")
    try:
        parsed = json.loads(manifest)
    except ValueError as error:
        raise DamageError(f"{MANIFEST} is no JSON") from error
    if parsed.get("schema") != SCHEMA:
        raise DamageError(f"{MANIFEST} has schema {parsed.get('schema')}, and {SCHEMA} is what this version reads")
    match parsed:
        case {
            "role": str(),
            "step": int(),
            "fingerprint": dict(),
            "origin": dict(origin),
            "content": dict(),
            "tensors": {"bytes": int(), "crc32": str()},
        } if origin.keys() == set(Origin.__slots__):
            return parsed
    raise DamageError(f"{MANIFEST} is none of a record")


def _record(parsed: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Record:
    return Record(
        role=parsed["role"],
        step=parsed["step"],
        fingerprint=parsed["fingerprint"],
        origin=Origin(**parsed["origin"]),
        content=Content(arrays, parsed["content"]),
    )


def _sealed(body: str) -> bytes:
    text = body.encode()
    return text + f',\n "crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()


def _flat(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1:
        raise ValueError(f"array {name} has {array.ndim} dimensions, not one; keep its shape in `data`")
    return np.ascontiguousarray(array)
