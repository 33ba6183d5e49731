"""What comes back over a Serve handle, as an error of ours."""

from __future__ import annotations

from typing import Any

import anyio
import ray
from ray.serve.exceptions import RayServeException

from asyncrl.failures import AsyncRLError, InfraError


def typed(error: Exception, what: str) -> AsyncRLError:
    """The error of ours that a replica raised, or one about the replica itself; `what` says what was asked."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, AsyncRLError):
        return error.cause
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, ray.exceptions.RayError | RayServeException):
        return InfraError.wrap(f"{what}: the replica failed", error)
    return InfraError.wrap(f"{what}: no answer", error)


async def answer(response: Any, what: str) -> Any:
    """Wait for a handle's response; whoever is cancelled meanwhile cancels the call too. `what` says what was asked.

    Raises:
        AsyncRLError: see `typed`.
    """
    try:
        return await response
    except anyio.get_cancelled_exc_class():
        response.cancel()
        raise
    except Exception as error:
        raise typed(error, what) from error
