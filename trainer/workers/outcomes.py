"""What the ranks of a group say to one call, and what follows from it when they do not all succeed. No Ray, no torch.

A death explains the failures of the others, a failure explains their silence; so the cause that counts is a death, else
the first failure, else the silence.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from asyncrl.failures import AsyncRLError, ConfigError, DataError, DeadlineError, DivergenceError

GRACE_S = 5.0
"""What the other ranks may take to report the failure that one of them has reported."""
AGREED = (DataError, DivergenceError, ConfigError)
"""Failures that ranks decide on together, and that leave them as they were."""


class Answer(NamedTuple):
    """What became of a call. A failure is a value: it reaches the caller as it is, whatever the transport."""

    value: Any
    error: AsyncRLError | None
    apart: bool = False
    """The failure is this rank's own business: its model and its collective operations went as those of the others."""
    events: Sequence[Mapping[str, Any]] = ()
    """What the rank recorded until then (`asyncrl.profiling`); none of a rank that writes them itself."""


class Lost(NamedTuple):
    """No answer will come."""

    error: AsyncRLError
    """Its message goes on behind "rank N of the … group "."""


Outcome = Answer | Lost


async def gather(answers: Mapping[int, Awaitable[Outcome]], limit_s: float) -> dict[int, Outcome]:
    """By rank, in the order in which they came: all of them, or up to the first loss, or what came within `limit_s` or
    within `GRACE_S` of the first failure."""
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
                if isinstance(outcome, Lost):
                    break
                if outcome.error is not None:
                    scope.deadline = min(scope.deadline, anyio.current_time() + GRACE_S)
        tasks.cancel_scope.cancel()
    return outcomes


def values_of(outcomes: Mapping[int, Outcome]) -> dict[int, Any]:
    return {rank: outcome.value for rank, outcome in outcomes.items() if isinstance(outcome, Answer)}


def failure(
    group: str, what: str, ranks: Collection[int], outcomes: Mapping[int, Outcome], limit_s: float
) -> AsyncRLError | None:
    """The cause that counts, with the rank it comes from; None: all have succeeded.

    What the ranks agree on is about all of them and stays as it was raised.
    """
    alike = _alike(ranks, outcomes)
    for rank, outcome in outcomes.items():
        if isinstance(outcome, Lost):
            return type(outcome.error)(
                f"{what}: rank {rank} of the {group} group {outcome.error.message}", outcome.error.cause
            )
    for rank, outcome in outcomes.items():
        if outcome.error is None:
            continue
        if alike:
            return outcome.error
        alone = isinstance(outcome.error, AGREED) and not _apart(outcome)
        end = "; the other ranks say otherwise, so the group is of no more use" if alone else ""
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


def usable(ranks: Collection[int], outcomes: Mapping[int, Outcome], *, changes_model: bool) -> bool:
    """Whether the ranks can go on after a failure.

    None may be lost or still at it. Ranks that have refused alike are as they were; and so is a lone one of which only
    was read. In any other failure some rank may have left the others alone in a collective operation, and the process
    group with it.
    """
    if len(outcomes) < len(ranks) or any(isinstance(outcome, Lost) for outcome in outcomes.values()):
        return False
    if all(outcome.error is None or _apart(outcome) for outcome in outcomes.values()):
        return True
    return _alike(ranks, outcomes) or (len(ranks) == 1 and not changes_model)


def _alike(ranks: Collection[int], outcomes: Mapping[int, Outcome]) -> bool:
    """Whether all ranks have answered with the same of the failures that they decide on together."""
    kinds = {type(outcome.error) for outcome in outcomes.values()}
    answered = len(outcomes) == len(ranks) and all(isinstance(outcome, Answer) for outcome in outcomes.values())
    return answered and len(kinds) == 1 and kinds.pop() in AGREED


def _apart(outcome: Outcome) -> bool:
    return isinstance(outcome, Answer) and outcome.apart
