"""The call batcher: which items share a batch, and what happens to them when a caller is cancelled."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from asyncrl.core.call_batcher import CallBatcher
from asyncrl.core.failures import BugError, InfraError


class RecordedSend:
    """A `send` that records its batches and answers once its gate is open."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.gate = anyio.Event()
        if is_open:
            self.gate.set()

    async def __call__(self, items: Sequence[int]) -> list[int | BugError]:
        self.batches.append(list(items))
        await self.gate.wait()
        return [BugError(f"item {item}") if item < 0 else item * 10 for item in items]


async def test_items_submitted_during_a_batch_share_the_next() -> None:
    send = RecordedSend(is_open=False)
    batcher = CallBatcher(send, max_weight=100)
    results: list[int] = []

    async def submit(item: int) -> None:
        results.append(await batcher.submit(item))

    async with anyio.create_task_group() as tasks:
        for items in ((1, 2), (3, 4, 5)):
            for item in items:
                tasks.start_soon(submit, item)
            await anyio.wait_all_tasks_blocked()
        assert send.batches == [[1, 2]], "one batch at a time"
        send.gate.set()
    assert send.batches == [[1, 2], [3, 4, 5]]
    assert sorted(results) == [10, 20, 30, 40, 50]
    assert await batcher.submit(6) == 60, "a lone item is sent at once"


async def test_weight_bounds_a_batch_and_a_heavy_item_is_sent_alone() -> None:
    send = RecordedSend()
    batcher = CallBatcher(send, max_weight=10)
    async with anyio.create_task_group() as tasks:
        for item, weight in ((1, 4), (2, 6), (3, 1), (4, 25), (5, 3)):
            tasks.start_soon(batcher.submit, item, weight)
    assert send.batches == [[1, 2], [3], [4], [5]]


async def outcomes_of(batcher: CallBatcher[int, int], *items: int) -> dict[int, str]:
    """Submit all items at once, and return the result or error of each."""
    outcomes: dict[int, str] = {}

    async def submit(item: int) -> None:
        try:
            outcomes[item] = str(await batcher.submit(item))
        except (BugError, InfraError, KeyError) as error:
            outcomes[item] = f"{type(error).__name__}: {error}"

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for item in items:
                tasks.start_soon(submit, item)
    return outcomes


async def test_an_error_of_one_item_leaves_the_others_alone() -> None:
    outcomes = await outcomes_of(CallBatcher(RecordedSend(), max_weight=10), 1, -2, 3)
    assert outcomes == {1: "10", -2: "BugError: item -2", 3: "30"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InfraError("the node is gone"), {1: "InfraError: the node is gone", 2: "InfraError: the node is gone"}),
        (KeyError("x"), {1: "KeyError: 'x'", 2: "BugError: the call ended without an answer"}),
    ],
)
async def test_a_failed_batch_leaves_no_caller_waiting(error: Exception, expected: dict[int, str]) -> None:
    async def fail(items: Sequence[int]) -> list[int]:
        raise error

    assert await outcomes_of(CallBatcher(fail, max_weight=10), 1, 2) == expected


async def test_a_cancelled_sender_still_delivers() -> None:
    send = RecordedSend(is_open=False)
    batcher = CallBatcher(send, max_weight=10)
    results: list[int] = []
    sender = anyio.CancelScope()

    async def send_one() -> None:
        with sender:
            await batcher.submit(1)

    async def submit() -> None:
        results.append(await batcher.submit(2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_one)
        tasks.start_soon(submit)
        await anyio.wait_all_tasks_blocked()
        sender.cancel()
        send.gate.set()
    assert send.batches == [[1, 2]]
    assert results == [20]


@pytest.mark.parametrize("cancelled", [2, 3])
async def test_the_item_of_a_caller_that_is_cancelled_before_sending_is_not_sent(cancelled: int) -> None:
    """The caller of item 2 would send the next batch; the caller of item 3 would only wait for that batch."""
    send = RecordedSend(is_open=False)
    batcher = CallBatcher(send, max_weight=10)
    scopes = {item: anyio.CancelScope() for item in (1, 2, 3, 4)}

    async def submit(item: int) -> None:
        with scopes[item]:
            await batcher.submit(item)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit, 1)
            await anyio.wait_all_tasks_blocked()
            for item in (2, 3, 4):
                tasks.start_soon(submit, item)
            await anyio.wait_all_tasks_blocked()
            send.gate.set()
            scopes[cancelled].cancel()
    assert send.batches == [[1], [item for item in (2, 3, 4) if item != cancelled]]


async def test_when_the_next_sender_is_cancelled_another_one_sends() -> None:
    send = RecordedSend(is_open=False)
    batcher = CallBatcher(send, max_weight=10)
    second = anyio.CancelScope()

    async def submit(item: int, scope: anyio.CancelScope) -> None:
        with scope:
            await batcher.submit(item)
            if item == 1:
                second.cancel()  # the task of item 2 is the next sender, but has not run yet

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit, 1, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(submit, 2, second)
            tasks.start_soon(submit, 3, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            send.gate.set()
    assert send.batches[0] == [1]
    assert 3 in send.batches[1]
    assert await batcher.submit(4) == 40
