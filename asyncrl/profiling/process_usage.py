"""Measure a process and its machine: memory, CPU, and how late an event loop runs its timers."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from asyncrl.config.environment import usable_cpus
from asyncrl.core.process_health import MachineHealth, ProcessHealth
from asyncrl.profiling.profiler import Profiler, profile

TICK_S = 0.1
STALL_S = 0.1
"""A longer delay is recorded as the event `loop.stall`."""
WINDOW_S = 10.0
CGROUP = Path("/sys/fs/cgroup")
"""The control group of a container (cgroups v2), as the container sees it."""


class LoopLagMonitor:
    """Measures the lag of one event loop. Call `start` and `stop` in that loop, and `worst_s` in any thread.

    It uses a chain of timers instead of a task, so it cannot fail unnoticed and needs no cleanup when the loop ends.
    """

    def __init__(self, part: str, *, clock: Callable[[], float] = time.monotonic, profiler: Profiler = profile) -> None:
        """`part`: name of the process in events."""
        self._part = part
        self._clock = clock
        self._profiler = profiler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._delays: deque[tuple[float, float]] = deque()
        """Times and delays. The delays decrease, because one that is followed by a longer one is removed."""

    def start(self) -> None:
        """Watch the running loop. Does nothing if it is watched already."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.stop()
            self._loop = loop
            self._schedule(loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None
        self._delays.clear()

    def worst_s(self) -> float | None:
        """Return the longest delay in the last `WINDOW_S`, including one in progress, or None if no loop is watched."""
        if self._timer is None:
            return None
        now_s = self._clock()
        past = max((delay_s for at_s, delay_s in tuple(self._delays) if now_s - at_s <= WINDOW_S), default=0.0)
        return max(past, now_s - self._due_s)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = self._clock() + TICK_S
        self._timer = loop.call_later(TICK_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = self._clock()
        delay_s = max(0.0, now_s - self._due_s)
        while self._delays and self._delays[-1][1] <= delay_s:
            self._delays.pop()
        self._delays.append((now_s, delay_s))
        while now_s - self._delays[0][0] > WINDOW_S:
            self._delays.popleft()
        if delay_s > STALL_S:
            self._profiler.record_ended("loop.stall", delay_s, part=self._part)
        self._schedule(loop)


class ProcessMeter:
    """Measures the total memory and CPU usage of some processes of this machine. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[float, dict[int, tuple[float, float | None]]] = (clock(), {})
        """Time of the last measurement, and until then the CPU time of each process and its wait for CPUs."""

    def measure(self, pids: Iterable[int]) -> ProcessHealth | None:
        """Measure the processes, or return None if none of them exists. A process takes about 100 µs, and each of its
        threads 10 µs more."""
        rss_bytes = 0
        used: dict[int, tuple[float, float | None]] = {}
        for pid in pids:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    rss_bytes += process.memory_info().rss
                    times = process.cpu_times()
            except psutil.Error:  # it has just ended
                continue
            used[pid] = times.user + times.system, _waited_s(pid)
        now_s, (last_s, last) = self._clock(), self._last
        self._last = now_s, used
        if not used:
            return None
        passed_s = max(now_s - last_s, 1e-3)
        known = [(used[pid], last[pid]) for pid in used if pid in last]
        spent_s = sum(max(0.0, now[0] - before[0]) for now, before in known)
        waits = [max(0.0, now[1] - before[1]) for now, before in known if now[1] is not None and before[1] is not None]
        return ProcessHealth(rss_bytes, spent_s / passed_s, cpu_wait=sum(waits) / passed_s if waits else None)


class ProcessMonitor:
    """Measures one process, by default the current one, for the status that this process reports."""

    def __init__(self, part: str, pid: int | None = None) -> None:
        """`part`: name of the process in events."""
        self._lag = LoopLagMonitor(part)
        self._meter = ProcessMeter()
        self._pid = pid or psutil.Process().pid

    def start(self) -> None:
        """Watch the running event loop until `stop` or until the loop ends."""
        self._lag.start()

    def stop(self) -> None:
        self._lag.stop()

    def measure(self) -> ProcessHealth | None:
        """Measure the process, and start watching the running event loop, if there is one.

        A call is cheap enough to be made in an event loop about once a second. Returns None if the process cannot be
        measured on this machine.
        """
        with suppress(RuntimeError):  # the thread has no loop
            self._lag.start()
        usage = self._meter.measure([self._pid])
        if usage is None:
            return None
        events = profile.status()
        return replace(
            usage, lag_s=self._lag.worst_s(), dropped_events=events["own_dropped"], unsent_events=events["unsent"]
        )


def _waited_s(pid: int) -> float | None:
    """Return for how long the threads of a process have been ready to run without a CPU, all together; None if the
    kernel does not count it. Threads that have ended are left out."""
    used_ns = waited_ns = 0
    with suppress(OSError):  # the process has ended, or this is not Linux
        for thread in os.scandir(f"/proc/{pid}/task"):
            # A path of `pathlib` would take longer, and add its parts to the interpreter's table of interned strings.
            with suppress(OSError, ValueError, IndexError), open(f"{thread.path}/schedstat", "rb", buffering=0) as file:
                used, waited = file.read().split()[:2]
                used_ns, waited_ns = used_ns + int(used), waited_ns + int(waited)
    return waited_ns / 1e9 if used_ns else None


def measure_machine(directory: Path) -> MachineHealth | None:
    """Measure this machine, or the container of this process, and the disk of `directory`. It blocks, possibly for
    long on a network disk."""
    try:
        memory = psutil.virtual_memory()
        cpu = psutil.cpu_percent(interval=None) / 100  # since the previous call
    except (psutil.Error, OSError):
        return None
    total, available = _within_container(memory.total, memory.available)
    try:
        disk = shutil.disk_usage(directory)
    except OSError:
        return MachineHealth(total, available, cpu, cpus=usable_cpus())
    return MachineHealth(total, available, cpu, disk.free, usable_cpus())


def _within_container(total: int, available: int, group: Path = CGROUP) -> tuple[int, int]:
    """Return total and available memory within a container's limit; reclaimable file pages count as available."""
    try:
        limit = int((group / "memory.max").read_text())  # ValueError for `max`: no limit
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return total, available
    return min(total, limit), max(0, min(available, limit - used))
