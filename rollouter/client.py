"""A generate call that survives weight syncs and dying engines. Pure but for the calls it is given.

An aborted turn is resubmitted with its tokens, as often as it takes; a failed engine costs one try out of a budget, and
whatever an earlier call brought is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import anyio

from asyncrl.failures import BugError, InfraError
from asyncrl.ports import GenerateRequest
from asyncrl.types import FinishReason, Turn, join_turns

FIRST_BACKOFF_S = 1.0


class CallReplica(Protocol):
    """One call to one replica: turns in the requests' order, each holding what this call sampled."""

    async def __call__(self, requests: Sequence[GenerateRequest], *, session: str) -> list[Turn]: ...


async def generate(
    call: CallReplica,
    requests: Sequence[GenerateRequest],
    *,
    session: str,
    max_attempts: int,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> list[Turn]:
    """Whole turns, in order, with tokens, log-probs and spans of all their parts merged.

    Args:
        call: Reaches a replica.
        requests: Their `max_tokens` counts all tokens of a turn, those of `so_far` included.
        session: Keeps a conversation on its replica.
        max_attempts: Calls that may fail before it is given up. Aborts by a weight sync are no failures.
        sleep: Waits between failed calls: 1 s, 2 s, 4 s, …

    Raises:
        InfraError: the budget is spent.
        DataError: the engine refuses a prompt.
    """
    turns = [request.so_far for request in requests]
    failures = 0
    calls = 0
    while pending := [index for index, turn in enumerate(turns) if not _done(turn, requests[index])]:
        calls += 1
        batch = [_resubmission(requests[index], turns[index], calls) for index in pending]
        try:
            answers = await call(batch, session=session)
        except InfraError as error:
            failures += 1
            if failures >= max_attempts:
                message = f"generation failed {failures} times, the last time: {error.message}"
                raise InfraError(message, error.cause) from error
            await sleep(FIRST_BACKOFF_S * 2 ** (failures - 1))
            continue
        if len(answers) != len(batch):
            raise BugError(f"a replica answered {len(batch)} requests with {len(answers)} turns")
        for index, answer in zip(pending, answers, strict=True):
            turns[index] = join_turns(turns[index], answer)
    return [_finished(turn, request) for turn, request in zip(turns, requests, strict=True)]


def _resubmission(request: GenerateRequest, so_far: Turn | None, calls: int) -> GenerateRequest:
    """The request with what it has so far, under an id of its own: an engine may still hold the one before."""
    return replace(request, request_id=f"{request.request_id}-{calls}", so_far=so_far)


def _done(turn: Turn | None, request: GenerateRequest) -> bool:
    if turn is None:
        return False
    return turn.finish_reason is not FinishReason.ABORTED or len(turn.response_ids) >= request.sampling["max_tokens"]


def _finished(turn: Turn | None, request: GenerateRequest) -> Turn:
    """An abort that hit after the last token of the budget is an end by length."""
    if turn is None:
        raise BugError(f"request {request.request_id} ended without a turn")
    return turn if turn.finish_reason is not FinishReason.ABORTED else replace(turn, finish_reason=FinishReason.LENGTH)
