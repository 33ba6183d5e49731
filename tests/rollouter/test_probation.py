"""Who was on an engine when it crashed is judged together, whenever each of them hears of it."""

from __future__ import annotations

import anyio
import pytest

from asyncrl.failures import EngineCrashError, PoisonError
from asyncrl.waits import WaitBoard
from rollouter import probation as module
from rollouter.drops import TooLongError
from rollouter.probation import Probation, TimeLimit, time_limit

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


async def test_who_comes_to_no_end_in_the_lane_runs_out_of_time_though_a_sibling_waits_for_it() -> None:
    """Conversations of one sample share its time, and are suspects by themselves. A stranger's wait is not on its own
    time."""
    rig = Rig()
    out_of_time: list[str] = []
    there: dict[str, list[str]] = {"r1": [], "r2": []}
    full = {"r1": anyio.Event(), "r2": anyio.Event()}

    async def conversation(name: str, limit: TimeLimit) -> None:
        for replica in ("r1", "r2"):
            rig.probation.placed(name, replica)
            there[replica].append(name)
            if len(there[replica]) == 3:
                full[replica].set()
            await full[replica].wait()
            await rig.probation.crashed(name, crash_of(replica), limit)
        rig.free.append(name)
        await anyio.sleep_forever()

    async def sample(name: str, conversations: int, limit_s: float) -> None:
        names = [f"{name}/{number}" for number in range(conversations)]
        try:
            with time_limit(name, limit_s) as limit:
                async with anyio.create_task_group() as group:
                    for each in names:
                        group.start_soon(conversation, each, limit)
        except TooLongError:
            out_of_time.append(name)
        for each in names:
            rig.probation.left(each)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(sample, "one", 2, 0.3)
            group.start_soon(sample, "other", 1, 0.1)
    assert rig.free == ["one/0", "other/0"]
    assert out_of_time == ["one", "other"]
