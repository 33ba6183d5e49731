"""What the driver makes of what its parts say, without any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.cli import probes
from asyncrl.cli.picture import Picture
from asyncrl.cli.probes import probe
from asyncrl.cli.run import Run
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.ports import Edition, QueueStatus, StoreStatus, ValidationRecord
from asyncrl.queue_actor import QueueActor
from asyncrl.run_dir import RunDir
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import read_state
from asyncrl.telemetry.summary import Resumed
from rollouter.rollouter import RolloutStart
from tests.fakes.run_states import queue_status, report


class Ended(Exception):
    """Ends a probe."""


async def test_a_part_is_asked_again_and_again_whatever_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TICK_S", 0.0)
    answers: list[Any] = ["one", None, DeadlineError("slow"), "two", InfraError("gone for good")]
    seen: list[str] = []

    async def ask() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def heard(answer: str) -> None:
        seen.append(answer)

    async def missed(error: DeadlineError) -> None:
        seen.append(f"missed: {error}")

    with pytest.raises(InfraError, match="gone for good"):
        await probe(ask, heard=heard, missed=missed)
    assert seen == ["one", "missed: slow", "two"]


def recorder() -> Recorder:
    return Recorder([], View())


def test_the_picture_is_all_that_is_known_and_can_be_read_back(tmp_path: Path) -> None:
    kept = recorder()
    kept.plan(20)
    picture = Picture(Config(), RunDir(tmp_path), kept, lineage=2)
    first = picture.state()
    assert (first.phase, first.lineage, first.total_steps, first.queue) == ("starting", 2, 20, None)
    picture.phase = "running"
    picture.queue = queue_status(pid=7)
    picture.store = StoreStatus(8, Edition(2, 5), (report("a"),))
    picture.trainer = {"step": 6, "version": 5, "waits": []}
    picture.heard_at = {"queue": first.written_at, "store": first.written_at - 60.0}
    state = picture.state()
    assert (state.step, state.version, state.published, state.books) == (6, 5, Edition(2, 5), picture.queue.books)
    assert set(state.unheard_s) == {"store"}
    assert {(one.part, one.pid) for one in state.processes} >= {("queue", 7), ("store", 8), ("replica", 100)}
    assert state.last_progress_at >= first.last_progress_at
    picture.end("failed", "the disk is full")
    read = read_state(tmp_path)
    assert read is not None and (read.phase, read.error, read.step) == ("failed", "the disk is full", 6)


class Driver:
    """A `Run` whose parts were never started."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        config = Config.model_validate(sections)
        self.recorder = recorder()
        self.picture = Picture(config, RunDir(tmp_path), self.recorder)
        self.run = Run(config, RunDir(tmp_path), None, self.recorder, View(), self.picture)

    @property
    def restarts(self) -> list[tuple[str, int, str]]:
        return [(one.part, one.incarnation, one.cause) for one in self.picture.state().restarts]


def test_restarts_by_ray_are_told_and_count_against_the_budget(tmp_path: Path) -> None:
    driver = Driver(tmp_path, recovery={"max_restarts": 2})
    driver.picture.heard_at = {"queue": 1.0, "store": 2.0}
    driver.run._was_restarted("queue", "12 live samples")
    driver.run._hung["store"] = "it did not answer"
    driver.run._was_restarted("store", "")
    driver.run._was_restarted("queue", "")
    assert driver.restarts == [
        ("queue", 2, "the sample queue's process died"),
        ("store", 2, "it did not answer"),
        ("queue", 3, "the sample queue's process died"),
    ]
    with pytest.raises(InfraError, match=r"the sample queue failed 3 times .*recovery.max_restarts=2.*logs/ray"):
        driver.run._was_restarted("queue", "")


async def test_a_queue_that_is_slow_to_come_back_is_killed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, timeouts={"start_s": 1000})
    driver.picture.heard_at = {"queue": 1.0}
    killed: list[int] = []

    async def kill_hung(actor: object, name: str, pid: int, heard_at: float) -> None:
        killed.append(pid)

    clock = iter((0.0, 30.0, 900.0, 901.0, 1902.0))
    monkeypatch.setattr("asyncrl.cli.run.kill_hung", kill_hung)
    monkeypatch.setattr("asyncrl.cli.run.time.monotonic", lambda: next(clock))
    late = DeadlineError("it did not answer")
    for _ in range(3):
        await driver.run._replace_hung("queue", None, QueueActor, 7, late)
    assert killed == [7], "its successor is rebuilding, and was killed over it"
    await driver.run._replace_hung("queue", None, QueueActor, 8, late)
    assert killed == [7, 8]
    with pytest.raises(InfraError, match=r"it did not answer, and the next one did not answer within 1000 s"):
        await driver.run._replace_hung("queue", None, QueueActor, 8, late)


async def test_replicas_that_serve_replaces_count_against_the_budget(tmp_path: Path) -> None:
    driver = Driver(tmp_path, recovery={"max_restarts": 1})
    for names in ("a", "ab"):
        reports = tuple(report(name, reported_at=float(ord(name))) for name in names)
        await driver.run._look_at_replicas(StoreStatus(1, None, reports))
    assert [part for part, *_ in driver.restarts] == ["replica"]
    with pytest.raises(InfraError, match="the replicas failed 2 times"):
        await driver.run._look_at_replicas(StoreStatus(1, None, (report("c", reported_at=200.0),)))


async def test_what_is_validated_already_is_told_to_the_next_rollouter(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    assert driver.run._begin() == RolloutStart(validate_first=True, validated=None)
    for lineage, version in ((0, 0), (0, 8), (1, 4)):
        await driver.run._put(ValidationRecord(version, version, {"reward/mean": 0.5}, (), lineage))
    assert driver.run._begin() == RolloutStart(validate_first=False, validated=Edition(1, 4))


class Queue:
    """Says whether the stream has ended."""

    def __init__(self) -> None:
        self.ended = True

    async def status(self) -> QueueStatus:
        return replace(queue_status(), ended=self.ended)


async def test_a_rollouter_that_has_ended_is_needed_again_if_the_trainer_goes_back(tmp_path: Path) -> None:
    driver, queue, answers = Driver(tmp_path), Queue(), list[bool]()
    driver.run._queue = queue  # type: ignore[assignment]

    async def ask() -> None:
        answers.append(await driver.run._is_needed_again())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            queue.ended = False  # rewound: there is more to generate
            await driver.run._rewound(Resumed(4, 4, "", 1))
        assert answers == [True] and driver.picture.lineage == 1
        queue.ended = True
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            driver.run._trainer_ended = True
            driver.run._trainer_moved.set()
    assert answers == [True, False]


class Training:
    def __init__(self, *failures: InfraError | None) -> None:
        self.failures = list(failures)

    async def republish(self) -> None:
        if (failure := self.failures.pop(0)) is not None:
            raise failure


async def test_a_store_that_was_restarted_is_told_the_newest_version_until_it_knows(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    training = Training(InfraError("the trainer is gone"), None)
    driver.run._training = training  # type: ignore[assignment]
    await driver.run._tell_store()
    assert len(training.failures) == 2, "it has forgotten nothing"
    driver.run._store_forgot = True
    for _ in range(3):
        await driver.run._tell_store()
    assert training.failures == [] and not driver.run._store_forgot
