"""The Rollouter's side of its workers: chooses one for each group, follows their events, and replaces lost workers.

    SampleRunner, Validator ─▶ RemoteGroup ─▶ WorkerPool ── commands ──▶ worker with the fewest groups
                               ▲ turns, sessions, trajectories, scores ◀── events ──┘
                               └ WorkerLostError: continues on another worker, with all that the lost one had reported

A `RemoteGroup` is a `TrajectoryGroup` like one that is generated in this process: crash isolation, time limits and the
turn log are the Rollouter's. A worker may die at any time, which costs its groups the time since its last reports. This
module knows workers as `WorkerLink`s, without Ray.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import anyio

from asyncrl.core.failures import AsyncRLError, DeadlineError, EngineCrashError, InfraError
from asyncrl.core.ports import RewardScorer, Score
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import Prompt, join_turns
from asyncrl.core.waits import Wait, WaitBoard
from asyncrl.profiling import profile
from rollouter.group import GroupSessions, TrajectoryGroup, is_complete
from rollouter.group_workers.worker import (
    AllowSession,
    Command,
    EndGroup,
    GroupGenerated,
    ScoreTrajectories,
    SessionCrashed,
    SessionEnded,
    SessionGenerates,
    SessionPlaced,
    StartGroup,
    TrajectoriesEnded,
    TrajectoriesScored,
    TurnReported,
    UseLentReplicas,
    WorkerEvent,
    WorkerReport,
    WorkerState,
    number_in_group,
)
from rollouter.requests import BASELINE, number_of

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a worker that could not be started is started again."""
REPORTED_LOSSES = 100


class WorkerLostError(InfraError):
    """A worker died, or did not answer. Its groups continue on another one."""


class WorkerLink(Protocol):
    """The connection to one worker process. Every method raises `InfraError` if the process is gone."""

    async def post(self, commands: Sequence[Command]) -> None:
        """See `GroupWorker.post`."""

    async def take(self) -> WorkerReport:
        """See `GroupWorker.take`."""

    async def kill(self) -> None:
        """End the process, whatever its state. Bounded in time; raises nothing."""


class LostWorker(NamedTuple):
    """The loss of one worker, or a start of its successor that failed, for the driver."""

    number: int
    """How many were lost before, plus 1."""
    worker: int
    at: float
    """Wall clock."""
    cause: str
    recovered_at: float | None = None
    """When its successor was ready; None until then."""


class ScoreSlot:
    """The score of one trajectory, once it is known."""

    def __init__(self) -> None:
        self._known = anyio.Event()
        self._outcome: Score | AsyncRLError | None = None

    @property
    def is_known(self) -> bool:
        return self._outcome is not None

    def set(self, outcome: Score | AsyncRLError) -> None:
        self._outcome = outcome
        self._known.set()

    async def get(self) -> Score:
        """Return the score, or raise the scorer's error; `WorkerLostError` if the worker was lost before."""
        await self._known.wait()
        if isinstance(self._outcome, AsyncRLError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class WorkerCall:
    """One group, or one call of the scorer, on a worker."""

    def __init__(self) -> None:
        self.send, self.events = anyio.create_memory_object_stream[list[WorkerEvent]](math.inf)
        self.slots: dict[int, ScoreSlot] = {}
        """By the keys of `TrajectoriesScored`."""
        self.is_open = True
        """Whether its events are read. A worker scores after the end of generation, too."""

    @property
    def is_done(self) -> bool:
        return not self.is_open and all(slot.is_known for slot in self.slots.values())

    def receive(self, events: list[WorkerEvent]) -> None:
        for event in events:
            if isinstance(event, TrajectoriesScored):
                for key, outcome in event.scores.items():
                    self.slots.setdefault(key, ScoreSlot()).set(outcome)
            elif isinstance(event, TrajectoriesEnded):
                for trajectory in event.trajectories:
                    self.slots.setdefault(number_in_group(trajectory), ScoreSlot())
        if self.is_open:
            self.send.send_nowait(events)


class PoolWorker:
    """One worker process, and its calls."""

    def __init__(self, place: int, link: WorkerLink) -> None:
        self.place = place
        self.link = link
        self.calls: dict[int, WorkerCall] = {}
        self.state: WorkerState | None = None
        self._commands: list[Command] = []
        self._posted = anyio.Event()

    @property
    def num_open(self) -> int:
        return sum(call.is_open for call in self.calls.values())

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self._posted.set()

    async def follow(self, limit_s: float) -> None:
        """Send commands and receive events until the worker is lost.

        Raises:
            InfraError: it is lost.
            BugError, UserCodeError: it failed as a whole, and another one would fail, too.
        """
        async with task_group() as tasks:
            tasks.start_soon(self._send)
            while True:
                try:
                    with anyio.fail_after(limit_s):
                        report = await self.link.take()
                except TimeoutError:
                    raise DeadlineError(f"it did not answer within {limit_s:g} s (timeouts.probe_s)") from None
                self._receive(report)

    async def _send(self) -> None:
        while True:
            await self._posted.wait()
            self._posted = anyio.Event()
            commands, self._commands = self._commands, []
            await self.link.post(commands)

    def _receive(self, report: WorkerReport) -> None:
        by_call: defaultdict[int, list[WorkerEvent]] = defaultdict(list)
        for number, event in report.events:
            by_call[number].append(event)
        for number, events in by_call.items():
            if (call := self.calls.get(number)) is not None:
                call.receive(events)
                self.forget_if_done(number)
        if report.state is not None:
            self.state = report.state
            profile.ingest(f"worker-{self.place}", report.profile_events, sent=report.num_profile_events)
            for part, forwarded, sent in report.forwarded:
                profile.ingest(part, forwarded, sent=sent)

    def forget_if_done(self, number: int) -> None:
        if self.calls[number].is_done:
            del self.calls[number]

    def lose(self, error: WorkerLostError) -> None:
        """End all calls."""
        for call in self.calls.values():
            call.send.close()
            for slot in call.slots.values():
                if not slot.is_known:
                    slot.set(error)


class WorkerPool:
    """The workers of one Rollouter. Enter `running` once."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        start: Callable[[int], Awaitable[WorkerLink]],
        *,
        limit_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            links: The first workers.
            start: Starts a worker at a place. Raises `InfraError` if a further try may succeed.
            limit_s: Time within which a worker has to report.
        """
        self.waits = WaitBoard()
        """Replaced by the Rollouter's board."""
        self.scores: WeakKeyDictionary[Trajectory, ScoreSlot] = WeakKeyDictionary()
        """The scores of trajectories that workers have generated."""
        self._lent_open = False
        self._links = links
        self._start = start
        self._limit_s = limit_s
        self._wall_clock = wall_clock
        self._workers: dict[int, PoolWorker] = {}
        self._changed = anyio.Event()
        self._numbers = itertools.count()
        self._lost: dict[int, LostWorker] = {}
        """The newest `REPORTED_LOSSES`, by number."""
        self._num_lost = 0
        self._agent_counts: Counter[str] = Counter()
        """Those of lost workers."""

    def use_lent(self, is_open: bool) -> None:
        """Let all workers, also later ones, give calls to the replicas on lent GPUs, or no further ones."""
        self._lent_open = is_open
        for worker in self._workers.values():
            worker.post(UseLentReplicas(is_open))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the workers running during the block, and then end them.

        Raises (inside an exception group):
            BugError, ConfigError, UserCodeError: a worker failed, and another one would fail, too.
        """
        async with anyio.create_task_group() as tasks:
            for place, link in enumerate(self._links):
                tasks.start_soon(self._keep, place, link)
            yield
            tasks.cancel_scope.cancel()

    async def _keep(self, place: int, link: WorkerLink) -> None:
        while True:
            worker = self._workers[place] = PoolWorker(place, link)
            if self._lent_open:
                worker.post(UseLentReplicas(True))
            self._changed.set()
            self._changed = anyio.Event()
            try:
                await worker.follow(self._limit_s)
            except InfraError as error:
                lost = self._lose(worker, error)
            finally:
                with anyio.CancelScope(shield=True):
                    await link.kill()
            link = await self._replacement(lost)

    def _lose(self, worker: PoolWorker, error: InfraError) -> LostWorker:
        del self._workers[worker.place]
        logger.warning("worker %d is lost, %d samples go on elsewhere: %s", worker.place, worker.num_open, error.brief)
        if worker.state is not None:
            self._agent_counts.update(worker.state.agent)
        worker.lose(WorkerLostError(f"worker {worker.place} is lost: {error.message}", error.cause))
        return self._record_loss(worker.place, error)

    async def _replacement(self, lost: LostWorker) -> WorkerLink:
        """Start workers until one works. Each that does not start is a loss of its own, which the driver charges."""
        while True:
            try:
                link = await self._start(lost.worker)
            except InfraError as error:
                logger.warning("worker %d did not start: %s", lost.worker, error.brief)
                lost = self._record_loss(lost.worker, error)
                await anyio.sleep(RETRY_S)
                continue
            if lost.number in self._lost:
                self._lost[lost.number] = lost._replace(recovered_at=self._wall_clock())
            return link

    def _record_loss(self, place: int, error: InfraError) -> LostWorker:
        self._num_lost += 1
        lost = LostWorker(self._num_lost, place, self._wall_clock(), error.message.splitlines()[0])
        self._lost[lost.number] = lost
        self._lost.pop(lost.number - REPORTED_LOSSES, None)
        return lost

    @asynccontextmanager
    async def call(self, command: Callable[[int], Command]) -> AsyncIterator[tuple[PoolWorker, int, WorkerCall]]:
        """Make a call to the worker with the fewest calls. If the block is left by an exception, cancel the call.

        Args:
            command: Returns the command that begins the call with this number.
        """
        while not self._workers:
            with self.waits.waiting("worker"):
                await self._changed.wait()
        worker = min(self._workers.values(), key=lambda worker: worker.num_open)
        number, call = next(self._numbers), WorkerCall()
        worker.calls[number] = call
        worker.post(command(number))
        try:
            with call.send, call.events:
                yield worker, number, call
        except BaseException:
            worker.post(EndGroup(number))
            del worker.calls[number]
            raise
        call.is_open = False
        worker.forget_if_done(number)

    def status(self) -> Mapping[str, Any]:
        """Return plain values for the driver: the running workers, and the latest losses."""
        return {
            "workers": [
                {"worker": one.place, "pid": one.state.pid, "node_id": one.state.node_id, "groups": one.num_open}
                for one in self._workers.values()
                if one.state is not None
            ],
            "lost_workers": list(self._lost.values()),
        }

    def agent_status(self) -> Mapping[str, float]:
        """Return the sums over all workers of `ConversationAgent.status`."""
        counts = Counter(self._agent_counts)
        for worker in self._workers.values():
            if worker.state is not None:
                counts.update(worker.state.agent)
        return dict(counts)

    def open_waits(self) -> list[Wait]:
        """Return the waits inside workers, one for each edge."""
        edges: defaultdict[str, list[Wait]] = defaultdict(list)
        for worker in self._workers.values():
            for wait in worker.state.waits if worker.state is not None else ():
                edges[wait.edge].append(wait)
        return [
            Wait(
                edge, sum(one.count for one in waits), max(one.since_s for one in waits), any(w.bounded for w in waits)
            )
            for edge, waits in edges.items()
        ]


class WorkerScorer:
    """A `RewardScorer` whose scores come from workers. They score what they generate without being asked."""

    def __init__(self, pool: WorkerPool, scorer: RewardScorer) -> None:
        """`scorer` is equal to the one that the workers use."""
        self._pool = pool
        self.whole_group = scorer.whole_group

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """See `ports.RewardScorer`. Trajectories of records and of lost workers are sent to a worker."""
        slots = [slot for one in trajectories if (slot := self._pool.scores.get(one)) is not None]
        if len(slots) == len(trajectories):
            with suppress(WorkerLostError):
                return [await slot.get() for slot in slots]
        while True:
            with suppress(WorkerLostError):
                async with self._pool.call(lambda number: ScoreTrajectories(number, prompt, tuple(trajectories))) as (
                    _,
                    _,
                    call,
                ):
                    slots = [call.slots.setdefault(place, ScoreSlot()) for place in range(len(trajectories))]
                    return [await slot.get() for slot in slots]


@dataclass
class RemoteGroup(TrajectoryGroup):
    """A group that a worker generates and scores."""

    _: KW_ONLY
    pool: WorkerPool
    _crashed: dict[str, EngineCrashError] = field(default_factory=dict)
    """The sessions that were in flight in an engine crash and are not allowed to try again yet."""

    async def _generate(self) -> None:
        with self._events:
            while self.missing and not self._has_enough():
                with suppress(WorkerLostError):
                    await self._on_worker()
                    return

    async def _on_worker(self) -> None:
        """Generate the group on one worker.

        Raises:
            WorkerLostError: the worker was lost.
            Others: see `TrajectoryGroup.running`.
        """

        def start(number: int) -> StartGroup:
            turns, ended = dict(self.turns), dict(self.ended)
            return StartGroup(number, self.request, self.session, turns, ended, self.keep_surplus, dict(self._crashed))

        with _WorkerSessions(self.sessions) as sessions:
            async with self.pool.call(start) as (worker, number, call), task_group() as tasks:

                async def allow(session: str, error: EngineCrashError) -> None:
                    await self.sessions.wait_until_allowed(session, error)
                    del self._crashed[session]
                    worker.post(AllowSession(number, session))

                async for events in call.events:
                    await self._take_turns(events)
                    for event in events:
                        match event:
                            case SessionCrashed(session, error):
                                sessions.crashed(session)
                                self._crashed[session] = error
                                tasks.start_soon(allow, session, error)
                            case TrajectoriesEnded(trajectories):
                                self._take(trajectories, call)
                            case GroupGenerated(None):
                                tasks.cancel_scope.cancel()  # sessions that still wait are surplus
                                return
                            case GroupGenerated(AsyncRLError() as failure):
                                raise failure
                            case _:
                                sessions.apply(event)
                raise WorkerLostError(f"worker {worker.place} is lost")

    async def _take_turns(self, events: Sequence[WorkerEvent]) -> None:
        reported = [event for event in events if isinstance(event, TurnReported)]
        for key, rest in reported:
            self.turns[key] = join_turns(self.turns.get(key), rest)
        # Turns that are reported together are recorded together, which is one write.
        if complete := {key: turn for key, _ in reported if is_complete(turn := self.turns[key])}:
            await self._record(complete)

    def _take(self, trajectories: Sequence[Trajectory], call: WorkerCall) -> None:
        for trajectory in trajectories:
            number = number_in_group(trajectory)
            key = BASELINE if number == number_of(BASELINE) else str(number)
            self._end(key, trajectory)
            if (used := self.ended.get(key)) is not None:
                self.pool.scores[used] = call.slots[number]


class _WorkerSessions(ExitStack):
    """The sessions of a group on one worker. None of them has a replica once the context ends."""

    def __init__(self, sessions: GroupSessions) -> None:
        super().__init__()
        self._sessions = sessions
        self._generating: dict[str, ExitStack] = {}
        self._placed: set[str] = set()
        self.callback(self._leave)

    def apply(self, event: WorkerEvent) -> None:
        match event:
            case SessionGenerates(session, True):
                stack = self._generating[session] = ExitStack()
                stack.enter_context(self._sessions.generating(session))
            case SessionGenerates(session, False):
                self._generating.pop(session).close()
            case SessionPlaced(session, replica):
                self._sessions.place(session, replica)
                self._placed.add(session)
            case SessionEnded(session):
                self._sessions.end(session)
                self._placed.discard(session)

    def crashed(self, session: str) -> None:
        self._placed.discard(session)

    def _leave(self) -> None:
        for stack in self._generating.values():
            stack.close()
        for session in self._placed:
            self._sessions.place(session, "")
