"""Packing is lossless in any combination of samples, and invalid descriptions are refused."""

from __future__ import annotations

import json
import pickle
import threading
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import DeadlineError
from asyncrl.core.types import FinishReason, Media, Row, Sample, SampleId, Span
from asyncrl.queue import payloads
from asyncrl.storage.array_bytes import DamageError, decode, encode
from asyncrl.storage.sample_bytes import JOIN_BELOW_TOKENS, PackedBlob, pack, to_blob, unpack
from tests.fakes.samples import assert_same_sample, make_sample, samples

LONG = make_sample(7, tokens=JOIN_BELOW_TOKENS + 3)


def through_bytes(originals: list[Sample], texts: dict[str, str] | None = None) -> PackedBlob:
    arrays, own = to_blob(pack(originals))
    return PackedBlob(decode(np.frombuffer(b"".join(encode(arrays, {**own, **(texts or {})})), np.uint8)))


@settings(max_examples=50, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4))
def test_packed_samples_are_unpacked_unchanged(originals: list[Sample]) -> None:
    packed = pickle.loads(pickle.dumps(pack(originals), protocol=5))
    for position, original in enumerate(originals):
        assert_same_sample(unpack(packed, position), original)


@settings(max_examples=50, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4), st.booleans())
def test_samples_from_a_file_are_unchanged(originals: list[Sample], with_a_long_one: bool) -> None:
    originals = [LONG] * with_a_long_one + originals
    packed = through_bytes(originals)
    for position in reversed(range(len(originals))):
        assert_same_sample(packed.unpack(position), originals[position])


def test_text_with_a_lone_surrogate_survives_a_file() -> None:
    original = replace(make_sample(1), data_source='\ud800"\\\0')
    assert_same_sample(through_bytes([original]).unpack(0), original)


def test_arrays_from_a_file_are_read_only() -> None:
    sample = through_bytes([make_sample(1)]).unpack(0)
    with pytest.raises(ValueError, match="read-only"):
        sample.rows[0].response_ids[0] = 5


def descriptions(sample: Sample) -> Any:
    return json.loads(to_blob(pack([sample]))[1]["samples"])


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("value", [-1, 10**6, 10**30, 0.5, "0", None])
def test_a_description_that_does_not_fit_the_arrays_is_refused(place: int, value: Any) -> None:
    changed = descriptions(make_sample(1))
    changed[0]["rows"][1][place] = value
    packed = through_bytes([make_sample(1)], {"samples": json.dumps(changed)})
    with pytest.raises((ValueError, DamageError)):
        packed.unpack(0)


@pytest.mark.parametrize(
    "samples_text",
    ["", "{}", "[1]", "[{}]", "[[]]", '[{"sample_id": [0, 0]}]', "[" * 100_000, "9" * 10_000],
)
def test_an_invalid_list_of_descriptions_is_refused(samples_text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        through_bytes([make_sample(1)], {"samples": samples_text}).unpack(0)


@pytest.mark.parametrize(
    ("media", "error", "message"),
    [
        *((value, ValueError, "invalid: media") for value in (5, [5], [["image"]], [["sound", 0]], [["image", "0"]])),
        ({"image": 0}, ValueError, "invalid: media"),
        ([["image", 7]], DamageError, r"no media\.7"),
    ],
)
def test_invalid_media_are_refused(media: Any, error: type[Exception], message: str) -> None:
    original = replace(make_sample(1), media=(Media("image", b"x"),))
    changed = [{**descriptions(original)[0], "media": media}]
    with pytest.raises(error, match=message):
        through_bytes([original], {"samples": json.dumps(changed)}).unpack(0)


def test_a_missing_position_is_refused() -> None:
    packed = through_bytes([make_sample(1)])
    for position in (-1, 1):
        with pytest.raises(ValueError, match="1 samples"):
            packed.unpack(position)


def test_an_array_of_another_dtype_is_refused() -> None:
    ones = np.ones(2, dtype=np.int32)
    row = Row(ones, ones, ones, np.zeros(2, np.float32), (Span(0, 0),), FinishReason.STOP, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bool"):
        pack([Sample(SampleId(0, 1), (row,))])


async def test_a_put_that_the_object_store_does_not_accept_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = threading.Event()
    monkeypatch.setattr(payloads.ray, "put", lambda packed: full.wait())
    try:
        with anyio.fail_after(5), pytest.raises(DeadlineError, match=r"did not take 1 sample payloads \(\d+ bytes\)"):
            await payloads.RayPayloads(0.05).put(make_sample(1))
    finally:
        full.set()


# ------------------------------------------------------------------------------------------------ images and videos


def test_an_image_shared_by_several_samples_is_stored_once() -> None:
    image, other = Media("image", b"\x89PNG" * 100), Media("video", b"GIF")
    originals = [replace(make_sample(1), media=(image, other)), replace(make_sample(2), media=(image,)), make_sample(3)]
    arrays, _ = to_blob(pack(originals))
    assert sorted(name for name in arrays if name.startswith("media")) == ["media.0", "media.1"]
    packed = through_bytes(originals)
    for position, original in enumerate(originals):
        assert_same_sample(packed.unpack(position), original)


def test_samples_without_images_have_no_entry_for_them() -> None:
    arrays, texts = to_blob(pack([make_sample(1)]))
    assert "media" not in texts["samples"] and not any(name.startswith("media") for name in arrays)
