"""Versions on the Rollouter's side: one at a time from the feed to every replica, validated where asked.

    wait_newer ─▶ fleet.apply ─▶ queue.set_applied_version ─▶ ApplyRecord ─▶ validate? ─▶ ValidationRecord ─▶ again

Validation stands between two applies, so it is answered by one version from its first to its last token, while training
generation goes on beside it. If a replica is replaced meanwhile and starts with a newer version, every replica is
brought to the newest, and that is validated in its place. The loop is unblocked by a publication, and by `finish()`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from asyncrl.failures import BugError, InfraError
from asyncrl.ports import ApplyRecord, EngineFleet, Publication, RecordSink, SampleQueue, WeightFeed
from asyncrl.waits import WaitBoard
from rollouter.validation import Superseded, Validator

logger = logging.getLogger(__name__)


class VersionLoop:
    """Applies what the Trainer publishes until `finish()`, and then what is newest."""

    def __init__(
        self,
        *,
        feed: WeightFeed,
        fleet: EngineFleet,
        queue: SampleQueue,
        sink: RecordSink,
        validator: Validator | None,
        validate_first: bool,
        poll_s: float,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._feed = feed
        self._fleet = fleet
        self._queue = queue
        self._sink = sink
        self._validator = validator
        self._validate_first = validate_first
        self._poll_s = poll_s
        self._waits = waits
        self._clock = clock
        self._wall_clock = wall_clock
        self._finishing = False
        self._parked: anyio.CancelScope | None = None
        self.version = 0
        """What every replica serves; 0: the model's files."""

    def finish(self) -> None:
        """The stream has ended: apply the newest publication, if there is a newer one, and return."""
        self._finishing = True
        if self._parked is not None:
            self._parked.cancel()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """See the module. `task_status` is started once the replicas serve what a resumed run goes on from.

        Raises:
            InfraError: a version could not be applied, or the feed is gone.
            Whatever the validation raises.
        """
        # In a resumed run the Trainer publishes its checkpoint before anything is generated.
        resumed = await self._feed.latest()
        if resumed is not None:
            await self._apply(resumed)
        # Generation may begin: before, a resumed run would sample from the model's files.
        task_status.started()
        if self._validate_first or (resumed is not None and resumed.validate):
            await self._validate(self.version, resumed.step if resumed else 0)
        while not self._finishing:
            await self._take(await self._wait_newer())
        await self._take(await self._feed.latest())

    async def _wait_newer(self) -> Publication | None:
        """None: nothing new in time, or the stream has ended."""
        with anyio.CancelScope() as self._parked, self._waits.waiting("weights"):
            return await self._feed.wait_newer(self.version, timeout_s=self._poll_s)
        return None

    async def _take(self, publication: Publication | None) -> None:
        if publication is None or publication.version <= self.version:
            return
        await self._apply(publication)
        if publication.validate:
            await self._validate(publication.version, publication.step)

    async def _apply(self, publication: Publication) -> None:
        learned = self._clock()
        with self._waits.waiting("apply"):
            reports = await self._fleet.apply(publication)
        if published := publication.published_at_s:
            publish_to_applied_s = max(0.0, self._wall_clock() - published)
        else:
            publish_to_applied_s = self._clock() - learned
        # A replica that was replaced meanwhile may already serve a newer one; its tokens say so.
        if behind := [report for report in reports if report.version < publication.version]:
            raise InfraError(
                f"replica {behind[0].replica} serves version {behind[0].version} after version {publication.version} "
                "was applied: its tokens would be booked under the wrong version"
            )
        self.version = publication.version
        # Only now: the gate counts versions that every replica serves.
        await self._queue.set_applied_version(publication.version)
        await self._sink.put(ApplyRecord(publication.version, tuple(reports), publish_to_applied_s))

    async def _validate(self, version: int, step: int) -> None:
        """Validate what every replica serves, and where a replaced replica has gone ahead, what that one serves."""
        if self._validator is None:
            return
        while True:
            try:
                record = await self._validator.run(version, step)
            except Superseded as error:
                newest = await self._feed.latest()
                if newest is None or newest.version <= version:
                    raise BugError(f"{error}, which nobody has published") from error
                logger.warning("%s, as some were replaced; version %d is validated instead", error, newest.version)
                await self._apply(newest)
                version, step = newest.version, newest.step
            else:
                await self._sink.put(record)
                return
