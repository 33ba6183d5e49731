"""Calls from the driver to the parts: a deadline on each, our own errors out of Ray's, and an end to what hangs."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrl.cli.processes import end_known
from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.run_dir import disk_error
from asyncrl.run_state import ProcessInfo

KILL_S = 25.0
"""For the processes of a part to be gone, and for Ray to take note of it."""

logger = logging.getLogger(__name__)


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


async def stream(part: str, generator: ray.ObjectRefGenerator) -> AsyncGenerator[Any, None]:
    """What a part's `run` yields, until it ends. How long a pause may be is the watchdog's matter, not this one's."""
    try:
        async for ref in generator:
            yield await ref
    except RayError as error:
        raise translate(part, error) from None


async def kill(actor: Any, known: Collection[ProcessInfo], heard_at: float) -> None:
    """End an actor for good, and its known processes, as they told at `heard_at` (wall clock). A stopped process does
    not hear Ray, so those on this machine are killed by number. Bounded; not cancelled half-way."""

    def kill_them() -> None:
        nodes = nodes_here()
        end_known([process.pid for process in known if process.node_id in nodes], heard_at)
        with suppress(RayError):
            ray.kill(actor)

    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(KILL_S) as scope:
            await to_thread.run_sync(kill_them, abandon_on_cancel=True)
        if scope.cancelled_caught:
            logger.warning("Ray did not kill an actor within %g s; what it still does is not accepted", KILL_S)


async def kill_hung(name: str, pid: int, heard_at: float) -> bool:
    """End the process of an actor on this node that Ray starts again: class `name`, known by `pid` at `heard_at` (wall
    clock). False: it has ended by itself, and its successor is not to be hurt."""
    with anyio.CancelScope(shield=True):
        found = await to_thread.run_sync(partial(end_known, [pid], heard_at, title=f"ray::{name}"))
    return found > 0


def nodes_here() -> frozenset[str]:
    """Ray's ids of the nodes on this machine: those at this node's address. Blocking."""
    mine = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()
    address = next((node["NodeManagerAddress"] for node in nodes if node["NodeID"] == mine), None)
    return frozenset({mine, *(node["NodeID"] for node in nodes if node["NodeManagerAddress"] == address)})


def translate(part: str, error: RayError) -> AsyncRLError:
    """`error`, met on a call to `part`, as one of ours."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, AsyncRLError):
            return cause
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_error(Path(cause.filename or f"the {part}'s files"), cause)
        if isinstance(cause, OSError | RayError):
            return InfraError(f"the {part} failed: {cause}", str(error))
        return BugError(f"the {part} failed: {type(cause).__name__}: {cause}", str(error))
    if isinstance(error, RayActorError):
        return InfraError(f"the {part}'s process died; logs/ray in the run directory may say why", str(error))
    return InfraError.wrap(f"a call to the {part} failed: {error}", error)
