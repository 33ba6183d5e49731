"""The tables of the rules between keys and of the checks of this machine, and the transform to a synchronous run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from asyncrl.config.keys import leaves
from asyncrl.config.problems import ConfigProblem, RuleFunction
from asyncrl.config.schema import Config
from asyncrl.config.sections import algorithm, data, observe, reward, rollout, run, skip, trainer

_SECTIONS = (data, rollout, run, trainer, algorithm, reward, skip, observe)


def _names(config: Config) -> Iterator[ConfigProblem]:
    parents = {"experiment_name": "runs/"}
    if skip.enabled_roles(config):
        parents["project_name"] = "skip.<role>.dump_dir"
    for key, parent in parents.items():
        if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name := getattr(config, key)):
            consequence = f"it names a directory below {parent}, and this is not a valid name for one"
            yield ConfigProblem(key, name, consequence, "use letters, digits, '_', '-', '+' and '.'")


SERVER_RULES: tuple[RuleFunction, ...] = (_names, *rollout.ENGINE_RULES, *run.SERVER_RULES)
RULES: tuple[RuleFunction, ...] = (_names, *(rule for section in _SECTIONS for rule in section.RULES))

SERVER_ENVIRONMENT = (*data.ENGINE_ENVIRONMENT, *run.SERVER_ENVIRONMENT)
ENVIRONMENT = tuple(check for section in _SECTIONS for check in section.ENVIRONMENT)
DRIVER_ENVIRONMENT = (*trainer.DRIVER_ENVIRONMENT, *observe.DRIVER_ENVIRONMENT, *run.DRIVER_ENVIRONMENT)
"""Checks that the driver's machine has to pass even if the run uses a cluster."""


def check_rules(config: Config, set_keys: Collection[str] = (), *, serve_only: bool = False) -> list[ConfigProblem]:
    """Return the problems that all rules find.

    Args:
        set_keys: keys that the user set to other values than the default; they are checked for having an effect.
        serve_only: apply the rules for engines without training.
    """
    if serve_only:
        return [problem for rule in SERVER_RULES for problem in rule(config)]
    return [*(problem for rule in RULES for problem in rule(config)), *_without_effect(config, set_keys)]


def check_environment(config: Config, *, serve_only: bool = False) -> list[ConfigProblem]:
    """Return the problems of a configuration on this machine; `serve_only`: for engines without training."""
    if serve_only:
        return [problem for check in SERVER_ENVIRONMENT for problem in check(config)]
    found = [problem for check in ENVIRONMENT for problem in check(config)]
    if config.ray.address is not None:  # the cluster may have files and packages that this machine lacks
        found = [replace(problem, severity="warning") for problem in found]
    return [*found, *(problem for check in DRIVER_ENVIRONMENT for problem in check(config))]


def _without_effect(config: Config, set_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each key without effect; the first rule that applies reports it."""
    values = leaves(config.model_dump(mode="json"))
    rules = [rule for section in _SECTIONS for rule in section.NO_EFFECT]
    for key in sorted(set(set_keys) & values.keys()):
        for rule in rules:
            if any(fnmatchcase(key, pattern) for pattern in rule.patterns) and rule.applies(config):
                consequence = f"it would have no effect: {rule.because(config)}"
                yield ConfigProblem(key, values[key], consequence, f"{rule.fix}, or leave this key out")
                break


def as_sync(config: Config) -> Config:
    """Return the same run with a barrier between generation and training.

    One lease has all samples of a version and generation may not run ahead, so the Rollouter waits for the new weights
    and the Trainer for the whole batch.
    """
    training = config.async_training
    barrier = {
        "require_batches": training.require_batches * training.trigger_parameter_sync_step,
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 0.0,
        "partial_rollout": False,
    }
    return config.model_copy(update={"mode": "sync", "async_training": training.model_copy(update=barrier)})
