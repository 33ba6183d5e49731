"""Derive metrics for `step` rows from the statuses that the parts report about once a second. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.core.ports import QueueStatus
from asyncrl.core.records import Metrics
from asyncrl.core.waits import Wait
from asyncrl.observe.metrics.rows import MetricsRow, queue_metrics


class RestartableCounter:
    """The total of a counter over all incarnations of a part, each of which counts from 0."""

    def __init__(self) -> None:
        self._earlier = 0.0
        self._current = 0.0
        self._incarnation = 0

    def update(self, value: float, incarnation: int) -> float:
        """Set the value of this incarnation of the part, and return the total of all incarnations.

        The value alone does not reveal a restart: the new process may have counted further than the previous one.
        """
        if incarnation != self._incarnation:
            self._earlier += self._current
            self._incarnation = incarnation
        self._current = value
        return self.value

    @property
    def value(self) -> float:
        return self._earlier + self._current


class WindowRate:
    """The rate of a counter over the last `span_s` seconds."""

    def __init__(self, span_s: float = 20.0) -> None:
        self._span_s = span_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, total: float) -> None:
        """Add a value of the counter. A lower value than before means a restart, which clears the window."""
        if self._points and total < self._points[-1][1]:
            self._points.clear()
        self._points.append((now_s, total))
        while len(self._points) > 2 and self._points[1][0] <= now_s - self._span_s:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """Return the rate; None until there are values at two different times."""
        if len(self._points) < 2:
            return None
        (start_s, start), (end_s, end) = self._points[0], self._points[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else None


class RollouterIdle:
    """Measures the share of the time between the first and the last step in which no sample was in generation.

    The counter is observed about once a second; its values at the steps are interpolated.
    """

    def __init__(self) -> None:
        self._previous: tuple[float, float] | None = None
        self._start: tuple[float, float] | None = None
        self._end: tuple[float, float] | None = None
        self._steps: deque[float] = deque()
        """Times of steps after the last observation."""

    def step(self, now_s: float) -> None:
        """Record that a step ended at `now_s`."""
        if len(self._steps) == 2 or (self._start is not None and self._steps):
            self._steps.pop()  # only the first and the newest step matter
        self._steps.append(now_s)

    def observe(self, now_s: float, idle_s: float) -> None:
        """Record the cumulative idle time of the Rollouter."""
        while self._steps and self._steps[0] <= now_s:
            point = self._at(self._steps.popleft(), now_s, idle_s)
            self._start, self._end = self._start or point, point
        self._previous = (now_s, idle_s)

    def _at(self, time_s: float, now_s: float, idle_s: float) -> tuple[float, float]:
        if self._previous is None:
            return now_s, idle_s
        before_s, before = self._previous
        if time_s <= before_s or now_s <= before_s:
            return before_s, before
        return time_s, before + (idle_s - before) * (time_s - before_s) / (now_s - before_s)

    @property
    def share(self) -> float | None:
        """Return the share; None before a second step. Steps after the last observation are not covered."""
        if self._start is None or self._end is None or self._end[0] <= self._start[0]:
            return None
        share = (self._end[1] - self._start[1]) / (self._end[0] - self._start[0])
        return min(max(share, 0.0), 1.0)


class TrainerIdle:
    """Measures the share of the time from the first to the last step in which the Trainer waited for samples."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._waited_s = 0.0

    def add(self, row: MetricsRow) -> None:
        """Add a `step` row of this process."""
        end_s = row.metrics["time/monotonic_s"]
        if self._first_s is None or end_s < self._last_s:  # the first, or the Trainer moved to another machine
            self._first_s, self._waited_s = end_s, 0.0
        else:
            self._waited_s += row.metrics["timing/wait_samples_s"]
        self._last_s = end_s

    @property
    def share(self) -> float | None:
        """Return the share; None before a second step."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return min(self._waited_s / (self._last_s - self._first_s), 1.0)


class PartMetrics:
    """The newest metrics of the parts. Counters continue over restarts of their parts."""

    def __init__(self) -> None:
        self.known: Metrics = {}
        """The newest metrics, which go into every `step` row."""
        self.generated_tokens = 0
        self.generated = WindowRate()
        self.trained = WindowRate()
        self.rollouter_idle = RollouterIdle()
        self.num_dropped: dict[str, int] = {}
        """Dropped samples by reason, of all incarnations of the Rollouter."""
        self.skips: dict[str, dict[str, int]] = {}
        """Counts by role, each from the newest process of the role."""
        self.waits: dict[str, tuple[Wait, ...]] = {}
        """Open waits by part."""
        self._earlier_tokens = 0
        self._totals: dict[str, RestartableCounter] = {}
        self._events: dict[str, dict[str, RestartableCounter]] = {"events": {}, "dropped": {}}
        """Profiling events by part."""
        self._idle_rollouter = WindowRate()
        self._idle_trainer = WindowRate()
        self._waited_s = 0.0

    def add_earlier_tokens(self, tokens: int) -> None:
        self._earlier_tokens = self.generated_tokens = max(self._earlier_tokens, tokens)

    def update_queue(self, status: QueueStatus) -> None:
        self.known |= queue_metrics(status)
        if status.health is not None:
            self._update_events("queue", "dropped", status.health.dropped_events, status.pid)

    def update_driver(self, dropped: int) -> None:
        """Update from the number of profiling events that the driver itself has dropped since the launch."""
        self._update_events("driver", "dropped", dropped, 0)

    def update_rollouter(self, now_s: float, status: Mapping[str, Any]) -> None:
        """Update from a status of the Rollouter; see `Recorder.update_parts`.

        Raises:
            KeyError: a key is missing.
        """
        incarnation: int = status["incarnation"]

        def total(name: str, value: float) -> float:
            return self._totals.setdefault(name, RestartableCounter()).update(value, incarnation)

        self.generated_tokens = self._earlier_tokens + int(total("generated_tokens", status["generated_tokens"]))
        self.generated.add(now_s, self.generated_tokens)
        idle_s = total("idle_s", status["idle_s"])
        self.rollouter_idle.observe(now_s, idle_s)
        self._idle_rollouter.add(now_s, idle_s)
        for kind, count in status["drops"].items():
            self.num_dropped[kind] = int(total(f"drops/{kind}", count))
        self.known["rollouter/generated_tokens"] = float(self.generated_tokens)
        self.known["rollouter/samples_done"] = total("samples_done", status["samples_done"])
        for name, count in status["agent"].items():
            self.known[f"rollouter/{name}"] = total(f"agent/{name}", count)
        if "rollouter/tool_s" in self.known and (calls := self.known.get("rollouter/tool_calls")):
            self.known["rollouter/tool_mean_s"] = self.known["rollouter/tool_s"] / calls
        self.known["rollouter/in_flight"] = float(status["in_flight"])
        self.known["rollouter/version"] = float(status["version"])
        self._set("throughput/generated_tokens_per_s", self.generated.per_s)
        self._update_idle("rollouter", self._idle_rollouter)
        open_s = self._update_waits("rollouter", "permit", status)
        self.known["queue/wait_permit_s"] = total("permit", status["waited_s"]["permit"] + open_s)
        self._update_skips(status)
        self._update_profiler("rollouter", status)

    def update_trainer(self, now_s: float, status: Mapping[str, Any], waited_s: float) -> None:
        """Update from a status of the Trainer (see `Recorder.update_parts`).

        `waited_s`: how long the recorded steps waited for samples.

        Raises:
            KeyError: a key is missing.
        """
        open_s = self._update_waits("trainer", "samples", status)
        # A wait that has just ended belongs to a step that is not recorded yet; until then, the counter must not fall.
        self._waited_s = max(self._waited_s, waited_s + open_s)
        self._idle_trainer.add(now_s, self._waited_s)
        self.known["queue/wait_samples_s"] = self._waited_s
        self.known["trainer/version"] = float(status["version"])
        self._update_idle("trainer", self._idle_trainer)
        self._update_skips(status)
        self._update_profiler("trainer", status)

    def update_trained(self, now_s: float, tokens: int) -> None:
        self.trained.add(now_s, tokens)
        self._set("throughput/trained_tokens_per_s", self.trained.per_s)

    def _update_idle(self, part: str, rate: WindowRate) -> None:
        if rate.per_s is not None:
            idle = min(rate.per_s, 1.0)
            self.known |= {f"idle/{part}": idle, f"active/{part}": 1.0 - idle}

    def _update_waits(self, part: str, edge: str, status: Mapping[str, Any]) -> float:
        """Update the open waits of a part, and return the duration of the longest one on `edge`."""
        self.waits[part] = tuple(status["waits"])
        return max((wait.since_s for wait in self.waits[part] if wait.edge == edge), default=0.0)

    def _update_skips(self, status: Mapping[str, Any]) -> None:
        for role, counts in status["skip"].items():
            if not counts:  # all processes know all roles, and each role is used in one of them
                continue
            self.skips[role] = dict(counts)
            for what, count in counts.items():
                self.known[f"skip/{role}/{what}"] = float(count)

    def _update_profiler(self, part: str, status: Mapping[str, Any]) -> None:
        """Update the counts of events of the part and of the processes that forward events to it."""
        for what in ("events", "dropped"):
            self._update_events(part, what, status["profiler"][what], status["pid"])

    def _update_events(self, part: str, what: str, count: int, pid: int) -> None:
        self._events[what].setdefault(part, RestartableCounter()).update(count, pid)
        self.known[f"profiler/{what}"] = sum(total.value for total in self._events[what].values())

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self.known[name] = value
