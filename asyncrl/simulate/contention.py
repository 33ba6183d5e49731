"""Measures how much engines and Trainer slow each other down on processors that they share.

In most runs the two sides nearly always work at the same time, or never, so the durations of their work cannot show how
fast they would be otherwise. The CPU time of their processes can: it says how many processors each of them wants, and
these are divided as the kernel divides them (max-min fairness): a process that wants less than an equal share of the
processors gets all of it, and the others get equal shares of the rest. A side is as slow as its slowest process. Other
processes of the machine, such as Ray's own, take part in the division, or there would seem to be processors to spare.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.observe.status.run_status import read_readable_state
from asyncrl.simulate.trace import ContentionTrace
from asyncrl.storage.run_dir import RunDir

CPU = "health/cpu/"
CPUS = "health/machine_cpus"
MAX_SLOWDOWN = 4.0
"""Limit of the factors by which both sides may slow each other down."""
_ROUNDS = 100
_LIGHT = 0.1
"""A process that wants less than this share of what its side's busiest one wants does not make the side slower."""
_ENGINES = ("engine-", "replica-", "rollouter", "worker-")
_TRAINER = ("rank-", "trainer")


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The CPU time of a run's processes over some part of the run, all of them on one machine."""

    cpu_s: Mapping[str, float]
    """CPU seconds by process, with the names of `health/cpu/<process>`."""
    cpus: int
    """Processors of the machine."""
    other_cpus: float = 0.0
    """Mean number of processors that everything else kept busy, Ray's own processes included."""


def read_cpu_use(run_dir: Path) -> CpuUse | None:
    """Return the CPU time between the first and the last step; None if it is unknown, or if the run had several nodes,
    on which the two sides need not share anything. Blocking."""
    state = read_readable_state(run_dir)
    if state is None or len({process.node_id for process in state.processes if process.node_id}) > 1:
        return None
    try:
        lines = RunDir(run_dir).metrics.read_bytes().splitlines()
    except OSError:
        return None
    return cpu_use(_rows(lines))


def _rows(lines: Iterable[bytes]) -> Iterable[Mapping[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # torn: the run was killed
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            yield row


def cpu_use(rows: Iterable[Mapping[str, Any]]) -> CpuUse | None:
    """Return the CPU time between the first and the last of these rows of steps."""
    used: Counter[str] = Counter()
    first_s = last_s = None
    cpus = machine_s = 0.0
    for row in rows:
        now_s, cpus = row.get("time/monotonic_s"), row.get(CPUS, cpus)
        if not isinstance(now_s, int | float):
            continue
        if first_s is None or last_s is None:
            first_s = now_s
        else:
            took_s = max(0.0, now_s - last_s)
            machine_s += row.get("health/machine_cpu", 0.0) * cpus * took_s
            for name, busy in row.items():
                if name.startswith(CPU):
                    used[name.removeprefix(CPU)] += busy * took_s
        last_s = now_s
    if not used or cpus < 1 or first_s is None or last_s is None:
        return None
    return CpuUse(dict(used), int(cpus), max(0.0, machine_s - sum(used.values())) / max(last_s - first_s, 1e-9))


def measure_contention(
    use: CpuUse, *, engines_s: float, both_s: float, trainer_s: float, run_s: float, threads: Callable[[str], int]
) -> ContentionTrace:
    """Return the factors on the time of both sides while the other one works.

    Args:
        engines_s: time in which only engines worked.
        both_s: time in which both sides worked.
        trainer_s: time in which only the Trainer computed.
        run_s: the time over which the CPU time was measured.
        threads: how many processors a process can use at most.
    """
    # What a process wants follows from how much slower it was next to the other side. Several slowdowns can explain the
    # same CPU time; the search begins with the largest, because a process that computes wants a whole processor for
    # each thread. It cannot want more, so the CPU time of the busiest process limits the slowdown of its side.
    sides = {name: _side(name) for name in use.cpu_s}
    alone_s = {"engines": engines_s, "trainer": trainer_s}
    limits = dict.fromkeys(alone_s, MAX_SLOWDOWN)
    for name, cpu_s in use.cpu_s.items():
        if (side := sides[name]) and (needed_s := cpu_s / threads(name) - alone_s[side]) > 0:
            limits[side] = min(limits[side], max(1.0, both_s / needed_s if both_s else MAX_SLOWDOWN))
    engines, trainer = limits["engines"], limits["trainer"]
    others = {"": max(1, math.ceil(use.other_cpus))}
    for _ in range(_ROUNDS):
        busy_s = {"engines": engines_s + both_s / engines, "trainer": trainer_s + both_s / trainer, "": run_s}
        wanted = {
            name: min(float(threads(name)), cpu_s / max(busy_s[sides[name]], 1e-9)) for name, cpu_s in use.cpu_s.items()
        }
        got = fair_shares(wanted | {"": use.other_cpus}, {name: threads(name) for name in wanted} | others, use.cpus)
        slower = {
            side: min(limits[side], _slowdown([name for name in wanted if sides[name] == side], wanted, got))
            for side in limits
        }
        engines, trainer = (engines + slower["engines"]) / 2, (trainer + slower["trainer"]) / 2
    return ContentionTrace(engine=round(engines, 3), trainer=round(trainer, 3))


def fair_shares(wanted: Mapping[str, float], threads: Mapping[str, int], cpus: float) -> dict[str, float]:
    """Return the processors that each process gets if each thread gets an equal share or what it wants."""
    got: dict[str, float] = {}
    left, waiting = cpus, sorted(wanted, key=lambda name: wanted[name] / threads[name])
    total = sum(threads[name] for name in waiting)
    for name in waiting:
        got[name] = min(wanted[name], left * threads[name] / total)
        left, total = left - got[name], total - threads[name]
    return got


def _slowdown(names: list[str], wanted: Mapping[str, float], got: Mapping[str, float]) -> float:
    most = max((wanted[name] for name in names), default=0.0)
    heavy = (wanted[name] / max(got[name], 1e-9) for name in names if wanted[name] >= _LIGHT * most > 0)
    return min(MAX_SLOWDOWN, max(heavy, default=1.0))


def _side(name: str) -> str:
    return "engines" if name.startswith(_ENGINES) else "trainer" if name.startswith(_TRAINER) else ""
