"""The dispatcher with recorded samples: a replayed sample needs no engine and is marked as replayed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.sections.skip import SkipConfig
from asyncrl.config.sections.trainer import TrainerConfig
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.ports import Lease, Publication, WeightsVersion
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import DropReason, Prompt, Provenance, Sample, Span, Turn
from rollouter.coverage import RemainingSamples, UnavailableFleet, first_uncovered
from rollouter.sample_runner import ServedVersion
from rollouter.validation.validator import Validator
from skip import SkipManager
from skip.store import find
from tests.fakes.dispatcher import DispatcherRig, leased_samples
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, ListPrompts, make_prompt


def recording(tmp_path: Path, role: str = "async_rollout", **settings: Any) -> SkipConfig:
    section = {"enable": True, "steps": "all", "dump_dir": str(tmp_path), **settings}
    return SkipConfig.model_validate({role: section})


async def run(rig: DispatcherRig, number: int, *, trainer_version: int = 0) -> list[Sample]:
    """Return the first `number` samples of the rig, sorted by index."""
    with SkipManager.session(rig.config):
        async with rig.running():
            lease: Lease = await rig.lease(number, trainer_version=trainer_version)
    return sorted(leased_samples(lease), key=lambda sample: sample.sample_id.index)


async def run_indices(rig: DispatcherRig, number: int) -> list[int]:
    """Return the indices of the first `number` samples of the rig."""
    return [sample.sample_id.index for sample in await run(rig, number)]


def fast(tmp_path: Path, total: int, **options: Any) -> DispatcherRig:
    """Return a rig that records `total` samples, with engines that answer at once."""
    return DispatcherRig(**{"skip": recording(tmp_path), "fleet": FakeFleet(), "total": total} | options)


def idle(tmp_path: Path, total: int, **options: Any) -> DispatcherRig:
    """Return the rig of `fast` with engines that never answer."""
    return fast(tmp_path, total, fleet=FakeFleet(hold=True), **options)


def assert_same_tokens(one: Sequence[Sample], other: Sequence[Sample]) -> None:
    assert [sample.sample_id for sample in one] == [sample.sample_id for sample in other]
    for first, second in zip(one, other, strict=True):
        for mine, yours in zip(first.rows, second.rows, strict=True):
            np.testing.assert_array_equal(mine.prompt_ids, yours.prompt_ids)
            np.testing.assert_array_equal(mine.response_ids, yours.response_ids)
            np.testing.assert_array_equal(mine.rollout_log_probs, yours.rollout_log_probs)
            assert mine.finish_reason == yours.finish_reason


async def test_recorded_samples_are_replayed_without_an_engine(tmp_path: Path) -> None:
    recorded = await run(fast(tmp_path, 6), 6)
    assert {sample.provenance for sample in recorded} == {Provenance.GENERATED}
    second = idle(tmp_path, 6)
    replayed = await run(second, 6)
    assert second.fleet.sessions == []
    assert second.dispatcher.runner.counts.generated_tokens == 0
    assert_same_tokens(recorded, replayed)
    assert {sample.provenance for sample in replayed} == {Provenance.REPLAYED}
    for before, after in zip(recorded, replayed, strict=True):
        assert after.replay is not None
        assert (after.replay.step, after.replay.substituted) == (before.sample_id.index, False)
        assert after.replay.spans == tuple(row.spans for row in before.rows)
        assert [row.spans for row in after.rows] == [row.spans for row in before.rows]
    counts = (await second.queue.status()).counts
    assert (counts.replayed, counts.substituted) == (6, 0)
    assert second.dispatcher.status()["skip"] == {}


async def test_replayed_tokens_have_the_recorded_or_the_current_version(tmp_path: Path) -> None:
    await run(fast(tmp_path, 2), 2)
    second = idle(tmp_path, 2, skip=recording(tmp_path, replay_versions="current"))
    second.served_version = ServedVersion(7, 21)
    for sample in await run(second, 2, trainer_version=7):
        assert {row.spans for row in sample.rows} == {(Span(0, 7),)}
        assert sample.replay is not None
        assert {row[0].version for row in sample.replay.spans} == {0}


async def test_replayed_samples_are_scored_with_the_current_prompt(tmp_path: Path) -> None:
    await run(fast(tmp_path, 1, prompts=[answered("4")]), 1)
    scorer = Remembering()
    await run(fast(tmp_path, 1, prompts=[answered("5")], scorer=scorer), 1)
    assert scorer.answers == ["5"]


async def test_a_substitute_has_its_recorded_prompt_and_is_marked(tmp_path: Path) -> None:
    recorded = await run(fast(tmp_path, 4, skip=recording(tmp_path, steps="1-2")), 4)
    scorer = Remembering()
    second = idle(tmp_path, 4, skip=recording(tmp_path, action="repeat"), scorer=scorer)
    served = await run(second, 4)
    assert [sample.provenance for sample in served] == [Provenance.REPLAYED] * 2 + [Provenance.SUBSTITUTED] * 2
    assert [sample.replay.step for sample in served if sample.replay] == [1, 2, 2, 2]
    for sample in served[2:]:
        np.testing.assert_array_equal(sample.rows[0].prompt_ids, recorded[1].rows[0].prompt_ids)
    assert len(scorer.answers) == 4
    counts = (await second.queue.status()).counts
    assert (counts.replayed, counts.substituted) == (4, 2)


async def test_each_epoch_has_separate_records(tmp_path: Path) -> None:
    prompts = [make_prompt(1, 2), make_prompt(3, 4)]
    recorded = await run(fast(tmp_path, 4, prompts=prompts), 4)
    assert [str(sample.sample_id) for sample in recorded] == ["sample_0_1", "sample_0_2", "sample_1_3", "sample_1_4"]
    assert [one.step for one in find(tmp_path)] == [1, 2, 3, 4]
    assert_same_tokens(recorded, await run(idle(tmp_path, 4, prompts=prompts), 4))


async def test_rewards_are_stored_in_a_note_of_the_record(tmp_path: Path) -> None:
    recorded = await run(fast(tmp_path, 1), 1)
    [one] = find(tmp_path)
    assert one.files.read_note(one.name) == {"rewards": [row.reward for row in recorded[0].rows]}
    assert one.read().step == 1


async def test_rewards_of_a_sample_that_is_not_recorded_change_no_note(tmp_path: Path) -> None:
    prompts = [make_prompt(1, 2)]
    await run(fast(tmp_path, 1, prompts=prompts), 1)
    (one,) = find(tmp_path)
    before = one.files.read_note("1")
    full = recording(tmp_path, max_bytes=1)
    scorer = FakeScorer(lambda prompt, turn: 0.25)
    await run(fast(tmp_path, 1, skip=full, prompts=[make_prompt(8, 9)], scorer=scorer), 1)
    assert one.files.read_note("1") == before
    assert one.read().content.arrays["prompt_ids"].tolist() == [1, 2]


async def test_a_record_takes_precedence_over_the_turn_log(tmp_path: Path) -> None:
    recorded = await run(fast(tmp_path, 1), 1)
    again = idle(tmp_path, 1)
    turn = Turn(np.array([9], np.int32), np.zeros(1, np.float32), (Span(0, 3),), recorded[0].rows[0].finish_reason)
    await again.turns.record(recorded[0].sample_id, {"0": turn})
    assert_same_tokens(recorded, await run(again, 1))


# ------------------------------------------------------------------------------------------------ sync: whole batches


def batched(tmp_path: Path, fleet: FakeFleet, **rest: Any) -> DispatcherRig:
    return DispatcherRig(
        skip=recording(tmp_path, "rollout"),
        fleet=fleet,
        mode="sync",
        permits=4,
        trainer=TrainerConfig(ppo_mini_batch_size=4),
        **rest,
    )


async def two_steps(rig: DispatcherRig) -> list[Sample]:
    """Return four samples for step 1 and four for step 2."""
    with SkipManager.session(rig.config):
        async with rig.running():
            first = await rig.lease(4)
            await rig.queue.commit(first.lease_id, [entry.meta.sample_id for entry in first.samples])
            rig.served_version = ServedVersion(1, 1)
            await rig.queue.set_applied_version(1)
            second = await rig.queue.lease(4, trainer_version=1, timeout_s=10)
    return sorted([*leased_samples(first), *leased_samples(second)], key=lambda sample: sample.sample_id.index)


async def test_a_batch_is_recorded_and_replayed_under_its_step(tmp_path: Path) -> None:
    recorded = await two_steps(batched(tmp_path, FakeFleet(), max_concurrent_samples=2))
    assert [(one.step, one.read().role) for one in find(tmp_path)] == [(1, "rollout"), (2, "rollout")]
    fleet = FakeFleet(hold=True)
    again = await two_steps(batched(tmp_path, fleet))
    assert fleet.sessions == []
    assert_same_tokens(recorded, again)
    assert [sample.replay.step for sample in again if sample.replay] == [1] * 4 + [2] * 4
    note = find(tmp_path)[0].files.read_note("1")["rewards"]
    assert note == {str(one.sample_id): [row.reward for row in one.rows] for one in recorded[:4]}


async def test_a_batch_with_a_failed_sample_is_used_and_not_recorded(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.fail("sample_0_2", DataError("refused"))
    rig = batched(tmp_path, fleet)
    assert await run_indices(rig, 4) == [1, 3, 4, 5]
    assert find(tmp_path) == []


async def test_an_overlong_prompt_is_left_out_of_a_recorded_batch(tmp_path: Path) -> None:
    prompts = [make_prompt(1, 2), make_prompt(*range(1, 40)), make_prompt(3, 4), make_prompt(5, 6), make_prompt(7, 8)]
    for fleet in (FakeFleet(), FakeFleet()):
        assert await run_indices(batched(tmp_path, fleet, prompts=prompts), 4) == [1, 3, 4, 5]
    assert fleet.sessions == ["sample_0_5"]


async def test_the_rest_of_an_interrupted_batch_is_generated_and_not_recorded(tmp_path: Path) -> None:
    await two_steps(batched(tmp_path, FakeFleet()))
    before = [(one.step, one.read().origin) for one in find(tmp_path)]
    fleet = FakeFleet()
    rig = batched(tmp_path, fleet)
    ids = (await rig.queue.admit(4, timeout_s=0)).sample_ids
    for sample_id in ids[:2]:
        await rig.queue.drop(sample_id, DropReason.FAILED)
    with SkipManager.session(rig.config):
        async with rig.running():
            await rig.fleet.until(lambda fleet: len(fleet.sessions) == 2)
    assert sorted(fleet.sessions) == ["sample_0_5", "sample_0_6"]
    assert [(one.step, one.read().origin) for one in find(tmp_path)] == before


# ------------------------------------------------------------------------------------------------ slow files


async def test_a_slow_disk_does_not_delay_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is generated while the record of the previous one is being written, which takes longer than
    `timeouts.sample_s`.
    """
    go = threading.Event()
    rig = fast(tmp_path, 2, max_concurrent_samples=1, sample_s=0.2)
    with SkipManager.session(rig.config):
        made = SkipManager.get("async_rollout")
        assert made is not None
        write = made.files.write
        monkeypatch.setattr(made.files, "write", lambda *arguments: (go.wait(20), write(*arguments))[1])
        async with rig.running():
            await rig.fleet.until(lambda fleet: len(fleet.sessions) == 2)
            await anyio.sleep(0.3)  # longer than a sample may take
            go.set()
            lease = await rig.lease(2)
    assert len(lease.samples) == 2
    assert (await rig.queue.status()).counts.dropped["failed"] == 0


async def test_validation_is_neither_recorded_nor_replayed(tmp_path: Path) -> None:
    """The same holds for a stage that the user's reward function calls during validation."""
    called = []

    class Calling(FakeScorer):
        @SkipManager.annotate(role="reward")
        async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Any]:
            called.append(prompt)
            return await super().score(prompt, trajectories)

    skip = recording(tmp_path, "reward")
    rig = DispatcherRig(skip=skip, fleet=FakeFleet(), total=1)
    validator = Validator(replace(rig.parts, scorer=Calling()), ListPrompts([make_prompt(1, 2)]), lambda ids: "")
    with SkipManager.session(rig.config):
        assert await validator.run(WeightsVersion(0, 0), 0) is not None
        assert SkipManager.status() == {"reward": {}}
    assert len(called) == 1


class Remembering(FakeScorer):
    """A scorer that keeps the ground truths of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Any]:
        self.answers.append(prompt.ground_truth)
        return await super().score(prompt, trajectories)


def answered(answer: str) -> Prompt:
    return Prompt(np.array([1, 2, 3], np.int32), ground_truth=answer)


# ------------------------------------------------------------------------------------------------ coverage


PROMPTS = [make_prompt(1, 2), make_prompt(3, 4), make_prompt(5, 6)]


async def record(tmp_path: Path, total: int, prompts: list[Prompt] = PROMPTS) -> None:
    await run(fast(tmp_path, total, prompts=prompts), total)


def uncovered(tmp_path: Path, total: int, prompts: list[Prompt] = PROMPTS, **settings: Any) -> str:
    config = DispatcherRig(skip=recording(tmp_path, **settings), total=total, prompts=prompts).config
    with SkipManager.session(config):
        return first_uncovered(config, ListPrompts(prompts), RemainingSamples(total))


async def test_a_fully_recorded_run_is_covered_over_epochs(tmp_path: Path) -> None:
    await record(tmp_path, 5)
    assert uncovered(tmp_path, 5) == ""


async def test_the_first_uncovered_sample_is_named_with_the_reason(tmp_path: Path) -> None:
    await record(tmp_path, 4)
    assert uncovered(tmp_path, 5).startswith("sample_1_5 has no record that can be used in ")
    assert uncovered(tmp_path, 4, steps="1-2") == "sample_0_3 is not among skip.async_rollout.steps=1-2"
    (find(tmp_path)[1].path / "manifest.json").write_text("{}")
    assert uncovered(tmp_path, 4).startswith("sample_0_2 has no record")


async def test_another_prompt_is_not_covered_by_the_record_of_its_index(tmp_path: Path) -> None:
    await record(tmp_path, 3)
    other = [*PROMPTS[:2], make_prompt(7, 8)]
    assert uncovered(tmp_path, 3, other).startswith("sample_0_3 has no record")
    with pytest.raises(ConfigError, match=r"on_mismatch=error: the record .* differs in prompt_ids"):
        uncovered(tmp_path, 3, other, on_mismatch="error")


async def test_any_record_covers_a_run_that_repeats_records(tmp_path: Path) -> None:
    await record(tmp_path, 1)
    assert uncovered(tmp_path, 9, action="repeat") == ""
    assert uncovered(tmp_path / "empty", 9, action="repeat").startswith("sample_0_1 has no record")


async def test_the_coverage_check_ignores_prompts_that_will_be_dropped(tmp_path: Path) -> None:
    prompts = [PROMPTS[0], make_prompt(*range(1, 40)), PROMPTS[1], PROMPTS[2]]
    await record(tmp_path, 3, prompts)
    assert uncovered(tmp_path, 3, prompts) == ""
    assert uncovered(tmp_path, 3, [prompts[1]]) == "no prompt is usable"


async def test_the_coverage_check_does_not_count_as_replay(tmp_path: Path) -> None:
    await record(tmp_path, 2)
    config = DispatcherRig(skip=recording(tmp_path), total=2, prompts=PROMPTS).config
    with SkipManager.session(config):
        first_uncovered(config, ListPrompts(PROMPTS), RemainingSamples(2))
        assert SkipManager.status() == {"async_rollout": {}}


async def test_a_fleet_without_engines_refuses_to_generate() -> None:
    fleet = UnavailableFleet()
    assert await fleet.apply(Publication(1, 1, 0, {})) == []
    with pytest.raises(ConfigError, match=r"sample_0_9 has no record\. No engine was started.*engines=always"):
        await anext(fleet.generate([], session="sample_0_9"))
