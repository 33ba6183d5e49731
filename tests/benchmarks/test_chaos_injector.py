"""Tests of faults that need more than a signal, with plain processes instead of those of a run."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.driver.cluster.processes import is_alive
from asyncrl.observe.status.run_status import ProcessInfo, Restart, RunState
from benchmarks.chaos.faults import KINDS, InjectedFault
from benchmarks.chaos.injector import FaultInjector, NotInjectedError
from benchmarks.chaos.launches import ChaosLaunch
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.run_under_test import RunUnderTest

NAMED = {kind.name: kind for kind in KINDS}
PROBE_S = 0.2
LIMIT_S = 20.0
PARTS = ("driver", "queue", "rollouter", "trainer")
Processes = dict[str, subprocess.Popen[bytes]]


class FakeRun(RunUnderTest):
    """A run that trains until the test ends."""

    def __init__(self, path: Path, outcome: ChaosOutcome, processes: Processes) -> None:
        super().__init__(ChaosOptions(0, 60.0, None, None, path), outcome, lambda line: None)
        self.outcome = outcome
        self._processes = processes
        self._fake = ChaosLaunch(processes["driver"], path / "launch.txt")
        self.was_stopped: set[str] = set()
        """Parts that `poll` has found stopped."""

    @property
    def launch(self) -> ChaosLaunch:
        return self._fake

    def state(self) -> RunState:
        now = time.time()
        found = tuple(ProcessInfo(part, part, self._processes[part].pid, "") for part in PARTS)  # type: ignore[arg-type]
        return RunState(
            written_at=now,
            started_at=now - 9.0,
            pid=self.launch.pid,
            phase="running",
            experiment="chaos",
            mode="fully_async",
            processes=found,
            num_replicas=0,
        )

    def poll(self) -> None:
        """Wait until a process shows as stopped, which takes a while on a busy machine."""
        limit = time.monotonic() + LIMIT_S
        while not self.was_stopped and time.monotonic() < limit:
            time.sleep(0.01)
            self.was_stopped |= {part for part, process in self._processes.items() if is_stopped(process)}


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = {part: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for part in PARTS}
    yield found
    for process in found.values():
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path: Path, processes: Processes) -> FakeRun:
    fake = FakeRun(tmp_path, ChaosOutcome(), processes)
    fake.run_dir.mkdir(parents=True)
    return fake


def make_injector(run: FakeRun) -> FaultInjector:
    options = ChaosOptions(0, 60.0, None, None, run.run_dir, settings={"timeouts.probe_s": str(PROBE_S)})
    return FaultInjector(run, options, random.Random(0), None)


# ------------------------------------------------------------------------------------------------ a crash


@pytest.mark.parametrize("name", ["journal tear", "payload flip"])
def test_a_fault_without_a_target_is_skipped(run: FakeRun, processes: Processes, name: str) -> None:
    with pytest.raises(NotInjectedError, match=r"no log|no payload files"):
        make_injector(run).inject(NAMED[name], 1)
    assert all(is_alive(process.pid) for process in processes.values())
    limit = time.monotonic() + LIMIT_S
    while any(is_stopped(process) for process in processes.values()):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_journal_writer_is_killed_before_its_journal_is_torn(run: FakeRun, processes: Processes) -> None:
    connection = sqlite3.connect(run.run_dir / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE rows (number INTEGER)")
    fault = make_injector(run).inject(NAMED["journal tear"], 1)
    connection.close()
    assert "journal.db-wal" in fault.note and not fault.launch_survived
    assert [processes[part].wait(LIMIT_S) for part in ("driver", "queue", "rollouter")] == [-signal.SIGKILL] * 3
    assert is_alive(processes["trainer"].pid), "the fault does not kill the Trainer, which ends with the launch"


def test_no_process_stays_stopped_when_the_journal_writer_has_gone(run: FakeRun, processes: Processes) -> None:
    processes["rollouter"].kill()
    processes["rollouter"].wait()
    with pytest.raises(NotInjectedError, match="rollouter"):
        make_injector(run).inject(NAMED["journal tear"], 1)
    assert is_alive(processes["driver"].pid) and is_alive(processes["queue"].pid)


# ------------------------------------------------------------------------------------------------ a stopped driver


def stopped(run: FakeRun) -> tuple[FaultInjector, InjectedFault, RunState]:
    """Stop a driver. The last returned value is a state that the driver writes after all probes are answered."""
    injector = make_injector(run)
    began = time.time()
    fault = injector.inject(NAMED["driver stop"], 1)
    assert run.was_stopped == {"driver"}
    assert fault.at - began > PROBE_S
    assert fault.before is not None
    return injector, fault, replace(fault.before, written_at=fault.at + 2 * PROBE_S, step=1)


def recovery(injector: FaultInjector, fault: InjectedFault, settled: RunState, **changes: Any) -> float | None:
    """Check a state that the driver writes soon after it continues, and then the settled one."""
    assert injector.recovered_at(fault, replace(settled, written_at=fault.at + PROBE_S / 2, **changes)) is None, (
        "a replacement may still follow"
    )
    return injector.recovered_at(fault, replace(settled, **changes))


def test_a_stopped_driver_must_replace_nothing(run: FakeRun) -> None:
    injector, fault, settled = stopped(run)
    assert injector.recovered_at(fault, replace(settled, step=0)) is None, "the run has made no progress since then"
    assert recovery(injector, fault, settled) == fault.at + PROBE_S / 2, "the time of the driver's first new state"
    assert fault.launch_survived and run.outcome.violations == []


def test_a_replacement_after_a_stopped_driver_is_a_broken_promise(run: FakeRun) -> None:
    injector, fault, settled = stopped(run)
    restart = Restart("trainer", 2, fault.at, "it did not answer", fault.at)
    assert recovery(injector, fault, settled, restarts=(restart,)) is not None
    (found,) = run.outcome.violations
    assert found.promise == "nothing is replaced for a driver that was stopped"
    assert "trainer: it did not answer" in found.details


def test_an_unreported_kill_after_a_stopped_driver_is_found(run: FakeRun, processes: Processes) -> None:
    injector, fault, settled = stopped(run)
    processes["queue"].kill()
    processes["queue"].wait()
    assert recovery(injector, fault, settled) is not None
    (found,) = run.outcome.violations
    assert f"queue (pid {processes['queue'].pid}) is gone" in found.details
