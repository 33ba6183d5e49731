"""Checkpoints on disk: whole or not there at all.

step_000050/             abandoned_step_000060/ once training has gone back behind it
  manifest.json     `asyncrl.manifest`: written last
  actor/, critic/   what each engine needs to go on (`trainer.engine.state`)
  hf/               the policy as a model directory
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyio import to_thread

from asyncrl.failures import BugError, FencedError
from asyncrl.lineage import NO_REWINDS, Line
from asyncrl.manifest import (
    ABANDONED,
    CHECKPOINTS,
    HF_DIRECTORY,
    MANIFEST,
    Manifest,
    Progress,
    checkpoint_name,
    checkpoint_steps,
    dump_manifest,
    read_lineage,
)
from asyncrl.ports import QueueSnapshot
from asyncrl.run_dir import disk_error, sync
from trainer.placement import Role
from trainer.roles import RoleGroup

logger = logging.getLogger(__name__)


async def load_roles(checkpoint: Path, roles: Mapping[Role, RoleGroup]) -> None:
    """Put back what `RoleCheckpoints` wrote, whatever the number of ranks then and now. `roles`: the trained ones.

    Raises:
        ConfigError: files are missing or damaged, or belong to another model.
    """
    for role, group in roles.items():
        await group.load_checkpoint(checkpoint / role)


class RoleCheckpoints:
    """Every trained role's state with the manifest of the moment it was begun. `loop.Checkpoints`.

    All ranks have to see the run directory.
    """

    def __init__(
        self, files: Checkpointer, roles: Mapping[Role, RoleGroup], confirm: Callable[[int], Awaitable[None]]
    ) -> None:
        """
        Args:
            roles: those that are trained.
            confirm: `ports.SampleQueue.confirm`.
        """
        self._files = files
        self._roles = roles
        self._confirm = confirm
        self._begun: tuple[Path, Progress, QueueSnapshot] | None = None

    async def begin(self, progress: Progress, queue: QueueSnapshot) -> None:
        """Have every role copy its state and start to write it.

        Raises:
            InfraError: the disk is full or failing, or a rank died. ConfigError: the run directory is not writable.
        """
        if self._begun is not None:
            raise BugError(f"a checkpoint begun before {self._begun[0]} was finished")
        building = await to_thread.run_sync(self._files.open, progress.step, tuple(self._roles))
        for role, group in self._roles.items():
            await group.save_checkpoint(building / role, hf=building / HF_DIRECTORY if role == "actor" else None)
        self._begun = (building, progress, queue)

    async def finish(self) -> Path:
        """Wait until every role has written its part, and make it a checkpoint.

        A Trainer that was replaced may not have noticed, and its checkpoint is of another future. So the queue is asked
        first, which refuses it.

        Raises:
            FencedError: this Trainer was replaced.
            InfraError, ConfigError: as `begin`. The checkpoints from before are untouched.
        """
        if self._begun is None:
            raise BugError("no checkpoint was begun")
        (building, progress, queue), self._begun = self._begun, None
        for group in self._roles.values():
            await group.finish_checkpoint()
        await self._confirm(progress.step)
        path = await to_thread.run_sync(self._files.commit, building, progress, queue)
        # Once more: one that was replaced just now must not delete what its successor went back to.
        await self._confirm(progress.step)
        await to_thread.run_sync(self._files.prune)
        return path


class Checkpointer:
    """A run's checkpoint directory. Blocking.

    A checkpoint is built under a name that nobody takes for one, made durable, then renamed. So is the reverse: it
    loses its name before its files go. A crash at any point leaves whole checkpoints, and rubbish that the next one
    sweeps away.
    """

    def __init__(self, run_dir: Path, *, identity: Mapping[str, Any], keep: int, line: Line = NO_REWINDS) -> None:
        """`line`: the run's; checkpoints are written in its newest lineage."""
        self._line = line
        self._run_dir = run_dir
        self._root = run_dir / CHECKPOINTS
        self._identity = identity
        self._keep = keep

    def open(self, step: int, parts: Sequence[str] = ()) -> Path:
        """A directory to write the checkpoint of `step` into, with an empty one inside for each of `parts`.

        Raises:
            InfraError: the disk is full or failing. ConfigError: the run directory is not writable.
        """
        # Named by its lineage: a Trainer that was replaced may still be writing into its own.
        building = (self._root / f".{checkpoint_name(step)}-{self._line.lineage}.tmp").absolute()
        try:
            self._sweep()
            building.mkdir(parents=True)
            for part in parts:
                (building / part).mkdir()
        except OSError as error:
            raise disk_error(Path(error.filename or building), error) from error
        return building

    def commit(self, building: Path, progress: Progress, queue: QueueSnapshot) -> Path:
        """What `open` gave and the roles have filled becomes `step_NNNNNN`.

        Raises:
            FencedError: a Trainer of a later lineage has written a checkpoint.
            InfraError, ConfigError: as `open`; the checkpoints from before are untouched.
        """
        self._refuse_if_outdone()
        try:
            files = {str(path.relative_to(building)): path.stat().st_size for path in _files(building)}
            manifest = Manifest(progress, queue, self._identity, files, self._line.lineage)
            (building / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
            self._set_others_aside()
            return self._name(building, progress.step)
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise disk_error(Path(error.filename or building), error) from error

    def prune(self) -> None:
        """Delete all but the newest `keep`.

        Raises:
            InfraError, ConfigError: as `open`.
        """
        try:
            for path in list(checkpoint_steps(self._run_dir).values())[: -self._keep]:
                self._delete(path)
        except OSError as error:
            raise disk_error(Path(error.filename or self._root), error) from error

    def set_others_aside(self) -> None:
        """Take checkpoints that are not on the line out of sight: they are another future. They keep their files under
        `abandoned_step_NNNNNN`. What their writers were still building goes.

        Raises:
            InfraError, ConfigError: as `open`.
        """
        try:
            self._sweep()
            self._set_others_aside()
        except OSError as error:
            raise disk_error(Path(error.filename or self._root), error) from error

    def _set_others_aside(self) -> None:
        for step, path in checkpoint_steps(self._run_dir).items():
            lineage = read_lineage(path) or 0  # of what cannot be read, the step tells
            if (left := self._line.left(step, lineage)) is not None:
                aside = path.with_name(f"{ABANDONED}{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                logger.warning("training goes on from step %d: %s is now %s", left.step, path, aside.name)
        if self._root.is_dir():
            sync(self._root)

    def _refuse_if_outdone(self) -> None:
        for path in checkpoint_steps(self._run_dir).values():
            if (lineage := read_lineage(path) or 0) > self._line.lineage:
                raise FencedError(
                    f"{path} is of lineage {lineage}: the Trainer of lineage {self._line.lineage} was replaced, and "
                    "its checkpoints do not count any more"
                )

    def _name(self, building: Path, step: int) -> Path:
        for path in _files(building):
            sync(path)
        for directory in sorted((path for path in building.rglob("*") if path.is_dir()), reverse=True):
            sync(directory)
        sync(building)
        target = self._root / checkpoint_name(step)
        if target.exists():
            self._delete(target)
        building.rename(target)
        sync(self._root)
        return target

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f".{path.name}.deleted.tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        for path in self._root.glob(".*.tmp"):
            # What somebody who was replaced still writes there goes with the next sweep.
            shutil.rmtree(path, ignore_errors=True)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
