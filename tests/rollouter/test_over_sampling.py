"""Over-sampling of samples and trajectories: which of them are used, aborted, or resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from asyncrl.config.sections.rollout import OverSampleConfig
from asyncrl.core.failures import UserCodeError
from asyncrl.core.ports import GenerateRequest, Lease
from asyncrl.core.types import Prompt, SampleId, SampleMeta, Span, Turn
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from rollouter.group import GroupGeneration
from tests.fakes.dispatcher import DispatcherRig, ScriptedConverser, group_request, leased_samples, sample_name
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, MemoryTurns, make_prompt, until


def indices(lease: Lease) -> list[int]:
    return sorted(entry.meta.sample_id.index for entry in lease.samples)


# ------------------------------------------------------------------------------------------------ more samples


async def test_surplus_samples_are_aborted_and_dropped() -> None:
    rig = DispatcherRig(permits=4, n=1, over_sample=OverSampleConfig(samples=0.5))
    async with rig.running():
        await rig.fleet.until_in_flight(*(sample_name(index) for index in range(1, 7)))
        assert len(rig.fleet.calls) == 6, "4 samples and half as many again"
        rig.fleet.release(sample_name(2), sample_name(3), sample_name(4))
        await rig.lease(3)
        assert not rig.fleet.cancelled, "3 samples do not fill a version"
        rig.fleet.release(sample_name(6))
        assert indices(await rig.lease(1)) == [6]
        await rig.until_dropped(2)
        assert sorted(rig.fleet.cancelled) == [sample_name(1), sample_name(5)]
        counts = (await rig.queue.status()).counts
        assert (counts.fed, counts.running, counts.leased) == (6, 0, 4)
        assert not rig.turns.turns, "the turn log has dropped the surplus samples"
        # The next version admits the same number of samples again.
        await rig.queue.set_applied_version(1)
        await rig.fleet.until_in_flight(*(sample_name(index) for index in range(7, 13)))


async def test_surplus_samples_that_are_generated_are_kept() -> None:
    gate = anyio.Event()

    async def hold(prompt: Prompt) -> None:
        await gate.wait()

    rig = DispatcherRig(permits=2, n=1, scorer=FakeScorer(gate=hold), over_sample=OverSampleConfig(samples=0.5))
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1), sample_name(2), sample_name(3))
        rig.fleet.release_all()
        await until(lambda: not rig.fleet.calls)
        gate.set()
        assert len((await rig.lease(3)).samples) == 3
        assert (await rig.queue.status()).counts.num_dropped == 0


@pytest.mark.parametrize("unfinished", ["keep_finished", "keep_partial"])
async def test_kept_samples_resume_under_the_next_version(unfinished: Any) -> None:
    """Sample 3 has one short response and one long one, which is cut after 4 tokens."""
    prompts = [make_prompt(1), make_prompt(2), make_prompt(3)]

    def answer(request: GenerateRequest) -> list[int]:
        long = request.prompt_ids[0] == 3 and request.request_id.split("/")[1].startswith("1")
        return list(range(10, 22)) if long else [7, 7]

    first_round = [anyio.Semaphore(2)]

    async def paced(session: str) -> None:
        if session == sample_name(3) and first_round:
            await first_round[0].acquire()
        elif session not in (sample_name(1), sample_name(2), sample_name(3)):
            await anyio.sleep_forever()

    fleet = FakeFleet(answer=answer, pace=paced, chunk_tokens=2)
    over_sample = OverSampleConfig(samples=0.5, unfinished=unfinished)
    rig = DispatcherRig(permits=2, n=2, fleet=fleet, prompts=prompts, over_sample=over_sample)
    async with rig.running():
        assert indices(await rig.lease(2)) == [1, 2]
        await until(lambda: sample_name(3) in fleet.cancelled)
        assert (await rig.queue.status()).counts.running == 1
        first_round.clear()
        fleet.version = 1
        await rig.queue.set_applied_version(1)
        (sample,) = leased_samples(await rig.lease(1, trainer_version=1))
    assert sample.sample_id.index == 3
    short, long = sample.rows
    assert short.spans == (Span(0, 0),) and short.response_ids.tolist() == [7, 7]
    assert long.response_ids.tolist() == list(range(10, 22))
    partial = unfinished == "keep_partial"
    assert long.spans == ((Span(0, 0), Span(4, 1)) if partial else (Span(0, 1),))
    assert rig.turns.recorded == 6, "no turn was completed twice"


async def test_a_complete_turn_is_logged_even_if_its_sample_is_cut_meanwhile() -> None:
    """Otherwise the turn is generated again if the Rollouter dies before the sample is READY."""
    logging, gate = anyio.Event(), anyio.Event()
    logged: list[list[int]] = []

    class SlowTurns(MemoryTurns):
        async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
            if sample_id.index == 3:
                logging.set()
                await gate.wait()
                logged.extend(turn.response_ids.tolist() for turn in turns.values())
            await super().record(sample_id, turns)

    def answer(request: GenerateRequest) -> list[int]:
        return [7, 7] if request.request_id.split("/")[1].startswith("0") else list(range(10, 22))

    first_round = [anyio.Semaphore(1)]

    async def paced(session: str) -> None:
        if session == sample_name(3) and first_round:
            await first_round[0].acquire()

    fleet = FakeFleet(answer=answer, pace=paced, chunk_tokens=2)
    over_sample = OverSampleConfig(samples=0.5, unfinished="keep_finished")
    rig = DispatcherRig(permits=2, n=2, fleet=fleet, turns=SlowTurns(), over_sample=over_sample)
    async with rig.running():
        with anyio.fail_after(10):
            await logging.wait()
        assert indices(await rig.lease(2)) == [1, 2]
        await anyio.wait_all_tasks_blocked()
        gate.set()
        await until(lambda: sample_name(3) in fleet.cancelled)
        await anyio.wait_all_tasks_blocked()
        assert logged == [[7, 7]]
        first_round.clear()
        await rig.queue.set_applied_version(1)
        await rig.lease(1, trainer_version=1)
    assert logged == [[7, 7], list(range(10, 22))], "each turn is logged once"


async def test_without_over_sampling_no_sample_is_cut() -> None:
    rig = DispatcherRig(permits=2, n=1)
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1), sample_name(2))
        rig.fleet.release(sample_name(1))
        await rig.lease(1)
        assert not await rig.queue.has_surplus(False, timeout_s=0.0)
        assert not rig.fleet.cancelled


# ------------------------------------------------------------------------------------------------ more trajectories


def lengths(request: GenerateRequest) -> list[int]:
    """Give trajectory k a response of k + 1 tokens."""
    return [5] * (int(request.request_id.split("/")[1].split("-")[0].split(".")[0]) + 1)


@pytest.mark.parametrize(("extra", "finished"), [(0, 5), (2, 3)])
async def test_the_first_n_trajectories_count_and_the_others_are_aborted(extra: int, finished: int) -> None:
    fleet = FakeFleet(answer=lengths, chunk_tokens=1)
    generation = GroupGeneration(group_request(5 - extra, extra=extra), fleet=fleet)
    async with generation.running() as events:
        ended = [one.number async for together in events for one in together]
    made = generation.trajectories
    assert [one.num_sampled for one in made] == list(range(1, finished + 1))
    assert ended == list(range(finished))
    assert bool(fleet.cancelled) == (extra > 0)


@pytest.mark.parametrize(("logged", "used"), [([0, 2], [0, 2]), ([2], [0, 2]), ([1, 2, 3], [1, 2])])
async def test_logged_trajectories_count_before_new_ones(logged: list[int], used: list[int]) -> None:
    """A Rollouter died, and its successor finds these complete trajectories of four in the turn log."""
    log = FakeFleet(answer=lengths)
    turns: dict[str, Turn] = {}
    await GroupGeneration(group_request(4), fleet=log, turns=turns).run()
    fleet = FakeFleet(answer=lengths, chunk_tokens=1)
    logged_turns = {str(number): turns[str(number)] for number in logged}
    made = await GroupGeneration(group_request(2, extra=2), fleet=fleet, turns=logged_turns).run()
    assert [one.number for one in made] == used
    assert bool(fleet.requests) == (len(logged) < 2), "no engine is called if the log has enough trajectories"


# ------------------------------------------------------------------------------------------------ early scoring


async def test_a_trajectory_is_scored_as_soon_as_it_has_ended() -> None:
    scored: list[int] = []

    def reward(prompt: Prompt, row: Any) -> float:
        scored.append(len(row.response_ids))
        return float(len(row.response_ids))

    go, rounds = anyio.Event(), [1]

    async def pace(session: str) -> None:
        if not rounds:
            await go.wait()
        rounds.clear()

    fleet = FakeFleet(answer=lengths, chunk_tokens=1, pace=pace)
    rig = DispatcherRig(permits=1, n=2, fleet=fleet, scorer=FakeScorer(reward, whole_group=False))
    async with rig.running():
        await until(lambda: scored)
        assert scored == [1] and fleet.calls, "the other trajectory is still in generation"
        go.set()
        (sample,) = leased_samples(await rig.lease(1))
    assert [row.reward for row in sample.rows] == [1.0, 2.0]


async def test_a_failing_reward_aborts_generation() -> None:
    def reward(prompt: Prompt, row: Any) -> float:
        raise UserCodeError("the reward function raised")

    held = anyio.Event()
    count = 0

    async def pace(session: str) -> None:
        nonlocal count
        count += 1
        if count > 1:
            await held.wait()

    fleet = FakeFleet(answer=lengths, chunk_tokens=1, pace=pace)
    rig = DispatcherRig(permits=1, n=2, fleet=fleet, scorer=FakeScorer(reward, whole_group=False))
    error = await rig.fails(UserCodeError)
    assert "the reward function raised" in str(error)
    assert fleet.cancelled == [sample_name(1)]


# ------------------------------------------------------------------------------------------------ conversations


async def test_each_conversation_requests_its_turns_independently() -> None:
    go = anyio.Event()

    async def pace(session: str) -> None:
        if session.endswith("/0"):
            await go.wait()

    rig = DispatcherRig(
        permits=1, n=2, agent=ScriptedConverser(3), fleet=FakeFleet(pace=pace), prompts=[make_prompt(1, 2)]
    )
    async with rig.running():
        await until(lambda: len(rig.turns.turns.get(SampleId(0, 1), {})) == 3)
        assert list(rig.fleet.calls) == [f"{sample_name(1)}/0"], "the other conversation is complete"
        go.set()
        (sample,) = leased_samples(await rig.lease(1))
    asked = [request.request_id for request in rig.fleet.requests if "/1" in request.request_id]
    assert asked == [f"{sample_name(1)}/1", f"{sample_name(1)}/1.1", f"{sample_name(1)}/1.2"]
    assert [row.response_mask.tolist().count(False) for row in sample.rows] == [2, 2]
    assert [row.trajectory for row in sample.rows] == [0, 1]


@pytest.mark.parametrize(("answer", "num_requests"), [(9, 1), (8, 2)])
async def test_logged_turns_are_used_only_in_the_same_context(answer: int, num_requests: int) -> None:
    """A Rollouter died after the second of three turns. The tools of its successor return the same result or another
    one."""
    turns: dict[str, Turn] = {}
    await GroupGeneration(group_request(1), fleet=FakeFleet(), agent=ScriptedConverser(2), turns=turns).run()
    fleet = FakeFleet()
    await GroupGeneration(group_request(1), fleet=fleet, agent=ScriptedConverser(3, answer), turns=turns).run()
    assert len(fleet.requests) == num_requests


# ------------------------------------------------------------------------------------------------ ends and failures


@pytest.mark.parametrize("unfinished", ["drop", "keep_finished"])
async def test_kept_surplus_does_not_delay_the_end_of_the_run(unfinished: Any) -> None:
    """The run has three samples and two in a version, so the last lease is smaller."""
    rig = DispatcherRig(permits=2, total=3, n=1, over_sample=OverSampleConfig(samples=0.5, unfinished=unfinished))
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1), sample_name(2), sample_name(3))
        rig.fleet.release(sample_name(1), sample_name(2))
        assert indices(await rig.lease(2)) == [1, 2]
        await rig.queue.set_applied_version(1)
        await until(lambda: len(rig.fleet.calls) == 2)
        rig.fleet.release(next(session for session in rig.fleet.calls))
        lease = await rig.lease(2, trainer_version=1)
        assert len(lease.samples) == 1 and lease.ended


async def test_an_eviction_ends_a_call_that_waits_until_no_surplus_is_left() -> None:
    rig = DispatcherRig(permits=2, n=1, over_sample=OverSampleConfig(samples=0.5, unfinished="keep_partial"))
    options = QueueOptions(100, rig.pacing, max_staleness=0)
    queue = LocalSampleQueue(options)
    admitted = (await queue.admit(3, timeout_s=1)).sample_ids
    for sample_id in admitted[:2]:
        await queue.offer(SampleMeta(sample_id, 0, 0, 1, 1, 1), None)
    assert await queue.has_surplus(False, timeout_s=1)
    async with anyio.create_task_group() as group:
        answers: list[bool] = []

        async def wait() -> None:
            answers.append(await queue.has_surplus(True, timeout_s=60))

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await queue.lease(1, trainer_version=1, timeout_s=0)
        await until(lambda: answers)
    assert answers == [False]


async def test_failed_samples_are_not_kept() -> None:
    over_sample = OverSampleConfig(trajectories=1, unfinished="keep_partial")
    rig = DispatcherRig(permits=2, total=2, n=1, sample_s=0.05, over_sample=over_sample)
    async with rig.running():
        await rig.until_dropped(4)
    assert rig.dispatcher.runner.counts.surplus_tokens == 0
