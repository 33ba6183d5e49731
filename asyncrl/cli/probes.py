"""Every part is asked how it is, again and again, each on its own: none is behind another that does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from asyncrl.failures import DeadlineError

TICK_S = 1.0

Answer = TypeVar("Answer")


async def probe(
    ask: Callable[[], Awaitable[Answer | None]],
    *,
    heard: Callable[[Answer], Awaitable[None]],
    missed: Callable[[DeadlineError], Awaitable[None]],
) -> None:
    """Ask about once a second, until cancelled.

    Args:
        ask: the part's answer, bounded; None: there is nobody to ask just now.
        heard: awaited with each answer.
        missed: awaited when there was none in time.

    Raises:
        AsyncRLError: what `ask` raised other than `DeadlineError`, or what the other two did.
    """
    while True:
        try:
            answer = await ask()
        except DeadlineError as error:
            await missed(error)
        else:
            if answer is not None:
                await heard(answer)
        await anyio.sleep(TICK_S)
