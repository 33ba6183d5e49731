"""Every part is asked how it is, again and again, each on its own: none is behind another that does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from asyncrl.failures import DeadlineError

TICK_S = 1.0
AGAIN_S = 2.0
"""For the second try: a part that is well answers within milliseconds."""

Answer = TypeVar("Answer")


async def probe(
    ask: Callable[[float], Awaitable[Answer | None]],
    limit_s: float,
    *,
    heard: Callable[[Answer], Awaitable[None]],
    missed: Callable[[DeadlineError], Awaitable[None]],
) -> None:
    """Ask about once a second, until cancelled.

    Args:
        ask: the part's answer within so many seconds; None: there is nobody to ask just now.
        limit_s: for an answer.
        heard: awaited with each answer.
        missed: awaited when there was none in time, and not when asked once more either: when this process has stood
            still, stopped by a signal or starved, a deadline passes before the answer that was waiting is looked at.

    Raises:
        AsyncRLError: what `ask` raised other than `DeadlineError`, or what the other two did.
    """
    while True:
        late: DeadlineError | None = None
        try:
            try:
                answer = await ask(limit_s)
            except DeadlineError as error:
                late = error
                answer = await ask(min(limit_s, AGAIN_S))
        except DeadlineError as error:
            await missed(late or error)
        else:
            if answer is not None:
                await heard(answer)
        await anyio.sleep(TICK_S)
