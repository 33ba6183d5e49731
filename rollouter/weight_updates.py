"""Versions on the Rollouter's side: one at a time from the feed to every replica, validated where asked.

    wait_newer ─▶ fleet.apply ─▶ queue.set_applied_version ─▶ ApplyRecord ─▶ validate? ─▶ ValidationRecord ─▶ again

Newer is by edition: when training goes back to a checkpoint, its version is published in a newer lineage, and the
replicas go back to it.

Validation stands between two applies, so it is answered by one version from its first to its last token, while training
generation goes on beside it. If a replica is replaced meanwhile and starts with a newer version, every replica is
brought to the newest, and that is validated in its place. If it starts with an older one, as it has heard of nothing
newer yet, it is told, and the validation is asked for again. If training goes back, the validation is given up at once:
nobody wants its figures any more, and the gate waits for the apply.

A validation that was asked for and not recorded (the process that was at it died, the store forgot the wish) is owed:
the next version that is applied is validated.

The loop is unblocked by a publication, and by `finish()`.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable

import anyio
from anyio.abc import TaskStatus

from asyncrl.config.plan import validation_due
from asyncrl.failures import InfraError
from asyncrl.ports import ApplyReport, Edition, EngineFleet, Publication, SampleQueue, WeightFeed
from asyncrl.profiling import profile
from asyncrl.records import ApplyRecord, RecordSink, ValidationRecord
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
        validated_step: int = 0,
        test_freq: int = -1,
        poll_s: float,
        apply_s: float,
        start_s: float,
        waits: WaitBoard,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """See `rollouter.RolloutStart` for `validate_first`, `validated` and `validated_step`.

        Args:
            test_freq: `trainer.test_freq`.
            poll_s: longest single wait for a publication.
            apply_s: longest single call to the replicas to take a version.
            start_s: how long a replica that was just replaced may answer with another version than was applied.
        """
        self._feed = feed
        self._fleet = fleet
        self._queue = queue
        self._sink = sink
        self._validator = validator
        self._validate_first = validate_first
        self._validated = validated
        self._validated_step = validated_step
        self._test_freq = test_freq
        self._poll_s = poll_s
        self._apply_s = apply_s
        self._start_s = start_s
        self._waits = waits
        self._clock = clock
        self._wall_clock = wall_clock
        self._finishing = False
        self._parked: anyio.CancelScope | None = None
        self._applied: Publication | None = None
        self.edition = Edition(0, 0)
        """What every replica serves; (0, 0): the model's files."""
        self.step = 0
        """Optimizer steps behind that."""

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
        else:
            profile.at(step=1, version=0)
        # Generation may begin: before, a resumed run would sample from the model's files.
        task_status.started()
        if self._validate_first or (first is not None and self._is_owed(first)):
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
        if self._is_owed(publication):
            await self._validate(publication.step)

    def _is_owed(self, publication: Publication) -> bool:
        due = validation_due(self._test_freq, validated_step=self._validated_step, step=publication.step)
        return publication.validate or due

    async def _apply(self, publication: Publication, *, again: bool = False) -> None:
        """`again`: every replica may have served it before, which is no news then."""
        learned = self._clock()
        reports = await self._bring(publication)
        if published := publication.published_at_s:
            publish_to_applied_s = max(0.0, self._wall_clock() - published)
        else:
            publish_to_applied_s = self._clock() - learned
        self.edition, self.step, self._applied = publication.edition, publication.step, publication
        profile.at(step=self.step + 1, version=self.edition.version)
        # Only now: the gate counts versions that every replica serves.
        await self._queue.set_applied_version(publication.version, lineage=publication.lineage)
        if again and not any(report.load_s for report in reports):
            return
        record = ApplyRecord(publication.version, tuple(reports), publish_to_applied_s, publication.lineage)
        await self._sink.put(record)

    async def _bring(self, publication: Publication) -> list[ApplyReport]:
        """Every replica to the publication, or to a newer one.

        Raises:
            InfraError: one could not be brought there.
        """
        with (
            self._waits.waiting("apply", limit_s=self._apply_s),
            profile.span("sync.apply", version=publication.version) as span,
        ):
            reports = await self._fleet.apply(publication)
            span.add(replicas=len(reports))
        # A replica that was replaced meanwhile may already serve a newer one; its tokens say so.
        if behind := [report for report in reports if report.edition < publication.edition]:
            raise InfraError(
                f"replica {behind[0].replica} serves {_words(behind[0].edition)} after "
                f"{_words(publication.edition)} was applied: its tokens would be booked under the wrong version"
            )
        return reports

    async def _validate(self, step: int) -> None:
        """Validate what every replica serves, and where a replaced replica has gone ahead, what that one serves.

        What is recorded already is not validated again. Where training has gone back meanwhile, nothing is: what it has
        gone back to is a publication like any other.

        Raises:
            InfraError: a replica has answered with another version for longer than `start_s`.
        """
        if self._validator is None or (self._validated is not None and self.edition <= self._validated):
            return
        ask, until = 1, math.inf
        while True:
            try:
                record = await self._ask_for(self._validator, step, ask)
            except Superseded as error:
                newest = None
                if error.other > error.version:
                    # The replica knew of it from the store, which may have been restarted since: it is told again.
                    newest = await self._feed.wait_newer(self.edition, timeout_s=self._poll_s)
                if newest is None:
                    # Replaced while a version was applied, it may have begun with what was newest before.
                    until = min(until, anyio.current_time() + self._start_s)
                    ask += 1
                    await self._tell_again(error, until)
                    continue
                if newest.lineage > self.edition.lineage:
                    return
                logger.warning("%s, as some were replaced; version %d is validated instead", error, newest.version)
                await self._apply(newest)
                step, ask, until = newest.step, 1, math.inf
            else:
                if record is not None:
                    await self._sink.put(record)
                return

    async def _tell_again(self, error: Superseded, until: float) -> None:
        """Bring a replica that answers with `error.other`, of which nobody knows why, to what the others serve.

        Raises:
            InfraError: it is later than `until`, by `anyio.current_time`.
        """
        if anyio.current_time() >= until:
            raise InfraError(
                f"{error}, and have done so for {self._start_s:g} s (timeouts.start_s), each time after all of them "
                f"were brought to {_words(self.edition)}; their logs in the run directory may say what they load"
            )
        logger.warning("%s; it is asked for again once every replica serves %s", error, _words(self.edition))
        if self._applied is not None:
            await self._bring(self._applied)

    async def _ask_for(self, validator: Validator, step: int, ask: int) -> ValidationRecord | None:
        """None: training has gone back to a checkpoint meanwhile, or there are no figures.

        Raises:
            Superseded: alone.
            Others as `Validator.run`, inside an exception group.
        """
        superseded: Superseded | None = None
        record: ValidationRecord | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_at_new_lineage, group.cancel_scope)
            try:
                record = await validator.run(self.edition, step, ask=ask)
                # With figures or without, it has had its turn.
                self._validated, self._validated_step = self.edition, step
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
