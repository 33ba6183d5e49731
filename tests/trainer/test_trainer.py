"""The start and the monitoring of a Trainer without ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.staleness import Pacing
from asyncrl.core.waits import WaitBoard
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.checkpoint_manifest import CHECKPOINTS, NO_REWINDS, Manifest, Progress, Resume, run_identity
from asyncrl.storage.run_dir import RunDir
from asyncrl.storage.trained_steps import TrainedStepsFile, read_trained
from tests.fakes.parts import MemoryPayloads
from tests.fakes.trainer_parts import FakeGroup, TrainerRecords, feed
from trainer import trainer as trainer_module
from trainer.checkpoints import CheckpointDirectory
from trainer.ranks_turn import RanksTurn
from trainer.trainer import Trainer
from trainer.workers.group import TrainerGroups

NO_SAMPLES = Manifest(Progress(step=2), QueueSnapshot(1, (), SampleCounts(), 0), {})


def make(
    run_dir: Path, lineage: int = 0, *, config: Config | None = None, validated_step: int | None = None
) -> Trainer:
    config = config or Config()
    files = CheckpointDirectory(run_dir / CHECKPOINTS, identity=run_identity(config), keep=1)
    record = TrainedStepsFile(run_dir, lineage)
    waits = WaitBoard()
    turn = RanksTurn(None, waits, offload_s=1.0)
    return Trainer(
        config, TrainerGroups([]), files, record, waits, turn, lineage=lineage, validated_step=validated_step
    )


@pytest.mark.parametrize(
    ("lineage", "progress", "published"),
    [
        (0, Progress(step=2, version=1), [(1, 2, 0, False)]),
        (1, Progress(step=2, version=1), [(1, 2, 0, False)]),
        (1, Progress(step=1), [(0, 1, 0, False)]),
        (1, None, [(0, 0, 0, False)]),  # training goes back to the initial model
        (0, None, []),  # replicas start with the initial model
    ],
)
async def test_the_version_of_a_rewind_is_published_and_logged(
    tmp_path: Path, lineage: int, progress: Progress | None, published: list[Any]
) -> None:
    trainer, actor = make(tmp_path, lineage), FakeGroup()
    trainer._trained["actor"] = actor
    if progress is not None:
        await trainer._resume(Resume(tmp_path, None, replace(NO_SAMPLES, progress=progress)))
    await trainer._publish_start(new_run=progress is None and lineage == 0)
    assert actor.published == published
    lines = [{"lineage": lineage, "rewound_to_step": progress.step if progress else 0}]
    assert list(read_trained(tmp_path)) == (lines if published else [])


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({"rollout": {"attach": "app"}}, True),
        ({"model": {"lora_rank": 4}, "weight_sync": {"lora": "adapter"}}, True),
        ({"model": {"lora_rank": 4}}, False),
    ],
)
async def test_the_initial_model_is_published_if_engines_do_not_serve_it_by_themselves(
    tmp_path: Path, changes: dict[str, Any], published: bool
) -> None:
    trainer, actor = make(tmp_path, config=Config.model_validate(changes)), FakeGroup()
    trainer._trained["actor"] = actor
    await trainer._publish_start(new_run=True)
    assert actor.published == [(0, 0, 0, False)] * published


@pytest.mark.parametrize(
    ("step", "validated_step", "section", "owed"),
    [
        (20, 10, {"test_freq": 10}, True),  # training went back while this version was being validated
        (20, 20, {"test_freq": 10}, False),
        (25, 20, {"test_freq": 10}, False),
        (25, None, {"test_freq": 10}, True),
        (5, None, {"test_freq": 10, "val_before_train": False}, False),
        (25, 20, {"test_freq": -1}, False),
        (0, None, {"test_freq": -1}, True),  # training went back while the initial model was being validated
        (0, 0, {"test_freq": -1}, False),
        (0, None, {"test_freq": -1, "val_before_train": False}, False),
    ],
)
async def test_a_missing_validation_is_requested_after_a_rewind(
    tmp_path: Path, step: int, validated_step: int | None, section: dict[str, Any], owed: bool
) -> None:
    config = Config.model_validate({"data": {"val_files": ["val.jsonl"]}, "trainer": section})
    trainer, actor = make(tmp_path, 1, config=config, validated_step=validated_step), FakeGroup()
    trainer._trained["actor"], trainer._groups.roles = actor, {"actor": actor}
    trainer.progress = Progress(step=step, version=step // 5, published_step=step)
    await trainer._publish_start(new_run=False)
    assert actor.published == [(step // 5, step, 0, owed)]
    # The end of the run does not request the validation again.
    queue = LocalSampleQueue(QueueOptions(10, Pacing(config.samples_per_version, 0)))
    with anyio.fail_after(5):
        await trainer.run(queue, MemoryPayloads(), step, TrainerRecords())
    at_end = owed or validated_step == step or step == 0
    assert len(actor.published) == (1 if at_end else 2)


class OneGroup(TrainerGroups):
    """Groups with one role, whose ranks hang after `hangs` is set."""

    def __init__(self) -> None:
        super().__init__([])
        self.roles = {"actor": FakeGroup()}
        self.hangs = anyio.Event()
        self.watched = self.closed = False

    async def watch(self, probe_s: float) -> None:
        self.watched = True
        await self.hangs.wait()
        raise InfraError("rank 1 of the actor group did not answer")

    async def close(self) -> None:
        self.closed = True


async def test_a_rank_that_hangs_ends_a_run_that_waits_for_samples(tmp_path: Path) -> None:
    trainer, groups = make(tmp_path), OneGroup()
    trainer._groups, trainer._trained = groups, dict(groups.roles)
    queue = LocalSampleQueue(QueueOptions(10, Pacing(Config().samples_per_version, 0)))
    await feed(queue, 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hang_once_it_waits, queue, groups)
        with anyio.fail_after(5), pytest.raises(InfraError, match="rank 1 of the actor group did not answer"):
            await trainer.run(queue, MemoryPayloads(), 4, TrainerRecords())
    assert groups.closed
    assert (await queue.status()).waiting == {}


async def hang_once_it_waits(queue: LocalSampleQueue, groups: OneGroup) -> None:
    while not (await queue.status()).waiting:
        await anyio.lowlevel.checkpoint()
    groups.hangs.set()


async def test_ranks_are_watched_until_the_run_ends(tmp_path: Path) -> None:
    trainer, groups = make(tmp_path), OneGroup()
    trainer._groups, trainer._trained = groups, dict(groups.roles)
    queue = LocalSampleQueue(QueueOptions(10, Pacing(Config().samples_per_version, 0)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer.run, queue, MemoryPayloads(), 4, TrainerRecords())
        while not ((await queue.status()).waiting and groups.watched):
            await anyio.lowlevel.checkpoint()
        await queue.close()
    assert (await queue.admit(1, timeout_s=1.0)).closed
    assert not groups.closed


class LoadingGroup(FakeGroup):
    """A role that keeps the directory from which it was loaded."""

    loaded = Path()

    async def load_checkpoint(self, directory: Path) -> None:
        self.loaded = directory


async def test_a_resumed_trainer_loads_every_role_and_does_not_change_the_manifest(tmp_path: Path) -> None:
    resume = Resume(tmp_path, tmp_path / "step_000002", NO_SAMPLES)
    trainer, actor, critic = make(tmp_path), LoadingGroup(), LoadingGroup()
    trainer._trained |= {"actor": actor, "critic": critic}
    await trainer._resume(resume)
    assert (actor.loaded, critic.loaded) == (tmp_path / "step_000002" / "actor", tmp_path / "step_000002" / "critic")
    assert trainer.progress == Progress(step=2)
    trainer.progress.step += 1
    assert resume.manifest.progress.step == 2


async def test_tokenizers_are_compared_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Config) -> None:
        raise ConfigError("another tokenizer")

    async def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(trainer_module, "check_tokenizers", refuse)
    monkeypatch.setattr(TrainerGroups, "start", start)
    publisher: Any = None
    with pytest.raises(ConfigError, match="another tokenizer"):
        await Trainer.start(
            Config(),
            RunDir(tmp_path),
            None,
            history=NO_REWINDS,
            validated_step=None,
            publisher=publisher,
            waits=WaitBoard(),
        )
