"""The virtual event loop: seeded order, virtual time, and runs that do not end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from tests.fuzz.loop import DeadlockError, LivelockError, ThreadError, run


def order(seed: int, num_tasks: int = 6) -> list[int]:
    """Return the order in which tasks pass three checkpoints each."""
    passed: list[int] = []

    async def walk(number: int) -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
            passed.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(num_tasks):
                group.start_soon(walk, number)

    run(main, seed)
    return passed


def test_a_seed_decides_the_order() -> None:
    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len({tuple(one) for one in orders}) == 20
    assert all(sorted(one) == sorted(list(range(6)) * 3) for one in orders)


def test_virtual_time_jumps_without_waiting() -> None:
    async def main() -> tuple[float, list[str]]:
        woken: list[str] = []

        async def nap(name: str, seconds: float) -> None:
            await anyio.sleep(seconds)
            woken.append(name)

        async with anyio.create_task_group() as group:
            group.start_soon(nap, "day", 86_400.0)
            group.start_soon(nap, "hour", 3600.0)
            group.start_soon(nap, "minute", 60.0)
        return anyio.current_time(), woken

    began = time.monotonic()
    now, woken = run(main, 0)
    assert woken == ["minute", "hour", "day"]
    assert now == pytest.approx(86_400.0)
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("seed", range(10))
def test_deadlines_and_cancellation_reach_the_waiting_task(seed: int) -> None:
    async def main() -> list[str]:
        events: list[str] = []
        event = anyio.Event()

        async def wait() -> None:
            try:
                await event.wait()
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1.0)
                    events.append("cleaned up")
                raise

        with anyio.move_on_after(5.0) as scope:
            await wait()
        assert scope.cancelled_caught
        assert anyio.current_time() == pytest.approx(6.0)
        with pytest.raises(TimeoutError):
            with anyio.fail_after(3.0):
                await event.wait()
        return events

    assert run(main, seed) == ["cleaned up"]


def test_a_deadlock_names_what_every_task_waits_on() -> None:
    async def wait_for_godot(event: anyio.Event) -> None:
        await event.wait()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait_for_godot, anyio.Event(), name="vladimir")

    with pytest.raises(DeadlockError) as caught:
        run(main, 0)
    assert "vladimir" in str(caught.value)
    assert "wait_for_godot" in str(caught.value)
    assert "test_loop.py" in str(caught.value)


def test_endless_polling_is_a_livelock() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await anyio.sleep(1.0)

    with pytest.raises(LivelockError, match="100 virtual seconds"):
        run(main, 0, max_virtual_s=100.0)


def test_a_busy_wait_ends_at_its_deadline_or_is_a_livelock() -> None:
    async def main() -> None:
        with anyio.move_on_after(1.0):
            while True:
                await anyio.lowlevel.checkpoint()

    run(main, 0)

    async def for_ever() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(LivelockError, match="callbacks"):
        run(for_ever, 0, max_turns=30_000)


def test_threads_are_refused() -> None:
    def work(number: int) -> int:
        return 2 * number

    async def main() -> int:
        return await to_thread.run_sync(work, 21)

    async def executor() -> None:
        await asyncio.get_running_loop().run_in_executor(None, work, 1)

    for wanting in (main, executor):
        with pytest.raises(ThreadError, match="work"):
            run(wanting, 0)
    assert anyio.run(main) == 42, "threads work again afterwards"


def test_a_seed_gives_the_same_order_in_every_process() -> None:
    program = (
        "from tests.fuzz.test_loop import cancelled_in_order\n"
        "from tests.fuzz.loop import run\n"
        "print(run(cancelled_in_order, 3))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


async def cancelled_in_order() -> list[int]:
    """Return the order in which tasks of nested scopes are cancelled."""
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            with anyio.CancelScope():
                await anyio.sleep_forever()
        finally:
            cancelled.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(wait, number)
        await anyio.sleep(1.0)
        group.cancel_scope.cancel()
    return cancelled
