"""Real launches in separate processes, which tests observe from outside as a user does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SHORT = ("trainer.total_training_steps=4", "data.max_val_samples=16", "logging.console=plain")
QUIET = ("trainer.total_training_steps=4", "data.val_files=[]", "trainer.save_last=false", "logging.console=plain")
"""The run only trains: it has neither validation nor checkpoints."""
MARK = "ASYNCRL_TEST_RUN"
"""Environment variable that identifies the processes of a launch, even after they have got another parent."""


_started: list[LaunchedRun] = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class LaunchedRun:
    """A running or finished launch."""

    process: subprocess.Popen[str]
    run_dir: Path
    output_file: Path
    mark: str

    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8")

    def wait(self, timeout_s: float = 360.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the launch did not end in {timeout_s} s:\n{self.output()}") from None

    def wait_for(self, text: str, timeout_s: float = 180.0) -> None:
        """Wait until the output of the launch contains `text`."""
        limit = time.monotonic() + timeout_s
        while text not in self.output():
            assert self.process.poll() is None, f"the launch ended before it printed {text!r}:\n{self.output()}"
            assert time.monotonic() < limit, f"the launch did not print {text!r} within {timeout_s} s:\n{self.output()}"
            time.sleep(0.1)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
        """Wait until `holds()` is true; fail if the launch ends before. `what` names the condition in messages."""
        limit = time.monotonic() + timeout_s
        while not holds():
            assert self.process.poll() is None, f"the launch ended before {what}:\n{self.output()}"
            assert time.monotonic() < limit, f"no {what} within {timeout_s} s:\n{self.output()}\n{self.state()}"
            time.sleep(0.1)

    def state(self) -> dict[str, Any]:
        """Return the content of state.json, or an empty mapping if the file does not exist yet."""
        file = self.run_dir / "state.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def pids(self, part: str) -> list[int]:
        """Return the pids of the part's processes as the driver reports them."""
        return [process["pid"] for process in self.state().get("processes", ()) if process["part"] == part]

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the first process of `part`."""
        os.kill(self.pids(part)[0], number)

    def recovered(self, part: str) -> int:
        """Return the number of completed restarts of `part`."""
        restarts = self.state().get("restarts", ())
        return sum(one["part"] == part and one["recovered_at"] is not None for one in restarts)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def steps(self) -> list[dict[str, Any]]:
        """Return the optimizer steps in metrics.jsonl, including those before a resume."""
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "step"]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))

    def survivors(self) -> list[str]:
        """Return the processes of the launch that are still alive, whatever their parent is."""
        return [text for _, text in self._alive()]

    def kill_all(self) -> None:
        """Kill all processes of the launch, Ray's included, as the loss of their machine does."""
        while alive := self._alive():
            for process, _ in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.poll()

    def _alive(self) -> list[tuple[psutil.Process, str]]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process, " ".join(process.cmdline()) or process.name()))
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


def surviving_samples(run: LaunchedRun) -> dict[str, int]:
    """Return the samples that the model was trained on with their steps, and check that none was trained twice.

    The Trainer's record of steps, from which they are read, is independent of the queue.
    """
    surviving: dict[str, int] = {}
    for line in (run.run_dir / "trained.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "rewound_to_step" in record:
            surviving = {name: step for name, step in surviving.items() if step <= record["rewound_to_step"]}
            continue
        assert not surviving.keys() & set(record["samples"]), f"trained twice: {line}"
        surviving |= dict.fromkeys(record["samples"], record["step"])
    return surviving


def trained_once(run: LaunchedRun) -> bool:
    """Return whether the final model was trained on every trained sample in exactly one step."""
    return len(surviving_samples(run)) == run.summary()["samples"]["trained"]


def balanced(samples: dict[str, Any]) -> bool:
    """Return whether every sample that was fed is in one of the sample counts."""
    live = samples["running"] + samples["ready"] + samples["leased"]
    return samples["fed"] == live + samples["trained"] + sum(samples["dropped"].values())


def start(
    where: Path,
    *overrides: str,
    mode: str = "fully_async",
    recipe: str = "quickstart",
    run_dir: Path | None = None,
) -> LaunchedRun:
    """Start `asyncrl launch` on a shipped recipe with `overrides`; files go below `where`."""
    run_dir = run_dir or where / "run"
    return start_command(where, "launch", mode, recipe, f"run_dir={run_dir}", *overrides, run_dir=run_dir)


def start_command(where: Path, *arguments: str, run_dir: Path) -> LaunchedRun:
    """Start an `asyncrl` command in `where`, which writes into `run_dir`."""
    mark = f"{where.name}-{time.monotonic_ns()}"
    output_file = where / f"output-{mark}.txt"
    with output_file.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark},
            text=True,
        )
    run = LaunchedRun(process, run_dir, output_file, mark)
    _started.append(run)
    return run


def kill_started() -> None:
    """Kill the launches that still run."""
    while _started:
        if (run := _started.pop()).process.poll() is None:
            run.kill_all()


def interrupted_in_order(run: LaunchedRun) -> dict[str, Any]:
    """Send Ctrl-C after a step, check that the run ends with a checkpoint of its last step and exact counts, and return
    its summary."""
    run.wait_until(lambda: re.search(r"\bstep \d+/", run.output()) is not None, "step")
    run.interrupt()
    assert run.wait(20.0) == 130, run.output()
    summary = run.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert [summary["samples"][state] for state in ("running", "ready", "leased")] == [0, 0, 0]
    assert balanced(summary["samples"])
    checkpoint = max((run.run_dir / "checkpoints").glob("step_*"))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["progress"]["step"] == summary["step"] >= 1
    assert manifest["queue"]["counts"]["trained"] == summary["samples"]["trained"]
    assert run.survivors() == []
    return summary


def completed_in_order(run: LaunchedRun, total: int) -> dict[str, Any]:
    """Check that a resumed run completes and that no sample is fed or trained twice, and return its summary."""
    assert run.wait() == 0, run.output()
    summary = run.summary()
    assert (summary["status"], summary["step"]) == ("completed", total)
    trained = summary["samples"]["trained"]
    assert trained == 16 * total
    assert summary["samples"]["fed"] == trained + sum(summary["samples"]["dropped"].values()), "nothing is fed twice"
    assert balanced(summary["samples"]) and trained_once(run)
    assert [step["step"] for step in run.steps()] == list(range(1, total + 1))
    assert run.survivors() == []
    return summary
