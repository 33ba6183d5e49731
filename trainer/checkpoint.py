"""Checkpoints on disk: whole or not there at all. Blocking."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from asyncrl.failures import InfraError
from asyncrl.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    Progress,
    checkpoint_name,
    checkpoint_steps,
    dump_manifest,
)
from asyncrl.ports import QueueSnapshot, TrainingWorker
from asyncrl.run_dir import disk_error

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes a run's checkpoints and deletes the old ones.

    A checkpoint is built under a name that nobody takes for one, made durable, then renamed. So is the reverse: it
    loses its name before its files go. A crash at any point leaves whole checkpoints, and rubbish that the next save
    sweeps away.
    """

    def __init__(self, run_dir: Path, *, identity: Mapping[str, Any], keep: int) -> None:
        self._run_dir = run_dir
        self._root = run_dir / CHECKPOINTS
        self._identity = identity
        self._keep = keep

    def save(self, worker: TrainingWorker, progress: Progress, queue: QueueSnapshot) -> Path:
        """Write `step_NNNNNN` and delete all but the newest `keep`.

        Raises:
            InfraError: the disk is full or failing; the checkpoints from before are untouched.
            ConfigError: the run directory is not writable.
        """
        building = self._root / f".{checkpoint_name(progress.step)}.tmp"
        try:
            self._sweep()
            building.mkdir(parents=True)
            worker.save_checkpoint(building)
            files = {str(path.relative_to(building)): path.stat().st_size for path in _files(building)}
            manifest = Manifest(progress, queue, self._identity, files)
            (building / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
            target = self._commit(building, progress.step)
            self._prune()
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise disk_error(Path(error.filename or building), error) from error
        except SafetensorError as error:
            shutil.rmtree(building, ignore_errors=True)
            raise InfraError.wrap(
                f"{building}: the weights could not be written ({error}). Free some space, or put the run "
                "elsewhere with run_dir=PATH",
                error,
            ) from error
        return target

    def rewind(self, step: int) -> None:
        """Take checkpoints beyond `step` out of the line: the run goes on from there, and they are another future.

        They keep their files under `abandoned_step_NNNNNN`.
        """
        for later, path in checkpoint_steps(self._run_dir).items():
            if later > step:
                aside = path.with_name(f"abandoned_{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                logger.warning("going on from step %d: %s is now %s", step, path, aside.name)

    def _commit(self, building: Path, step: int) -> Path:
        for path in _files(building):
            _sync(path)
        for directory in sorted((path for path in building.rglob("*") if path.is_dir()), reverse=True):
            _sync(directory)
        _sync(building)
        target = self._root / checkpoint_name(step)
        if target.exists():
            self._delete(target)
        building.rename(target)
        _sync(self._root)
        return target

    def _prune(self) -> None:
        for path in list(checkpoint_steps(self._run_dir).values())[: -self._keep]:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f".{path.name}.deleted.tmp")
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        for path in self._root.glob(".*.tmp"):
            shutil.rmtree(path)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
