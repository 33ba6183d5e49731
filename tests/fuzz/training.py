"""The Trainer without models: the weights of its ranks are the list of trained samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import torch

from asyncrl.core.ports import QueueSnapshot
from asyncrl.core.records import Metrics
from asyncrl.core.types import SampleId
from asyncrl.queue.sample_queue import SampleQueue
from asyncrl.storage.checkpoint_manifest import Progress
from tests.fuzz.files import Checkpoint
from tests.fuzz.remote import Gate
from tests.fuzz.store import Publisher
from tests.fuzz.world import FuzzWorld
from trainer.batches import TrainSample
from trainer.checkpoints import EXPORT_EVERY, CheckpointDirectory, RoleCheckpoints
from trainer.experience import Experience
from trainer.workers.worker import PublishedVersion


class FakeBatch:
    """The interface of a batch that the loop uses: columns by name, rows by number."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self._columns = columns

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return FakeBatch({name: column[key] for name, column in self._columns.items()})

    def __len__(self) -> int:
        return len(self._columns["groups"])


class PlainExperience:
    """An `ExperienceBuilder` that makes rows of one token, the feed index of the sample."""

    async def make(self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None) -> Experience:
        numbers = [number for number, sample in enumerate(samples) for _ in sample.rows]
        ids = torch.tensor([list(samples[number].sample_id) for number in numbers])
        batch = FakeBatch(
            {
                "groups": torch.tensor(numbers),
                "ids": ids,
                "loss_mask": torch.ones((len(numbers), 1), dtype=torch.bool),
                "advantages": torch.ones((len(numbers), 1)),
            }
        )
        return Experience(batch, {}, kl_coef)


class FuzzRanks:
    """A role whose weights are the list of trained samples."""

    def __init__(self, world: FuzzWorld, publisher: Publisher, gate: Gate, model: tuple[SampleId, ...]) -> None:
        self.model = list(model)
        self._world = world
        self._publisher = publisher
        self._gate = gate

    async def train_batch(self, batch: Any) -> Metrics:
        await self._gate.passing()
        await anyio.sleep(self._world.some(self._world.setup.step_s))
        await self._gate.passing()
        self.model += dict.fromkeys(SampleId(*ids) for ids in batch["ids"].tolist())
        return {"loss": 0.0, "tokens": float(len(batch))}

    async def publish(self, version: int, step: int, *, validate: bool, probe: bool = False) -> PublishedVersion:
        await self._gate.passing()
        await self._world.pause()
        return PublishedVersion(await self._publisher.begin(version).publish(step, validate=validate), 0.0, 0.0)

    async def republish(self) -> None:
        await self._gate.passing()
        await self._publisher.republish()


class Checkpoints(RoleCheckpoints):
    """Checkpoints in memory, which `finish` writes."""

    def __init__(self, world: FuzzWorld, gate: Gate, ranks: FuzzRanks, queue: SampleQueue, **options: Any) -> None:
        super().__init__(CheckpointDirectory(Path(), identity={}, keep=2), {}, queue, export=EXPORT_EVERY, **options)
        self._world = world
        self._gate = gate
        self._ranks = ranks
        self._model: tuple[SampleId, ...] = ()

    async def copy_roles(self, step: int, *, export: bool = True) -> Path:
        await self._gate.passing()
        await self._world.pause()
        self._model = tuple(self._ranks.model)
        return Path(f"step_{step}")

    async def finish(self, building: Path, progress: Progress, queue: QueueSnapshot) -> int:
        await anyio.sleep(self._world.some(0.2))
        await self._gate.passing()
        step = progress.step
        await self._queue.confirm(step)
        # The process may be killed or replaced at this point.
        await self._world.pause()
        await self._gate.passing()
        self._world.files.checkpoints[step] = Checkpoint(progress, queue, self._model)
        self._world.log(f"checkpoint of step {step} written")
        await self._queue.confirm(step)
        # Keep two checkpoints, as `trainer.max_checkpoints_to_keep` allows.
        for old in sorted(self._world.files.checkpoints)[:-2]:
            del self._world.files.checkpoints[old]
        return min(self._world.files.checkpoints)
