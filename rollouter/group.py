"""Generating and checking one group: a prompt's `n` turns, and a greedy one if asked, in one call to the fleet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.failures import BugError, DataError
from asyncrl.ports import EngineFleet, GenerateRequest, OnCrash, OnPlace
from asyncrl.types import FinishReason, Prompt, Turn

BASELINE = "baseline"

OnGroupTurn = Callable[[str, Turn], Awaitable[None]]
"""A turn's key within its group, `0` to `n-1` or `baseline`, and the turn, complete."""


async def generate_group(
    fleet: EngineFleet,
    name: str,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    *,
    n: int,
    baseline: Mapping[str, Any] | None = None,
    completed: Mapping[str, Turn] | None = None,
    on_turn: OnGroupTurn | None = None,
    on_place: OnPlace | None = None,
    on_crash: OnCrash | None = None,
) -> list[Turn]:
    """The `n` turns of a prompt, and behind them one more with `baseline` as its sampling, if that is given.

    Args:
        name: The session; `name/k` are the requests, and `name/baseline`.
        completed: Turns there are already, by key: they are not asked for again.
        on_turn: Awaited once for each turn made now, as soon as it is complete.
        on_place, on_crash: See `EngineFleet.generate`.

    Raises:
        InfraError: from the fleet, its retries spent.
        DataError: the engine refuses the request, or a response has no token: nothing could be trained on it.
        BugError: the fleet broke its contract.
        What `on_turn` and `on_crash` raise.
    """
    wanted = {str(k): sampling for k in range(n)}
    if baseline is not None:
        wanted[BASELINE] = baseline
    have = completed or {}
    requests = [
        GenerateRequest(f"{name}/{key}", prompt.prompt_ids, params, so_far=have.get(key))
        for key, params in wanted.items()
    ]
    keys = list(wanted)

    async def told(number: int, turn: Turn) -> None:
        if on_turn is not None and keys[number] not in have:
            await on_turn(keys[number], turn)

    turns = await fleet.generate(requests, session=name, on_turn=told, on_place=on_place, on_crash=on_crash)
    if len(turns) != len(requests):
        raise BugError(f"{name}: the fleet returned {len(turns)} turns for {len(requests)} requests")
    for request, turn in zip(requests, turns, strict=True):
        if turn.finish_reason is FinishReason.ABORTED:
            raise BugError(f"{request.request_id}: the fleet returned an aborted turn; it has to resume those itself")
        if len(turn.rollout_log_probs) != len(turn.response_ids):
            raise BugError(
                f"{request.request_id}: {len(turn.rollout_log_probs)} log-probs for {len(turn.response_ids)} tokens"
            )
        if not len(turn.response_ids) or not turn.spans:
            raise DataError(f"{request.request_id}: the engine returned an empty response")
    return turns
