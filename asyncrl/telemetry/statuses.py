"""What the parts tell of themselves about once a second, as metrics for every step's line. Pure: the caller brings the
clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.ports import QueueStatus
from asyncrl.records import Metrics
from asyncrl.telemetry.meters import RollouterIdle, Total, WindowRate
from asyncrl.telemetry.rows import queue_metrics
from asyncrl.waits import Wait


class Statuses:
    """Counts go on over restarts of the part that counts."""

    def __init__(self, earlier_tokens: int) -> None:
        self.known: Metrics = {}
        """Of the parts other than the Trainer, newest."""
        self.generated_tokens = earlier_tokens
        self.generated = WindowRate()
        self.trained = WindowRate()
        self.rollouter_idle = RollouterIdle()
        self.num_dropped: dict[str, int] = {}
        """By kind, of all incarnations of the Rollouter."""
        self.skips: dict[str, dict[str, int]] = {}
        """By role, what the newest process did with its records."""
        self.waits: dict[str, tuple[Wait, ...]] = {}
        """By part, the open ones."""
        self._earlier_tokens = earlier_tokens
        self._totals: dict[str, Total] = {}
        self._events: dict[str, dict[str, Total]] = {"events": {}, "dropped": {}}
        """Of profiling, by part."""
        self._idle_rollouter = WindowRate()
        self._idle_trainer = WindowRate()
        self._waited_s = 0.0

    def made_earlier(self, tokens: int) -> None:
        """See `Recorder.made_earlier`."""
        self._earlier_tokens = self.generated_tokens = max(self._earlier_tokens, tokens)

    def see_queue(self, status: QueueStatus) -> None:
        self.known |= queue_metrics(status)
        if status.health is not None:
            self._see_events("queue", "dropped", status.health.dropped_events, status.pid)

    def see_driver(self, dropped: int) -> None:
        """`dropped`: profiling events, since the launch, by this process itself."""
        self._see_events("driver", "dropped", dropped, 0)

    def see_rollouter(self, now_s: float, status: Mapping[str, Any]) -> None:
        """Raises `KeyError`; see `Recorder.tick`."""
        incarnation: int = status["incarnation"]

        def total(name: str, value: float) -> float:
            return self._totals.setdefault(name, Total()).see(value, incarnation)

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
        self._see_idle("rollouter", self._idle_rollouter)
        open_s = self._see_waits("rollouter", "permit", status)
        self.known["queue/wait_permit_s"] = total("permit", status["waited_s"]["permit"] + open_s)
        self._see_skips(status)
        self._see_profiler("rollouter", status)

    def see_trainer(self, now_s: float, status: Mapping[str, Any], waited_s: float) -> None:
        """`waited_s`: for samples, as the steps' records tell. Raises `KeyError`; see `Recorder.tick`."""
        open_s = self._see_waits("trainer", "samples", status)
        # A wait that has ended is in no step's record yet: the counter stands until the record comes, it never falls.
        self._waited_s = max(self._waited_s, waited_s + open_s)
        self._idle_trainer.add(now_s, self._waited_s)
        self.known["queue/wait_samples_s"] = self._waited_s
        self.known["trainer/version"] = float(status["version"])
        self._see_idle("trainer", self._idle_trainer)
        self._see_skips(status)
        self._see_profiler("trainer", status)

    def see_trained(self, now_s: float, tokens: int) -> None:
        self.trained.add(now_s, tokens)
        self._set("throughput/trained_tokens_per_s", self.trained.per_s)

    def _see_idle(self, part: str, rate: WindowRate) -> None:
        if rate.per_s is not None:
            idle = min(rate.per_s, 1.0)
            self.known |= {f"idle/{part}": idle, f"active/{part}": 1.0 - idle}

    def _see_waits(self, part: str, edge: str, status: Mapping[str, Any]) -> float:
        """Returns how long the longest open wait on `edge` lasts."""
        self.waits[part] = tuple(status["waits"])
        return max((wait.since_s for wait in self.waits[part] if wait.edge == edge), default=0.0)

    def _see_skips(self, status: Mapping[str, Any]) -> None:
        """What was replayed and recorded, by that process."""
        for role, counts in status["skip"].items():
            self.skips[role] = dict(counts)
            for what, count in counts.items():
                self.known[f"skip/{role}/{what}"] = float(count)

    def _see_profiler(self, part: str, status: Mapping[str, Any]) -> None:
        """With what was sent to it, and what is told to have been dropped there."""
        for what in ("events", "dropped"):
            self._see_events(part, what, status["profiler"][what], status["pid"])

    def _see_events(self, part: str, what: str, count: int, pid: int) -> None:
        self._events[what].setdefault(part, Total()).see(count, pid)
        self.known[f"profiler/{what}"] = sum(total.value for total in self._events[what].values())

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self.known[name] = value
