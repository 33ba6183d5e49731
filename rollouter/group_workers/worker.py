"""The worker's side: generates and scores groups, and reports to the Rollouter what becomes of them. Pure of Ray.

    Rollouter ── commands: start, allow, end a group; score ──▶ GroupWorker ──▶ GroupGeneration ─▶ scorer
        ◀── events of all groups together, about as often as the Rollouter can read them ──┘

The Rollouter keeps the decisions: permits, slots, crash isolation, time limits, drops. A worker asks for none of them
except, after an engine crash, for the permission to try a session again. It scores the trajectories that it generates
without being asked, as soon as the scorer allows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncrl.core.failures import AsyncRLError, BugError, EngineCrashError
from asyncrl.core.ports import EngineFleet, RewardScorer, Score
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import SampleRequest, Trajectory
from asyncrl.core.types import Prompt, Turn, rest_of_turn
from asyncrl.core.waits import Wait, WaitBoard
from asyncrl.profiling import profile
from rollouter.agent.conversation import ConversationAgent
from rollouter.group import GroupGeneration

REPORT_S = 1.0
"""Longest time until a report; it is also a sign of life."""


class StartGroup(NamedTuple):
    """Generate and score a group. The fields are those of `TrajectoryGroup`."""

    group: int
    """The group's number, unique in the Rollouter's process."""
    request: SampleRequest
    session: str
    turns: Mapping[str, Turn]
    ended: Mapping[str, Trajectory]
    keep_surplus: bool
    crashed: Mapping[str, EngineCrashError]
    """The sessions that wait for `AllowSession` before they try again."""


class AllowSession(NamedTuple):
    """Let a session try again that was in flight in an engine crash."""

    group: int
    session: str


class EndGroup(NamedTuple):
    """Cancel a group, or a call of the scorer, if it still runs."""

    group: int


class ScoreTrajectories(NamedTuple):
    """Score trajectories that this worker did not generate: of a record, or of a worker that is lost."""

    group: int
    """The number of the call, from the same sequence as those of groups."""
    prompt: Prompt
    trajectories: Sequence[Trajectory]


class UseLentReplicas(NamedTuple):
    """Give calls to the replicas on GPUs that the Trainer lends, or no further ones."""

    is_open: bool


Command = StartGroup | AllowSession | EndGroup | ScoreTrajectories | UseLentReplicas


class SessionGenerates(NamedTuple):
    """A session waits for a replica or has one from now on, or no longer."""

    session: str
    active: bool


class SessionPlaced(NamedTuple):
    """The replica that has a session's requests; empty: none."""

    session: str
    replica: str


class SessionCrashed(NamedTuple):
    """The session waits for `AllowSession`."""

    session: str
    error: EngineCrashError


class SessionEnded(NamedTuple):
    session: str


class TurnReported(NamedTuple):
    """The tokens of a turn since the last event about it. They may complete the turn."""

    key: str
    rest: Turn


class TrajectoriesEnded(NamedTuple):
    trajectories: Sequence[Trajectory]


class GroupGenerated(NamedTuple):
    """All trajectories have ended, or generation has failed with this error."""

    error: AsyncRLError | None = None


class TrajectoriesScored(NamedTuple):
    """The score of each trajectory, or the scorer's error: by the number of the trajectory, or by its position in
    `ScoreTrajectories`."""

    scores: Mapping[int, Score | AsyncRLError]


WorkerEvent = (
    SessionGenerates
    | SessionPlaced
    | SessionCrashed
    | SessionEnded
    | TurnReported
    | TrajectoriesEnded
    | GroupGenerated
    | TrajectoriesScored
)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker reports about itself once a second."""

    pid: int
    node_id: str
    waits: Sequence[Wait]
    agent: Mapping[str, float]
    """Cumulative counts of the agent, see `ConversationAgent.status`."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What has happened since the last report, in order."""

    events: Sequence[tuple[int, WorkerEvent]]
    """With the numbers of their groups."""
    state: WorkerState | None = None
    profile_events: Sequence[Mapping[str, Any]] = ()
    num_profile_events: int = 0
    """The number of profiler events reported so far, including these."""
    forwarded: Sequence[tuple[str, Sequence[Mapping[str, Any]], int | None]] = ()
    """The arguments of `Profiler.ingest` for the events that replicas have sent to the worker."""


class ReportedTurns(dict[str, Turn]):
    """The turns of a group, which reports what each new value adds."""

    def __init__(self, turns: Mapping[str, Turn], group: RunningGroup) -> None:
        super().__init__(turns)
        self._group = group

    def __setitem__(self, key: str, turn: Turn) -> None:
        known = len(self[key].response_ids) if key in self else 0
        super().__setitem__(key, turn)
        self._group.send(TurnReported(key, rest_of_turn(turn, known)))


@dataclass(eq=False)
class RunningGroup:
    """The `GroupSessions` of one group, and its link to the Rollouter."""

    number: int
    outbox: Outbox
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _allowed: dict[str, anyio.Event] = field(default_factory=dict)

    def send(self, event: WorkerEvent) -> None:
        self.outbox.put(self.number, event)

    @contextmanager
    def generating(self, session: str) -> Iterator[None]:
        self.send(SessionGenerates(session, active=True))
        try:
            yield
        finally:
            self.send(SessionGenerates(session, active=False))

    def place(self, session: str, replica: str) -> None:
        self.send(SessionPlaced(session, replica))

    def end(self, session: str) -> None:
        self.send(SessionEnded(session))

    async def wait_until_allowed(self, session: str, error: EngineCrashError) -> None:
        """Wait for the Rollouter, which ends the group if it does not allow the session."""
        self._allowed[session] = anyio.Event()
        self.send(SessionCrashed(session, error))
        await self._allowed[session].wait()

    def allow(self, session: str) -> None:
        if (waiting := self._allowed.pop(session, None)) is not None:
            waiting.set()


class Outbox:
    """The events that the Rollouter has not taken yet."""

    def __init__(self) -> None:
        self._events: list[tuple[int, WorkerEvent]] = []
        self._changed = anyio.Event()

    def put(self, group: int, event: WorkerEvent) -> None:
        self._events.append((group, event))
        self._changed.set()

    async def take(self, limit_s: float) -> Sequence[tuple[int, WorkerEvent]]:
        """Return all events, once there are some or `limit_s` is over."""
        with anyio.move_on_after(limit_s):
            await self._changed.wait()
        self._changed = anyio.Event()
        events, self._events = self._events, []
        return events


class GroupWorker:
    """Generates and scores groups for one Rollouter. Belongs to one event loop."""

    def __init__(
        self,
        fleet: EngineFleet,
        scorer: RewardScorer,
        agent: ConversationAgent | None = None,
        *,
        node_id: str = "",
    ) -> None:
        self.use_lent: Callable[[bool], None] = lambda is_open: None
        """Carries out `UseLentReplicas`."""
        self._fleet = fleet
        self._scorer = scorer
        self._agent = agent
        self._node_id = node_id
        self._waits = WaitBoard()
        if agent is not None:
            agent.watch(self._waits.waiting)
        self._outbox = Outbox()
        self._running: dict[int, RunningGroup] = {}
        self._tasks: TaskGroup | None = None
        self._state_at = -math.inf
        self._num_profile_events = 0

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Work until cancelled. `on_ready` is called once commands may be posted."""
        async with AsyncExitStack() as stack:
            if isinstance(self._agent, AbstractAsyncContextManager):  # tool servers run while the agent is open
                await stack.enter_async_context(self._agent)
            self._tasks = await stack.enter_async_context(task_group())
            on_ready()
            await anyio.sleep_forever()

    def post(self, commands: Sequence[Command]) -> None:
        """Carry the commands out, in order, without waiting."""
        if self._tasks is None:
            raise BugError("GroupWorker.post before run")
        for command in commands:
            match command:
                case StartGroup(group):
                    self._running[group] = running = RunningGroup(group, self._outbox)
                    self._tasks.start_soon(self._run_group, command, running)
                case AllowSession(group, session):
                    if (known := self._running.get(group)) is not None:
                        known.allow(session)
                case EndGroup(group):
                    if (known := self._running.get(group)) is not None:
                        known.scope.cancel()
                case ScoreTrajectories(group):
                    self._running[group] = running = RunningGroup(group, self._outbox)
                    self._tasks.start_soon(self._run_scoring, command, running)
                case UseLentReplicas(is_open):
                    self.use_lent(is_open)

    async def take(self) -> WorkerReport:
        """Return what has happened, or after `REPORT_S` that nothing has."""
        events = await self._outbox.take(REPORT_S)
        if time.monotonic() - self._state_at < REPORT_S:
            return WorkerReport(events)
        self._state_at = time.monotonic()
        agent = dict(self._agent.status()) if self._agent is not None else {}
        state = WorkerState(os.getpid(), self._node_id, self._waits.snapshot(), agent)
        recorded = profile.drain()
        self._num_profile_events += len(recorded)
        return WorkerReport(events, state, recorded, self._num_profile_events, profile.drain_forwarded())

    async def _run_group(self, order: StartGroup, running: RunningGroup) -> None:
        """Run one group. Its failure is reported, and ends no other group."""
        name = str(order.request.sample_id)
        try:
            with running.scope, profile.context(sample=name):
                await self._generate_and_score(order, running)
        except AsyncRLError as error:
            running.send(GroupGenerated(error))
        except Exception as error:  # noqa: BLE001  the Rollouter raises it
            message = f"{name} failed in a worker with {type(error).__name__}: {error}"
            running.send(GroupGenerated(BugError.wrap(message, error)))
        finally:
            del self._running[order.group]

    async def _run_scoring(self, order: ScoreTrajectories, running: RunningGroup) -> None:
        with running.scope:
            await self._score(running, order.prompt, order.trajectories, range(len(order.trajectories)))
        del self._running[order.group]

    async def _generate_and_score(self, order: StartGroup, running: RunningGroup) -> None:
        prompt = order.request.prompt
        group = GroupGeneration(
            order.request, fleet=self._fleet, session=order.session, sessions=running, agent=self._agent,
            turns=ReportedTurns(order.turns, running), keep_surplus=order.keep_surplus, ended=dict(order.ended),
            crashed=dict(order.crashed),
        )  # fmt: skip
        whole_group = self._scorer.whole_group
        async with task_group() as scoring:
            async with group.running() as ended:
                async for trajectories in ended:
                    running.send(TrajectoriesEnded(trajectories))
                    if not whole_group:
                        scoring.start_soon(self._score, running, prompt, trajectories)
            running.send(GroupGenerated())
            if whole_group:
                await self._score(running, prompt, group.trajectories)

    async def _score(
        self,
        running: RunningGroup,
        prompt: Prompt,
        trajectories: Sequence[Trajectory],
        keys: Sequence[int] | None = None,
    ) -> None:
        keys = list(map(number_in_group, trajectories)) if keys is None else keys
        outcome: Mapping[int, Score | AsyncRLError]
        try:
            outcome = dict(zip(keys, await self._scorer.score(prompt, trajectories), strict=True))
        except AsyncRLError as error:
            outcome = dict.fromkeys(keys, error)
        except Exception as error:  # noqa: BLE001  the Rollouter raises it
            message = f"the scorer failed in a worker with {type(error).__name__}: {error}"
            outcome = dict.fromkeys(keys, BugError.wrap(message, error))
        running.send(TrajectoriesScored(outcome))


def number_in_group(trajectory: Trajectory) -> int:
    """Return the number of a trajectory that a group has generated."""
    assert trajectory.number is not None
    return trajectory.number
