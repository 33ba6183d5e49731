"""Run directories as launches leave them: configuration, checkpoints, journal and summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.driver.resume import find_resume, journal_identity
from asyncrl.queue.core import Operation
from asyncrl.queue.journal import Journal
from asyncrl.storage.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    Progress,
    Resume,
    checkpoint_name,
    dump_manifest,
    run_identity,
)
from asyncrl.storage.run_dir import RunDir, create_run_dir
from tests.fakes.queues import end


def snapshot(seq: int = 0) -> QueueSnapshot:
    """Return the snapshot of a queue without samples after `seq` transitions."""
    return QueueSnapshot(1, (), SampleCounts(), 0, seq)


def write_checkpoint(
    run_dir: Path | RunDir, step: int, *, seq: int = 0, lineage: int = 0, config: Config | None = None
) -> Path:
    files = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    path = files.checkpoints / checkpoint_name(step)
    (path / "hf").mkdir(parents=True)
    (path / "hf" / "config.json").write_text("{}")
    identity = run_identity(config or Config())
    manifest = Manifest(Progress(step=step), snapshot(seq), identity, lineage=lineage)
    (path / MANIFEST).write_text(dump_manifest(manifest))
    return path


class RunOnDisk:
    """A run directory whose files the test writes."""

    def __init__(self, path: Path, **sections: Any) -> None:
        self.path = path
        self.config = Config.model_validate({"run_dir": str(path), "logging": {"console": "off"}} | sections)
        self.files = create_run_dir(self.config, datetime(2026, 1, 1))

    def checkpoint(self, step: int, *, seq: int = 0, lineage: int = 0) -> Path:
        return write_checkpoint(self.files, step, seq=seq, lineage=lineage, config=self.config)

    def journal(self, *operations: Operation, seq: int = 0, identity: Mapping[str, Any] | None = None) -> None:
        """Write a journal that begins after transition `seq` and has these operations."""

        async def write() -> None:
            journal = Journal.open(
                self.files.journal,
                num_prompts=8,
                identity=journal_identity(self.config) if identity is None else identity,
                restore=snapshot(seq) if seq else None,
            )
            for operation in operations:
                await journal.flushed(journal.append(operation))
            await end(journal)

        anyio.run(write)

    def summary(self, status: str, step: int) -> None:
        (self.path / "summary.json").write_text(json.dumps({"status": status, "step": step}))

    def again(self, **changes: Any) -> Config:
        """Return a configuration that resumes the run, with changes to sections (mappings) and top-level keys."""
        tree = self.config.model_dump() | {"resume": "auto"}
        for key, value in changes.items():
            tree[key] = tree[key] | value if isinstance(value, dict) else value
        return Config.model_validate(tree)

    def resume(self, **changes: Any) -> Resume | None:
        """Return the point from which the run resumes, or None."""
        return find_resume(self.again(**changes))

    def found(self, **changes: Any) -> Resume:
        resume = self.resume(**changes)
        assert resume is not None
        return resume
