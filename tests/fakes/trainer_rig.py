"""A train loop over a real queue and fake parts, for tests to feed and run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import anyio

from asyncrl.manifest import Progress
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.waits import WaitBoard
from tests.fakes.parts import ManualClock, MemoryPayloads
from tests.fakes.trainer_parts import FakeCheckpoints, FakeExperience, FakeGroup, MemoryRecord, Records
from trainer.intake import Intake
from trainer.loop import TrainLoop
from trainer.loop_settings import LoopSettings
from trainer.rows import RowRules

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
    save_freq=-1,
    save_last=True,
    seed=0,
    call_limit_s=5.0,
)
RULES = RowRules(mask_beyond=None, filter_groups=False, vocab_size=None)


class Rig:
    """A loop over a real queue. By default pacing lets every sample of a test be fed before a version is applied."""

    def __init__(
        self,
        progress: Progress | None = None,
        validated_step: int | None = None,
        restore: QueueSnapshot | None = None,
        staleness_threshold: float = 100,
        rules: RowRules = RULES,
        max_consecutive_filtered: int = 100,
        call_s: float = 5.0,
        with_critic: bool = False,
        total_samples: int | None = None,
        **changes: Any,
    ) -> None:
        """`validated_step`: None: what the loop goes on from was validated."""
        self.settings = replace(SETTINGS, **changes)
        trained, step = (progress.trained_samples, progress.step) if progress else (0, 0)
        passes_left = math.ceil((self.settings.total_steps - step) / self.settings.ppo_epochs)
        total = trained + passes_left * self.settings.mini_batch_samples
        pacing = Pacing(self.settings.samples_per_version, staleness_threshold, total_samples or total)
        self.queue = LocalSampleQueue(QueueOptions(1000, pacing), restore)
        self.actor = FakeGroup()
        self.critic = FakeGroup() if with_critic else None
        self.experience = FakeExperience()
        self.checkpoints = FakeCheckpoints()
        self.trained = MemoryRecord()
        self.payloads = MemoryPayloads()
        self.clock = ManualClock()
        waits = WaitBoard(self.clock)
        intake = Intake(
            self.queue,
            self.payloads,
            rules,
            max_consecutive_filtered=max_consecutive_filtered,
            max_consecutive_unusable=4,
            call_s=call_s,
            waits=waits,
            clock=self.clock,
        )
        self.loop = TrainLoop(
            self.settings,
            queue=self.queue,
            intake=intake,
            actor=self.actor,
            critic=self.critic,
            experience=self.experience,
            checkpoints=self.checkpoints,
            trained=self.trained,
            progress=progress,
            validated_step=step if validated_step is None else validated_step,
            waits=waits,
            clock=self.clock,
        )
        self.records = Records()

    async def run(self) -> Records:
        with anyio.fail_after(10):
            await self.loop.run(self.records)
        return self.records

    async def books(self) -> Books:
        return (await self.queue.status()).books
