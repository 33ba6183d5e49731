"""A supervisor replaces a part that fails as the test scripts it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import BugError, DeadlineError, DiskFullError, InfraError, UserCodeError
from asyncrl.core.ports import PartName
from asyncrl.core.records import RunRecord, StepRecord
from asyncrl.driver.supervision import RestartBudget, Supervisor
from asyncrl.observe.status.run_status import Restart
from tests.fakes.parts import ManualClock


def step(number: int) -> StepRecord:
    return StepRecord(number, number, {}, (), ())


HANG = "hang"


class ScriptedPart:
    """A part whose processes follow scripts: each yields its records, and then raises, hangs (`HANG`), or ends."""

    name: PartName = "rollouter"

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.did: list[str] = []
        self.starts: list[InfraError | anyio.Event | str | None] = []
        """The outcome of each start, in order: an error, `HANG`, or an event that lets the start succeed when it is
        set."""
        self.claims: list[InfraError] = []
        self.asked_to_stop = anyio.Event()
        self.starting = anyio.Event()
        self.running = anyio.Event()

    async def kill(self) -> None:
        self.did.append("kill")

    async def release_samples(self, incarnation: int) -> str:
        self.did.append(f"claim {incarnation}")
        if self.claims:
            raise self.claims.pop(0)
        return f"{incarnation} given back"

    async def start(self, incarnation: int) -> None:
        self.did.append(f"start {incarnation}")
        self.starting.set()
        failure = self.starts.pop(0) if self.starts else None
        if failure == HANG:
            await anyio.sleep_forever()
        if isinstance(failure, anyio.Event):
            await failure.wait()
        if isinstance(failure, InfraError):
            raise failure

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        self.did.append("run")
        self.running.set()
        for item in self.scripts.pop(0):
            if isinstance(item, BaseException):
                raise item
            if item == HANG:
                await self.asked_to_stop.wait()
                return
            yield item

    async def stop(self) -> None:
        self.did.append("stop")
        self.asked_to_stop.set()


class Supervised:
    """A supervisor of `part`, its records and its restarts."""

    def __init__(self, part: ScriptedPart) -> None:
        self.part = part
        self.restarts: list[Restart] = []
        self.records: list[RunRecord] = []
        self.clock = ManualClock()
        budget, loss = RestartBudget("Rollouter", 3, math.inf), ", and its last checkpoint with it"
        self.supervisor = Supervisor(
            part, budget, self.restarts.append, loss=loss, clock=self.clock, wall_clock=self.clock
        )

    async def put(self, record: RunRecord) -> None:
        self.records.append(record)

    async def follow(self) -> None:
        await self.supervisor.follow(self.put)

    async def follow_until(self, ready: anyio.Event, then: Callable[[], Awaitable[None]]) -> None:
        """Follow the part; once `ready` is set and every task waits, call `then`."""
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(self.follow)
                await ready.wait()
                await anyio.wait_all_tasks_blocked()
                await then()

    async def stop_when(self, ready: anyio.Event) -> None:
        await self.follow_until(ready, self.supervisor.stop)


async def test_a_failed_part_is_killed_and_gives_its_samples_back_before_the_next_one_starts() -> None:
    part = ScriptedPart([step(1), InfraError("it died\nand more")], [step(2)])
    seen = Supervised(part)
    await seen.follow()
    assert seen.records == [step(1), step(2)]
    assert part.did == ["run", "kill", "claim 2", "start 2", "run"]
    assert seen.restarts == [Restart("rollouter", 2, 0.0, "it died")]
    seen.clock.now_s = 7.0
    seen.supervisor.mark_working()
    seen.supervisor.mark_working()
    assert seen.restarts[1:] == [Restart("rollouter", 2, 0.0, "it died", 7.0, "2 given back")]


async def test_a_part_that_fails_to_start_is_replaced_until_the_budget_is_spent() -> None:
    part = ScriptedPart([InfraError("first")], [InfraError("second")])
    part.starts = [InfraError("not up"), None, InfraError("not up either")]
    seen = Supervised(part)
    with pytest.raises(InfraError, match=r"failed 4 times within .*\(recovery.max_restarts=3\); .*: not up either"):
        await seen.follow()
    assert [did for did in part.did if did.startswith("start")] == ["start 2", "start 3", "start 4"]
    assert [restart.cause for restart in seen.restarts] == ["first", "not up", "second"]
    assert seen.supervisor.incarnation == 4


@pytest.mark.parametrize("error", [UserCodeError("theirs"), BugError("ours"), DiskFullError("full")])
async def test_errors_that_would_repeat_end_the_run(error: Exception) -> None:
    part = ScriptedPart([error])
    seen = Supervised(part)
    with pytest.raises(type(error)):
        await seen.follow()
    assert part.did == ["run"] and seen.restarts == []


async def test_failures_of_claim_and_put_end_the_run() -> None:
    part = ScriptedPart([InfraError("it died")])
    part.claims = [InfraError("the queue is gone")]
    with pytest.raises(InfraError, match="the queue is gone"):
        await Supervised(part).follow()
    assert "start 2" not in part.did

    async def put(record: RunRecord) -> None:
        raise InfraError("cannot write metrics.jsonl")

    part = ScriptedPart([step(1)])
    with pytest.raises(InfraError, match="cannot write"):
        await Supervised(part).supervisor.follow(put)
    assert part.did == ["run"]


async def test_an_unresponsive_part_is_replaced() -> None:
    part = ScriptedPart([step(1), HANG], [step(2)])
    seen = Supervised(part)

    async def report_twice() -> None:
        seen.supervisor.replace_unresponsive(DeadlineError("no answer"))
        seen.supervisor.replace_unresponsive(DeadlineError("a second report"))

    await seen.follow_until(part.running, report_twice)
    assert seen.records == [step(1), step(2)]
    assert [restart.cause for restart in seen.restarts] == ["no answer"]


async def test_a_stop_is_sent_to_the_running_process() -> None:
    part = ScriptedPart([HANG])
    await Supervised(part).stop_when(part.running)
    assert part.did == ["run", "stop"]


async def test_a_stop_during_a_restart_does_not_start_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    part = ScriptedPart([InfraError("it died")])
    part.starts = [HANG]
    seen = Supervised(part)
    await seen.stop_when(part.starting)
    assert part.did == ["run", "kill", "claim 2", "start 2", "kill"], "a process that was starting is killed"
    assert seen.supervisor.replacing_since is None
    seen.supervisor.mark_working()
    assert [restart.recovered_at for restart in seen.restarts] == [None]
    assert "was being replaced when the run was stopped, and its last checkpoint with it" in caplog.text


async def test_a_stop_right_after_a_successful_start_is_not_lost() -> None:
    """The start has succeeded, so it cannot be cancelled, and the supervisor has not yet continued after it."""
    part = ScriptedPart([InfraError("it died")], [HANG])
    up = anyio.Event()
    part.starts = [up]
    seen = Supervised(part)

    async def start_and_stop() -> None:
        up.set()
        await seen.supervisor.stop()

    await seen.follow_until(part.starting, start_and_stop)
    assert part.did == ["run", "kill", "claim 2", "start 2", "kill"], "no other call would stop the new process"
    assert seen.supervisor.replacing_since is None


class FailsWhenStopped(ScriptedPart):
    def __init__(self, error: InfraError) -> None:
        super().__init__([HANG])
        self.error = error

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        async for record in super().run():
            yield record
        raise self.error


async def test_a_part_that_dies_while_it_stops_counts_as_stopped(caplog: pytest.LogCaptureFixture) -> None:
    part = FailsWhenStopped(InfraError("a rank died"))
    seen = Supervised(part)
    await seen.stop_when(part.running)
    assert part.did == ["run", "stop"] and seen.restarts == []
    assert "failed while the run was stopping, and its last checkpoint with it: a rank died" in caplog.text


async def test_a_disk_that_is_full_while_a_part_stops_is_a_failure() -> None:
    part = FailsWhenStopped(DiskFullError("no checkpoint"))
    with pytest.raises(ExceptionGroup) as caught:
        await Supervised(part).stop_when(part.running)
    assert "no checkpoint" in str(caught.value.exceptions[0])


class DiesWhenAskedToStop(ScriptedPart):
    """A part whose request to stop fails before its record stream does."""

    async def stop(self) -> None:
        await super().stop()
        raise InfraError("its process died")


async def test_a_failed_request_to_stop_does_not_fail_the_run(caplog: pytest.LogCaptureFixture) -> None:
    part = DiesWhenAskedToStop([HANG])
    await Supervised(part).stop_when(part.running)
    assert part.did == ["run", "stop"]
    assert "could not be asked to stop: its process died" in caplog.text


async def test_a_part_that_has_ended_can_be_started_again() -> None:
    part = ScriptedPart([step(1)], [InfraError("it died")], [step(2)])
    seen = Supervised(part)
    await seen.follow()
    await seen.supervisor.follow_again(seen.put)
    assert seen.records == [step(1), step(2)]
    assert part.did == ["run", "kill", "claim 2", "start 2", "run", "kill", "claim 3", "start 3", "run"]
    assert [restart.incarnation for restart in seen.restarts] == [3]
