"""Explain why a run does not progress: the chain of waits from the Trainer down to the cause. Pure.

    Trainer ─ samples ─▶ queue ─▶ Rollouter ─┬─ engine ─▶ replicas
            │                                ├─ reward ─▶ the reward function
            │                                ├─ permit ─▶ staleness gate ─▶ version not applied ─▶ replicas, store
            │                                │                           └─ newest is applied ─▶ Trainer
            │                                └─ slot ─▶ replicas
            ├─ served ─▶ Rollouter ─ apply, validation ─▶ replicas
            └─ model, experience, critic, train, publish, checkpoint ─▶ ranks, store

Each explanation follows one path of this graph from left to right, so it ends. Unknown facts are left out, and no
function raises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asyncrl.core.ports import ReplicaReport, SampleCounts, WeightsVersion
from asyncrl.core.waits import Wait
from asyncrl.observe.formats import duration
from asyncrl.observe.status.run_status import RunState, as_text, dump
from asyncrl.storage.run_dir import replace_file

logger = logging.getLogger(__name__)

DriverState = Literal["alive", "stopped", "gone", "unknown"]
"""The driver's process as the reader of the state finds it. `stopped`: by SIGSTOP; `unknown`: on another machine."""
WaitCause = Literal[
    "starting",
    "completed",
    "failed",
    "interrupted",
    "driver",
    "silent",
    "restarting",
    "ranks",
    "model",
    "checkpoint",
    "engine",
    "replica",
    "reward",
    "store",
    "gate",
    "cluster",
    "ended",
    "busy",
    "unknown",
]
"""The kind of cause that a chain ends in."""

STALL_FILE = "stall.json"
STALE_S = 10.0
"""A healthy driver writes its state every second or two, so an older state means that it is not healthy."""
SILENT_S = 5.0
"""A part that has not answered for longer than this is not merely slow."""
REPLICA_SILENT_S = 10.0
"""Replicas report once a second."""
SLOW_PHASE_S = 5.0
"""A replica that does not serve for longer than this delays the others, too; a usual pause takes milliseconds."""
IDLE_ENGINES_S = 10.0
"""Engines that work generate tokens at shorter intervals than this."""
MAX_ERROR_CHARS = 1500

_TRAINER_WAITS: Mapping[str, tuple[str, WaitCause]] = {
    "model": ("is blocked on starting its ranks and loading the models", "model"),
    "experience": ("is blocked on its ranks' forward passes over a lease", "ranks"),
    "critic": ("is blocked on its ranks' critic step", "ranks"),
    "train": ("is blocked on its ranks' optimizer step", "ranks"),
    "publish": ("is blocked on its ranks' publication of a version", "ranks"),
    "gpus": ("is blocked on the engines, which do not sleep yet", "engine"),
    "offload": ("is blocked on its ranks, which free the GPUs for the engines", "ranks"),
    "trace": ("is blocked on its ranks' traces of a step", "ranks"),
    "checkpoint": ("is blocked on reading or writing a checkpoint", "checkpoint"),
}
_DONE = ("known", "answered", "failed")
"""Numbers of an evaluation's prompts that need no answer any more."""
_INSIDE_ENGINE_WAIT = {
    "tool": "tool calls",
    "user": "answers of users or environments",
    "agent": "programs of agents",
    "worker": "waits for the start of a worker",
}
"""Work that happens while a sample waits for engines."""
_REPLICA_PHASES = {
    "starting": "is starting its engine",
    "pausing": "is paused",
    "loading": "is paused and loads weights",
    "verifying": "is paused and verifies weights",
    "sleeping": "sleeps while the ranks have its GPUs",
    "broken": "is broken",
}


class WaitLink(NamedTuple):
    """One link of a chain; it is blocked on the next one. The last link is the cause."""

    subject: str
    state: str
    for_s: float | None = None
    """Duration so far."""
    detail: str = ""
    cause: WaitCause | Literal[""] = ""
    """Set in the last link. Also set in a first link that describes how the run or its driver ended; the links after it
    then describe the state at that time."""

    @property
    def text(self) -> str:
        since = "" if self.for_s is None else f" for {duration(self.for_s)}"
        return f"{self.subject} {self.state}{since}" + (f" ({self.detail})" if self.detail else "")


def render_chain(links: Sequence[WaitLink]) -> str:
    """Return the chain in one line: `Trainer is blocked on samples ◀ Rollouter is blocked on ... ◀ ...`."""
    text = ""
    for number, link in enumerate(links):
        if number:
            text += "; at that time: " if links[number - 1].cause else " ◀ "
        text += link.text
    return text


def chain_as_json(links: Sequence[WaitLink]) -> list[dict[str, Any]]:
    return [{**link._asdict(), "text": link.text} for link in links]


def write_stall(run_dir: Path, state: RunState) -> Path | None:
    """Write the state of a stalled run and its chain of waits to `stall.json`. Blocking.

    Returns:
        The file; None if it could not be written, which is logged.
    """
    links = explain(state, state.written_at)
    path = run_dir / STALL_FILE
    try:
        content = {"why": render_chain(links), "chain": chain_as_json(links), "state": dump(state)}
        replace_file(path, as_text(content))
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
        return None
    return path


def explain(state: RunState, now: float, *, driver: DriverState = "unknown") -> tuple[WaitLink, ...]:
    """Return the chain of waits at `now` (wall clock), which has at least one link.

    If the run has ended or its driver is gone, the first link describes that, and the rest of the chain describes the
    state at that time.
    """
    ending = _ending(state, now, driver)
    if ending is None:
        return _Explanation(state, now).chain()
    if ending.cause in ("completed", "interrupted") or "◀" in ending.detail:
        return (ending,)
    then = _when_last_polled(state)
    return (ending, *_Explanation(then, then.written_at).chain())


def _ending(state: RunState, now: float, driver: DriverState) -> WaitLink | None:
    """Return how the run or its driver ended, or None if the driver works."""
    if state.phase in ("completed", "failed", "interrupted"):
        lines = state.error.strip().splitlines()
        return WaitLink("run", state.phase, None, lines[0][:MAX_ERROR_CHARS] if lines else "", state.phase)
    silent_s = max(0.0, now - state.written_at)
    if driver == "stopped":
        detail = f"pid {state.pid}; kill -CONT {state.pid} resumes it"
        return WaitLink("driver", "is stopped", None, detail, "driver")
    if driver == "gone":
        detail = f"pid {state.pid} ended without an error message; launch the run with resume=auto to continue it"
        return WaitLink("driver", "has been dead", silent_s, detail, "driver")
    if silent_s > STALE_S:
        where = f" on {state.host}" if state.host else ""
        detail = f"pid {state.pid}{where}: hung, or the machine is overloaded or gone"
        return WaitLink("driver", "has not written its state", silent_s, detail, "driver")
    return None


def _when_last_polled(state: RunState) -> RunState:
    """Return the state as of the driver's last poll of its parts, which is earlier than its last write."""
    if any(part not in state.silent_s for part in ("store", "rollouter", "trainer")):
        return state
    least_s = min(state.silent_s.values())
    silent_s = {part: seconds - least_s for part, seconds in state.silent_s.items()}
    return replace(state, written_at=state.written_at - least_s, silent_s=silent_s)


class _Explanation:
    """Explains a state at one moment. Every method returns the rest of the chain, or None if it does not apply."""

    def __init__(self, state: RunState, at: float) -> None:
        self._state = state
        self._at = at

    def chain(self) -> tuple[WaitLink, ...]:
        state = self._state
        if state.phase == "starting":
            return (WaitLink("run", "is starting", self._since(state.started_at)), *self._starting())
        stopping = (WaitLink("run", "is stopping"),) if state.phase == "stopping" else ()
        if state.mode == "sft":
            work = f"are training step {state.step + 1}"
            return (*stopping, WaitLink("ranks", work, self._since(state.last_progress_at), "", "ranks"))
        if state.mode == "eval":
            left = state.answers.get("prompts", 0) - sum(state.answers.get(name, 0) for name in _DONE)
            work = f"have {left} prompts to answer"
            return (*stopping, WaitLink("engines", work, self._since(state.last_progress_at), "", "engine"))
        return (*stopping, *self._trainer())

    def _starting(self) -> tuple[WaitLink, ...]:
        """Explain the start by a rank or an engine that is not ready yet; they start concurrently."""
        if full := self._full_cluster():
            return (full,)
        if waits := self._waits("trainer"):
            return (self._blocked_trainer(waits[0]),)
        if self._state.replicas and (lagging := self._lagging_replica(self._state.replicas)):
            return (lagging,)
        detail = "Ray, engines, ranks and data; see logs/ in the run directory"
        return (WaitLink("parts", "are starting", None, detail, "starting"),)

    # ------------------------------------------------------------------------------------------------ Trainer

    def _trainer(self) -> tuple[WaitLink, ...]:
        if unavailable := self._unavailable("trainer", "Trainer"):
            return (unavailable,)
        waits = self._waits("trainer")
        if not waits:
            if silent := self._silent("queue", "queue"):
                return (WaitLink("Trainer", "is blocked on the queue"), silent)
            if "trainer" not in self._state.waits:
                return (WaitLink("Trainer", "has not reported yet", None, "", "unknown"),)
            detail = "between two calls, or computing in its event loop"
            return (WaitLink("Trainer", "is not blocked", None, detail, "busy"),)
        longest = waits[0]
        if longest.edge == "served":
            return (WaitLink("Trainer", "has taken its last step", longest.since_s), *self._last_version())
        if longest.edge == "publish" and (silent := self._silent("store", "weight store")):
            return (WaitLink("Trainer", "is publishing a version", longest.since_s), silent)
        if longest.edge != "samples":
            return (self._blocked_trainer(longest),)
        counts = self._state.queue.counts if self._state.queue else self._state.counts
        wanted = f" of up to {self._state.samples_per_lease}" if self._state.samples_per_lease else ""
        detail = f"{counts.ready}{wanted} are READY, {counts.running} RUNNING"
        return (WaitLink("Trainer", "is blocked on samples", longest.since_s, detail), *self._samples())

    def _blocked_trainer(self, wait: Wait) -> WaitLink:
        """Explain a Trainer that is blocked on a call to its ranks, whose work cannot be observed from outside."""
        text, cause = _TRAINER_WAITS.get(wait.edge, (f"is blocked on {wait.edge}", "unknown"))
        pids = ", ".join(str(process.pid) for process in self._state.processes if process.part == "rank")
        details = [f"ranks: pid {pids}"] if pids and cause in ("ranks", "checkpoint", "model") else []
        details += ["within its deadline"] if wait.bounded else []
        return WaitLink("Trainer", text, wait.since_s, "; ".join(details), cause)

    # ------------------------------------------------------------------------------------------------ samples

    def _samples(self) -> tuple[WaitLink, ...]:
        state = self._state
        if silent := self._silent("queue", "queue"):
            return (silent,)
        if state.queue is None:
            return (WaitLink("queue", "has not reported yet", None, "", "unknown"),)
        counts, lease = state.queue.counts, state.samples_per_lease
        if state.queue.ended:
            return (WaitLink("queue", "has ended", None, "no more samples: the Trainer is about to stop", "ended"),)
        if 0 < lease <= counts.ready:
            detail = "the lease is being delivered, or its payloads are being read"
            return (WaitLink("queue", "has enough samples", None, detail, "busy"),)
        if unavailable := self._unavailable("rollouter", "Rollouter"):
            return (unavailable,)
        return self._rollouter(counts)

    def _rollouter(self, counts: SampleCounts) -> tuple[WaitLink, ...]:
        if "rollouter" not in self._state.waits:
            detail = "it loads its data or connects"
            return (WaitLink("Rollouter", "has not reported yet", None, detail, "starting"),)
        waits = {wait.edge: wait for wait in self._waits("rollouter")}
        working = [waits[edge] for edge in ("engine", "reward") if edge in waits]
        if "permit" in waits and (not working or self._cannot_fill_lease(counts)):
            return self._gate(waits)
        if working:
            longest = max(working, key=lambda wait: wait.since_s)
            return self._reward(longest) if longest.edge == "reward" else self._engine(longest, "engines")
        if "records" in waits:
            detail = f"{_tasks(waits['records'])}; they are in the dump_dir of the role in `skip`"
            return (WaitLink("Rollouter", "is reading or writing records", waits["records"].since_s, detail, "busy"),)
        if "slot" in waits:
            return self._engine(waits["slot"], "a generation slot")
        if "apply" in waits:
            applying = WaitLink("Rollouter", "is applying a version", waits["apply"].since_s, "before it generates")
            return (applying, *self._applying())
        silent_edges = ("weights", "permit", "isolation", *_INSIDE_ENGINE_WAIT)
        for edge, wait in waits.items():
            if edge not in silent_edges:
                return (WaitLink("Rollouter", f"is blocked on {edge}", wait.since_s, _tasks(wait), "unknown"),)
        return (WaitLink("Rollouter", "is not blocked", None, "computing in its event loop", "busy"),)

    def _cannot_fill_lease(self, counts: SampleCounts) -> bool:
        """Return whether the admitted samples are too few for a lease while the gate admits no more."""
        queue = self._state.queue
        admitted = counts.fed - counts.num_dropped
        if queue is None or admitted < queue.paced_to:
            return False
        all_admitted = queue.total_samples is not None and admitted >= queue.total_samples
        return not all_admitted and counts.ready + counts.running < self._state.samples_per_lease

    def _reward(self, wait: Wait) -> tuple[WaitLink, ...]:
        detail = "see reward.function; reward.timeout_s bounds each call"
        return (
            WaitLink("Rollouter", "is blocked on rewards", wait.since_s, _tasks(wait)),
            WaitLink("reward function", "has not answered", wait.since_s, detail, "reward"),
        )

    def _engine(self, wait: Wait, resource: str) -> tuple[WaitLink, ...]:
        details = [_tasks(wait)]
        for inner in self._waits("rollouter"):
            if inner.edge == "isolation":
                details.append(f"{inner.count} isolated since an engine crashed while it ran them")
            elif inner.edge in _INSIDE_ENGINE_WAIT:
                work = _INSIDE_ENGINE_WAIT[inner.edge]
                details.append(f"{inner.count} {work} in progress, the longest for {inner.since_s:.0f} s")
        detail = "; ".join(filter(None, details))
        return (WaitLink("Rollouter", f"is blocked on {resource}", wait.since_s, detail), self._replicas())

    def _last_version(self) -> tuple[WaitLink, ...]:
        """Explain a wait for the last version: the Trainer is done, and the Rollouter applies and validates it."""
        if unavailable := self._unavailable("rollouter", "Rollouter"):
            return (unavailable,)
        waits = {wait.edge: wait for wait in self._waits("rollouter")}
        if apply := waits.get("apply"):
            return (WaitLink("Rollouter", "is applying the last version", apply.since_s), *self._applying())
        if validation := waits.get("validation"):
            validating = WaitLink("Rollouter", "is validating", validation.since_s, _tasks(validation))
            return (validating, self._replicas())
        return (WaitLink("Rollouter", "is about to end", None, "the last version is served", "busy"),)

    # ------------------------------------------------------------------------------------------------ the gate

    def _gate(self, waits: Mapping[str, Wait]) -> tuple[WaitLink, ...]:
        state, queue, since_s = self._state, self._state.queue, waits["permit"].since_s
        assert queue is not None  # `_samples` has checked it
        counts = queue.counts
        admitted = counts.fed - counts.num_dropped
        if queue.total_samples is not None and admitted >= queue.total_samples:
            detail = f"all {queue.total_samples} samples of the run are admitted, {counts.leased} are leased"
            return (
                WaitLink("Rollouter", "has no samples left to admit", since_s),
                WaitLink("Trainer", "has the last samples", None, detail, "gate"),
            )
        if admitted < queue.paced_to:
            detail = f"{queue.paced_to - admitted} permits are free and about to be taken"
            return (
                WaitLink("Rollouter", "is blocked on permits", since_s),
                WaitLink("queue", "is granting them", None, detail, "busy"),
            )
        detail = f"{admitted} of {queue.paced_to} samples that version {queue.version} permits are admitted"
        gate = WaitLink("Rollouter", "is blocked on the staleness gate", since_s, detail)
        applied = WeightsVersion(queue.lineage, queue.version)
        published = state.published
        if published is None or published <= applied:
            return (gate, self._no_newer_version(applied, counts))
        return (
            gate,
            WaitLink(f"version {published.version}", "is not applied"),
            *self._not_applied(published, waits),
        )

    def _no_newer_version(self, applied: WeightsVersion, counts: SampleCounts) -> WaitLink:
        state = self._state
        if silent := self._silent("store", "weight store"):
            return silent
        newest = WeightsVersion(state.lineage, state.version)
        if state.published is None and newest.version > 0:
            detail = "it was restarted; the Trainer publishes again"
            return WaitLink("weight store", "has no version", None, detail, "store")
        if newest > applied:
            detail = "it is being published"
            return WaitLink(f"version {newest.version}", "is not in the weight store", None, detail, "store")
        detail = f"version {applied.version} is the newest; {counts.ready} READY, {counts.leased} LEASED"
        return WaitLink("Trainer", "has all permitted samples", None, detail, "gate")

    def _not_applied(self, published: WeightsVersion, waits: Mapping[str, Wait]) -> tuple[WaitLink, ...]:
        validation = waits.get("validation")
        if "apply" in waits:
            return self._applying()
        if validation is not None:
            validating = WaitLink(
                "Rollouter", "is validating the previous version", validation.since_s, _tasks(validation)
            )
            return (validating, self._replicas())
        if silent := self._silent("store", "weight store"):
            return (silent,)
        behind = [report for report in self._current_replicas() if _version(report) < published]
        if behind and (lagging := self._lagging_replica(behind)):
            return (lagging,)
        detail = "it has not begun to apply the version, or to report it to the queue"
        return (WaitLink("Rollouter", "has not reacted yet", None, detail, "busy"),)

    def _applying(self) -> tuple[WaitLink, ...]:
        """Explain the application of a version by a replica that does not serve the version yet."""
        published = self._state.published
        current = self._current_replicas()
        behind = [report for report in current if published is not None and _version(report) < published]
        if lagging := self._lagging_replica(behind or current):
            return (lagging,)
        if silent := self._silent("store", "weight store"):
            return (silent,)
        if behind:
            first = behind[0]
            detail = f"{first.phase}, {first.in_flight} requests in flight; pid {first.pid}"
            return (WaitLink(_name(first), f"still serves version {first.version}", None, detail, "replica"),)
        return (WaitLink("replicas", "serve the version", None, "the Rollouter is about to open the gate", "busy"),)

    # ------------------------------------------------------------------------------------------------ replicas

    def _current_replicas(self) -> list[ReplicaReport]:
        """Return the reports of the current replicas. The state may also have older reports, of replaced replicas and
        of replicas that have left."""
        stay = [report for report in self._state.replicas if report.phase != "leaving"]
        newest_first = sorted(stay, key=lambda report: -report.reported_at)
        return newest_first[: max(self._state.num_replicas, 1)]

    def _replicas(self) -> WaitLink:
        current = self._current_replicas()
        if lagging := self._lagging_replica(current):
            return lagging
        if silent := self._silent("store", "weight store"):
            return silent  # the store delivers the reports, so everything known about the replicas is outdated
        serving = [report for report in current if report.phase in ("serving", "fetching")]
        requests = sum(report.in_flight for report in serving)
        missing = self._state.num_replicas - len(current)
        detail = f"{len(serving)} serving, {requests} requests in flight"
        if missing > 0:
            detail += f"; no report from {missing}"
            if not requests and (full := self._full_cluster()):
                return full
        if not requests:
            return WaitLink("engines", "have no request in flight", None, detail, "engine")
        idle_s = self._since(self._state.last_progress_at) if self._state.last_progress_at else 0.0
        if idle_s > IDLE_ENGINES_S:
            return WaitLink("engines", "have generated no token", idle_s, detail, "engine")
        return WaitLink("engines", "are generating", None, detail, "engine")

    def _lagging_replica(self, reports: Sequence[ReplicaReport]) -> WaitLink | None:
        """Return the replica that most likely delays the others, or None if there is none."""
        if not self._state.num_replicas:
            return WaitLink("engines", "do not exist", None, "every sample of the run is recorded", "busy")
        if not self._state.replicas:
            detail = f"{self._state.num_replicas} wanted; they are starting, or their reports do not arrive"
            silent = self._silent("store", "weight store")
            return silent or WaitLink("replicas", "have not reported yet", None, detail, "replica")
        severities = [(self._severity(report), report) for report in reports]
        lagging = [(severity, report) for severity, report in severities if severity > 0]
        if not lagging:
            return None
        severity, report = max(lagging, key=lambda pair: (pair[0], -pair[1].phase_since))
        others_work = any(severity == 0 and report.in_flight > 0 for severity, report in severities)
        since_s = self._since(report.phase_since)
        if others_work and severity < 3 and since_s < SLOW_PHASE_S:
            return None
        pids = f"pid {report.pid}" + "".join(f", engine {pid}" for pid in report.engine_pids)
        if severity == 4:
            detail = f"last {report.phase}; {pids}; dead, stopped or hung"
            silent_s = self._since(report.reported_at)
            silent = self._silent("store", "weight store")
            return silent or WaitLink(_name(report), "has not reported", silent_s, detail, "replica")
        state = _REPLICA_PHASES.get(report.phase, report.phase)
        detail = report.error if report.phase == "broken" and report.error else f"{report.in_flight} requests; {pids}"
        return WaitLink(_name(report), state, since_s, detail, "replica")

    def _severity(self, report: ReplicaReport) -> int:
        if self._since(report.reported_at) > REPLICA_SILENT_S:
            return 4
        return {"broken": 3, "pausing": 2, "loading": 2, "verifying": 2, "starting": 1}.get(report.phase, 0)

    # ------------------------------------------------------------------------------------------------ shared

    def _full_cluster(self) -> WaitLink | None:
        """Return the link of a shared cluster that has no room for a part of the run, or None if it has."""
        if not (pending := self._state.pending_demands):
            return None
        detail = f"{'; '.join(pending)}; free resources, or add nodes"
        return WaitLink("Ray cluster", "has no room", None, detail, "cluster")

    def _unavailable(self, part: str, name: str) -> WaitLink | None:
        """Return the link of a part that is being replaced or does not answer, or None if it works."""
        state = self._state
        if part == "trainer" and part in state.restarting and (full := self._full_cluster()):
            return full
        if part in state.restarting:
            details = [restart.cause for restart in state.restarts if restart.part == part and not restart.recovered_at]
            details = details[-1:] + [f"now blocked on {wait.edge}" for wait in self._waits(part)[:1]]
            since_s = self._since(state.restarting[part])
            return WaitLink(name, "is being restarted", since_s, "; ".join(details), "restarting")
        return self._silent(part, name)

    def _silent(self, part: str, name: str) -> WaitLink | None:
        """Return the link of a part that does not answer, or None if it answers."""
        state = self._state
        silent_s = state.silent_s.get(part, 0.0)
        if silent_s <= SILENT_S:
            return None
        pid = next((process.pid for process in state.processes if process.part == part), 0)
        detail = (f"pid {pid}: " if pid else "") + "dead, stopped or hung"
        return WaitLink(name, "has not answered", silent_s + self._age(), detail, "silent")

    def _waits(self, part: str) -> list[Wait]:
        """Return the open waits of a part as of now, the longest first."""
        later_s = self._age() + self._state.silent_s.get(part, 0.0)
        waits = [wait._replace(since_s=wait.since_s + later_s) for wait in self._state.waits.get(part, ())]
        return sorted(waits, key=lambda wait: -wait.since_s)

    def _age(self) -> float:
        return self._since(self._state.written_at)

    def _since(self, time: float) -> float:
        return max(0.0, self._at - time)


def _version(report: ReplicaReport) -> WeightsVersion:
    return WeightsVersion(report.lineage, report.version)


def _name(report: ReplicaReport) -> str:
    return report.replica if report.replica.startswith("replica") else f"replica {report.replica}"


def _tasks(wait: Wait) -> str:
    return f"{wait.count} samples" if wait.count > 1 else ""
