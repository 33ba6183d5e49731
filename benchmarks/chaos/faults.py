"""The kinds of faults, their order and pauses, and the signs that a run has recovered from one. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl.observe.status.run_status import ProcessInfo, RunState

Target = Literal[
    "engine", "replica", "rollouter", "trainer", "rank", "queue", "store", "node", "driver", "journal", "payload",
    "disk", "reward",
]  # fmt: skip
How = Literal["kill", "stop", "stop idle", "tear", "flip", "fill", "raise", "hang", "nan"]


class FaultKind(NamedTuple):
    target: Target
    how: How
    description: str
    weight: int = 1
    """How often `draw_kinds` yields the kind in each pass over all kinds."""
    ends_launch: bool = False
    """Whether the fault ends the launch, so that another launch follows."""

    @property
    def name(self) -> str:
        return f"{self.target} {self.how}"


KINDS = (
    FaultKind("engine", "kill", "SIGKILL to vLLM's engine core", 2),
    FaultKind("engine", "stop", "SIGSTOP to vLLM's engine core", 2),
    FaultKind("engine", "stop idle", "SIGSTOP to vLLM's engine core while it is idle because pacing admits no samples"),
    FaultKind("replica", "kill", "SIGKILL to a Serve replica"),
    FaultKind("replica", "stop", "SIGSTOP to a Serve replica"),
    FaultKind("rollouter", "kill", "SIGKILL to the Rollouter", 2),
    FaultKind("rollouter", "stop", "SIGSTOP to the Rollouter", 2),
    FaultKind("trainer", "kill", "SIGKILL to the Trainer", 2),
    FaultKind("trainer", "stop", "SIGSTOP to the Trainer", 2),
    FaultKind("rank", "kill", "SIGKILL to a trainer process", 2),
    FaultKind("rank", "stop", "SIGSTOP to a trainer process", 2),
    FaultKind("queue", "kill", "SIGKILL to the queue actor", 2),
    FaultKind("queue", "stop", "SIGSTOP to the queue actor", 2),
    FaultKind("store", "kill", "SIGKILL to the weight store", 2),
    FaultKind("store", "stop", "SIGSTOP to the weight store", 2),
    FaultKind("node", "kill", "SIGKILL to the raylet of the second node, which is replaced by another node"),
    FaultKind("node", "stop", "SIGSTOP to the raylet of the second node, which is replaced by another node"),
    FaultKind("driver", "kill", "SIGKILL to the launch, then a launch with resume=auto", ends_launch=True),
    FaultKind("driver", "stop", "SIGSTOP to the launch for longer than timeouts.probe_s; no part may be replaced"),
    FaultKind("journal", "tear", "a partial frame at the end of the journal, SIGKILL to the launch", ends_launch=True),
    FaultKind("payload", "flip", "flipped bits in a payload file, SIGKILL to the launch", ends_launch=True),
    FaultKind("disk", "fill", "a full disk until the launch ends, then a launch with resume=auto", ends_launch=True),
    FaultKind("reward", "raise", "the reward function raises for some seconds, at least once"),
    FaultKind("reward", "hang", "the reward function hangs for some seconds, at least once"),
    FaultKind("reward", "nan", "the reward function returns NaN for some seconds, at least once"),
)

ACTORS: frozenset[Target] = frozenset({"rollouter", "trainer", "rank", "queue", "store"})
ENGINES: frozenset[Target] = frozenset({"engine", "replica", "node"})
FRESH_S = 5.0
"""Reports of replicas that are older than this are ignored."""


def kinds(targets: Collection[str] | None, *, without: Collection[str] = ()) -> tuple[FaultKind, ...]:
    """Return the kinds to draw from.

    Args:
        targets: targets, or full names (`engine stop`); None: all.
        without: targets that are not available.
    """
    return tuple(
        kind
        for kind in KINDS
        if kind.target not in without and (targets is None or kind.target in targets or kind.name in targets)
    )


def draw_kinds(available: Sequence[FaultKind], rng: random.Random) -> Iterator[FaultKind]:
    """Yield kinds endlessly: first each one once, in random order, then those of weight 2 once more, so that most
    faults hit actors and engines.
    """
    rounds = range(max(kind.weight for kind in available))
    while True:
        for number in rounds:
            yield from rng.sample(of := [kind for kind in available if kind.weight > number], len(of))


def gap_s(
    rng: random.Random, calm_s: tuple[float, float], *, done: int, planned: int | None, elapsed_s: float, limit_s: float
) -> float:
    """Return the seconds between a recovery and the next fault: drawn from `calm_s`, or its minimum while the round is
    behind its plan of `planned` faults in `limit_s`.
    """
    drawn = rng.uniform(*calm_s)
    behind = planned is not None and elapsed_s * planned > limit_s * done
    return calm_s[0] if behind else drawn


@dataclass(slots=True)
class InjectedFault:
    """An injected fault and its outcome."""

    number: int
    kind: FaultKind
    at: float
    """Wall clock."""
    pids: frozenset[int] = frozenset()
    """The target processes, and those that end with them."""
    parts: frozenset[tuple[str, str]] = frozenset()
    """`(part, name)` of those processes."""
    before: RunState | None = None
    recovered_s: float | None = None
    """Seconds until the target worked again; None if it did not."""
    launch_survived: bool = True
    """Whether the launch survived the fault; False for faults that end it by design."""
    note: str = ""
    restart_details: tuple[str, ...] = ()
    """The work that had to be repeated, according to the run: requeued samples, rewound steps."""
    steps_lost: int = 0
    """Optimizer steps that a rewind discarded."""


def target_processes(processes: Iterable[ProcessInfo], target: Target, node_id: str = "") -> list[ProcessInfo]:
    """Return the processes that a fault of `target` may hit; for a node, all of its processes are hit."""
    if target == "node":
        return [process for process in processes if process.node_id == node_id]
    return [process for process in processes if process.part == target]


def replaced_together(processes: Iterable[ProcessInfo], target: ProcessInfo, before: RunState) -> list[ProcessInfo]:
    """Return `target` and the processes replaced with it: a replica and its engine, the Trainer and its ranks."""
    together: dict[str, tuple[str, ...]] = {"trainer": ("trainer", "rank"), "rank": ("trainer", "rank")}
    if target.part in together:
        return [process for process in processes if process.part in together[target.part]]
    if target.part in ("replica", "engine"):
        for report in before.replicas:
            if target.pid in (report.pid, *report.engine_pids):
                pids = {report.pid, *report.engine_pids}
                return [process for process in processes if process.pid in pids] or [target]
    return [target]


def is_idle(engine: ProcessInfo, state: RunState, since: float) -> bool:
    """Return whether the engine's replica has reported after `since` (wall clock) that it serves and is idle."""
    return any(
        engine.pid in report.engine_pids
        and report.reported_at > since
        and report.phase == "serving"
        and report.in_flight == 0
        for report in state.replicas
    )


def recovered_at(fault: InjectedFault, state: RunState) -> float | None:
    """Return the wall clock at which the target worked again, according to `state`; None: not yet."""
    if state.written_at <= fault.at or state.phase not in ("running", "stopping"):
        return None
    times = [fault.at]
    parts = {part for part, _ in fault.parts}
    for part in parts - {"engine", "replica", "driver"}:
        if (at := _part_back(fault, part, state)) is None:
            return None
        times.append(at)
    if parts & {"engine", "replica"}:
        if (at := _replicas_back(fault, state)) is None:
            return None
        times.append(at)
    return max(times)


def driver_back_at(fault: InjectedFault, state: RunState) -> float | None:
    """Return the wall clock at which the driver, which was stopped until `fault.at`, had fresh reports again; None:
    not yet."""
    if state.written_at <= fault.at or state.phase != "running" or state.silent_s or state.restarting:
        return None
    return None if _replicas_back(fault, state) is None else state.written_at


def working_processes(state: RunState) -> list[ProcessInfo]:
    """Return the processes of the run without the driver and without replicas whose last report is old."""
    recent = [report for report in state.replicas if report.reported_at > state.written_at - FRESH_S]
    pids = {pid for report in recent for pid in (report.pid, *report.engine_pids)}
    return [
        process
        for process in state.processes
        if process.part != "driver" and (process.part not in ("replica", "engine") or process.pid in pids)
    ]


def replaced(before: RunState, state: RunState) -> list[str]:
    """Return the parts whose replacement began between the two states, with causes."""
    known = {(restart.part, restart.incarnation) for restart in before.restarts}
    return [f"{one.part}: {one.cause}" for one in state.restarts if (one.part, one.incarnation) not in known]


def restart_details(fault: InjectedFault, state: RunState) -> tuple[str, ...]:
    """Return the details of the restarts since the fault: requeued samples, rewound steps."""
    return tuple(
        f"{restart.part}: {restart.detail}"
        for restart in state.restarts
        if restart.detail and restart.recovered_at is not None and restart.recovered_at > fault.at
    )


def _part_back(fault: InjectedFault, part: str, state: RunState) -> float | None:
    now = [process for process in state.processes if process.part == part]
    if not now or any(process.pid in fault.pids for process in now):
        return None
    owner = "trainer" if part == "rank" else part
    if owner in state.restarting or owner in state.silent_s:
        return None
    ends = [one.recovered_at for one in state.restarts if one.part == owner]
    if None in ends:
        return None
    return max((end for end in ends if end is not None and end > fault.at), default=state.written_at)


def _replicas_back(fault: InjectedFault, state: RunState) -> float | None:
    """Return when as many replicas as configured served, none of them a target; None: not yet."""
    serving = [
        report
        for report in state.replicas
        if report.phase not in ("starting", "broken")
        and report.pid not in fault.pids
        and not fault.pids.intersection(report.engine_pids)
        and report.reported_at > max(fault.at, state.written_at - FRESH_S)
    ]
    if len(serving) < state.num_replicas:
        return None
    return max((report.phase_since for report in serving if report.phase_since > fault.at), default=state.written_at)
