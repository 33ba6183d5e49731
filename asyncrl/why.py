"""Why a run does not go on: the chain of waits from the Trainer down to the cause. Pure.

    Trainer ─ samples ─▶ queue ─▶ Rollouter ─┬─ engine ─▶ replicas
            │                                ├─ reward ─▶ the reward function
            │                                ├─ permit ─▶ staleness gate ─▶ version not applied ─▶ replicas, store
            │                                │                           └─ newest is applied ─▶ Trainer
            │                                └─ slot ─▶ replicas
            ├─ served ─▶ Rollouter ─ apply, validation ─▶ replicas
            └─ model, experience, critic, train, publish, checkpoint ─▶ ranks, store

Each answer follows one path of this picture, so it ends. What is not known is left out; nothing here raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.chain import Cause, Driver, Link
from asyncrl.ports import Books, Edition, ReplicaReport
from asyncrl.run_state import RunState
from asyncrl.waits import Wait

STALE_S = 10.0
"""A state older than this was not written by a driver that is well: it writes one every second or two."""
UNHEARD_S = 5.0
"""A part that has not answered for so long is no longer merely slow."""
REPLICA_UNHEARD_S = 10.0
"""Replicas report once a second."""
SLOW_PHASE_S = 5.0
"""A replica that is not serving for so long holds up the others' work too; a usual pause takes milliseconds."""
STILL_S = 10.0
"""Engines that are at work make a token more often than that."""
MAX_ERROR_CHARS = 1500


def explain(state: RunState, now: float, *, driver: Driver = "unknown") -> tuple[Link, ...]:
    """The chain of waits at `now` (wall clock), or where the run has ended or its driver is gone, how, and the chain at
    that time. At least one link."""
    head = _head(state, now, driver)
    if head is None:
        return _Look(state, now).run()
    if head.cause in ("completed", "interrupted") or "◀" in head.more:
        return (head,)
    then = _when_last_asked(state)
    return (head, *_Look(then, then.written_at).run())


def _head(state: RunState, now: float, driver: Driver) -> Link | None:
    """How it ended, if it has."""
    if state.phase in ("completed", "failed", "interrupted"):
        lines = state.error.strip().splitlines()
        return Link("run", state.phase, None, lines[0][:MAX_ERROR_CHARS] if lines else "", state.phase)
    silent_s = max(0.0, now - state.written_at)
    if driver == "stopped":
        return Link("driver", "is stopped", None, f"pid {state.pid}; kill -CONT {state.pid} lets it go on", "driver")
    if driver == "gone":
        more = f"pid {state.pid} ended without a last word; launch the run with resume=auto to go on"
        return Link("driver", "has been dead", silent_s, more, "driver")
    if silent_s > STALE_S:
        where = f" on {state.host}" if state.host else ""
        more = f"pid {state.pid}{where}: hung, or the machine is overloaded or gone"
        return Link("driver", "has not written its state", silent_s, more, "driver")
    return None


def _when_last_asked(state: RunState) -> RunState:
    """A driver that ends stops asking its parts some time before its last word: the state as of then."""
    asked = ("store", "rollouter", "trainer")
    if any(part not in state.unheard_s for part in asked):
        return state
    silent_s = min(state.unheard_s.values())
    unheard_s = {part: seconds - silent_s for part, seconds in state.unheard_s.items()}
    return replace(state, written_at=state.written_at - silent_s, unheard_s=unheard_s)


_BETWEEN_TURNS = {"tool": "tool calls", "user": "answers of users or environments", "agent": "programs of agents"}
"""What is under way inside a wait for engines."""


class _Look:
    """One state, seen at one time. Every method returns the rest of the chain, or None where it has nothing to say."""

    def __init__(self, state: RunState, at: float) -> None:
        self._state = state
        self._at = at

    def run(self) -> tuple[Link, ...]:
        state = self._state
        if state.phase == "starting":
            return (Link("run", "is starting", self._since(state.started_at)), *self._start())
        stopping = (Link("run", "is stopping"),) if state.phase == "stopping" else ()
        return (*stopping, *self._trainer())

    def _start(self) -> tuple[Link, ...]:
        """Ranks and engines come up side by side; whichever is still at it."""
        if "trainer" in self._state.waits and (waits := self._waits("trainer")):
            return (self._asked(waits[0]),)
        if self._state.replicas and (lagging := self._lagging_replica(self._state.replicas)):
            return (lagging,)
        more = "Ray, engines, ranks and data; see logs/ in the run directory"
        return (Link("parts", "are coming up", None, more, "starting"),)

    # ------------------------------------------------------------------------------------------------ Trainer

    def _trainer(self) -> tuple[Link, ...]:
        if gone := self._gone("trainer", "Trainer"):
            return (gone,)
        waits = self._waits("trainer")
        if not waits and (gone := self._unheard("queue", "queue")):
            return (Link("Trainer", "waits on the queue"), gone)
        if not waits:
            known = "trainer" in self._state.waits
            told = "waits on nothing" if known else "has told nothing yet"
            more = "between two calls, or at work on its own event loop" if known else ""
            return (Link("Trainer", told, None, more, "busy" if known else "unknown"),)
        longest = waits[0]
        if longest.edge == "served":
            return (Link("Trainer", "has taken its last step", longest.since_s), *self._end())
        if longest.edge != "samples":
            if longest.edge == "publish" and (gone := self._store()):
                return (Link("Trainer", "publishes a version", longest.since_s), gone)
            return (self._asked(longest),)
        books = self._state.queue.books if self._state.queue else self._state.books
        wanted = f" of up to {self._state.samples_per_lease}" if self._state.samples_per_lease else ""
        more = f"{books.ready}{wanted} are READY, {books.running} RUNNING"
        return (Link("Trainer", "waits for samples", longest.since_s, more), *self._samples())

    def _asked(self, wait: Wait) -> Link:
        """The Trainer waits on what it asked of its ranks; what they do in there, nobody outside can see."""
        does: dict[str, tuple[str, Cause]] = {
            "model": ("starts its ranks and loads the models", "model"),
            "experience": ("waits for its ranks' forward passes over a lease", "ranks"),
            "critic": ("waits for its ranks' step of the critic", "ranks"),
            "train": ("waits for its ranks' optimizer step", "ranks"),
            "publish": ("waits for its ranks to publish a version", "ranks"),
            "trace": ("waits for its ranks to write the traces of a step", "ranks"),
            "checkpoint": ("waits for a checkpoint to be read or written", "checkpoint"),
        }
        text, cause = does.get(wait.edge, (f"waits on {wait.edge}", "unknown"))
        ranks = ", ".join(str(process.pid) for process in self._state.processes if process.part == "rank")
        more = [f"ranks: pid {ranks}"] if ranks and cause in ("ranks", "checkpoint", "model") else []
        more += ["within its deadline"] if wait.bounded else []
        return Link("Trainer", text, wait.since_s, "; ".join(more), cause)

    # ------------------------------------------------------------------------------------------------ samples

    def _samples(self) -> tuple[Link, ...]:
        state = self._state
        if gone := self._unheard("queue", "queue"):
            return (gone,)
        if state.queue is None:
            return (Link("queue", "has told nothing yet", None, "", "unknown"),)
        books, lease = state.queue.books, state.samples_per_lease
        if state.queue.ended:
            return (Link("queue", "has ended", None, "no sample will come: the Trainer is about to stop", "ended"),)
        if 0 < lease <= books.ready:
            return (Link("queue", "has enough", None, "the lease is on its way, or its payloads are read", "busy"),)
        if gone := self._gone("rollouter", "Rollouter"):
            return (gone,)
        return self._rollouter(books)

    def _rollouter(self, books: Books) -> tuple[Link, ...]:
        state = self._state
        if "rollouter" not in state.waits:
            return (Link("Rollouter", "has told nothing yet", None, "it loads its data or connects", "starting"),)
        waits = {wait.edge: wait for wait in self._waits("rollouter")}
        at_work = [waits[edge] for edge in ("engine", "reward") if edge in waits]
        if "permit" in waits and (not at_work or self._too_few(books)):
            return self._gate(waits)
        if at_work:
            longest = max(at_work, key=lambda wait: wait.since_s)
            return self._reward(longest) if longest.edge == "reward" else self._engine(longest, "engines")
        if "records" in waits:
            more = f"{_tasks(waits['records'])}; skip.<role>.dump_dir says where they are"
            return (Link("Rollouter", "reads or writes records", waits["records"].since_s, more, "busy"),)
        if "slot" in waits:
            return self._engine(waits["slot"], "a free slot")
        if "apply" in waits:
            more = "it generates nothing before that"
            return (Link("Rollouter", "applies a version", waits["apply"].since_s, more), *self._behind())
        others = [
            wait for edge, wait in waits.items() if edge not in ("weights", "permit", "probation", *_BETWEEN_TURNS)
        ]
        if others:
            return (Link("Rollouter", f"waits on {others[0].edge}", others[0].since_s, _tasks(others[0]), "unknown"),)
        return (Link("Rollouter", "waits on nothing it knows of", None, "at work on its own event loop", "busy"),)

    def _too_few(self, books: Books) -> bool:
        """What is under way cannot fill a lease, and the gate keeps out what would."""
        queue = self._state.queue
        under_way = books.fed - books.num_dropped
        if queue is None or under_way < queue.paced_to:
            return False
        all_fed = queue.total_samples is not None and under_way >= queue.total_samples
        return not all_fed and books.ready + books.running < self._state.samples_per_lease

    def _reward(self, wait: Wait) -> tuple[Link, ...]:
        more = "see reward.function; reward.timeout_s bounds each call"
        return (
            Link("Rollouter", "waits on rewards", wait.since_s, _tasks(wait)),
            Link("reward function", "has not answered", wait.since_s, more, "reward"),
        )

    def _engine(self, wait: Wait, what: str) -> tuple[Link, ...]:
        more = _tasks(wait)
        for held in self._waits("rollouter"):
            if held.edge == "probation":
                more += f"{'; ' if more else ''}{held.count} held back since an engine crashed in their presence"
            elif held.edge in ("tool", "user", "agent"):
                what_for = _BETWEEN_TURNS[held.edge]
                more += f"{'; ' if more else ''}{held.count} {what_for} under way, the longest for {held.since_s:.0f} s"
        return (Link("Rollouter", f"waits on {what}", wait.since_s, more), self._replicas())

    def _end(self) -> tuple[Link, ...]:
        """The Trainer is done; what is left is the Rollouter's."""
        if gone := self._gone("rollouter", "Rollouter"):
            return (gone,)
        waits = {wait.edge: wait for wait in self._waits("rollouter")}
        if (apply := waits.get("apply")) is not None:
            return (Link("Rollouter", "applies the last version", apply.since_s), *self._behind())
        if (validation := waits.get("validation")) is not None:
            return (Link("Rollouter", "validates", validation.since_s, _tasks(validation)), self._replicas())
        return (Link("Rollouter", "is about to end", None, "the last version is served", "busy"),)

    # ------------------------------------------------------------------------------------------------ the gate

    def _gate(self, waits: Mapping[str, Wait]) -> tuple[Link, ...]:
        state, queue = self._state, self._state.queue
        assert queue is not None  # `_samples` has seen to it
        books = queue.books
        under_way = books.fed - books.num_dropped
        if queue.total_samples is not None and under_way >= queue.total_samples:
            more = f"all {queue.total_samples} samples of the run are fed, {books.leased} are leased"
            return (
                Link("Rollouter", "has nothing left to admit", waits["permit"].since_s),
                Link("Trainer", "holds the last samples", None, more, "gate"),
            )
        if under_way < queue.paced_to:
            more = f"{queue.paced_to - under_way} permits are free: they are about to be taken"
            return (
                Link("Rollouter", "waits on permits", waits["permit"].since_s),
                Link("queue", "grants them", None, more, "busy"),
            )
        more = f"{under_way} of {queue.paced_to} samples that version {queue.version} permits are fed"
        gate = Link("Rollouter", "waits on staleness gate", waits["permit"].since_s, more)
        applied = Edition(queue.lineage, queue.version)
        published = state.published
        if published is None or published <= applied:
            return (gate, *self._nothing_newer(applied, books))
        return (gate, Link(f"version {published.version}", "not applied"), *self._not_applied(published, waits))

    def _nothing_newer(self, applied: Edition, books: Books) -> tuple[Link, ...]:
        state = self._state
        if gone := self._store():
            return (gone,)
        newest = Edition(state.lineage, state.version)
        if state.published is None and newest.version > 0:
            return (
                Link("store", "has no version", None, "it has lost its memory; the Trainer offers it anew", "store"),
            )
        if newest > applied:
            return (Link(f"version {newest.version}", "not in the store", None, "it is being published", "store"),)
        more = f"version {applied.version} is the newest; {books.ready} READY, {books.leased} LEASED"
        return (Link("Trainer", "has everything that is permitted", None, more, "gate"),)

    def _not_applied(self, published: Edition, waits: Mapping[str, Wait]) -> tuple[Link, ...]:
        validation, apply = waits.get("validation"), waits.get("apply")
        if validation is not None and apply is None:
            at_work = Link("Rollouter", "validates the version before it", validation.since_s, _tasks(validation))
            return (at_work, self._replicas())
        if apply is not None:
            return self._behind(published)
        if gone := self._store():
            return (gone,)
        behind = [report for report in self._current() if Edition(report.lineage, report.version) < published]
        if behind and (lagging := self._lagging_replica(behind)):
            return (lagging,)
        more = "it has not begun to apply it, or to tell the queue"
        return (Link("Rollouter", "has not acted on it yet", None, more, "busy"),)

    def _behind(self, published: Edition | None = None) -> tuple[Link, ...]:
        """While a version is applied: the replica that is not there yet."""
        published = published or self._state.published
        current = self._current()
        behind = [r for r in current if published is not None and Edition(r.lineage, r.version) < published]
        if lagging := self._lagging_replica(behind or current):
            return (lagging,)
        if gone := self._store():
            return (gone,)
        if behind:
            first = behind[0]
            more = f"{first.phase}, {first.in_flight} requests in flight; pid {first.pid}"
            return (Link(_name(first), f"still serves version {first.version}", None, more, "replica"),)
        return (Link("replicas", "serve it", None, "the Rollouter is about to open the gate", "busy"),)

    # ------------------------------------------------------------------------------------------------ replicas, store

    def _current(self) -> list[ReplicaReport]:
        """The replicas there are: a replaced one's last report is kept for a while, behind its successor's."""
        newest_first = sorted(self._state.replicas, key=lambda report: -report.reported_at)
        return newest_first[: max(self._state.num_replicas, 1)]

    def _replicas(self) -> Link:
        current = self._current()
        if lagging := self._lagging_replica(current):
            return lagging
        if gone := self._unheard("store", "store"):
            return gone  # reports go through it, so what is known of the replicas is old
        serving = [report for report in current if report.phase in ("serving", "fetching")]
        requests = sum(report.in_flight for report in serving)
        missing = self._state.num_replicas - len(current)
        told = [f"{len(serving)} serving, {requests} requests in flight"]
        told += [f"{missing} not heard of"] if missing > 0 else []
        if not requests:
            return Link("engines", "have no request in flight", None, "; ".join(told), "engine")
        still_s = self._since(self._state.last_progress_at) if self._state.last_progress_at else 0.0
        if still_s > STILL_S:
            return Link("engines", "make no token", still_s, "; ".join(told), "engine")
        return Link("engines", "generate", None, "; ".join(told), "engine")

    def _lagging_replica(self, reports: Sequence[ReplicaReport]) -> Link | None:
        """The replica that most likely holds the others' work up; None: all are well."""
        if not self._state.num_replicas:
            return Link("engines", "are none", None, "every sample of the run is recorded", "busy")
        if not self._state.replicas:
            more = f"{self._state.num_replicas} configured; they start, or their reports do not arrive"
            return self._unheard("store", "store") or Link("replicas", "have told nothing yet", None, more, "replica")
        troubles = [(self._trouble(report), report) for report in reports]
        found = [(rank, report) for rank, report in troubles if rank > 0]
        if not found:
            return None
        well = any(rank == 0 and report.in_flight > 0 for rank, report in troubles)
        rank, report = max(found, key=lambda pair: (pair[0], -pair[1].phase_since))
        since_s = self._since(report.phase_since)
        if well and rank < 3 and since_s < SLOW_PHASE_S:
            return None
        pids = f"pid {report.pid}" + "".join(f", engine {pid}" for pid in report.engine_pids)
        if rank == 4:
            unheard_s = self._since(report.reported_at)
            more = f"last {report.phase}; {pids}; dead, stopped or hung"
            return self._unheard("store", "store") or Link(_name(report), "not heard of", unheard_s, more, "replica")
        does = {
            "starting": "starts its engine",
            "pausing": "in pause",
            "loading": "in pause, loading weights",
            "verifying": "in pause, verifying weights",
            "broken": "is broken",
        }.get(report.phase, report.phase)
        more = report.told if report.phase == "broken" and report.told else f"{report.in_flight} requests; {pids}"
        return Link(_name(report), does, since_s, more, "replica")

    def _trouble(self, report: ReplicaReport) -> int:
        if self._since(report.reported_at) > REPLICA_UNHEARD_S:
            return 4
        if report.phase == "broken":
            return 3
        if report.phase in ("pausing", "loading", "verifying"):
            return 2
        return 1 if report.phase == "starting" else 0

    def _store(self) -> Link | None:
        return self._unheard("store", "weight store")

    # ------------------------------------------------------------------------------------------------ shared

    def _gone(self, part: str, name: str) -> Link | None:
        """The driver replaces it, or it does not answer."""
        state = self._state
        if part in state.restarting:
            causes = [restart.cause for restart in state.restarts if restart.part == part and not restart.recovered_at]
            doing = [f"now it waits on {wait.edge}" for wait in self._waits(part)[:1]]
            more = "; ".join(causes[-1:] + doing)
            return Link(name, "is being restarted", self._since(state.restarting[part]), more, "restarting")
        return self._unheard(part, name)

    def _unheard(self, part: str, name: str) -> Link | None:
        """It does not answer."""
        state = self._state
        unheard_s = state.unheard_s.get(part, 0.0)
        if unheard_s > UNHEARD_S:
            pid = next((process.pid for process in state.processes if process.part == part), 0)
            more = (f"pid {pid}: " if pid else "") + "dead, stopped or hung"
            return Link(name, "has not answered", unheard_s + self._age(), more, "unheard")
        return None

    def _waits(self, part: str) -> list[Wait]:
        """What it waits on, the longest first, as of now: it told it a while ago."""
        later_s = self._age() + self._state.unheard_s.get(part, 0.0)
        waits = [wait._replace(since_s=wait.since_s + later_s) for wait in self._state.waits.get(part, ())]
        return sorted(waits, key=lambda wait: -wait.since_s)

    def _age(self) -> float:
        return self._since(self._state.written_at)

    def _since(self, time: float) -> float:
        return max(0.0, self._at - time)


def _name(report: ReplicaReport) -> str:
    return report.replica if report.replica.startswith("replica") else f"replica {report.replica}"


def _tasks(wait: Wait) -> str:
    return f"{wait.count} samples" if wait.count > 1 else ""
