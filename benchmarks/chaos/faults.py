"""The faults there are, which comes next and when, and when the run has got over one. Pure."""

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


class Kind(NamedTuple):
    target: Target
    how: How
    told: str
    """For people."""
    weight: int = 1
    """Of so many rounds through the deck it is in."""
    ends_launch: bool = False
    """Another launch has to follow."""

    @property
    def name(self) -> str:
        return f"{self.target} {self.how}"


KINDS = (
    Kind("engine", "kill", "SIGKILL to vLLM's engine core", 2),
    Kind("engine", "stop", "SIGSTOP to vLLM's engine core", 2),
    Kind("engine", "stop idle", "SIGSTOP to vLLM's engine core while it has nothing to do: the staleness gate is shut"),
    Kind("replica", "kill", "SIGKILL to a Serve replica"),
    Kind("replica", "stop", "SIGSTOP to a Serve replica"),
    Kind("rollouter", "kill", "SIGKILL to the Rollouter", 2),
    Kind("rollouter", "stop", "SIGSTOP to the Rollouter", 2),
    Kind("trainer", "kill", "SIGKILL to the Trainer", 2),
    Kind("trainer", "stop", "SIGSTOP to the Trainer", 2),
    Kind("rank", "kill", "SIGKILL to a trainer process", 2),
    Kind("rank", "stop", "SIGSTOP to a trainer process", 2),
    Kind("queue", "kill", "SIGKILL to the queue actor", 2),
    Kind("queue", "stop", "SIGSTOP to the queue actor", 2),
    Kind("store", "kill", "SIGKILL to the weight store", 2),
    Kind("store", "stop", "SIGSTOP to the weight store", 2),
    Kind("node", "kill", "SIGKILL to the raylet of the second node; another node comes in its place"),
    Kind("node", "stop", "SIGSTOP to the raylet of the second node; another node comes in its place"),
    Kind("driver", "kill", "SIGKILL to the launch; it is launched again with resume=auto", ends_launch=True),
    Kind("driver", "stop", "SIGSTOP to the launch for longer than timeouts.probe_s; nothing may be replaced over it"),
    Kind("journal", "tear", "the tail of the journal's log is torn off, SIGKILL to the launch", ends_launch=True),
    Kind("payload", "flip", "bits of a payload file are flipped, SIGKILL to the launch", ends_launch=True),
    Kind("disk", "fill", "the run's disk is full until the launch has ended; then launched again", ends_launch=True),
    Kind("reward", "raise", "the reward function raises until a call has met it, and for a while"),
    Kind("reward", "hang", "the reward function hangs until a call has met it, and for a while"),
    Kind("reward", "nan", "the reward function returns NaN until a call has met it, and for a while"),
)

ACTORS: frozenset[Target] = frozenset({"rollouter", "trainer", "rank", "queue", "store"})
ENGINES: frozenset[Target] = frozenset({"engine", "replica", "node"})
FRESH_S = 5.0
"""A replica whose last report is older is not counted on."""


def kinds(targets: Collection[str] | None, *, without: Collection[str] = ()) -> tuple[Kind, ...]:
    """The kinds to draw from.

    Args:
        targets: of these targets, or with these whole names (`engine stop`); None: all.
        without: targets that cannot be had here.
    """
    return tuple(
        kind
        for kind in KINDS
        if kind.target not in without and (targets is None or kind.target in targets or kind.name in targets)
    )


def deck(available: Sequence[Kind], rng: random.Random) -> Iterator[Kind]:
    """Kinds without end: every one comes once, in random order, before any comes again; then those of weight 2 once
    more, so that faults of actors and engines are in the majority.
    """
    rounds = range(max(kind.weight for kind in available))
    while True:
        for number in rounds:
            yield from rng.sample(of := [kind for kind in available if kind.weight > number], len(of))


def gap_s(
    rng: random.Random, calm_s: tuple[float, float], *, dealt: int, wanted: int | None, elapsed_s: float, limit_s: float
) -> float:
    """Seconds from one recovery to the next fault: any within `calm_s`, and the least while the round is behind its
    plan of `wanted` faults in `limit_s`.
    """
    drawn = rng.uniform(*calm_s)
    behind = wanted is not None and elapsed_s * wanted > limit_s * dealt
    return calm_s[0] if behind else drawn


@dataclass(slots=True)
class Strike:
    """A fault that was dealt, and what became of it."""

    number: int
    kind: Kind
    at: float
    """Wall clock."""
    pids: frozenset[int] = frozenset()
    """What was struck, with all that dies with it."""
    parts: frozenset[tuple[str, str]] = frozenset()
    """`(part, name)` of those processes."""
    before: RunState | None = None
    recovered_s: float | None = None
    """Until what was struck was at work again; None: it has not been."""
    lived: bool = True
    """The launch went on by itself; False of the faults that end it."""
    note: str = ""
    lost: tuple[str, ...] = ()
    """What has to be done again, as the run tells it."""
    steps_lost: int = 0
    """Optimizer steps that training went back by."""


def victims(processes: Iterable[ProcessInfo], target: Target, node_id: str = "") -> list[ProcessInfo]:
    """Processes that a fault of `target` may strike; those of a node come all."""
    if target == "node":
        return [process for process in processes if process.node_id == node_id]
    return [process for process in processes if process.part == target]


def with_its_own(processes: Iterable[ProcessInfo], struck: ProcessInfo, before: RunState) -> list[ProcessInfo]:
    """`struck` and what is replaced with it: a replica and its engine, the Trainer and its ranks."""
    together: dict[str, tuple[str, ...]] = {"trainer": ("trainer", "rank"), "rank": ("trainer", "rank")}
    if struck.part in together:
        return [process for process in processes if process.part in together[struck.part]]
    if struck.part in ("replica", "engine"):
        for report in before.replicas:
            if struck.pid in (report.pid, *report.engine_pids):
                pids = {report.pid, *report.engine_pids}
                return [process for process in processes if process.pid in pids] or [struck]
    return [struck]


def is_idle(engine: ProcessInfo, state: RunState, since: float) -> bool:
    """The replica of this engine has said after `since` (wall clock) that it serves and has no request."""
    return any(
        engine.pid in report.engine_pids
        and report.reported_at > since
        and report.phase == "serving"
        and report.in_flight == 0
        for report in state.replicas
    )


def recovered_at(strike: Strike, state: RunState) -> float | None:
    """When what was struck was at work again, as `state` tells; None: not yet. Wall clock."""
    if state.written_at <= strike.at or state.phase not in ("running", "stopping"):
        return None
    times = [strike.at]
    parts = {part for part, _ in strike.parts}
    for part in parts - {"engine", "replica", "driver"}:
        if (at := _part_back(strike, part, state)) is None:
            return None
        times.append(at)
    if parts & {"engine", "replica"}:
        if (at := _replicas_back(strike, state)) is None:
            return None
        times.append(at)
    return max(times)


def driver_back_at(strike: Strike, state: RunState) -> float | None:
    """When a driver that was stopped until `strike.at` knew again how everything stands; None: not yet. Wall clock."""
    if state.written_at <= strike.at or state.phase != "running" or state.silent_s or state.restarting:
        return None
    return None if _replicas_back(strike, state) is None else state.written_at


def at_work(state: RunState) -> list[ProcessInfo]:
    """The processes of the run but for the driver, without those of replicas that have not been heard of lately."""
    heard = [report for report in state.replicas if report.reported_at > state.written_at - FRESH_S]
    pids = {pid for report in heard for pid in (report.pid, *report.engine_pids)}
    return [
        process
        for process in state.processes
        if process.part != "driver" and (process.part not in ("replica", "engine") or process.pid in pids)
    ]


def replaced(before: RunState, state: RunState) -> list[str]:
    """What has been replaced, or begun to be, between the two, and why."""
    known = {(restart.part, restart.incarnation) for restart in before.restarts}
    return [f"{one.part}: {one.cause}" for one in state.restarts if (one.part, one.incarnation) not in known]


def told_of_loss(strike: Strike, state: RunState) -> tuple[str, ...]:
    """What the restarts since the strike have given back or gone back to, as they tell it."""
    return tuple(
        f"{restart.part}: {restart.detail}"
        for restart in state.restarts
        if restart.detail and restart.recovered_at is not None and restart.recovered_at > strike.at
    )


def _part_back(strike: Strike, part: str, state: RunState) -> float | None:
    now = [process for process in state.processes if process.part == part]
    if not now or any(process.pid in strike.pids for process in now):
        return None
    owner = "trainer" if part == "rank" else part
    if owner in state.restarting or owner in state.silent_s:
        return None
    ends = [one.recovered_at for one in state.restarts if one.part == owner]
    if None in ends:
        return None
    return max((end for end in ends if end is not None and end > strike.at), default=state.written_at)


def _replicas_back(strike: Strike, state: RunState) -> float | None:
    """As many replicas as configured serve, none of them a process that was struck."""
    serving = [
        report
        for report in state.replicas
        if report.phase not in ("starting", "broken")
        and report.pid not in strike.pids
        and not strike.pids.intersection(report.engine_pids)
        and report.reported_at > max(strike.at, state.written_at - FRESH_S)
    ]
    if len(serving) < state.num_replicas:
        return None
    return max((report.phase_since for report in serving if report.phase_since > strike.at), default=state.written_at)
