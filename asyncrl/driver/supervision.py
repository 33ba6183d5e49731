"""Supervision without Ray: probe a part, replace a failed one, and detect replaced or unresponsive replicas.

    run ─▶ records ─▶ ends by itself
     ▲        │ InfraError, or no answer to a probe
     │        ▼
     │     budget ─▶ kill ─▶ claim ─▶ start
     └──────────────────────────────────┘

Other failures (the configuration, user code, a bug, a full disk) would recur, so they end the run. So does a failure
in `release_samples`, because the part did not cause it. A part that dies after it was asked to stop counts as stopped.
Serve replaces a replica that ends; `ReplicaWatch` detects that by a new name in place of a replica that is silent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import anyio

from asyncrl.core.failures import DeadlineError, DiskFullError, InfraError
from asyncrl.core.ports import PartName, ReplicaReport
from asyncrl.core.records import RunRecord
from asyncrl.observe.status.run_status import Restart

TICK_S = 1.0
QUIET_S = 5.0
"""Time without a report after which a replica may be the one that a new replica replaces. It reports once a second."""
RETRY_S = 2.0
"""Time limit of a probe's second try: a healthy part answers within milliseconds."""
MAX_GONE = 1_000
"""Replicas that are remembered after their end. The weight store forgets a replica after some minutes."""
LATE_WAKEUP_S = 1.0
"""If a deadline fires this late, this process itself was delayed."""

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
PutRecord = Callable[[RunRecord], Awaitable[None]]


class SupervisedPart(Protocol):
    """The processes of one part, one after another."""

    name: PartName

    async def kill(self) -> None:
        """Kill the process and all its descendants, whatever its state. Bounded in time."""

    async def release_samples(self, incarnation: int) -> str:
        """Give back the samples that the previous process held, and return a description for users.

        Raises:
            AsyncRLError: the run cannot continue.
        """

    async def start(self, incarnation: int) -> None:
        """Start the next process. Raises `InfraError` if it did not start; a further try may succeed."""

    def run(self) -> AsyncGenerator[RunRecord, None]:
        """Yield the records of the running process until it ends."""

    async def stop(self) -> None:
        """Ask the running process for an orderly end."""


class RestartBudget:
    """Limits the restarts of one part: at most `max_restarts` within any `window_s` seconds, and at most that many in a
    row without progress of the run. A failure that recurs at the same step is not accidental, however much time passes
    in between.
    """

    def __init__(self, part: str, max_restarts: int, window_s: float, *, unit: str = "step") -> None:
        """
        Args:
            part: the part's name in messages, such as `Rollouter`.
            unit: what `reached` counts, in messages.
        """
        self._part = part
        self._unit = unit
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._failed_at: deque[float] = deque()
        self._excused = 0
        """Number of coming failures that do not count."""
        self._furthest = -1
        self._without_progress = 0
        """Failures since the run last made progress."""

    def reached(self, step: int) -> None:
        """Record that the run has completed this step (`unit`), possibly again after a rewind."""
        if step > self._furthest:
            self._furthest, self._without_progress = step, 0

    def excuse(self, failures: int) -> None:
        """Do not count this many failures, reported already or about to be: the part did not cause them."""
        for _ in range(failures):
            if self._failed_at:
                self._failed_at.popleft()
                self._without_progress = max(0, self._without_progress - 1)
            else:
                self._excused += 1

    def spend(self, now_s: float, error: InfraError) -> int:
        """Charge the failure `error` at `now_s`, which never decreases. Return the number of restarts spent so far.

        Raises:
            InfraError: the budget is spent. `error` itself is raised if a restart would fail the same way.
        """
        if isinstance(error, DiskFullError):
            raise error
        if self._max_restarts == 0:
            raise self._spent("failed", error)
        if self._excused:
            self._excused -= 1
            return len(self._failed_at)
        self._failed_at.append(now_s)
        while self._failed_at[0] <= now_s - self._window_s:
            self._failed_at.popleft()
        if (failures := len(self._failed_at)) > self._max_restarts:
            raise self._spent(f"failed {failures} times within {self._window_s:g} s", error)
        self._without_progress += 1
        if self._without_progress > self._max_restarts:
            unit = self._unit
            where = (
                f"and the run did not get past {unit} {self._furthest}" if self._furthest >= 0 else f"before any {unit}"
            )
            raise self._spent(f"failed {self._without_progress} times in a row {where}", error)
        return failures

    def _spent(self, how: str, error: InfraError) -> InfraError:
        return InfraError(
            f"the {self._part} {how} (recovery.max_restarts={self._max_restarts})"
            f"{'; the last time' if self._max_restarts else ''}: {error.message}",
            error.cause,
        )


class _RunStopped(Exception):
    """The run was asked to stop while the part was being replaced."""


@dataclass(eq=False)
class Supervisor:
    """Runs a part until it ends by itself, and replaces its process when that fails."""

    part: SupervisedPart
    """Its first process is started before `follow` is called."""
    budget: RestartBudget
    on_restart: Callable[[Restart], None]
    """Called when a restart begins, and again when the new process works."""
    incarnation: int = 1
    loss: str = ""
    """The work that is lost without an orderly stop, for log messages."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    replacing_since: float | None = field(default=None, init=False)
    """Start of the current restart, wall clock; None: a process is up, or has ended by itself."""
    _restart: Restart | None = field(default=None, init=False)
    """The restart whose process does not work yet."""
    _scope: anyio.CancelScope | None = field(default=None, init=False)
    _unresponsive: InfraError | None = field(default=None, init=False)
    _stopping: bool = field(default=False, init=False)

    async def follow(self, put: PutRecord) -> None:
        """Pass every record to `put` until a process of the part ends by itself or is stopped.

        Raises:
            AsyncRLError: the part failed and cannot be replaced; or what `put` raised.
        """
        await self._follow_from(await self._run(put), put)

    async def follow_again(self, put: PutRecord) -> None:
        """Start a new process after one that ended by itself, because there is work again, and `follow` it."""
        try:
            error = await self._start_next()
        except _RunStopped:
            await self._abandon_restart()
            return
        await self._follow_from(error or await self._run(put), put)

    async def stop(self) -> None:
        """Ask the process to end, or do not start the next one; `follow` returns later.

        If the request fails, the process is dead or hangs, which its record stream or its probe reports.
        """
        self._stopping = True
        if self.replacing_since is not None:
            self._cancel()
            return
        try:
            await self.part.stop()
        except InfraError as error:
            logger.warning("the %s could not be asked to stop: %s", self.part.name, error.brief)

    def replace_unresponsive(self, error: InfraError) -> None:
        """Replace the running process, because it no longer answers."""
        if self.replacing_since is None and self._unresponsive is None:
            self._unresponsive = error
            self._cancel()

    def mark_working(self) -> None:
        """Record that the running process works, which completes a restart."""
        if self._restart is not None and self.replacing_since is None:
            self.on_restart(replace(self._restart, recovered_at=self.wall_clock()))
            self._restart = None

    async def _follow_from(self, error: InfraError | None, put: PutRecord) -> None:
        """Continue after a process failed with `error`; None: it ended by itself."""
        while error is not None:
            if self._stopping:
                if isinstance(error, DiskFullError):  # the part could not save its work
                    raise error
                logger.warning("the %s failed while the run was stopping%s: %s", self.part.name, self.loss, error.brief)
                return
            try:
                error = await self._replace(error) or await self._run(put)
            except _RunStopped:
                logger.warning("the %s was being replaced when the run was stopped%s", self.part.name, self.loss)
                await self._abandon_restart()
                return

    async def _run(self, put: PutRecord) -> InfraError | None:
        """Follow the running process. Return its failure; None: it ended by itself."""
        async with aclosing(self.part.run()) as records:
            while True:
                with anyio.CancelScope() as self._scope:
                    if self._unresponsive is not None:
                        break
                    try:
                        record = await anext(records)
                    except StopAsyncIteration:
                        return None
                    except InfraError as error:
                        return error
                if self._scope.cancelled_caught:
                    break
                await put(record)
        return self._unresponsive

    async def _replace(self, error: InfraError) -> InfraError | None:
        """Replace the process that failed with `error`. Return the error if the new one did not start, else None."""
        failed_at = self.wall_clock()
        self.replacing_since = failed_at
        spent = self.budget.spend(self.clock(), error)
        cause = error.message.splitlines()[0] if error.message else type(error).__name__
        logger.info("the %s failed and is replaced, restart %d: %s", self.part.name, spent, error)
        self._restart = Restart(self.part.name, self.incarnation + 1, failed_at, cause)
        self.on_restart(self._restart)
        return await self._start_next()

    async def _start_next(self) -> InfraError | None:
        self.incarnation += 1
        self.replacing_since = self.wall_clock()
        self._unresponsive = None
        with anyio.CancelScope() as self._scope:
            if self._stopping:
                raise _RunStopped
            await self.part.kill()
            detail = await self.part.release_samples(self.incarnation)
            if self._restart is not None:
                self._restart = replace(self._restart, detail=detail)
            try:
                await self.part.start(self.incarnation)
            except InfraError as error:
                return error
            # The run may be stopped just when the start succeeds, too late to cancel it.
            if not self._stopping:
                self.replacing_since = None
                return None
        raise _RunStopped

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _abandon_restart(self) -> None:
        await self.part.kill()
        self.replacing_since = self._restart = None


async def probe(
    ask: Callable[[float], Awaitable[Answer | None]],
    limit_s: float,
    *,
    on_answer: Callable[[Answer], Awaitable[None]],
    on_timeout: Callable[[DeadlineError], Awaitable[None]],
) -> None:
    """Ask a part for its status about once a second, until cancelled. Each part has a separate probe.

    Args:
        ask: returns the part's answer within the given seconds; None: there is no process at the moment.
        limit_s: time limit of an answer.
        on_answer: awaited with each answer.
        on_timeout: awaited when a second try times out as well. If this process was suspended or starved, a deadline
            may fire before an answer that has arrived is read: in that case the second try is repeated.

    Raises:
        AsyncRLError: what `ask` raised other than `DeadlineError`, or what the callbacks raised.
    """
    while True:
        timeout: DeadlineError | None = None
        within_s = limit_s
        while True:
            started_s = anyio.current_time()
            try:
                answer = await ask(within_s)
            except DeadlineError as error:
                was_suspended = anyio.current_time() - started_s > within_s + LATE_WAKEUP_S
                if timeout is not None and not was_suspended:
                    await on_timeout(timeout)
                    break
                timeout, within_s = timeout or error, min(limit_s, RETRY_S)
            else:
                if answer is not None:
                    await on_answer(answer)
                break
        await anyio.sleep(TICK_S)


class ReplicaChanges(NamedTuple):
    """What changed since the last update."""

    replaced: tuple[Restart, ...] = ()
    """New replicas that replace others."""
    recovered: tuple[Restart, ...] = ()
    """Completed restarts: their replica serves now."""
    unresponsive: tuple[ReplicaReport, ...] = ()
    """Last reports of replicas that stopped reporting; each appears once per silence."""
    missing: tuple[ReplicaReport, ...] = ()
    """Unresponsive replicas that were not replaced within the start limit; each appears once."""
    num_without_room: int = 0
    """Unresponsive replicas without which the run goes on, because the cluster has no room for their successors."""


@dataclass(eq=False)
class ReplicaWatch:
    """Tracks every replica by its name since the run began.

    A replica that leaves as planned marks its last report, unless it still starts when Serve ends it because the run
    wants fewer than before. If a replica joins while enough others report, it is either the successor of one that will
    leave (its node is drained), or of one that has just ended without a word. It counts as a replacement once one of
    them is silent.
    """

    num_replicas: int | None
    """The number that the run wants; None: the application decides."""
    limit_s: float
    """A replica that reports nothing for longer is unresponsive."""
    start_s: float
    """Time for a replacement to report that it starts. While it waits for room, no time passes as long as others
    serve."""
    _present: dict[str, ReplicaReport] = field(default_factory=dict, init=False)
    """Last report of each replica that is not known to be gone."""
    _joined: dict[str, float] = field(default_factory=dict, init=False)
    """When replicas joined although there were enough, if they have not been found to replace another one."""
    _gone: dict[str, None] = field(default_factory=dict, init=False)
    """The newest `MAX_GONE` replicas that are not expected to report again."""
    _num_lost: int = field(default=0, init=False)
    """Replicas that were replaced."""
    _presumed_gone: dict[str, ReplicaReport] = field(default_factory=dict, init=False)
    """Last report of each replica that a new one seems to have replaced, but that may only be unresponsive."""
    _starting: dict[str, Restart] = field(default_factory=dict, init=False)
    _updated_at: float | None = field(default=None, init=False)
    _wanted_before: int = field(default=0, init=False)
    _num_unneeded: int = field(default=0, init=False)
    """Replicas that Serve may still end because the run has wanted fewer."""
    _unresponsive_since: dict[str, float] = field(default_factory=dict, init=False)
    _missing: set[str] = field(default_factory=set, init=False)

    def update(
        self,
        reports: Sequence[ReplicaReport],
        now: float,
        *,
        store_since: float = 0.0,
        has_room: bool = True,
    ) -> ReplicaChanges:
        """Return what changed. Times are of the wall clock.

        Args:
            reports: the reports in the weight store. They may include replicas that are gone, and a restarted store
                may have only a few.
            now: when the store sent them.
            store_since: when the store's process started to receive reports; silence counts from then at the earliest.
            has_room: whether the cluster has room for all replicas that Serve starts.
        """
        unseen_s = now - self._updated_at if self._updated_at is not None else 0.0
        self._updated_at = now
        if unseen_s > self.limit_s:  # This process was suspended, and successors may be up that it does not know of.
            self._unresponsive_since = {name: at + unseen_s for name, at in self._unresponsive_since.items()}
        wanted = self.num_replicas or 0
        self._num_unneeded += max(0, self._wanted_before - wanted)
        self._wanted_before = wanted
        recovered: list[Restart] = []
        for report in sorted(reports, key=lambda report: report.reported_at):
            name = report.replica
            if report.phase == "leaving":
                self._forget(name)
            elif name in self._presumed_gone and report.reported_at > self._presumed_gone[name].reported_at:
                # This replica reports again, so the new one replaced another, which fell silent at about the same time.
                del self._presumed_gone[name]
                del self._gone[name]
                if self.num_replicas is not None and (other := self._most_silent()) is not None:
                    self._remove(other)
            if name in self._gone:
                continue
            if name not in self._present and (self.num_replicas is None or len(self._present) >= self.num_replicas):
                self._joined[name] = now
            self._present[name] = report
            if report.phase == "serving" and name in self._starting:
                recovered.append(replace(self._starting.pop(name), recovered_at=report.reported_at))
        replaced = tuple(self._replacements(now, store_since))
        if not self._is_surplus() and all(report.phase != "starting" for report in self._present.values()):
            self._num_unneeded = 0
        return ReplicaChanges(replaced, tuple(recovered), *self._silent(now, store_since, has_room))

    def _replacements(self, now: float, store_since: float) -> Iterator[Restart]:
        """Yield a restart for each pair of a replica that has joined and one that is quiet."""
        if not self._is_surplus():
            self._joined.clear()
        for name, joined_at in tuple(self._joined.items()):
            old = self._most_silent()
            if old is not None and (old.phase == "broken" or now - max(old.reported_at, store_since) > QUIET_S):
                del self._joined[name]
                if old.phase == "starting" and self._num_unneeded:
                    self._forget(old.replica)
                else:
                    yield self._replace(old, name)
            elif self.num_replicas is None and now - joined_at > self.limit_s:
                del self._joined[name]

    def _is_surplus(self) -> bool:
        return self.num_replicas is None or len(self._present) > self.num_replicas

    def _silent(
        self, now: float, store_since: float, has_room: bool
    ) -> tuple[tuple[ReplicaReport, ...], tuple[ReplicaReport, ...], int]:
        """Return the unresponsive and the missing replicas, and the number of those without room for a successor, see
        `ReplicaChanges`. A replica that is not needed any more has left without its last report."""

        def is_silent(report: ReplicaReport) -> bool:
            return now - max(report.reported_at, store_since) > self.limit_s

        silent = {name: report for name, report in self._present.items() if is_silent(report)}
        unresponsive = [report for name, report in silent.items() if name not in self._unresponsive_since]
        for name in tuple(silent):
            if self._is_surplus():
                self._forget(name)
                del silent[name]
        others_serve = any(
            name not in silent and report.phase not in ("starting", "broken") for name, report in self._present.items()
        )
        goes_on = others_serve and not has_room
        self._unresponsive_since = {
            name: now if goes_on else self._unresponsive_since.get(name, now) for name in silent
        }
        missing = [
            name
            for name in silent
            if now - max(self._unresponsive_since[name], store_since) > self.start_s and name not in self._missing
        ]
        self._missing.update(missing)
        presumed_gone = [report for report in self._presumed_gone.values() if is_silent(report)]
        for report in presumed_gone:
            del self._presumed_gone[report.replica]
        num_without_room = len(silent) if goes_on else 0
        return (*unresponsive, *presumed_gone), tuple(silent[name] for name in missing), num_without_room

    def _most_silent(self) -> ReplicaReport | None:
        """Return the oldest report of the replicas that a new one may replace."""
        before = [report for name, report in self._present.items() if name not in self._joined]
        return min(before, key=lambda report: report.reported_at, default=None)

    def _replace(self, old: ReplicaReport, name: str) -> Restart:
        """Record that the replica `name` replaces the one of the report `old`."""
        self._remove(old)
        self._starting.pop(old.replica, None)
        self._num_lost += 1
        cause = old.error or f"replica {old.replica} (pid {old.pid}) or its engine ended or hung"
        restart = Restart("replica", self._num_lost + 1, old.reported_at, cause, detail=f"replica {name}")
        self._starting[name] = restart
        return restart

    def _remove(self, old: ReplicaReport) -> None:
        """Remove a replica that may only be unresponsive."""
        del self._present[old.replica]
        self._add_gone(old.replica)
        if old.replica not in self._unresponsive_since:
            self._presumed_gone[old.replica] = old

    def _forget(self, name: str) -> None:
        """Remove a replica that has left as planned."""
        if name not in self._gone:
            self._num_unneeded = max(0, self._num_unneeded - 1)
        self._add_gone(name)
        for held in (self._present, self._presumed_gone, self._starting, self._joined):
            held.pop(name, None)

    def _add_gone(self, name: str) -> None:
        self._gone[name] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
