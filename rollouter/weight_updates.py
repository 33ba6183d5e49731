"""Applies new weights versions to every replica, one version at a time, and validates the versions that are due.

    wait_newer ─▶ fleet.apply ─▶ queue.set_applied_version ─▶ ApplyRecord ─▶ validate? ─▶ ValidationRecord ─▶ again

Versions are ordered by lineage first: when training goes back to a checkpoint, its version is published in a newer
lineage, and the replicas return to it.

A validation runs between two updates, so that one version answers all prompts, while training generation continues. If
a replica is replaced meanwhile and starts with a newer version, every replica is updated to the newest version, which
is validated instead. If it starts with an older one, it is updated to the current version, and the validation is
repeated. If training goes back to a checkpoint, the validation is cancelled at once.

If a requested validation was not recorded (the Rollouter died, or the store lost the request), the next version that is
applied is validated.

A publication or `finish()` wakes the loop.

If the ranks use the engines' GPUs in turns with them (`placement: colocated`), the loop lends them to the ranks:

    the Trainer wants them ─▶ fleet.sleep ─▶ grant ─▶ … ─▶ it has given them back ─▶ fleet.apply, or wake ─▶ validate?
"""

from __future__ import annotations

import logging
import math
import sys
from typing import NamedTuple

import anyio
from anyio.abc import TaskStatus

from asyncrl.config.resources.plan import validation_due
from asyncrl.core.failures import InfraError
from asyncrl.core.ports import ApplyReport, GpuTurn, Publication, SharedGpus, WeightFeed, WeightsVersion
from asyncrl.core.records import ApplyRecord, RecordSink, ValidationRecord
from asyncrl.profiling import profile
from rollouter.sample_runner import RolloutParts
from rollouter.validation.validator import SupersededError, Validator

logger = logging.getLogger(__name__)


class RolloutStart(NamedTuple):
    """The validations that earlier incarnations of this Rollouter have done, and whether there are engines."""

    validate_first: bool
    """Validate the version at the start, even if its publication does not ask for it."""
    validated: WeightsVersion | None = None
    """The newest weights version whose validation is recorded: neither it nor an older one is validated again."""
    validated_step: int = 0
    """The newest step of the model's current history whose validation is recorded, or 0 without one. Validations that
    `trainer.test_freq` asks for after this step are still due."""
    has_engines: bool = True
    """False if every sample is replayed."""


class WeightUpdateLoop:
    """Applies the publications of the Trainer until `finish()`, and then the newest one."""

    def __init__(
        self,
        parts: RolloutParts,
        start: RolloutStart,
        *,
        feed: WeightFeed,
        sink: RecordSink,
        validator: Validator | None,
        gpus: SharedGpus | None = None,
    ) -> None:
        """`gpus`: those that the engines share with the ranks; None: the engines have their own."""
        self._parts = parts
        self._gpus = gpus
        self.awake = anyio.Event()
        """Set while the engines can generate; a new event replaces it when they fall asleep."""
        self._feed = feed
        self._sink = sink
        self._validator = validator
        self._validate_first = start.validate_first
        self._validated = start.validated
        self._validated_step = start.validated_step
        self._timeouts = parts.config.timeouts
        self._finishing = False
        self._wait_scope: anyio.CancelScope | None = None
        self._applied: Publication | None = None
        self.weights_version = WeightsVersion(0, 0)
        """The version that every replica serves; (0, 0) is the weights in the model's files."""
        self.step = 0
        """The optimizer steps that produced this version."""

    def finish(self) -> None:
        """Make `run` apply the newest publication, if there is a newer one, and return."""
        self._finishing = True
        if self._wait_scope is not None:
            self._wait_scope.cancel()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Apply and validate versions. `task_status` is started once generation may begin.

        Raises:
            InfraError: a version could not be applied, or the feed is gone.
            Others: see `Validator.run`.
        """
        if self._gpus is not None:  # an earlier Rollouter may have lent them
            await self._wait_for_engines_turn(self._gpus, "engines", "wanted")
        # In a resumed run the Trainer publishes its checkpoint before anything is generated.
        first = await self._feed.latest()
        if first is not None:
            try:
                await self._apply(first, initial=True)
            except InfraError as error:
                await self._lend_to_successor(error)
        else:
            if self._gpus is not None:
                await self._gpus.fleet.wake()
            profile.set_position(step=1, version=0)
            self.awake.set()
        # If generation began earlier, a resumed run would sample from the weights in the model's files.
        task_status.started()
        if self._validate_first or (first is not None and self._needs_validation(first)):
            await self._validate(first.step if first else 0)
        while not self._finishing:
            if self._gpus is None:
                await self._apply_and_validate(await self._wait_newer())
            else:
                await self._lend_gpus(self._gpus)
        while (last := await self._feed.latest()) is not None and last.weights_version > self.weights_version:
            await self._apply_and_validate(last)

    async def _wait_newer(self) -> Publication | None:
        """Return the next publication, or None if none arrives in time or `finish` was called."""
        with anyio.CancelScope() as self._wait_scope, self._parts.waits.waiting("weights"):
            return await self._feed.wait_newer(self.weights_version, timeout_s=self._timeouts.call_s)
        return None

    async def _lend_gpus(self, gpus: SharedGpus) -> None:
        """Lend the GPUs to the ranks once the Trainer wants them, until it gives them back.

        A version is applied only then, because until then the ranks have the memory that the engines need for it.
        """
        if await self._wait_turn(gpus, "wanted") is not None:
            await self._lend_now(gpus)

    async def _lend_now(self, gpus: SharedGpus) -> None:
        self.awake = anyio.Event()
        with self._parts.waits.waiting("apply", limit_s=self._timeouts.apply_call_s):
            await gpus.fleet.sleep()
        await gpus.turns.grant()
        await self._wait_for_engines_turn(gpus, "engines")
        newest = await self._feed.latest()
        if newest is not None and newest.weights_version > self.weights_version:
            try:
                await self._apply_and_validate(await self._wait_newer())
            except InfraError as error:
                await self._lend_to_successor(error)
        else:  # the Trainer needs more samples
            await gpus.fleet.wake()
            self.awake.set()

    async def _lend_to_successor(self, error: InfraError) -> None:
        """If a version could not be applied, perhaps because its Trainer has died, lend the GPUs to the next Trainer,
        which publishes again. It cannot start without them.

        Raises:
            InfraError: `error`, if no Trainer wants them within `timeouts.start_s`.
        """
        start_s = self._timeouts.start_s
        if self._gpus is None or await self._gpus.turns.wait("wanted", timeout_s=start_s) is None:
            raise error
        logger.warning("%s; the Trainer publishes again", error.brief)
        await self._lend_now(self._gpus)

    async def _wait_for_engines_turn(self, gpus: SharedGpus, *begins: GpuTurn) -> None:
        """Return once one of `begins` is the turn, or after a call of `finish`, before which the Trainer has given the
        GPUs back. If the store was restarted during the ranks' turn, grant it once more."""
        while not self._finishing and (turn := await self._wait_turn(gpus, "engines", "wanted")) not in begins:
            if turn == "wanted":
                await gpus.turns.grant()

    async def _wait_turn(self, gpus: SharedGpus, *wanted: GpuTurn) -> GpuTurn | None:
        """Return the turn, or None if it is none of `wanted` in time or `finish` was called."""
        with anyio.CancelScope() as self._wait_scope, self._parts.waits.waiting("gpus"):
            return await gpus.turns.wait(*wanted, timeout_s=self._timeouts.call_s)
        return None

    async def yield_gpus(self) -> None:
        """Leave the GPUs to the ranks when a run is stopped, so that the Trainer can write its last checkpoint."""
        if self._gpus is not None:
            with anyio.move_on_after(self._timeouts.stop_s):
                await self._gpus.fleet.sleep()
                await self._gpus.turns.grant()

    async def _apply_and_validate(self, publication: Publication | None) -> None:
        if publication is None or publication.weights_version <= self.weights_version:
            return
        await self._apply(publication)
        if self._needs_validation(publication):
            await self._validate(publication.step)

    def _needs_validation(self, publication: Publication) -> bool:
        test_freq = self._parts.config.trainer.test_freq
        due = validation_due(test_freq, validated_step=self._validated_step, step=publication.step)
        return publication.validate or due

    async def _apply(self, publication: Publication, *, initial: bool = False) -> None:
        """Update the replicas and the queue. With `initial`, record it only if a replica did not serve the version
        yet."""
        started = self._parts.clock()
        reports = await self._update_replicas(publication)
        if published := publication.published_at_s:
            publish_to_applied_s = max(0.0, self._parts.wall_clock() - published)
        else:
            publish_to_applied_s = self._parts.clock() - started
        self.weights_version, self.step, self._applied = publication.weights_version, publication.step, publication
        self.awake.set()
        profile.set_position(step=self.step + 1, version=self.weights_version.version)
        # After the replicas, because the staleness gate counts only versions that every replica serves.
        await self._parts.queue.set_applied_version(publication.version, lineage=publication.lineage)
        if initial and not any(report.load_s for report in reports):
            return
        record = ApplyRecord(
            publication.version,
            tuple(reports),
            publish_to_applied_s,
            publication.lineage,
            publication.num_bytes,
            publication.sent_bytes,
        )
        await self._sink.put(record)

    async def _update_replicas(self, publication: Publication) -> list[ApplyReport]:
        """Update every replica to the publication, or to a newer one.

        Raises:
            InfraError: a replica could not be updated.
        """
        with (
            self._parts.waits.waiting("apply", limit_s=self._timeouts.apply_call_s),
            profile.span("sync.apply", version=publication.version) as span,
        ):
            reports = await self._parts.fleet.apply(publication)
            span.add(replicas=len(reports))
        # A replica that was replaced meanwhile may already serve a newer version, which it reports with its tokens.
        if outdated := [report for report in reports if report.weights_version < publication.weights_version]:
            raise InfraError(
                f"replica {outdated[0].replica} serves {_describe(outdated[0].weights_version)} after "
                f"{_describe(publication.weights_version)} was applied: its tokens would be recorded under "
                "the wrong version"
            )
        return reports

    async def _validate(self, step: int) -> None:
        """Validate the version that every replica serves, or the newer one with which a replaced replica has started.

        Do nothing if the version's validation is recorded already. Return early if training goes back to a checkpoint:
        the checkpoint's version is published and validated like any other.

        Raises:
            InfraError: a replica has answered with another version for longer than `start_s`.
        """
        if self._validator is None or (self._validated is not None and self.weights_version <= self._validated):
            return
        attempt, until = 1, math.inf
        while True:
            try:
                record = await self._run_validation(self._validator, step, attempt)
            except SupersededError as error:
                newest = None
                if error.other > error.version:
                    # The replica received it from the store. A restarted store receives it again from the Trainer.
                    newest = await self._feed.wait_newer(self.weights_version, timeout_s=self._timeouts.call_s)
                if newest is None:
                    # A replica that was replaced during an apply may have started with the previous version.
                    until = min(until, anyio.current_time() + self._timeouts.start_s)
                    attempt += 1
                    await self._reapply(error, until)
                    continue
                if newest.lineage > self.weights_version.lineage:
                    return
                logger.warning("%s, because some were replaced; version %d is validated instead", error, newest.version)
                await self._apply(newest)
                step, attempt, until = newest.step, 1, math.inf
            else:
                if record is not None:
                    await self._sink.put(record)
                return

    async def _reapply(self, error: SupersededError, until: float) -> None:
        """Update a replica that answers with the unexpected version `error.other` to the current one.

        Raises:
            InfraError: the time is past `until` (`anyio.current_time`).
        """
        if anyio.current_time() >= until:
            raise InfraError(
                f"{error}. This has lasted for {self._timeouts.start_s:g} s (timeouts.start_s), although "
                f"all replicas were updated to {_describe(self.weights_version)} again each time; their logs in the "
                "run directory may show which version they load"
            )
        logger.warning("%s; it is repeated once every replica serves %s", error, _describe(self.weights_version))
        if self._applied is not None:
            await self._update_replicas(self._applied)

    async def _run_validation(self, validator: Validator, step: int, attempt: int) -> ValidationRecord | None:
        """Return the record, or None if training has gone back to a checkpoint meanwhile or no prompt was answered.

        Raises:
            SupersededError: raised directly.
            Others: the errors of `Validator.run`, inside an exception group.
        """
        superseded: SupersededError | None = None
        record: ValidationRecord | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_at_new_lineage, group.cancel_scope)
            try:
                record = await validator.run(self.weights_version, step, attempt=attempt)
                # The validation is done, with or without metrics.
                self._validated, self._validated_step = self.weights_version, step
            except SupersededError as error:
                superseded = error
            group.cancel_scope.cancel()
        if superseded is not None:
            raise superseded
        return record

    async def _cancel_at_new_lineage(self, scope: anyio.CancelScope) -> None:
        last = WeightsVersion(self.weights_version.lineage, sys.maxsize)
        while (newest := await self._feed.wait_newer(last, timeout_s=self._timeouts.call_s)) is None:
            pass
        logger.info(
            "the validation of %s is cancelled: training went back to %s",
            _describe(self.weights_version),
            _describe(newest.weights_version),
        )
        scope.cancel()


def _describe(weights_version: WeightsVersion) -> str:
    lineage, version = weights_version
    return f"version {version}" if lineage == 0 else f"version {version} of lineage {lineage}"
