"""Whose turn it is on shared GPUs, with the real weight store without Ray."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from asyncrl.core.failures import FencedError
from asyncrl.weights.object_store import StoreGpuTurns, WeightStoreActor
from tests.fakes.one_run import LocalActor, without_ray


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    with without_ray({}):
        yield


async def test_the_sides_take_turns_and_the_ranks_begin() -> None:
    turns = StoreGpuTurns(LocalActor(WeightStoreActor()), call_s=5.0)
    await turns.take()  # at the start, there are no engines yet
    assert await turns.wait("engines", "wanted", timeout_s=0.0) is None
    await turns.give_back()
    assert await turns.wait("engines", timeout_s=0.0) == "engines"
    async with anyio.create_task_group() as group:
        group.start_soon(turns.take)
        assert await turns.wait("wanted", timeout_s=10.0) == "wanted"
        await turns.grant()
    assert await turns.wait("ranks", timeout_s=0.0) == "ranks"


async def test_a_trainer_that_was_replaced_has_no_turn() -> None:
    store = LocalActor(WeightStoreActor())
    old, new = (StoreGpuTurns(store, call_s=5.0, lineage=lineage) for lineage in (0, 1))
    await old.take()
    await new.take()  # the turn of the ranks of the old one, which have ended
    await old.give_back()
    assert await new.wait("ranks", timeout_s=0.0) == "ranks"
    with pytest.raises(FencedError, match="lineage 1, which has replaced that of lineage 0"):
        await old.take()


async def test_a_restarted_store_knows_no_turn_until_the_trainer_wants_one() -> None:
    actor = WeightStoreActor()
    actor._turn = None
    turns = StoreGpuTurns(LocalActor(actor), call_s=5.0)
    assert await turns.wait("engines", "wanted", "ranks", timeout_s=0.01) is None
    async with anyio.create_task_group() as group:
        group.start_soon(turns.take)
        assert await turns.wait("engines", "wanted", timeout_s=10.0) == "wanted"
        await turns.grant()
