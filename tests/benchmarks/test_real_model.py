"""The launches, the intervals and the table of the benchmark with a real model; processes are stand-ins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import real_model
from benchmarks.real_model import MODES, SYSTEM, Step, curve, last_number, launch, main, row


class Process:
    """A launch that trains 12 steps, one in ten seconds, and runs until it is interrupted."""

    started: ClassVar[list[Process]] = []
    ends_with = 130

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command = command
        self.returncode: int | None = None
        self.signals: list[int] = []
        self.started.append(self)
        (run_dir,) = (Path(text.removeprefix("run_dir=")) for text in command if text.startswith("run_dir="))
        run_dir.mkdir(parents=True)
        now = time.monotonic()
        steps = [
            {"kind": "step", "time/monotonic_s": now + 10 * number, "reward/mean": number / 20, "tokens/trained": 300}
            for number in range(12)
        ]
        lines = [{"kind": "apply"}, *({**step, "staleness/mean": 0.5} for step in steps)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not self.signals:
            raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        self.returncode = self.ends_with
        return self.returncode

    def kill(self) -> None:
        """Do nothing: the process has ended."""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    monkeypatch.setattr(Process, "started", [])
    monkeypatch.setattr(real_model.subprocess, "Popen", Process)
    return Process.started


def test_the_last_number_of_a_response_is_scored() -> None:
    assert last_number("", "5 - 9 = -4", "-4", {}) == 1
    assert last_number("", "12 or 13", "12", {}) == 0
    assert last_number("", "no idea", "12", {}) == 0


def test_a_launch_is_interrupted_when_its_time_is_over(tmp_path: Path, processes: list[Process]) -> None:
    steps = launch("fully_async", "model", tmp_path / "run", 2, 4, ["seed=3"])
    assert processes[0].signals == [signal.SIGINT]
    assert {"rollout.cpu_threads=2", "trainer.cpu_threads=2", "seed=3"} <= set(processes[0].command)
    assert len(steps) == 12
    assert steps[6].minutes == pytest.approx(1, abs=0.1)
    launch("sync", "model", tmp_path / "other", 2, 4, [])
    assert {"rollout.cpu_threads=4", "trainer.cpu_threads=4"} <= set(processes[1].command)


def test_steps_after_the_time_do_not_count(tmp_path: Path, processes: list[Process]) -> None:
    steps = launch("sync", "model", tmp_path / "run", 1, 4, [])
    assert [round(60 * step.minutes) for step in steps] == [0, 10, 20, 30, 40, 50]


def test_a_failed_launch_is_an_error(tmp_path: Path, processes: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "ends_with", 1)
    with pytest.raises(RuntimeError, match="launch sync exited with 1 after 12 steps"):
        launch("sync", "model", tmp_path / "run", 2, 4, [])


def test_the_configuration_is_valid(tmp_path: Path, processes: list[Process]) -> None:
    from asyncrl.config.compose import check_config

    for mode in MODES:
        launch(mode, "asyncrl://quickstart", tmp_path / mode, 2, 2, [])
        overrides = processes[-1].command[5:]
        checked = check_config(None, overrides)
        assert [problem for problem in checked.problems if problem.key != "run_dir"] == []
        assert checked.config is not None
        assert checked.config.data.reasoning_gym is not None
        assert checked.config.data.reasoning_gym.system_prompt == SYSTEM


def test_the_interval_of_a_curve_holds_the_mean_of_its_window() -> None:
    steps = [Step(number / 2, 0.2 + 0.1 * (number % 2), 10, 0.0) for number in range(40)]
    intervals = curve(steps)
    assert len(intervals) == 40
    assert all(interval.low < 0.25 < interval.high for interval in intervals)
    assert curve([Step(0.0, 0.1, 1, 0.0), Step(1.0, 0.1, 1, 0.0), Step(9.0, 0.1, 1, 0.0)]) == []


def test_the_table_has_speed_and_rewards(tmp_path: Path) -> None:
    steps = [Step(1 + number / 6, number / 100, 300, 0.5) for number in range(61)]
    line = row("sync", steps, 11)
    assert (line["steps"], line["first step after min"], line["staleness"]) == (61, 1, 0.5)
    assert line["s/step"] == pytest.approx(10)
    assert line["trained tokens/s"] == pytest.approx(30)
    assert line["reward of the first 3 steps"] == pytest.approx(0.01)
    assert line["reward of the last 5 min"] == "0.46 (0.42 to 0.49)"


def test_the_command_writes_data_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Step(number / 6, number / 20, 300, 0.5) for number in range(12)]
    monkeypatch.setattr(real_model, "launch", lambda *_: steps)
    data, plot = tmp_path / "real.json", tmp_path / "real.png"
    monkeypatch.setattr(sys, "argv", ["real_model", "--minutes", "2", "--json", str(data), "--plot", str(plot)])
    main()
    result = json.loads(data.read_text(encoding="utf-8"))
    assert [line["mode"] for line in result["rows"]] == list(MODES)
    assert len(result["runs"]["sync"]) == 12
    assert plot.read_bytes().startswith(b"\x89PNG")
