"""The weight update loop: applying in order, validating one version at a time, rewinds, and the end of a run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import RolloutConfig, ValSamplingConfig
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.config.sections.trainer import TrainerConfig
from asyncrl.core.failures import DataError, InfraError, UserCodeError, first_failure
from asyncrl.core.ports import ApplyReport, Publication, Score, SharedGpus, WeightsVersion
from asyncrl.core.records import ApplyRecord, ValidationRecord
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import Prompt, Turn
from asyncrl.observe.metrics.registry import check
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.answer_files import read_answers
from rollouter.validation.validator import Validator
from rollouter.weight_updates import RolloutStart, WeightUpdateLoop
from tests.fakes.dispatcher import rollout_parts
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeFeed, FakeGpuTurns, FakeScorer, ListPrompts, ListSink, ManualClock, make_prompt

Error = TypeVar("Error", bound=Exception)
VAL_PROMPTS = [
    make_prompt(1, 2, data_source="a", ground_truth="x", messages=({"role": "user", "content": "1+1"},)),
    make_prompt(1, 2, 3, 4, data_source="a"),
    make_prompt(*range(1, 7), data_source="b"),
]


class VersionRig:
    """A version loop between a fake feed, a fake fleet and a real queue."""

    def __init__(
        self,
        *,
        validate_first: bool = False,
        validated: WeightsVersion | None = None,
        validated_step: int = 0,
        test_freq: int = -1,
        call_s: float = 60.0,
        start_s: float = 60.0,
        sample_s: float = 60.0,
        prompts: list[Prompt] | None = VAL_PROMPTS,
        fleet: FakeFleet | None = None,
        scorer: FakeScorer | None = None,
        reward: RewardConfig | None = None,
        validation_data_dir: str | None = None,
        gpus: SharedGpus | None = None,
    ) -> None:
        config = Config(
            rollout=RolloutConfig(response_length=6, max_model_len=16, val=ValSamplingConfig(n=2)),
            reward=reward or RewardConfig(),
            timeouts=TimeoutsConfig(sample_s=sample_s, call_s=call_s, start_s=start_s),
            trainer=TrainerConfig(test_freq=test_freq, validation_data_dir=validation_data_dir),
        )
        self.feed = FakeFeed()
        self.fleet = fleet or FakeFleet(num_replicas=2)
        self.queue = LocalSampleQueue(QueueOptions(10, Pacing(samples_per_version=4, staleness_threshold=0)))
        self.sink = ListSink()
        self.clock = ManualClock()
        self.wall = ManualClock()
        scorer = scorer or FakeScorer()
        parts = rollout_parts(
            config, queue=self.queue, fleet=self.fleet, clock=self.clock, wall_clock=self.wall, scorer=scorer
        )
        self.waits = parts.waits
        validator = None
        if prompts is not None:
            validator = Validator(parts, ListPrompts(prompts), lambda ids: " ".join(map(str, ids)))
        self.loop = WeightUpdateLoop(
            parts,
            RolloutStart(validate_first, validated, validated_step),
            feed=self.feed,
            sink=self.sink,
            validator=validator,
            gpus=gpus,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[VersionRig]:
        """Run the loop during the block. Then ask it to finish, upon which it has to end."""
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(self.loop.run)
                yield self
                self.loop.finish()

    async def fails(self, kind: type[Error]) -> Error:
        with anyio.fail_after(20), pytest.raises(Exception) as caught:
            await self.loop.run()
        error = first_failure(caught.value)
        assert isinstance(error, kind)
        return error

    async def until_validating(self, version: int, **publication: Any) -> None:
        """Publish a version, and wait until all its validation prompts are in flight in a fleet that holds them."""
        await self.feed.publish(version, validate=True, **publication)
        await self.fleet.until_in_flight(*(f"val_{version}_{number}" for number in range(len(VAL_PROMPTS))))

    async def first_validation(self) -> ValidationRecord:
        """Run until the end of the first validation, and return its record."""
        async with self.running():
            await self.sink.until(1)
        return self.validation(0)

    def validation(self, number: int) -> ValidationRecord:
        record = self.sink.records[number]
        assert isinstance(record, ValidationRecord)
        return record

    @property
    def actions(self) -> list[str]:
        """The recorded actions: `apply 1`, `validate 1`, …"""
        return [f"{'apply' if isinstance(r, ApplyRecord) else 'validate'} {r.version}" for r in self.sink.records]


async def test_a_version_is_applied_then_opens_the_gate_then_is_recorded() -> None:
    rig = VersionRig()
    async with rig.running():
        rig.wall.now_s = 107.0
        await rig.feed.publish(1, step=4, published_at_s=100.0)
        await rig.sink.until(1)
        assert (await rig.queue.status()).version == 1
        await rig.feed.publish(3)
        await rig.sink.until(2)
    assert rig.actions == ["apply 1", "apply 3"]
    assert rig.fleet.applied == [1, 3]
    record = rig.sink.records[0]
    assert isinstance(record, ApplyRecord)
    assert record.publish_to_applied_s == 7.0
    assert [report.replica for report in record.reports] == ["replica-0", "replica-1"]


async def test_version_0_is_validated_before_the_next_version_is_applied() -> None:
    rig = VersionRig(validate_first=True, fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.fleet.until_in_flight("val_0_0", "val_0_1", "val_0_2")
        await rig.feed.publish(1)
        rig.fleet.release("val_0_0")
        assert rig.fleet.applied == []
        rig.fleet.release_all()
        await rig.sink.until(2)
    assert rig.actions == ["validate 0", "apply 1"]


async def test_validation_is_pinned_to_its_version() -> None:
    """Publications that arrive during the validation of version 1 are applied after it."""
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(1, step=5)
        await rig.feed.publish(2)
        await rig.feed.publish(3, validate=True)
        rig.fleet.release()
        await rig.fleet.until_in_flight("val_3_0")
        assert rig.actions == ["apply 1", "validate 1", "apply 3"]
        rig.fleet.release_all()
    assert rig.actions == ["apply 1", "validate 1", "apply 3", "validate 3"]
    first = rig.validation(1)
    assert (first.version, first.step) == (1, 5)


async def test_a_validation_prompt_answered_by_another_version_is_repeated() -> None:
    """A replica restarted with version 2 during the validation of version 1, which another replica still serves."""
    rig = VersionRig()
    rig.fleet.replaced = {"val_1_0": 2, "val_1_2": 2, "val_1_2_try_2": 2}
    async with rig.running():
        await rig.feed.publish(1, step=5, validate=True)
        await rig.sink.until(2)
    assert rig.actions == ["apply 1", "validate 1"]
    record = rig.validation(1)
    assert record.metrics["num_prompts"] == 3
    assert sorted(rig.fleet.sessions) == [
        "val_1_0", "val_1_0_try_2", "val_1_1", "val_1_2", "val_1_2_try_2", "val_1_2_try_3",
    ]  # fmt: skip
    assert rig.fleet.generated_tokens == 2 * (2 + 2 + 4 + 6 + 6 + 6)


async def test_replaced_replicas_move_the_validation_to_the_newer_version() -> None:
    """When no replica serves version 1 any more, the newest version is applied and validated once instead."""
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(1, step=5)
        await rig.feed.publish(2, step=9, validate=True)
        rig.fleet.replaced = dict.fromkeys(tries("val_1_1"), 2)
        await release_each_try(rig, "val_1_1")
        await rig.fleet.until_in_flight("val_2_0", "val_2_1", "val_2_2")
        assert sorted(rig.fleet.cancelled) == ["val_1_0", "val_1_2"]
        rig.fleet.release_all()
    assert rig.actions == ["apply 1", "apply 2", "validate 2"]
    record = rig.validation(2)
    assert (record.version, record.step, record.metrics["num_prompts"]) == (2, 9, 3)


async def release_each_try(rig: VersionRig, session: str) -> None:
    for each in tries(session):
        await rig.fleet.until_in_flight(each)
        rig.fleet.release(each)


def tries(*sessions: str) -> list[str]:
    """Return the sessions of all tries for these prompts."""
    return [f"{session}{suffix}" for session in sessions for suffix in ("", "_try_2", "_try_3")]


async def test_an_outdated_replica_is_updated_and_the_validation_repeated() -> None:
    """A replica started with version 2 and joined after the others had applied version 3."""
    rig = VersionRig()
    rig.fleet.replaced = dict.fromkeys([*tries("val_3_0"), *tries("val_3_1_ask_2")], 2)
    async with rig.running():
        await rig.feed.publish(3, step=7, validate=True)
        await rig.sink.until(2)
    assert rig.actions == ["apply 3", "validate 3"], "a repeated apply has no record"
    assert rig.fleet.applied == [3, 3, 3]
    assert {"val_3_0_ask_2", "val_3_0_ask_3"} <= set(rig.fleet.sessions), "an engine may still run the earlier requests"
    record = rig.validation(1)
    assert (record.step, record.metrics["num_prompts"]) == (7, 3)


async def test_a_replica_with_an_unknown_version_is_waited_for() -> None:
    """The restarted store does not know the replica's version until the Trainer publishes it again."""
    rig = VersionRig(validate_first=True, call_s=0.01)
    rig.fleet.replaced = dict.fromkeys(tries("val_0_0"), 4)
    async with rig.running():
        await rig.sink.until(1)
    assert rig.actions == ["validate 0"]
    assert rig.fleet.applied == [], "the store has no weights to apply"


class Stubborn(dict[str, int]):
    """A mapping with which replicas answer every session with the same version."""

    def get(self, session: str, version: Any = None) -> Any:
        return self["version"]


@pytest.mark.parametrize(("version", "validated"), [(2, 3), (4, 3), (4, 0)])
async def test_a_replica_that_never_serves_the_applied_version_stops_the_run(version: int, validated: int) -> None:
    rig = VersionRig(validate_first=True, call_s=0.01, start_s=0.05)
    rig.fleet.replaced = Stubborn(version=version)
    if validated:
        await rig.feed.publish(validated)
    error = await rig.fails(InfraError)
    assert f"validation of version {validated}: replicas answer with version {version}" in error.message
    assert "for 0.05 s (timeouts.start_s)" in error.message
    assert rig.actions == (["apply 3"] if validated else [])


async def test_the_last_publication_is_applied_and_validated_at_the_end() -> None:
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(1)
        await rig.feed.publish(2, validate=True)
        rig.fleet.release_all()
        rig.loop.finish()
    assert rig.actions == ["apply 1", "validate 1", "apply 2", "validate 2"]


async def test_a_resumed_run_applies_and_validates_the_version_of_the_checkpoint_first() -> None:
    rig = VersionRig(validate_first=True)
    await rig.feed.publish(7, step=28)
    async with rig.running():
        await rig.sink.until(2)
    assert rig.actions == ["apply 7", "validate 7"]
    record = rig.validation(1)
    assert record.step == 28


async def test_without_a_validation_set_nothing_is_validated() -> None:
    rig = VersionRig(validate_first=True, prompts=None)
    async with rig.running():
        await rig.feed.publish(1, validate=True)
        await rig.sink.until(1)
    assert rig.actions == ["apply 1"]


async def test_a_failed_apply_and_an_outdated_replica_stop_the_run() -> None:
    rig = VersionRig()
    await rig.feed.publish(2)
    rig.fleet.apply_error = InfraError("replica-1 could not fetch version 2")
    await rig.fails(InfraError)
    rig = VersionRig()
    await rig.feed.publish(2)
    rig.fleet.stuck_at = WeightsVersion(0, 1)
    error = await rig.fails(InfraError)
    assert "replica-0 serves version 1 after version 2 was applied" in error.message
    assert (await rig.queue.status()).version == 0


async def test_waits_are_reported_and_an_apply_has_its_own_deadline() -> None:
    """The deadline of an apply is longer than that of the watchdog."""
    rig = VersionRig()
    rig.fleet.apply_gate = anyio.Event()
    async with rig.running():
        await rig.feed.publish(1)
        await anyio.wait_all_tasks_blocked()
        for now_s, bounded in ((0.0, True), (2 * 300.0 + 30.0 + 120.0 + 60.0 - 1.0, True), (810.0, False)):
            rig.clock.now_s = now_s
            assert [(wait.edge, wait.bounded) for wait in rig.waits.snapshot()] == [("apply", bounded)]
        rig.fleet.apply_gate.set()
        await rig.sink.until(1)
        await anyio.wait_all_tasks_blocked()
        assert [wait.edge for wait in rig.waits.snapshot()] == ["weights"]


# ------------------------------------------------------------------------------------------------ the validation record


class Judge(FakeScorer):
    """Answers are `long` or `short`, and those of a long prompt are wrong although they have a high reward."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Any]) -> list[Score]:
        size = len(prompt.prompt_ids)
        return [
            Score(float(size), {"acc": float(size < 6)}, answer="long" if size > 2 else "short") for _ in trajectories
        ]


async def test_every_answer_and_the_figures_are_written(tmp_path: Path) -> None:
    """`acc` decides what is correct, and one data source has no metrics of its own."""
    rig = VersionRig(validate_first=True, scorer=Judge(), validation_data_dir=str(tmp_path / "answers"))
    record = await rig.first_validation()
    assert record.metrics["pass@2"] == record.metrics["maj@2"] == pytest.approx(2 / 3)
    assert record.metrics["best/b@2"] == 6.0
    lines = read_answers(tmp_path / "answers" / "step_000000.jsonl")
    assert [(one.data_source, len(one.answers), one.answers[0].answer) for one in lines.values()] == [
        ("a", 2, "short"), ("a", 2, "long"), ("b", 2, "long"),
    ]  # fmt: skip
    assert lines[0].prompt == ({"role": "user", "content": "1+1"},)
    assert lines[0].ground_truth == "x" and lines[0].answers[0].text == "1 2"
    found = json.loads((tmp_path / "answers" / "step_000000.json").read_text())
    assert found["step"] == 0 and list(found["sources"]) == ["a", "b"]
    assert found["all"]["figures"]["pass@2"]["value"] == pytest.approx(2 / 3)
    assert found["sources"]["b"]["figures"]["maj@2"]["value"] == 0.0
    rig = VersionRig(
        validate_first=True, prompts=VAL_PROMPTS[:2], scorer=Judge(), validation_data_dir=str(tmp_path / "answers")
    )
    record = await rig.first_validation()
    assert "pass@2" in record.metrics and "pass/a@2" not in record.metrics
    assert list(read_answers(tmp_path / "answers" / "step_000000.jsonl")) == [0, 1], "an earlier file is replaced"


async def test_answers_that_cannot_be_written_stop_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    rig = VersionRig(validate_first=True, validation_data_dir=str(tmp_path / "file" / "below"))
    record = await rig.first_validation()
    assert record.metrics["num_prompts"] == 3
    assert "trainer.validation_data_dir" in caplog.text and "training goes on" in caplog.text


async def test_validation_metrics_and_examples() -> None:
    rig = VersionRig(validate_first=True)
    record = await rig.first_validation()
    assert record.metrics == {
        "reward/mean": pytest.approx(4.0),
        "reward/mean/a": pytest.approx(3.0),
        "reward/mean/b": pytest.approx(6.0),
        "response_tokens/mean": pytest.approx(4.0),
        "response_tokens/max": 6.0,
        "length_share": pytest.approx(1 / 3),
        "num_prompts": 3.0,
        "duration_s": 0.0,
        **{f"pass{source}@{k}": 1.0 for source in ("", "/a", "/b") for k in (1, 2)},
        **{"best@2": pytest.approx(4.0), "best/a@2": pytest.approx(3.0), "best/b@2": pytest.approx(6.0)},
    }
    check(f"validation/{name}" for name in record.metrics)
    assert record.examples[0] == {"prompt": "1+1", "response": "1 2", "ground_truth": "x", "reward": 2.0}
    assert {request.sampling["temperature"] for request in rig.fleet.requests} == {0.0}
    assert len(rig.fleet.requests) == 6


async def test_data_sources_of_any_text_have_metrics() -> None:
    sources = ["\0", "a\0", "a", "a/b", " ", "x@2", "\n"]
    rig = VersionRig(validate_first=True, prompts=[make_prompt(1, data_source=one) for one in sources])
    record = await rig.first_validation()
    assert {f"reward/mean/{one}" for one in sources} < record.metrics.keys()
    check(f"validation/{name}" for name in record.metrics)


async def test_validation_reports_the_parts_of_a_combined_reward() -> None:
    class Both(FakeScorer):
        async def score(self, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]:
            scores = await super().score(prompt, turns)
            return [Score(2 * one.reward + 1, {"rule": one.reward, "model": 1.0}) for one in scores]

    rig = VersionRig(validate_first=True, scorer=Both())
    record = await rig.first_validation()
    figures = {name: record.metrics[f"{name}/mean"] for name in ("reward", "rule", "model")}
    assert figures == {"reward": pytest.approx(9.0), "rule": pytest.approx(4.0), "model": pytest.approx(1.0)}
    check(f"validation/{name}" for name in record.metrics)


async def test_a_validation_prompt_that_fails_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [*VAL_PROMPTS, make_prompt(*range(16))]
    rig = VersionRig(validate_first=True, prompts=prompts)
    record = await rig.first_validation()
    assert record.metrics["num_prompts"] == 3
    assert "val_0_3 left out of the validation" in caplog.text


async def test_a_validation_without_an_answer_is_an_error() -> None:
    await VersionRig(validate_first=True, prompts=[make_prompt(*range(16))]).fails(DataError)


async def test_a_validation_that_times_out_has_no_metrics_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck = True

    async def pace(session: str) -> None:
        if stuck:
            await anyio.sleep_forever()

    rig = VersionRig(fleet=FakeFleet(pace=pace), sample_s=0.05, test_freq=10)
    async with rig.running():
        await rig.until_validating(1, step=10)
        await rig.feed.publish(2, step=19)
        await rig.sink.until(2)
        stuck = False
        await rig.feed.publish(3, step=20, validate=True)
        await rig.sink.until(4)
    assert rig.actions == ["apply 1", "apply 2", "apply 3", "validate 3"]
    assert "validation of version 1: no prompt of 3 could be answered, so it has no metrics" in caplog.text


async def test_a_failing_reward_in_validation_stops_or_drops_as_configured() -> None:
    def reward(prompt: Prompt, turn: Turn) -> float:
        if prompt.data_source == "b":
            raise UserCodeError("judge raised", "traceback")
        return 1.0

    await VersionRig(validate_first=True, scorer=FakeScorer(reward)).fails(UserCodeError)
    rig = VersionRig(validate_first=True, scorer=FakeScorer(reward), reward=RewardConfig(on_error="drop"))
    record = await rig.first_validation()
    assert record.metrics["num_prompts"] == 2


# ------------------------------------------------------------------------------------------------ lineages, restarts


def lineages(rig: VersionRig) -> list[tuple[int, int]]:
    return [(record.lineage, record.version) for record in rig.sink.records]


async def go_back(rig: VersionRig, version: int, **publication: Any) -> None:
    """Rewind as a restarted Trainer does: first the counts of the queue, then its version is published."""
    await rig.queue.rewind(0, version=version, lineage=1, total_samples=None)
    await rig.feed.publish(version, lineage=1, **publication)


async def test_replicas_and_gate_follow_training_back_to_a_checkpoint() -> None:
    rig = VersionRig()
    async with rig.running():
        await rig.feed.publish(3)
        await rig.sink.until(1)
        await go_back(rig, 2)
        await rig.sink.until(2)
        assert (await rig.queue.status()).version == 2
        assert rig.loop.weights_version == WeightsVersion(1, 2)
        await rig.feed.publish(3, lineage=1)
        await rig.sink.until(3)
    assert lineages(rig) == [(0, 3), (1, 2), (1, 3)]
    assert set(rig.fleet.weights_versions.values()) == {WeightsVersion(1, 3)}


async def test_the_initial_version_is_applied_when_training_goes_back_to_the_start() -> None:
    rig = VersionRig()
    async with rig.running():
        await go_back(rig, 0)
        await rig.sink.until(1)
    assert lineages(rig) == [(1, 0)]


@pytest.mark.parametrize("validate", [False, True])
async def test_a_validation_is_cancelled_when_training_goes_back(validate: bool) -> None:
    """The version of the new lineage is validated if its publication requests it."""
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(5, step=50)
        await go_back(rig, 3, step=30, validate=validate)
        if validate:
            await rig.fleet.until_in_flight("val_1_3_0", "val_1_3_1", "val_1_3_2")
            rig.fleet.release_all()
            await rig.sink.until(3)
        else:
            await rig.sink.until(2)
    assert sorted(rig.fleet.cancelled) == ["val_5_0", "val_5_1", "val_5_2"]
    assert rig.actions == ["apply 5", "apply 3", *(["validate 3"] if validate else [])]
    assert lineages(rig)[1:] == [(1, 3)] * (2 if validate else 1)


async def test_answers_of_a_newer_lineage_are_accepted() -> None:
    """A replaced replica serves the new lineage before the loop has received its publication."""
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(5)
        rig.fleet.replaced = dict.fromkeys(tries("val_5_0"), 3)
        rig.fleet.release_all()
        await go_back(rig, 3)
        await rig.sink.until(2)
    assert rig.actions == ["apply 5", "apply 3"]


async def test_the_newest_version_is_applied_when_the_run_ends_during_a_cancelled_validation() -> None:
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(5)
        rig.loop.finish()
        await go_back(rig, 3)
    assert rig.actions == ["apply 5", "apply 3"]


async def test_a_store_that_was_restarted_during_a_validation_is_waited_for() -> None:
    """A replaced replica answers with version 2, which is still unknown to the restarted store."""
    rig = VersionRig(fleet=FakeFleet(hold=True))
    async with rig.running():
        await rig.until_validating(1)
        rig.feed.forget()
        rig.fleet.replaced = dict.fromkeys(tries("val_1_1"), 2)
        await release_each_try(rig, "val_1_1")
        await anyio.wait_all_tasks_blocked()
        await rig.feed.publish(2, step=9)
        rig.fleet.release_all()
        await rig.sink.until(3)
    assert rig.actions == ["apply 1", "apply 2", "validate 2"]


@pytest.mark.parametrize(
    ("validated", "expected"),
    [
        (None, ["validate 4"]),
        (WeightsVersion(0, 2), ["validate 4"]),
        (WeightsVersion(0, 9), ["validate 4"]),
        (WeightsVersion(1, 4), []),
        (WeightsVersion(1, 5), []),
    ],
)
async def test_a_restarted_rollouter_validates_only_pending_versions(
    validated: WeightsVersion | None, expected: list[str]
) -> None:
    rig = VersionRig(validated=validated)
    await go_back(rig, 4, validate=True)
    rig.fleet.weights_versions = dict.fromkeys(rig.fleet.weights_versions, WeightsVersion(1, 4))
    async with rig.running():
        pass
    assert rig.actions == expected, "replicas that already serve the version apply nothing"
    assert (await rig.queue.status()).version == 4
    rig = VersionRig(validate_first=True, validated=WeightsVersion(0, 0))
    async with rig.running():
        pass
    assert rig.actions == []


@pytest.mark.parametrize(
    ("validated_step", "step", "expected"),
    [(0, 9, []), (0, 12, ["validate 3"]), (10, 19, []), (10, 20, ["validate 3"])],
)
async def test_a_restarted_rollouter_performs_a_missed_validation(
    validated_step: int, step: int, expected: list[str]
) -> None:
    """The store has replaced version 2, which requested a validation, by version 3, which does not."""
    rig = VersionRig(validated=WeightsVersion(0, 0), validated_step=validated_step, test_freq=10)
    await rig.feed.publish(3, step=step)
    rig.fleet.version = 3
    async with rig.running():
        pass
    assert rig.actions == expected


async def test_a_validation_whose_request_the_store_lost_is_performed_once() -> None:
    rig = VersionRig(validated=WeightsVersion(0, 0), test_freq=10)
    async with rig.running():
        for version, step in enumerate((4, 8, 12, 16, 20), start=1):
            await rig.feed.publish(version, step=step)
            await rig.fleet.until(lambda fleet, version=version: version in fleet.applied)
    assert [action for action in rig.actions if action.startswith("validate")] == ["validate 3", "validate 5"]


async def test_a_replica_of_an_older_lineage_is_named() -> None:
    rig = VersionRig()
    await go_back(rig, 2)
    rig.fleet.stuck_at = WeightsVersion(0, 7)
    error = await rig.fails(InfraError)
    assert "replica-0 serves version 7 after version 2 of lineage 1 was applied" in error.message


async def test_a_validation_prompt_that_takes_too_long_or_crashes_engines_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def pace(session: str) -> None:
        if session.startswith("val_0_0"):
            await anyio.sleep_forever()

    fleet = FakeFleet(pace=pace, poison=lambda request: len(request.prompt_ids) == 6)
    rig = VersionRig(validate_first=True, fleet=fleet, sample_s=0.3)
    record = await rig.first_validation()
    assert record.metrics["num_prompts"] == 1
    assert "val_0_0 left out of the validation, took too long" in caplog.text
    assert "val_0_2 left out of the validation, crashed engines" in caplog.text


# ---------------------------------------------------------------------------------------------- shared GPUs


class SleepyFleet(FakeFleet):
    """Replicas that can sleep. `happened` has the calls in order."""

    def __init__(self) -> None:
        super().__init__(num_replicas=2)
        self.happened: list[str] = []

    async def sleep(self) -> None:
        self.happened.append("sleep")

    async def wake(self) -> None:
        self.happened.append("wake")

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        self.happened.append(f"apply {publication.version}")
        return await super().apply(publication)


class SharedRig(VersionRig):
    """A loop whose fleet shares its GPUs with a Trainer: the test."""

    def __init__(self, **options: Any) -> None:
        self.turns, self.sleepy = FakeGpuTurns(), SleepyFleet()
        shared = SharedGpus(self.turns, self.sleepy)
        super().__init__(fleet=self.sleepy, gpus=shared, **options)


async def test_engines_sleep_until_the_trainer_has_given_the_gpus_back() -> None:
    rig = SharedRig()
    async with rig.running():
        await rig.turns.take()
        assert rig.sleepy.happened == ["wake", "sleep"], "a new Rollouter wakes them, in case an old one did not"
        assert not rig.loop.awake.is_set()
        await rig.feed.publish(1)
        await anyio.wait_all_tasks_blocked()
        assert rig.fleet.applied == [], "the ranks are not offloaded yet"
        await rig.turns.give_back()
        await rig.loop.awake.wait()
        await rig.turns.take()
        await rig.turns.give_back()  # for more samples of the same version
        await rig.loop.awake.wait()
    assert rig.sleepy.happened == ["wake", "sleep", "apply 1", "sleep", "wake"]
    assert rig.feed.delivered == [1]


async def test_a_validation_ends_before_the_engines_sleep() -> None:
    rig = SharedRig()
    rig.fleet.hold = True
    async with rig.running():
        await rig.turns.take()
        await rig.feed.publish(1, validate=True)
        await rig.turns.give_back()
        await rig.fleet.until_in_flight("val_1_0", "val_1_1", "val_1_2")
        async with anyio.create_task_group() as group:
            group.start_soon(rig.turns.take)
            await anyio.wait_all_tasks_blocked()
            assert rig.sleepy.happened.count("sleep") == 1
            rig.fleet.release_all()
        assert rig.sleepy.happened.count("sleep") == 2 and rig.actions == ["apply 1", "validate 1"]
        await rig.turns.give_back()


async def test_a_store_that_was_restarted_in_the_ranks_turn_learns_the_turn_again() -> None:
    rig = SharedRig()
    async with rig.running():
        await rig.turns.take()
        rig.turns.relay._turn = None
        await rig.turns.take()
        assert rig.sleepy.happened == ["wake", "sleep"], "they sleep already"
        await rig.turns.give_back()


async def test_a_new_rollouter_does_not_touch_engines_in_the_ranks_turn() -> None:
    rig = SharedRig()
    await rig.turns.grant()
    await rig.feed.publish(1)
    async with rig.running():
        await anyio.wait_all_tasks_blocked()
        assert rig.sleepy.happened == []
        await rig.turns.give_back()
        await rig.loop.awake.wait()
    assert rig.sleepy.happened == ["apply 1"]


async def test_engines_that_do_not_sleep_end_the_rollouter() -> None:
    rig = SharedRig()

    async def fail() -> None:
        raise InfraError("it does not sleep")

    rig.sleepy.sleep = fail  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(rig.turns.take)
        await rig.fails(InfraError)
        group.cancel_scope.cancel()


async def test_a_run_that_is_stopped_leaves_the_gpus_to_the_ranks() -> None:
    rig = SharedRig()
    await rig.loop.yield_gpus()
    await rig.turns.take()
    assert rig.sleepy.happened == ["sleep"]


@pytest.mark.parametrize("at_start", [True, False])
async def test_a_version_that_died_with_its_trainer_does_not_keep_the_gpus_from_the_next_one(at_start: bool) -> None:
    rig = SharedRig()
    lost = InfraError("its owner is dead")
    if at_start:
        await rig.feed.publish(1)
        rig.fleet.apply_error = lost
    async with rig.running():
        if not at_start:
            await rig.turns.take()
            await rig.feed.publish(1)
            rig.fleet.apply_error = lost
            await rig.turns.give_back()
        await anyio.wait_all_tasks_blocked()
        await rig.turns.take()  # the next Trainer, at its start
        assert not rig.loop.awake.is_set()
        rig.fleet.apply_error = None
        await rig.feed.publish(2)
        await rig.turns.give_back()
        await rig.loop.awake.wait()
    assert rig.sleepy.happened[-3:] == ["apply 1", "sleep", "apply 2"]
    assert rig.loop.weights_version == WeightsVersion(0, 2)


async def test_a_version_that_cannot_be_applied_is_an_error_if_no_trainer_wants_the_gpus() -> None:
    rig = SharedRig(start_s=0.01)
    rig.fleet.apply_error = InfraError("its owner is dead")
    await rig.feed.publish(1)
    assert "its owner is dead" in (await rig.fails(InfraError)).message
