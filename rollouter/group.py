"""Generating and checking one group: a prompt's `n` turns, and a greedy one if asked, in one call to the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.failures import BugError, DataError
from asyncrl.ports import EngineFleet, GenerateRequest
from asyncrl.types import FinishReason, Prompt, Turn


async def generate_group(
    fleet: EngineFleet,
    name: str,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    *,
    n: int,
    baseline: Mapping[str, Any] | None = None,
) -> list[Turn]:
    """The `n` turns of a prompt, and behind them one more with `baseline` as its sampling, if that is given.

    `name` is the session; `name/k` are the requests, and `name/baseline`.

    Raises:
        InfraError: from the fleet, its retries spent.
        DataError: the engine refuses the request, or a response has no token: nothing could be trained on it.
        BugError: the fleet broke its contract.
    """
    requests = [GenerateRequest(f"{name}/{k}", prompt.prompt_ids, sampling) for k in range(n)]
    if baseline is not None:
        requests.append(GenerateRequest(f"{name}/baseline", prompt.prompt_ids, baseline))
    turns = await fleet.generate(requests, session=name)
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
