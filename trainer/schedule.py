"""When the Trainer leases how much, which rows make a step, and when a version is due. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.storage.checkpoint_manifest import Progress


@dataclass(frozen=True, slots=True)
class LoopSettings:
    total_steps: int
    """Number of steps of the whole run, including those before a resume."""
    mini_batch_samples: int
    ppo_epochs: int
    samples_per_lease: int
    samples_per_version: int
    drop_partial: bool
    """Release the last samples that do not fill a lease instead of training on them."""
    critic_epochs: int
    critic_warmup_steps: int
    has_validation: bool
    test_freq: int
    save_last: bool
    seed: int
    call_limit_s: float
    """Deadline of one call to the ranks, in seconds."""
    has_probes: bool = False
    """Whether versions have a probe (`Publication.probe`). Each replica decides with which it compares: an engine may
    be too full for the first one, or start later."""
    max_mismatch_kl: float | None = None
    """Limit of the KL divergence, in nats per token, between the engines and the Trainer on tokens that the engines
    sampled with the weights that the Trainer has. None: no limit."""
    lineage: int = 0
    """How often training went back to a checkpoint in this run."""

    @classmethod
    def from_config(cls, config: Config, *, total_steps: int, lineage: int = 0) -> Self:
        training, sync, drift, skip = config.trainer, config.weight_sync, config.async_training, config.skip
        on_policy = drift.trigger_parameter_sync_step == 1 and drift.staleness_threshold == 0
        # Replayed samples, and those of a history that was left, come from other weights than their version says.
        has_other_weights = skip.async_rollout.enable or skip.rollout.enable or lineage > 0
        return cls(
            total_steps=total_steps,
            mini_batch_samples=training.ppo_mini_batch_size,
            ppo_epochs=training.ppo_epochs,
            samples_per_lease=config.samples_per_lease,
            samples_per_version=config.samples_per_version,
            drop_partial=training.partial_final_batch == "drop",
            critic_epochs=config.critic.ppo_epochs,
            critic_warmup_steps=config.critic.warmup_steps if config.needs_critic else 0,
            has_validation=config.has_validation,
            test_freq=training.test_freq,
            save_last=training.save_last,
            seed=config.seed,
            call_limit_s=config.timeouts.train_s,
            has_probes=sync.verify != "off",
            max_mismatch_kl=sync.max_mismatch_kl if on_policy and not has_other_weights else None,
            lineage=lineage,
        )

    def next_batch_size(self, progress: Progress) -> int:
        """Return the number of samples of the next leased batch; 0: the run is over.

        A batch never extends beyond the next version. Pacing admits at most `samples_per_version` samples until
        that version is applied, so a larger batch (after a stop in the middle of a lease) would wait forever.
        """
        to_next_version = (progress.version + 1) * self.samples_per_version - progress.trained_samples
        # A stop may have skipped passes over the last samples before it. The resumed run takes these steps with other
        # samples, which its pacing admits.
        to_end = math.ceil((self.total_steps - progress.step) / self.ppo_epochs) * self.mini_batch_samples
        return max(0, min(self.samples_per_lease, to_next_version, to_end))

    def next_steps(self, groups: Sequence[int], progress: Progress) -> list[list[int]]:
        """Return the rows of each step on a leased batch; `groups` as in `mini_batches`."""
        seed = self.batch_seed(progress)
        steps = mini_batches(groups, size=self.mini_batch_samples, epochs=self.ppo_epochs, seed=seed)
        return steps[: self.total_steps - progress.step]

    def batch_seed(self, progress: Progress) -> int:
        """Return the seed of the order of a batch. A resumed run has the same values, so it takes the same order."""
        return self.seed * 1_000_003 + progress.trained_samples

    def is_version_due(self, progress: Progress) -> bool:
        """Whether the last sample of a version is trained, and the version is not published yet."""
        return progress.trained_samples >= (progress.version + 1) * self.samples_per_version


def mini_batches(groups: Sequence[int], *, size: int, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """Return the row numbers of each optimizer step: `size` whole samples each, perhaps fewer in the last step of an
    epoch.

    The first epoch takes samples in their order, later epochs in an order drawn from `seed`. Every epoch has the same
    number of mini-batches.

    Args:
        groups: the sample number of each row (`groups` of `trainer.workers.tensors`).
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(int(group), []).append(row)
    order, rng = np.array(list(rows_of), dtype=np.int64), np.random.default_rng(seed)
    batches = []
    for epoch in range(epochs):
        if epoch:
            order = rng.permutation(order)
        for first in range(0, len(order), size):
            batches.append([row for group in order[first : first + size] for row in rows_of[int(group)]])
    return batches


@dataclass(slots=True)
class RowOrder:
    """The rows of each step of a supervised run: epoch after epoch, each in its own order, without gaps between them.

    The order is a pure function of these values and the step, so a resumed run continues with the next row.
    """

    num_rows: int
    batch_rows: int
    """Rows of a step; the last step of a run may have fewer."""
    total_rows: int
    """Rows of the whole run, over all epochs."""
    seed: int
    shuffle: bool
    _epoch: tuple[int, NDArray[np.int64]] | None = field(default=None, init=False)
    """The number and the order of the epoch that was asked for last."""

    @classmethod
    def from_config(cls, config: Config, num_rows: int) -> Self:
        trainer, size = config.trainer, config.trainer.ppo_mini_batch_size
        total = num_rows * trainer.total_epochs
        if trainer.total_training_steps is not None:
            total = trainer.total_training_steps * size
        elif trainer.partial_final_batch == "drop":
            total -= total % size
        return cls(num_rows, size, total, config.seed, config.data.shuffle)

    @property
    def total_steps(self) -> int:
        return math.ceil(self.total_rows / self.batch_rows)

    def rows(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 1."""
        places = range((step - 1) * self.batch_rows, min(step * self.batch_rows, self.total_rows))
        return [int(self._order(at // self.num_rows)[at % self.num_rows]) for at in places]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.arange(self.num_rows)
            if self.shuffle:
                order = np.random.default_rng([self.seed, epoch]).permutation(order)
            self._epoch = (epoch, order)
        return self._epoch[1]
