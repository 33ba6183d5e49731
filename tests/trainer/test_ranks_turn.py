"""The ranks' turn on GPUs that they share with the engines."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrl.core.failures import InfraError
from asyncrl.core.waits import WaitBoard
from tests.fakes.parts import FakeGpuTurns
from tests.fakes.trainer_parts import FakeGroup
from trainer.ranks_turn import RanksTurn


class Group(FakeGroup):
    """A model whose offload fails if `broken`."""

    broken = False
    num_offloaded = 0

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert method == "offload"
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


def turn_of(turns: FakeGpuTurns | None, *groups: Group) -> RanksTurn:
    turn = RanksTurn(turns, WaitBoard(), offload_s=1.0)
    turn.roles = groups
    return turn


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
