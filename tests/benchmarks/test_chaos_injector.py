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

from asyncrl.observe.status.run_status import ProcessInfo, Restart, RunState
from benchmarks.chaos.faults import Strike, kind_named
from benchmarks.chaos.injector import Dealer, NotDealtError
from benchmarks.chaos.launches import ChaosLaunch, lives
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.run_under_test import Subject

PROBE_S = 0.2
LIMIT_S = 20.0
PARTS = ("driver", "queue", "rollouter", "trainer")
Processes = dict[str, subprocess.Popen[bytes]]


class Standing(Subject):
    """A run that trains until the test ends."""

    def __init__(self, path: Path, outcome: ChaosOutcome, processes: Processes) -> None:
        super().__init__(ChaosOptions(0, 60.0, None, None, path), outcome, lambda line: None)
        self.outcome = outcome
        self._processes = processes
        self._standing = ChaosLaunch(processes["driver"], path / "launch.txt")
        self.was_stopped: set[str] = set()
        """Parts that `look` has found stopped."""

    @property
    def launch(self) -> ChaosLaunch:
        return self._standing

    def state(self) -> RunState:
        now = time.time()
        found = tuple(ProcessInfo(part, part, self._processes[part].pid, "") for part in PARTS)  # type: ignore[arg-type]
        return RunState(
            now, now - 9.0, self.launch.pid, "running", "chaos", "fully_async", processes=found, num_replicas=0
        )

    def look(self) -> None:
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
def subject(tmp_path: Path, processes: Processes) -> Standing:
    standing = Standing(tmp_path, ChaosOutcome(), processes)
    standing.run_dir.mkdir(parents=True)
    return standing


def dealer(subject: Standing) -> Dealer:
    options = ChaosOptions(0, 60.0, None, None, subject.run_dir, settings={"timeouts.probe_s": str(PROBE_S)})
    return Dealer(subject, options, random.Random(0), None)


# ------------------------------------------------------------------------------------------------ a crash


@pytest.mark.parametrize("name", ["journal tear", "payload flip"])
def test_a_fault_without_a_target_is_skipped(subject: Standing, processes: Processes, name: str) -> None:
    with pytest.raises(NotDealtError, match=r"no log|no payload files"):
        dealer(subject).deal(kind_named(name), 1)
    assert all(lives(process.pid) for process in processes.values())
    limit = time.monotonic() + LIMIT_S
    while any(is_stopped(process) for process in processes.values()):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_journal_writer_is_killed_before_its_journal_is_torn(subject: Standing, processes: Processes) -> None:
    connection = sqlite3.connect(subject.run_dir / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE rows (number INTEGER)")
    strike = dealer(subject).deal(kind_named("journal tear"), 1)
    connection.close()
    assert "journal.db-wal" in strike.note and not strike.lived
    assert [processes[part].wait(LIMIT_S) for part in ("driver", "queue", "rollouter")] == [-signal.SIGKILL] * 3
    assert lives(processes["trainer"].pid), "the fault does not kill the Trainer, which ends with the launch"


def test_no_process_stays_stopped_when_the_journal_writer_has_gone(subject: Standing, processes: Processes) -> None:
    processes["rollouter"].kill()
    processes["rollouter"].wait()
    with pytest.raises(NotDealtError, match="rollouter"):
        dealer(subject).deal(kind_named("journal tear"), 1)
    assert lives(processes["driver"].pid) and lives(processes["queue"].pid)


# ------------------------------------------------------------------------------------------------ a stopped driver


def stopped(subject: Standing) -> tuple[Dealer, Strike, RunState]:
    """Stop a driver. The last returned value is a state that the driver writes after all probes are answered."""
    by = dealer(subject)
    began = time.time()
    strike = by.deal(kind_named("driver stop"), 1)
    assert subject.was_stopped == {"driver"}
    assert strike.at - began > PROBE_S
    assert strike.before is not None
    return by, strike, replace(strike.before, written_at=strike.at + 2 * PROBE_S, step=1)


def over(by: Dealer, strike: Strike, settled: RunState, **changes: Any) -> float | None:
    """Check a state that the driver writes soon after it continues, and then the settled one."""
    assert by.over(strike, replace(settled, written_at=strike.at + PROBE_S / 2, **changes)) is None, (
        "a replacement may still follow"
    )
    return by.over(strike, replace(settled, **changes))


def test_a_stopped_driver_must_replace_nothing(subject: Standing) -> None:
    by, strike, settled = stopped(subject)
    assert by.over(strike, replace(settled, step=0)) is None, "the run has made no progress since then"
    assert over(by, strike, settled) == strike.at + PROBE_S / 2, "the driver is back at the time of its first state"
    assert strike.lived and subject.outcome.violations == []


def test_a_replacement_after_a_stopped_driver_is_a_broken_promise(subject: Standing) -> None:
    by, strike, settled = stopped(subject)
    restart = Restart("trainer", 2, strike.at, "it did not answer", strike.at)
    assert over(by, strike, settled, restarts=(restart,)) is not None
    (found,) = subject.outcome.violations
    assert found.promise == "nothing is replaced for a driver that was stopped"
    assert "trainer: it did not answer" in found.details


def test_an_unreported_kill_after_a_stopped_driver_is_found(subject: Standing, processes: Processes) -> None:
    by, strike, settled = stopped(subject)
    processes["queue"].kill()
    processes["queue"].wait()
    assert over(by, strike, settled) is not None
    (found,) = subject.outcome.violations
    assert f"queue (pid {processes['queue'].pid}) is gone" in found.details
