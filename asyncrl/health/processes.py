"""What processes take of their machine: memory and CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl.health.facts import MachineHealth, ProcessHealth
from asyncrl.health.lag import LagMonitor
from asyncrl.profiling import profile

CGROUP = Path("/sys/fs/cgroup")
"""Of cgroups v2, as a container sees its own."""


class ProcessMeter:
    """Of some processes of this machine. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, dict[int, float]] = (clock(), {})
        """When it looked last, and the CPU time that each had used by then."""

    def look(self, pids: Iterable[int]) -> ProcessHealth | None:
        """Their sum; None: there are none. Reads /proc, some 100 µs for each."""
        rss_bytes, used = 0, {}
        for pid in pids:
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    rss_bytes += process.memory_info().rss
                    times = process.cpu_times()
            except psutil.Error:  # it has just ended
                continue
            used[pid] = times.user + times.system
        now_s, (before_s, before) = self._clock(), self._before
        self._before = now_s, used
        if not used:
            return None
        spent_s = sum(max(0.0, cpu_s - before[pid]) for pid, cpu_s in used.items() if pid in before)
        return ProcessHealth(rss_bytes, cpu=spent_s / max(now_s - before_s, 1e-3))


class OwnHealth:
    """Of the process that makes it, for its status."""

    def __init__(self, part: str, pid: int | None = None) -> None:
        """`part`: its name in events; `pid`: None for this process."""
        self._lag = LagMonitor(part)
        self._meter = ProcessMeter()
        self._pid = pid or psutil.Process().pid

    def start(self) -> None:
        """Watch the running event loop from now on, until `stop` or until it ends."""
        self._lag.start()

    def stop(self) -> None:
        """Watch it no more."""
        self._lag.stop()

    def tell(self) -> ProcessHealth | None:
        """Cheap enough for an event loop, about once a second; that loop is watched from then on. None: it cannot be
        found out here."""
        with suppress(RuntimeError):  # in a thread without a loop
            self._lag.start()
        seen = self._meter.look([self._pid])
        if seen is None:
            return None
        events = profile.status()
        return ProcessHealth(seen.rss_bytes, seen.cpu, self._lag.worst_s(), events["own_dropped"], events["unsent"])


def look_at_machine(directory: Path) -> MachineHealth | None:
    """This machine, or the container that this process is in, and the disk that `directory` is on. Blocking, on a
    network disk perhaps for long."""
    try:
        memory = psutil.virtual_memory()
        cpu = psutil.cpu_percent(interval=None) / 100  # since the call before
    except (psutil.Error, OSError):
        return None
    total, available = _within_limit(memory.total, memory.available)
    try:
        disk = shutil.disk_usage(directory)
    except OSError:
        return MachineHealth(total, available, cpu)
    return MachineHealth(total, available, cpu, disk.total, disk.free)


def _within_limit(total: int, available: int, group: Path = CGROUP) -> tuple[int, int]:
    """What a container's limit leaves of that; file pages that may be given up count as available."""
    try:
        limit = int((group / "memory.max").read_text())  # `max`, and no number: there is none
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return total, available
    return min(total, limit), max(0, min(available, limit - used))
