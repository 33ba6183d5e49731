"""Arrays with checksums: the safetensors library can read them, and all damage is detected."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from xxhash import xxh3_64_hexdigest

from asyncrl.storage import array_bytes as blobs
from asyncrl.storage.array_bytes import Blob, DamageError, decode, encode

arrays = st.dictionaries(
    st.text(max_size=4).filter(lambda name: name != "__metadata__"),
    st.sampled_from([np.int32, np.float32, np.bool_]).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 9))),
    max_size=4,
)
SOME = {"mask": np.array([True, False, True]), "ids": np.arange(5, dtype=np.int32), "none": np.empty(0, np.float32)}


def as_bytes(values: dict[str, Any], texts: dict[str, str]) -> bytes:
    return b"".join(encode(values, texts))


def read(data: bytes) -> Blob:
    return decode(np.frombuffer(data, np.uint8))


def take_all(data: bytes) -> None:
    blob = read(data)
    for name, array in SOME.items():
        blob.array(name, array.dtype.type)


@settings(max_examples=50, deadline=None)
@given(arrays, st.dictionaries(st.sampled_from(["file", "samples", "note"]), st.text(max_size=9)))
def test_decoded_arrays_are_unchanged(values: dict[str, Any], texts: dict[str, str]) -> None:
    blob = read(as_bytes(values, texts))
    assert texts.items() <= blob.texts.items()
    for name, array in values.items():
        found = blob.array(name, array.dtype.type)
        assert found.tobytes() == array.tobytes()
        assert found.flags.aligned and not found.flags.writeable


def test_the_safetensors_library_reads_the_format(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(as_bytes(SOME, {"file": "näme"}))
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(SOME)
        assert file.metadata()["file"] == "näme"
        for name, array in SOME.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_every_flipped_bit_is_detected() -> None:
    whole = as_bytes(SOME, {"file": "x"})
    take_all(whole)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError):
            take_all(bytes(damaged))


def test_bytes_missing_or_added_at_the_end_are_detected() -> None:
    whole = as_bytes(SOME, {"file": "x"})
    for num_bytes in range(len(whole)):
        with pytest.raises(DamageError):
            read(whole[:num_bytes])
    with pytest.raises(DamageError, match="cannot be interpreted"):
        read(whole + b"\0")


def test_an_array_of_another_name_or_dtype_is_refused() -> None:
    blob = read(as_bytes(SOME, {}))
    with pytest.raises(DamageError, match="there is no other"):
        blob.array("other", np.int32)
    with pytest.raises(DamageError, match="ids is int32, not float32"):
        blob.array("ids", np.float32)


def forge(entries: Any, checksums: Any = None, metadata: Any = None, data: bytes = b"") -> bytes:
    """Return a file that has a forged header with a correct checksum."""
    names = entries if isinstance(entries, dict) else {}
    sums = json.dumps({name: xxh3_64_hexdigest(b"") for name in names} if checksums is None else checksums)
    own_metadata = {"crc32": "", "checksums": sums} if metadata is None else metadata
    header = json.dumps({"__metadata__": own_metadata, **entries}, separators=(",", ":")).encode()
    begin, rest = header[:26], header[26:]
    rest += b" " * (-(len(header) + 8) % 8)
    return (
        (len(header) + 8 + len(rest) - len(header[26:])).to_bytes(8, "little")
        + begin
        + (f"{zlib.crc32(rest):08x}".encode() + rest + data)
    )


def entry(dtype: Any = "I32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_correct_forged_header_is_accepted() -> None:
    data = np.arange(2, dtype=np.int32).tobytes()
    blob = read(forge({"a": entry()}, {"a": xxh3_64_hexdigest(data)}, data=data))
    assert blob.array("a", np.int32).tolist() == [0, 1]


@pytest.mark.parametrize(
    "forged",
    [
        forge({"a": entry()}),
        forge({"a": entry(shape=(2**62,), offsets=(0, 2**64))}),
        forge({"a": entry(shape=(-2,), offsets=(0, -8))}),
        forge({"a": entry(offsets=(-8, 0))}, data=b"\0" * 8),
        forge({"a": entry(), "b": entry()}, data=b"\0" * 8),
        forge({"a": entry(), "b": entry(offsets=(16, 24))}, data=b"\0" * 24),
        forge({"a": entry("BOOL", (1,), (0, 1)), "b": entry("I32", (1,), (1, 5))}, data=b"\0" * 5),
        forge({"a": entry("F64")}, data=b"\0" * 8),
        forge({"a": entry(shape=(1, 2))}, data=b"\0" * 8),
        forge({"a": entry(shape=())}, data=b"\0" * 8),
        forge({"a": entry(dtype=["I32"])}, data=b"\0" * 8),
        forge({"a": 5}),
        forge({"a": None}),
        forge({}, {"a": "0"}),
        forge({}, []),
        forge({}, metadata={"crc32": ""}),
        forge({}, metadata={"crc32": "", "checksums": "["}),
        forge({}, metadata={"crc32": "", "checksums": {}}),
        b"\xff" * 64,
        b"",
    ],
)
def test_a_forged_header_is_refused(forged: bytes) -> None:
    with pytest.raises(DamageError):
        read(forged)


def test_booleans_other_than_0_and_1_are_refused() -> None:
    data = b"\1\2"
    forged = forge({"a": entry("BOOL", (2,), (0, 2))}, {"a": xxh3_64_hexdigest(data)}, data=data)
    with pytest.raises(DamageError, match="other than 0 and 1"):
        read(forged).array("a", np.bool_)


def test_texts_longer_than_a_header_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_HEADER_BYTES", 200)
    with pytest.raises(ValueError, match="200"):
        encode({}, {"long": "x" * 200})
