"""A run that is resumed at its end, or beyond it: what to say, before engines are started for nothing."""

from __future__ import annotations

from asyncrl.config import checks
from asyncrl.config.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.resume import Resume


def planned_steps(config: Config) -> int | None:
    """Optimizer steps of the whole run, as far as they are known without reading the data as the Rollouter does: it may
    leave prompts out, so there may be fewer. None: not known.

    Raises:
        ConfigError: the prompts do not fill a lease.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    num_prompts = checks.num_prompts(config)
    return None if num_prompts is None else training_steps(config, num_prompts)


def nothing_left(resume: Resume | None, total_steps: int | None) -> str | None:
    """What to tell when the checkpoint is at `total_steps` or beyond; None: there is something to do."""
    if resume is None or total_steps is None or resume.manifest.progress.step < total_steps:
        return None
    step = resume.manifest.progress.step
    assert resume.checkpoint is not None  # else it would be at step 0
    return (
        f"nothing is left to train: {resume.checkpoint} is at step {step} of {total_steps}. To "
        "train on, raise trainer.total_training_steps or trainer.total_epochs; to start anew from its weights: "
        f"resume=none model.path={resume.checkpoint / 'hf'}"
    )
