"""What figures mean: which are a problem, and what helps against it. Pure.

A rule looks at what is known now, and at how that has gone lately, and gives a `Judgement` for each of its subjects;
`alarms` decides what of it is told.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.health.alarms import GONE_S, Alarms, Condition, Judgement, Told
from asyncrl.health.facts import RunHealth
from asyncrl.health.remedies import against_growth, against_lag

GIB = 1 << 30

LAG_BAD_S, LAG_WELL_S = 0.5, 0.25
LAG_LONG_S = 2.0
"""A standstill that is told at once: a process remembers it for 10 s only, and it may come once in minutes."""
LAG_HOLD_S = 20.0
LAG_CALM_S = 300.0
"""So that a standstill which comes back every few minutes is one problem."""
UNHEARD_BAD_S, UNHEARD_WELL_S = 10.0, 5.0
"""A part answers within milliseconds, and is asked every second."""
MEMORY_BAD, MEMORY_WELL = 0.92, 0.85
"""Shares of the machine's memory in use; Ray ends processes at 0.95."""
GROWTH_OVER_S = 600.0
"""Growth is judged over so long: allocators take their time to settle."""
GROWTH_PARTS = 4
GROWTH_BAD_S, GROWTH_WELL_S = 3600.0, 7200.0
"""A process that has the machine's memory full so soon, at the present rate."""
STORE_BAD, STORE_WELL = 0.85, 0.7
KV_BAD, KV_WELL = 0.95, 0.85
KV_OVER_S = 60.0
KV_PREEMPTIONS = 3
"""Preemptions within `KV_OVER_S` that are no accident."""
DISK_BAD_BYTES, DISK_WELL_BYTES = 2 * GIB, 3 * GIB
DISK_BAD_S, DISK_WELL_S = 1800.0, 3600.0
DISK_PART_S = (60.0, 450.0)
"""The disk is judged over parts of the time that are as long as what is between two checkpoints, within these limits:
a checkpoint is written in less than the longer."""
DISK_PARTS = 8
"""At most so many."""
IDLE_BAD, IDLE_WELL = 0.5, 0.35


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the rules are given."""

    at_s: float
    """Monotonic."""
    now: float
    """Wall clock."""
    health: RunHealth
    idle_trainer: float | None = None
    """Share of the last seconds in which the Trainer waited for samples; None: not known, or no matter yet."""
    idle_rollouter: float | None = None
    """Share in which nothing was in generation."""
    elsewhere: frozenset[str] = frozenset()
    """Processes on other machines than the driver's."""
    settling: frozenset[str] = frozenset()
    """Processes that have just started: they import and load, and their event loops may stand still."""
    unheard_s: Mapping[str, float] = field(default_factory=dict)
    """Processes that do not answer, and for how long: what they told before says nothing about now."""
    save_s: float = 0.0
    """Between two checkpoints; 0: there are none, infinite: not known yet."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What remedies depend on."""

    private_cluster: bool = True
    """Ray was started by this run."""
    on_policy: bool = False
    """`async_training.staleness_threshold` is 0: both sides wait for each other by design."""
    kept_checkpoints: int = 2
    """`trainer.max_checkpoints_to_keep`: until there are so many each takes room for good."""


class Rules:
    """Of one run, with what they remember of it. `observe` one snapshot after the other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._alarms = Alarms()
        self._trends = _Trends()

    def observe(self, snapshot: Snapshot) -> tuple[list[Told], RunHealth]:
        """What is to be told now, and the snapshot's health with the problems that are open."""
        trends, health = self._trends, snapshot.health
        trends.begin(snapshot.at_s)
        judged = [
            *_lag(snapshot),
            *_machine_memory(health, snapshot.elsewhere),
            *_growth(health, trends, snapshot.elsewhere),
            *_object_store(health, self._settings),
            *_kv_cache(health, trends),
            *_disk(snapshot, trends, self._settings),
            *_dropped_events(health, trends),
            *_unsent_events(health, trends),
            *_idle(snapshot, self._settings),
        ]
        trends.end()
        told = self._alarms.observe(snapshot.at_s, snapshot.now, judged)
        known = RunHealth(
            health.processes, health.engines, health.machine, health.object_store_share, self._alarms.open
        )
        return told, known


# ---------------------------------------------------------------------------------------------- one rule after another


def _lag(snapshot: Snapshot) -> Iterator[Judgement]:
    machine = snapshot.health.machine
    for name, process in snapshot.health.processes.items():
        if (lag_s := process.lag_s) is None or name in snapshot.settling:
            continue
        machine_cpu = machine.cpu if machine is not None and name not in snapshot.elsewhere else None
        yield Judgement(
            f"lag/{name}",
            _above(lag_s, LAG_BAD_S, LAG_WELL_S),
            f"the event loop of {name} stands still for up to {lag_s:.1f} s, and all that waits in it: "
            f"{against_lag(name, process, machine_cpu)}",
            f"the event loop of {name} runs freely again",
            hold_s=0.0 if lag_s > LAG_LONG_S else LAG_HOLD_S,
            calm_s=LAG_CALM_S,
        )
    for name, unheard_s in snapshot.unheard_s.items():
        if name in snapshot.settling:
            continue
        yield Judgement(
            f"lag/{name}",
            _above(unheard_s, UNHEARD_BAD_S, UNHEARD_WELL_S),
            f"{name} has not answered for {unheard_s:.0f} s; its process is stopped, or its event loop stands still: "
            f"{against_lag(name, None, machine.cpu if machine is not None else None)}",
            f"{name} answers again",
            hold_s=2.0,  # seen twice: a clock may have been set
            calm_s=LAG_CALM_S,
        )


def _machine_memory(health: RunHealth, elsewhere: frozenset[str]) -> Iterator[Judgement]:
    if (machine := health.machine) is None or machine.memory_bytes <= 0:
        return
    used = 1 - machine.memory_available_bytes / machine.memory_bytes
    here = [item for item in health.processes.items() if item[0] not in elsewhere]
    largest = sorted(here, key=lambda item: -item[1].rss_bytes)[:2]
    who = " and ".join(f"{name} has {size(process.rss_bytes)}" for name, process in largest)
    yield Judgement(
        "memory/machine",
        _above(used, MEMORY_BAD, MEMORY_WELL),
        f"{used:.0%} of {size(machine.memory_bytes)} memory is in use{f' ({who})' if who else ''}, and at 95 % Ray "
        "ends processes: lower rollout.max_concurrent_samples, rollout.num_replicas, (on CPU) rollout.cpu_kv_cache_gib "
        "or ray.object_store_memory_bytes",
        f"there is memory again: {size(machine.memory_available_bytes)} are free",
        hold_s=5.0,
        calm_s=30.0,
    )


def _growth(health: RunHealth, trends: _Trends, elsewhere: frozenset[str]) -> Iterator[Judgement]:
    machine = health.machine
    for name, process in health.processes.items():
        trend = trends.add(f"rss/{name}", process.rss_bytes, GROWTH_OVER_S, GROWTH_PARTS)
        if machine is None or name in elsewhere or trend.span_s < 0.9 * GROWTH_OVER_S:
            continue
        left_s = machine.memory_available_bytes / trend.per_s if trend.per_s > 0 else math.inf
        yield Judgement(
            f"growth/{name}",
            _below(left_s, GROWTH_BAD_S, GROWTH_WELL_S),
            f"the memory of {name} grows steadily, by {size(60 * trend.per_s)} a minute to {size(process.rss_bytes)}, "
            f"and at this rate the machine's memory is full in {left_s / 60:.0f} minutes. {against_growth(name)}. "
            "Until the cause is found a checkpoint (trainer.save_freq) bounds what is lost",
            f"the memory of {name} does not grow any more: {size(process.rss_bytes)}",
            hold_s=60.0,
            calm_s=60.0,
        )


def _object_store(health: RunHealth, settings: Settings) -> Iterator[Judgement]:
    if (share := health.object_store_share) is None:
        return
    remedy = (
        "raise ray.object_store_memory_bytes"
        if settings.private_cluster
        else "start the Ray nodes with a larger --object-store-memory"
    )
    yield Judgement(
        "object_store",
        _above(share, STORE_BAD, STORE_WELL),
        f"Ray's object store is {share:.0%} full with what is still needed; beyond that it is written to disk, and "
        f"weight syncs become slow: {remedy}",
        f"Ray's object store has room again: {share:.0%} are taken",
        hold_s=10.0,
        calm_s=30.0,
    )


def _kv_cache(health: RunHealth, trends: _Trends) -> Iterator[Judgement]:
    for replica, load in health.engines.items():
        recent = trends.add(f"preemptions/{replica}", load.preemptions, KV_OVER_S).rise
        usage = _above(load.kv_cache_usage, KV_BAD, KV_WELL)
        condition: Condition = "bad" if recent >= KV_PREEMPTIONS else "fair" if recent or usage != "well" else "well"
        yield Judgement(
            f"kv_cache/{replica}",
            condition,
            f"the KV cache of replica {replica} is too small for what it is asked ({load.kv_cache_usage:.0%} taken, "
            f"{load.running} requests running, {load.waiting} waiting): {recent:.0f} times in the last minute it threw "
            "out a request and computed it again. Lower rollout.max_concurrent_samples or rollout.max_num_seqs, or "
            "raise rollout.gpu_memory_utilization (on CPU rollout.cpu_kv_cache_gib) or rollout.num_replicas",
            f"the KV cache of replica {replica} has room again",
            hold_s=10.0,
            calm_s=KV_OVER_S,
        )


def _disk(snapshot: Snapshot, trends: _Trends, settings: Settings) -> Iterator[Judgement]:
    machine = snapshot.health.machine
    if machine is None or machine.disk_free_bytes is None:
        return
    free = machine.disk_free_bytes
    # A checkpoint takes much in a moment, and an older one is given up for it; only the first ones take room for good.
    # There are more parts than these can be seen in (one of them in two parts), so that in one part the mark rises by
    # nothing but what really grows.
    parts = min(settings.kept_checkpoints + 3, DISK_PARTS)
    over_s = parts * min(max(snapshot.save_s, DISK_PART_S[0]), DISK_PART_S[1])
    trend = trends.add("disk", -free, over_s, parts)
    left_s = free / trend.per_s if trend.span_s > 0.9 * over_s and trend.per_s > 0 else math.inf
    by_rate = _below(left_s, DISK_BAD_S, DISK_WELL_S)
    by_size = _below(free, DISK_BAD_BYTES, DISK_WELL_BYTES)
    rate = f", at the present rate it is full in {left_s / 60:.0f} minutes" if left_s < DISK_WELL_S else ""
    yield Judgement(
        "disk",
        _worse(by_rate, by_size),
        f"the disk of the run directory has {size(free)} left{rate}; a run that cannot write a checkpoint ends. Free "
        "some, or keep less: trainer.max_checkpoints_to_keep, rollout.dump_dir, profiler.level",
        f"the disk of the run directory has room again: {size(free)}",
        hold_s=10.0,
        calm_s=60.0,
    )


def _dropped_events(health: RunHealth, trends: _Trends) -> Iterator[Judgement]:
    for name, process in health.processes.items():
        lost = trends.add(f"events/{name}", process.dropped_events, 60.0).rise
        yield Judgement(
            f"events/{name}",
            "bad" if lost > 0 else "well",
            f"{lost:.0f} profiling events of {name} did not fit into a buffer or onto the disk in the last minute; "
            "reports lack them: raise profiler.buffer_events, or set profiler.level=summary or off",
            f"{name} keeps all of its profiling events again",
            hold_s=0.0,
            calm_s=60.0,
        )


def _unsent_events(health: RunHealth, trends: _Trends) -> Iterator[Judgement]:
    sums = {name: process.unsent_events for name, process in health.processes.items()}
    lost = sum(trends.add(f"unsent/{name}", unsent, 60.0).rise for name, unsent in sums.items())
    yield Judgement(
        "unsent_events",
        "bad" if lost > 0 else "well",
        f"profiler.otlp_endpoint did not take {lost:.0f} events in the last minute (the files of the run directory "
        "have them): is a collector listening there, and fast enough? Without one, leave the key out",
        "profiler.otlp_endpoint takes all events again",
        hold_s=0.0,
        calm_s=60.0,
    )


def _idle(snapshot: Snapshot, settings: Settings) -> Iterator[Judgement]:
    trainer, rollouter = snapshot.idle_trainer, snapshot.idle_rollouter
    if settings.on_policy or trainer is None or rollouter is None:
        return
    if rollouter > IDLE_WELL:  # not for lack of engines: the gate holds it back meanwhile
        remedy = "let generation run further ahead (async_training.staleness_threshold)"
    else:
        remedy = (
            "generation is the bottleneck: more engines (rollout.num_replicas), more samples at once "
            "(rollout.max_concurrent_samples) if the engines have room, or shorter responses"
        )
    yield Judgement(
        "idle/trainer",
        _above(trainer, IDLE_BAD, IDLE_WELL),
        f"the Trainer waits for samples {trainer:.0%} of the time: {remedy}",
        "the Trainer is busy most of the time again",
        hold_s=120.0,
        calm_s=60.0,
        level="hint",
    )
    yield Judgement(
        "idle/rollouter",
        _above(rollouter, IDLE_BAD, IDLE_WELL),
        f"nothing is being generated {rollouter:.0%} of the time, because samples may not be staler than "
        "async_training.staleness_threshold allows and the Trainer is not as fast: raise it if the algorithm bears "
        "that, or give CPUs or GPUs of the replicas to the Trainer",
        "the Rollouter is busy most of the time again",
        hold_s=120.0,
        calm_s=60.0,
        level="hint",
    )


def _above(value: float, bad: float, well: float) -> Condition:
    return "bad" if value > bad else "well" if value < well else "fair"


def _below(value: float, bad: float, well: float) -> Condition:
    return _above(-value, -bad, -well)


def _worse(one: Condition, other: Condition) -> Condition:
    order: tuple[Condition, ...] = ("well", "fair", "bad")
    return max(one, other, key=order.index)


def size(num_bytes: float) -> str:
    """For people: `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


# ---------------------------------------------------------------------------------------------- how a value has gone


class Trend(NamedTuple):
    """Of a value over a window of time."""

    span_s: float
    """So much of it has been seen."""
    rise: float
    """Sum of what it went up by; a counter that began anew has risen by what it says then."""
    per_s: float
    """What its low-water mark rose by from each part of the window to the next, by time, where that was least; 0: it
    did not rise everywhere. What comes in bursts or swings does not count."""


@dataclass(slots=True)
class _Course:
    points: deque[tuple[float, float]] = field(default_factory=deque)
    """Thinned, so that there are some two hundred at most."""

    def add(self, now_s: float, value: float, window_s: float, parts: int) -> Trend:
        points = self.points
        if len(points) >= 2 and now_s - points[-2][0] < window_s / 100:
            points.pop()
        points.append((now_s, value))
        while now_s - points[0][0] > window_s:
            points.popleft()
        steps = itertools.pairwise(value for _, value in points)
        rise = sum(after - before if after >= before else max(after, 0.0) for before, after in steps)
        return Trend(now_s - points[0][0], rise, self._per_s(parts))

    def _per_s(self, parts: int) -> float:
        began_s, span_s = self.points[0][0], self.points[-1][0] - self.points[0][0]
        if parts == 0 or span_s <= 0:
            return 0.0
        lows: list[tuple[float, float] | None] = [None] * parts
        for at_s, value in self.points:
            part = min(int((at_s - began_s) / span_s * parts), parts - 1)
            low = lows[part]
            if low is None or value < low[1]:
                lows[part] = at_s, value
        known = [low for low in lows if low is not None]
        if len(known) < parts:
            return 0.0
        least_s = span_s / parts / 2
        rates = (
            (after - before) / max(after_s - before_s, least_s)
            for (before_s, before), (after_s, after) in itertools.pairwise(known)
        )
        return max(0.0, min(rates))


class _Trends:
    """By name; what is not added to for `GONE_S` is forgotten."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        self._now_s = now_s

    def add(self, name: str, value: float, window_s: float, parts: int = 0) -> Trend:
        """`parts`: of the window, for `Trend.per_s`; 0: nobody asks for that."""
        return self._courses.setdefault(name, _Course()).add(self._now_s, value, window_s, parts)

    def end(self) -> None:
        for name, course in list(self._courses.items()):
            if self._now_s - course.points[-1][0] > GONE_S:
                del self._courses[name]
