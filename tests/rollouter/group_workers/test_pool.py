from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import BugError, InfraError, UserCodeError, first_failure
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn
from rollouter.group_workers import pool
from rollouter.group_workers.pool import WorkerPool, WorkerScorer
from rollouter.group_workers.worker import WorkerReport
from tests.fakes.dispatcher import DispatcherRig, ScriptedConverser, leased_samples, sample_name
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, make_prompt, until
from tests.fakes.workers import LocalWorkers


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 3),
    conversations=st.booleans(),
    whole_group=st.booleans(),
)
def test_dying_workers_cost_no_sample_and_no_complete_turn(
    seed: int, num_workers: int, conversations: bool, whole_group: bool
) -> None:
    anyio.run(live_through_deaths, seed, num_workers, conversations, whole_group)


async def live_through_deaths(seed: int, num_workers: int, conversations: bool, whole_group: bool) -> None:
    chance = random.Random(seed)
    deaths = chance.randrange(6)

    async def pace(_: object) -> None:
        nonlocal deaths
        for _ in range(chance.randrange(8)):
            await anyio.lowlevel.checkpoint()
        if deaths and chance.random() < 0.05:
            deaths -= 1
            chance.choice(workers.links[-num_workers:]).die()

    agent = ScriptedConverser(2) if conversations else None
    fleet = FakeFleet(pace=pace, chunk_tokens=1, num_replicas=2)
    scorer = FakeScorer(gate=pace, whole_group=whole_group)
    rig = DispatcherRig(permits=6, total=12, n=3, fleet=fleet, scorer=scorer, agent=agent, num_workers=num_workers)
    assert rig.workers is not None
    workers = rig.workers
    async with rig.running():
        samples = []
        for version in range(2):
            samples += leased_samples(await rig.lease(6, trainer_version=version))
            await rig.queue.set_applied_version(version + 1)
    assert sorted(sample.sample_id.index for sample in samples) == list(range(1, 13))
    for sample in samples:
        assert [row.reward for row in sample.rows] == [len(row.response_ids) for row in sample.rows]
        assert len(sample.rows) == 3
    # `MemoryTurns` refuses a turn that is recorded twice.
    assert rig.turns.recorded == 12 * 3 * (2 if conversations else 1)
    lost = workers.pool.status()["lost_workers"]
    assert [one.number for one in lost] == list(range(1, len(lost) + 1))


async def test_tokens_that_a_lost_worker_reported_are_not_generated_again() -> None:
    stop = anyio.Event()
    paces = 0

    async def pace(session: str) -> None:
        nonlocal paces
        paces += 1
        if paces == 3:
            stop.set()
            await anyio.sleep_forever()

    fleet = FakeFleet(pace=pace, chunk_tokens=2, answer=lambda request: [7] * 6)
    rig = DispatcherRig(permits=1, n=1, fleet=fleet, num_workers=2)
    assert rig.workers is not None
    async with rig.running():
        await stop.wait()
        await anyio.wait_all_tasks_blocked()
        next(link for link in rig.workers.links if link.commands).die()
        (sample,) = leased_samples(await rig.lease(1))
    (first, second) = fleet.requests
    assert first.so_far is None
    assert second.so_far is not None and second.so_far.response_ids.tolist() == [7] * 4
    assert sample.rows[0].response_ids.tolist() == [7] * 6 and fleet.generated_tokens == 6


async def test_sessions_stay_isolated_when_their_worker_dies() -> None:
    rig = DispatcherRig(permits=4, n=1, num_workers=1)
    assert rig.workers is not None
    async with rig.running():
        for _ in range(2):
            await rig.fleet.until_in_flight(*map(sample_name, range(1, 5)))
            rig.fleet.crash()
        await rig.fleet.until(lambda fleet: any(call.replica for call in fleet.calls.values()))
        await anyio.wait_all_tasks_blocked()
        isolated = rig.dispatcher.status()["crash_isolation"]["isolated"]
        rig.workers.links[0].die()
        await anyio.wait_all_tasks_blocked()
        await rig.fleet.until_in_flight(isolated)
        await anyio.wait_all_tasks_blocked()
        assert rig.fleet.crash() == (isolated,)
        rig.fleet.hold = False
        assert len((await rig.lease(3)).samples) == 3
    assert rig.drops.counts == {"crashed engines": 1}


async def test_the_newest_losses_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REPORTED_LOSSES", 2)
    rig = DispatcherRig(permits=1, n=1, num_workers=1)
    assert rig.workers is not None
    async with rig.running():
        for number in (1, 2, 3):
            rig.workers.links[-1].die()
            await rig.fleet.until_in_flight(sample_name(1))
            await anyio.wait_all_tasks_blocked()
            reported = rig.workers.pool.status()["lost_workers"]
            assert [one.number for one in reported] == [1, 2, 3][max(0, number - 2) : number]
            assert reported[-1].recovered_at is not None


async def test_samples_wait_while_no_worker_is_up() -> None:
    rig = DispatcherRig(permits=2, n=1, num_workers=1)
    assert rig.workers is not None
    rig.workers.can_start = anyio.Event()
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1), sample_name(2))
        rig.workers.links[0].die()
        await anyio.wait_all_tasks_blocked()
        assert ("worker", 2) in [(wait.edge, wait.count) for wait in rig.waits.snapshot()]
        status = rig.workers.pool.status()
        assert status["workers"] == [] and status["lost_workers"][0].recovered_at is None
        rig.fleet.hold = False
        rig.workers.can_start.set()
        assert len((await rig.lease(2)).samples) == 2
        assert rig.workers.pool.status()["lost_workers"][0].recovered_at is not None


async def test_each_failed_start_of_a_successor_is_reported_as_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver charges each loss to the restart budget, which ends a run whose workers never start."""
    monkeypatch.setattr(pool, "RETRY_S", 0.0)
    rig = DispatcherRig(permits=1, n=1, num_workers=1)
    assert rig.workers is not None
    start, failures = rig.workers.pool._start, iter(["no disk", "no memory"])

    async def fail_twice(place: int) -> Any:
        if (cause := next(failures, None)) is not None:
            raise InfraError(cause)
        return await start(place)

    rig.workers.pool._start = fail_twice
    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1))
        rig.workers.links[0].die()
        await until(lambda: len(rig.workers.links) == 2)
        await anyio.wait_all_tasks_blocked()
        lost = rig.workers.pool.status()["lost_workers"]
    assert [(one.number, one.worker, one.cause) for one in lost[1:]] == [(2, 0, "no disk"), (3, 0, "no memory")]
    assert [one.recovered_at is not None for one in lost] == [False, False, True]


@pytest.mark.parametrize("whole_group", [False, True])
async def test_a_worker_that_dies_while_it_scores_costs_the_scores_alone(whole_group: bool) -> None:
    scoring, calls = anyio.Event(), 0

    async def gate(prompt: Prompt) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            scoring.set()
            await anyio.sleep_forever()

    fleet = FakeFleet()
    rig = DispatcherRig(
        permits=1, n=2, fleet=fleet, scorer=FakeScorer(gate=gate, whole_group=whole_group), num_workers=2
    )
    assert rig.workers is not None
    async with rig.running():
        await scoring.wait()
        await anyio.wait_all_tasks_blocked()
        next(link for link in rig.workers.links if link.commands).die()
        (sample,) = leased_samples(await rig.lease(1))
    assert fleet.sessions == [sample_name(1)] and calls == 2
    assert [row.reward for row in sample.rows] == [len(row.response_ids) for row in sample.rows]


async def test_a_worker_that_does_not_answer_is_replaced() -> None:
    rig = DispatcherRig(permits=1, n=1, num_workers=1)
    assert rig.workers is not None
    rig.workers.pool._limit_s = 0.2
    (silent,) = rig.workers.links

    async def hang() -> WorkerReport:
        await anyio.sleep_forever()
        raise AssertionError

    async with rig.running():
        await rig.fleet.until_in_flight(sample_name(1))
        silent.take = hang  # type: ignore[method-assign]
        rig.fleet.hold = False
        assert len((await rig.lease(1)).samples) == 1
    assert silent.dead.is_set()
    assert "did not answer within 0.2 s (timeouts.probe_s)" in rig.workers.pool.status()["lost_workers"][0].cause


async def test_a_cancelled_sample_is_cancelled_in_its_worker() -> None:
    rig = DispatcherRig(permits=1, n=2, sample_s=0.2, num_workers=1)
    async with rig.running():
        await rig.until_dropped(1)
        await rig.fleet.until(lambda fleet: sample_name(1) in fleet.cancelled)
    assert rig.drops.counts["took too long"] >= 1


async def test_a_cancelled_call_of_the_scorer_is_cancelled_in_its_worker() -> None:
    scoring, cancelled = anyio.Event(), anyio.Event()

    async def gate(prompt: Prompt) -> None:
        scoring.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    workers = LocalWorkers(1, FakeFleet(), lambda: FakeScorer(gate=gate))
    prompt, ids = make_prompt(1, 2), np.array([7], dtype=np.int32)
    turn = Turn(ids, np.zeros(1, dtype=np.float32), (Span(0, 0),), FinishReason.STOP)
    async with workers.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(WorkerScorer(workers.pool, FakeScorer()).score, prompt, [single_turn(prompt, turn)])
        await scoring.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True), anyio.fail_after(5):
            await cancelled.wait()
            await anyio.wait_all_tasks_blocked()
        assert not workers.links[0].worker._running


class Failing(FakeScorer):
    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        raise UserCodeError("no")


class Short(FakeScorer):
    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        return (await super().score(prompt, trajectories))[1:]


@pytest.mark.parametrize("whole_group", [False, True])
async def test_failures_in_a_worker_stop_the_run_like_those_in_the_rollouter(whole_group: bool) -> None:
    rig = DispatcherRig(fleet=FakeFleet(), scorer=Failing(whole_group=whole_group), num_workers=2)
    assert (await rig.fails(UserCodeError)).message.endswith(": no")
    rig = DispatcherRig(fleet=FakeFleet(), scorer=Short(whole_group=whole_group), num_workers=2)
    assert "the scorer failed in a worker with ValueError" in (await rig.fails(BugError)).message


async def test_a_worker_that_fails_as_a_whole_ends_the_run() -> None:
    class Broken:
        async def take(self) -> WorkerReport:
            raise UserCodeError("its tool server does not start")

        async def post(self, commands: object) -> None: ...

        async def kill(self) -> None: ...

    async def start(place: int) -> Broken:
        raise AssertionError

    with pytest.raises(ExceptionGroup) as caught:
        async with WorkerPool([Broken()], start, limit_s=60).running():
            await anyio.sleep(10)
    assert str(first_failure(caught.value)) == "its tool server does not start"


async def test_all_workers_learn_whether_lent_replicas_take_calls_also_one_that_replaces_another() -> None:
    workers = LocalWorkers(2, FakeFleet(), FakeScorer)
    received: dict[int, list[bool]] = {}

    def listen(number: int) -> None:
        workers.links[number].worker.use_lent = received.setdefault(number, []).append

    listen(0), listen(1)
    async with workers.running():
        workers.pool.use_lent(True)
        await until(lambda: received == {0: [True], 1: [True]})
        workers.can_start = anyio.Event()
        workers.links[0].die()
        await until(lambda: len(workers.pool.status()["lost_workers"]) == 1)
        workers.can_start.set()
        await until(lambda: len(workers.links) == 3)
        listen(2)
        await until(lambda: received[2] == [True])
        workers.pool.use_lent(False)
        await until(lambda: received == {0: [True], 1: [True, False], 2: [True, False]})
