"""What comes back over a Serve handle, with errors of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import ray
from ray.serve.exceptions import RayServeException

from asyncrl.failures import AsyncRLError, DeadlineError, EngineCrashError, InfraError

_DEAD = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
)


def typed(error: BaseException, what: str, *, taken: bool = True) -> AsyncRLError:
    """The error of ours that a replica raised, or one about the replica itself.

    Args:
        error: What the handle raised.
        what: What was asked.
        taken: The replica had begun with it, so that this may be what ended it.
    """
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, AsyncRLError):
        return error.cause
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, _DEAD):
        kind = EngineCrashError if taken else InfraError
        return kind.wrap(f"{what}: the replica's process is gone", error)
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
    except anyio.get_cancelled_exc_class() as error:
        response.cancel()
        if _cancelled_elsewhere():
            raise typed(error, what) from error
        raise
    except Exception as error:
        raise typed(error, what) from error


async def items(response: Any, what: str, limit_s: float, key: str) -> AsyncGenerator[Any, None]:
    """What a streaming call yields, as it comes. Whoever stops reading before the end (`aclose`) cancels the call.

    The first item says that the replica has begun: if it dies before, it was not this call that ended it.

    Args:
        response: Of a handle with `stream=True`.
        what: What was asked.
        limit_s: For the whole call, what the reader does between two items included.
        key: Where the limit comes from.

    Raises:
        DeadlineError: past the limit; what came until then has been yielded.
        AsyncRLError: see `typed`.
    """
    until = anyio.current_time() + limit_s
    ended = taken = False
    try:
        while True:
            try:
                with anyio.fail_after(until - anyio.current_time()):
                    item = await anext(response)
            except StopAsyncIteration:
                ended = True
                return
            except TimeoutError as error:
                raise DeadlineError(f"{what} took over {limit_s:g} s ({key})") from error
            except anyio.get_cancelled_exc_class() as error:
                if _cancelled_elsewhere():
                    raise typed(error, what) from error
                raise
            except Exception as error:
                ended = True
                raise typed(error, what, taken=taken) from error
            taken = True
            yield item
    finally:
        if not ended:
            response.cancel()


def _cancelled_elsewhere() -> bool:
    """A call that its replica has cancelled, at its own end, looks like the cancellation of whoever waits for it."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()
