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
from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.driver.resume import find_resume, journal_identity, resume_in_run
from asyncrl.observe.status.run_status import STATE_FILE, StateFile
from asyncrl.queue.journal import Journal
from asyncrl.queue.operations import AttachPart, MarkCheckpoint, Operation, RewindTraining
from asyncrl.storage.checkpoint_manifest import (
    MANIFEST,
    NO_REWINDS,
    Manifest,
    Progress,
    checkpoint_name,
    dump_manifest,
    find_latest,
    load_manifest,
    run_identity,
)
from asyncrl.storage.run_dir import create_run_dir
from tests.fakes.queues import end
from tests.fakes.run_states import running


def run_of(path: Path, **given: Any) -> Config:
    """A run directory, and the configuration that continues it."""
    config = Config(run_dir=str(path), **given)
    create_run_dir(config, datetime(2026, 1, 1))
    return config.model_copy(update={"resume": "auto"})


def checkpoint(run_dir: Path, step: int, *, seq: int, lineage: int = 0) -> Path:
    path = run_dir / "checkpoints" / checkpoint_name(step)
    path.mkdir(parents=True)
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text("{}")
    queue = QueueSnapshot(1, (), SampleCounts(), 0, seq)
    manifest = Manifest(Progress(step=step), queue, run_identity(Config()), lineage=lineage)
    (path / MANIFEST).write_text(dump_manifest(manifest))
    return path


def journal(run_dir: Path, *transitions: Operation, seq: int = 0, identity: Mapping[str, Any] | None = None) -> None:
    """One that begins at transition `seq`, with these in it."""
    restore = QueueSnapshot(1, (), SampleCounts(), 0, seq) if seq else None

    async def write() -> None:
        path = run_dir / "journal.db"
        identity_ = journal_identity(Config()) if identity is None else identity
        opened = Journal.open(path, num_prompts=8, identity=identity_, restore=restore)
        for transition in transitions:
            await opened.flushed(opened.append(transition))
        await end(opened)

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
    (runs[2] / "summary.json").write_text(json.dumps({"status": "completed", "step": 9}))  # and wanted no checkpoint
    (runs[3] / "config.yaml").touch()
    told: list[str] = []
    found = find_resume(Config(resume="auto"), root=tmp_path, warn=told.append)
    assert found is not None and found.run_dir == runs[1]
    assert told == [
        f"resume=auto continues {runs[1]}. Skipped, newest first: 20260104-000000 (has no checkpoint, and no "
        "journal), 20260103-000000 (is completed and left no checkpoint)"
    ]
    told.clear()
    assert find_resume(Config(resume="auto", experiment_name="other"), root=tmp_path, warn=told.append) is None
    assert told == []
    for number in range(1, 6):
        (tmp_path / "other" / f"20260101-00000{number}").mkdir(parents=True)
    assert find_resume(Config(resume="auto", experiment_name="other"), root=tmp_path, warn=told.append) is None
    [text] = told
    assert "finds no run to continue" in text and "20260101-000005 (it is empty)" in text and "and 2 more" in text


def test_a_checkpoint_and_the_journal_beside_it_go_together(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    path = checkpoint(tmp_path / "run", 5, seq=40)
    journal(tmp_path / "run", AttachPart("rollouter", 3), seq=40)
    found = find_resume(config)
    assert found is not None and (found.checkpoint, found.incarnations) == (path, {"rollouter": 3})
    off = find_resume(config.model_copy(update={"journal": "off"}))
    assert off is not None and (off.checkpoint, off.incarnations) == (path, {"rollouter": 0})


def test_a_journal_that_is_gone_leaves_files_whose_names_are_taken(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    path = checkpoint(tmp_path / "run", 5, seq=40)
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / "turns-3-1.log").touch()
    found = find_resume(config)
    assert found is not None and (found.checkpoint, found.incarnations) == (path, {"rollouter": 3})


def test_a_damaged_journal_costs_only_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    (tmp_path / "run" / "journal.db").write_bytes(b"not a database, certainly not" * 100)
    told: list[str] = []
    assert find_resume(config, warn=told.append) is None
    assert len(told) == 1 and "starts the run" in told[0] and "its journal is damaged: " in told[0]
    with pytest.raises(ConfigError, match=r"no journal of a run that died before .*: the run has no checkpoint"):
        find_resume(config.model_copy(update={"resume": str(tmp_path / "run")}))
    path = checkpoint(tmp_path / "run", 5, seq=40)
    found = find_resume(config)
    assert found is not None and found.checkpoint == path


def test_a_journal_of_other_data_or_another_model_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    journal(tmp_path / "run", identity={**journal_identity(config), "seed": 9})
    with pytest.raises(ConfigError, match=r"journal\.db was written with seed=9, this run has 0: .*resume=none"):
        find_resume(config)
    other = run_of(tmp_path / "other")
    journal(tmp_path / "other")
    model = other.model.model_copy(update={"path": "another"})
    with pytest.raises(ConfigError, match=r"model.path=another: .* Restore model.path"):
        find_resume(other.model_copy(update={"model": model}))


def test_the_lineage_is_one_more_than_any_before(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    checkpoint(tmp_path / "run", 5, seq=0)
    StateFile(tmp_path / "run" / STATE_FILE).write_now(replace(running(), lineage=4))
    found = find_resume(config)
    assert found is not None and found.lineage == 5
    (tmp_path / "run" / STATE_FILE).write_text("{")
    found = find_resume(config)
    assert found is not None and found.lineage == 1


def test_a_trainer_that_is_replaced_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    assert resume_in_run(tmp_path, NO_REWINDS) is None
    checkpoint(tmp_path, 5, seq=0)
    path = checkpoint(tmp_path, 10, seq=0)
    found = resume_in_run(tmp_path, NO_REWINDS.after_rewind(10, 2))
    assert found is not None
    assert (found.checkpoint, found.lineage, found.manifest.progress.step) == (path, 3, 10)


def test_what_a_replaced_trainer_wrote_behind_its_successors_back_is_passed_over(tmp_path: Path) -> None:
    """It was stopped while it wrote the checkpoint of step 5; its successor went back to 3; then it went on."""
    history = NO_REWINDS.after_rewind(3)
    three = checkpoint(tmp_path, 3, seq=30)
    five = checkpoint(tmp_path, 5, seq=50)
    assert find_latest(tmp_path) == five
    found = resume_in_run(tmp_path, history)
    assert found is not None and (found.checkpoint, found.history) == (three, history.after_rewind(3))
    four = checkpoint(tmp_path, 4, seq=70, lineage=1)
    assert find_latest(tmp_path, history) == four
    assert find_latest(tmp_path) == four, "where nothing is known of the history, the newest lineage counts"


def behind(tmp_path: Path) -> tuple[Config, Path, Path]:
    """A run that was at step 5 and went back to step 3, which had been marked at transition 1."""
    config = run_of(tmp_path / "run")
    three = checkpoint(tmp_path / "run", 3, seq=1)
    five = checkpoint(tmp_path / "run", 5, seq=2)
    journal(tmp_path / "run", MarkCheckpoint(3), MarkCheckpoint(5), RewindTraining(3, 0, 1, None))
    return config, three, five


def test_a_launch_passes_over_another_future_and_refuses_it_by_name(tmp_path: Path) -> None:
    config, three, five = behind(tmp_path)
    found = find_resume(config)
    assert found is not None and (found.checkpoint, found.lineage) == (three, 2)
    assert found.history == NO_REWINDS.after_rewind(3, 2)
    refused = r"training went back to step 3 \(lineage 1\).* model\.path=.*/hf"
    with pytest.raises(ConfigError, match=refused):
        find_resume(config.model_copy(update={"resume": str(five)}))
    aside = five.rename(five.with_name(f"abandoned_{five.name}"))
    for journal_ in ("on", "off"):
        with pytest.raises(ConfigError, match="training went back to "):
            find_resume(config.model_copy(update={"resume": str(aside), "journal": journal_}))
    found = find_resume(config.model_copy(update={"resume": str(three)}))
    assert found is not None and found.checkpoint == three


def test_the_journal_does_not_go_on_from_a_mark_of_another_future(tmp_path: Path) -> None:
    """Should a checkpoint get that far, its own sample counts are what counts."""
    behind(tmp_path)

    async def reopen(seq: int) -> Journal:
        restore = QueueSnapshot(1, (), SampleCounts(), 0, seq)
        opened = Journal.open(tmp_path / "run" / "journal.db", num_prompts=8, identity={}, restore=restore)
        await end(opened)
        return opened

    assert anyio.run(reopen, 1).notices == ()
    [told] = anyio.run(reopen, 2).notices
    assert "does not contain the checkpoint" in told and "behind" in told


def test_lineages_of_checkpoints_count_where_nothing_else_knows_of_them(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    checkpoint(tmp_path / "run", 5, seq=0, lineage=1)
    aside = checkpoint(tmp_path / "run", 9, seq=0, lineage=3)
    aside.rename(aside.with_name(f"abandoned_{aside.name}"))
    found = find_resume(config)
    assert found is not None and (found.manifest.lineage, found.lineage) == (1, 4)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"rollout": {"n": 2}}, "rollout.n=8, this run has 2"),
        ({"rollout": {"response_length": 7}}, "rollout.response_length=256, this run has 7"),
        ({"rollout": {"sampling": {"temperature": 0.5}}}, "rollout.sampling.temperature=1.0, this run has 0.5"),
        ({"rollout": {"sampling": {"stop": ["x"]}}}, "rollout.sampling.stop=.., this run has .'x'."),
        ({"reward": {"function": "math_verify"}}, "reward.function='exact_match'"),
        ({"reward": {"kwargs": {"a": 1}}}, "reward.kwargs="),
        ({"reward_model": {"placement": "serve", "path": "m"}}, "reward model in the reward=None"),
        ({"algorithm": {"adv_estimator": "remax"}}, "greedy baseline=False, this run has True"),
    ],
)
def test_samples_in_the_journal_are_not_trained_under_other_settings(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    """A checkpoint alone has none."""
    run_of(tmp_path / "run")
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "resume": "auto"} | change)
    journal(tmp_path / "run", MarkCheckpoint(5))
    with pytest.raises(
        ConfigError, match=f"journal.db has samples that were generated with {key}.* Restore the setting; or start"
    ):
        find_resume(config)
    path = checkpoint(tmp_path / "run", 5, seq=1)
    alone = (
        "Restore the setting; or continue from step_000005 alone and generate them again: journal=off; or start anew"
    )
    with pytest.raises(ConfigError, match=f"{key}.* {alone}"):
        find_resume(config)
    found = find_resume(config.model_copy(update={"journal": "off"}))
    assert found is not None and found.checkpoint == path


def test_how_samples_are_asked_for_may_change_under_a_journal(tmp_path: Path) -> None:
    run_of(tmp_path / "run")
    journal(tmp_path / "run")
    free = {
        "rollout": {"num_replicas": 2, "max_attempts": 9, "val": {"temperature": 1.0}},
        "reward": {"on_error": "drop", "timeout_s": 5.0},
        "reward_model": {"placement": "worker", "path": "m"},
    }
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "resume": "auto"} | free)
    assert find_resume(config) is not None


def test_a_completed_run_is_not_trained_again_in_its_own_directory(tmp_path: Path) -> None:
    config = run_of(tmp_path / "run")
    journal(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"status": "completed", "step": 9}))
    for resume in ("auto", str(tmp_path / "run")):
        with pytest.raises(ConfigError, match="is completed and left no checkpoint"):
            find_resume(config.model_copy(update={"resume": resume}))
