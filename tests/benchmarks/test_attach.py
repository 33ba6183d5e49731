"""The launches and the table of the benchmark of attached runs; processes are stand-ins."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.status.run_status import StateFile
from benchmarks import attach
from benchmarks.attach import ATTACHED, CONTINUED, OWN, Launches, table
from benchmarks.synthetic_run import START
from tests.fakes.events import write_events
from tests.fakes.timeline_run import run_state

STARTS_S = 5.0
"""Time until a launch admits its first sample."""


class Process:
    """A launch: it has admitted a sample `STARTS_S` after its start, and trains until it is killed or has ended."""

    def __init__(self, command: list[str], returncode: int) -> None:
        self.command = command
        self.returncode: int | None = None
        self.killed_with: int | None = None
        self._ends_with = returncode
        (self.run_dir,) = (Path(text.removeprefix("run_dir=")) for text in command if text.startswith("run_dir="))
        self.run_dir.mkdir(exist_ok=True)
        write_events(self.run_dir, ("sample.admitted", time.time() + STARTS_S - START, 0.0, {"sample": "sample_0_1"}))

    def poll(self) -> int | None:
        StateFile(self.run_dir / "state.json").write_now(run_state("running", step=1))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.returncode = self._ends_with
        return "what it printed", None

    def send_signal(self, number: int) -> None:
        self.killed_with = number

    def wait(self) -> None:
        assert self.killed_with is not None

    def kill(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Return the processes that were started; they exit with 0."""
    return start_stand_ins(monkeypatch, 0)


def start_stand_ins(monkeypatch: pytest.MonkeyPatch, returncode: int) -> list[Process]:
    processes: list[Process] = []

    def start(command: list[str], **options: Any) -> Process:
        assert options["stderr"] == subprocess.STDOUT
        processes.append(Process(command, returncode))
        return processes[-1]

    monkeypatch.setattr(attach.subprocess, "Popen", start)
    return processes


def test_the_time_to_the_first_sample_is_read_from_the_events(started: list[Process], tmp_path: Path) -> None:
    launches = Launches("10.0.0.1:6379", tmp_path)
    assert launches.first_sample_s(OWN) == pytest.approx(STARTS_S, abs=2.0)
    assert launches.first_sample_s(ATTACHED) == pytest.approx(STARTS_S, abs=2.0)
    own, attached = (process.command for process in started)
    assert started[0].run_dir != started[1].run_dir
    assert "ray.address=10.0.0.1:6379" in own and "trainer.total_training_steps=1" in own
    assert "rollout.attach=rollout" not in own and "rollout.attach=rollout" in attached


def test_a_continued_run_is_measured_from_its_second_launch(started: list[Process], tmp_path: Path) -> None:
    seconds = Launches("10.0.0.1:6379", tmp_path).first_sample_s(CONTINUED)
    killed, continued = started
    assert (killed.killed_with, continued.killed_with) == (signal.SIGKILL, None)
    assert "trainer.save_freq=1" in killed.command and "resume=auto" not in killed.command
    assert {"resume=auto", "rollout.attach=rollout", "trainer.total_training_steps=6"} <= set(continued.command)
    assert killed.run_dir == continued.run_dir
    assert seconds >= STARTS_S - 2.0


def test_a_failed_launch_ends_the_benchmark_with_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_stand_ins(monkeypatch, 1)
    with pytest.raises(RuntimeError, match=r"the launch with attached exited with 1:\nwhat it printed"):
        Launches("10.0.0.1:6379", tmp_path).first_sample_s(ATTACHED)


def test_a_row_says_what_its_variant_saves() -> None:
    rows = table({OWN: [40.0, 42.0, 60.0], ATTACHED: [10.0, 30.0], CONTINUED: [50.0]})
    assert [(row["engines"], row["first sample_s"], row["saved_s"]) for row in rows] == [
        (OWN, 42.0, 0.0),
        (ATTACHED, 20.0, 22.0),
        (CONTINUED, 50.0, -8.0),
    ]
    assert (rows[0]["min"], rows[0]["max"]) == (40.0, 60.0)
