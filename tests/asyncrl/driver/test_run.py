"""What the driver makes of what its parts say, without any of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.cli import probes
from asyncrl.cli.picture import Picture
from asyncrl.cli.probes import probe
from asyncrl.cli.run import Run, _going_on
from asyncrl.cli.supervise import Supervisor
from asyncrl.config.schema import Config
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.manifest import Progress
from asyncrl.ports import Books, Edition, PartName, QueueStatus, StoreStatus
from asyncrl.records import RunRecord, StepRecord, ValidationRecord
from asyncrl.run_dir import RunDir
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import read_state
from asyncrl.telemetry.summary import Resumed
from rollouter.rollouter import RolloutStart
from tests.fakes.parts import ManualClock
from tests.fakes.run_states import queue_status, report


class Ended(Exception):
    """Ends a probe."""


async def test_a_part_is_asked_again_and_again_whatever_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TICK_S", 0.0)
    slow, slower = DeadlineError("slow"), DeadlineError("slower")
    answers: list[Any] = ["one", None, slow, slower, slow, "two", slow, None, "three", InfraError("gone for good")]
    seen: list[str] = []
    limits: list[float] = []

    async def ask(limit_s: float) -> Any:
        limits.append(limit_s)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def heard(answer: str) -> None:
        seen.append(answer)

    async def missed(error: DeadlineError) -> None:
        seen.append(f"missed: {error}")

    with pytest.raises(InfraError, match="gone for good"):
        await probe(ask, 30.0, heard=heard, missed=missed)
    # One that answers when it is asked once more was well: it was this process that stood still.
    assert seen == ["one", "missed: slow", "two", "three"]
    assert limits == [30.0, 30.0, 30.0, probes.AGAIN_S, 30.0, probes.AGAIN_S, 30.0, probes.AGAIN_S, 30.0, 30.0]


async def test_a_try_in_which_the_driver_stood_still_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(probes.anyio, "current_time", clock)
    seen: list[str] = []
    took = [30.0, 40.0, 3.5, 2.5]

    async def ask(limit_s: float) -> Any:
        if not took:
            raise InfraError("gone for good")
        clock.now_s += took.pop(0)
        raise DeadlineError(f"{len(took)} to come")

    async def missed(error: DeadlineError) -> None:
        seen.append(error.message)

    with pytest.raises(InfraError, match="gone for good"):
        await probe(ask, 30.0, heard=lambda answer: missed(answer), missed=missed)
    assert seen == ["3 to come"] and not took, "at the fourth, the first that took no longer than it may"


def test_what_a_resumed_run_begins_with() -> None:
    manifest = SimpleNamespace(progress=Progress(step=8, version=7))
    before, now = Books(fed=60, ready=10, leased=2, trained=48), Books(fed=60, ready=24, trained=36)
    resume: Any = SimpleNamespace(manifest=manifest, checkpoint=Path("c"), run_dir=Path("runs/q"))
    assert _going_on(resume, before, now) == (
        "going on from step 8 (version 7) in runs/q: 36 samples are trained, 12 are trained again, 12 more are "
        "finished already"
    )
    resume.checkpoint = None
    assert _going_on(resume, Books(), Books()).startswith(
        "going on from its beginning in runs/q: 0 samples are trained"
    )


def recorder() -> Recorder:
    return Recorder([], View())


def test_the_picture_is_all_that_is_known_and_can_be_read_back(tmp_path: Path) -> None:
    kept = recorder()
    kept.plan(20)
    picture = Picture(Config(), RunDir(tmp_path), kept, back_to=Resumed(4, 3, "", 2))
    for trainer in ({}, {"step": 0, "version": 0, "waits": []}):  # it has told nothing, or has not loaded it yet
        picture.trainer = trainer
        first = picture.state()
        assert (first.phase, first.lineage, first.total_steps, first.queue) == ("starting", 2, 20, None)
        assert (first.step, first.version) == (4, 3)
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


async def test_what_is_validated_already_is_told_to_the_next_rollouter(tmp_path: Path) -> None:
    """And to the next Trainer; to it only what is of the surviving line."""
    driver = Driver(tmp_path)
    assert driver.run._begin() == RolloutStart(validate_first=True, validated=None, validated_step=0)
    assert driver.recorder.validated_step is None
    for version in (0, 5, 8):
        await driver.run._put(ValidationRecord(version, 10 * version, {"reward/mean": 0.5}, ()))
    assert driver.run._begin() == RolloutStart(validate_first=False, validated=Edition(0, 8), validated_step=80)
    await driver.run._rewound(Resumed(70, 7, "", 1))
    assert driver.run._begin() == RolloutStart(validate_first=False, validated=Edition(0, 8), validated_step=50)
    await driver.run._put(ValidationRecord(7, 70, {"reward/mean": 0.5}, (), 1))
    assert driver.run._begin() == RolloutStart(validate_first=False, validated=Edition(1, 7), validated_step=70)
    assert driver.recorder.validated_step == 70


async def test_a_resumed_run_does_not_validate_its_start_again(tmp_path: Path) -> None:
    first, second = Driver(tmp_path), Driver(tmp_path)
    await first.run._put(ValidationRecord(0, 0, {"reward/mean": 0.5}, ()))
    second.run._recorder = first.recorder  # what it has read of the run's records
    assert second.run._begin() == RolloutStart(validate_first=False, validated=None, validated_step=0)


class Queue:
    """Says whether it is closed. Nothing is READY or runs: what is left, the Trainer has leased."""

    def __init__(self) -> None:
        self.closed = True

    async def status(self) -> QueueStatus:
        return replace(queue_status(), ended=True, closed=self.closed)


async def test_a_rollouter_that_has_ended_is_needed_again_if_the_trainer_goes_back(tmp_path: Path) -> None:
    driver, queue, answers = Driver(tmp_path), Queue(), list[bool]()
    driver.run._queue = queue  # type: ignore[assignment]
    told: list[bool] = []

    async def served() -> None:
        told.append(True)
        if len(told) == 1:
            raise InfraError("it died over that")

    driver.run._training.served = served  # type: ignore[method-assign]

    async def ask() -> None:
        answers.append(await driver.run._is_needed_again())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            queue.closed = False  # what the Trainer has leased may be lost, and what it publishes is to be applied
            await driver.run._rewound(Resumed(4, 4, "", 1))
        assert answers == [True] and driver.picture.back_to.lineage == 1
        queue.closed = True
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            driver.run._trainer_ended = True
            driver.run._trainer_moved.set()
    assert answers == [True, False]
    assert len(told) == 2, "the Trainer is to end as well, as often as there is a new one"


async def test_a_trainer_that_did_not_hear_that_it_may_end_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.cli.run.TICK_S", 0.01)
    driver, told = Driver(tmp_path), list[bool]()
    driver.run._queue = Queue()  # type: ignore[assignment]

    async def served() -> None:
        told.append(True)
        if len(told) < 3:
            raise InfraError("it was not reached")
        driver.run._trainer_ended = True
        driver.run._trainer_moved.set()

    driver.run._training.served = served  # type: ignore[method-assign]
    with anyio.fail_after(5):
        assert not await driver.run._is_needed_again()
    assert len(told) == 3


class Asked:
    """`supervise.Part` that runs until it is asked to stop, and then ends, or dies of it."""

    def __init__(self, name: PartName, error: InfraError | None = None) -> None:
        self.name: PartName = name
        self.error = error
        self.asked = anyio.Event()

    async def kill(self) -> None:
        raise AssertionError("nothing is replaced")

    async def claim(self, incarnation: int) -> str:
        raise AssertionError("nothing is replaced")

    async def start(self, incarnation: int) -> None:
        raise AssertionError("nothing is replaced")

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        await self.asked.wait()
        if self.error is not None:
            raise self.error
        yield ValidationRecord(1, 1, {"reward/mean": 0.5}, (), 0)

    async def stop(self) -> None:
        self.asked.set()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("dies", ["trainer", "rollouter"])
async def test_a_part_that_dies_of_ctrl_c_does_not_keep_the_run_from_ending(
    dies: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path)
    run, parts = driver.run, dict[str, Asked]()
    for name in ("rollouter", "trainer"):
        parts[name] = Asked(name, InfraError("its process died") if name == dies else None)
        supervisor = Supervisor(parts[name], run._budgets[name], driver.recorder.restarted)
        setattr(run, f"_{name}", supervisor)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as streams:
                streams.start_soon(run._generate)
                streams.start_soon(run._train)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(run._stop)
            run._ended.set()
    assert all(part.asked.is_set() for part in parts.values())
    assert f"the {dies} failed while the run was stopping: its process died" in caplog.text
    assert driver.picture.state().restarts == ()


@pytest.mark.parametrize("part", ["trainer", "rollouter", "queue", "store", "replica"])
async def test_a_part_in_whose_way_the_run_gets_no_further_is_out_of_budget(tmp_path: Path, part: PartName) -> None:
    driver = Driver(tmp_path, recovery={"max_restarts": 1, "window_s": 1.0})
    budget = driver.run._budgets[part]
    for now_s, step in ((0.0, 1), (10.0, 2)):
        await driver.run._put(step_record(step))
        budget.spend(now_s, InfraError("step 3 fails"))
    await driver.run._put(step_record(2))
    with pytest.raises(InfraError, match="failed 2 times in a row and the run did not get past step 2"):
        budget.spend(20.0, InfraError("step 3 fails"))


def step_record(step: int) -> StepRecord:
    metrics = dict.fromkeys(("reward/mean", "tokens/trained", "timing/wait_samples_s", "time/monotonic_s"), 1.0)
    return StepRecord(step, step, metrics, (1.0,), (0,))


async def test_crashes_that_a_prompt_explains_are_not_charged_to_the_replicas(tmp_path: Path) -> None:
    driver = Driver(tmp_path, recovery={"max_restarts": 1})
    budget, died = driver.run._budgets["replica"], InfraError("an engine died")

    def explained(count: int) -> None:
        driver.run._heard_rollouter({"waits": [], "quarantine": {"explained": count}})

    budget.spend(0.0, died)
    explained(2)  # the second one's successor has not reported yet
    budget.spend(1.0, died)
    explained(0)  # another Rollouter, which knows of none
    assert budget.spend(2.0, died) == 1
    explained(1)
    assert budget.spend(3.0, died) == 1
    with pytest.raises(InfraError, match="failed 2 times"):
        budget.spend(4.0, died)


async def test_what_records_could_not_do_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, shown = Driver(tmp_path), []
    monkeypatch.setattr(driver.run._view, "message", lambda level, text: shown.append((level, text)))
    waiting: dict[str, Any] = {"waits": [], "quarantine": {"explained": 0}}
    for messages in ([], ["no space"], ["no space", "damaged"]):
        driver.run._heard_rollouter({**waiting, "messages": messages})
    driver.run._heard_trainer({"waits": [], "step": 0, "version": 0, "messages": ["no space"]})
    assert shown == [("warning", "no space"), ("warning", "damaged")]
