"""Combine the outcomes of one call on the ranks of a group: which failure to raise, and whether the group stays usable.

A rank that died explains the failures of the others, and a failed rank explains why others don't answer. So the failure
to raise is a death, or else the first failure, or else a deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from asyncrl.core.failures import AsyncRLError, ConfigError, DataError, DeadlineError, DivergenceError

GRACE_S = 5.0
"""Time limit for the other ranks to report their failure after the first one."""
AGREED = (DataError, DivergenceError, ConfigError)
"""Failures that ranks decide on together, and that leave them unchanged."""


class CallResult(NamedTuple):
    """The result of a call. A failure is a value, so that it reaches the caller unchanged over any transport."""

    value: Any
    error: AsyncRLError | None
    local: bool = False
    """Whether the failure concerns only this rank, whose model and collective operations still agree with those of the
    others."""
    events: Sequence[Mapping[str, Any]] = ()
    """Events that the rank recorded (`asyncrl.profiling`); empty if it writes them itself."""


class LostRank(NamedTuple):
    """The outcome of a rank that will not answer, because it died or could not be called."""

    error: AsyncRLError
    """The reason. Its message continues "rank N of the … group "."""


Outcome = CallResult | LostRank


async def gather_outcomes(answers: Mapping[int, Awaitable[Outcome]], limit_s: float) -> dict[int, Outcome]:
    """Collect outcomes by rank, in the order of arrival: all of them, or those up to the first lost rank, within
    `limit_s` or within `GRACE_S` of the first failure."""
    outcomes: dict[int, Outcome] = {}
    send, receive = anyio.create_memory_object_stream[tuple[int, Outcome]](len(answers))

    async def wait(rank: int, answer: Awaitable[Outcome]) -> None:
        send.send_nowait((rank, await answer))

    async with send, receive, anyio.create_task_group() as tasks:
        for rank, answer in answers.items():
            tasks.start_soon(wait, rank, answer)
        with anyio.move_on_after(limit_s) as scope:
            while len(outcomes) < len(answers):
                rank, outcome = await receive.receive()
                outcomes[rank] = outcome
                if isinstance(outcome, LostRank):
                    break
                if outcome.error is not None:
                    scope.deadline = min(scope.deadline, anyio.current_time() + GRACE_S)
        tasks.cancel_scope.cancel()
    return outcomes


def values_of(outcomes: Mapping[int, Outcome]) -> dict[int, Any]:
    return {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, CallResult)}


def find_failure(
    group: str, what: str, ranks: Collection[int], outcomes: Mapping[int, Outcome], limit_s: float
) -> AsyncRLError | None:
    """Return the failure to raise, with its rank, or None if every rank succeeded.

    A failure on which the ranks agree is returned unchanged.
    """
    alike = _all_agree(ranks, outcomes)
    for rank, outcome in outcomes.items():
        if isinstance(outcome, LostRank):
            return type(outcome.error)(
                f"{what}: rank {rank} of the {group} group {outcome.error.message}", outcome.error.cause
            )
    for rank, outcome in outcomes.items():
        if outcome.error is None:
            continue
        if alike:
            return outcome.error
        alone = isinstance(outcome.error, AGREED) and not _is_local(outcome)
        end = "; the other ranks did not fail in the same way, so the group cannot be used any more" if alone else ""
        return type(outcome.error)(
            f"rank {rank} of the {group} group: {outcome.error.message}{end}", outcome.error.cause
        )
    silent = [str(rank) for rank in ranks if rank not in outcomes]
    if silent:
        return DeadlineError(
            f"{what}: rank {', '.join(silent)} of the {group} group did not answer within {limit_s:g} s; look for a "
            "process that hangs, or raise the deadline (timeouts.train_s, start_s, call_s or probe_s)"
        )
    return None


def group_is_usable(ranks: Collection[int], outcomes: Mapping[int, Outcome], *, changes_model: bool) -> bool:
    """Return whether the ranks can be used after a failure.

    No rank may be lost or still computing. Ranks that have all refused a call are unchanged, and so is a single rank
    after a read-only call. After any other failure, ranks may be waiting in a collective operation that a failed
    rank left.
    """
    if len(outcomes) < len(ranks) or any(isinstance(outcome, LostRank) for outcome in outcomes.values()):
        return False
    if all(outcome.error is None or _is_local(outcome) for outcome in outcomes.values()):
        return True
    return _all_agree(ranks, outcomes) or (len(ranks) == 1 and not changes_model)


def _all_agree(ranks: Collection[int], outcomes: Mapping[int, Outcome]) -> bool:
    """Return whether all ranks have answered with the same kind of `AGREED` failure."""
    kinds = {type(outcome.error) for outcome in outcomes.values()}
    answered = len(outcomes) == len(ranks) and all(isinstance(outcome, CallResult) for outcome in outcomes.values())
    return answered and len(kinds) == 1 and kinds.pop() in AGREED


def _is_local(outcome: Outcome) -> bool:
    return isinstance(outcome, CallResult) and outcome.local
