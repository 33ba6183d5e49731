"""What the training loop goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asyncrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop needs to know of the configuration."""

    total_steps: int
    """Of the whole run, steps before a resume included."""
    mini_batch_samples: int
    ppo_epochs: int
    samples_per_lease: int
    samples_per_version: int
    drop_partial: bool
    """What comes last and does not fill a lease is left out; else it is trained on."""
    critic_epochs: int
    critic_warmup_steps: int
    has_validation: bool
    test_freq: int
    save_freq: int
    save_last: bool
    seed: int
    call_limit_s: float
    """Deadline of one call to the ranks, in seconds."""
    lineage: int = 0
    """How often training went back to a checkpoint in this run."""

    @classmethod
    def of(cls, config: Config, *, total_steps: int, lineage: int = 0) -> Self:
        training = config.trainer
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
            save_freq=training.save_freq,
            save_last=training.save_last,
            seed=config.seed,
            call_limit_s=config.timeouts.train_s,
            lineage=lineage,
        )
