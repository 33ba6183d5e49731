"""Probes, the run status and the decisions of a run whose parts are not started."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import DeadlineError, InfraError
from asyncrl.core.ports import PartName, QueueStatus, SampleCounts, StoreStatus, WeightsVersion
from asyncrl.core.records import RunRecord, StepRecord, ValidationRecord
from asyncrl.driver import run as run_module
from asyncrl.driver import supervision
from asyncrl.driver.run import Run, _resume_message
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.supervision import Supervisor, probe
from asyncrl.observe.recorder import ROWS_FILE, Recorder, TemporaryRows
from asyncrl.observe.status.run_status import read_state
from asyncrl.observe.status.summary import ResumePoint
from asyncrl.observe.terminal.live import View
from asyncrl.profiling import profile
from asyncrl.storage.checkpoint_manifest import Progress
from asyncrl.storage.run_dir import RunDir
from rollouter.group_workers.pool import LostWorker
from rollouter.weight_updates import RolloutStart
from tests.fakes.parts import ManualClock
from tests.fakes.run_states import queue_status, report


async def test_a_probe_repeats_after_answers_and_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "TICK_S", 0.0)
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

    async def on_answer(answer: str) -> None:
        seen.append(answer)

    async def on_timeout(error: DeadlineError) -> None:
        seen.append(f"missed: {error}")

    with pytest.raises(InfraError, match="gone for good"):
        await probe(ask, 30.0, on_answer=on_answer, on_timeout=on_timeout)
    # A part that answers the second try was healthy: this process was suspended.
    assert seen == ["one", "missed: slow", "two", "three"]
    retry_s = supervision.RETRY_S
    assert limits == [30.0, 30.0, 30.0, retry_s, 30.0, retry_s, 30.0, retry_s, 30.0, 30.0]


async def test_a_probe_ignores_timeouts_while_the_driver_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(supervision.anyio, "current_time", clock)
    seen: list[str] = []
    took = [30.0, 40.0, 3.5, 2.5]

    async def ask(limit_s: float) -> Any:
        if not took:
            raise InfraError("gone for good")
        clock.now_s += took.pop(0)
        raise DeadlineError(f"{len(took)} left")

    async def on_timeout(error: DeadlineError) -> None:
        seen.append(error.message)

    with pytest.raises(InfraError, match="gone for good"):
        await probe(ask, 30.0, on_answer=on_timeout, on_timeout=on_timeout)
    assert seen == ["3 left"] and not took, (
        "the timeout is reported after the fourth try, the first retry in which the driver was not suspended"
    )


def test_message_of_a_resumed_run() -> None:
    manifest = SimpleNamespace(progress=Progress(step=8, version=7))
    before, now = SampleCounts(fed=60, ready=10, leased=2, trained=48), SampleCounts(fed=60, ready=24, trained=36)
    resume: Any = SimpleNamespace(manifest=manifest, checkpoint=Path("c"), run_dir=Path("runs/q"))
    assert _resume_message(resume, before, now) == (
        "continuing from step 8 (version 7) in runs/q: 36 samples are trained, 12 are trained again, 12 more are "
        "finished already"
    )
    resume.checkpoint = None
    assert _resume_message(resume, SampleCounts(), SampleCounts()).startswith(
        "continuing from the beginning in runs/q: 0 samples are trained"
    )


def recorder() -> Recorder:
    return Recorder([], View())


def test_run_status_combines_all_parts_and_can_be_read_back(tmp_path: Path) -> None:
    kept = recorder()
    kept.set_total_steps(20)
    status = RunStatus(Config(), RunDir(tmp_path), kept, resumed_at=ResumePoint(4, 3, "", 2))
    for trainer in ({}, {"step": 0, "version": 0, "waits": []}):  # no report yet, or the checkpoint is not loaded
        status.trainer = trainer
        first = status.state()
        assert (first.phase, first.lineage, first.total_steps, first.queue) == ("starting", 2, 20, None)
        assert (first.step, first.version) == (4, 3)
    status.phase = "running"
    status.queue = queue_status(pid=7)
    status.store = StoreStatus(8, WeightsVersion(2, 5), (report("a"),))
    status.trainer = {"step": 6, "version": 5, "waits": []}
    kept.update_parts(status.queue, {}, {})
    status.answered_at = {"queue": first.written_at, "store": first.written_at - 60.0}
    state = status.state()
    assert (state.step, state.version, state.published) == (6, 5, WeightsVersion(2, 5))
    assert state.counts == status.queue.counts
    assert set(state.silent_s) == {"store"}
    assert {(one.part, one.pid) for one in state.processes} >= {("queue", 7), ("store", 8), ("replica", 100)}
    assert state.last_progress_at >= first.last_progress_at
    status.end("failed", "the disk is full")
    read = read_state(tmp_path)
    assert read is not None and (read.phase, read.error, read.step) == ("failed", "the disk is full", 6)


class RunRig:
    """A `Run` whose parts were never started."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        config = Config.model_validate(sections)
        self.recorder = Recorder([TemporaryRows(tmp_path / ROWS_FILE)], View())
        self.status = RunStatus(config, RunDir(tmp_path), self.recorder)
        self.run = Run(config, RunDir(tmp_path), None, self.recorder, View(), self.status)


async def test_the_next_rollouter_knows_which_version_is_validated(tmp_path: Path) -> None:
    """`validated_step`, which the next Trainer gets, ignores validations that a rewind discarded."""
    driver = RunRig(tmp_path)
    assert driver.run._rollout_start() == RolloutStart(True, None, 0)
    assert driver.recorder.validated_step is None
    for version in (0, 5, 8):
        await driver.run._put(ValidationRecord(version, 10 * version, {"reward/mean": 0.5}, ()))
    assert driver.run._rollout_start() == RolloutStart(False, WeightsVersion(0, 8), 80)
    await driver.run._on_rewind(ResumePoint(70, 7, "", 1))
    assert profile.place == (71, 7), "the driver's events belong to the step that is repeated"
    assert driver.run._rollout_start() == RolloutStart(False, WeightsVersion(0, 8), 50)
    await driver.run._put(ValidationRecord(7, 70, {"reward/mean": 0.5}, (), 1))
    assert driver.run._rollout_start() == RolloutStart(False, WeightsVersion(1, 7), 70)
    assert driver.recorder.validated_step == 70


async def test_a_resumed_run_does_not_validate_its_starting_version_again(tmp_path: Path) -> None:
    first, second = RunRig(tmp_path), RunRig(tmp_path)
    await first.run._put(ValidationRecord(0, 0, {"reward/mean": 0.5}, ()))
    second.run._recorder = first.recorder  # the recorder has read the run's records
    assert second.run._rollout_start() == RolloutStart(False, None, 0)


class Queue:
    """A queue that has only leased samples until the test closes it."""

    def __init__(self) -> None:
        self.closed = True

    async def status(self) -> QueueStatus:
        return replace(queue_status(), ended=True, closed=self.closed)


async def test_a_rollouter_that_has_ended_is_needed_again_if_the_trainer_is_rewound(tmp_path: Path) -> None:
    driver, queue, answers = RunRig(tmp_path), Queue(), list[bool]()
    driver.run._queue = queue  # type: ignore[assignment]
    served = AsyncMock(side_effect=[InfraError("it died"), None])
    driver.run._trainer_part.confirm_served = served  # type: ignore[method-assign]

    async def ask() -> None:
        answers.append(await driver.run._is_needed_again())

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            queue.closed = False  # leased samples may have to be generated again, and new versions have to be applied
            await driver.run._on_rewind(ResumePoint(4, 4, "", 1))
        assert answers == [True] and driver.status.resumed_at.lineage == 1
        queue.closed = True
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            driver.run._trainer_ended = True
            driver.run._trainer_changed.set()
    assert answers == [True, False]
    assert served.await_count == 2, "each new Trainer is notified"


async def test_a_failed_notification_of_the_trainer_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.driver.run.TICK_S", 0.01)
    driver, calls = RunRig(tmp_path), iter(range(1, 4))
    driver.run._queue = Queue()  # type: ignore[assignment]

    async def confirm_served() -> None:
        if next(calls) < 3:
            raise InfraError("it was not reached")
        driver.run._trainer_ended = True
        driver.run._trainer_changed.set()

    driver.run._trainer_part.confirm_served = confirm_served  # type: ignore[method-assign]
    with anyio.fail_after(5):
        assert not await driver.run._is_needed_again()
    assert list(calls) == []


class StoppablePart:
    """A `SupervisedPart` that runs until it is asked to stop, and then ends or fails."""

    def __init__(self, name: PartName, error: InfraError | None = None) -> None:
        self.name: PartName = name
        self.error = error
        self.asked = anyio.Event()
        self.kill = self.release_samples = self.start = AsyncMock(side_effect=AssertionError("nothing is replaced"))

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
async def test_a_part_that_dies_during_an_interrupt_does_not_block_the_end(
    dies: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = RunRig(tmp_path)
    run, parts = driver.run, dict[str, StoppablePart]()
    for name in ("rollouter", "trainer"):
        parts[name] = StoppablePart(name, InfraError("its process died") if name == dies else None)
        supervisor = Supervisor(parts[name], run._budgets[name], driver.recorder.record_restart)
        setattr(run, f"_{name}", supervisor)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as streams:
                streams.start_soon(run._follow_rollouter)
                streams.start_soon(run._follow_trainer)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(run._stop)
            run._ended.set()
    assert all(part.asked.is_set() for part in parts.values())
    assert f"the {dies} failed while the run was stopping: its process died" in caplog.text
    assert driver.status.state().restarts == ()


@pytest.mark.parametrize("part", ["trainer", "rollouter", "queue", "store", "replica"])
async def test_a_budget_is_spent_when_the_run_makes_no_progress_between_restarts(
    tmp_path: Path, part: PartName
) -> None:
    driver = RunRig(tmp_path, recovery={"max_restarts": 1, "window_s": 1.0})
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


async def test_crashes_caused_by_a_prompt_are_not_charged_to_the_replicas(tmp_path: Path) -> None:
    driver = RunRig(tmp_path, recovery={"max_restarts": 1})
    budget, died = driver.run._budgets["replica"], InfraError("an engine died")

    def explained(count: int) -> None:
        driver.run._on_rollouter_status({"waits": [], "crash_isolation": {"explained": count}})

    budget.spend(0.0, died)
    explained(2)  # the successor of the second engine has not reported yet
    budget.spend(1.0, died)
    explained(0)  # a new Rollouter counts from 0
    assert budget.spend(2.0, died) == 1
    explained(1)
    assert budget.spend(3.0, died) == 1
    with pytest.raises(InfraError, match="failed 2 times"):
        budget.spend(4.0, died)


async def test_lost_workers_are_recorded_once_and_charged_to_their_budget(tmp_path: Path) -> None:
    driver = RunRig(tmp_path, recovery={"max_restarts": 2})

    def report_lost(*lost: LostWorker, incarnation: int = 1) -> list[tuple[str, int, float | None]]:
        status = {"waits": [], "crash_isolation": {"explained": 0}, "incarnation": incarnation}
        driver.run._on_rollouter_status({**status, "lost_workers": list(lost)})
        return [(one.part, one.incarnation, one.recovered_at) for one in driver.recorder.dashboard.restarts]

    first = LostWorker(1, 0, at=5.0, cause="it died")
    for _ in range(3):
        assert report_lost(first) == [("worker", 2, None)]
    assert report_lost(first._replace(recovered_at=7.0)) == [("worker", 2, 7.0)]
    # A new Rollouter counts from 1 again.
    assert report_lost(first._replace(at=9.0), incarnation=2) == [("worker", 2, 7.0), ("worker", 3, None)]
    with pytest.raises(InfraError, match="the Rollouter's workers failed 3 times"):
        report_lost(LostWorker(2, 1, at=10.0, cause="again"), incarnation=2)
    assert list(driver.run._lost_workers) == [(2, 2)], "losses that are no longer reported are forgotten"


async def test_the_run_waits_for_room_only_if_two_answers_in_a_row_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is just being placed is pending for a moment."""
    driver, one = RunRig(tmp_path), ("1 x engine replica: 1 GPU",)
    answers: list[Any] = [(), (), one, (), one, None, one, one, (), ()]
    seen = []

    def ask(namespace: str, app: str) -> Any:
        seen.append(driver.status.pending_demands)
        return answers.pop(0)

    monkeypatch.setattr(run_module, "DEMANDS_S", 0.0)
    monkeypatch.setattr(run_module, "pending_demands", ask)
    with pytest.raises(IndexError):
        await driver.run._watch_demands("run", "app")
    assert seen == [*[()] * 7, one, one, one, ()]


async def test_messages_about_records_are_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, shown = RunRig(tmp_path), []
    monkeypatch.setattr(driver.run._view, "message", lambda level, text: shown.append((level, text)))
    waiting: dict[str, Any] = {"waits": [], "crash_isolation": {"explained": 0}}
    for messages in ([], ["no space"], ["no space", "damaged"]):
        driver.run._on_rollouter_status({**waiting, "messages": messages})
    driver.run._on_trainer_status({"waits": [], "step": 0, "version": 0, "messages": ["no space"]})
    assert shown == [("warning", "no space"), ("warning", "damaged")]


async def test_the_view_shows_how_far_the_data_is_until_the_rollouter_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, shown = RunRig(tmp_path), []
    monkeypatch.setattr(driver.run._view, "progress", shown.append)
    started: dict[str, Any] = {"incarnation": 1, "pid": 1, "node_id": ""}
    for status in (started, {**started, "loading": "tokenizing data.train_files: 3 of 9 rows"}):
        driver.run._on_rollouter_status(status)
    driver.run._on_rollouter_status({"waits": [], "crash_isolation": {"explained": 0}})
    assert shown == ["tokenizing data.train_files: 3 of 9 rows"]


@pytest.mark.parametrize("step_s", [None, 100.0])
async def test_a_run_whose_steps_are_long_has_time_to_stop(tmp_path: Path, step_s: float | None) -> None:
    driver = RunRig(tmp_path, timeouts={"stop_s": 0.01})
    driver.run._trainer, driver.run._rollouter = AsyncMock(), AsyncMock()
    if step_s is not None:
        driver.recorder.dashboard = replace(driver.recorder.dashboard, step_times=(0.0, step_s))

    async def end_later() -> None:
        await anyio.sleep(0.1)
        driver.run._ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(end_later)
        if step_s is None:
            with pytest.raises(InfraError, match=r"did not stop within 0\.0 s"):
                await driver.run._stop()
        else:
            await driver.run._stop()


CLUSTER = {"ray": {"address": "auto"}}
POOL = {"nnodes": 1, "n_gpus_per_node": 8, "num_workers": 8}
LABELS = {"node_labels": {"pool": "train"}}


@pytest.mark.parametrize(
    ("sections", "first"),
    [
        (CLUSTER | {"trainer": POOL}, True),
        (CLUSTER | {"trainer": POOL | LABELS}, True),
        (CLUSTER | {"trainer": POOL | LABELS, "rollout": {"node_labels": {"pool": "rollout"}}}, False),
        (CLUSTER | {"trainer": POOL, "rollout": {"attach": "servers"}}, False),
        (CLUSTER, False),
        ({"trainer": POOL}, False),
    ],
)
async def test_engines_wait_for_ranks_that_need_whole_nodes_which_the_engines_could_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], first: bool
) -> None:
    """Ray spreads engines over all nodes, and then no node would have `trainer.n_gpus_per_node` GPUs left."""
    driver, engines_decided = RunRig(tmp_path, **sections).run, anyio.Event()

    async def start(supervisor: Supervisor) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(driver, "_start_first", start)
    async with anyio.create_task_group() as group:
        group.start_soon(driver._start_parts, group, engines_decided)
        await anyio.wait_all_tasks_blocked()
        assert engines_decided.is_set() is not first
        group.cancel_scope.cancel()
