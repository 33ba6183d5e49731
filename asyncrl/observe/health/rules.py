"""The rules of a run's health: which values are a problem, and the remedy. Pure.

`RULES` is a table of thresholds and texts. A function for each rule takes the current values and trends of earlier ones
and yields a `RuleResult` for each subject (a process, a replica, the machine); `alarms` decides when it is reported.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from asyncrl.core.process_health import ProcessHealth, RunHealth
from asyncrl.observe.formats import size
from asyncrl.observe.health.alarms import GONE_S, AlarmLevel, Alarms, Condition, HealthNotice, RuleResult
from asyncrl.observe.health.balance import ThreadSplit, describe_split, find_better_split

GIB = 1 << 30
LONG_LAG_S = 2.0
"""A longer lag is reported without hold time: a process reports a lag for 10 s only, which is less than that time."""
GROWTH_OVER_S = 600.0
"""Window for memory growth: allocators need time to settle."""
GROWTH_WINDOW_PARTS = 4
KV_OVER_S = 60.0
KV_PREEMPTIONS = 3
"""At least this many preemptions within `KV_OVER_S` are a problem."""
DISK_WINDOW_PART_S = (60.0, 450.0)
"""Limits of the length of the parts into which the disk's window is divided. A part is as long as the time between two
checkpoints, clipped to these limits; writing a checkpoint takes less than the upper limit."""
MAX_DISK_WINDOW_PARTS = 8
BUSY_CPU = 0.8
"""A process counts as computing if it keeps at least this many CPUs busy."""
BUSY_MACHINE = 0.95
IDLE_WITH_BETTER_SPLIT = 0.2
"""A side that waits longer than this share of the time is reported if other numbers of threads would be faster."""


class HealthRule(NamedTuple):
    """A threshold and its texts; `{…}` in a text is a fact about the subject."""

    bad: float
    """Beyond this value the condition is bad: above it, or below it if `good` is larger."""
    good: float
    text: str
    recovery: str
    hold_s: float = 10.0
    calm_s: float = 60.0
    level: AlarmLevel = "warning"

    def condition(self, value: float) -> Condition:
        sign = 1.0 if self.bad > self.good else -1.0
        return "bad" if sign * value > sign * self.bad else "good" if sign * value < sign * self.good else "fair"


RULES: Mapping[str, HealthRule] = {
    # A lag that returns every few minutes is one problem, hence the long calm times.
    "lag": HealthRule(
        0.5,
        0.25,
        "the event loop of {name} is blocked for up to {lag_s:.1f} s, which delays all of its work: {remedy}",
        "the event loop of {name} is no longer blocked",
        hold_s=20.0,
        calm_s=300.0,
    ),
    # A process is polled every second and answers within milliseconds. A clock change can falsify one measurement, so a
    # single one is not reported.
    "silence": HealthRule(
        10.0,
        5.0,
        "{name} has not answered for {silent_s:.0f} s; its process is stopped, or its event loop is blocked: {remedy}",
        "{name} answers again",
        hold_s=2.0,
        calm_s=300.0,
    ),
    "memory": HealthRule(
        0.92,
        0.85,
        "{used:.0%} of {total} memory is in use{largest}, and Ray ends processes at 95 %: lower "
        "rollout.max_concurrent_samples, rollout.num_replicas, (on CPU) rollout.cpu_kv_cache_gib or "
        "ray.object_store_memory_bytes",
        "memory is available again: {free} are free",
        hold_s=5.0,
        calm_s=30.0,
    ),
    "growth": HealthRule(
        3600.0,
        7200.0,
        "the memory of {name} grows steadily, by {rate} a minute to {rss}, and at this rate the machine's memory is "
        "full in {left_min:.0f} minutes. {remedy}. Until the cause is found, frequent checkpoints (trainer.save_freq) "
        "limit the loss",
        "the memory of {name} no longer grows: {rss}",
        hold_s=60.0,
    ),
    "object_store": HealthRule(
        0.85,
        0.7,
        "Ray's object store is {share:.0%} full with objects in use; when it is full, it spills to disk, and weight "
        "syncs become slow: {remedy}",
        "Ray's object store has space again: {share:.0%} are in use",
        calm_s=30.0,
    ),
    "fallback": HealthRule(
        0.5,
        0.4,
        "weight versions go through the object store instead of GPU broadcasts (weight_sync.backend=nccl): {reason}. "
        "The run continues, with later versions; set weight_sync.backend=object_store if this persists",
        "weight versions are broadcast to the engines' GPUs again",
        hold_s=0.0,
        calm_s=0.0,
    ),
    "uncompared": HealthRule(
        2.5,
        0.5,
        "replica {name} was too full to compare its log-probs with the Trainer's for {versions} versions in a row "
        "(weight_sync.verify), so it may compute something else: lower rollout.max_concurrent_samples, or raise "
        "rollout.max_num_seqs or rollout.num_replicas",
        "replica {name} compares its log-probs with the Trainer's again",
        hold_s=0.0,
        calm_s=0.0,
    ),
    "kv_cache": HealthRule(
        0.95,
        0.85,
        "the KV cache of replica {name} is too small for its load ({usage:.0%} in use, {running} requests running, "
        "{waiting} waiting): it preempted and recomputed requests {preemptions:.0f} times in the last minute. Lower "
        "rollout.max_concurrent_samples or rollout.max_num_seqs, or raise rollout.gpu_memory_utilization (on CPU "
        "rollout.cpu_kv_cache_gib) or rollout.num_replicas",
        "the KV cache of replica {name} has space again",
    ),
    "disk_space": HealthRule(2 * GIB, 3 * GIB, "", ""),
    "disk": HealthRule(
        1800.0,
        3600.0,
        "the disk of the run directory has {free} left{rate}; a run that cannot write a checkpoint ends. Free space, "
        "or keep less: trainer.max_checkpoints_to_keep, rollout.dump_dir, profiler.level",
        "the disk of the run directory has space again: {free}",
    ),
    "events": HealthRule(
        0.9,
        0.5,
        "{lost:.0f} profiling events of {name} did not fit into a buffer or onto the disk in the last minute; reports "
        "lack them: raise profiler.buffer_events, or set profiler.level=summary or off",
        "{name} no longer loses profiling events",
        hold_s=0.0,
    ),
    "unsent_events": HealthRule(
        0.9,
        0.5,
        "profiler.otlp_endpoint did not accept {lost:.0f} events in the last minute (the files of the run directory "
        "have them): check that a collector listens there and is fast enough, or remove the key",
        "profiler.otlp_endpoint accepts all events again",
        hold_s=0.0,
    ),
    "idle_both": HealthRule(
        0.3,
        0.15,
        "at least {idle:.0%} of the time no sample is generated and the Trainer waits too, so the bottleneck lies "
        "between them: rewards, or else weight syncs. Make rewards faster, or allow more calls at once "
        "(reward.max_concurrency, for a judge reward.judge.max_concurrency); `asyncrl report` shows what the samples "
        "waited for",
        "generation or training is busy most of the time again",
        hold_s=120.0,
        level="hint",
    ),
    "idle_trainer": HealthRule(
        0.5,
        0.35,
        "the Trainer waits for samples {idle:.0%} of the time: {remedy}",
        "the Trainer is busy most of the time again",
        hold_s=120.0,
        level="hint",
    ),
    "idle_rollouter": HealthRule(
        0.5,
        0.35,
        "no sample is generated {idle:.0%} of the time, because the Trainer is slower and samples may not be staler "
        "than async_training.staleness_threshold allows: {remedy}",
        "the Rollouter is busy most of the time again",
        hold_s=120.0,
        level="hint",
    ),
}


@dataclass(frozen=True, slots=True)
class HealthSnapshot:
    """The values that the rules evaluate at one moment."""

    at_s: float
    """Monotonic."""
    now: float
    """Wall clock."""
    health: RunHealth
    idle_trainer: float | None = None
    """Share of the last seconds in which the Trainer waited for samples; None if it is unknown or not relevant yet."""
    idle_rollouter: float | None = None
    """Share of the last seconds in which no sample was in generation."""
    elsewhere: frozenset[str] = frozenset()
    """Processes that do not run on the driver's machine."""
    settling: frozenset[str] = frozenset()
    """Processes that have just started: they import and load, which may block their event loops."""
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Processes that do not answer, and for how long; their last reports are outdated."""
    save_s: float = 0.0
    """Time between two checkpoints; 0 if the run saves none, infinite while it is unknown."""
    fallback: str = ""
    """See `StoreStatus.fallback`."""
    uncompared: Mapping[str, int] = field(default_factory=dict)
    """`ReplicaReport.num_uncompared` by replica."""


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """The configuration that remedies depend on."""

    private_cluster: bool = True
    """Whether this run started Ray itself."""
    on_policy: bool = False
    """`async_training.staleness_threshold` is 0: both sides wait for each other by design."""
    threads: ThreadSplit | None = None
    """The threads of engines and ranks that compute on the driver's CPUs; None: they have GPUs or other machines, or
    their number changes."""
    kept_checkpoints: int = 2
    """`trainer.max_checkpoints_to_keep`: beyond this number, a new checkpoint replaces an older one."""


def _result(
    rule_name: str,
    key: str,
    value: float,
    *,
    condition: Condition | None = None,
    at_once: bool = False,
    **facts: Any,
) -> RuleResult:
    """Return the result of a rule for one subject.

    Args:
        condition: overrides the condition of `value`.
        at_once: report it without hold time.
        facts: for the texts.
    """
    rule = RULES[rule_name]
    text, recovery = (text.format_map(facts) for text in (rule.text, rule.recovery))
    hold_s = 0.0 if at_once else rule.hold_s
    return RuleResult(key, condition or rule.condition(value), text, recovery, hold_s, rule.calm_s, rule.level)


class HealthRules:
    """Applies the rules of one run to one snapshot after the other, and remembers trends."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._alarms = Alarms()
        self._trends = TrendTracker()

    def observe(self, snapshot: HealthSnapshot) -> tuple[list[HealthNotice], RunHealth]:
        """Return the notices that are due, and the snapshot's health with the open problems."""
        trends, health = self._trends, snapshot.health
        trends.begin(snapshot.at_s)
        results = [result for rule in _RULE_FUNCTIONS for result in rule(snapshot, trends, self._settings)]
        notices = self._alarms.observe(snapshot.at_s, snapshot.now, results)
        problems = self._alarms.open
        return notices, RunHealth(health.processes, health.engines, health.machine, health.object_store_share, problems)


# ------------------------------------------------------------------------------------------------ measurements


def _lag(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    machine = snapshot.health.machine
    for name, process in snapshot.health.processes.items():
        if (lag_s := process.lag_s) is not None and name not in snapshot.settling:
            machine_cpu = machine.cpu if machine is not None and name not in snapshot.elsewhere else None
            remedy = _lag_remedy(name, process, machine_cpu)
            at_once = lag_s > LONG_LAG_S
            yield _result("lag", f"lag/{name}", lag_s, at_once=at_once, name=name, lag_s=lag_s, remedy=remedy)
    for name, silent_s in snapshot.silent_s.items():
        if name not in snapshot.settling:
            remedy = _lag_remedy(name, None, machine.cpu if machine is not None else None)
            yield _result("silence", f"lag/{name}", silent_s, name=name, silent_s=silent_s, remedy=remedy)


def _memory(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    machine = snapshot.health.machine
    if machine is None or machine.memory_bytes <= 0:
        return
    used = 1 - machine.memory_available_bytes / machine.memory_bytes
    here = [item for item in snapshot.health.processes.items() if item[0] not in snapshot.elsewhere]
    here.sort(key=lambda item: -item[1].rss_bytes)
    users = " and ".join(f"{name} has {size(process.rss_bytes)}" for name, process in here[:2])
    total, free = size(machine.memory_bytes), size(machine.memory_available_bytes)
    largest = f" ({users})" if users else ""
    yield _result("memory", "memory/machine", used, used=used, total=total, free=free, largest=largest)


def _growth(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    machine = snapshot.health.machine
    for name, process in snapshot.health.processes.items():
        trend = trends.add(f"rss/{name}", process.rss_bytes, GROWTH_OVER_S, GROWTH_WINDOW_PARTS)
        if machine is None or name in snapshot.elsewhere or trend.span_s < 0.9 * GROWTH_OVER_S:
            continue
        left_s = machine.memory_available_bytes / trend.per_s if trend.per_s > 0 else math.inf
        rate, rss, remedy = size(60 * trend.per_s), size(process.rss_bytes), _GROWTH_REMEDIES[_kind_of(name)]
        facts: dict[str, Any] = {"name": name, "rate": rate, "rss": rss, "left_min": left_s / 60, "remedy": remedy}
        yield _result("growth", f"growth/{name}", left_s, **facts)


def _object_store(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    if (share := snapshot.health.object_store_share) is not None:
        larger_nodes = "start the Ray nodes with a larger --object-store-memory"
        remedy = "raise ray.object_store_memory_bytes" if settings.private_cluster else larger_nodes
        yield _result("object_store", "object_store", share, share=share, remedy=remedy)


def _fallback(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    yield _result("fallback", "fallback", float(bool(snapshot.fallback)), reason=snapshot.fallback)


def _uncompared(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    for replica, versions in snapshot.uncompared.items():
        yield _result("uncompared", f"uncompared/{replica}", versions, name=replica, versions=versions)


def _kv_cache(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    for replica, load in snapshot.health.engines.items():
        preemptions = trends.add(f"preemptions/{replica}", load.preemptions, KV_OVER_S).rise
        is_good = RULES["kv_cache"].condition(load.kv_cache_usage) == "good" and not preemptions
        condition: Condition = "bad" if preemptions >= KV_PREEMPTIONS else "good" if is_good else "fair"
        facts: dict[str, Any] = {"name": replica, "usage": load.kv_cache_usage, "preemptions": preemptions}
        facts |= {"running": load.running, "waiting": load.waiting}
        yield _result("kv_cache", f"kv_cache/{replica}", load.kv_cache_usage, condition=condition, **facts)


def _disk(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    machine = snapshot.health.machine
    if machine is None or machine.disk_free_bytes is None:
        return
    free = machine.disk_free_bytes
    # Each of the first `kept_checkpoints` checkpoints takes much space at once; each later one replaces an older one.
    # The window has more parts than these first checkpoints, so at least one part shows only steady growth.
    parts = min(settings.kept_checkpoints + 3, MAX_DISK_WINDOW_PARTS)
    over_s = parts * min(max(snapshot.save_s, DISK_WINDOW_PART_S[0]), DISK_WINDOW_PART_S[1])
    trend = trends.add("disk", -free, over_s, parts)
    left_s = free / trend.per_s if trend.span_s > 0.9 * over_s and trend.per_s > 0 else math.inf
    conditions = (RULES["disk"].condition(left_s), RULES["disk_space"].condition(free))
    worst: Condition = "bad" if "bad" in conditions else "fair" if "fair" in conditions else "good"
    rate = f", at the present rate it is full in {left_s / 60:.0f} minutes" if left_s < RULES["disk"].good else ""
    yield _result("disk", "disk", left_s, condition=worst, free=size(free), rate=rate)


def _events(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    unsent = 0.0
    for name, process in snapshot.health.processes.items():
        lost = trends.add(f"events/{name}", process.dropped_events, 60.0).rise
        unsent += trends.add(f"unsent/{name}", process.unsent_events, 60.0).rise
        yield _result("events", f"events/{name}", lost, name=name, lost=lost)
    yield _result("unsent_events", "unsent_events", unsent, lost=unsent)


def _idle(snapshot: HealthSnapshot, trends: TrendTracker, settings: HealthSettings) -> Iterator[RuleResult]:
    trainer, rollouter = snapshot.idle_trainer, snapshot.idle_rollouter
    if settings.on_policy or trainer is None or rollouter is None:
        return
    both = max(0.0, trainer + rollouter - 1.0)  # the least time that two such shares have in common
    yield _result("idle_both", "idle/both", both, idle=both)
    if both > RULES["idle_both"].bad:  # more engines or a faster Trainer would not help
        return
    threads = settings.threads
    better = threads and find_better_split(threads, trainer, rollouter)
    split = "" if threads is None else describe_split(threads, better)
    no_better = f" ({split})" if split else ""
    if rollouter > RULES["idle_rollouter"].good:  # there are enough engines, but the staleness gate holds them back
        for_trainer = "let generation run further ahead (async_training.staleness_threshold)"
    elif better:
        for_trainer = split
    else:
        for_trainer = (
            "generation is the bottleneck: use more engines (rollout.num_replicas), more concurrent samples "
            f"(rollout.max_concurrent_samples) if the engines have capacity, or shorter responses{no_better}"
        )
    for_rollouter = split
    if not better:
        move = "move CPUs or GPUs from the replicas to the Trainer"
        if threads and not threads.searches and (most := threads.cpus // threads.ranks) > threads.rank_threads:
            move = f"let each rank try the CPUs that the engines leave idle (trainer.max_cpu_threads={most})"
        for_rollouter = f"raise it if the algorithm tolerates that, or {move}{no_better}"
    for side, idle, remedy in (("trainer", trainer, for_trainer), ("rollouter", rollouter, for_rollouter)):
        worth_it: Condition | None = "bad" if better and idle > IDLE_WITH_BETTER_SPLIT else None
        yield _result(f"idle_{side}", f"idle/{side}", idle, condition=worth_it, idle=idle, remedy=remedy)


_RULE_FUNCTIONS: Sequence[Callable[[HealthSnapshot, TrendTracker, HealthSettings], Iterator[RuleResult]]] = (
    _lag,
    _memory,
    _growth,
    _object_store,
    _fallback,
    _uncompared,
    _kv_cache,
    _disk,
    _events,
    _idle,
)


# ------------------------------------------------------------------------------------------------ remedies

_ProcessKind = Literal["driver", "queue", "store", "rollouter", "trainer", "rank", "replica", "engine"]

_COMPUTING: dict[_ProcessKind, str] = {
    "rollouter": "it computes in the event loop; move blocking work of rewards, tools and interactions into "
    "asyncio.to_thread or a process, or lower rollout.max_concurrent_samples",
    "trainer": "it computes in the event loop, while it builds batches or imports or calls your reward, advantage or "
    "loss: make that cheaper, or lower trainer.ppo_mini_batch_size",
    "rank": "training takes the CPU that the event loop needs. Steps do not suffer, but a rank that does not answer "
    "within timeouts.probe_s is ended: lower trainer.cpu_threads to leave a CPU for it, or raise timeouts.probe_s",
    "replica": "it has more requests and tokens to forward than one CPU can handle: lower "
    "rollout.max_concurrent_samples, or raise rollout.num_replicas",
    "queue": "it has more samples to track than one CPU can handle: lower rollout.max_concurrent_samples",
    "store": "it has more replicas to answer than one CPU can handle: lower rollout.num_replicas",
    "driver": "it has more to record than one CPU can handle: use fewer logging.sinks, or set "
    "profiler.level=summary or off",
}
_BLOCKED: dict[_ProcessKind, str] = {
    "rollouter": "a file, a network call or a lock blocks it; in your rewards, tools and interactions use "
    "asyncio.to_thread for blocking calls",
    "trainer": "most likely the disk of the run directory blocks it: use a faster one, or fewer checkpoints "
    "(trainer.save_freq)",
    "rank": "a file blocks it, or a collective operation that waits for other ranks. A rank that does not answer "
    "within timeouts.probe_s is ended: find the late rank, or raise timeouts.probe_s",
    "replica": "most likely vLLM blocks it while it loads weights or reads large media: raise rollout.num_replicas, so "
    "that other replicas answer meanwhile",
    "queue": "most likely the disk of the run directory, which has its journal, blocks it: use a faster one",
    "store": "most likely memory that is swapped or spilled to disk blocks it: use a machine with more memory",
    "driver": "most likely the disk of the run directory or one of logging.sinks blocks it: use fewer sinks, or a "
    "faster disk",
}
_GROWTH_REMEDIES: dict[_ProcessKind, str] = {
    "rollouter": "Most likely your own code (rewards, tools, interactions) keeps objects that it no longer needs. "
    "Fewer concurrent samples (rollout.max_concurrent_samples) need less memory",
    "trainer": "Most likely your own code (rewards, advantages) keeps batches that it no longer needs. Smaller batches "
    "(trainer.ppo_mini_batch_size) need less memory",
    "rank": "Most likely your own loss or model keeps tensors from step to step, or sequences become longer: fewer "
    "tokens at once (trainer.ppo_max_token_len) need less memory",
    "replica": "Requests or cached media accumulate in it: fewer concurrent samples (rollout.max_concurrent_samples) "
    "need less memory",
    "engine": "vLLM keeps memory that it no longer needs, or its cache is not fully used yet: a smaller cache (on CPU "
    "rollout.cpu_kv_cache_gib) and fewer concurrent requests (rollout.max_num_seqs) need less memory",
    "queue": "Samples accumulate in it: a lower async_training.staleness_threshold and fewer concurrent samples "
    "(rollout.max_concurrent_samples) need less memory",
    "store": "Weights versions accumulate in it: find the replica that does not apply them (asyncrl status)",
    "driver": "Records accumulate in it, most likely because one of logging.sinks is too slow: use fewer sinks",
}


def _kind_of(name: str) -> _ProcessKind:
    """Return the kind of a process that `RunHealth.processes` names."""
    prefix = name.partition("-")[0]
    return next((kind for kind in _GROWTH_REMEDIES if kind == prefix), "driver")


def _lag_remedy(name: str, process: ProcessHealth | None, machine_cpu: float | None) -> str:
    """Return why an event loop is blocked, and the remedy.

    Args:
        process: the latest measurements; None if the process does not answer.
        machine_cpu: busy share of the machine's CPUs; None if it is unknown.
    """
    kind = _kind_of(name)
    computes = process is not None and process.cpu >= BUSY_CPU
    if computes and kind != "rank":
        return _COMPUTING.get(kind, _COMPUTING["driver"])
    if machine_cpu is not None and machine_cpu > BUSY_MACHINE:
        return (
            "all CPUs of the machine are busy; lower rollout.max_concurrent_samples or the number of processes, or use "
            "more CPUs"
        )
    if computes:  # a rank computes all the time while it trains
        return _COMPUTING["rank"]
    return f"{_BLOCKED.get(kind, _BLOCKED['driver'])}. `loop.stall` events show the times"


# ------------------------------------------------------------------------------------------------ trends


class Trend(NamedTuple):
    """A value over a window of time."""

    span_s: float
    """The observed part of the window."""
    rise: float
    """Sum of all increases; a counter that restarts at 0 rises by its new value."""
    per_s: float
    """The smallest rate at which the low-water mark rises from one part of the window to the next; 0 unless it rises
    between all parts. Bursts and swings therefore do not count."""


class TrendTracker:
    """Trends by name; a name without values for `GONE_S` is forgotten."""

    def __init__(self) -> None:
        self._points: dict[str, deque[tuple[float, float]]] = {}
        """Times and values by name, thinned to about two hundred points at most."""
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        current = {name: points for name, points in self._points.items() if self._now_s - points[-1][0] <= GONE_S}
        self._now_s, self._points = now_s, current

    def add(self, name: str, value: float, window_s: float, parts: int = 0) -> Trend:
        """Return the trend with this value.

        `parts`: number of parts of the window for `Trend.per_s`; 0 if that is not needed.
        """
        now_s, points = self._now_s, self._points.setdefault(name, deque())
        if len(points) >= 2 and now_s - points[-2][0] < window_s / 100:
            points.pop()
        points.append((now_s, value))
        while now_s - points[0][0] > window_s:
            points.popleft()
        steps = itertools.pairwise(value for _, value in points)
        rise = sum(after - before if after >= before else max(after, 0.0) for before, after in steps)
        return Trend(now_s - points[0][0], rise, _per_s(points, parts))


def _per_s(points: Sequence[tuple[float, float]], parts: int) -> float:
    began_s, span_s = points[0][0], points[-1][0] - points[0][0]
    if parts == 0 or span_s <= 0:
        return 0.0
    lows: dict[int, tuple[float, float]] = {}
    for at_s, value in points:
        part = min(int((at_s - began_s) / span_s * parts), parts - 1)
        if part not in lows or value < lows[part][1]:
            lows[part] = at_s, value
    if len(lows) < parts:
        return 0.0
    least_s = span_s / parts / 2
    rates = (
        (after - before) / max(after_s - before_s, least_s)
        for (before_s, before), (after_s, after) in itertools.pairwise(lows[part] for part in range(parts))
    )
    return max(0.0, min(rates))
