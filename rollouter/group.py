"""One group: a prompt's `n` trajectories, and a greedy one if asked.

Without an agent each is one turn, and all are asked for in one call to the fleet. With one, each conversation asks for
its turns by itself. Where more are asked for than are wanted, the rest is aborted in the engines when enough are done.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import anyio
import numpy as np

from asyncrl.failures import BugError, DataError, EngineCrashError, first_failure
from asyncrl.ports import EngineFleet, GenerateRequest, OnCut, OnTurn
from asyncrl.profiling import profile
from asyncrl.trajectory import Trajectory, single_turn
from asyncrl.types import FinishReason, Prompt, SampleId, TokenIds, Turn
from rollouter.agent.asking import Converser, TurnRequest
from rollouter.profiled import SURPLUS, trajectory_fields
from rollouter.request_ids import BASELINE, number_of, trajectory_id, turn_id


class GroupEvents(Protocol):
    """Who is told of what happens to a group; `rollouter.stages` and `rollouter.validation` say what follows."""

    async def turn(self, key: str, turn: Turn) -> None:
        """A turn was made, and is complete; `turn_key` names it."""

    def placed(self, session: str, replica: str) -> None:
        """The session's requests are on that replica from now on; empty: on none."""

    async def crashed(self, session: str, error: EngineCrashError) -> None:
        """An engine died with them. They are tried again once this returns."""

    def answered(self, session: str) -> None:
        """The session's requests are complete. It may have others later: a conversation's next turn."""

    def ended(self, key: str, trajectory: Trajectory) -> None:
        """A trajectory is whole, others may not be."""

    def cut(self, key: str, turn: Turn) -> None:
        """What there was of a turn when generation was cancelled."""


class Unheard:
    """`GroupEvents` that nobody listens to."""

    async def turn(self, key: str, turn: Turn) -> None:
        pass

    def placed(self, session: str, replica: str) -> None:
        pass

    async def crashed(self, session: str, error: EngineCrashError) -> None:
        raise error

    def answered(self, session: str) -> None:
        pass

    def ended(self, key: str, trajectory: Trajectory) -> None:
        pass

    def cut(self, key: str, turn: Turn) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Group:
    """What is asked for."""

    name: str
    """Of the session; `name/k` are the requests, and `name/baseline`."""
    sample_id: SampleId | str
    prompt: Prompt
    sampling: Mapping[str, Any]
    n: int
    baseline: Mapping[str, Any] | None = None
    """Sampling of one more trajectory."""
    extra: int = 0
    """Trajectories beyond `n` that are asked for; the first `n` that end count."""
    keep_surplus: bool = False
    """What has ended beyond `n` counts as well."""

    def wanted(self) -> dict[str, Mapping[str, Any]]:
        """Sampling of each trajectory, by its key."""
        wanted = {str(k): self.sampling for k in range(self.n + self.extra)}
        if self.baseline is not None:
            wanted[BASELINE] = self.baseline
        return wanted


def turn_key(trajectory: str, number: int, context: TokenIds, prompt: Prompt) -> str:
    """Names a turn within its sample, for the turn log: `3`; `3.1.8f0e…` for the one after it.

    Behind the first turn of a prompt, the context that it was sampled in is part of its name: a turn that was logged
    counts only if tools and users say the same again.
    """
    if number == 0 and np.array_equal(context, prompt.prompt_ids):
        return trajectory
    digest = hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()
    return f"{trajectory}.{number}.{digest}"


async def generate_group(
    fleet: EngineFleet,
    group: Group,
    events: GroupEvents,
    *,
    agent: Converser | None = None,
    completed: Mapping[str, Turn] | None = None,
) -> list[Trajectory]:
    """The trajectories of a prompt, and behind them the baseline's, if there is one.

    With `group.extra`, those that ended first, in the order of their numbers.

    Args:
        completed: Turns there are already, by key: they are not asked for again. One that was cut is gone on with.

    Raises:
        InfraError: from the fleet, its retries spent.
        DataError: the engine refuses the request, or a response has no token: nothing could be trained on it.
        BugError: the fleet broke its contract.
        What `events` and the agent raise.
    """
    run = _Run(fleet, group, events, agent, completed or {})
    try:
        async with anyio.create_task_group() as tasks:
            run.scope = tasks.cancel_scope
            if agent is None:
                tasks.start_soon(run.all_at_once)
            else:
                for key, sampling in group.wanted().items():
                    tasks.start_soon(run.one, key, sampling)
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
    return run.chosen()


class _Run:
    def __init__(
        self,
        fleet: EngineFleet,
        group: Group,
        events: GroupEvents,
        agent: Converser | None,
        completed: Mapping[str, Turn],
    ) -> None:
        self._fleet = fleet
        self._group = group
        self._events = events
        self._agent = agent
        self._completed = completed
        self._ended: dict[str, Trajectory] = {}
        self.scope = anyio.CancelScope()

    def chosen(self) -> list[Trajectory]:
        keys = sorted(self._ended.keys() - {BASELINE}, key=int)
        if self._group.baseline is not None:
            keys.append(BASELINE)
        return [self._ended[key] for key in keys]

    def _end(self, key: str, trajectory: Trajectory) -> None:
        if not self._counts(key):
            return
        self._ended[key] = trajectory = replace(trajectory, number=number_of(key))
        self._events.ended(key, trajectory)
        if self._enough():
            self.scope.cancel()

    def _counts(self, key: str) -> bool:
        """Whether this trajectory, which is whole, is one of those that were asked for."""
        group = self._group
        return key == BASELINE or group.keep_surplus or len(self._ended.keys() - {BASELINE}) < group.n

    def _enough(self) -> bool:
        group = self._group
        needed = group.n + (group.baseline is not None)
        has_baseline = group.baseline is None or BASELINE in self._ended
        return group.extra > 0 and has_baseline and len(self._ended) >= needed

    async def all_at_once(self) -> None:
        """Every trajectory is one turn, and they share a call."""
        group, prompt = self._group, self._group.prompt
        wanted = group.wanted()
        keys = list(wanted)
        requests = [
            GenerateRequest(
                trajectory_id(group.name, key), prompt.prompt_ids, params, self._completed.get(key), prompt.media
            )
            for key, params in wanted.items()
        ]
        unended = {key: self._completed.get(key) for key in keys if not is_complete(self._completed.get(key))}
        started = time.perf_counter()

        async def told(number: int, turn: Turn) -> None:
            key = keys[number]
            check_turn(requests[number].request_id, turn)
            with profile.context(trajectory=number_of(key)):
                if not is_complete(self._completed.get(key)):
                    unended[key] = turn
                    await self._events.turn(key, turn)
                trajectory = single_turn(prompt, turn)
                unended.pop(key, None)
                if profile.records("trajectory"):
                    took_s = time.perf_counter() - started
                    fields = {**self._fields(key, trajectory), "generate_s": round(took_s, 6)}
                    profile.took("trajectory", took_s, **fields)
                self._end(key, trajectory)

        def cut(number: int, turn: Turn) -> None:
            unended[keys[number]] = turn
            self._events.cut(keys[number], turn)

        try:
            turns = await self._call(group.name, requests, told, cut)
        except anyio.get_cancelled_exc_class():
            for key, made in unended.items():
                reason = SURPLUS if self._enough() and is_complete(made) else str(FinishReason.ABORTED)
                _note_unended(key, time.perf_counter() - started, made, reason)
            raise
        for key, request, turn in zip(keys, requests, turns, strict=True):
            check_turn(request.request_id, turn)
            if key not in self._ended:  # it was complete before
                self._end(key, single_turn(prompt, turn))

    async def one(self, key: str, sampling: Mapping[str, Any]) -> None:
        """One conversation."""
        assert self._agent is not None  # whoever has none asks for all at once
        group = self._group
        session = trajectory_id(group.name, key)

        async def ask(wanted: TurnRequest) -> Turn:
            place = turn_key(key, wanted.number, wanted.context, group.prompt)
            known = self._completed.get(place)
            if known is not None and is_complete(known):
                return known
            limit = min(sampling["max_tokens"], wanted.max_tokens)
            request_id = turn_id(session, wanted.number)
            params = {**sampling, "max_tokens": limit}
            if wanted.stop:
                params["stop"] = [*params.get("stop", ()), *wanted.stop]
            request = GenerateRequest(request_id, wanted.context, params, known, group.prompt.media)
            # Whoever asks may be a program's request, which comes from elsewhere.
            with profile.context(sample=str(group.sample_id), trajectory=number_of(key), turn=wanted.number):
                (turn,) = await self._call(session, [request], None, lambda _, turn: self._events.cut(place, turn))
                check_turn(request_id, turn)
                await self._events.turn(place, turn)
            return turn

        number = group.n + group.extra if key == BASELINE else int(key)
        with profile.context(trajectory=number_of(key)):
            with profile.span("trajectory") as span:
                try:
                    trajectory = await self._agent.converse(group.sample_id, number, group.prompt, ask)
                except anyio.get_cancelled_exc_class():
                    span.add(finish_reason=str(FinishReason.ABORTED))
                    raise
                if profile.records("trajectory"):
                    span.add(**self._fields(key, trajectory))
            self._end(key, trajectory)

    def _fields(self, key: str, trajectory: Trajectory) -> dict[str, Any]:
        """Of the event of a trajectory that is whole now."""
        fields = trajectory_fields(trajectory)
        return fields if self._counts(key) else {**fields, "finish_reason": SURPLUS}

    async def _call(
        self,
        session: str,
        requests: Sequence[GenerateRequest],
        on_turn: OnTurn | None,
        on_cut: OnCut,
    ) -> list[Turn]:
        async def on_crash(error: EngineCrashError) -> None:
            await self._events.crashed(session, error)

        turns = await self._fleet.generate(
            requests,
            session=session,
            on_turn=on_turn,
            on_place=lambda replica: self._events.placed(session, replica),
            on_crash=on_crash,
            on_cut=on_cut,
        )
        self._events.answered(session)
        if len(turns) != len(requests):
            raise BugError(f"{session}: the fleet returned {len(turns)} turns for {len(requests)} requests")
        return turns


def _note_unended(key: str, duration_s: float, made: Turn | None, reason: str) -> None:
    """A trajectory of one turn that has come to nothing here. `made`: what is known of it."""
    num_tokens = 0 if made is None else len(made.response_ids)
    profile.took(
        "trajectory", duration_s, trajectory=number_of(key), tokens=num_tokens, sampled_tokens=num_tokens,
        finish_reason=reason, generate_s=round(duration_s, 6),
    )  # fmt: skip


def is_complete(turn: Turn | None) -> bool:
    return turn is not None and turn.finish_reason is not FinishReason.ABORTED


def check_turn(request_id: str, turn: Turn) -> None:
    """
    Raises:
        BugError: the fleet broke its contract.
        DataError: there is no token in it.
    """
    if turn.finish_reason is FinishReason.ABORTED:
        raise BugError(f"{request_id}: the fleet returned an aborted turn; it has to resume those itself")
    if len(turn.rollout_log_probs) != len(turn.response_ids):
        raise BugError(f"{request_id}: {len(turn.rollout_log_probs)} log-probs for {len(turn.response_ids)} tokens")
    if not len(turn.response_ids) or not turn.spans:
        raise DataError(f"{request_id}: the engine returned an empty response")
