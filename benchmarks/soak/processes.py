"""Sample memory, descriptors and threads of every process of a run, by role, into a file of JSON lines."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from asyncrl.observe.status.run_status import RunState, read_readable_state
from benchmarks.chaos.harness import ChaosHarness
from benchmarks.chaos.launches import command_line
from benchmarks.running import megabytes

PARTS = ("driver", "queue", "store", "rollouter", "trainer", "rank", "replica", "engine")
"""The roles that every run has."""
TITLES = {
    "asyncrl launch": "driver", "QueueActor": "queue", "WeightStoreActor": "store", "RolloutActor": "rollouter",
    "TrainerActor": "trainer", "::Rank": "rank", "ServeReplica": "replica", "EngineCore": "engine",
    "ServeController": "serve controller", "ProxyActor": "serve proxy", "DashboardAgent": "dashboard agent",
    "dashboard/agent.py": "dashboard agent", "RuntimeEnvAgent": "runtime env agent",
    "runtime_env/agent/main.py": "runtime env agent",
    "ray::IDLE": "idle worker", "default_worker.py": "idle worker",
    "dashboard/dashboard.py": "dashboard", "log_monitor.py": "log monitor", "monitor.py": "autoscaler",
    "resource_tracker": "resource tracker",
}  # fmt: skip
"""Roles by a part of the command line; the first that fits counts."""
BINARIES = {"raylet": "raylet", "gcs_server": "gcs"}
SHARED_MEMORY = "/dev/shm/"


class ProcessSample(NamedTuple):
    """One process at one moment."""

    pid: int
    started: float
    """Wall clock. A pid may be used again, but not with the same start."""
    role: str
    anonymous: int
    """Bytes of memory that are the process's own data. It is what grows with a leak: unlike USS and PSS, it does not
    change when another process starts, ends or forks that maps the same libraries, and unlike RSS, not when the process
    touches more of a library, a file or the object store."""
    uss: int
    """Bytes of memory that no other process maps now (unique set size)."""
    pss: int
    """Bytes of memory, each divided by the number of processes that share it."""
    rss: int
    """Bytes of memory, shared ones included."""
    descriptors: int
    threads: int


class RunSample(NamedTuple):
    """All processes at one moment."""

    at: float
    """Wall clock."""
    step: int
    run_dir_mb: float
    shared_mb: float
    """Memory of the files in /dev/shm that the processes have open, such as Ray's object store."""
    processes: tuple[ProcessSample, ...]


class Recording(NamedTuple):
    samples: list[RunSample]
    faults: list[tuple[float, str]]
    """Wall clock and name of each injected fault."""


def role_of(command: str) -> str:
    """Return the role of a process with this command line: a part of the run, a process of Ray, or `other`."""
    binary = command.split(" ", 1)[0].rpartition("/")[2]
    named = (role for title, role in TITLES.items() if title in command)
    return BINARIES.get(binary) or next(named, "other")


@contextmanager
def sampling(
    harness: ChaosHarness, file: Path, every_s: float, progress: Callable[[RunSample], None]
) -> Iterator[None]:
    """Append a sample of the run, and the faults since the last one, to `file` every `every_s` for the duration of the
    block. `progress` gets each sample, in the thread that samples. Raises the errors of that thread."""
    stop = threading.Event()

    def sample_until_stopped() -> None:
        num_faults = 0
        with file.open("a", encoding="utf-8", buffering=1) as lines:
            while not stop.wait(every_s):
                sample = sample_run(harness.run_dir)
                lines.write(json.dumps(sample) + "\n")
                for fault in harness.outcome.faults[num_faults:]:
                    lines.write(json.dumps([fault.at, fault.kind.name]) + "\n")
                    num_faults += 1
                progress(sample)

    with ThreadPoolExecutor(1, "sampler") as threads:
        sampler = threads.submit(sample_until_stopped)
        try:
            yield
        finally:
            stop.set()
        sampler.result()


def read_recording(file: Path) -> Recording:
    """Read what `sampling` wrote, without a last line that is torn."""
    samples, faults = [], []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            values = json.loads(line)
            if len(values) == len(RunSample._fields):
                at, step, run_dir_mb, shared_mb, processes = values
                each = tuple(ProcessSample(*process) for process in processes)
                samples.append(RunSample(at, step, run_dir_mb, shared_mb, each))
            else:
                faults.append((values[0], values[1]))
    return Recording(samples, faults)


def sample_run(run_dir: Path) -> RunSample:
    """Sample the descendants of this process: the launch, its Ray cluster, and what these have started. Blocking."""
    state = read_readable_state(run_dir)
    roles = _parts(state)
    shared: dict[tuple[int, int], int] = {}
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(_sample_process(process, roles, shared))
    step = 0 if state is None else state.step
    return RunSample(time.time(), step, megabytes(run_dir), sum(shared.values()) / 1e6, tuple(processes))


def _parts(state: RunState | None) -> dict[int, str]:
    return {} if state is None else {process.pid: process.part for process in state.processes}


def _sample_process(
    process: psutil.Process, roles: Mapping[int, str], shared: dict[tuple[int, int], int]
) -> ProcessSample:
    """Sample one process, and add the bytes of its open files in /dev/shm to `shared`, by device and inode."""
    memory = process.memory_full_info()
    descriptors = 0
    with os.scandir(f"/proc/{process.pid}/fd") as entries:
        for entry in entries:
            descriptors += 1
            with suppress(FileNotFoundError):
                if os.readlink(entry.path).startswith(SHARED_MEMORY):
                    file = os.stat(entry.path)
                    shared[file.st_dev, file.st_ino] = 512 * file.st_blocks
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
    _, found, size = status.partition("RssAnon:")
    if not found:  # it has just ended
        raise psutil.NoSuchProcess(process.pid)
    anonymous = 1024 * int(size.split(maxsplit=1)[0])
    role = roles.get(process.pid) or role_of(command_line(process))
    usage = (anonymous, memory.uss, memory.pss, memory.rss)
    return ProcessSample(process.pid, process.create_time(), role, *usage, descriptors, process.num_threads())
