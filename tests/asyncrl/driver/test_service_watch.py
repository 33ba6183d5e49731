"""The driver supervises queue, store and replicas by their status alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import DeadlineError, InfraError
from asyncrl.core.ports import StoreStatus
from asyncrl.driver import service_watch as watch_module
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.service_watch import PART_TITLES, ServiceWatch
from asyncrl.driver.supervision import RestartBudget
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.terminal.live import View
from asyncrl.storage.run_dir import RunDir
from tests.fakes.parts import ManualClock
from tests.fakes.run_states import queue_status, report

LATE = DeadlineError("it did not answer")


class Rig:
    """A `ServiceWatch` that gets its statuses from the test, with a record of the processes that it kills."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int, timeouts: dict[str, int]
    ) -> None:
        config = Config.model_validate({"timeouts": timeouts})
        recorder = Recorder([], View())
        self.status = RunStatus(config, RunDir(tmp_path), recorder)
        self.status.phase = "running"
        budgets = {part: RestartBudget(name, max_restarts, 1000.0) for part, name in PART_TITLES.items()}
        self.watch = ServiceWatch(config, self.status, recorder, View(), budgets)
        self.watch.queue.start_probing()
        self.watch.store.start_probing()
        self.clock = ManualClock()
        self.killed: list[int] = []
        self.gone: set[int] = set()
        """Processes that are already dead when the watch kills them."""
        monkeypatch.setattr(watch_module.time, "monotonic", self.clock)
        monkeypatch.setattr(watch_module, "kill_process_of", self._kill_process_of)

    async def _kill_process_of(self, name: str, pid: int, answered_at: float) -> bool:
        self.killed.append(pid)
        return pid not in self.gone

    @property
    def restarts(self) -> list[tuple[str, int, str]]:
        return [(one.part, one.incarnation, one.cause) for one in self.status.state().restarts]

    async def store_has(self, *reports: Any, knows_newest: bool = True, pid: int = 1, at: float = 0.0) -> None:
        await self.watch._on_store_status(StoreStatus(pid, None, reports, knows_newest, at))


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRig:
    return lambda max_restarts=10, **timeouts: Rig(tmp_path, monkeypatch, max_restarts, timeouts)


async def test_restarts_by_ray_are_recorded_and_charged_to_the_budget(make_rig: MakeRig) -> None:
    rig = make_rig(max_restarts=2)
    for pid in (7, 7, 8):
        await rig.watch._on_queue_status(queue_status(pid=pid))
    await rig.store_has(pid=20)
    await rig.watch.store.on_timeout(LATE)
    await rig.store_has(pid=21)
    await rig.watch._on_queue_status(queue_status(pid=9))
    assert rig.restarts == [
        ("queue", 2, "the sample queue's process died"),
        ("store", 2, "it did not answer"),
        ("queue", 3, "the sample queue's process died"),
    ]
    with pytest.raises(InfraError, match=r"the sample queue failed 3 times .*recovery.max_restarts=2.*logs/ray"):
        await rig.watch._on_queue_status(queue_status(pid=10))


async def test_restarts_while_the_run_stops_are_not_charged(make_rig: MakeRig) -> None:
    rig = make_rig(max_restarts=1)
    rig.status.phase = "stopping"
    for pid in range(5):
        await rig.watch._on_queue_status(queue_status(pid=pid))
    assert len(rig.restarts) == 4


async def test_an_unresponsive_queue_is_killed_once(make_rig: MakeRig) -> None:
    rig = make_rig(start_s=1000)
    queue = rig.watch.queue
    await queue.on_timeout(LATE)
    assert rig.killed == [], "the queue has never answered"
    queue.on_answer(7, "")
    for now_s in (0.0, 30.0, 900.0):
        rig.clock.now_s = now_s
        await queue.on_timeout(LATE)
    assert rig.killed == [7], "the new queue is rebuilding its state"
    assert rig.restarts == []
    queue.on_answer(8, "")
    assert rig.restarts == [("queue", 2, "it did not answer")]
    rig.clock.now_s = 901.0
    await queue.on_timeout(LATE)
    assert rig.killed == [7, 8]
    rig.clock.now_s = 1902.0
    with pytest.raises(InfraError, match=r"it did not answer, and the next one did not answer within 1000 s"):
        await queue.on_timeout(LATE)


async def test_a_queue_that_died_has_time_to_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(start_s=1000)
    rig.watch.queue.on_answer(7, "")
    rig.gone.add(7)
    for now_s in (0.0, 900.0):
        rig.clock.now_s = now_s
        await rig.watch.queue.on_timeout(LATE)
    rig.watch.queue.on_answer(8, "")
    assert rig.restarts == [("queue", 2, "the sample queue's process died")]
    rig.gone.add(8)
    rig.clock.now_s = 1000.0
    await rig.watch.queue.on_timeout(LATE)
    rig.clock.now_s = 2001.0
    with pytest.raises(InfraError, match=r"because the sample queue's process died, and the next one did not answer"):
        await rig.watch.queue.on_timeout(LATE)


async def test_replicas_replaced_by_serve_count_against_the_budget(make_rig: MakeRig) -> None:
    rig = make_rig(max_restarts=1)
    async with anyio.create_task_group() as ends:
        for at, names in ((100.0, "a"), (150.0, "b")):
            await rig.store_has(
                report("a", reported_at=100.0), *(report(name, reported_at=at) for name in names), at=at
            )
            rig.watch.watch_replicas(ends)
        assert [part for part, *_ in rig.restarts] == ["replica"]
        await rig.store_has(report("c", reported_at=200.0), at=200.0)
        with pytest.raises(InfraError, match="the replicas failed 2 times"):
            rig.watch.watch_replicas(ends)
        ends.cancel_scope.cancel()


async def test_an_unresponsive_replica_is_ended_in_the_background(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(probe_s=90)
    ended: list[str] = []

    async def end(hung: Any) -> None:
        ended.append(hung.replica)
        await anyio.sleep_forever()

    monkeypatch.setattr(watch_module, "_end_replica", end)
    async with anyio.create_task_group() as ends:
        await rig.store_has(report("a", reported_at=1.0), at=1.0)
        for at in (201.0, 202.0):
            await rig.store_has(report("a", reported_at=1.0), at=at)
            rig.watch.watch_replicas(ends)
            await anyio.wait_all_tasks_blocked()
        assert ended == ["a"]
        ends.cancel_scope.cancel()


async def test_a_replica_that_cannot_be_ended_holds_neither_the_run_nor_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(watch_module, "local_nodes", hung.wait)
    try:
        with anyio.fail_after(10), anyio.move_on_after(0.05) as run:
            await watch_module._end_replica(report("a"))
        assert run.cancelled_caught
        monkeypatch.setattr(watch_module, "KILL_S", 0.05)
        with anyio.fail_after(10):
            await watch_module._end_replica(report("a"))
        assert "the unresponsive replica a could not be ended within 0.05 s" in caplog.text
    finally:
        hung.set()


@pytest.mark.parametrize("serve_fails", [False, True])
async def test_a_replica_that_is_not_replaced_ends_the_run_with_the_message_of_serve(
    serve_fails: bool, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(start_s=100)

    async def messages_of_serve(namespace: str) -> str:
        if serve_fails:
            raise InfraError("Serve is gone")
        return "Traceback\nRuntimeError: no such kernel"

    monkeypatch.setattr(watch_module, "serve_messages", messages_of_serve)
    with pytest.raises(InfraError, match=r"replica a \(pid 100\) is gone .*timeouts.start_s=100") as caught:
        await rig.watch._fail_for_missing(report("a"))
    assert ("no such kernel" in caught.value.cause) is not serve_fails


async def test_a_lost_replica_without_room_for_a_successor_is_a_warning_and_the_run_goes_on(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spot node with one of two replicas is gone, and no other node has a GPU for it."""
    rig = make_rig(probe_s=30, start_s=600)
    rig.watch.expect_replicas(2)
    monkeypatch.setattr(watch_module, "serve_messages", AsyncMock(return_value=""))
    async with anyio.create_task_group() as tasks:
        for second in range(1, 5000):
            at = float(second)
            rig.status.pending_demands = ("1 x engine replica: 1 GPU", "1 x ranks: 1 GPU") if second > 20 else ()
            await rig.store_has(report("a", reported_at=min(at, 10.0)), report("b", reported_at=at), at=at)
            rig.watch.watch_replicas(tasks)
        tasks.cancel_scope.cancel()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "1 of 2 replicas are lost, and the cluster has no room for their successors (1 x engine replica: 1 GPU): "
    )
    # What other parts wait for does not matter.
    rig.status.pending_demands = ("1 x ranks: 1 GPU",)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            for second in range(5001, 5602, 60):
                at = float(second)
                await rig.store_has(report("a", reported_at=10.0), report("b", reported_at=at), at=at)
                rig.watch.watch_replicas(tasks)
    assert caught.group_contains(InfraError, match=r"replica a .* was not replaced within timeouts.start_s=600")


async def test_versions_are_republished_until_a_restarted_store_has_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    answers: list[InfraError | None] = [InfraError("the trainer is gone"), None]

    async def republish() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    async with anyio.create_task_group() as group:
        group.start_soon(rig.watch.keep_store_informed, republish)
        await rig.store_has()
        await anyio.wait_all_tasks_blocked()
        assert len(answers) == 2, "the store has its version"
        for left in (1, 0):  # the phase of the run does not matter
            rig.status.phase = "starting"
            await rig.store_has(knows_newest=False)
            await anyio.wait_all_tasks_blocked()
            assert len(answers) == left
        await rig.store_has()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


async def test_a_queue_without_a_journal_that_does_not_answer_ends_the_run(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    class Client:
        def __init__(self, *_: object) -> None:
            pass

        async def status(self) -> Any:
            raise LATE

    monkeypatch.setattr(watch_module, "QueueClient", Client)
    for journal, status in (("off", queue_status()), ("on", None)):
        rig.watch._config = rig.watch._config.model_copy(update={"journal": journal})
        rig.status.queue = status
        with pytest.raises(DeadlineError, match="did not answer"):
            await rig.watch.probe_queue()
    assert rig.killed == []
