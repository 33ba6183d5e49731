"""Generates one group: a prompt's `n` trajectories and, for ReMax, a greedy one.

Without an agent every trajectory is one turn, and one call to the fleet generates all of them. With an agent each
conversation requests its turns one by one. With `extra` trajectories, the unfinished ones are aborted in the engines as
soon as enough have ended.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol, TypeGuard

import anyio
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream

from asyncrl.core.failures import BugError, DataError, EngineCrashError
from asyncrl.core.ports import (
    Accepted,
    EngineCrashed,
    EngineFleet,
    GenerateRequest,
    TurnFinished,
    TurnProgress,
    Unplaced,
)
from asyncrl.core.tasks import task_group
from asyncrl.core.trajectory import SampleRequest, Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, TokenIds, Turn
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from rollouter.agent.conversation import ConversationAgent, TurnRequest
from rollouter.crash_isolation import CrashIsolation, SampleSessions, TimeLimit
from rollouter.requests import BASELINE, number_of, trajectory_id, turn_id

SURPLUS = "surplus"
"""In events, the finish reason of a complete trajectory that is not used, because enough others had ended before."""


class GroupSessions(Protocol):
    """See `SampleSessions`, which decides. A worker has a stand-in that asks for the decisions."""

    def generating(self, session: str) -> AbstractContextManager[None]: ...

    def place(self, session: str, replica: str) -> None: ...

    async def wait_until_allowed(self, session: str, error: EngineCrashError) -> None: ...

    def end(self, session: str) -> None: ...


def own_sessions() -> SampleSessions:
    """Return the sessions of a group that shares its crash isolation with no other group."""
    return SampleSessions(CrashIsolation(max_crashes=2, waits=WaitBoard()), TimeLimit(anyio.CancelScope()))


def turn_key(trajectory: str, number: int, context: TokenIds, prompt: Prompt) -> str:
    """Return a turn's name within its sample, for the turn log: `3` for trajectory 3's first turn, then `3.1.8f0e…`.

    The names of later turns contain a digest of their context: a logged turn is reused only if tools and users give
    the same answers again.
    """
    if number == 0 and np.array_equal(context, prompt.prompt_ids):
        return trajectory
    digest = hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()
    return f"{trajectory}.{number}.{digest}"


@dataclass
class TrajectoryGroup:
    """The generation of one group. It runs once, and ends when all or enough trajectories have ended. Subclasses decide
    where it is generated."""

    request: SampleRequest
    _: KW_ONLY
    session: str = ""
    """The session's name; empty: that of the sample. The requests are `name/k` and `name/baseline`; with an agent, each
    of them is a session."""
    sessions: GroupSessions = field(default_factory=own_sessions)
    """Decides after a crash when requests are tried again."""
    turns: dict[str, Turn] = field(default_factory=dict)
    """Turns by `turn_key`. Complete ones are not generated again, partial ones are resumed, and new tokens are added as
    the engines report them, so that they survive a cancellation."""
    record_turns: Callable[[Mapping[str, Turn]], Awaitable[None]] | None = None
    """Awaited for the turns that are finished here, by their keys, before their trajectories continue. On a worker they
    continue at once, so a tool may have run for a turn that was never recorded."""
    keep_surplus: bool = False
    """Whether trajectories beyond `n` that have ended are used as well."""
    ended: dict[str, Trajectory] = field(default_factory=dict)
    """The trajectories that have ended, by key. Those with which a group begins are not generated again."""

    def __post_init__(self) -> None:
        request = self.request
        self.session = self.session or str(request.sample_id)
        self._sampling = {str(k): request.sampling for k in range(request.n + request.extra)}
        if request.baseline is not None:
            self._sampling[BASELINE] = request.baseline
        self._scope = anyio.CancelScope()

    @property
    def missing(self) -> dict[str, Mapping[str, Any]]:
        """The sampling parameters of the trajectories that have not ended, by key."""
        return {key: sampling for key, sampling in self._sampling.items() if key not in self.ended}

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that have ended and are used, ordered by number, with the baseline last."""
        return [self.ended[key] for key in self._sampling if key in self.ended]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncIterator[list[Trajectory]]]:
        """Generate the group in the background, and yield an iterator over the trajectories as they end. Those that
        end together come together.

        Raises:
            InfraError: the fleet failed and has no retries left.
            PoisonError: the sample is blamed for engine crashes.
            DataError: the engine refuses the request, or a response has no token.
            BugError: the fleet broke its contract.
        """
        self._events, events = anyio.create_memory_object_stream[Trajectory](math.inf)
        async with self._events, events, task_group() as tasks:
            tasks.start_soon(self._generate)
            yield _ended_together(events)

    async def run(self) -> list[Trajectory]:
        """Generate the group, and return its trajectories. Raises as `running`."""
        async with self.running() as ended:
            async for _ in ended:
                pass
        return self.trajectories

    async def _generate(self) -> None:
        """Generate the group: call `_end` for each trajectory, and close `_events` at the end."""
        raise NotImplementedError

    async def _record(self, turns: Mapping[str, Turn]) -> None:
        if self.record_turns is not None:
            await self.record_turns(turns)

    def _end(self, key: str, trajectory: Trajectory) -> None:
        if not self._is_used(key):
            return
        self.ended[key] = trajectory = replace(trajectory, number=number_of(key))
        self._events.send_nowait(trajectory)
        if self._has_enough():
            self._scope.cancel()

    def _is_used(self, key: str) -> bool:
        """Return whether this trajectory, which has just ended, is used."""
        return key == BASELINE or self.keep_surplus or len(self.ended.keys() - {BASELINE}) < self.request.n

    def _has_enough(self) -> bool:
        sample = self.request
        needed = sample.n + (sample.baseline is not None)
        has_baseline = sample.baseline is None or BASELINE in self.ended
        return sample.extra > 0 and has_baseline and len(self.ended) >= needed


@dataclass
class GroupGeneration(TrajectoryGroup):
    """A group that is generated in this process."""

    _: KW_ONLY
    fleet: EngineFleet
    crashed: dict[str, EngineCrashError] = field(default_factory=dict)
    """The sessions that wait for crash isolation before they generate, each with the crash that interrupted it."""
    agent: ConversationAgent | None = None

    async def _generate(self) -> None:
        with self._events:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                if self.agent is None:
                    await self._generate_single_turns()
                else:
                    for key, sampling in self.missing.items():
                        tasks.start_soon(self._hold_conversation, self.agent, key, sampling)

    async def _generate_single_turns(self) -> None:
        prompt = self.request.prompt
        requests = {}
        for key, sampling in self.missing.items():
            turn = self.turns.get(key)
            if is_complete(turn):
                self._end(key, single_turn(prompt, turn))
            else:
                name = trajectory_id(self.session, key)
                requests[key] = GenerateRequest(name, prompt.prompt_ids, sampling, turn, prompt.media)
        if not requests or self._has_enough():
            return
        started = time.perf_counter()
        unfinished = dict.fromkeys(requests)
        finished: dict[str, Turn] = {}

        async def end() -> None:
            turns = dict(finished)
            finished.clear()
            await self._record(turns)
            for key, turn in turns.items():
                del unfinished[key]
                trajectory = single_turn(prompt, turn)
                generate_s = time.perf_counter() - started
                fields = {**self._event_fields(key, trajectory), "generate_s": round(generate_s, 6)}
                profile.record_ended("trajectory", generate_s, trajectory=number_of(key), **fields)
                self._end(key, trajectory)

        try:
            async with task_group() as ends, aclosing(self._turns(self.session, requests)) as turns:
                async for key, turn in turns:
                    if is_complete(turn):
                        if not finished:  # turns that are reported together end together, which is one write
                            ends.start_soon(end)
                        finished[key] = turn
        except anyio.get_cancelled_exc_class():
            for key in unfinished:
                turn = self.turns.get(key)
                is_surplus = self._has_enough() and is_complete(turn)
                num_tokens = 0 if turn is None else len(turn.response_ids)
                generate_s = time.perf_counter() - started
                profile.record_ended(
                    "trajectory", generate_s, trajectory=number_of(key), tokens=num_tokens, sampled_tokens=num_tokens,
                    finish_reason=SURPLUS if is_surplus else str(FinishReason.ABORTED),
                    generate_s=round(generate_s, 6),
                )  # fmt: skip
            raise

    async def _hold_conversation(self, agent: ConversationAgent, key: str, sampling: Mapping[str, Any]) -> None:
        sample = self.request
        session = trajectory_id(self.session, key)
        was_logged = False  # the latest turn

        async def ask(request: TurnRequest) -> Turn:
            nonlocal was_logged
            name = turn_key(key, request.number, request.context, sample.prompt)
            logged = self.turns.get(name)
            was_logged = is_complete(logged)
            if is_complete(logged):
                return logged
            params = {**sampling, "max_tokens": min(sampling["max_tokens"], request.max_tokens)}
            if request.stop:
                params["stop"] = [*params.get("stop", ()), *request.stop]
            request_id = turn_id(session, request.number)
            generate = GenerateRequest(request_id, request.context, params, logged, sample.prompt.media)
            requests = {name: replace(generate, stream=request.progress is not None)}
            # The request may come from a user's program, which has no profiling context.
            with profile.context(sample=str(sample.sample_id), trajectory=number_of(key), turn=request.number):
                async with aclosing(self._turns(session, requests)) as turns:
                    async for _, turn in turns:
                        if is_complete(turn):
                            await self._record({name: turn})
                        elif request.progress is not None:
                            request.progress(turn)
            return turn

        number = sample.n + sample.extra if key == BASELINE else int(key)
        with profile.context(trajectory=number_of(key)):
            with profile.span("trajectory") as span:
                try:
                    trajectory = await agent.converse(sample.sample_id, number, sample.prompt, ask)
                except anyio.get_cancelled_exc_class():
                    span.add(finish_reason=str(FinishReason.ABORTED))
                    raise
                span.add(**self._event_fields(key, trajectory))
            if was_logged:  # a worker was lost after it had reported the turn, and others may wait for this session
                self.sessions.end(session)
            self._end(key, trajectory)

    async def _turns(
        self, session: str, requests: Mapping[str, GenerateRequest]
    ) -> AsyncGenerator[tuple[str, Turn], None]:
        """Yield turns with their keys as tokens arrive and as they finish. After an engine crash, wait until crash
        isolation allows another try. Waits for a replica do not count towards the sample's time limit."""
        keys = list(requests)
        unfinished = set(keys)
        with self.sessions.generating(session):
            if (error := self.crashed.pop(session, None)) is not None:
                await self.sessions.wait_until_allowed(session, error)
            async with aclosing(self.fleet.generate(list(requests.values()), session=session)) as events:
                async for event in events:
                    match event:
                        case Accepted(replica):
                            self.sessions.place(session, replica)
                        case Unplaced():
                            self.sessions.place(session, "")
                        case TurnProgress(number, turn):
                            self.turns[keys[number]] = turn
                            yield keys[number], turn
                        case TurnFinished(number, turn):
                            check_turn(requests[keys[number]].request_id, turn)
                            self.turns[keys[number]] = turn
                            unfinished.discard(keys[number])
                            yield keys[number], turn
                        case EngineCrashed(error):
                            await self.sessions.wait_until_allowed(session, error)
        self.sessions.end(session)
        if unfinished:
            raise BugError(f"{session}: the fleet finished without {len(unfinished)} of {len(keys)} turns")

    def _event_fields(self, key: str, trajectory: Trajectory) -> dict[str, Any]:
        if not profile.records("trajectory"):
            return {}
        turns = trajectory.turns
        # The tool calls of a turn run concurrently: the longest one counts.
        tool_s = sum(max((call.wait_s + call.duration_s for call in turn.calls), default=0.0) for turn in turns)
        return {
            "turns": len(turns),
            "calls": trajectory.num_calls,
            "tokens": sum(len(row.response_ids) for row in trajectory.rows),
            "sampled_tokens": trajectory.num_sampled,
            "finish_reason": str(trajectory.finish_reason) if self._is_used(key) else SURPLUS,
            "generate_s": round(sum(turn.generate_s for turn in turns), 6),
            "tool_s": round(tool_s, 6),
            "user_s": round(sum(turn.user_s for turn in turns), 6),
        }


async def _ended_together(events: MemoryObjectReceiveStream[Trajectory]) -> AsyncIterator[list[Trajectory]]:
    async for trajectory in events:
        more = events.statistics().current_buffer_used
        yield [trajectory, *(events.receive_nowait() for _ in range(more))]


def is_complete(turn: Turn | None) -> TypeGuard[Turn]:
    return turn is not None and turn.finish_reason is not FinishReason.ABORTED


def check_turn(request_id: str, turn: Turn) -> None:
    """Check a finished turn.

    Raises:
        BugError: the fleet broke its contract.
        DataError: the turn has no token.
    """
    if turn.finish_reason is FinishReason.ABORTED:
        raise BugError(f"{request_id}: the fleet returned an aborted turn instead of resuming it")
    if len(turn.rollout_log_probs) != len(turn.response_ids):
        raise BugError(f"{request_id}: {len(turn.rollout_log_probs)} log-probs for {len(turn.response_ids)} tokens")
    if not len(turn.response_ids) or not turn.spans:
        raise DataError(f"{request_id}: the engine returned an empty response")
