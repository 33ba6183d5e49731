"""Which samples a run keeps for `asyncrl show`, and their files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.core.types import SampleId
from asyncrl.storage.array_bytes import DamageError, encode
from asyncrl.storage.array_bytes import decode as decode_blob
from asyncrl.storage.recent_samples import (
    _ARRAYS,
    _DTYPES,
    REMARKABLE,
    KeptRewards,
    RecentSample,
    RecentSamples,
    choose_kept,
    chosen_trajectory,
    list_recent,
    oddness,
    ranked,
    read_recent,
    recent_names,
)
from rollouter.trajectory_dump import describe
from tests.fakes import hostile
from tests.fakes.dumped import SCORES, decode, group, prompt, sample

REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> list[KeptRewards]:
    sizes = draw(st.lists(st.integers(1, 50), max_size=60))
    return [KeptRewards(str(SampleId(0, i + 1)), float(i), size, draw(REWARDS)) for i, size in enumerate(sizes)]


@given(runs(), st.integers(1, 40), st.integers(10, 400))
def test_the_limits_hold_and_the_newest_sample_that_fits_is_kept(
    samples: list[KeptRewards], most: int, max_bytes: int
) -> None:
    names = choose_kept(samples, most, max_bytes)
    assert len(names) <= most
    assert sum(one.num_bytes for one in samples if one.name in names) <= max_bytes
    if samples and samples[-1].num_bytes <= max_bytes:
        assert samples[-1].name in names
    assert choose_kept([one for one in samples if one.name in names], most, max_bytes) == names


@given(runs(), st.integers(4 * REMARKABLE, 100))
def test_remarkable_samples_of_a_whole_run_stay(samples: list[KeptRewards], most: int) -> None:
    """Each sample arrives after the ones before it have been chosen from."""
    kept: list[KeptRewards] = []
    for one in samples:
        names = choose_kept([*kept, one], most)
        kept = [each for each in (*kept, one) if each.name in names]
    names = {one.name for one in kept}
    for choice in ("lowest", "highest", "oddest"):
        for one in ranked(samples, choice)[:3]:
            assert one.name in names
    assert {one.name for one in ranked(samples, "newest")[: most // 2]} <= names


def test_odd_means_far_from_the_mean_of_the_group() -> None:
    assert oddness([0.0, 0.0, 0.0, 1.0]) == 0.75 and chosen_trajectory([0.0, 0.0, 0.0, 1.0], "oddest") == 3
    assert oddness([1.0, 1.0]) == oddness([5.0]) == oddness([]) == 0.0
    assert chosen_trajectory([2.0, -1.0, 5.0], "lowest") == 1
    assert chosen_trajectory([2.0, -1.0, 5.0], "highest") == 2
    assert chosen_trajectory([2.0, -1.0, 5.0], "newest") == 0


def add(kept: RecentSamples, index: int, at: float = 0.5) -> None:
    entries = describe(sample(index), prompt(), group(), SCORES, None, run="/runs/one", at=at)
    assert kept.add([RecentSample(tuple(entries), tuple(bool(one.messages) for one in group()))]) == {}


def test_a_kept_sample_has_everything_that_a_dumped_one_has(tmp_path: Path) -> None:
    kept = RecentSamples(tmp_path / "kept", 10)
    add(kept, 42)
    expected = describe(sample(42), prompt(), group(), SCORES, decode, run="/runs/one", at=0.5)
    found = read_recent(tmp_path / "kept", "sample_0_42").with_texts(decode)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.trajectory.rows, other.trajectory.rows, strict=True):
            for name in ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs"):
                assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
            assert mine.spans == theirs.spans
        assert one.texts == other.texts
        assert [dict(message) for message in one.trajectory.messages] == [dict(m) for m in other.trajectory.messages]
        assert (one.trajectory.turns, one.score, one.sample_id) == (
            other.trajectory.turns,
            other.score,
            other.sample_id,
        )
        assert (one.ground_truth, one.data_source, one.num_trajectories) == ("42", "arithmetic", 2)


def test_older_samples_are_deleted_also_after_a_restart(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    for index in range(1, 5):
        add(RecentSamples(directory, 3), index, at=float(index))
    assert {SampleId.parse(name).index for name in recent_names(directory)} == {2, 3, 4}
    assert recent_names(directory, {3, 9}) == ["sample_0_3"]
    add(RecentSamples(directory, 3), 4, at=9.0)
    assert {one.name: one.at for one in list_recent(directory)} == {
        "sample_0_2": 2.0, "sample_0_3": 3.0, "sample_0_4": 9.0}  # fmt: skip
    assert all(
        one.num_bytes == (directory / f"{one.name}.safetensors").stat().st_size for one in list_recent(directory)
    )


def test_a_damaged_file_is_reported_and_does_not_hide_the_others(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    add(RecentSamples(directory, 3), 1)
    add(RecentSamples(directory, 3), 2)
    path = directory / "sample_0_1.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    (directory / "sample_0_x.safetensors").write_text("?")
    assert [one.name for one in list_recent(directory)] == ["sample_0_2"]
    with pytest.raises((DamageError, ValueError)):
        read_recent(directory, "sample_0_1")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_description_in_a_kept_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "kept"
    add(RecentSamples(directory, 3), 1)
    path = directory / "sample_0_1.safetensors"
    blob = decode_blob(np.frombuffer(path.read_bytes(), np.uint8))
    lines = json.loads(blob.array("lines", np.uint8).tobytes())
    text = data.draw(hostile.damaged(lines).map(hostile.dumps) | st.sampled_from(hostile.BROKEN_JSON))
    arrays = {name: blob.array(name, dtype) for name, dtype in zip(_ARRAYS, _DTYPES, strict=True)}
    arrays["lines"] = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
    path.write_bytes(b"".join(encode(arrays, blob.texts)))
    with suppress(DamageError, ValueError):
        read_recent(directory, "sample_0_1").with_texts(decode)
    list_recent(directory)
