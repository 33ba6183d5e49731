"""Generates one group: a prompt's `n` trajectories and, for ReMax, a greedy one.

Without an agent every trajectory is one turn, and one call to the fleet generates all of them. With an agent each
conversation requests its turns one by one. With `extra` trajectories, the unfinished ones are aborted in the engines as
soon as enough have ended.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import anyio
import numpy as np

from asyncrl.core.failures import BugError, DataError, first_failure
from asyncrl.core.ports import (
    Accepted,
    EngineCrashed,
    EngineFleet,
    GenerateRequest,
    TurnFinished,
    TurnProgress,
    Unplaced,
)
from asyncrl.core.trajectory import Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, SampleId, TokenIds, Turn
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from rollouter.agent.conversation import ConversationAgent, TurnRequest
from rollouter.crash_isolation import CrashIsolation, SampleSessions, TimeLimit
from rollouter.requests import BASELINE, number_of, trajectory_id, turn_id

SURPLUS = "surplus"
"""In events, the finish reason of a complete trajectory that is not used, because enough others had ended before."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The trajectories to generate for one prompt."""

    name: str
    """The session's name. The requests are `name/k` and `name/baseline`; with an agent, each of them is a session."""
    sample_id: SampleId | str
    prompt: Prompt
    sampling: Mapping[str, Any]
    n: int
    baseline: Mapping[str, Any] | None = None
    """Sampling parameters of the greedy trajectory, or None without one."""
    extra: int = 0
    """Trajectories to start beyond `n`; the first `n` to end are used."""
    keep_surplus: bool = False
    """Whether trajectories beyond `n` that have ended are used as well."""

    def sampling_by_key(self) -> dict[str, Mapping[str, Any]]:
        sampling = {str(k): self.sampling for k in range(self.n + self.extra)}
        if self.baseline is not None:
            sampling[BASELINE] = self.baseline
        return sampling


def turn_key(trajectory: str, number: int, context: TokenIds, prompt: Prompt) -> str:
    """Return a turn's name within its sample, for the turn log: `3` for trajectory 3's first turn, then `3.1.8f0e…`.

    The names of later turns contain a digest of their context: a logged turn is reused only if tools and users give
    the same answers again.
    """
    if number == 0 and np.array_equal(context, prompt.prompt_ids):
        return trajectory
    digest = hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()
    return f"{trajectory}.{number}.{digest}"


async def generate_group(
    fleet: EngineFleet,
    group: GroupRequest,
    *,
    sessions: SampleSessions | None = None,
    agent: ConversationAgent | None = None,
    turns: dict[str, Turn] | None = None,
    record_turn: Callable[[str, Turn], Awaitable[None]] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Return the trajectories of a prompt, ordered by number, with the baseline last.

    With `group.extra`, only the first trajectories to end are returned.

    Args:
        sessions: Decides after a crash when requests are tried again. None: the group gets a crash isolation that it
            shares with no other group.
        turns: Turns by `turn_key`. Complete ones are not generated again, partial ones are resumed, and new tokens
            are added as the engines report them, so that they survive a cancellation.
        record_turn: Awaited for every turn that this call finishes, before its trajectory continues.
        on_trajectory: Called for every trajectory that is used, as soon as it has ended.

    Raises:
        InfraError: the fleet failed and has no retries left.
        PoisonError: the sample is blamed for engine crashes.
        DataError: the engine refuses the request, or a response has no token.
        BugError: the fleet broke its contract.
    """
    if sessions is None:
        isolation = CrashIsolation(max_crashes=2, waits=WaitBoard())
        sessions = SampleSessions(isolation, TimeLimit(anyio.CancelScope()))
    generation = _GroupGeneration(fleet, group, sessions, {} if turns is None else turns, record_turn, on_trajectory)
    try:
        async with anyio.create_task_group() as tasks:
            generation.scope = tasks.cancel_scope
            if agent is None:
                tasks.start_soon(generation.generate_single_turns)
            else:
                for key, sampling in group.sampling_by_key().items():
                    tasks.start_soon(generation.hold_conversation, agent, key, sampling)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return generation.trajectories()


class _GroupGeneration:
    def __init__(
        self,
        fleet: EngineFleet,
        group: GroupRequest,
        sessions: SampleSessions,
        turns: dict[str, Turn],
        record_turn: Callable[[str, Turn], Awaitable[None]] | None,
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> None:
        self._fleet = fleet
        self._group = group
        self._sessions = sessions
        self._turns = turns
        self._record_turn = record_turn
        self._on_trajectory = on_trajectory
        self._ended: dict[str, Trajectory] = {}
        self.scope = anyio.CancelScope()

    def trajectories(self) -> list[Trajectory]:
        keys = sorted(self._ended.keys() - {BASELINE}, key=int)
        if self._group.baseline is not None:
            keys.append(BASELINE)
        return [self._ended[key] for key in keys]

    async def generate_single_turns(self) -> None:
        group = self._group
        requests = {}
        for key, sampling in group.sampling_by_key().items():
            turn = self._turns.get(key)
            if is_complete(turn):
                self._end(key, single_turn(group.prompt, turn))
            else:
                name = trajectory_id(group.name, key)
                requests[key] = GenerateRequest(name, group.prompt.prompt_ids, sampling, turn, group.prompt.media)
        if not requests or self._has_enough():
            return
        started = time.perf_counter()
        unfinished = dict.fromkeys(requests)
        try:
            async with aclosing(self._finished_turns(group.name, requests)) as finished:
                async for key, turn in finished:
                    with profile.context(trajectory=number_of(key)):
                        await self._record(key, turn)
                        del unfinished[key]
                        trajectory = single_turn(group.prompt, turn)
                        generate_s = time.perf_counter() - started
                        fields = {**self._event_fields(key, trajectory), "generate_s": round(generate_s, 6)}
                        profile.record_ended("trajectory", generate_s, **fields)
                        self._end(key, trajectory)
        except anyio.get_cancelled_exc_class():
            for key in unfinished:
                turn = self._turns.get(key)
                is_surplus = self._has_enough() and is_complete(turn)
                num_tokens = 0 if turn is None else len(turn.response_ids)
                generate_s = time.perf_counter() - started
                profile.record_ended(
                    "trajectory", generate_s, trajectory=number_of(key), tokens=num_tokens, sampled_tokens=num_tokens,
                    finish_reason=SURPLUS if is_surplus else str(FinishReason.ABORTED),
                    generate_s=round(generate_s, 6),
                )  # fmt: skip
            raise

    async def hold_conversation(self, agent: ConversationAgent, key: str, sampling: Mapping[str, Any]) -> None:
        group = self._group
        session = trajectory_id(group.name, key)

        async def ask(request: TurnRequest) -> Turn:
            name = turn_key(key, request.number, request.context, group.prompt)
            logged = self._turns.get(name)
            if is_complete(logged):
                return logged
            params = {**sampling, "max_tokens": min(sampling["max_tokens"], request.max_tokens)}
            if request.stop:
                params["stop"] = [*params.get("stop", ()), *request.stop]
            request_id = turn_id(session, request.number)
            requests = {name: GenerateRequest(request_id, request.context, params, logged, group.prompt.media)}
            # The request may come from a user's program, which has no profiling context.
            with profile.context(sample=str(group.sample_id), trajectory=number_of(key), turn=request.number):
                async with aclosing(self._finished_turns(session, requests)) as finished:
                    async for _, turn in finished:
                        await self._record(name, turn)
            return turn

        number = group.n + group.extra if key == BASELINE else int(key)
        with profile.context(trajectory=number_of(key)):
            with profile.span("trajectory") as span:
                try:
                    trajectory = await agent.converse(group.sample_id, number, group.prompt, ask)
                except anyio.get_cancelled_exc_class():
                    span.add(finish_reason=str(FinishReason.ABORTED))
                    raise
                span.add(**self._event_fields(key, trajectory))
            self._end(key, trajectory)

    async def _finished_turns(
        self, session: str, requests: Mapping[str, GenerateRequest]
    ) -> AsyncGenerator[tuple[str, Turn], None]:
        """Yield turns with their keys as they finish. After an engine crash, wait until crash isolation allows
        another try."""
        keys = list(requests)
        unfinished = set(keys)
        async with aclosing(self._fleet.generate(list(requests.values()), session=session)) as events:
            async for event in events:
                match event:
                    case Accepted(replica):
                        self._sessions.place(session, replica)
                    case Unplaced():
                        self._sessions.place(session, "")
                    case TurnProgress(number, turn):
                        self._turns[keys[number]] = turn
                    case TurnFinished(number, turn):
                        check_turn(requests[keys[number]].request_id, turn)
                        self._turns[keys[number]] = turn
                        unfinished.discard(keys[number])
                        yield keys[number], turn
                    case EngineCrashed(error):
                        await self._sessions.wait_until_allowed(session, error)
        self._sessions.end(session)
        if unfinished:
            raise BugError(f"{session}: the fleet finished without {len(unfinished)} of {len(keys)} turns")

    async def _record(self, key: str, turn: Turn) -> None:
        if self._record_turn is not None:
            await self._record_turn(key, turn)

    def _end(self, key: str, trajectory: Trajectory) -> None:
        if not self._is_used(key):
            return
        self._ended[key] = trajectory = replace(trajectory, number=number_of(key))
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)
        if self._has_enough():
            self.scope.cancel()

    def _is_used(self, key: str) -> bool:
        """Return whether this trajectory, which has just ended, is used."""
        group = self._group
        return key == BASELINE or group.keep_surplus or len(self._ended.keys() - {BASELINE}) < group.n

    def _has_enough(self) -> bool:
        group = self._group
        needed = group.n + (group.baseline is not None)
        has_baseline = group.baseline is None or BASELINE in self._ended
        return group.extra > 0 and has_baseline and len(self._ended) >= needed

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
