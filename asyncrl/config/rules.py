"""The tables of the rules between keys and of the checks of this machine, and the transforms to a synchronous run and
to an evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from asyncrl.config.interpolation import HIDDEN, secret_name, secret_names, secret_parts, texts, without_secrets
from asyncrl.config.keys import leaves
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, Severity
from asyncrl.config.schema import Config
from asyncrl.config.sections import algorithm, data, observe, reward, rollout, run, skip, trainer_rules
from asyncrl.config.sections.skip import SkipConfig
from asyncrl.core.text import MAX_NAME_BYTES

Scope = Literal["run", "serve", "app", "simulation"]
"""What a configuration is for: a run, `asyncrl serve`, rollout servers that are deployed with Ray Serve, or a run that
is only simulated (`asyncrl simulate`), for which this machine needs none of its files and devices."""

_SECTIONS = (data, rollout, run, trainer_rules, algorithm, reward, skip, observe)
_SECRET_KEYS = (
    "rollout.multi_turn.tools.*.mcp.env.*",
    "rollout.multi_turn.tools.*.mcp.url",
    "rollout.multi_turn.tools.*.config.*",
    "rollout.multi_turn.interactions.*.config.*",
    "reward.kwargs.*",
    "reward.functions.*.kwargs.*",
)
"""The keys whose values may have `${secret:NAME}`, as `fnmatch` patterns: `reveal` is called where they are used."""


def _names(config: Config) -> Iterator[ConfigProblem]:
    parents = {"experiment_name": "runs/"}
    for role in list(skip.enabled_roles(config))[:1]:
        parents["project_name"] = f"{role}.dump_dir"
    for key, parent in parents.items():
        name = getattr(config, key)
        is_short = len(name.encode()) <= MAX_NAME_BYTES
        if not (is_short and re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name)):
            consequence = f"it names a directory below {parent}, and this is not a valid name for one"
            fix = f"use letters, digits, '_', '-', '+' and '.', and at most {MAX_NAME_BYTES} of them"
            yield ConfigProblem(key, name[:MAX_NAME_BYTES], consequence, fix)


def _local_directories(config: Config) -> Iterator[ConfigProblem]:
    """Refuse URLs where only a directory will do, for example because files are appended to or locked."""
    directories = {"run_dir": config.run_dir, "rollout.dump_dir": config.rollout.dump_dir}
    directories["trainer.validation_data_dir"] = config.trainer.validation_data_dir
    directories |= {f"{key}.dump_dir": role.dump_dir for key, role in skip.enabled_roles(config).items()}
    for key, directory in directories.items():
        if directory and "://" in directory:
            consequence = "it would name a directory on this machine, because only checkpoints can go to a URL"
            fix = "give a directory; `trainer.checkpoint_dir` takes URLs, and a mounted shared directory holds the rest"
            yield ConfigProblem(key, directory, consequence, fix)


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield all texts with their dotted keys."""
    for path, text in texts(config.model_dump(mode="json")):
        yield ".".join(map(str, path)), text


def _secret_places(config: Config) -> Iterator[ConfigProblem]:
    """Refuse secrets that nothing would look up, secrets as plain text in the environment of a tool server, and values
    from which the secret has been removed. Warn of plain text elsewhere that looks like a secret."""
    saved = dict(texts(config.saved_values()))
    for path, text in texts(config.model_dump(mode="json")):
        key = ".".join(map(str, path))
        takes_reference = any(fnmatchcase(key, pattern) for pattern in _SECRET_KEYS)
        is_environment = fnmatchcase(key, _SECRET_KEYS[0])
        if secret_names(text) and not takes_reference:
            consequence = "the variable would not be looked up here, so this text itself would be the value"
            fix = "use ${oc.env:NAME} here, or a key that ends in _env for the key of an API; "
            fix += f"references can be in {', '.join(pattern.removesuffix('.*') for pattern in _SECRET_KEYS)}"
            yield ConfigProblem(key, text, consequence, fix)
            continue
        plain = text if is_environment else saved.get(path, "")
        if not (parts := secret_parts(plain, secret_name(path))):
            continue
        consequence = "it looks like a secret, and the config.yaml of a run contains it"
        if is_removed := any(plain[part] == HIDDEN for part in parts):
            consequence = f"{HIDDEN} stands for a secret, which is not in what the configuration was copied from"
        names = [part for part in path if isinstance(part, str)]
        first = names.index(secret_name(names)) if secret_name(names) else -2
        variable = re.sub(r"\W", "_", "_".join(names[first:]), flags=re.ASCII).upper()
        reference = f"${{{'secret' if takes_reference else 'oc.env'}:{variable}}}"
        fix = f"export {variable}=... where the run is started, and write "
        fix += f"{names[-1]}: {reference}" if names[-1] == path[-1] else f"{reference} in its place"
        severity: Severity = "error" if is_environment or is_removed else "warning"
        yield ConfigProblem(key, without_secrets(plain, secret_name(path)), consequence, fix, severity)


def _missing_secrets(config: Config) -> Iterator[ConfigProblem]:
    for key, text in _texts(config):
        if key.startswith("rollout.multi_turn.") and not config.rollout.multi_turn.enable:
            continue
        for name in secret_names(text):
            if not os.environ.get(name):
                consequence = f"the environment has no variable {name}, or it is empty"
                yield ConfigProblem(key, text, consequence, f"export {name}=... where the run is started")


SERVER_RULES: tuple[RuleFunction, ...] = (_names, _secret_places, *rollout.SERVER_RULES, *run.SERVER_RULES)
RULES: tuple[RuleFunction, ...] = (
    _names,
    _local_directories,
    _secret_places,
    *(rule for section in _SECTIONS for rule in section.RULES),
)

EVALUATION_RULES: tuple[RuleFunction, ...] = (
    _names,
    _local_directories,
    _secret_places,
    *(rule for section in (data, rollout, reward) for rule in section.RULES),
    *run.SERVER_RULES,
    ConfigRule("data.val_files", lambda c: not c.has_validation and c.data.dataset is None,
               "there are no prompts to evaluate (trainer.total_training_steps is 0, or this is `asyncrl eval`)",
               "set data.val_files=[FILE.parquet] (or .jsonl), data.reasoning_gym or data.dataset"),
    ConfigRule("resume", lambda c: c.resume != "none",
               "a run of 0 steps (trainer.total_training_steps) has nothing to continue",
               "evaluate a checkpoint with `asyncrl eval checkpoint={c.resume}`"),
    ConfigRule("rollout.attach", lambda c: c.rollout.attach is not None,
               "an evaluation starts engines of its own, with the weights of model.path",
               "set rollout.attach=null"),
)  # fmt: skip
"""Rules for a run that only validates."""

SERVER_ENVIRONMENT = (*data.ENGINE_ENVIRONMENT, *rollout.ENGINE_ENVIRONMENT, *run.SERVER_ENVIRONMENT)
EVALUATION_ENVIRONMENT = (
    _missing_secrets,
    *run.SERVER_ENVIRONMENT,
    *(check for section in (data, rollout, reward) for check in section.ENVIRONMENT),
)
ENVIRONMENT = (_missing_secrets, *(check for section in _SECTIONS for check in section.ENVIRONMENT))
DRIVER_ENVIRONMENT = (*trainer_rules.DRIVER_ENVIRONMENT, *observe.DRIVER_ENVIRONMENT, *run.DRIVER_ENVIRONMENT)
"""Checks that the driver's machine has to pass even if the run uses a cluster."""


def check_rules(config: Config, set_keys: Collection[str] = (), *, scope: Scope = "run") -> list[ConfigProblem]:
    """Return the problems that all rules find.

    Args:
        set_keys: keys that the user set to other values than the default; they are checked for having an effect.
        scope: what the configuration is for.
    """
    if scope in ("serve", "app"):
        return [problem for rule in SERVER_RULES for problem in rule(config)]
    if config.validates_only:  # a file that was made for training has many keys without effect
        return [problem for rule in EVALUATION_RULES for problem in rule(config)]
    return [*(problem for rule in RULES for problem in rule(config)), *keys_without_effect(config, set_keys)]


def check_environment(config: Config, *, scope: Scope = "run") -> list[ConfigProblem]:
    """Return the problems of a configuration on this machine; `scope`: what it is for."""
    if scope == "simulation":
        return []
    if scope != "run":
        checks = SERVER_ENVIRONMENT if scope == "app" else (*SERVER_ENVIRONMENT, *run.PORT_ENVIRONMENT)
        return [problem for check in checks for problem in check(config)]
    checks, driver = (EVALUATION_ENVIRONMENT, ()) if config.validates_only else (ENVIRONMENT, DRIVER_ENVIRONMENT)
    found = [problem for check in checks for problem in check(config)]
    if config.ray.address is not None:  # the cluster may have files and packages that this machine lacks
        found = [replace(problem, severity="warning") for problem in found]
    return [*found, *(problem for check in driver for problem in check(config))]


def keys_without_effect(config: Config, set_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a problem for each of `set_keys` without effect; the first rule that applies reports it."""
    values = leaves(config.model_dump(mode="json"))
    rules = [rule for section in _SECTIONS for rule in section.NO_EFFECT]
    for key in sorted(set(set_keys) & values.keys()):
        for rule in rules:
            if any(fnmatchcase(key, pattern) for pattern in rule.patterns) and rule.applies(config):
                consequence = f"it would have no effect: {rule.because(config)}"
                yield ConfigProblem(key, values[key], consequence, f"{rule.fix}, or leave this key out")
                break


def as_evaluation(config: Config) -> Config:
    """Return the configuration without what an evaluation does not use: the training set, records, events and the
    scaling of engines."""
    rollout = config.rollout
    off = rollout.autoscaling.model_copy(update={"enable": False})
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"train_files": (), "sampler": None}),
            "rollout": rollout.model_copy(update={"autoscaling": off, "dump_dir": None}),
            "skip": SkipConfig(),
            "placement": "separate",
            "profiler": config.profiler.model_copy(update={"level": "off"}),
        }
    )


UNUSED_BY_SFT = (
    "algorithm", "rollout", "reward", "reward_model", "ref", "teacher", "critic", "async_training", "weight_sync",
    "recovery", "skip", "serve",
)  # fmt: skip
"""Sections that a supervised run does not use, so that one file can configure it and the launch that follows."""


def as_sft(config: Config) -> Config:
    """Return the supervised run of the same model, data and trainer."""
    trainer = config.trainer.model_copy(update={"ppo_epochs": 1})
    return config.without(UNUSED_BY_SFT).model_copy(update={"mode": "sft", "trainer": trainer})


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
