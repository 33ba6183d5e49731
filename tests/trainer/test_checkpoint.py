"""Checkpoints: atomic writes, pruning, finding the one to resume, and refusing those of another configuration."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import AsyncRLError, ConfigError, FencedError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.types import SampleId
from asyncrl.core.waits import WaitBoard
from asyncrl.driver.resume import find_resume
from asyncrl.queue.sample_queue import LocalSampleQueue
from asyncrl.storage.checkpoint_claim import claim_checkpoints, read_claim, read_run_id, record_history
from asyncrl.storage.checkpoint_manifest import (
    CHECKPOINTS,
    NO_REWINDS,
    LineageHistory,
    Progress,
    checkpoint_steps,
    find_latest,
    load_manifest,
    run_identity,
)
from asyncrl.storage.run_dir import RunDir
from tests.fakes import hostile
from tests.fakes.trainer_model import make_config, write_model
from tests.fakes.trainer_parts import FakeGroup
from trainer import checkpoints as checkpoint_module
from trainer.checkpoints import EXPORT_EVERY, CheckpointDirectory, HfExportSettings, RoleCheckpoints, check_shared
from trainer.engines.base import Layout
from trainer.workers.worker import RoleGroup, TrainingWorker

SNAPSHOT = QueueSnapshot(
    next_index=9,
    outstanding=(SampleId(0, 7), SampleId(1, 8)),
    counts=SampleCounts(fed=8, running=1, ready=1, leased=0, trained=5, dropped={"stale": 1, "failed": 0}),
    version=3,
    seq=17,
)


def progress(step: int) -> Progress:
    return Progress(step=step, version=3, published_step=step - 1, leases=4, trained_samples=5, trained_tokens=123)


def checkpointer(
    run_dir: Path, config: Config | None = None, keep: int = 2, history: LineageHistory = NO_REWINDS
) -> CheckpointDirectory:
    identity = run_identity(config or Config())
    return CheckpointDirectory(run_dir / CHECKPOINTS, identity=identity, keep=keep, history=history)


class AgreeingQueue(LocalSampleQueue):
    """Confirms `agreed` times that its caller was not replaced."""

    def __init__(self, agreed: int = 2) -> None:
        self.confirmed: list[int] = []
        self._agreed = agreed

    async def confirm(self, step: int) -> None:
        self.confirmed.append(step)
        if len(self.confirmed) > self._agreed:
            raise FencedError("it was replaced")


def saving(
    files: CheckpointDirectory, queue: AgreeingQueue, export: HfExportSettings = EXPORT_EVERY, **roles: RoleGroup
) -> RoleCheckpoints:
    waits = WaitBoard()
    return RoleCheckpoints(files, roles, queue, step=0, save_freq=1, export=export, call_limit_s=5.0, waits=waits)  # type: ignore[arg-type]


def fill(building: Path, *, critic: bool = False) -> None:
    """Write the files of the roles."""
    files = {"actor/engine.json": '{"step": 1}', "hf/config.json": "{}", "hf/model.safetensors": "weights" * 10}
    if critic:
        files["critic/engine.json"] = "{}"
    for name, text in files.items():
        (building / name).parent.mkdir(exist_ok=True)
        (building / name).write_text(text)


def save(
    run_dir: Path,
    *steps: int,
    config: Config | None = None,
    keep: int = 2,
    critic: bool = False,
    history: LineageHistory = NO_REWINDS,
) -> Path:
    writer = checkpointer(run_dir, config, keep, history)
    for step in steps:
        building = writer.open(step)
        fill(building, critic=critic)
        path = writer.commit(building, progress(step), SNAPSHOT)
        writer.prune()
    return path


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    path = save(tmp_path, 50)
    assert path == tmp_path / "checkpoints" / "step_000050"
    manifest = load_manifest(path)
    assert manifest.progress == progress(50)
    assert manifest.queue == SNAPSHOT
    assert manifest.identity == run_identity(Config())
    assert manifest.files == {"actor/engine.json": 11, "hf/config.json": 2, "hf/model.safetensors": 70}


def test_other_keys_in_a_manifest_are_another_schema(tmp_path: Path) -> None:
    """A version of asyncrl with other keys must refuse the checkpoint by its schema instead of reporting damage."""
    raw = json.loads((save(tmp_path, 50) / "manifest.json").read_text())
    queue = raw.pop("queue")
    progress, counts = raw.pop("progress"), queue.pop("counts")
    keys = [" ".join(sorted(section)) for section in (raw, progress, queue, counts)]
    assert (raw["schema_version"], keys) == (
        5,
        [
            "files identity lineage schema_version",
            "kl_coef leases published_step step trained_samples trained_tokens version",
            "next_index outstanding seq version",
            "dropped fed leased ready replayed running substituted trained",
        ],
    )


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 15, 100, keep=2)
    assert names(tmp_path) == ["step_000015", "step_000100"]
    assert find_latest(tmp_path / CHECKPOINTS) == tmp_path / "checkpoints" / "step_000100"


def test_a_second_checkpoint_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "checkpoints" / "step_000005" / "old").touch()
    save(tmp_path, 5)
    assert names(tmp_path) == ["step_000005"]
    assert not (tmp_path / "checkpoints" / "step_000005" / "old").exists()


class Crash(BaseException):
    """Raised where the process is supposed to end."""


@pytest.mark.parametrize("crash_at", range(20))
def test_a_crash_at_any_moment_leaves_only_complete_checkpoints(
    tmp_path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash at the n-th disk operation of a save, all checkpoints are complete and the next save works."""
    save(tmp_path, 1, 2)
    left = crash_at

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for owner, name in [
            (os, "fsync"),
            (Path, "rename"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (Path, "write_bytes"),
        ]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(checkpoint_module.shutil, "rmtree", counted(checkpoint_module.shutil.rmtree))
        with suppress(Crash):
            save(tmp_path, 3)
    steps = checkpoint_steps(tmp_path / CHECKPOINTS)
    assert set(steps) in ({1, 2}, {1, 2, 3}, {2, 3})
    for path in steps.values():
        load_manifest(path)
    save(tmp_path, 4, 5)
    assert names(tmp_path) == ["step_000004", "step_000005"]


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(errno.ENOSPC, InfraError, "disk is full"), (errno.EACCES, ConfigError, "run_dir=PATH")],
)
def test_a_failed_write_does_not_change_the_last_checkpoint(
    tmp_path: Path, number: int, kind: type[AsyncRLError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=message):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_000001"]


def test_resuming_from_an_older_checkpoint_sets_later_ones_aside(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep=3)
    history = NO_REWINDS.after_rewind(1)
    checkpointer(tmp_path, history=history).set_abandoned_aside()
    assert names(tmp_path) == ["abandoned_step_000002", "abandoned_step_000003", "step_000001"]
    assert find_latest(tmp_path / CHECKPOINTS) == tmp_path / "checkpoints" / "step_000001"
    save(tmp_path, 2, 3, keep=3, history=history)
    checkpointer(tmp_path, history=history.after_rewind(2)).set_abandoned_aside()
    assert names(tmp_path) == ["abandoned_step_000002", "abandoned_step_000003", "step_000001", "step_000002"]
    manifests = {path.name: load_manifest(path) for path in (tmp_path / "checkpoints").iterdir()}
    assert {name: manifest.lineage for name, manifest in manifests.items()} == {
        "abandoned_step_000002": 0,
        "abandoned_step_000003": 1,
        "step_000001": 0,
        "step_000002": 1,
    }


def test_a_run_without_checkpoints_has_none_to_set_aside(tmp_path: Path) -> None:
    checkpointer(tmp_path, history=NO_REWINDS.after_rewind(0)).set_abandoned_aside()
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_trainer_neither_saves_nor_prunes_checkpoints(tmp_path: Path) -> None:
    """Its successor goes back to step 1 and sets later checkpoints aside."""
    save(tmp_path, 1)
    replaced, history = checkpointer(tmp_path, keep=1), NO_REWINDS.after_rewind(1)
    late = replaced.open(3)
    fill(late)
    successor = checkpointer(tmp_path, keep=1, history=history)
    successor.set_abandoned_aside()
    with pytest.raises(InfraError):  # the files of the checkpoint are gone
        replaced.commit(late, progress(3), SNAPSHOT)
    save(tmp_path, 3, keep=2)
    save(tmp_path, 2, keep=1, history=history)
    assert names(tmp_path) == ["abandoned_step_000003", "step_000002"], "the late checkpoint is not the newest"
    late = replaced.open(4)
    fill(late)
    with pytest.raises(FencedError, match="step_000002 is of lineage 1: the Trainer of lineage 0 was replaced"):
        replaced.commit(late, progress(4), SNAPSHOT)
    assert load_manifest(tmp_path / "checkpoints" / "step_000002").lineage == 1


# ---------------------------------------------------------------------------------------------- trainer.checkpoint_dir


def claimed(tmp_path: Path, name: str, history: LineageHistory = NO_REWINDS) -> tuple[RunDir, CheckpointDirectory]:
    """Claim `network` for a run, and return the run directory and its checkpoint writer."""
    run_dir = RunDir(tmp_path / name, tmp_path / "network")
    run_dir.path.mkdir(exist_ok=True)
    claim_checkpoints(run_dir, history, new=False, exclusive=False, mode=0o700)
    run_id = read_run_id(run_dir.path)
    writer = CheckpointDirectory(run_dir.checkpoints, identity={}, keep=1, history=history, run_id=run_id)
    return run_dir, writer


def write(writer: CheckpointDirectory, step: int) -> Path:
    building = writer.open(step)
    fill(building)
    return writer.commit(building, progress(step), SNAPSHOT)


def test_a_run_that_comes_back_to_life_leaves_the_checkpoints_alone(tmp_path: Path) -> None:
    """Its machine was cut off, and the run was continued on another one."""
    old_run, old = claimed(tmp_path, "old")
    write(old, 3)
    late = old.open(6)
    fill(late)
    _, new = claimed(tmp_path, "new", NO_REWINDS.after_rewind(3))
    new.set_abandoned_aside()
    building = new.open(5)
    fill(building)
    attempts: list[Callable[[], object]] = [
        lambda: old.commit(late, progress(6), SNAPSHOT),
        lambda: old.open(7),
        old.prune,
        old.set_abandoned_aside,
        lambda: record_history(old_run, NO_REWINDS.after_rewind(3, 9)),
    ]
    for attempt in attempts:
        with pytest.raises(FencedError, match=r"was claimed by the run in .*/new on "):
            attempt()
    assert new.commit(building, progress(5), SNAPSHOT).name == "step_000005"
    assert new.prune() == 5
    assert sorted(path.name for path in (tmp_path / "network").iterdir()) == ["run.json", "step_000005"]


def test_a_checkpoint_is_dropped_if_the_run_is_continued_elsewhere_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, old = claimed(tmp_path, "old")
    building = old.open(6)
    fill(building)

    def slow(path: Path) -> None:
        if path == building:  # the last one before the rename
            claimed(tmp_path, "new")

    monkeypatch.setattr(checkpoint_module, "sync", slow)
    with pytest.raises(FencedError, match="was claimed by"):
        old.commit(building, progress(6), SNAPSHOT)
    assert [path.name for path in (tmp_path / "network").iterdir()] == ["run.json"]


def test_a_disk_that_is_no_longer_mounted_is_not_mistaken_for_the_checkpoint_dir(tmp_path: Path) -> None:
    _, writer = claimed(tmp_path, "run")
    (tmp_path / "network").rename(tmp_path / "unmounted")
    with pytest.raises(InfraError, match=r"run\.json is gone: .* Mount the disk again"):
        writer.open(3)
    assert not (tmp_path / "network").exists()


@pytest.mark.parametrize("crash_at", range(14))
def test_a_crash_at_any_moment_of_a_rewind_leaves_a_checkpoint_of_the_newest_lineage(
    tmp_path: Path, crash_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes back from step 5 to step 3 and writes step 4. Then only `trainer.checkpoint_dir` is left."""
    run_dir, _ = claimed(tmp_path, "run")
    save(tmp_path, 3, 5)
    (tmp_path / CHECKPOINTS / "step_000003").rename(tmp_path / "network" / "step_000003")
    (tmp_path / CHECKPOINTS / "step_000005").rename(tmp_path / "network" / "step_000005")
    history, left = NO_REWINDS.after_rewind(3), crash_at

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return call(*args, **kwargs)

        return run

    with monkeypatch.context() as patch:
        for owner, name in [(os, "replace"), (os, "fsync"), (Path, "rename"), (Path, "mkdir")]:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        with suppress(Crash):
            record_history(run_dir, history)
            run_id = read_run_id(run_dir.path)
            after = CheckpointDirectory(run_dir.checkpoints, identity={}, keep=2, history=history, run_id=run_id)
            after.set_abandoned_aside()
            write(after, 4)
    claim = read_claim(run_dir.checkpoints)
    assert claim is not None
    latest = find_latest(run_dir.checkpoints, claim.history)
    assert latest is not None
    load_manifest(latest)
    expected = {"step_000005"} if claim.history == NO_REWINDS else {"step_000003", "step_000004"}
    assert latest.name in expected


# ------------------------------------------------------------------------------------------------ several roles


class SavingGroup(FakeGroup):
    """A role that writes half of its state when a checkpoint begins and the rest when it ends."""

    def __init__(self, error: AsyncRLError | None = None) -> None:
        super().__init__()
        self.error = error
        self.file = Path()

    async def save_checkpoint(self, directory: Path, *, hf: Path | None = None, hf_dtype: Dtype = "float32") -> None:
        self.file = directory / "state"
        self.file.write_text("half")
        if hf is not None:
            await anyio.Path(hf).mkdir()
            (hf / "config.json").write_text(json.dumps({"dtype": hf_dtype}))

    async def finish_checkpoint(self) -> None:
        if self.error is not None:
            raise self.error
        self.file.write_text("whole")


async def test_a_checkpoint_has_all_roles_and_the_state_at_its_beginning(tmp_path: Path) -> None:
    checkpoints = saving(checkpointer(tmp_path), AgreeingQueue(), actor=SavingGroup(), critic=SavingGroup())
    building = await checkpoints.copy_roles(7)
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == {}
    assert await checkpoints.finish(building, progress(7), SNAPSHOT) == 7
    manifest = load_manifest(checkpoint_steps(tmp_path / CHECKPOINTS)[7])
    assert manifest.files == {"actor/state": 5, "critic/state": 5, "hf/config.json": 20}
    assert (manifest.progress, manifest.queue) == (progress(7), SNAPSHOT)


@pytest.mark.parametrize(("frequency", "exported"), [("every", [1, 2, 3]), ("last", [3]), ("never", [])])
async def test_the_model_is_exported_with_the_configured_checkpoints_and_type(
    tmp_path: Path, frequency: Any, exported: list[int]
) -> None:
    queue, group = AgreeingQueue(agreed=6), SavingGroup()
    export = HfExportSettings(frequency, "bfloat16")
    checkpoints = saving(checkpointer(tmp_path, keep=3), queue, export, actor=group, critic=SavingGroup())
    for step in (1, 2, 3):
        building = await checkpoints.copy_roles(step, export=checkpoints.exports(last=step == 3))
        await checkpoints.finish(building, progress(step), SNAPSHOT)
    found = {step: path / "hf" / "config.json" for step, path in checkpoint_steps(tmp_path / CHECKPOINTS).items()}
    assert [step for step, file in found.items() if file.is_file()] == exported
    assert {found[step].read_text() for step in exported} <= {'{"dtype": "bfloat16"}'}
    assert [load_manifest(file.parents[1]).progress.step for file in found.values()] == [1, 2, 3]


@pytest.mark.parametrize(("agreed", "left"), [(0, [5]), (1, [5, 7]), (2, [7])])
async def test_the_queue_confirms_before_a_checkpoint_is_named_and_before_another_is_deleted(
    tmp_path: Path, agreed: int, left: list[int]
) -> None:
    save(tmp_path, 5)
    queue = AgreeingQueue(agreed)
    checkpoints = saving(checkpointer(tmp_path, keep=1), queue, actor=SavingGroup())
    building = await checkpoints.copy_roles(7)
    assert queue.confirmed == []
    with nullcontext() if agreed == 2 else pytest.raises(FencedError, match="it was replaced"):
        assert await checkpoints.finish(building, progress(7), SNAPSHOT) == left[0]
    assert set(queue.confirmed) == {7}
    assert list(checkpoint_steps(tmp_path / CHECKPOINTS)) == left


async def test_a_full_disk_is_reported_when_a_checkpoint_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == "critic":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", full)
    checkpoints = saving(checkpointer(tmp_path), AgreeingQueue(), actor=SavingGroup(), critic=SavingGroup())
    with pytest.raises(InfraError, match="disk is full"):
        await checkpoints.copy_roles(2)


async def test_a_rank_with_another_directory_is_found_before_the_first_step(tmp_path: Path) -> None:
    class OnNode(FakeGroup):
        """Ranks of a node that has its own files below `root`."""

        def __init__(self, root: Path) -> None:
            super().__init__()
            self.root = root
            self.found: list[Path] = []

        async def find_file(self, path: Path) -> None:
            worker = TrainingWorker.__new__(TrainingWorker)
            worker.engine = SimpleNamespace(layout=Layout(1, 2, 1, 2, reports=True))  # type: ignore[assignment]
            worker.find_file(self.root / path.relative_to(tmp_path))
            self.found.append(path)

    files, here, elsewhere = checkpointer(tmp_path), OnNode(tmp_path), OnNode(tmp_path / "elsewhere")
    await check_shared(files, {"actor": here})
    assert len(here.found) == 1
    with pytest.raises(
        ConfigError, match=r"trainer\.checkpoint_dir: rank 1 on .* does not see the directory .*mounted"
    ):
        await check_shared(files, {"actor": here, "critic": elsewhere})
    assert list((tmp_path / CHECKPOINTS).iterdir()) == [], "no marker is left"


async def test_a_role_that_cannot_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    failing = SavingGroup(InfraError("the disk is full"))
    checkpoints = saving(checkpointer(tmp_path), AgreeingQueue(), actor=SavingGroup(), critic=failing)
    building = await checkpoints.copy_roles(2)
    with pytest.raises(InfraError, match="the disk is full"):
        await checkpoints.finish(building, progress(2), SNAPSHOT)
    assert list(checkpoint_steps(tmp_path / CHECKPOINTS)) == [1]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]


# ------------------------------------------------------------------------------------------------ unusable checkpoints


def change(checkpoint: Path, section: str, **values: Any) -> None:
    path = checkpoint / "manifest.json"
    raw = json.loads(path.read_text())
    raw[section] |= values
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), r"manifest\.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"schema_version": 5'), r"manifest\.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"schema_version": 5}'), r"manifest\.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"schema_version": 4}'), "schema version 4"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), r"manifest\.json is damaged"),
        (lambda path: change(path, "progress", step="../7"), r"manifest\.json is damaged .*step"),
        (
            lambda path: change(path, "files", **{"../../victim": 6}),
            r"manifest\.json is damaged .*'../../victim' is not",
        ),
        (lambda path: change(path, "files", **{"/etc/passwd": 6}), r"manifest\.json is damaged .*'/etc/passwd' is not"),
        (lambda path: (path / "actor" / "engine.json").unlink(), r"engine\.json is missing"),
        (lambda path: (path / "hf" / "model.safetensors").write_bytes(b"w"), r"model\.safetensors is 1 bytes long"),
    ],
)
def test_a_torn_checkpoint_is_named_with_its_fix(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = save(tmp_path, 5)
    damage(path)
    with pytest.raises(ConfigError, match=f"(?s){message}.*resume=none"):
        load_manifest(path)


def test_any_manifest_is_read_or_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 5) / "manifest.json"
    raw = json.loads(path.read_text())

    @settings(max_examples=200, deadline=None)
    @given(hostile.damaged(raw) | hostile.damaged({**raw, "files": []}))
    def check(content: Any) -> None:
        path.write_text(hostile.dumps(content))
        find_latest(tmp_path)
        try:
            manifest = load_manifest(path.parent)
        except ConfigError as error:
            assert "resume=none" in error.message
        else:
            sum_of_counts = manifest.queue.counts.trained + manifest.queue.counts.num_dropped
            assert isinstance(sum_of_counts + manifest.progress.step + manifest.lineage, int)

    check()


def test_a_run_with_other_data_or_batches_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 5)
    for change in ({"seed": 1}, {"data": {"shuffle": False}}, {"trainer": {"ppo_mini_batch_size": 7}}):
        config = Config.model_validate({"resume": str(run)} | change)
        with pytest.raises(ConfigError, match=r"feed indices and versions would mean .*resume=none"):
            find_resume(config)
    # these keys do not change which prompt a feed index means
    free = {"optim": {"lr": 1.0}, "num_workers": 4, "strategy": "ddp", "ppo_epochs": 3}
    assert find_resume(Config.model_validate({"resume": str(run), "trainer": free})) is not None


def test_a_checkpoint_without_the_needed_critic_is_refused(tmp_path: Path) -> None:
    wanted = Config.model_validate({"resume": str(tmp_path), "algorithm": {"adv_estimator": "gae"}})
    save(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"step_000005 has no critic, which .*adv_estimator=gae needs"):
        find_resume(wanted)
    save(tmp_path, 6, critic=True)
    assert find_resume(wanted) is not None
    # a run without a critic ignores the saved critic
    assert find_resume(wanted.model_copy(update={"algorithm": AlgorithmConfig()})) is not None


def test_the_checkpoint_of_another_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    small, large = write_model(tmp_path / "small"), write_model(tmp_path / "large", hidden=32)
    config = make_config(small)
    writer = checkpointer(tmp_path / "run", config)
    building = writer.open(1)
    fill(building)
    shutil.copy(small / "config.json", building / "hf")
    path = writer.commit(building, progress(1), SNAPSHOT)
    assert find_resume(make_config(small, resume=str(tmp_path / "run"))) is not None
    with pytest.raises(ConfigError, match=r"config\.json has hidden_size=16, .* has 32: .* another model"):
        find_resume(make_config(large, resume=str(path)))


def test_a_checkpoint_without_an_export_continues_and_no_error_points_to_it(tmp_path: Path) -> None:
    run, config = tmp_path / "run", make_config(write_model(tmp_path / "model"))
    writer = checkpointer(run, config)
    building = writer.open(1, ("actor",))
    path = writer.commit(building, progress(1), SNAPSHOT)
    found = find_resume(config.model_copy(update={"resume": str(path)}))
    assert found is not None
    other = Config.model_validate({"resume": str(run), "seed": 1, "model": {"path": config.model.path}})
    with pytest.raises(ConfigError, match="resume=none") as caught:
        find_resume(other)
    assert "hf" not in caught.value.message.replace(str(tmp_path), "")


# ------------------------------------------------------------------------------------------------ resume=


def test_resume_none_finds_no_checkpoint_and_auto_the_newest_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("20260101-000000", "20260102-000000"):
        save(runs / "quickstart" / name, 5)
    (runs / "quickstart" / "20260103-000000" / "checkpoints" / ".step_000009.tmp").mkdir(parents=True)
    assert find_resume(Config(resume="none"), root=runs) is None
    found = find_resume(Config(resume="auto"), root=runs)
    assert found is not None
    assert found.run_dir == runs / "quickstart" / "20260102-000000"
    assert found.manifest.progress.step == 5
    assert find_resume(Config(resume="auto", experiment_name="another"), root=runs) is None


def test_resume_auto_with_a_run_dir_looks_only_there(tmp_path: Path) -> None:
    save(tmp_path / "runs" / "quickstart" / "20260101-000000", 5)
    here = tmp_path / "here"
    config = Config(resume="auto", run_dir=str(here))
    assert find_resume(config, root=tmp_path / "runs") is None
    save(here, 7)
    found = find_resume(config, root=tmp_path / "runs")
    assert found is not None and found.manifest.progress.step == 7


def test_resume_accepts_the_path_of_a_run_or_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, 6)
    for text, step in [("", 6), ("checkpoints", 6), ("checkpoints/step_000005", 5)]:
        found = find_resume(Config(resume=str(tmp_path / text)))
        assert found is not None
        assert (found.manifest.progress.step, found.run_dir) == (step, tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint to continue from"):
        find_resume(Config(resume=str(tmp_path / "elsewhere")))


def test_reading_a_manifest_imports_no_torch() -> None:
    heavy = {"torch", "ray", "transformers", "vllm"}
    code = f"import sys, asyncrl.storage.checkpoint_manifest, asyncrl.driver.resume; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
