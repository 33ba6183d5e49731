"""What figures mean: which are a problem, and what helps against it. Pure.

A rule looks at what is known now, and at how that has gone lately, and gives a `Judgement` for each of its subjects;
`alarms` decides what of it is told.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.health.alarms import Alarms, Condition, Judgement, Told
from asyncrl.health.facts import RunHealth

GIB = 1 << 30

LAG_BAD_S, LAG_WELL_S = 0.5, 0.25
MEMORY_BAD, MEMORY_WELL = 0.92, 0.85
"""Shares of the machine's memory in use; Ray ends processes at 0.95."""
GROWTH_OVER_S = 600.0
"""Growth is judged over so long: allocators take their time to settle."""
GROWTH_BAD_S, GROWTH_WELL_S = 3600.0, 7200.0
"""A process that has the machine's memory full so soon, at the present rate."""
STORE_BAD, STORE_WELL = 0.85, 0.7
KV_BAD, KV_WELL = 0.95, 0.85
KV_OVER_S = 60.0
KV_PREEMPTIONS = 3
"""Preemptions within `KV_OVER_S` that are no accident."""
DISK_BAD_BYTES, DISK_WELL_BYTES = 2 * GIB, 3 * GIB
DISK_BAD_S, DISK_WELL_S = 1800.0, 3600.0
DISK_OVER_S = 300.0
IDLE_BAD, IDLE_WELL = 0.5, 0.35
BUSY_CPU = 0.8
"""CPUs that a process which computes keeps busy, at least."""


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


@dataclass(frozen=True, slots=True)
class Settings:
    """What remedies depend on."""

    private_cluster: bool = True
    """Ray was started by this run."""
    on_policy: bool = False
    """`async_training.staleness_threshold` is 0: both sides wait for each other by design."""


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
            *_lag(health),
            *_machine_memory(health, snapshot.elsewhere),
            *_growth(health, trends, snapshot.elsewhere),
            *_object_store(health, self._settings),
            *_kv_cache(health, trends),
            *_disk(health, trends),
            *_dropped_events(health, trends),
            *_idle(snapshot, self._settings),
        ]
        trends.end()
        told = self._alarms.observe(snapshot.at_s, snapshot.now, judged)
        known = RunHealth(
            health.processes, health.engines, health.machine, health.object_store_share, self._alarms.open
        )
        return told, known


# ---------------------------------------------------------------------------------------------- one rule after another


def _lag(health: RunHealth) -> Iterator[Judgement]:
    for name, process in health.processes.items():
        if (lag_s := process.lag_s) is None:
            continue
        machine = health.machine
        if process.cpu >= BUSY_CPU:
            cause = (
                "something computes on it; move blocking work of rewards, tools and interactions into "
                "asyncio.to_thread or a process, or lower rollout.max_concurrent_samples"
            )
        elif machine is not None and machine.cpu > 0.95:
            cause = (
                "the machine's CPUs are all busy; lower rollout.max_concurrent_samples or the number of processes, or "
                "give the run more CPUs"
            )
        else:
            cause = (
                "something blocks it (a file, a network call, a lock); in code of your own use asyncio.to_thread "
                "for what blocks, and look at the `loop.stall` events around that time"
            )
        yield Judgement(
            f"lag/{name}",
            _above(lag_s, LAG_BAD_S, LAG_WELL_S),
            f"the event loop of {name} stands still for up to {lag_s:.1f} s, and all that waits in it: {cause}",
            f"the event loop of {name} runs freely again",
            hold_s=20.0,
            calm_s=30.0,
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
        trend = trends.add(f"rss/{name}", process.rss_bytes, GROWTH_OVER_S)
        if machine is None or name in elsewhere or trend.span_s < 0.9 * GROWTH_OVER_S:
            continue
        left_s = machine.memory_available_bytes / trend.per_s if trend.is_steady else float("inf")
        yield Judgement(
            f"growth/{name}",
            _below(left_s, GROWTH_BAD_S, GROWTH_WELL_S),
            f"the memory of {name} grows steadily, by {size(60 * trend.per_s)} a minute to {size(process.rss_bytes)}, "
            f"and at this rate the machine's memory is full in {left_s / 60:.0f} minutes. Something keeps what it no "
            "longer needs, most likely code of your own (rewards, tools, interactions). Until it is found a checkpoint "
            "(trainer.save_freq) bounds what is lost; fewer samples at once (rollout.max_concurrent_samples) take less",
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


def _disk(health: RunHealth, trends: _Trends) -> Iterator[Judgement]:
    machine = health.machine
    if machine is None or machine.disk_free_bytes is None:
        return
    free = machine.disk_free_bytes
    trend = trends.add("disk", -free, DISK_OVER_S)
    left_s = free / trend.per_s if trend.span_s > 60 and trend.per_s > 0 else float("inf")
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
            f"{name} makes more profiling events than can be written and dropped {lost:.0f} in the last minute; "
            "reports lack them: raise profiler.buffer_events, or set profiler.level=summary or off",
            f"{name} keeps all of its profiling events again",
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
    """Last minus first, by time."""
    is_steady: bool
    """It rose in each third of the window."""


@dataclass(slots=True)
class _Course:
    points: deque[tuple[float, float]] = field(default_factory=deque)
    """Thinned, so that there are some two hundred at most."""

    def add(self, now_s: float, value: float, window_s: float) -> Trend:
        points = self.points
        if len(points) >= 2 and now_s - points[-2][0] < window_s / 100:
            points.pop()
        points.append((now_s, value))
        while now_s - points[0][0] > window_s:
            points.popleft()
        span_s, values = now_s - points[0][0], [value for _, value in points]
        steps = itertools.pairwise(values)
        rise = sum(after - before if after >= before else max(after, 0.0) for before, after in steps)
        per_s = (value - values[0]) / span_s if span_s > 0 else 0.0
        third = len(values) // 3
        ends = [values[0], values[third], values[2 * third], value]
        is_steady = third > 0 and all(before < after for before, after in itertools.pairwise(ends))
        return Trend(span_s, rise, per_s, is_steady)


class _Trends:
    """By name; what is not added to in a round is forgotten with it."""

    def __init__(self) -> None:
        self._courses: dict[str, _Course] = {}
        self._added: set[str] = set()
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        self._now_s = now_s
        self._added.clear()

    def add(self, name: str, value: float, window_s: float) -> Trend:
        self._added.add(name)
        return self._courses.setdefault(name, _Course()).add(self._now_s, value, window_s)

    def end(self) -> None:
        for name in self._courses.keys() - self._added:
            del self._courses[name]
