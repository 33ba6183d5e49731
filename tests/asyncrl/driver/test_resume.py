"""A run resumes from its checkpoint, its journal, or both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver.resume import find_resume, journal_identity, resume_in_run
from asyncrl.driver.run_directory import check_run_dir, open_run_dir
from asyncrl.observe.status.run_status import STATE_FILE, StateFile
from asyncrl.queue.journal import Journal
from asyncrl.queue.operations import AttachPart, MarkCheckpoint, RewindTraining
from asyncrl.storage import run_dir as run_dirs
from asyncrl.storage.checkpoint_claim import CLAIM, claim_checkpoints, record_history
from asyncrl.storage.checkpoint_manifest import CHECKPOINTS, NO_REWINDS, Progress, find_latest, load_manifest
from asyncrl.storage.remote_checkpoints import remote_checkpoints
from asyncrl.storage.run_dir import RunDir
from tests.fakes.queues import end
from tests.fakes.run_on_disk import RunOnDisk, snapshot, write_checkpoint
from tests.fakes.run_states import running


@pytest.fixture
def run(tmp_path: Path) -> RunOnDisk:
    return RunOnDisk(tmp_path / "run")


def test_a_manifest_contains_the_number_of_the_last_journaled_operation(run: RunOnDisk) -> None:
    assert load_manifest(run.checkpoint(3, seq=77)).queue.seq == 77


def test_a_run_that_died_before_its_first_checkpoint_resumes_from_its_journal(run: RunOnDisk) -> None:
    assert run.resume() is None
    run.journal()
    for resume in ("auto", str(run.path)):
        found = run.found(resume=resume)
        assert (found.checkpoint, found.run_dir, found.manifest.progress, found.lineage) == (
            None, run.path, Progress(), 1,
        )  # fmt: skip
    assert run.resume(journal="off") is None


def test_a_run_whose_journal_has_forgotten_its_start_needs_a_checkpoint(run: RunOnDisk) -> None:
    run.journal(seq=5)
    with pytest.raises(ConfigError, match=r"journal\.db does not reach back.*has no checkpoint"):
        run.resume()
    run.checkpoint(3, seq=5)
    assert run.found().manifest.progress.step == 3


def test_a_run_with_only_a_journal_can_be_the_one_to_resume(tmp_path: Path) -> None:
    oldest, second, completed, newest = (RunOnDisk(tmp_path / "quickstart" / f"2026010{day}") for day in range(1, 5))
    oldest.checkpoint(5)
    second.journal()
    completed.journal()
    completed.summary("completed", 9)  # and trainer.save_last=false
    warnings: list[str] = []
    found = find_resume(Config(resume="auto"), root=tmp_path, warn=warnings.append)
    assert found is not None and found.run_dir == second.path
    assert warnings == [
        f"resume=auto continues {second.path}. Skipped, newest first: {newest.path.name} (has no checkpoint, and no "
        f"journal), {completed.path.name} (is completed and left no checkpoint)"
    ]
    warnings.clear()
    other = Config(resume="auto", experiment_name="other")
    assert find_resume(other, root=tmp_path, warn=warnings.append) is None
    assert warnings == []
    for number in range(1, 6):
        (tmp_path / "other" / f"20260101-00000{number}").mkdir(parents=True)
    assert find_resume(other, root=tmp_path, warn=warnings.append) is None
    [text] = warnings
    assert "finds no run to continue" in text and "20260101-000005 (it is empty)" in text and "and 2 more" in text


def test_a_checkpoint_and_its_journal_are_used_together(run: RunOnDisk) -> None:
    path = run.checkpoint(5, seq=40)
    run.journal(AttachPart("rollouter", 3), seq=40)
    assert (run.found().checkpoint, run.found().incarnations) == (path, {"rollouter": 3})
    off = run.found(journal="off")
    assert (off.checkpoint, off.incarnations) == (path, {"rollouter": 0})


def test_without_the_journal_new_files_do_not_reuse_the_names_of_existing_ones(run: RunOnDisk) -> None:
    path = run.checkpoint(5, seq=40)
    run.files.samples.mkdir()
    (run.files.samples / "turns-3-1.log").touch()
    assert (run.found().checkpoint, run.found().incarnations) == (path, {"rollouter": 3})


def test_a_damaged_journal_loses_only_what_the_checkpoint_lacks(run: RunOnDisk) -> None:
    run.files.journal.write_bytes(b"not a database, certainly not" * 100)
    warnings: list[str] = []
    assert find_resume(run.again(), warn=warnings.append) is None
    assert len(warnings) == 1 and "starts the run" in warnings[0] and "its journal is damaged: " in warnings[0]
    with pytest.raises(ConfigError, match=r"no journal of a run that died before .*: the run has no checkpoint"):
        run.resume(resume=str(run.path))
    assert run.checkpoint(5, seq=40) == run.found().checkpoint


def test_a_journal_of_other_data_or_another_model_is_refused(run: RunOnDisk, tmp_path: Path) -> None:
    run.journal(identity={**journal_identity(run.config), "seed": 9})
    with pytest.raises(ConfigError, match=r"journal\.db was written with seed=9, this run has 0: .*resume=none"):
        run.resume()
    other = RunOnDisk(tmp_path / "other")
    other.journal()
    with pytest.raises(ConfigError, match=r"model.path=another: .* Restore model.path"):
        other.resume(model={"path": "another"})


def test_the_lineage_is_one_more_than_any_before(run: RunOnDisk) -> None:
    run.checkpoint(5)
    StateFile(run.path / STATE_FILE).write_now(replace(running(), lineage=4))
    assert run.found().lineage == 5
    (run.path / STATE_FILE).write_text("{")
    assert run.found().lineage == 1
    aside = run.checkpoint(9, lineage=3)
    aside.rename(aside.with_name(f"abandoned_{aside.name}"))
    assert (run.found().manifest.lineage, run.found().lineage) == (0, 4), "an abandoned checkpoint counts too"


def test_a_new_trainer_process_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    assert resume_in_run(RunDir(tmp_path), NO_REWINDS) is None
    write_checkpoint(tmp_path, 5)
    path = write_checkpoint(tmp_path, 10)
    found = resume_in_run(RunDir(tmp_path), NO_REWINDS.after_rewind(10, 2))
    assert found is not None
    assert (found.checkpoint, found.lineage, found.manifest.progress.step) == (path, 3, 10)


def test_a_checkpoint_that_a_replaced_trainer_wrote_after_the_rewind_is_skipped(tmp_path: Path) -> None:
    """The Trainer was suspended while it wrote the checkpoint of step 5, its successor went back to step 3, and then
    the suspended one continued."""
    history = NO_REWINDS.after_rewind(3)
    three, five = write_checkpoint(tmp_path, 3, seq=30), write_checkpoint(tmp_path, 5, seq=50)
    assert find_latest(tmp_path / CHECKPOINTS) == five
    found = resume_in_run(RunDir(tmp_path), history)
    assert found is not None and (found.checkpoint, found.history) == (three, history.after_rewind(3))
    four = write_checkpoint(tmp_path, 4, seq=70, lineage=1)
    assert find_latest(tmp_path / CHECKPOINTS, history) == four
    assert find_latest(tmp_path / CHECKPOINTS) == four, "without a known history, the newest lineage counts"


@pytest.fixture
def rewound(run: RunOnDisk) -> tuple[Path, Path]:
    """Write the checkpoints of steps 3 and 5 of a run that was at step 5 and went back to step 3."""
    run.journal(MarkCheckpoint(3), MarkCheckpoint(5), RewindTraining(3, 0, 1, None))
    return run.checkpoint(3, seq=1), run.checkpoint(5, seq=2)


def test_a_launch_skips_an_abandoned_checkpoint_and_refuses_it_by_name(
    run: RunOnDisk, rewound: tuple[Path, Path]
) -> None:
    three, five = rewound
    found = run.found()
    assert (found.checkpoint, found.lineage, found.history) == (three, 2, NO_REWINDS.after_rewind(3, 2))
    with pytest.raises(ConfigError, match=r"training went back to step 3 \(lineage 1\).* \(model\.path=.*/hf"):
        run.resume(resume=str(five))
    aside = five.rename(five.with_name(f"abandoned_{five.name}"))
    for journal in ("on", "off"):
        with pytest.raises(ConfigError, match="training went back to "):
            run.resume(resume=str(aside), journal=journal)
    assert run.found(resume=str(three)).checkpoint == three


@pytest.mark.usefixtures("rewound")
def test_the_journal_does_not_continue_from_an_abandoned_mark(run: RunOnDisk) -> None:
    """If a checkpoint of that mark is restored anyway, the run uses the sample counts in the checkpoint."""

    async def reopen(seq: int) -> Journal:
        opened = Journal.open(run.files.journal, num_prompts=8, identity={}, restore=snapshot(seq))
        await end(opened)
        return opened

    assert anyio.run(reopen, 1).notices == ()
    [notice] = anyio.run(reopen, 2).notices
    assert "does not contain the checkpoint" in notice and "behind" in notice


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
    run: RunOnDisk, change: dict[str, Any], key: str
) -> None:
    """A checkpoint without a journal has no such samples."""
    run.journal(MarkCheckpoint(5))
    samples = f"journal.db has samples that were generated with {key}"
    with pytest.raises(ConfigError, match=f"{samples}.* Restore the setting; or start"):
        run.resume(**change)
    path = run.checkpoint(5, seq=1)
    alone = "or continue from step_000005 alone and generate them again: journal=off; or start anew"
    with pytest.raises(ConfigError, match=f"{key}.* Restore the setting; {alone}"):
        run.resume(**change)
    assert run.found(journal="off", **change).checkpoint == path


def test_settings_that_do_not_affect_samples_may_change_under_a_journal(run: RunOnDisk) -> None:
    run.journal()
    assert run.found(
        rollout={"num_replicas": 2, "max_attempts": 9, "val": {"temperature": 1.0}},
        reward={"on_error": "drop", "timeout_s": 5.0},
        reward_model={"placement": "worker", "path": "m"},
    )


def test_a_completed_run_is_not_trained_again_in_its_own_directory(run: RunOnDisk) -> None:
    run.journal()
    run.summary("completed", 9)
    for resume in ("auto", str(run.path)):
        with pytest.raises(ConfigError, match="is completed and left no checkpoint"):
            run.resume(resume=resume)


def test_a_changed_environment_variable_is_refused_without_its_value(run: RunOnDisk) -> None:
    def from_environment(value: str) -> Config:
        texts = {("data", "train_files", 0): "${oc.env:ROWS}"}
        return run.again(data={"train_files": (value,)}, resume=str(run.path)).with_unresolved(texts)

    run.config = from_environment("c4n4ry of old")
    run.journal()
    assert find_resume(from_environment("c4n4ry of old")) is not None
    with pytest.raises(ConfigError, match=r"data\.train_files=\['\$\{oc\.env:ROWS\} \(sha256:.*Restore the") as raised:
        find_resume(from_environment("c4n4ry of new"))
    assert "c4n4ry" not in str(raised.value)


# ---------------------------------------------------------------------------------------------- trainer.checkpoint_dir


def on_network(path: Path) -> RunOnDisk:
    """A run whose checkpoints are outside of its run directory, as its first launch leaves it."""
    run = RunOnDisk(path, trainer={"checkpoint_dir": str(path.parent / "network")})
    claim_checkpoints(run.files, NO_REWINDS, new=True, exclusive=True, mode=0o700)
    return run


@pytest.fixture
def remote(tmp_path: Path) -> RunOnDisk:
    return on_network(tmp_path / "first")


def test_a_run_continues_in_a_new_directory_if_its_own_is_lost(remote: RunOnDisk, tmp_path: Path) -> None:
    three, six = remote.checkpoint(3, seq=30), remote.checkpoint(6, seq=60, lineage=2)
    rmtree(remote.path)
    new, root = str(tmp_path / "second"), str(six.parent)
    for resume, checkpoint in [("auto", six), (root, six), (str(three), three), (str(six), six)]:
        warnings: list[str] = []
        found = find_resume(remote.again(resume=resume, run_dir=new), warn=warnings.append)
        assert found is not None
        assert (found.run_dir, found.checkpoint, found.lineage, found.incarnations) == (None, checkpoint, 3, {})
        assert warnings == [found.lost] and f"{remote.path} on " in found.lost
        assert f"which is step {found.manifest.progress.step} " in found.lost
    found = remote.found(run_dir=new)
    second = open_run_dir(remote.again(run_dir=new), found)
    claim_checkpoints(second, found.history, new=False, exclusive=False, mode=0o700)
    again = remote.found(run_dir=None)
    assert (again.run_dir, again.checkpoint, again.lineage, again.lost) == (second.path, six, 4, "")
    rmtree(second.path)
    with pytest.raises(ConfigError, match=r"checkpoints of the run in .*/second on .*, not of the one in .*/third"):
        RunOnDisk(tmp_path / "third", trainer=remote.config.trainer.model_dump()).resume()


def test_a_run_whose_checkpoints_are_at_a_url_continues_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "mirrors")
    url = f"file://{tmp_path}/bucket/run"
    first = RunOnDisk(tmp_path / "first", trainer={"checkpoint_dir": url})
    claim_checkpoints(first.files, NO_REWINDS, new=True, exclusive=True, mode=0o700)
    remote = remote_checkpoints(first.files)
    assert remote is not None
    for step in (3, 6):
        remote.upload(first.checkpoint(step, seq=10 * step), lambda: None)
    first.checkpoint(9)  # not uploaded when the machine is lost
    rmtree(first.path)
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "other-machine")
    again = first.again(run_dir=str(tmp_path / "second"))
    found = find_resume(again)
    assert found is not None and found.checkpoint is not None
    assert (found.run_dir, found.manifest.progress.step, found.lineage) == (None, 6, 1)
    assert found.checkpoint.is_relative_to(tmp_path / "other-machine") and f"{first.path} on " in found.lost
    second = open_run_dir(again, found)
    claim_checkpoints(second, found.history, new=False, exclusive=False, mode=0o700)
    there = find_resume(again)
    assert there is not None and (there.run_dir, there.lineage, there.lost) == (second.path, 2, "")


def test_a_run_directory_that_is_here_is_not_left(remote: RunOnDisk, tmp_path: Path) -> None:
    path = remote.checkpoint(5, seq=40)
    remote.journal(AttachPart("rollouter", 3), seq=40)
    for changes in ({}, {"run_dir": None}, {"run_dir": None, "resume": str(path)}, {"resume": str(remote.path)}):
        found = remote.found(**changes)
        assert (found.run_dir, found.checkpoint, found.incarnations) == (remote.path, path, {"rollouter": 3})
    moved = remote.again(run_dir=str(tmp_path / "second"))
    found = find_resume(moved)
    assert found is not None
    with pytest.raises(ConfigError, match="a run continues in its own directory"):
        check_run_dir(moved, found)
    remote.path.rename(tmp_path / "second")
    renamed = find_resume(moved)
    assert renamed is not None and renamed.run_dir == tmp_path / "second"


def test_without_a_checkpoint_a_new_run_begins(remote: RunOnDisk) -> None:
    rmtree(remote.path)
    warnings: list[str] = []
    assert find_resume(remote.again(), warn=warnings.append) is None
    assert len(warnings) == 1 and "finds no checkpoint in trainer.checkpoint_dir=" in warnings[0]
    with pytest.raises(ConfigError, match="there is no checkpoint to continue from"):
        remote.resume(resume=str(remote.files.checkpoints))


@pytest.mark.parametrize("journal", ["on", "off"])
def test_a_rewind_counts_before_its_checkpoints_are_renamed(remote: RunOnDisk, journal: str) -> None:
    """Training was at step 5 and went back to step 3. Then the machine was lost, before the next checkpoint."""
    three, five = remote.checkpoint(3), remote.checkpoint(5)
    record_history(remote.files, NO_REWINDS.after_rewind(3))
    assert remote.found(journal=journal).checkpoint == three
    rmtree(remote.path)
    found = remote.found(journal=journal)
    assert (found.checkpoint, found.lineage) == (three, 2)
    with pytest.raises(ConfigError, match=r"training went back to step 3 \(lineage 1\)"):
        remote.resume(resume=str(five))
    (five.parent / CLAIM).unlink()
    assert remote.found(journal=journal).checkpoint == five, "without a claim, the newest lineage counts"
    (five.parent / CLAIM).write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json cannot be read .* Restore it, or delete it"):
        remote.resume()


def test_checkpoints_that_are_not_where_they_were_stop_a_launch(remote: RunOnDisk, tmp_path: Path) -> None:
    """Otherwise training would go back to the initial model."""
    path = remote.checkpoint(5)
    StateFile(remote.path / STATE_FILE).write_now(running())
    for elsewhere in (None, str(tmp_path / "elsewhere")):
        with pytest.raises(ConfigError, match=f"are in {path.parent}, and .* Restore trainer.checkpoint_dir="):
            remote.resume(resume=str(remote.path), trainer={"checkpoint_dir": elsewhere})
    for source in (path, path.parent):
        with pytest.raises(ConfigError, match=f"Give trainer.checkpoint_dir={path.parent}, too"):
            remote.resume(resume=str(source), trainer={"checkpoint_dir": None})
    path.parent.rename(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"has no run\.json, .* Check that the disk is mounted"):
        remote.resume()


def test_checkpoints_of_a_run_can_be_moved_to_a_checkpoint_dir(run: RunOnDisk, tmp_path: Path) -> None:
    path = run.checkpoint(5, seq=40)
    run.journal(AttachPart("rollouter", 3), seq=40)
    path.parent.rename(tmp_path / "network")
    found = run.found(trainer={"checkpoint_dir": str(tmp_path / "network")})
    assert (found.run_dir, found.checkpoint, found.incarnations) == (
        run.path, tmp_path / "network" / path.name, {"rollouter": 3},
    )  # fmt: skip


def test_a_directory_of_another_run_is_not_claimed_for_a_new_one(remote: RunOnDisk, tmp_path: Path) -> None:
    other = RunOnDisk(tmp_path / "other", trainer=remote.config.trainer.model_dump()).files
    with pytest.raises(ConfigError, match="belongs to another run, which has just claimed it"):
        claim_checkpoints(other, NO_REWINDS, new=True, exclusive=True, mode=0o700)
    remote.checkpoint(5)
    with pytest.raises(ConfigError, match="has checkpoints, none of which this run continues from"):
        claim_checkpoints(other, NO_REWINDS, new=True, exclusive=False, mode=0o700)
