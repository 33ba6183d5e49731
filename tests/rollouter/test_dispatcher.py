"""The dispatcher: order of samples, drops and stops, slots, the end of the queue, and its counts."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import anyio
import numpy as np
import pytest

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import SamplingConfig, ValSamplingConfig
from asyncrl.core.failures import BugError, DataError, UserCodeError
from asyncrl.core.ports import GenerateRequest, GenerationEvent, Score, TurnFinished
from asyncrl.core.types import FinishReason, Prompt, Sample, Turn
from asyncrl.core.waits import WaitBoard
from rollouter.crash_isolation import CrashIsolation, SampleSessions, TimeLimit, time_limit
from rollouter.drop_policy import DropPolicy, OverlongError, TooLongError
from rollouter.group import GroupGeneration
from rollouter.requests import sampling_params
from rollouter.sample_runner import scored_rows
from tests.fakes.conversations import dialogue
from tests.fakes.dispatcher import DispatcherRig, group_request, leased_samples, sample_name
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, MemoryPayloads, make_prompt
from tests.fuzz.loop import run as run_virtually

# ------------------------------------------------------------------------------------------------ samples


async def test_a_sample_has_prompt_turns_and_scores() -> None:
    rig = DispatcherRig(permits=1, fleet=FakeFleet(), prompts=[make_prompt(5, 6, 7, data_source="math")])
    async with rig.running():
        lease = await rig.lease(1)
    (sample,) = leased_samples(lease)
    assert str(sample.sample_id) == "sample_0_1"
    assert sample.data_source == "math"
    assert len(sample.rows) == 2
    assert sample.baseline_reward is None, "only ReMax asks for a baseline"
    row = sample.rows[0]
    assert (row.response_ids.dtype, row.response_mask.dtype) == (np.int32, np.bool_)
    assert row.rollout_log_probs.dtype == np.float32
    assert row.prompt_ids.tolist() == row.response_ids.tolist() == [5, 6, 7]
    assert row.response_mask.tolist() == [True] * 3
    assert row.reward == 3.0
    assert lease.samples[0].meta.response_tokens == 6
    assert [request.request_id for request in rig.fleet.requests] == ["sample_0_1/0", "sample_0_1/1"]
    assert rig.fleet.sessions == ["sample_0_1"]


@pytest.mark.parametrize("seed", range(5))
async def test_samples_complete_in_the_order_of_generation(seed: int) -> None:
    rig = DispatcherRig(permits=8, n=1)
    order = [sample_name(index) for index in range(1, 9)]
    random.Random(seed).shuffle(order)
    async with rig.running():
        await rig.fleet.until_in_flight(*order)
        done = []
        for session in order:
            rig.fleet.release(session)
            done += leased_samples(await rig.lease(1))
    assert [str(sample.sample_id) for sample in done] == order


async def test_a_straggler_blocks_no_other_sample() -> None:
    """The straggler occupies one of two slots, and all other samples use the other one."""
    rig = DispatcherRig(permits=1000, total=51, n=1, max_concurrent_samples=2)
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1), sample_name(2))
        rig.fleet.hold = False
        rig.fleet.release(sample_name(2))
        lease = await rig.lease(50)
        assert list(rig.fleet.calls) == [sample_name(1)]
        assert sorted(entry.meta.sample_id.index for entry in lease.samples) == list(range(2, 52))
        rig.fleet.release(sample_name(1))
        assert (await rig.lease(1)).samples[0].meta.sample_id.index == 1
    assert rig.fleet.max_in_flight == 2


async def test_slow_scoring_holds_no_slot() -> None:
    gate = anyio.Event()
    rig = DispatcherRig(
        permits=10, max_concurrent_samples=1, fleet=FakeFleet(), scorer=FakeScorer(gate=lambda _: gate.wait())
    )
    async with rig.running():
        await rig.fleet.until(lambda fleet: len(fleet.sessions) == 10)
        assert rig.dispatcher.runner.counts.samples_done == 0
        gate.set()
        assert len((await rig.lease(10)).samples) == 10


async def test_a_sample_may_be_requeued_before_its_offer_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue restarts before it answers, and finds the payload damaged before Ray retries the call."""
    rig = DispatcherRig(permits=1, fleet=FakeFleet())
    answers, offer, ends = [anyio.Event(), anyio.Event()], rig.queue.offer, anyio.Event()
    left = iter(answers)

    async def offer_and_be_late(*what: Any) -> None:
        answer = next(left)
        await offer(*what)
        await answer.wait()

    monkeypatch.setattr(rig.queue, "offer", offer_and_be_late)
    monkeypatch.setattr(rig.turns, "forget", lambda sample_id: done(ends))
    async with rig.running():
        (leased,) = (await rig.lease(1)).samples
        rig.clock.now_s = 1.0
        await rig.queue.requeue(leased.meta.sample_id)
        (again,) = (await rig.lease(1)).samples
        assert again.meta.sample_id == leased.meta.sample_id
        answers[0].set()
        await ends.wait()
        await anyio.wait_all_tasks_blocked()
        assert rig.dispatcher.in_flight == 1
        answers[1].set()
        await anyio.wait_all_tasks_blocked()
        assert rig.dispatcher.in_flight == 0


async def done(event: anyio.Event) -> None:
    event.set()


# ------------------------------------------------------------------------------------------------ closing the queue


async def test_close_cancels_samples_in_flight() -> None:
    rig = DispatcherRig(permits=4)
    async with rig.running():
        await rig.fleet.until_in_flight(*(sample_name(index) for index in range(1, 5)))
    assert sorted(rig.fleet.cancelled) == [sample_name(index) for index in range(1, 5)]
    counts = (await rig.queue.status()).counts
    assert (counts.fed, counts.running, counts.dropped["shutdown"]) == (4, 0, 4)
    assert rig.dispatcher.in_flight == 0


# ------------------------------------------------------------------------------------------------ failures


async def test_unusable_prompts_are_dropped_by_reason_and_refilled(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [make_prompt(1, 2) for _ in range(20)]
    prompts[2] = prompts[4] = make_prompt(*range(32))
    rig = DispatcherRig(permits=6, fleet=FakeFleet(), prompts=prompts)
    rig.fleet.fail("sample_0_6", DataError("the engine refuses top_p=7"))
    assert await rig.run(6) == [1, 2, 4, 7, 8, 9]
    dropped = (await rig.queue.status()).counts.dropped
    assert (dropped["overlong"], dropped["failed"]) == (2, 1)
    assert rig.drops.counts == {"prompt over length": 2, "unusable prompt": 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "sample_0_3 dropped (overlong)" in warnings[0] or "sample_0_3 dropped (overlong)" in warnings[1]


async def test_an_empty_response_is_never_a_sample() -> None:
    def answer(request: Any) -> list[int]:
        return [] if request.request_id == "sample_0_2/1" else [1]

    rig = DispatcherRig(permits=3, fleet=FakeFleet(answer=answer))
    assert await rig.run(3) == [1, 3, 4]


async def test_a_fleet_that_returns_aborted_turns_is_a_bug() -> None:
    class Broken(FakeFleet):
        async def generate(self, requests: Any, *, session: str) -> AsyncGenerator[GenerationEvent, None]:
            async for event in super().generate(requests, session=session):
                if isinstance(event, TurnFinished):
                    event = TurnFinished(event.number, replace(event.turn, finish_reason=FinishReason.ABORTED))
                yield event

    await DispatcherRig(fleet=Broken()).fails(BugError)


async def test_a_sample_that_fits_in_no_file_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples share files, so a run that continued might drop all samples."""

    async def put(self: MemoryPayloads, sample: Sample) -> Any:
        raise DataError("1 samples do not fit in a file")

    monkeypatch.setattr(MemoryPayloads, "put", put)
    rig = DispatcherRig(fleet=FakeFleet())
    assert "do not fit in a file" in (await rig.fails(DataError)).message
    assert rig.drops.counts == {}


async def test_a_score_per_trajectory_is_required() -> None:
    class Short(FakeScorer):
        async def score(self, prompt: Prompt, trajectories: Any) -> list[Score]:
            return (await super().score(prompt, trajectories))[1:]

    await DispatcherRig(fleet=FakeFleet(), scorer=Short()).fails(ValueError)


async def test_a_data_set_without_a_usable_prompt_stops_the_run() -> None:
    error = await DispatcherRig(fleet=FakeFleet(), prompts=[make_prompt(*range(32))] * 3).fails(DataError)
    assert "3 samples in a row were dropped" in error.message


def failing_reward_rig(*bad: int, **options: Any) -> DispatcherRig:
    """Return a rig with the prompts 1 to 8, whose reward function raises for those in `bad`."""

    def reward(prompt: Prompt, turn: Turn) -> float:
        if prompt.prompt_ids[0] in bad:
            raise UserCodeError(f"reward function judge raised on {prompt.prompt_ids[0]}", "the user's traceback")
        return 1.0

    prompts = [make_prompt(k) for k in range(1, 9)]
    return DispatcherRig(permits=5, fleet=FakeFleet(), scorer=FakeScorer(reward), prompts=prompts, **options)


DROP = RewardConfig(on_error="drop", max_errors=2)


@pytest.mark.parametrize(
    ("bad", "reward", "message"),
    [
        ((3,), None, "sample_0_3: reward function judge raised on 3"),
        ((2, 3, 5), DROP, "more than reward.max_errors = 2"),
    ],
)
async def test_a_failing_reward_stops_the_run_with_its_traceback(
    bad: tuple[int, ...], reward: RewardConfig | None, message: str
) -> None:
    error = await failing_reward_rig(*bad, reward=reward).fails(UserCodeError)
    assert message in error.message
    assert error.cause == "the user's traceback"


async def test_a_failing_reward_drops_samples_within_its_error_budget() -> None:
    rig = failing_reward_rig(2, 3, reward=DROP)
    assert await rig.run(5) == [1, 4, 5, 6, 7]
    assert (await rig.queue.status()).counts.dropped["failed"] == 2


@pytest.mark.parametrize("extra", [{"": 1.0}, {"a/": 1.0}, {"a" * 201: 1.0}, dict.fromkeys(map(str, range(101)), 1.0)])
async def test_extras_that_cannot_be_reported_are_failures_of_user_code(extra: dict[str, float]) -> None:
    class Naming(FakeScorer):
        async def score(self, prompt: Prompt, trajectories: Any) -> list[Score]:
            numbers = extra if prompt.prompt_ids[0] == 2 else {"format/a b": 1.0}
            return [replace(one, extra=numbers) for one in await super().score(prompt, trajectories)]

    def rig(reward: RewardConfig | None) -> DispatcherRig:
        prompts = [make_prompt(k) for k in range(1, 9)]
        return DispatcherRig(permits=5, fleet=FakeFleet(), scorer=Naming(), prompts=prompts, reward=reward)

    error = await rig(None).fails(UserCodeError)
    assert "sample_0_2: the extras of reward functions cannot be reported" in error.message
    assert await rig(DROP).run(5) == [1, 3, 4, 5, 6]


def test_a_metric_of_a_tool_without_a_name_is_a_failure_of_user_code() -> None:
    with pytest.raises(UserCodeError, match="metrics cannot be reported: a number has the name 'add/'"):
        scored_rows(0, replace(dialogue("add", "22"), metrics={"add/": 1.0}), Score(1.0))


def test_the_drop_policy_counts_consecutive_drops() -> None:
    policy = DropPolicy(RewardConfig(), num_prompts=3, sample_s=60, clock=lambda: 0.0)
    for _ in range(5):
        assert policy.decide("a", OverlongError("long")).reason == "overlong"
        assert policy.decide("b", DataError("odd")).reason == "failed"
        policy.note_success()
    assert policy.counts == {"prompt over length": 5, "unusable prompt": 5}


# ------------------------------------------------------------------------------------------------ time limits


def test_a_prompt_that_is_never_answered_cannot_block_an_on_policy_step() -> None:
    """Each version waits for all samples of the previous one, so the straggler is dropped and replaced."""

    async def pace(session: str) -> None:
        if session in (sample_name(2), sample_name(7)):
            await anyio.sleep_forever()

    async def main() -> None:
        rig = DispatcherRig(permits=4, total=8, fleet=FakeFleet(pace=pace), sample_s=0.2)
        async with rig.running():
            for version in (1, 2):
                lease = await rig.lease(4)
                assert len(lease.samples) == 4
                await rig.queue.commit(lease.lease_id, [entry.meta.sample_id for entry in lease.samples])
                await rig.queue.set_applied_version(version)
        counts = (await rig.queue.status()).counts
        assert (counts.trained, counts.dropped["failed"]) == (8, 2)
        assert rig.drops.counts == {"took too long": 2}
        assert {sample_name(2), sample_name(7)} <= set(rig.fleet.cancelled)
        assert rig.turns.turns == {}

    run_virtually(main, 0)


async def test_a_run_whose_samples_all_time_out_stops() -> None:
    rig = DispatcherRig(
        fleet=FakeFleet(pace=lambda session: anyio.sleep_forever()),
        sample_s=0.02,
        prompts=[make_prompt(k) for k in range(1, 6)],
    )
    error = await rig.fails(DataError)
    assert "samples in a row were dropped, and an epoch has 5: no prompt gets through" in error.message
    assert "was not generated within timeouts.sample_s = 0.02 s" in error.message


def test_samples_that_one_cause_delays_do_not_stop_the_run() -> None:
    """The samples that are generated at the same time reach their limit one after the other, and then the next ones
    have one limit more."""
    clock = Mock(return_value=100.0)
    policy = DropPolicy(RewardConfig(), num_prompts=3, sample_s=60, clock=clock)
    for clock.return_value in (100.0, 120.0, 140.0, 159.0):
        assert policy.decide("a", TooLongError("slow")).reason == "failed"
    clock.return_value = 160.0
    with pytest.raises(DataError, match="5 samples in a row were dropped, and an epoch has 3"):
        policy.decide("b", TooLongError("slow"))


@pytest.mark.parametrize("seed", range(3))
def test_a_backlog_of_rewards_drops_nothing(seed: int) -> None:
    """Scoring calls run one at a time, and each takes as long as the limit of a sample, so the last one waits eight
    times the limit. Time is virtual, because on a busy machine generation, too, takes longer than the limit.
    """

    async def main() -> None:
        place = anyio.Semaphore(1)

        async def gate(prompt: Prompt) -> None:
            async with place:
                await anyio.sleep(0.03)

        rig = DispatcherRig(permits=8, total=8, fleet=FakeFleet(), scorer=FakeScorer(gate=gate), sample_s=0.03)
        assert len(await rig.run(8)) == 8
        assert rig.drops.counts == {}

    run_virtually(main, seed)


def test_pauses_do_not_count_against_the_time_limit() -> None:
    async def main() -> None:
        with time_limit("a", 0.05) as limit:
            with limit.paused():
                await anyio.sleep(0.1)
            await anyio.lowlevel.checkpoint()
        with pytest.raises(TooLongError, match="a was not generated"), time_limit("a", 0.05) as limit:
            with limit.paused():
                await anyio.sleep(0.1)
            await anyio.sleep(1)

    run_virtually(main, 0)


async def test_a_wait_for_a_replica_does_not_count_against_the_time_limit() -> None:
    fleet, scope = FakeFleet(hold=True), anyio.CancelScope(deadline=anyio.current_time() + 60.0)
    fleet.accept_gate = anyio.Event()
    sessions = SampleSessions(CrashIsolation(3, waits=WaitBoard(), settle_s=0.0), TimeLimit(scope))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(GroupGeneration(group_request(1), fleet=fleet, sessions=sessions).run)
            for _ in ("no replica is up", "the only replica has crashed"):
                await anyio.wait_all_tasks_blocked()
                assert scope.deadline == math.inf
                fleet.accept_gate.set()
                await anyio.wait_all_tasks_blocked()
                assert scope.deadline < math.inf
                fleet.accept_gate = anyio.Event()
                fleet.crash()
            fleet.accept_gate.set()
            fleet.release_all()
    assert len(fleet.crashes) == 2


async def test_the_time_limit_counts_while_one_conversation_waits_for_a_replica_and_another_has_one() -> None:
    """A replica that waits for its running requests before it loads weights accepts no others, so a pause of the limit
    would let a conversation that never ends block the replica for ever.
    """
    scope = anyio.CancelScope(deadline=anyio.current_time() + 60.0)
    sessions = SampleSessions(CrashIsolation(2, waits=WaitBoard()), TimeLimit(scope))
    with sessions.generating("a/0"), sessions.generating("a/1"):
        assert scope.deadline == math.inf
        sessions.place("a/0", "replica")
        assert scope.deadline < math.inf
        sessions.place("a/0", "")
        assert scope.deadline == math.inf
    assert scope.deadline < math.inf
    sessions.place("a/0", "")  # as for a lost worker, whose session may begin with a tool elsewhere
    assert scope.deadline < math.inf


async def test_the_status_names_the_oldest_samples_in_flight() -> None:
    rig = DispatcherRig(permits=6)
    async with rig.running():
        await rig.fleet.until_in_flight(*(sample_name(index) for index in range(1, 7)))
        rig.clock.now_s = 30.0
        rig.fleet.release(sample_name(1))
        await rig.lease(1)
        status = rig.dispatcher.status()
        assert status["in_flight"] == 5
        assert status["oldest_in_flight"] == [(sample_name(index), 30.0) for index in range(2, 7)]


# ------------------------------------------------------------------------------------------------ crashes


async def test_a_crash_of_an_engine_loses_no_sample_and_no_token() -> None:
    gate = anyio.Event()
    paces = dict.fromkeys((sample_name(index) for index in range(1, 5)), 0)

    async def pace(session: str) -> None:
        paces[session] += 1
        if paces[session] == 3:
            await gate.wait()

    fleet = FakeFleet(answer=lambda _: [1] * 5, pace=pace, chunk_tokens=1, num_replicas=2)
    rig = DispatcherRig(permits=4, total=4, n=2, fleet=fleet)
    async with rig.running():
        await anyio.wait_all_tasks_blocked()
        assert len(fleet.crash("replica-0")) == 2
        fleet.version = 3
        gate.set()
        lease = await rig.lease(4)
        assert rig.dispatcher.status()["crash_isolation"]["crashes"] == 1
    assert fleet.generated_tokens == rig.dispatcher.runner.counts.generated_tokens == 4 * 2 * 5
    assert {entry.payload.rows[0].spans for entry in lease.samples} == {((0, 0), (2, 3))}
    assert rig.drops.counts == {}


@pytest.mark.parametrize(("num_replicas", "slots"), [(1, 8), (2, 8), (3, 16), (1, 1)])
async def test_only_the_poison_sample_is_dropped_with_its_evidence(
    num_replicas: int, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FakeFleet(
        poison=lambda request: request.prompt_ids[0] == 4,
        chunk_tokens=1,
        num_replicas=num_replicas,
        pace=lambda _: anyio.sleep(0.001),
    )
    prompts = [make_prompt(k, *[1] * (k % 5)) for k in range(1, 31)]
    rig = DispatcherRig(permits=29, total=29, fleet=fleet, prompts=prompts, max_concurrent_samples=slots)
    assert await rig.run(29) == [*range(1, 4), *range(5, 31)]
    assert (await rig.queue.status()).counts.dropped["failed"] == 1
    assert rig.drops.counts == {"crashed engines": 1}
    assert 2 <= len(fleet.crashes) <= 3
    assert f"{len(fleet.crashes)} engines crashed with sample_0_4 in flight" in caplog.text
    assert fleet.generated_tokens == sum(2 * (1 + k % 5) for k in range(1, 31) if k != 4)
    crashes = len(fleet.crashes)
    assert rig.dispatcher.status()["crash_isolation"] == {
        "crashes": crashes, "explained": crashes, "blamed": 1, "with_strikes": 0, "waiting": 0, "isolated": "",
    }  # fmt: skip


async def test_waits_for_isolation_are_reported_and_end_with_the_queue() -> None:
    rig = DispatcherRig(permits=4)
    names = [sample_name(index) for index in range(1, 5)]
    async with rig.running():
        for _ in range(2):
            await rig.fleet.until_in_flight(*names)
            rig.fleet.crash()
        await rig.fleet.until(lambda fleet: any(call.replica for call in fleet.calls.values()))
        await anyio.wait_all_tasks_blocked()
        assert rig.dispatcher.status()["crash_isolation"] == {
            "crashes": 2, "explained": 0, "blamed": 0, "with_strikes": 4, "waiting": 3, "isolated": sample_name(1),
        }  # fmt: skip
        assert ("isolation", 3) in [(wait.edge, wait.count) for wait in rig.waits.snapshot()]
    assert rig.dispatcher.status()["crash_isolation"]["with_strikes"] == 0


# ------------------------------------------------------------------------------------------------ the turn log


async def test_a_restarted_rollouter_generates_only_the_missing_turns() -> None:
    """The first Rollouter dies when turn 0 and the greedy turn are complete and turn 1 is unfinished."""

    def answer(request: GenerateRequest) -> list[int]:
        return [7] * (6 if request.request_id.endswith("/1") else 2)

    paces: dict[str, int] = {}

    async def pace(session: str) -> None:
        paces[session] = paces.get(session, 0) + 1
        if paces[session] == 2:
            await anyio.sleep_forever()

    remax = AlgorithmConfig(adv_estimator="remax")
    dying = DispatcherRig(permits=2, n=2, fleet=FakeFleet(answer=answer, pace=pace, chunk_tokens=2), algorithm=remax)
    async with anyio.create_task_group() as group:
        group.start_soon(dying.dispatcher.run)
        await anyio.wait_all_tasks_blocked()
        # Tokens of complete turns are counted before their sample is complete.
        assert dying.dispatcher.status()["generated_tokens"] == 2 * (2 + 2)
        group.cancel_scope.cancel()
    assert {str(sample_id): sorted(turns) for sample_id, turns in dying.turns.turns.items()} == {
        sample_name(1): ["0", "baseline"], sample_name(2): ["0", "baseline"],
    }  # fmt: skip

    fleet = FakeFleet(answer=answer)
    rig = DispatcherRig(permits=2, n=2, fleet=fleet, turns=dying.turns, algorithm=remax)
    async with rig.running():
        await rig.queue.set_applied_version(0)
        lease = await rig.lease(2)
    asked = {request.request_id: request.so_far is None for request in fleet.requests}
    assert asked == {f"{sample_name(k)}/1": True for k in (1, 2)}
    assert fleet.generated_tokens == rig.dispatcher.runner.counts.generated_tokens == 2 * 6
    for sample in leased_samples(lease):
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
def test_a_prompt_may_set_end_conditions_within_the_limits_of_the_configuration(
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
def test_a_prompt_cannot_change_the_sampling_distribution_of_training(own: dict[str, Any]) -> None:
    """The engine and the Trainer apply one temperature to the log-probs of all rows."""
    (name,) = own
    prompt = make_prompt(1, data_source="math", extra_info={"index": 7, "sampling_params": own})
    with pytest.raises(DataError, match=f"'math', row 7: field 'extra_info.sampling_params.{name}' is"):
        sampling_params(SamplingConfig(), prompt, response_length=4, max_model_len=8, training=True)
    # Validation has separate sampling parameters.
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
    rig = DispatcherRig(permits=1, n=3, fleet=fleet, prompts=[prompt], algorithm=AlgorithmConfig(adv_estimator="remax"))
    async with rig.running():
        lease = await rig.lease(1)
        status = rig.dispatcher.status()
    (sample,) = leased_samples(lease)
    assert [row.reward for row in sample.rows] == [2.0] * 3
    assert sample.baseline_reward == 6.0
    assert fleet.sessions == ["sample_0_1"]  # a single call prefills the prompt only once
    assert [request.sampling["temperature"] for request in fleet.requests] == [1.0, 1.0, 1.0, 0.0]
    assert fleet.requests[3].sampling == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop": ["#"], "max_tokens": 9,
    }  # fmt: skip
    # The tokens of the baseline are generated but not trained on.
    assert status["generated_tokens"] == 3 * 2 + 6
    assert lease.samples[0].meta.response_tokens == 3 * 2
    assert lease.samples[0].meta.num_trajectories == 3


async def test_the_status_counts_samples_tokens_and_seconds() -> None:
    rig = DispatcherRig(permits=2, n=3, prompts=[make_prompt(1, 2), make_prompt(1, 2, 3, 4)])
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
        status = rig.dispatcher.status()
    assert status["samples_done"] == 2
    assert status["generated_tokens"] == 3 * 2 + 3 * 4
    assert (status["busy_s"], status["idle_s"]) == (5.0, 1.0)
    assert (status["generate_s"], status["max_generate_s"]) == (7.0, 5.0)
    assert (status["in_flight"], status["generating"]) == (0, 0)
