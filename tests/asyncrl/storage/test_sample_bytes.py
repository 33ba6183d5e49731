"""Packing is lossless, whatever the samples are packed with."""

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
def test_what_was_packed_comes_back(originals: list[Sample]) -> None:
    packed = pickle.loads(pickle.dumps(pack(originals), protocol=5))
    for position, original in enumerate(originals):
        assert_same_sample(unpack(packed, position), original)


@settings(max_examples=50, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4), st.booleans())
def test_what_was_packed_for_a_file_comes_back(originals: list[Sample], with_a_long_one: bool) -> None:
    originals = [LONG] * with_a_long_one + originals
    packed = through_bytes(originals)
    for position in reversed(range(len(originals))):
        assert_same_sample(packed.unpack(position), originals[position])


def test_text_that_is_no_unicode_survives_a_file() -> None:
    original = replace(make_sample(1), data_source='\ud800"\\\0')
    assert_same_sample(through_bytes([original]).unpack(0), original)


def test_arrays_out_of_a_file_cannot_be_written_to() -> None:
    sample = through_bytes([make_sample(1)]).unpack(0)
    with pytest.raises(ValueError, match="read-only"):
        sample.rows[0].response_ids[0] = 5


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("value", [-1, 10**6, 10**30, 0.5, "0", None])
def test_a_description_that_does_not_fit_the_arrays_is_refused(place: int, value: Any) -> None:
    descriptions = json.loads(to_blob(pack([make_sample(1)]))[1]["samples"])
    descriptions[0]["rows"][1][place] = value
    packed = through_bytes([make_sample(1)], {"samples": json.dumps(descriptions)})
    with pytest.raises((ValueError, DamageError)):
        packed.unpack(0)


@pytest.mark.parametrize(
    "samples_text",
    ["", "{}", "[1]", "[{}]", "[[]]", '[{"sample_id": [0, 0]}]', "[" * 100_000, "9" * 10_000],
)
def test_descriptions_that_are_none_are_refused(samples_text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        through_bytes([make_sample(1)], {"samples": samples_text}).unpack(0)


def test_a_position_that_is_not_there_is_refused() -> None:
    packed = through_bytes([make_sample(1)])
    for position in (-1, 1):
        with pytest.raises(ValueError, match="1 samples"):
            packed.unpack(position)


def test_an_array_of_another_kind_is_refused() -> None:
    ones = np.ones(2, dtype=np.int32)
    row = Row(ones, ones, ones, np.zeros(2, np.float32), (Span(0, 0),), FinishReason.STOP, 0.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bool"):
        pack([Sample(SampleId(0, 1), (row,))])


async def test_an_object_store_that_does_not_take_a_payload_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a cancellation reach the call: it belongs to all whose samples are in it."""
    full = threading.Event()
    monkeypatch.setattr(payloads.ray, "put", lambda packed: full.wait())
    try:
        with anyio.fail_after(5), pytest.raises(DeadlineError, match=r"did not take 1 sample payloads \(\d+ bytes\)"):
            await payloads.RayPayloads(0.05).put(make_sample(1))
    finally:
        full.set()


# ------------------------------------------------------------------------------------------------ images and videos


def test_an_image_that_several_samples_have_is_stored_once() -> None:
    image, other = Media("image", b"\x89PNG" * 100), Media("video", b"GIF")
    originals = [replace(make_sample(1), media=(image, other)), replace(make_sample(2), media=(image,)), make_sample(3)]
    arrays, _ = to_blob(pack(originals))
    assert sorted(name for name in arrays if name.startswith("media")) == ["media.0", "media.1"]
    packed = through_bytes(originals)
    for position, original in enumerate(originals):
        assert_same_sample(packed.unpack(position), original)


def test_samples_without_images_are_written_as_if_there_were_none() -> None:
    arrays, texts = to_blob(pack([make_sample(1)]))
    assert "media" not in texts["samples"] and not any(name.startswith("media") for name in arrays)


@pytest.mark.parametrize("told", [5, [5], [["image"]], [["sound", 0]], [["image", "0"]], {"image": 0}])
def test_a_description_of_media_that_is_none_is_refused(told: Any) -> None:
    original = replace(make_sample(1), media=(Media("image", b"x"),))
    _, texts = to_blob(pack([original]))
    samples_ = json.loads(texts["samples"])
    samples_[0]["media"] = told
    with pytest.raises(ValueError, match="media is invalid"):
        through_bytes([original], {"samples": json.dumps(samples_)}).unpack(0)


def test_media_whose_bytes_are_not_there_are_damage() -> None:
    original = replace(make_sample(1), media=(Media("image", b"x"),))
    _, texts = to_blob(pack([original]))
    samples_ = json.loads(texts["samples"])
    samples_[0]["media"] = [["image", 7]]
    with pytest.raises(DamageError, match=r"no media\.7"):
        through_bytes([original], {"samples": json.dumps(samples_)}).unpack(0)
