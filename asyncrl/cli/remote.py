"""Calls from the driver to the parts: a deadline on each, and our own errors out of Ray's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError


async def ask(part: str, ref: Any, timeout_s: float, *, doing: str) -> Any:
    """The answer behind `ref`.

    Raises:
        DeadlineError: none within `timeout_s`.
        AsyncRLError: what the part raised, as it raised it; `InfraError` if the part's process is gone.
    """
    try:
        with anyio.fail_after(timeout_s):
            return await ref
    except TimeoutError:
        raise DeadlineError(f"the {part} did not finish {doing} within {timeout_s:g} s") from None
    except RayError as error:
        raise translate(part, error) from None


async def stream(part: str, generator: ray.ObjectRefGenerator) -> AsyncIterator[Any]:
    """What a part's `run` yields, until it ends. How long a pause may be is the watchdog's matter, not this one's."""
    try:
        async for ref in generator:
            yield await ref
    except RayError as error:
        raise translate(part, error) from None


def translate(part: str, error: RayError) -> AsyncRLError:
    """`error`, met on a call to `part`, as one of ours."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, AsyncRLError):
            return cause
        if isinstance(cause, OSError):
            return InfraError(f"the {part} failed: {cause}", str(error))
        return BugError(f"the {part} failed: {type(cause).__name__}: {cause}", str(error))
    if isinstance(error, RayActorError):
        return InfraError(
            f"the {part}'s process died. Its work since the last checkpoint is lost; look into logs/ray in the run "
            "directory, and start the run again, with resume=auto to go on from its last checkpoint if it has one",
            str(error),
        )
    return InfraError.wrap(f"a call to the {part} failed: {error}", error)
