"""The health monitor of the driver: snapshot, warnings, metrics, state and pages."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from asyncrl.config.schema import Config
from asyncrl.core.ports import SampleCounts, StoreStatus
from asyncrl.core.process_health import EngineLoad, MachineHealth, Problem, ProcessHealth, RunHealth
from asyncrl.driver import health_monitor as module
from asyncrl.driver.health_monitor import HealthMonitor
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.observe.health.rules import GIB
from asyncrl.observe.metrics import registry
from asyncrl.observe.metrics.rows import health_metrics
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.run_files import read_run, status_report
from asyncrl.observe.status.run_status import STATE_FILE, StateFile, dump, load
from asyncrl.observe.terminal.live import logging_to
from asyncrl.observe.terminal.screen import Dashboard, health_line
from asyncrl.observe.terminal.status_page import status_page
from asyncrl.profiling.process_usage import ProcessMeter, _within_container, measure_machine
from asyncrl.storage.run_dir import RunDir
from tests.fakes.metric_records import RecordingView
from tests.fakes.run_states import NOW, queue_status, report, running

PROCESS = ProcessHealth(2 * GIB, 0.5, 0.02)
MACHINE = MachineHealth(64 * GIB, 40 * GIB, 0.5, 500 * GIB)
HEALTH = RunHealth(
    {"driver": PROCESS, "rollouter": replace(PROCESS, lag_s=0.31), "engine-0": replace(PROCESS, lag_s=None)},
    {"0": EngineLoad(3, 1, 0.45, 2), "1": EngineLoad(4, 0, 0.9, 1)},
    MACHINE,
    0.25,
    (Problem("disk", NOW - 60, "the disk of the run directory has 1.0 GiB left"),),
)


class MonitorRig:
    """A `HealthMonitor` of a run without parts; `look` lets it check every 2 s of fake time."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = Config()
        self.view = RecordingView()
        self.recorder = Recorder([], self.view)
        self.status = RunStatus(config, RunDir(tmp_path), self.recorder)
        self.status.phase = "running"
        self.now_s = 1000.0
        self.watch = HealthMonitor(config, tmp_path, self.status, self.recorder, self.view, lambda: self.now_s)
        self.machine: Callable[[Path], Any] = lambda path: MACHINE
        self.store: Callable[[], Any] = lambda: 0.25
        monkeypatch.setattr(module, "measure_machine", lambda path: self.machine(path))
        monkeypatch.setattr(module, "object_store_share", lambda: self.store())

    async def look(self, seconds: float = 2.0) -> RunHealth:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 2.0
            await self.watch._check()
        return self.view.board.health


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MonitorRig:
    return MonitorRig(tmp_path, monkeypatch)


async def test_health_covers_every_process_that_reports(rig: MonitorRig) -> None:
    health = await rig.look()
    assert list(health.processes) == ["driver"] and health.machine == MACHINE and health.object_store_share == 0.25
    reporting = report("abc", health=PROCESS, engine_health=PROCESS, load=EngineLoad(1, 2, 0.5, 3), node_id="far")
    silent = report("old", health=PROCESS)
    with_times = [replace(reporting, reported_at=module.time.time()), silent]
    rig.status.store = StoreStatus(1, None, tuple(with_times), health=PROCESS)
    rig.status.queue = queue_status(health=PROCESS)
    rig.status.rollouter = {"health": PROCESS, "waits": []}
    ranks = [{"group": "actor", "rank": rank, "pid": 1, "node_id": "n"} for rank in (0, 1)]
    rig.status.trainer = {
        "waits": [],
        "health": None,
        "node_id": "n",
        "ranks": [{**ranks[0], "health": PROCESS}, ranks[1]],
    }
    health = await rig.look()
    assert list(health.processes) == [
        "driver", "queue", "store", "rollouter", "rank-actor-0", "replica-abc", "engine-abc",
    ]  # fmt: skip
    assert health.engines == {"abc": EngineLoad(1, 2, 0.5, 3)}
    assert rig.watch._elsewhere() == {"replica-abc", "engine-abc"}
    assert rig.status.state().health == health


@pytest.mark.parametrize(("generated_tokens", "keys"), [(900, ["idle/both"]), (0, [])])
async def test_two_idle_sides_are_one_hint_and_none_while_records_are_replayed(
    rig: MonitorRig, generated_tokens: int, keys: list[str]
) -> None:
    rig.status.queue, rig.status.trainer = queue_status(), {"step": 9, "waits": []}
    rig.recorder._parts.known |= {"idle/trainer": 0.9, "idle/rollouter": 0.8}
    rig.recorder._parts.generated_tokens = generated_tokens
    rig.recorder.dashboard = Dashboard(counts=SampleCounts(fed=64, replayed=8))
    health = await rig.look(130)
    assert [problem.key for problem in health.problems] == keys


async def test_a_problem_and_its_end_are_reported_once(rig: MonitorRig) -> None:
    rig.store = lambda: 0.95
    health = await rig.look(60)
    assert [problem.key for problem in health.problems] == ["object_store"]
    rig.store = lambda: 0.1
    assert not (await rig.look(60)).problems
    levels = [level for level, _ in rig.view.messages]
    assert levels == ["warning", ""] and "ray.object_store_memory_bytes" in rig.view.messages[0][1]


async def test_a_warning_is_shown_once_and_logged(rig: MonitorRig, tmp_path: Path) -> None:
    rig.store = lambda: 0.95
    with logging_to(rig.view, tmp_path, "info"):
        await rig.look(60)
    (shown,) = [message for message in rig.view.messages if "object store" in message[1]]  # this process may be busy
    assert shown[0] == "warning"
    assert (tmp_path / "driver.log").read_text().count(shown[1]) == 1


def late(lag_s: float) -> dict[str, Any]:
    return {"waits": [], "health": replace(PROCESS, lag_s=lag_s)}


async def test_no_lag_is_reported_during_the_start_or_right_after(rig: MonitorRig) -> None:
    rig.status.phase, rig.status.rollouter = "starting", late(9.0)
    rig.store = lambda: 0.95
    health = await rig.look(120)
    assert "rollouter" in health.processes and not health.problems and rig.view.messages == []
    rig.store = lambda: 0.25
    rig.status.phase = "running"
    await rig.look(20)
    rig.status.rollouter = late(0.1)
    await rig.look(60)
    assert rig.view.messages == []
    rig.status.rollouter = late(9.0)
    await rig.look()
    assert [level for level, _ in rig.view.messages] == ["warning"]


async def test_a_replaced_part_may_block_while_it_starts(rig: MonitorRig) -> None:
    rig.status.rollouter = late(0.1)
    await rig.look(60)
    rig.status.restarting, rig.status.answered_at["rollouter"] = {"rollouter": time.time()}, time.time() - 60
    health = await rig.look(60)
    assert "rollouter" not in health.processes and rig.view.messages == [], (
        "its last report comes from the dead process"
    )
    rig.status.restarting, rig.status.answered_at["rollouter"] = {}, time.time()
    rig.status.rollouter = late(9.0)
    await rig.look(20)
    assert rig.view.messages == []


async def test_ranks_may_block_until_their_first_step(rig: MonitorRig) -> None:
    rank = {"group": "actor", "rank": 0, "pid": 1, "node_id": "n", "health": replace(PROCESS, lag_s=9.0)}
    rig.status.trainer = {"waits": [], "node_id": "n", "ranks": [rank], "step": 0}
    await rig.look(120)
    assert rig.view.messages == []
    rig.status.trainer = {**rig.status.trainer, "step": 1}
    await rig.look()
    assert len(rig.view.messages) == 1 and "rank-actor-0" in rig.view.messages[0][1]


async def test_an_outdated_report_is_ignored_and_the_silence_is_reported(rig: MonitorRig) -> None:
    rig.status.rollouter, rig.status.answered_at["rollouter"] = late(0.1), time.time()
    rig.status.trainer = {"waits": [], "health": PROCESS, "node_id": "n", "ranks": []}
    await rig.look(60)
    rig.status.answered_at["rollouter"] = time.time() - 45
    health = await rig.look(4)
    assert "rollouter" not in health.processes and "trainer" in health.processes
    assert [problem.key for problem in health.problems] == ["lag/rollouter"]
    assert "has not answered for 45 s" in rig.view.messages[0][1]
    rig.status.answered_at["rollouter"], rig.status.rollouter = time.time(), late(45.0)
    await rig.look(10)
    # This process may be busy as well, which is reported as a separate problem.
    of_rollouter = [text for _, text in rig.view.messages if "rollouter" in text]
    assert len(of_rollouter) == 1, "one lag gives one warning"


async def test_silence_is_not_reported_if_the_driver_itself_was_stopped(
    rig: MonitorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.look(10)  # the lag of a driver that has just started is not reported
    monkeypatch.setattr(rig.watch._own._lag, "worst_s", lambda: 20.0)
    rig.status.answered_at["rollouter"] = time.time() - 20
    assert not (await rig.look(4)).problems
    monkeypatch.undo()


async def test_a_replica_that_was_too_full_to_compare_its_log_probs_is_a_problem(rig: MonitorRig) -> None:
    full = replace(report("abc"), reported_at=time.time(), num_uncompared=3)
    rig.status.store = StoreStatus(1, None, (full,))
    assert [problem.key for problem in (await rig.look()).problems] == ["uncompared/abc"]


def test_replicas_that_have_not_reported_for_some_seconds_are_not_judged(rig: MonitorRig) -> None:
    now = time.time()
    reports = [replace(report(name, health=PROCESS), reported_at=now - ago) for name, ago in (("a", 1), ("b", 8))]
    rig.status.store = StoreStatus(1, None, tuple(reports))
    assert [each.replica for each in rig.watch._replicas()] == ["a"]


async def test_the_checkpoint_interval_follows_from_the_steps(rig: MonitorRig) -> None:
    assert rig.watch._save_s() == 0.0, "there are no checkpoints"
    rig.watch._saves_every = 20
    assert rig.watch._save_s() == math.inf
    rig.recorder.dashboard = replace(rig.recorder.dashboard, step_times=(10.0, 12.0, 16.0))
    assert rig.watch._save_s() == 60.0


async def test_a_hanging_measurement_is_unknown_and_blocks_nothing(
    rig: MonitorRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_LIMIT_S", 0.05)
    await rig.look()
    release = threading.Event()
    hanging: list[Path] = []

    def hang(path: Path) -> None:
        hanging.append(path)
        release.wait(30)

    rig.machine = hang
    try:
        with anyio.fail_after(5):
            health = await rig.look(10)
            assert health.machine == MACHINE, "the result of the last measurement is used"
            health = await rig.look(40)
        assert health.machine is None and health.processes
        assert len(hanging) == 1, "a hanging measurement blocks only one thread"
    finally:
        release.set()


async def test_a_failing_check_does_not_end_the_run(
    rig: MonitorRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def fail() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            scope.cancel()
        raise OSError("no such file")

    rig.store = fail
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    with anyio.fail_after(10), anyio.CancelScope() as scope:
        await rig.watch.run()
    messages = [record.message for record in caplog.records]
    assert looks >= 3 and messages.count("the health of the run could not be checked") == 1
    assert rig.watch._own._lag.worst_s() is None, "the lag of the driver's loop is no longer measured"


async def test_idle_shares_are_judged_only_in_the_middle_of_a_run(rig: MonitorRig) -> None:
    rig.recorder.dashboard = Dashboard(metrics={"idle/trainer": 0.9, "idle/rollouter": 0.1})
    rig.status.queue, rig.status.trainer = queue_status(), {"step": 12}
    assert rig.watch._idle() == (0.9, 0.1)
    for step, phase, fed in ((2, "running", 400), (12, "stopping", 400), (12, "running", 6402)):
        rig.status.phase, rig.status.trainer = phase, {"step": step}  # type: ignore[assignment]
        counts = replace(queue_status().counts, fed=fed)
        rig.status.queue = queue_status(counts=counts)
        assert rig.watch._idle() == (None, None)


def test_health_metrics_are_registered_and_those_of_ended_replicas_removed() -> None:
    metrics = health_metrics(HEALTH)
    registry.check(metrics)
    assert metrics["health/loop_lag_s/rollouter"] == 0.31 and "health/loop_lag_s/engine-0" not in metrics
    assert metrics["health/kv_cache_usage"] == 0.9 and metrics["health/kv_cache_usage/0"] == 0.45
    wanted = {"requests_running": 7, "requests_waiting": 1, "preemptions": 3, "object_store_share": 0.25, "problems": 1}
    assert {name: metrics[f"health/{name}"] for name in wanted} == wanted
    assert metrics["health/disk_free_bytes"] == 500 * GIB
    view = RecordingView()
    recorder = Recorder([], view)
    recorder.update_health(HEALTH)
    assert recorder._known["health/kv_cache_usage/1"] == 0.9 and view.board.health == HEALTH
    recorder.update_health(replace(HEALTH, engines={"2": EngineLoad()}))
    assert {name for name in recorder._known if "kv_cache_usage/" in name} == {"health/kv_cache_usage/2"}


def test_the_state_includes_the_health() -> None:
    state = running(health=HEALTH, replicas=(report("0", health=PROCESS, load=EngineLoad(1, 2, 0.5, 3)),))
    raw = json.loads(json.dumps(dump(state)))
    assert load(raw) == state
    del raw["health"], raw["replicas"][0]["load"], raw["replicas"][0]["health"]
    assert load(raw).health == RunHealth()


def test_the_status_page_shows_the_health(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    loaded = report("0", load=EngineLoad(3, 5, 0.456, 2))
    StateFile(tmp_path / STATE_FILE).write_now(running(health=HEALTH, replicas=(loaded,), pid=os.getpid()))
    seen = status_report(read_run(tmp_path))
    assert seen["health"]["processes"]["driver"]["rss_bytes"] == 2 * GIB
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(status_page(seen, "now"))
    text = console.export_text()
    for figure in (
        "KV 46%  5 waiting",
        "loop lag     rollouter 310 ms   driver 20 ms",
        "memory       driver 2.0 GiB   rollouter 2.0 GiB",
        "free 40.0 GiB of 64.0 GiB   object store 25%   disk 500.0 GiB free",
        "problems     the disk of the run directory has 1.0 GiB left",
    ):
        assert figure in text, figure


def test_the_live_view_has_a_health_line() -> None:
    line = health_line(HEALTH)
    assert line is not None and line.plain == (
        "lag 310 ms (rollouter)   memory 38%   KV 90%   object store 25%   disk 500.0 GiB free"
    )
    assert health_line(RunHealth()) is None


def test_the_memory_of_a_container_is_within_its_limit(tmp_path: Path) -> None:
    assert _within_container(64, 40, tmp_path) == (64, 40)
    (tmp_path / "memory.max").write_text("max\n")
    assert _within_container(64, 40, tmp_path) == (64, 40)
    (tmp_path / "memory.max").write_text("16\n")
    (tmp_path / "memory.current").write_text("14\n")
    (tmp_path / "memory.stat").write_text("anon 9\ninactive_file 4\n")
    assert _within_container(64, 40, tmp_path) == (16, 6)


def test_this_machine_and_this_process_are_measured(tmp_path: Path) -> None:
    machine = measure_machine(tmp_path)
    assert machine is not None and 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert machine.disk_free_bytes is not None
    gone = measure_machine(tmp_path / "gone")
    assert gone is not None and gone.disk_free_bytes is None
    now_s = 0.0
    meter = ProcessMeter(lambda: now_s)
    first = meter.measure([os.getpid(), 2**30])
    now_s = 1e-3
    second = meter.measure([os.getpid()])
    assert first is not None and first.rss_bytes > 0 and first.cpu == 0.0
    assert second is not None and second.cpu >= 0.0
    assert meter.measure([]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not count it")
def test_processes_that_share_a_processor_wait_for_it() -> None:
    code = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nprint(flush=True)\nwhile True: pass"
    busy = [sys.executable, "-c", code]
    with subprocess.Popen(busy, stdout=subprocess.PIPE) as one, subprocess.Popen(busy, stdout=subprocess.PIPE) as other:
        try:
            assert one.stdout and one.stdout.readline() and other.stdout and other.stdout.readline()
            meter = ProcessMeter()
            meter.measure([one.pid])
            time.sleep(0.5)
            found = meter.measure([one.pid])
        finally:
            one.kill()
            other.kill()
    assert found is not None and found.cpu_wait is not None and found.cpu_wait > 0.2
