"""The ranks' turn on GPUs that they share with the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import QueueStatus, SampleCounts
from asyncrl.core.waits import WaitBoard
from tests.fakes.parts import FakeGpuTurns
from tests.fakes.trainer_parts import FakeGroup
from trainer.lending import LendingPolicy
from trainer.ranks_turn import RanksTurn


class Group(FakeGroup):
    """A model whose offload fails if `broken`."""

    broken = False
    num_offloaded = 0
    offloading: Callable[[], Any] | None = None
    """Awaited in each offload."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "offload"
        if self.offloading is not None:
            await self.offloading()
        if self.broken:
            raise InfraError("a rank died")
        self.num_offloaded += 1


class SleepyTurns(FakeGpuTurns):
    """Turns of engines that fall asleep at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0

    async def take(self) -> None:
        self.num_taken += 1
        await self.relay.grant_gpus()


def turn_of(turns: FakeGpuTurns | None, *groups: Group, lend_after_s: float | None = None) -> RanksTurn:
    policy = None if lend_after_s is None else LendingPolicy(lend_after_s)
    turn = RanksTurn(turns, WaitBoard(), offload_s=1.0, lending=policy)
    turn.roles = groups
    return turn


async def open_queue() -> QueueStatus:
    """The status of a queue that permits further samples and has none."""
    return QueueStatus(SampleCounts(fed=1, running=1), 0, False, {}, paced_to=10)


async def test_all_models_are_offloaded_before_the_engines_wake_up() -> None:
    turns, policy, reference = SleepyTurns(), Group(), Group()
    turn = turn_of(turns, policy, reference)
    await turn.end()  # the engines have the turn
    await turn.begin()
    await turn.begin()
    assert (turns.num_taken, turns.relay._turn, policy.num_offloaded) == (1, "ranks", 0)
    await turn.end()
    assert (turns.relay._turn, policy.num_offloaded, reference.num_offloaded) == ("engines", 1, 1)


async def test_engines_do_not_wake_up_beside_ranks_that_could_not_be_offloaded() -> None:
    turns, group = SleepyTurns(), Group()
    turn = turn_of(turns, group)
    await turn.begin()
    group.broken = True
    with pytest.raises(InfraError, match="a rank died"):
        await turn.end()
    assert turns.relay._turn == "ranks"


async def test_a_restarted_store_learns_whose_turn_it_is() -> None:
    turns = SleepyTurns()
    turn = turn_of(turns, Group())
    turns.relay._turn = None
    await turn.restore()
    assert turns.relay._turn == "engines"
    await turn.begin()
    turns.relay._turn = None
    await turn.restore()
    assert turns.relay._turn == "ranks"


async def test_a_trainer_that_still_waits_for_the_gpus_does_not_give_them_back() -> None:
    turns = FakeGpuTurns()
    turn = turn_of(turns, Group())
    async with anyio.create_task_group() as group:
        group.start_soon(turn.begin)
        await turns.wait("wanted", timeout_s=10.0)
        await turn.restore()
        assert turns.relay._turn == "wanted"
        await turns.grant()


async def test_ranks_with_gpus_of_their_own_take_no_turns() -> None:
    group = Group()
    turn = turn_of(None, group)
    await turn.begin()
    await turn.end()
    await turn.restore()
    assert group.num_offloaded == 0


# ------------------------------------------------------------------------------------------------ lent GPUs


async def test_a_long_wait_lends_the_gpus_until_its_end() -> None:
    turns, policy, reference = SleepyTurns(), Group(), Group()
    turn = turn_of(turns, policy, reference, lend_after_s=0.01)
    await turn.begin()
    with anyio.fail_after(10):
        async with turn.released(open_queue, lambda: 4):
            assert turns.relay._turn == "ranks"
            assert await turns.wait("engines", timeout_s=5.0) == "engines"
            assert (policy.num_offloaded, reference.num_offloaded) == (1, 1)
        assert turns.relay._turn == "engines", "the engines generate until the Trainer wants the GPUs"
        await turn.begin()
    assert turns.relay._turn == "ranks"
    await turn.end_run()
    assert turns.relay._turn == "ranks", "nothing is generated any more"


async def test_a_short_wait_lends_nothing() -> None:
    turns, group = SleepyTurns(), Group()
    turn = turn_of(turns, group, lend_after_s=60.0)
    await turn.begin()
    with anyio.fail_after(5):
        async with turn.released(open_queue, lambda: 4):
            await anyio.wait_all_tasks_blocked()
    assert (turns.relay._turn, group.num_offloaded) == ("ranks", 0)


async def test_a_queue_that_permits_no_sample_lends_nothing() -> None:
    turns, group, asked = SleepyTurns(), Group(), anyio.Event()

    async def shut_queue() -> QueueStatus:
        if turns.num_taken:  # the second question
            asked.set()
        turns.num_taken += 1
        return QueueStatus(SampleCounts(fed=10, running=10), 0, False, {}, paced_to=10)

    turn = turn_of(turns, group, lend_after_s=0.01)
    await turn.begin()
    turns.num_taken = 0
    with anyio.fail_after(5):
        async with turn.released(shut_queue, lambda: 4):
            await asked.wait()
            await anyio.wait_all_tasks_blocked()
    assert (turns.relay._turn, group.num_offloaded) == ("ranks", 0)


async def test_samples_that_arrive_while_the_ranks_are_offloaded_go_on_with_the_same_turn() -> None:
    turns, group, offloading, go_on = SleepyTurns(), Group(), anyio.Event(), anyio.Event()

    async def offload() -> None:
        offloading.set()
        await go_on.wait()

    group.offloading = offload
    turn = turn_of(turns, group, lend_after_s=0.01)
    await turn.begin()
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(5):
            async with turn.released(open_queue, lambda: 4):
                await offloading.wait()
                tasks.start_soon(_set_later, go_on)
    assert group.num_offloaded == 1, "an offload that has begun is not interrupted"
    assert turns.relay._turn == "ranks"
    await turn.begin()
    assert turns.num_taken == 1, "the ranks still have the GPUs"


async def _set_later(event: anyio.Event) -> None:
    await anyio.wait_all_tasks_blocked()
    event.set()


@pytest.mark.parametrize("where", ["offload", "queue", "samples"])
async def test_a_failure_during_the_wait_ends_it_and_gives_nothing_back(where: str) -> None:
    turns, group, num_asked = SleepyTurns(), Group(), 0
    group.broken = where == "offload"

    async def queue() -> QueueStatus:
        nonlocal num_asked
        num_asked += 1
        if where == "queue" and num_asked == 2:
            raise InfraError("a rank died")
        return await open_queue()

    turn = turn_of(turns, group, lend_after_s=60.0 if where == "samples" else 0.01)
    await turn.begin()
    with anyio.fail_after(5), pytest.raises(InfraError, match="a rank died"):
        async with turn.released(queue, lambda: 4):
            if where == "samples":
                raise InfraError("a rank died")
            await anyio.sleep_forever()
    assert turns.relay._turn == "ranks"


async def test_a_wait_that_begins_while_the_gpus_are_lent_lends_nothing_again() -> None:
    turns, group = SleepyTurns(), Group()
    turn = turn_of(turns, group, lend_after_s=0.01)  # as after the start of a Trainer

    async def unasked() -> QueueStatus:
        raise AssertionError

    async with turn.released(unasked, lambda: 4):
        assert turns.relay._turn == "engines"
    assert group.num_offloaded == 0
