"""A generate call that survives weight syncs and engine failures. Pure, except for the replica calls passed to it.

An aborted turn is submitted again with its tokens, as often as necessary. A turn whose engine failed is submitted again
with the tokens reported before the failure. The number of consecutive tries that fail without any new token is limited.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np

from asyncrl.core.failures import BugError, EngineCrashError, InfraError, ReplicaLeftError
from asyncrl.core.ports import (
    Accepted,
    EngineCrashed,
    GenerateRequest,
    GenerationEvent,
    TurnFinished,
    TurnProgress,
    Unplaced,
)
from asyncrl.core.types import FinishReason, Span, Turn, join_turns
from asyncrl.profiling import profile
from rollouter.requests import call_id

FIRST_BACKOFF_S = 1.0


class Delta(NamedTuple):
    """The tokens that one request has sampled since its last delta."""

    number: int
    """The request's position in its call."""
    turn: Turn
    """While the request runs, the finish reason is ABORTED: the turn counts as aborted if no further delta arrives."""
    done: bool
    """Whether the engine has ended the request, which is then complete or aborted."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Profiler events that a replica sends to the Rollouter, because the replica has no run directory."""

    replica: str
    events: Sequence[Mapping[str, Any]]
    sent: int | None = None
    """Number of events that the replica has sent so far, including these; None if unknown."""


ReplicaStream = AsyncGenerator[Accepted | EventBatch | Sequence[Delta], None]
"""The items of one call to a replica; the stream ends when all requests of the call have ended."""


class CallReplica(Protocol):
    """Start one call to one replica."""

    def __call__(self, requests: Sequence[GenerateRequest], *, session: str) -> ReplicaStream: ...


async def generate(
    call: CallReplica,
    requests: Sequence[GenerateRequest],
    *,
    session: str,
    max_attempts: int,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> AsyncGenerator[GenerationEvent, None]:
    """Yield the events of `ports.EngineFleet.generate`. Each turn joins the tokens, log-probs and spans of all calls.

    Args:
        requests: Their `max_tokens` counts all tokens of a turn, including those of `so_far`.
        max_attempts: Number of consecutive calls that may fail without a token. The wait between them is 1 s, 2 s,
            4 s and so on. Aborts by a weight sync or by a replica that leaves are not failures, and the consumer
            decides about crashes.

    Raises:
        InfraError: `max_attempts` consecutive calls have failed.
        DataError: the engine refuses a prompt.
    """
    turns = [request.so_far for request in requests]
    for index, turn in enumerate(turns):
        if turn is not None and turn.finish_reason is FinishReason.ABORTED and _is_done(turn, requests[index]):
            yield TurnFinished(index, _finished(turn))
    pending = [index for index, turn in enumerate(turns) if not _is_done(turn, requests[index])]
    failures = calls = 0
    while pending:
        calls += 1
        batch = [_resubmission(requests[index], turns[index], calls) for index in pending]
        running = set(pending)
        failure: InfraError | None = None
        progressed = False
        replica = ""
        async with aclosing(_recorded_call(call, batch, session)) as stream:
            try:
                async for item in stream:
                    if isinstance(item, Accepted):
                        replica = item.replica
                        yield item
                        continue
                    for delta in item:
                        index = pending[delta.number]
                        turns[index] = turn = join_turns(turns[index], delta.turn)
                        progressed = progressed or len(delta.turn.response_ids) > 0
                        if delta.done:
                            running.discard(index)
                        if delta.done and _is_done(turn, requests[index]):
                            yield TurnFinished(index, _finished(turn))
                        else:
                            yield TurnProgress(index, turn)
            except InfraError as error:
                failure = error
        if failure is None and running:
            raise BugError(f"a replica ended a call of {len(batch)} requests before {len(running)} of them ended")
        if isinstance(failure, EngineCrashError):
            failure.replica = failure.replica or replica
        else:
            yield Unplaced()
        # An engine that failed right after a turn's last token has not reported the end of the turn.
        for index in sorted(running):
            if (turn := turns[index]) is not None and _is_done(turn, requests[index]):
                yield TurnFinished(index, _finished(turn))
        pending = [index for index in pending if not _is_done(turns[index], requests[index])]
        if failure is None or not pending:
            continue
        if progressed:
            failures = 0
        if isinstance(failure, EngineCrashError):
            yield EngineCrashed(failure)
        elif not progressed and not isinstance(failure, ReplicaLeftError):
            failures += 1
            if failures >= max_attempts:
                message = f"generation failed {failures} times in a row, the last time: {failure.message}"
                raise InfraError(message, failure.cause) from failure
        await sleep(FIRST_BACKOFF_S * 2 ** max(0, failures - 1))


async def _recorded_call(
    call: CallReplica, batch: Sequence[GenerateRequest], session: str
) -> AsyncGenerator[Accepted | Sequence[Delta], None]:
    """Make the call, record it as the event `generate.call`, and ingest the replica's events from its stream."""
    fields: dict[str, Any] = {"requests": len(batch), "request": batch[0].request_id if len(batch) == 1 else None}
    started = time.perf_counter()
    try:
        async with aclosing(call(batch, session=session)) as stream:
            async for item in stream:
                if isinstance(item, EventBatch):
                    profile.ingest(f"replica-{item.replica}", item.events, sent=item.sent)
                    continue
                if isinstance(item, Accepted):
                    fields["replica"] = item.replica
                yield item
    except BaseException as error:
        # A consumer that closes the stream early is usually being cancelled.
        fields["error"] = "CancelledError" if isinstance(error, GeneratorExit) else type(error).__name__
        raise
    finally:
        profile.record_ended("generate.call", time.perf_counter() - started, **fields)


def cut_delta(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    starts: Sequence[tuple[str, int]],
    first: int,
    finish: FinishReason,
) -> Turn:
    """Return the part of a response from token `first` on.

    Args:
        token_ids: All tokens of the response; `log_probs` has one for each.
        starts: The versions that sampled the response, each with its first token, in ascending order. Empty for an
            empty response.
    """
    ends = [*(start for _, start in starts), len(token_ids)][1:]
    return Turn(
        response_ids=np.asarray(token_ids[first:], dtype=np.int32),
        rollout_log_probs=np.asarray(log_probs[first:], dtype=np.float32),
        spans=tuple(
            Span(max(start, first) - first, int(version))
            for (version, start), end in zip(starts, ends, strict=True)
            if end > max(start, first)
        ),
        finish_reason=finish,
    )


def _resubmission(request: GenerateRequest, so_far: Turn | None, calls: int) -> GenerateRequest:
    """Return the request with its tokens so far. Its id is new, because an engine may still hold the previous call."""
    return replace(request, request_id=call_id(request.request_id, calls), so_far=so_far)


def _is_done(turn: Turn | None, request: GenerateRequest) -> bool:
    if turn is None:
        return False
    return turn.finish_reason is not FinishReason.ABORTED or len(turn.response_ids) >= request.sampling["max_tokens"]


def _finished(turn: Turn) -> Turn:
    """Return a complete turn. An abort after the last token of the budget counts as an end by length."""
    return turn if turn.finish_reason is not FinishReason.ABORTED else replace(turn, finish_reason=FinishReason.LENGTH)
