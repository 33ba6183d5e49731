"""What happens around a stage.

    which step?  extract_step(call), or the slot of set_step
       not among `steps` ───────▶ run
       a record that may be served ──▶ its result
       else ────────────────────▶ run, then record

An async function never waits for the disk on its event loop: records are read in one thread and written in another
(`skip.lane`), and what takes longer than `FILES_S` is given up: the stage runs as if there were no record, or goes
unrecorded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from asyncrl.profiling import profile
from skip.lane import lane

if TYPE_CHECKING:
    from skip.base import BaseSkip, Call

Result = TypeVar("Result")

FILES_S = 60.0
"""Longest that an async stage waits for the files of its record."""


class Waiting(Protocol):
    """`WaitBoard.waiting`."""

    def __call__(self, edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]: ...


def nobody_told(edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]:
    """Where nobody shows what is waited on."""
    return nullcontext()


def around(
    made: BaseSkip,
    function: Callable[..., Any],
    call_of: Callable[[tuple[Any, ...], Mapping[str, Any]], Call],
) -> Callable[..., Any]:
    """`function`, a plain or an async one, with `made` around it. Raises what `made` and `function` raise."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            call, slot = call_of(args, kwargs), made.slot()
            with profile.span("skip.read", role=made.role) as span:
                look = await in_lane("read", made, lambda: made.look(call, slot))
                span.add(found=int(look is not None and look.found is not None))
            if look is None:
                made.count("late")
                return await function(*args, **kwargs)
            if look.found is not None:
                made.served(look.found)
                return look.found.result
            result = await function(*args, **kwargs)
            if (ask := look.ask) is not None:
                with profile.span("skip.write", role=made.role):
                    kept = await in_lane("write", made, lambda: made.keep(ask, result))
                made.count("late" if kept is None else "recorded" if kept else "unrecorded")
            return result

        return run_async

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with profile.span("skip.read", role=made.role) as span:
            look = made.look(call_of(args, kwargs), made.slot())
            span.add(found=int(look.found is not None))
        if look.found is not None:
            made.served(look.found)
            return look.found.result
        result = function(*args, **kwargs)
        if look.ask is not None:
            with profile.span("skip.write", role=made.role):
                kept = made.keep(look.ask, result)
            made.count("recorded" if kept else "unrecorded")
        return result

    return run


async def in_lane(name: str, made: BaseSkip, function: Callable[[], Result]) -> Result | None:
    """What `function` returns, in the thread for `read` or `write`; None: not in time. Raises what it raises."""
    with made.waiting("records", limit_s=FILES_S), anyio.move_on_after(FILES_S):
        return await lane(name).run(function)
    made.tell(f"late {name}", f"{made.files.root}: a record takes longer than {FILES_S:g} s to {name}, and is given up")
    return None
