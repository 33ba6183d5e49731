"""`asyncrl launch` in its own process, and the search for all processes that belong to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "ASYNCRL_CHAOS"
"""Environment variable that marks all processes of one harness, even after their parents have ended."""


@dataclass
class ChaosLaunch:
    """A running or finished launch."""

    process: subprocess.Popen[bytes]
    output_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Return the exit code; None while the launch runs."""
        return self.process.poll()

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code; None if the launch did not end within `limit_s`."""
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
        """Return the end of its output."""
        lines = self.output_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def start(arguments: Sequence[str], output_file: Path, environment: Mapping[str, str]) -> ChaosLaunch:
    """Start `asyncrl launch fully_async` with these arguments and write its output to `output_file`."""
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", "fully_async", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A new session, so that a Ctrl-C in the terminal reaches only the harness, which then ends the launch.
            start_new_session=True,
        )
    return ChaosLaunch(process, output_file)


def write_why(run_dir: Path, target: Path) -> None:
    """Write the output of `asyncrl why RUN` to a file."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "why", str(run_dir)], capture_output=True, text=True, timeout=60, check=False
    )
    target.write_text(done.stdout + done.stderr, encoding="utf-8")


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that were started with the mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return processes


def command_line(process: psutil.Process) -> str:
    """Return the command line; empty if the process has ended."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def wait_until_gone(find: Callable[[], Iterable[psutil.Process]], limit_s: float) -> list[str]:
    """Wait until `find` returns no process; return the command lines of those that remain after `limit_s`."""
    limit = time.monotonic() + limit_s
    while True:
        left = [name for process in find() if (name := command_line(process))]
        if not left or time.monotonic() > limit:
            return left
        time.sleep(0.2)


def kill_marked(mark: str) -> int:
    """Kill marked processes until there are none, and return their number."""
    ended = 0
    for _ in range(20):
        processes = marked_processes(mark)
        if not processes:
            break
        for process in processes:
            try:
                process.kill()
                ended += 1
            except psutil.Error:
                continue
        psutil.wait_procs(processes, timeout=2.0)
    return ended
