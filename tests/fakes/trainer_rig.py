"""A train loop between a real queue and fake parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio

from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import Sample, SampleId
from asyncrl.core.waits import WaitBoard
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.checkpoint_manifest import Progress
from tests.fakes.parts import ManualClock, MemoryPayloads
from tests.fakes.trainer_parts import (
    FakeCheckpoints,
    FakeExperience,
    FakeGroup,
    MemoryRecord,
    TrainerRecords,
    feed,
    make_sample,
)
from trainer.batches import BatchSource, RowRules
from trainer.checkpoints import EXPORT_EVERY, HfExportSettings
from trainer.loop import TrainLoop
from trainer.schedule import LoopSettings
from trainer.thread_search import ThreadSearch

SETTINGS = LoopSettings(
    total_steps=4,
    mini_batch_samples=2,
    ppo_epochs=1,
    samples_per_lease=2,
    samples_per_version=2,
    drop_partial=False,
    critic_epochs=1,
    critic_warmup_steps=0,
    has_validation=True,
    test_freq=-1,
    save_last=True,
    seed=0,
    call_limit_s=5.0,
)
RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)


class TrainerRig:
    """A train loop on a real queue. By default pacing permits all samples of a test before a version is applied."""

    def __init__(
        self,
        progress: Progress | None = None,
        validated_step: int | None = None,
        restore: QueueSnapshot | None = None,
        staleness_threshold: float = 100,
        rules: RowRules = RULES,
        max_consecutive_filtered: int = 100,
        call_s: float = 5.0,
        export: HfExportSettings = EXPORT_EVERY,
        save_freq: int = -1,
        with_critic: bool = False,
        total_samples: int | None = None,
        threads: ThreadSearch | None = None,
        **changes: Any,
    ) -> None:
        """Create the loop and its parts. `validated_step` defaults to the step of `progress`."""
        self.settings = replace(SETTINGS, **changes)
        trained, step = (progress.trained_samples, progress.step) if progress else (0, 0)
        passes_left = math.ceil((self.settings.total_steps - step) / self.settings.ppo_epochs)
        total = trained + passes_left * self.settings.mini_batch_samples
        pacing = Pacing(self.settings.samples_per_version, staleness_threshold, total_samples or total)
        self.queue = LocalSampleQueue(QueueOptions(1000, pacing), restore)
        self.actor = FakeGroup()
        self.critic = FakeGroup() if with_critic else None
        self.experience = FakeExperience()
        self.trained = MemoryRecord()
        self.payloads = MemoryPayloads()
        self.clock = ManualClock()
        waits = WaitBoard(self.clock)
        batch_source = BatchSource(
            self.queue,
            self.payloads,
            rules,
            max_consecutive_filtered=max_consecutive_filtered,
            max_consecutive_unusable=4,
            call_s=call_s,
        )
        self.checkpoints = FakeCheckpoints(
            self.queue,
            step=step,
            save_freq=save_freq,
            export=export,
            call_limit_s=self.settings.call_limit_s,
            waits=waits,
        )
        self.loop = TrainLoop(
            self.settings,
            queue=self.queue,
            batch_source=batch_source,
            actor=self.actor,
            critic=self.critic,
            experience=self.experience,
            checkpoints=self.checkpoints,
            trained_steps=self.trained,
            progress=progress,
            validated_step=step if validated_step is None else validated_step,
            waits=waits,
            threads=threads,
            clock=self.clock,
        )
        self.records = TrainerRecords()

    async def run(self, num_samples: int = 0, make: Callable[[SampleId], Sample] = make_sample) -> TrainerRecords:
        """Feed `num_samples` samples, and run the loop to its end."""
        await feed(self.queue, num_samples, make)
        with anyio.fail_after(10):
            await self.loop.run(self.records)
        return self.records

    async def run_while_feeding(
        self, num_samples: int, make: Callable[[SampleId], Sample] = make_sample
    ) -> TrainerRecords:
        async with anyio.create_task_group() as group:
            group.start_soon(self.run)
            await feed(self.queue, num_samples, make)
        return self.records

    async def counts(self) -> SampleCounts:
        return (await self.queue.status()).counts
