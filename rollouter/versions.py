"""Versions on the Rollouter's side: one at a time from the feed to every replica, validated where asked.

    wait_newer ─▶ fleet.apply ─▶ queue.set_applied_version ─▶ ApplyRecord ─▶ validate? ─▶ ValidationRecord ─▶ again

Newer is by edition: when training goes back to a checkpoint, its version is published in a newer lineage, and the
replicas go back to it.

Validation stands between two applies, so it is answered by one version from its first to its last token, while training
generation goes on beside it. If a replica is replaced meanwhile and starts with a newer version, every replica is
brought to the newest, and that is validated in its place. If training goes back, the validation is given up at once:
nobody wants its figures any more, and the gate waits for the apply.

The loop is unblocked by a publication, and by `finish()`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from asyncrl.failures import BugError, InfraError
from asyncrl.ports import (
    ApplyRecord,
    Edition,
    EngineFleet,
    Publication,
    RecordSink,
    SampleQueue,
    ValidationRecord,
    WeightFeed,
)
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
        validated: Edition | None,
        poll_s: float,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """See `rollouter.RolloutStart` for `validate_first` and `validated`."""
        self._feed = feed
        self._fleet = fleet
        self._queue = queue
        self._sink = sink
        self._validator = validator
        self._validate_first = validate_first
        self._validated_before = validated
        self._poll_s = poll_s
        self._waits = waits
        self._clock = clock
        self._wall_clock = wall_clock
        self._finishing = False
        self._parked: anyio.CancelScope | None = None
        self.edition = Edition(0, 0)
        """What every replica serves; (0, 0): the model's files."""

    def finish(self) -> None:
        """The stream has ended: apply the newest publication, if there is a newer one, and return."""
        self._finishing = True
        if self._parked is not None:
            self._parked.cancel()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """See the module. `task_status` is started once the replicas serve what generation goes on from.

        Raises:
            InfraError: a version could not be applied, or the feed is gone.
            Whatever the validation raises.
        """
        # In a resumed run the Trainer publishes its checkpoint before anything is generated.
        first = await self._feed.latest()
        if first is not None:
            await self._apply(first, again=True)
        # Generation may begin: before, a resumed run would sample from the model's files.
        task_status.started()
        wanted = self._validate_first or (first is not None and first.validate)
        if wanted and (self._validated_before is None or self._validated_before < self.edition):
            await self._validate(first.step if first else 0)
        while not self._finishing:
            await self._take(await self._wait_newer())
        while (last := await self._feed.latest()) is not None and last.edition > self.edition:
            await self._take(last)

    async def _wait_newer(self) -> Publication | None:
        """None: nothing new in time, or the stream has ended."""
        with anyio.CancelScope() as self._parked, self._waits.waiting("weights"):
            return await self._feed.wait_newer(self.edition, timeout_s=self._poll_s)
        return None

    async def _take(self, publication: Publication | None) -> None:
        """Apply and validate it, and what has taken its place before its validation was done."""
        if publication is None or publication.edition <= self.edition:
            return
        await self._apply(publication)
        if publication.validate:
            await self._validate(publication.step)

    async def _apply(self, publication: Publication, *, again: bool = False) -> None:
        """`again`: every replica may have served it before, which is no news then."""
        learned = self._clock()
        with self._waits.waiting("apply"):
            reports = await self._fleet.apply(publication)
        if published := publication.published_at_s:
            publish_to_applied_s = max(0.0, self._wall_clock() - published)
        else:
            publish_to_applied_s = self._clock() - learned
        # A replica that was replaced meanwhile may already serve a newer one; its tokens say so.
        if behind := [report for report in reports if report.edition < publication.edition]:
            raise InfraError(
                f"replica {behind[0].replica} serves {_words(behind[0].edition)} after "
                f"{_words(publication.edition)} was applied: its tokens would be booked under the wrong version"
            )
        self.edition = publication.edition
        # Only now: the gate counts versions that every replica serves.
        await self._queue.set_applied_version(publication.version, lineage=publication.lineage)
        if again and not any(report.load_s for report in reports):
            return
        record = ApplyRecord(publication.version, tuple(reports), publish_to_applied_s, publication.lineage)
        await self._sink.put(record)

    async def _validate(self, step: int) -> None:
        """Validate what every replica serves, and where a replaced replica has gone ahead, what that one serves.

        Where training has gone back meanwhile, nothing: what it has gone back to is a publication like any other.
        """
        if self._validator is None:
            return
        while True:
            try:
                record = await self._validated(self._validator, step)
            except Superseded as error:
                # The replica knew of it from the store, which may have been restarted since: then it is told again.
                newest = await self._feed.wait_newer(self.edition, timeout_s=self._poll_s)
                if newest is None:
                    raise BugError(f"{error}, which nobody has published") from error
                if newest.lineage > self.edition.lineage:
                    return
                if error.other < error.version:
                    raise BugError(f"{error}, an older one") from error
                logger.warning("%s, as some were replaced; version %d is validated instead", error, newest.version)
                await self._apply(newest)
                step = newest.step
            else:
                if record is not None:
                    await self._sink.put(record)
                return

    async def _validated(self, validator: Validator, step: int) -> ValidationRecord | None:
        """None: training has gone back to a checkpoint meanwhile.

        Raises:
            Superseded: alone.
            Others as `Validator.run`, inside an exception group.
        """
        superseded: Superseded | None = None
        record: ValidationRecord | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_at_new_lineage, group.cancel_scope)
            try:
                record = await validator.run(self.edition, step)
            except Superseded as error:
                superseded = error
            group.cancel_scope.cancel()
        if superseded is not None:
            raise superseded
        return record

    async def _cancel_at_new_lineage(self, scope: anyio.CancelScope) -> None:
        last = Edition(self.edition.lineage, sys.maxsize)
        while (newest := await self._feed.wait_newer(last, timeout_s=self._poll_s)) is None:
            pass
        told = (_words(self.edition), _words(newest.edition))
        logger.info("the validation of %s is given up: training went back to %s", *told)
        scope.cancel()


def _words(edition: Edition) -> str:
    lineage, version = edition
    return f"version {version}" if lineage == 0 else f"version {version} of lineage {lineage}"
