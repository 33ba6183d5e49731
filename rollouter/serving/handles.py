"""Gets Serve handles, waits for the answers of calls over them, and converts failures to `AsyncRLError`s."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import anyio
import ray
from anyio import to_thread
from ray.serve.exceptions import RayServeException

from asyncrl.core.failures import AsyncRLError, DeadlineError, EngineCrashError, InfraError, ReplicaLeftError

Result = TypeVar("Result")
_DEAD = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
)


def typed(error: BaseException, what: str, *, accepted: bool = True) -> AsyncRLError:
    """Convert an exception of a call to a replica to a typed error; `what` names the call in messages.

    With `accepted`, the replica had begun with the call, so the call may have caused the replica's end.
    """
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, AsyncRLError):
        return error.cause
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, ray.exceptions.RayActorError) and error.preempted:
        return ReplicaLeftError.wrap(f"{what}: the replica's node was preempted", error)
    if isinstance(error, _DEAD):
        kind = EngineCrashError if accepted else InfraError
        return kind.wrap(f"{what}: the replica's process is gone", error)
    if isinstance(error, ray.exceptions.RayError | RayServeException):
        return InfraError.wrap(f"{what}: the replica failed", error)
    return InfraError.wrap(f"{what}: no answer", error)


async def connect(make: Callable[[], Result], limit_s: float) -> Result:
    """Return the result of `make`, which gets handles of Serve's deployments, in a thread: Serve asks its controller,
    which does not answer while it restarts.

    Raises:
        InfraError: there is no such deployment any more, or no Serve.
        DeadlineError: Serve has not answered within `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s):
            return await to_thread.run_sync(make, abandon_on_cancel=True)
    except TimeoutError as error:
        raise DeadlineError(f"Ray Serve's controller has not answered within {limit_s:g} s") from error
    except (KeyError, ray.exceptions.RayError, RayServeException) as error:
        raise InfraError.wrap("Ray Serve gives no handle of the replicas", error) from error


async def answer(response: Any, what: str) -> Any:
    """Wait for a handle's response. A cancelled wait also cancels the call. `what` names the call in errors.

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
    """Yield the items of a streaming call. Closing the iterator before the end cancels the call.

    The first item shows that the replica has begun with the call. If the replica dies earlier, the call is not the
    cause.

    Args:
        limit_s: Deadline of the whole call, including the reader's work between two items.
        key: The configuration key of the limit.

    Raises:
        DeadlineError: the limit has passed; earlier items have been yielded.
        AsyncRLError: see `typed`.
    """
    until = anyio.current_time() + limit_s
    ended = accepted = False
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
                raise typed(error, what, accepted=accepted) from error
            accepted = True
            yield item
    finally:
        if not ended:
            response.cancel()


def _cancelled_elsewhere() -> bool:
    """Return whether the replica cancelled the call, which looks like a cancellation of the waiting task."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def own_log(descriptor: int = 2) -> str:
    """Return the files to which this process logs, or else the directory of Ray's log files.

    Ray gives each of its worker processes two files, `.out` and `.err`. Child processes write to the same files.
    """
    try:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # not on Linux
        file = ""
    name, suffix = os.path.splitext(file)
    if not os.path.isfile(file):
        return "the directory logs/ of the Ray session"
    return f"{name}.out and {suffix}" if suffix == ".err" else file
