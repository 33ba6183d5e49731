"""The pump: samples in any order, drops and stops, slots, the queue's end, and what it counts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import (
    AlgorithmConfig,
    Config,
    OverSampleConfig,
    RecoveryConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    SkipConfig,
    TimeoutsConfig,
    TrainerConfig,
    ValSamplingConfig,
)
from asyncrl.failures import BugError, DataError, InfraError, UserCodeError, first_failure
from asyncrl.ports import GenerateRequest, Lease, RewardScorer
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.types import FinishReason, Prompt, Sample, Turn
from asyncrl.waits import WaitBoard
from rollouter.agent.asking import Converser
from rollouter.drops import DropRule, OverlongError, TooLongError
from rollouter.dump import TrajectoryDump
from rollouter.meters import BusyMeter
from rollouter.probation import Probation, time_limit
from rollouter.pump import Pump
from rollouter.sampling import sampling_params
from rollouter.stages import Serving, Stages
from rollouter.surplus import Surplus
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, ListPrompts, ManualClock, MemoryPayloads, MemoryTurns, make_prompt

NUM_PROMPTS = 100


class Rig:
    """A pump between a real queue and a fake fleet; at most `permits` samples unconsumed, `total` in all."""

    def __init__(
        self,
        *,
        permits: int = 8,
        total: int = 1000,
        n: int = 2,
        max_concurrent_samples: int = 8,
        fleet: FakeFleet | None = None,
        scorer: RewardScorer | None = None,
        prompts: list[Prompt] | None = None,
        reward: RewardConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        sample_s: float = 60.0,
        max_crashes: int = 2,
        turns: MemoryTurns | None = None,
        skip: SkipConfig | None = None,
        mode: Literal["fully_async", "sync"] = "fully_async",
        trainer: TrainerConfig | None = None,
        over_sample: OverSampleConfig | None = None,
        agent: Converser | None = None,
        dump: TrajectoryDump | None = None,
    ) -> None:
        self.config = Config(
            mode=mode,
            skip=skip or SkipConfig(),
            trainer=trainer or TrainerConfig(),
            timeouts=TimeoutsConfig(sample_s=sample_s),
            recovery=RecoveryConfig(max_crashes=max_crashes),
            algorithm=algorithm or AlgorithmConfig(),
            rollout=RolloutConfig(
                n=n,
                response_length=16,
                max_model_len=32,
                max_concurrent_samples=max_concurrent_samples,
                over_sample=over_sample or OverSampleConfig(),
            ),
            reward=reward or RewardConfig(),
        )
        prompts = prompts or [make_prompt(*range(1, 2 + k % 7)) for k in range(NUM_PROMPTS)]
        self.pacing = Pacing(permits, 0, total, over_sample=self.config.rollout.over_sample.samples)
        self.queue = LocalSampleQueue(QueueOptions(len(prompts), self.pacing))
        self.turns = turns or MemoryTurns()
        self.fleet = fleet or FakeFleet(hold=True)
        self.clock = ManualClock()
        self.drops = DropRule(
            on_error=self.config.reward.on_error,
            max_errors=self.config.reward.max_errors,
            num_prompts=len(prompts),
        )
        self.waits = WaitBoard(self.clock)
        self.serving = Serving(0, 0)
        probation = Probation(max_crashes, waits=self.waits, settle_s=0.01)
        surplus = Surplus(self.queue, call_s=5.0)
        self.stages = Stages(
            self.config,
            prompts=ListPrompts(prompts),
            turns=self.turns,
            fleet=self.fleet,
            scorer=scorer or FakeScorer(),
            probation=probation,
            surplus=surplus,
            waits=self.waits,
            serving=lambda: self.serving,
            agent=agent,
            dump=dump,
            clock=self.clock,
        )
        self.pump = Pump(
            self.config,
            queue=self.queue,
            payloads=MemoryPayloads(),
            turns=self.turns,
            stages=self.stages,
            drops=self.drops,
            probation=probation,
            surplus=surplus,
            waits=self.waits,
            clock=self.clock,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        """The pump runs inside; at the end the queue is closed and the pump has to end by itself."""
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(self.pump.run)
                yield self
                await self.queue.close()

    async def lease(self, num_samples: int, *, trainer_version: int = 0) -> Lease:
        with anyio.fail_after(10):
            return await self.queue.lease(num_samples, trainer_version=trainer_version, timeout_s=10)

    async def fails(self) -> BaseException:
        """Run until it fails by itself."""
        with anyio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
            await self.pump.run()
        return first_failure(caught.value)


def samples(lease: Lease) -> list[Sample]:
    return [entry.payload for entry in lease.samples]


def name(index: int) -> str:
    return f"sample_{(index - 1) // NUM_PROMPTS}_{index}"


# ------------------------------------------------------------------------------------------------ the way of a sample


async def test_a_sample_is_prompt_turns_and_scores() -> None:
    rig = Rig(permits=1, fleet=FakeFleet(), prompts=[make_prompt(5, 6, 7, data_source="math")])
    async with rig.running():
        lease = await rig.lease(1)
    (sample,) = samples(lease)
    assert str(sample.sample_id) == "sample_0_1"
    assert sample.data_source == "math"
    assert len(sample.rows) == 2
    row = sample.rows[0]
    assert row.prompt_ids.tolist() == row.response_ids.tolist() == [5, 6, 7]
    assert row.response_mask.tolist() == [True] * 3
    assert row.reward == 3.0
    assert lease.samples[0].meta.response_tokens == 6
    assert [request.request_id for request in rig.fleet.requests] == ["sample_0_1/0", "sample_0_1/1"]
    assert rig.fleet.sessions == ["sample_0_1"]


@pytest.mark.parametrize("seed", range(5))
async def test_samples_complete_in_the_order_in_which_they_are_generated(seed: int) -> None:
    rig = Rig(permits=8, n=1)
    order = [name(index) for index in range(1, 9)]
    random.Random(seed).shuffle(order)
    async with rig.running():
        await rig.fleet.until_in_flight(*order)
        done = []
        for session in order:
            rig.fleet.release(session)
            done += samples(await rig.lease(1))
    assert [str(sample.sample_id) for sample in done] == order


async def test_a_straggler_blocks_nobody() -> None:
    """With one of two slots taken for good, everything else goes through the other one."""
    rig = Rig(permits=1000, total=51, n=1, max_concurrent_samples=2)
    async with rig.running():
        await rig.fleet.until_in_flight(name(1), name(2))
        rig.fleet.hold = False
        rig.fleet.release(name(2))
        lease = await rig.lease(50)
        assert list(rig.fleet.calls) == [name(1)]
        assert sorted(entry.meta.sample_id.index for entry in lease.samples) == list(range(2, 52))
        rig.fleet.release(name(1))
        assert (await rig.lease(1)).samples[0].meta.sample_id.index == 1
    assert rig.fleet.max_in_flight == 2


async def test_no_more_samples_in_generation_than_slots() -> None:
    rig = Rig(
        permits=1000, total=200, max_concurrent_samples=5, fleet=FakeFleet(pace=lambda _: anyio.lowlevel.checkpoint())
    )
    async with rig.running():
        assert len((await rig.lease(200)).samples) == 200
    assert rig.fleet.max_in_flight == 5


async def test_slow_scoring_holds_no_slot() -> None:
    gate = anyio.Event()
    rig = Rig(permits=10, max_concurrent_samples=1, fleet=FakeFleet(), scorer=FakeScorer(gate=lambda _: gate.wait()))
    async with rig.running():
        await rig.fleet.until(lambda fleet: len(fleet.sessions) == 10)
        assert rig.stages.counts.samples_done == 0
        gate.set()
        assert len((await rig.lease(10)).samples) == 10


async def test_admission_waits_for_permits_and_goes_on_with_a_new_version() -> None:
    rig = Rig(permits=3, fleet=FakeFleet())
    async with rig.running():
        lease = await rig.lease(3)
        assert len(rig.fleet.sessions) == 3
        await rig.queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
        await rig.queue.set_applied_version(1)
        assert len((await rig.lease(3)).samples) == 3
    assert len(rig.fleet.sessions) == 6


async def test_a_version_that_changes_in_mid_generation_is_in_the_spans() -> None:
    rig = Rig(permits=1, n=1, prompts=[make_prompt(1, 2, 3, 4)])
    async with rig.running():
        await rig.fleet.until_in_flight("sample_0_1")
        rig.fleet.version = 3
        rig.fleet.release()
        meta = (await rig.lease(1)).samples[0].meta
    assert (meta.oldest_version, meta.newest_version) == (0, 3)


async def test_a_sample_may_be_fed_again_before_its_offer_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue has died over its answer, and the payload is found damaged before Ray has asked again."""
    rig = Rig(permits=1, fleet=FakeFleet())
    answers, offer, ends = [anyio.Event(), anyio.Event()], rig.queue.offer, anyio.Event()
    left = iter(answers)

    async def offer_and_be_late(*what: Any) -> None:
        answer = next(left)
        await offer(*what)
        await answer.wait()

    monkeypatch.setattr(rig.queue, "offer", offer_and_be_late)
    monkeypatch.setattr(rig.turns, "forget", lambda sample_id: done(ends))
    async with rig.running():
        (found,) = (await rig.lease(1)).samples
        rig.clock.now_s = 1.0
        await rig.queue.redo(found.meta.sample_id)
        (again,) = (await rig.lease(1)).samples
        assert again.meta.sample_id == found.meta.sample_id
        answers[0].set()
        await ends.wait()
        await anyio.wait_all_tasks_blocked()
        assert rig.pump.in_flight == 1
        answers[1].set()
        await anyio.wait_all_tasks_blocked()
        assert rig.pump.in_flight == 0


async def done(event: anyio.Event) -> None:
    event.set()


# ------------------------------------------------------------------------------------------------ the queue's end


async def test_close_cancels_what_is_in_flight() -> None:
    rig = Rig(permits=4)
    async with rig.running():
        await rig.fleet.until_in_flight(*(name(index) for index in range(1, 5)))
    assert sorted(rig.fleet.cancelled) == [name(index) for index in range(1, 5)]
    books = (await rig.queue.status()).books
    assert (books.fed, books.running, books.dropped["shutdown"]) == (4, 0, 4)
    assert rig.pump.in_flight == 0


# ------------------------------------------------------------------------------------------------ failures


async def test_an_engine_failure_stops_the_run_with_its_cause() -> None:
    rig = Rig(fleet=FakeFleet())
    rig.fleet.fail(name(3), InfraError("three tries, all failed", "the engine's traceback"))
    error = await rig.fails()
    assert isinstance(error, InfraError)
    assert error.cause == "the engine's traceback"


async def test_unusable_prompts_are_dropped_by_reason_and_refilled(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [make_prompt(1, 2) for _ in range(20)]
    prompts[2] = prompts[4] = make_prompt(*range(32))
    rig = Rig(permits=6, fleet=FakeFleet(), prompts=prompts)
    rig.fleet.fail("sample_0_6", DataError("the engine refuses top_p=7"))
    async with rig.running():
        lease = await rig.lease(6)
    assert sorted(entry.meta.sample_id.index for entry in lease.samples) == [1, 2, 4, 7, 8, 9]
    dropped = (await rig.queue.status()).books.dropped
    assert (dropped["overlong"], dropped["failed"]) == (2, 1)
    assert rig.drops.counts == {"prompt over length": 2, "unusable prompt": 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "sample_0_3 dropped (overlong)" in warnings[0] or "sample_0_3 dropped (overlong)" in warnings[1]


async def test_an_empty_response_is_never_a_sample() -> None:
    def answer(request: Any) -> list[int]:
        return [] if request.request_id == "sample_0_2/1" else [1]

    rig = Rig(permits=3, fleet=FakeFleet(answer=answer))
    async with rig.running():
        lease = await rig.lease(3)
    assert sorted(entry.meta.sample_id.index for entry in lease.samples) == [1, 3, 4]


async def test_a_fleet_that_returns_aborted_turns_is_a_bug() -> None:
    class Broken(FakeFleet):
        async def generate(self, requests: Any, **options: Any) -> list[Turn]:
            turns = await super().generate(requests, **options)
            return [Turn(turn.response_ids, turn.rollout_log_probs, turn.spans, FinishReason.ABORTED) for turn in turns]

    error = await Rig(fleet=Broken()).fails()
    assert isinstance(error, BugError)


async def test_a_data_set_in_which_nothing_gets_through_stops_the_run() -> None:
    error = await Rig(fleet=FakeFleet(), prompts=[make_prompt(*range(32))] * 3).fails()
    assert isinstance(error, DataError)
    assert "3 samples in a row were dropped" in error.message


def failing_scorer(*bad: int) -> FakeScorer:
    """Raises for prompts whose first token is one of `bad`."""

    def reward(prompt: Prompt, turn: Turn) -> float:
        if prompt.prompt_ids[0] in bad:
            raise UserCodeError(f"reward function judge raised on {prompt.prompt_ids[0]}", "the user's traceback")
        return 1.0

    return FakeScorer(reward)


async def test_a_failing_reward_stops_the_run_with_its_traceback() -> None:
    rig = Rig(fleet=FakeFleet(), scorer=failing_scorer(3), prompts=[make_prompt(k) for k in range(1, 9)])
    error = await rig.fails()
    assert isinstance(error, UserCodeError)
    assert error.message == "sample_0_3: reward function judge raised on 3"
    assert error.cause == "the user's traceback"


async def test_a_failing_reward_drops_within_its_budget() -> None:
    rig = Rig(
        permits=5,
        fleet=FakeFleet(),
        scorer=failing_scorer(2, 3),
        prompts=[make_prompt(k) for k in range(1, 9)],
        reward=RewardConfig(on_error="drop", max_errors=2),
    )
    async with rig.running():
        lease = await rig.lease(5)
    assert sorted(entry.meta.sample_id.index for entry in lease.samples) == [1, 4, 5, 6, 7]
    assert (await rig.queue.status()).books.dropped["failed"] == 2


async def test_a_failing_reward_stops_beyond_its_budget() -> None:
    rig = Rig(
        permits=5,
        fleet=FakeFleet(),
        scorer=failing_scorer(2, 3, 5),
        prompts=[make_prompt(k) for k in range(1, 9)],
        reward=RewardConfig(on_error="drop", max_errors=2),
    )
    error = await rig.fails()
    assert isinstance(error, UserCodeError)
    assert "more than reward.max_errors = 2" in error.message
    assert error.cause == "the user's traceback"


def test_drop_rule_counts_a_row_of_drops_from_the_last_success() -> None:
    rule = DropRule(on_error="stop", max_errors=0, num_prompts=3)
    for _ in range(5):
        assert rule.failed("a", OverlongError("long")).reason == "overlong"
        assert rule.failed("b", DataError("odd")).reason == "failed"
        rule.passed()
    assert rule.counts == {"prompt over length": 5, "unusable prompt": 5}


# ------------------------------------------------------------------------------------------------ time limits


async def test_a_prompt_that_never_answers_cannot_wedge_a_step_on_policy() -> None:
    """Mode (a): a version waits for all samples of the last. The straggler is dropped and another takes its place."""

    async def pace(session: str) -> None:
        if session in (name(2), name(7)):
            await anyio.sleep_forever()

    rig = Rig(permits=4, total=8, fleet=FakeFleet(pace=pace), sample_s=0.2)
    async with rig.running():
        for version in (1, 2):
            lease = await rig.lease(4)
            assert len(lease.samples) == 4
            await rig.queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
            await rig.queue.set_applied_version(version)
    books = (await rig.queue.status()).books
    assert (books.trained, books.dropped["failed"]) == (8, 2)
    assert rig.drops.counts == {"took too long": 2}
    assert {name(2), name(7)} <= set(rig.fleet.cancelled)
    assert rig.turns.turns == {}


async def test_nothing_is_dropped_for_its_time_for_ever() -> None:
    async def pace(session: str) -> None:
        await anyio.sleep_forever()

    rig = Rig(fleet=FakeFleet(pace=pace), sample_s=0.02, prompts=[make_prompt(k) for k in range(1, 6)])
    error = await rig.fails()
    assert isinstance(error, DataError)
    assert "5 samples in a row were dropped" in error.message
    assert "was not generated within timeouts.sample_s = 0.02 s" in error.message


async def test_a_backlog_of_rewards_drops_nothing() -> None:
    """One call at a time, and each takes as long as a sample may: the last one waits eight times that."""
    place = anyio.Semaphore(1)

    async def gate(prompt: Prompt) -> None:
        async with place:
            await anyio.sleep(0.03)

    rig = Rig(permits=8, total=8, fleet=FakeFleet(), scorer=FakeScorer(gate=gate), sample_s=0.03)
    async with rig.running():
        assert len((await rig.lease(8)).samples) == 8
    assert rig.drops.counts == {}


async def test_a_pause_is_not_on_a_samples_time() -> None:
    with time_limit("a", 0.05) as limit:
        with limit.paused():
            await anyio.sleep(0.1)
        await anyio.lowlevel.checkpoint()
    with pytest.raises(TooLongError, match="a was not generated"), time_limit("a", 0.05) as limit:
        with limit.paused():
            await anyio.sleep(0.1)
        await anyio.sleep(1)


async def test_the_status_names_the_samples_that_are_in_flight_longest() -> None:
    rig = Rig(permits=6)
    async with rig.running():
        await rig.fleet.until_in_flight(*(name(index) for index in range(1, 7)))
        rig.clock.now_s = 30.0
        rig.fleet.release(name(1))
        await rig.lease(1)
        status = rig.pump.status()
        assert status["in_flight"] == 5
        assert status["oldest_in_flight"] == [(name(index), 30.0) for index in range(2, 7)]


# ------------------------------------------------------------------------------------------------ crashes


async def test_a_crash_of_an_engine_costs_no_sample_and_no_token() -> None:
    gate = anyio.Event()
    paces = dict.fromkeys((name(index) for index in range(1, 5)), 0)

    async def pace(session: str) -> None:
        paces[session] += 1
        if paces[session] == 3:
            await gate.wait()

    fleet = FakeFleet(answer=lambda _: [1] * 5, pace=pace, chunk_tokens=1, num_replicas=2)
    rig = Rig(permits=4, total=4, n=2, fleet=fleet)
    async with rig.running():
        await anyio.wait_all_tasks_blocked()
        assert len(fleet.crash("replica-0")) == 2
        fleet.version = 3
        gate.set()
        lease = await rig.lease(4)
        assert rig.pump.status()["quarantine"]["crashes"] == 1
    assert fleet.generated_tokens == rig.stages.counts.generated_tokens == 4 * 2 * 5
    assert {entry.payload.rows[0].spans for entry in lease.samples} == {((0, 0), (2, 3))}
    assert rig.drops.counts == {}


@pytest.mark.parametrize(("num_replicas", "slots"), [(1, 8), (2, 8), (3, 16), (1, 1)])
async def test_poison_is_dropped_with_the_evidence_and_nobody_else(
    num_replicas: int, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FakeFleet(
        poison=lambda request: request.prompt_ids[0] == 4,
        chunk_tokens=1,
        num_replicas=num_replicas,
        pace=lambda _: anyio.sleep(0.001),
    )
    prompts = [make_prompt(k, *[1] * (k % 5)) for k in range(1, 31)]
    rig = Rig(permits=29, total=29, fleet=fleet, prompts=prompts, max_concurrent_samples=slots)
    async with rig.running():
        lease = await rig.lease(29)
        assert rig.pump.status()["quarantine"]["guilty"] == 1
    assert sorted(entry.meta.sample_id.index for entry in lease.samples) == [*range(1, 4), *range(5, 31)]
    assert (await rig.queue.status()).books.dropped["failed"] == 1
    assert rig.drops.counts == {"crashed engines": 1}
    assert 2 <= len(fleet.crashes) <= 3
    assert f"{len(fleet.crashes)} engines crashed while they had sample_0_4" in caplog.text
    assert fleet.generated_tokens == sum(2 * (1 + k % 5) for k in range(1, 31) if k != 4)
    crashes = len(fleet.crashes)
    assert rig.pump.status()["quarantine"] == {
        "crashes": crashes, "explained": crashes, "guilty": 1, "struck": 0, "waiting": 0, "in_lane": "",
    }  # fmt: skip


async def test_who_waits_for_the_lane_is_seen_to_and_the_queues_end_ends_that() -> None:
    rig = Rig(permits=4)
    names = [name(index) for index in range(1, 5)]
    async with rig.running():
        for _ in range(2):
            await rig.fleet.until_in_flight(*names)
            rig.fleet.crash()
        await rig.fleet.until(lambda fleet: any(call.replica for call in fleet.calls.values()))
        await anyio.wait_all_tasks_blocked()
        assert rig.pump.status()["quarantine"] == {
            "crashes": 2, "explained": 0, "guilty": 0, "struck": 4, "waiting": 3, "in_lane": name(1),
        }  # fmt: skip
        assert ("probation", 3) in [(wait.edge, wait.count) for wait in rig.waits.snapshot()]
    assert rig.pump.status()["quarantine"]["struck"] == 0


# ------------------------------------------------------------------------------------------------ the turn log


async def test_a_restarted_rollouter_asks_for_the_turns_that_are_missing_only() -> None:
    """The first one dies with turn 0 complete and turn 1 under way; ReMax's greedy one is complete too."""

    def answer(request: GenerateRequest) -> list[int]:
        return [7] * (6 if request.request_id.endswith("/1") else 2)

    paces: dict[str, int] = {}

    async def pace(session: str) -> None:
        paces[session] = paces.get(session, 0) + 1
        if paces[session] == 2:
            await anyio.sleep_forever()

    remax = AlgorithmConfig(adv_estimator="remax")
    dying = Rig(permits=2, n=2, fleet=FakeFleet(answer=answer, pace=pace, chunk_tokens=2), algorithm=remax)
    async with anyio.create_task_group() as group:
        group.start_soon(dying.pump.run)
        await anyio.wait_all_tasks_blocked()
        # Told turn by turn, while the sample is not complete.
        assert dying.pump.status()["generated_tokens"] == 2 * (2 + 2)
        group.cancel_scope.cancel()
    assert {str(sample_id): sorted(turns) for sample_id, turns in dying.turns.turns.items()} == {
        name(1): ["0", "baseline"], name(2): ["0", "baseline"],
    }  # fmt: skip

    fleet = FakeFleet(answer=answer)
    rig = Rig(permits=2, n=2, fleet=fleet, turns=dying.turns, algorithm=remax)
    async with rig.running():
        await rig.queue.set_applied_version(0)
        lease = await rig.lease(2)
    asked = {request.request_id: request.so_far is None for request in fleet.requests}
    assert asked == {f"{name(k)}/{key}": key == "1" for k in (1, 2) for key in ("0", "1", "baseline")}
    assert fleet.generated_tokens == rig.stages.counts.generated_tokens == 2 * 6
    for sample in samples(lease):
        assert [len(row.response_ids) for row in sample.rows] == [2, 6]
        assert sample.baseline_reward == 2.0
    assert rig.turns.turns == {}
    assert rig.turns.recorded == 2 * 3


# ------------------------------------------------------------------------------------------------ sampling, counts


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("own", "length", "expected"),
    [
        (None, 10, {"max_tokens": 16}),
        (None, 20, {"max_tokens": 12}),
        ({"max_tokens": 5, "ignore_eos": True}, 10, {"max_tokens": 5, "ignore_eos": True}),
        ({"max_tokens": 100, "stop": "\n"}, 10, {"max_tokens": 16, "stop": ["\n"]}),
        ({"max_tokens": 100, "stop_token_ids": [3]}, 20, {"max_tokens": 12, "stop_token_ids": [3]}),
        ({"temperature": 0.7, "top_k": 5}, 10, {"max_tokens": 16}),
    ],
)
def test_a_prompt_says_where_its_responses_end_within_the_configs_bounds(
    own: dict[str, Any] | None, length: int, expected: dict[str, Any], training: bool
) -> None:
    prompt = make_prompt(*range(length), extra_info={"sampling_params": own} if own else {})
    config = SamplingConfig(temperature=0.7, top_k=5)
    base = {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "min_p": 0.0}
    params = sampling_params(config, prompt, response_length=16, max_model_len=32, training=training)
    assert params == base | expected


@pytest.mark.parametrize(
    "own", [{"temperature": 0.1}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
)
def test_a_prompt_cannot_change_the_distribution_it_is_trained_under(own: dict[str, Any]) -> None:
    """Log-probs of the engine and of the Trainer are tempered for all rows alike."""
    (name,) = own
    prompt = make_prompt(1, data_source="math", extra_info={"index": 7, "sampling_params": own})
    with pytest.raises(DataError, match=f"'math', row 7: field 'extra_info.sampling_params.{name}' is"):
        sampling_params(SamplingConfig(), prompt, response_length=4, max_model_len=8, training=True)
    # Validation has its own sampling, which a training row's wish is nothing to.
    params = sampling_params(ValSamplingConfig(), prompt, response_length=4, max_model_len=8, training=False)
    assert params == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 4}


def test_sampling_carries_stop_strings_and_no_seed() -> None:
    params = sampling_params(
        ValSamplingConfig(stop=("\n",)), make_prompt(1), response_length=4, max_model_len=8, training=False
    )
    assert params["stop"] == ["\n"]
    assert params["temperature"] == 0.0
    assert "seed" not in params
    with pytest.raises(OverlongError, match="no room for a response"):
        sampling_params(SamplingConfig(), make_prompt(*range(8)), response_length=4, max_model_len=8, training=True)


# ------------------------------------------------------------------------------------------------ ReMax


def greedy_is_longer(request: GenerateRequest) -> list[int]:
    return [1] * (6 if request.sampling["temperature"] == 0 else 2)


async def test_remax_asks_for_a_greedy_response_and_scores_it_as_the_baseline() -> None:
    prompt = make_prompt(5, 6, extra_info={"sampling_params": {"stop": "#", "max_tokens": 9}})
    fleet = FakeFleet(answer=greedy_is_longer)
    rig = Rig(permits=1, n=3, fleet=fleet, prompts=[prompt], algorithm=AlgorithmConfig(adv_estimator="remax"))
    async with rig.running():
        lease = await rig.lease(1)
        status = rig.pump.status()
    (sample,) = samples(lease)
    assert [row.reward for row in sample.rows] == [2.0] * 3
    assert sample.baseline_reward == 6.0
    assert fleet.sessions == ["sample_0_1"]  # one call: the prompt is prefilled once
    assert [request.sampling["temperature"] for request in fleet.requests] == [1.0, 1.0, 1.0, 0.0]
    assert fleet.requests[3].sampling == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": ["#"], "max_tokens": 9,
    }  # fmt: skip
    # Its tokens were generated, and nobody trains on them.
    assert status["generated_tokens"] == 3 * 2 + 6
    assert lease.samples[0].meta.response_tokens == 3 * 2
    assert lease.samples[0].meta.num_trajectories == 3


async def test_without_remax_there_is_no_baseline() -> None:
    rig = Rig(permits=1, n=3, fleet=FakeFleet())
    async with rig.running():
        (sample,) = samples(await rig.lease(1))
    assert sample.baseline_reward is None
    assert len(rig.fleet.requests) == 3


def test_busy_meter_splits_time() -> None:
    clock = ManualClock()
    meter = BusyMeter(clock)
    clock.now_s = 5.0
    meter.start()

    def after(seconds: float) -> None:
        clock.now_s += seconds

    after(1)
    with meter.busy():
        after(2)
        with meter.busy():
            after(3)
            assert (meter.inside, meter.busy_s, meter.idle_s) == (2, 5.0, 1.0)
        after(4)
    after(5)
    meter.stop()
    after(100)
    assert (meter.inside, meter.busy_s, meter.idle_s) == (0, 9.0, 6.0)


async def test_counts() -> None:
    rig = Rig(permits=2, n=3, prompts=[make_prompt(1, 2), make_prompt(1, 2, 3, 4)])
    async with rig.running():
        await rig.fleet.until_in_flight("sample_0_1", "sample_0_2")
        rig.clock.now_s = 2.0
        assert {wait.edge: wait.count for wait in rig.waits.snapshot()}["engine"] == 2
        rig.fleet.release("sample_0_1")
        await rig.lease(1)
        rig.clock.now_s = 5.0
        rig.fleet.release("sample_0_2")
        await rig.lease(1)
        rig.clock.now_s = 6.0
        status = rig.pump.status()
    assert status["samples_done"] == 2
    assert status["generated_tokens"] == 3 * 2 + 3 * 4
    assert (status["busy_s"], status["idle_s"]) == (5.0, 1.0)
    assert (status["generate_s"], status["max_generate_s"]) == (7.0, 5.0)
    assert (status["in_flight"], status["generating"]) == (0, 0)


async def test_arrays_of_a_sample_have_the_documented_types() -> None:
    rig = Rig(permits=1, fleet=FakeFleet())
    async with rig.running():
        row = samples(await rig.lease(1))[0].rows[0]
    types: dict[str, Callable[[Any], bool]] = {
        "response_ids": lambda a: a.dtype == np.int32,
        "response_mask": lambda a: a.dtype == np.bool_,
        "rollout_log_probs": lambda a: a.dtype == np.float32,
    }
    assert all(check(getattr(row, field)) for field, check in types.items())
