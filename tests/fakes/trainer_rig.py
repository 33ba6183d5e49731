"""A train loop over a real queue and fake parts, for tests to feed and run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.manifest import Progress
from asyncrl.ports import Books, QueueSnapshot, StepRecord
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from tests.fakes.parts import ManualClock, MemoryPayloads
from tests.fakes.trainer_parts import FakeCheckpoints, FakePublisher, FakeWorker
from trainer.algorithms.advantages import estimator
from trainer.loop import LoopSettings, TrainLoop

SETTINGS = LoopSettings(
    total_steps=4,
    mini_batch_samples=2,
    samples_per_lease=2,
    samples_per_version=2,
    mask_beyond=None,
    has_validation=True,
    test_freq=-1,
    save_freq=-1,
    save_last=True,
    weights_dtype="float32",
    call_s=5.0,
)


class Rig:
    """A loop over a real queue. By default pacing lets every sample of a test be fed before a version is applied."""

    def __init__(
        self,
        progress: Progress | None = None,
        restore: QueueSnapshot | None = None,
        staleness_threshold: float = 100,
        **changes: Any,
    ) -> None:
        self.settings = replace(SETTINGS, **changes)
        total = self.settings.total_steps * self.settings.mini_batch_samples
        pacing = Pacing(self.settings.samples_per_version, staleness_threshold, total)
        self.queue = LocalSampleQueue(QueueOptions(1000, pacing), restore)
        self.worker = FakeWorker()
        self.publisher = FakePublisher()
        self.checkpoints = FakeCheckpoints()
        self.clock = ManualClock()
        self.loop = TrainLoop(
            self.settings,
            queue=self.queue,
            payloads=MemoryPayloads(),
            publisher=self.publisher,
            worker=self.worker,
            checkpoints=self.checkpoints,
            estimate=estimator(AlgorithmConfig()),
            progress=progress,
            clock=self.clock,
        )
        self.records: list[StepRecord] = []

    async def run(self) -> list[StepRecord]:
        with anyio.fail_after(10):
            async for record in self.loop.run():
                self.records.append(record)
        return self.records

    async def books(self) -> Books:
        return (await self.queue.status()).books
