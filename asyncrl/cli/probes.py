"""Every part is asked how it is, again and again, each on its own: none is behind another that does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from asyncrl.failures import DeadlineError

TICK_S = 1.0
AGAIN_S = 2.0
"""For the second try: a part that is well answers within milliseconds."""
SLACK_S = 1.0
"""A deadline that passes so much later than it should was held up by this process."""

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
        missed: awaited when there was none in time, and not when asked once more either. When this process stands
            still, stopped by a signal or starved, a deadline may pass before the answer that was waiting is looked at:
            of a second try in which it did so nothing follows, and there is a third.

    Raises:
        AsyncRLError: what `ask` raised other than `DeadlineError`, or what the other two did.
    """
    while True:
        late: DeadlineError | None = None
        within_s = limit_s
        while True:
            began_s = anyio.current_time()
            try:
                answer = await ask(within_s)
            except DeadlineError as error:
                stood_still = anyio.current_time() - began_s > within_s + SLACK_S
                if late is not None and not stood_still:
                    await missed(late)
                    break
                late, within_s = late or error, min(limit_s, AGAIN_S)
            else:
                if answer is not None:
                    await heard(answer)
                break
        await anyio.sleep(TICK_S)
