"""A run that is resumed at its end, or beyond it: what to say, before engines are started for nothing.

One that is completed stays as it is. One that was stopped or died between its last step and its end goes on: its last
version may not be validated, and its records are not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import checks
from asyncrl.config.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.resume import Resume, completed_at
from asyncrl.run_dir import RunDir

_LENGTH = (
    ("trainer", "total_training_steps"),
    ("trainer", "total_epochs"),
    ("trainer", "ppo_epochs"),
    ("trainer", "partial_final_batch"),
    ("async_training", "require_batches"),
)
"""What a run's length follows from, besides what all runs that go on from each other have in common."""


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


def finished(config: Config, resume: Resume) -> str | None:
    """What to tell where `config` asks for no more than a completed run has taken; None: there is something to do.

    Raises:
        ConfigError: see `planned_steps`.
    """
    if (end := completed_at(resume.run_dir)) is None:
        return None
    assert resume.checkpoint is not None  # a completed run without one is not gone on with
    named = Path(config.resume).expanduser().resolve() == resume.checkpoint.resolve()
    step = resume.manifest.progress.step if named else end
    if not (step == end and _is_as_long(config, resume.run_dir)):
        total_steps = planned_steps(config)
        if total_steps is None or step < total_steps:
            return None
    return (
        f"nothing is left to train: the run in {resume.run_dir} is completed, at step {end}, and stays as it is. To "
        "train on, raise trainer.total_training_steps or trainer.total_epochs; to start anew from its weights: "
        f"resume=none model.path={resume.checkpoint / 'hf'}"
    )


def _is_as_long(config: Config, run_dir: Path) -> bool:
    """What the length follows from is as it was when the run there was launched last."""
    try:
        before = yaml.safe_load(RunDir(run_dir).config.read_text(encoding="utf-8"))
        present: Mapping[str, Any] = config.model_dump(mode="json")
        return all(before[section][key] == present[section][key] for section, key in _LENGTH)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False
