"""Who travels with whom, and what becomes of them when the carrier or a passenger is cancelled."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from asyncrl.convoy import Convoy
from asyncrl.failures import BugError, InfraError

pytestmark = pytest.mark.asyncio


class Road:
    """`send` that records its batches and lets each arrive when told."""

    def __init__(self, *, open_: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.gate = anyio.Event()
        if open_:
            self.gate.set()

    async def send(self, items: Sequence[int]) -> list[int | BugError]:
        self.batches.append(list(items))
        await self.gate.wait()
        return [BugError(f"item {item}") if item < 0 else item * 10 for item in items]


async def test_what_is_handed_in_together_leaves_together_and_the_rest_follows() -> None:
    road = Road(open_=False)
    convoy = Convoy(road.send, max_weight=100)
    results: list[int] = []

    async def join(item: int) -> None:
        results.append(await convoy.join(item))

    async with anyio.create_task_group() as tasks:
        for item in (1, 2):
            tasks.start_soon(join, item)
        await anyio.wait_all_tasks_blocked()
        for item in (3, 4, 5):
            tasks.start_soon(join, item)
        await anyio.wait_all_tasks_blocked()
        assert road.batches == [[1, 2]], "one batch is under way at a time"
        road.gate.set()
    assert road.batches == [[1, 2], [3, 4, 5]]
    assert sorted(results) == [10, 20, 30, 40, 50]
    assert await convoy.join(6) == 60, "a lone item leaves at once"


async def test_weight_bounds_a_batch_and_a_heavy_item_travels_alone() -> None:
    road = Road()
    convoy = Convoy(road.send, max_weight=10)
    async with anyio.create_task_group() as tasks:
        for item, weight in ((1, 4), (2, 6), (3, 1), (4, 25), (5, 3)):
            tasks.start_soon(convoy.join, item, weight)
    assert road.batches == [[1, 2], [3], [4], [5]]


async def test_an_error_is_its_items_own() -> None:
    convoy = Convoy(Road().send, max_weight=10)
    outcomes: dict[int, str] = {}

    async def join(item: int) -> None:
        try:
            outcomes[item] = str(await convoy.join(item))
        except BugError as error:
            outcomes[item] = error.message

    async with anyio.create_task_group() as tasks:
        for item in (1, -2, 3):
            tasks.start_soon(join, item)
    assert outcomes == {1: "10", -2: "item -2", 3: "30"}


async def test_a_trip_that_fails_fails_for_everybody_in_it() -> None:
    async def lost(items: Sequence[int]) -> list[int]:
        raise InfraError("the road is gone")

    convoy: Convoy[int, int] = Convoy(lost, max_weight=10)
    failed: list[int] = []

    async def join(item: int) -> None:
        with pytest.raises(InfraError, match="the road is gone"):
            await convoy.join(item)
        failed.append(item)

    async with anyio.create_task_group() as tasks:
        for item in (1, 2):
            tasks.start_soon(join, item)
    assert sorted(failed) == [1, 2]


async def test_an_error_nobody_foresaw_leaves_no_one_waiting() -> None:
    async def broken(items: Sequence[int]) -> list[int]:
        raise KeyError("unforeseen")

    convoy: Convoy[int, int] = Convoy(broken, max_weight=10)
    seen: list[type] = []

    async def join(item: int) -> None:
        with pytest.raises((KeyError, BugError)) as caught:
            await convoy.join(item)
        seen.append(caught.type)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for item in (1, 2):
                tasks.start_soon(join, item)
    assert set(seen) == {KeyError, BugError}


async def test_a_cancelled_carrier_still_delivers() -> None:
    road = Road(open_=False)
    convoy = Convoy(road.send, max_weight=10)
    results: list[int] = []
    carrier = anyio.CancelScope()

    async def carry() -> None:
        with carrier:
            await convoy.join(1)

    async def join() -> None:
        results.append(await convoy.join(2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry)
        tasks.start_soon(join)
        await anyio.wait_all_tasks_blocked()
        carrier.cancel()
        road.gate.set()
    assert road.batches == [[1, 2]]
    assert results == [20]


@pytest.mark.parametrize("cancelled", [2, 3])
async def test_whoever_is_cancelled_in_line_takes_its_item_back(cancelled: int) -> None:
    """2 would carry the next batch, 3 would only go along."""
    road = Road(open_=False)
    convoy = Convoy(road.send, max_weight=10)
    scopes = {item: anyio.CancelScope() for item in (1, 2, 3, 4)}

    async def join(item: int) -> None:
        with scopes[item]:
            await convoy.join(item)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join, 1)
            await anyio.wait_all_tasks_blocked()
            for item in (2, 3, 4):
                tasks.start_soon(join, item)
            await anyio.wait_all_tasks_blocked()
            road.gate.set()
            scopes[cancelled].cancel()
    assert road.batches == [[1], [item for item in (2, 3, 4) if item != cancelled]]


async def test_an_appointed_carrier_that_is_cancelled_hands_over() -> None:
    road = Road(open_=False)
    convoy = Convoy(road.send, max_weight=10)
    second = anyio.CancelScope()

    async def join(item: int, scope: anyio.CancelScope) -> None:
        with scope:
            await convoy.join(item)
            if item == 1:
                second.cancel()  # its turn has come, and it has not run since

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(join, 1, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(join, 2, second)
            tasks.start_soon(join, 3, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            road.gate.set()
    assert road.batches[0] == [1]
    assert 3 in road.batches[1]
    assert await convoy.join(4) == 40
