"""The waits of one sample: its time limit, and after a crash the verdict and the lane of `rollouter.quarantine`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import anyio

from asyncrl.failures import EngineCrashError
from asyncrl.waits import WaitBoard
from rollouter.drops import TooLongError
from rollouter.quarantine import Quarantine

logger = logging.getLogger(__name__)

SETTLE_S = 1.0
"""By then everybody knows of its place: the word that a replica has taken a call is on its way for milliseconds."""
LONGEST_S = 30.0
"""A crash is judged by then, even where a call on that replica is still open: one that Ray has forgotten, perhaps."""


class TimeLimit:
    """What is left of a sample's time. See `time_limit`."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._pauses = 0
        self._left_s = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not the sample's own; it goes on when all who have paused it are done."""
        if not self._pauses:
            self._left_s = self._scope.deadline - anyio.current_time()
            self._scope.deadline = math.inf
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._scope.deadline = anyio.current_time() + self._left_s


@contextmanager
def time_limit(name: str, limit_s: float) -> Iterator[TimeLimit]:
    """Everything inside, in one task, ends within `limit_s` seconds.

    Raises:
        TooLongError: it did not; what was inside has been cancelled.
    """
    with anyio.move_on_after(limit_s) as scope:
        yield TimeLimit(scope)
    if scope.cancelled_caught:
        raise TooLongError(
            f"{name} was not generated within timeouts.sample_s = {limit_s:g} s; raise it if such samples are worth "
            "waiting for, or lower rollout.response_length"
        )


class Probation:
    """Decides with `Quarantine` who goes on after a crash, and lets everybody wait for that. One event loop's."""

    def __init__(
        self,
        max_crashes: int,
        *,
        waits: WaitBoard,
        settle_s: float = SETTLE_S,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._quarantine = Quarantine(max_crashes)
        self._waits = waits
        self._settle_s = settle_s
        self._wall_clock = wall_clock
        self._changed = anyio.Event()
        self._limits: dict[str, TimeLimit] = {}
        """Of those that have been at a crash."""

    def placed(self, name: str, replica: str) -> None:
        """Its requests are on this replica from now on; empty: on none."""
        self._quarantine.placed(name, replica)
        self._tell()

    async def crashed(self, name: str, error: EngineCrashError, limit: TimeLimit) -> None:
        """An engine died that had `name`. Returns once it may be tried again.

        The wait is not on its time, `limit`, but for that in which another session of the same sample is in the lane:
        one that comes to no end there would keep the lane for ever, if its siblings who wait for it stopped its clock.

        Raises:
            PoisonError: it may not: engines crash in its presence.
        """
        logger.info("%s was in flight when an engine crashed: %s", name, error.message)
        self._limits[name] = limit
        with self._waits.waiting("probation"):
            with limit.paused():
                crash = self._quarantine.crashed(name, error.brief, error.replica, self._wall_clock())
                self._tell()
                with anyio.move_on_after(LONGEST_S):
                    await anyio.sleep(self._settle_s)
                    while not (crash.judged or self._quarantine.all_told(crash)):
                        await self._changed.wait()
                self._quarantine.judge(crash)
                self._tell()
            while (standing := self._quarantine.standing(name)) == "waiting":
                sibling = self._limits.get(self._quarantine.in_lane or "") is limit
                with nullcontext() if sibling else limit.paused():
                    await self._changed.wait()
        if standing == "guilty":
            raise self._quarantine.poison(name)

    def left(self, name: str) -> None:
        """It has its tokens, or is given up."""
        self._limits.pop(name, None)
        self._quarantine.left(name)
        self._tell()

    def suspended(self, name: str) -> None:
        """It was cut, and is gone on with later."""
        self._limits.pop(name, None)
        self._quarantine.suspended(name)
        self._tell()

    def figures(self) -> Mapping[str, int | str]:
        """See `Quarantine.figures`."""
        return self._quarantine.figures()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Sessions:
    """The sessions of one sample, whose requests may be on several replicas: part of its `GroupEvents`."""

    def __init__(self, probation: Probation, limit: TimeLimit) -> None:
        self._probation = probation
        self._limit = limit
        self._sessions: set[str] = set()

    def placed(self, session: str, replica: str) -> None:
        """See `GroupEvents`."""
        self._sessions.add(session)
        self._probation.placed(session, replica)

    async def crashed(self, session: str, error: EngineCrashError) -> None:
        """See `GroupEvents`."""
        self._sessions.add(session)
        await self._probation.crashed(session, error, self._limit)

    def answered(self, session: str) -> None:
        """See `GroupEvents`."""
        self._sessions.discard(session)
        self._probation.left(session)

    def suspended(self) -> None:
        """The sample was cut, and is gone on with later."""
        for session in self._sessions:
            self._probation.suspended(session)
        self._sessions.clear()

    def left(self) -> None:
        """Its generation is over, one way or another."""
        for session in self._sessions:
            self._probation.left(session)
