"""The Trainer's start, as far as it goes without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError
from asyncrl.manifest import Manifest, Progress, Resume, run_identity
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.run_dir import RunDir
from asyncrl.waits import WaitBoard
from trainer import trainer as trainer_module
from trainer.checkpoint import Checkpointer
from trainer.groups import TrainerGroups
from trainer.trainer import Trainer


async def test_a_resumed_trainer_counts_on_without_touching_the_manifest(tmp_path: Path) -> None:
    resume = Resume(tmp_path / "step_000002", Manifest(Progress(step=2), QueueSnapshot(1, (), Books(), 0), {}))
    files = Checkpointer(tmp_path, identity=run_identity(Config()), keep=1)
    trainer = Trainer(Config(), TrainerGroups([]), files, WaitBoard())
    await trainer._resume(resume, here=False)
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
        await Trainer.start(Config(), RunDir(tmp_path), None, publisher=publisher, waits=WaitBoard())
