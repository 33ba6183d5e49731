"""Save checkpoints: each begins between two leased batches and is written while training continues; it is complete or
absent.

    begin ─ queue.mark ─▶ roles copy their state ─┬─▶ the next batch
                                                  └─▶ finish ─▶ queue.cover ─▶ written

step_000050/        a checkpoint; renamed to abandoned_step_000050/ once training has gone back to an earlier step
  manifest.json     `asyncrl.storage.checkpoint_manifest`: written last
  actor/, critic/   the state of each engine (`trainer.engines.state.checkpoint`)
  hf/               the policy as a model directory (`trainer.hf_export`)

There is one checkpoint at a time: the next one begins when the previous one is written or has failed. All ranks must
have access to the directory, which `check_shared` finds out before the first step.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from asyncrl.config.schema import Config
from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import FencedError, first_failure
from asyncrl.core.ports import QueueSnapshot
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import SampleQueue
from asyncrl.storage.checkpoint_claim import check_claim, pull_claim
from asyncrl.storage.checkpoint_manifest import (
    ABANDONED,
    HF_DIRECTORY,
    MANIFEST,
    NO_REWINDS,
    LineageHistory,
    Manifest,
    Progress,
    checkpoint_name,
    checkpoint_steps,
    dump_manifest,
    read_lineage,
)
from asyncrl.storage.remote_checkpoints import RemoteCheckpoints
from asyncrl.storage.run_dir import disk_error, sync
from trainer.workers.placement import Role
from trainer.workers.worker import RoleGroup

logger = logging.getLogger(__name__)

CALLS = 6
"""Upper bound of the calls that one checkpoint makes to ranks: begin, wait for the files and finish, for two roles."""
CLEANUP_S = 5.0
"""Limit for the removal of a marker, on storage that may hang."""


class HfExportSettings(NamedTuple):
    """`trainer.hf_export` and `trainer.hf_export_dtype`."""

    frequency: Literal["every", "last", "never"]
    dtype: Dtype = "float32"

    @classmethod
    def from_config(cls, config: Config) -> Self:
        return cls(config.trainer.hf_export, config.trainer.hf_export_dtype)


EXPORT_EVERY = HfExportSettings("every")


class RoleCheckpoints:
    """Saves the state of every trained role every `save_freq` steps, one checkpoint at a time."""

    def __init__(
        self,
        files: CheckpointDirectory,
        roles: Mapping[Role, RoleGroup],
        queue: SampleQueue,
        *,
        step: int,
        save_freq: int,
        export: HfExportSettings,
        call_limit_s: float,
        waits: WaitBoard,
    ) -> None:
        """
        Args:
            roles: the trained roles.
            step: the step that the loop begins with: that of a checkpoint, or 0.
            save_freq: `trainer.save_freq`.
            export: which checkpoints contain the policy in Hugging Face format.
            call_limit_s: deadline of one call to the ranks.
        """
        self._files = files
        self._roles = roles
        self._queue = queue
        self._save_freq = save_freq
        self._export = export
        self._exported = False
        """Whether the newest checkpoint that has begun contains the policy in Hugging Face format."""
        self._call_limit_s = call_limit_s
        self._waits = waits
        self.step = step
        """The newest step whose checkpoint has begun."""
        self.failed = False
        """Whether a checkpoint could not be written."""
        self._written = anyio.Event()
        """Set when the newest checkpoint is written or has failed."""
        self._written.set()

    def is_due(self, step: int) -> bool:
        """Return whether a multiple of `save_freq` lies between the last checkpoint (exclusive) and `step`
        (inclusive)."""
        return self._save_freq > 0 and step // self._save_freq > self.step // self._save_freq

    def exports(self, *, last: bool) -> bool:
        """Return whether a checkpoint contains the policy in Hugging Face format; `last`: no step follows it."""
        return self._export.frequency == "every" or (last and self._export.frequency == "last")

    def is_due_at_end(self, step: int) -> bool:
        """Return whether a run that ends after `step` steps lacks a checkpoint there, or its export."""
        return self.step < step or (self._export.frequency == "last" and step > 0 and not self._exported)

    async def begin(self, progress: Progress, tasks: TaskGroup, *, last: bool = False) -> None:
        """Begin a checkpoint. Nothing may be leased, so that every sample is trained, dropped or outstanding in the
        snapshot of the queue (`SampleQueue.mark`).

        A write error fails the task group `tasks`, and with it the batch that is being trained.

        Args:
            last: whether no step follows.

        Raises:
            InfraError: the disk is full or failing, or a rank died.
            ConfigError: the directory is not writable.
        """
        limit_s = CALLS * self._call_limit_s
        with self._waits.waiting("checkpoint", limit_s=limit_s), profile.span("trainer.checkpoint"):
            await self._written.wait()
            queue = await self._queue.mark(progress.step)
            self._exported = self.exports(last=last)
            building = await self.copy_roles(progress.step, export=self._exported)
        self.step, self._written = progress.step, anyio.Event()
        tasks.start_soon(self._write, building, replace(progress), queue, self._written)

    async def wait_written(self) -> None:
        """Wait until the newest checkpoint is written or has failed."""
        with self._waits.waiting("checkpoint", limit_s=CALLS * self._call_limit_s):
            await self._written.wait()

    @asynccontextmanager
    async def in_background(self) -> AsyncIterator[TaskGroup]:
        """Open the task group in which checkpoints are written. After a failure, wait for the one that is being
        written, within the deadline of one call; it fails at once if its ranks are dead. The first failure is raised.
        """
        failure: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    yield tasks
                except Exception as error:
                    failure = error
                    with anyio.CancelScope(shield=True), anyio.move_on_after(self._call_limit_s):
                        await self._written.wait()
                    raise
        except BaseExceptionGroup as failures:
            raise failure or first_failure(failures) from None

    async def copy_roles(self, step: int, *, export: bool = True) -> Path:
        """Let every role copy its state, so that training may continue, and start writing the copy to the directory
        that is returned. Raises as `begin`."""
        building = await to_thread.run_sync(self._files.open, step, tuple(self._roles))
        for role, group in self._roles.items():
            hf = building / HF_DIRECTORY if role == "actor" and export else None
            await group.save_checkpoint(building / role, hf=hf, hf_dtype=self._export.dtype)
        return building

    async def finish(self, building: Path, progress: Progress, queue: QueueSnapshot) -> int:
        """Wait until every role has written its part to `building`, then give the checkpoint its final name. Return the
        step of the oldest checkpoint that is kept.

        A Trainer may not have noticed that it was replaced; its checkpoint is then not part of the run's history.
        Therefore the queue confirms first: it refuses this call of a replaced Trainer.

        Raises:
            FencedError: this Trainer was replaced.
            InfraError, ConfigError: as in `begin`. Earlier checkpoints are unchanged.
        """
        for group in self._roles.values():
            await group.finish_checkpoint()
        await self._queue.confirm(progress.step)
        path = await to_thread.run_sync(self._files.commit, building, progress, queue)
        logger.info("checkpoint %s", path)
        # Confirm again: a Trainer that has just been replaced must not delete its successor's checkpoint.
        await self._queue.confirm(progress.step)
        return await to_thread.run_sync(self._files.prune)

    async def _write(self, building: Path, progress: Progress, queue: QueueSnapshot, written: anyio.Event) -> None:
        try:
            oldest_kept = await self.finish(building, progress, queue)
            # Payloads may be deleted only now. If this fails, they remain until the next checkpoint.
            await self._queue.cover(progress.step, oldest_kept)
        except BaseException:
            self.failed = True
            raise
        finally:
            written.set()


async def check_shared(files: CheckpointDirectory, roles: Mapping[Role, RoleGroup]) -> None:
    """Check that every rank sees the directory of the checkpoints.

    Raises:
        ConfigError: a rank is on a node that has another directory at this path.
        InfraError: the disk is full or failing, or a rank died.
    """
    marker = await to_thread.run_sync(files.add_marker)
    try:
        for group in roles.values():
            await group.find_file(marker)
    finally:
        with anyio.move_on_after(CLEANUP_S, shield=True), suppress(OSError):
            await to_thread.run_sync(partial(marker.unlink, missing_ok=True), abandon_on_cancel=True)


class CheckpointDirectory:
    """The directory with the checkpoints of a run. Its methods block.

    A checkpoint is written under a temporary name, synced to disk, then renamed. To delete a checkpoint, it is first
    renamed to a temporary name. So after a crash at any point all named checkpoints are complete, and the next
    checkpoint deletes the temporary files.

    Every method raises InfraError if the disk is full or failing, ConfigError if the directory is not writable, and
    FencedError if another launch continues the run from there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        identity: Mapping[str, Any],
        keep: int,
        history: LineageHistory = NO_REWINDS,
        run_id: str | None = None,
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        """
        Args:
            history: the history of the run; checkpoints are written in its newest lineage.
            run_id: the run that must have claimed the directory (`asyncrl.storage.checkpoint_claim`); None: it is in
                the run directory, whose lock excludes other runs.
            remote: the URL of which `directory` is the mirror; it gets each checkpoint when the mirror has it.
        """
        self._remote = remote
        self._history = history
        self._root = directory
        self._run_id = run_id
        self._identity = identity
        self._keep = keep

    def add_marker(self) -> Path:
        """Create an empty file with a new name, and return its absolute path."""
        self._check_claim()
        with _disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix=".marker-", dir=self._root.absolute())
            os.close(handle)
            return Path(path)

    def open(self, step: int, parts: Sequence[str] = ()) -> Path:
        """Create a temporary directory for the checkpoint of `step`, with an empty subdirectory for each of `parts`."""
        # The name contains the lineage, because a Trainer that was replaced may still be writing its own checkpoint.
        building = (self._root / f".{checkpoint_name(step)}-{self._history.lineage}.tmp").absolute()
        self._check_claim()
        with _disk_errors(building):
            self._delete_temporary()
            building.mkdir(parents=True)
            for part in parts:
                (building / part).mkdir()
        return building

    def commit(self, building: Path, progress: Progress, queue: QueueSnapshot) -> Path:
        """Rename a directory from `open`, which the roles have filled, to `step_NNNNNN`.

        Raises:
            FencedError: a Trainer of a later lineage has written a checkpoint.
        """
        self._check_lineage()
        with _disk_errors(building):
            try:
                files = {str(path.relative_to(building)): path.stat().st_size for path in _files(building)}
                manifest = Manifest(progress, queue, self._identity, files, self._history.lineage)
                (building / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
                self._set_abandoned_aside()
                path = self._publish(building, progress.step)
            except (OSError, FencedError):
                shutil.rmtree(building, ignore_errors=True)
                raise
            if self._remote is not None:
                self._remote.upload(path, self._check_claim)
            return path

    def prune(self) -> int:
        """Delete all checkpoints but the newest `keep`; return the step of the oldest that is left."""
        self._check_claim()
        with _disk_errors(self._root):
            checkpoints = checkpoint_steps(self._root)
            for step in list(checkpoints)[: -self._keep]:
                self._delete(checkpoints.pop(step))
        self._keep_remote()
        return min(checkpoints)

    def set_abandoned_aside(self) -> None:
        """Rename checkpoints that are not in the run's history to `abandoned_step_NNNNNN`, and delete unfinished
        ones."""
        self._check_claim()
        with _disk_errors(self._root):
            self._delete_temporary()
            self._set_abandoned_aside()
        self._keep_remote()

    def _keep_remote(self) -> None:
        if self._remote is not None:
            self._remote.keep([path.name for path in checkpoint_steps(self._root).values()])

    def _set_abandoned_aside(self) -> None:
        for step, path in checkpoint_steps(self._root).items():
            lineage = read_lineage(path) or 0  # of an unreadable checkpoint, only the step is known
            if (left := self._history.abandoned_by(step, lineage)) is not None:
                aside = path.with_name(f"{ABANDONED}{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                logger.warning("training continues from step %d: %s is now %s", left.step, path, aside.name)
        if self._root.is_dir():
            sync(self._root)

    def _check_claim(self) -> None:
        if self._run_id is not None:
            if self._remote is not None:
                pull_claim(self._remote)
            check_claim(self._root, self._run_id, self._history.lineage)

    def _check_lineage(self) -> None:
        self._check_claim()
        for path in checkpoint_steps(self._root).values():
            if (lineage := read_lineage(path) or 0) > self._history.lineage:
                raise FencedError(
                    f"{path} is of lineage {lineage}: the Trainer of lineage {self._history.lineage} was replaced, and "
                    "its checkpoints are no longer used"
                )

    def _publish(self, building: Path, step: int) -> Path:
        for path in _files(building):
            sync(path)
        for directory in sorted((path for path in building.rglob("*") if path.is_dir()), reverse=True):
            sync(directory)
        sync(building)
        self._check_lineage()  # again, because the run may have been continued elsewhere while the disk was writing
        target = self._root / checkpoint_name(step)
        if target.exists():
            self._delete(target)
        building.rename(target)
        sync(self._root)
        return target

    def _delete(self, path: Path) -> None:
        deleted = path.with_name(f".{path.name}.deleted.tmp")
        path.rename(deleted)
        shutil.rmtree(deleted)

    def _delete_temporary(self) -> None:
        for path in self._root.glob(".*.tmp"):
            # Files that a replaced Trainer is still writing there are deleted the next time.
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(Path(error.filename or path), error) from error


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
