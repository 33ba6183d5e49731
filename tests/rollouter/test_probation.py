"""Who was on an engine when it crashed is judged together, whenever each of them hears of it."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.failures import EngineCrashError, PoisonError
from asyncrl.waits import WaitBoard
from rollouter import probation as module
from rollouter.probation import Probation, time_limit

pytestmark = pytest.mark.asyncio


def crash_of(replica: str) -> EngineCrashError:
    error = EngineCrashError(f"{replica} died")
    error.replica = replica
    return error


class Rig:
    def __init__(self) -> None:
        self.probation = Probation(2, waits=WaitBoard(), settle_s=0.0)
        self.free: list[str] = []
        self.guilty: list[str] = []

    async def crashed(self, name: str, replica: str) -> None:
        with time_limit(name, 10.0) as limit:
            try:
                await self.probation.crashed(name, crash_of(replica), limit)
            except PoisonError:
                self.guilty.append(name)
            else:
                self.free.append(name)


async def test_a_call_that_is_still_open_there_is_waited_for() -> None:
    rig = Rig()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for replica in ("r1", "r2"):
                rig.free.clear()
                for name in ("a", "b"):
                    rig.probation.placed(name, replica)
                group.start_soon(rig.crashed, "a", replica)
                await anyio.wait_all_tasks_blocked()
                assert (rig.free, rig.guilty) == ([], [])
                group.start_soon(rig.crashed, "b", replica)
                await anyio.wait_all_tasks_blocked()
                assert sorted(rig.free) == (["a", "b"] if replica == "r1" else ["a"])
            # Both have two strikes, so neither is guilty: one is in the lane, and the other waits for it.
            rig.probation.left("a")
    assert (rig.free, rig.guilty) == (["a", "b"], [])


async def test_nobody_waits_for_ever_for_a_call_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.02)
    rig = Rig()
    rig.probation.placed("a", "r1")
    rig.probation.placed("b", "r1")
    with anyio.fail_after(10):
        await rig.crashed("a", "r1")
    assert rig.free == ["a"]
