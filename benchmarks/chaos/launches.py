"""`asyncrl launch` in a process of its own, and every process that belongs to it, wherever it ended up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "ASYNCRL_CHAOS"
"""Environment variable by which all processes of one harness are known, whoever their parent is now."""


@dataclass
class ChaosLaunch:
    """A running or finished launch."""

    process: subprocess.Popen[bytes]
    output_file: Path
    began_at: float = field(default_factory=time.time)
    """Wall clock."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def wait(self, limit_s: float) -> int | None:
        """Its exit code; None: it did not end within `limit_s`."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def tail(self, num_lines: int = 30) -> str:
        """What it said last."""
        lines = self.output_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def start(arguments: Sequence[str], output_file: Path, environment: Mapping[str, str]) -> ChaosLaunch:
    """Start `asyncrl launch fully_async` with these arguments; what it says goes to `output_file`."""
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", "fully_async", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # Of its own group: a Ctrl-C at the harness is the harness's to hand on.
            start_new_session=True,
        )
    return ChaosLaunch(process, output_file)


def explain(run_dir: Path, target: Path) -> None:
    """`asyncrl why RUN`, kept in a file."""
    told = subprocess.run(
        [sys.executable, "-m", "asyncrl", "why", str(run_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    target.write_text(told.stdout + told.stderr, encoding="utf-8")


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark in the environment that they were started with; so not this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def lives(pid: int) -> bool:
    """There is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Its command line, empty if it has gone."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def gone(find: Callable[[], Iterable[psutil.Process]], limit_s: float) -> list[str]:
    """Wait until `find` finds none; the titles of those still there after `limit_s`."""
    limit = time.monotonic() + limit_s
    while True:
        left = [name for process in find() if (name := title(process))]
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.2)


def end_marked(mark: str) -> int:
    """SIGKILL whatever carries the mark, until nobody does. Returns how many."""
    ended = 0
    for _ in range(20):
        found = marked(mark)
        if not found:
            break
        for process in found:
            try:
                process.kill()
                ended += 1
            except psutil.Error:
                continue
        psutil.wait_procs(found, timeout=2.0)
    return ended
