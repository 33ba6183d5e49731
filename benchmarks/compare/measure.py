"""Runs one peer in a process of its own and measures it from outside: CPU seconds by process, and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.soak.processes import role_of

ROOT = Path(__file__).parents[2]
EVERY_S = 1.0
LIMIT_S = 3600.0
ERROR_LINES = 12
_ROLES = {
    "-m benchmarks.compare.vllm_server": "server",
    "-m benchmarks.compare.": "trainer",
    "VLLM::": "engine",
    "spawn_main": "rollout worker",
}
"""Roles of the peers' processes by a part of the command line, besides those of `role_of`."""

_UNNAMED = ("other", "idle worker", "rollout worker")
"""Roles of processes that may still get a name: Ray's workers, and engines of vLLM."""


class PeerFailedError(Exception):
    """The peer did not finish its job; the message is the end of its own output."""


@dataclass
class Usage:
    """What the processes of one run used."""

    started_s: float
    """Monotonic clock, as all times here."""
    roles: dict[int, str] = field(default_factory=dict)
    """By process."""
    cpu: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By process: at which time it had used how many CPU seconds."""
    peak_mb: float = 0.0
    """Most memory of all processes together: their own pages, and shared memory as far as the run added it."""

    def cpu_between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the CPU seconds of each role between two times, interpolated between samples."""
        seconds: dict[str, float] = {}
        for process, samples in self.cpu.items():
            begin, end = np.interp([begin_s, end_s], [at_s for at_s, _ in samples], [used_s for _, used_s in samples])
            seconds[self.roles[process]] = seconds.get(self.roles[process], 0.0) + float(end - begin)
        return seconds


def run_measured(command: Sequence[str], environment: Mapping[str, str], directory: Path) -> Usage:
    """Run a command until it ends, with its output in files of `directory`.

    Raises:
        PeerFailedError: it exited with an error, or did not end within `LIMIT_S`.
    """
    shared = psutil.virtual_memory().shared
    usage = Usage(time.monotonic())
    seen: dict[int, psutil.Process] = {}
    out, err = directory / "stdout.txt", directory / "stderr.txt"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < usage.started_s + LIMIT_S:
                sample(process.pid, usage, seen, shared)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(EVERY_S)
        finally:
            code = process.poll()
            _end(process, seen.values())
    if code != 0:
        why = f"exited with {code}" if code is not None else f"did not end within {LIMIT_S:.0f} s"
        raise PeerFailedError(f"{why}:\n{_tail(err) or _tail(out)}")
    return usage


def sample(pid: int, usage: Usage, seen: dict[int, psutil.Process], shared: int) -> None:
    """Add what a process and its descendants use now to `usage`, and the processes to `seen`.

    `shared` is the machine's shared memory in bytes before the run.
    """
    own = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error), process.oneshot():
                key = hash(process)
                if usage.roles.get(key) in (None, *_UNNAMED):
                    usage.roles[key] = _role(" ".join(process.cmdline()))
                times, memory = process.cpu_times(), process.memory_info()
                now = time.monotonic()
                samples = usage.cpu.setdefault(key, [(now - EVERY_S, 0.0)])  # it has started since the previous sample
                samples.append((now, times.user + times.system))
                own += memory.rss - memory.shared
                seen[key] = process
    added = max(0, psutil.virtual_memory().shared - shared)
    usage.peak_mb = max(usage.peak_mb, (own + added) / 1e6)


def _role(command: str) -> str:
    return next((role for part, role in _ROLES.items() if part in command), role_of(command))


def _end(process: subprocess.Popen[bytes], descendants: Iterable[psutil.Process]) -> None:
    """End the process's session, and what it has started in sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.Error):
            descendant.kill()
    process.wait()


def _tail(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-ERROR_LINES:])
