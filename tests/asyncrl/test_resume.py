"""What a run goes on from: its checkpoint, its journal, or both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError
from asyncrl.journal import Journal
from asyncrl.manifest import (
    MANIFEST,
    Manifest,
    Progress,
    checkpoint_name,
    dump_manifest,
    find_resume,
    load_manifest,
    resume_in_run,
    run_identity,
)
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import create_run_dir
from asyncrl.run_state import FILE_NAME
from asyncrl.telemetry.state_file import StateFile
from asyncrl.transitions import Attached
from tests.fakes.run_states import running


def run_of(path: Path, **given: Any) -> Config:
    """A run directory, and the configuration that goes on with it."""
    config = Config(run_dir=str(path), **given)
    create_run_dir(config, datetime(2026, 1, 1))
    return config.model_copy(update={"resume": "auto"})


def checkpoint(run_dir: Path, step: int, *, seq: int) -> Path:
    path = run_dir / "checkpoints" / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text("{}")
    queue = QueueSnapshot(1, (), Books(), 0, seq)
    (path / MANIFEST).write_text(dump_manifest(Manifest(Progress(step=step), queue, run_identity(Config()))))
    return path


def journal(run_dir: Path, *, seq: int = 0, attached: int = 0, identity: Mapping[str, Any] | None = None) -> None:
    """One that begins at transition `seq`, with that incarnation of the Rollouter attached."""
    restore = QueueSnapshot(1, (), Books(), 0, seq) if seq else None

    async def write() -> None:
        path = run_dir / "journal.db"
        identity_ = run_identity(Config()) if identity is None else identity
        opened = Journal.open(path, num_prompts=8, identity=identity_, restore=restore)
        if attached:
            await opened.flushed(opened.append(Attached("rollouter", attached)))
        await opened.aclose()

    anyio.run(write)


def test_a_manifest_keeps_the_journals_transition(tmp_path: Path) -> None:
    assert load_manifest(checkpoint(tmp_path, 3, seq=77)).queue.seq == 77


def test_a_run_that_died_before_its_first_checkpoint_goes_on_from_its_journal(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    assert find_resume(config) is None
    journal(tmp_path / "run")
    for resume in ("auto", str(tmp_path / "run")):
        found = find_resume(config.model_copy(update={"resume": resume}))
        assert found is not None and found.checkpoint is None
        assert (found.run_dir, found.manifest.progress, found.lineage) == (tmp_path / "run", Progress(), 1)
    assert find_resume(config.model_copy(update={"journal": "off"})) is None


def test_among_the_runs_of_an_experiment_one_with_only_a_journal_counts(tmp_path: Path) -> None:
    for name in ("20260101-000000", "20260102-000000", "20260103-000000", "20260104-000000"):
        (tmp_path / "quickstart" / name).mkdir(parents=True)
    runs = sorted((tmp_path / "quickstart").iterdir())
    checkpoint(runs[0], 5, seq=0)
    journal(runs[1])
    journal(runs[2])
    (runs[2] / "summary.json").write_text(json.dumps({"status": "completed"}))  # and wanted no checkpoint
    found = find_resume(Config(resume="auto"), root=tmp_path)
    assert found is not None and found.run_dir == runs[1]


def test_a_checkpoint_and_the_journal_beside_it_go_together(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    path = checkpoint(tmp_path / "run", 5, seq=40)
    journal(tmp_path / "run", seq=40, attached=3)
    found = find_resume(config)
    assert found is not None and (found.checkpoint, found.incarnations) == (path, {"rollouter": 3})
    off = find_resume(config.model_copy(update={"journal": "off"}))
    assert off is not None and (off.checkpoint, off.incarnations) == (path, {})


def test_a_damaged_journal_costs_only_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    (tmp_path / "run" / "journal.db").write_bytes(b"not a database, certainly not" * 100)
    assert find_resume(config) is None
    with pytest.raises(ConfigError, match="no journal of a run that died before"):
        find_resume(config.model_copy(update={"resume": str(tmp_path / "run")}))
    path = checkpoint(tmp_path / "run", 5, seq=40)
    found = find_resume(config)
    assert found is not None and found.checkpoint == path


def test_a_journal_of_other_data_or_another_model_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    journal(tmp_path / "run", identity={**run_identity(config), "seed": 9})
    with pytest.raises(ConfigError, match=r"journal\.db was written with seed=9, this run has 0: .*resume=none"):
        find_resume(config)
    other = run_of(tmp_path / "other")
    journal(tmp_path / "other")
    model = other.model.model_copy(update={"path": "another"})
    with pytest.raises(ConfigError, match=r"model.path=another: .* Set it back"):
        find_resume(other.model_copy(update={"model": model}))


def test_the_lineage_is_one_more_than_any_before(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    checkpoint(tmp_path / "run", 5, seq=0)
    StateFile(tmp_path / "run" / FILE_NAME).write_now(replace(running(), lineage=4))
    found = find_resume(config)
    assert found is not None and found.lineage == 5
    (tmp_path / "run" / FILE_NAME).write_text("{")
    found = find_resume(config)
    assert found is not None and found.lineage == 1


def test_a_trainer_that_is_replaced_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    assert resume_in_run(tmp_path, 1) is None
    checkpoint(tmp_path, 5, seq=0)
    path = checkpoint(tmp_path, 10, seq=0)
    found = resume_in_run(tmp_path, 3)
    assert found is not None
    assert (found.checkpoint, found.lineage, found.manifest.progress.step) == (path, 3, 10)
