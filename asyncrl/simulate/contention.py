"""Measures how much engines and Trainer slow each other down on processors that they share.

In most runs the two sides nearly always work at the same time, or never, so the durations of their work cannot show how
fast they would be otherwise. The kernel can: it counts for how long threads were ready to run and had no processor. A
side is as slow as its busiest process, and all of that process's wait counts as caused by the other side, so other work
on the machine makes the factors too large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.text import parse_json
from asyncrl.observe.status.run_status import read_readable_state
from asyncrl.profiling.files import is_number
from asyncrl.simulate.trace import ContentionTrace
from asyncrl.storage.run_dir import RunDir, read_lines

CPU = "health/cpu/"
CPU_WAIT = "health/cpu_wait/"
CPUS = "health/machine_cpus"
MAX_SLOWDOWN = 4.0
"""Limit of the factors by which both sides may slow each other down."""
_ENGINES = ("engine-", "replica-", "rollouter", "worker-")
_TRAINER = ("rank-", "trainer")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The CPU time of a run's processes over some part of the run, all of them on one machine."""

    cpu_s: Mapping[str, float]
    """CPU seconds by process, with the names of `health/cpu/<process>`."""
    waited_s: Mapping[str, float]
    """Seconds for which threads of each process were ready to run and had no processor, added up over its threads."""
    other_cpus: float = 0.0
    """Mean number of processors that everything else kept busy, Ray's own processes included."""


def read_cpu_use(run_dir: Path) -> CpuUse | None:
    """Return the CPU time between the first and the last step; None if it is unknown, or if the run had several nodes,
    on which the two sides need not share anything. Blocking."""
    state = read_readable_state(run_dir)
    if state is None or len({process.node_id for process in state.processes if process.node_id}) > 1:
        return None
    try:
        return cpu_use(_rows(RunDir(run_dir).metrics))
    except OSError:
        return None


def _rows(metrics: Path) -> Iterator[Mapping[str, float]]:
    """Yield the numbers of each step; others in its line, which anybody may have written, are left out."""
    for line in read_lines(metrics):
        try:
            row = parse_json(line, finite=True)
        except ValueError:  # torn: the run was killed
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            yield {name: value for name, value in row.items() if is_number(value) and value >= 0}


def cpu_use(rows: Iterable[Mapping[str, float]]) -> CpuUse | None:
    """Return the CPU time between the first and the last of these rows of steps."""
    used: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    first_s = last_s = None
    cpus = machine_s = 0.0
    for row in rows:
        now_s, cpus = row.get("time/monotonic_s"), row.get(CPUS, cpus)
        if now_s is None:
            continue
        if first_s is None or last_s is None:
            first_s = now_s
        else:
            took_s = max(0.0, now_s - last_s)
            machine_s += row.get("health/machine_cpu", 0.0) * cpus * took_s
            for name, busy in row.items():
                for prefix, seconds in ((CPU, used), (CPU_WAIT, waited)):
                    if name.startswith(prefix):
                        seconds[name.removeprefix(prefix)] += busy * took_s
        last_s = now_s
    if not used or cpus < 1 or first_s is None or last_s is None:
        return None
    other_cpus = max(0.0, machine_s - sum(used.values())) / max(last_s - first_s, 1e-9)
    return CpuUse(dict(used), dict(waited), other_cpus)


def measure_contention(use: CpuUse, both_s: float, threads: Callable[[str], int]) -> ContentionTrace:
    """Return the factors on the time of both sides while the other one works.

    Args:
        both_s: time in which both sides worked.
        threads: how many processors a process can use at most. It waits as long as each of its threads.
    """

    def factor(side: tuple[str, ...]) -> float:
        busiest = max((name for name in use.cpu_s if name.startswith(side)), key=use.cpu_s.__getitem__, default="")
        alone_s = both_s - use.waited_s.get(busiest, 0.0) / threads(busiest)
        return round(min(MAX_SLOWDOWN, both_s / max(alone_s, 1e-9)), 3) if both_s else 1.0

    return ContentionTrace(engine=factor(_ENGINES), trainer=factor(_TRAINER))
