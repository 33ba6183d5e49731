"""Rules that look around: are the files there, is the variable set, is the run directory free.

Models are in `model_checks`, training engines and GPUs in `engine_checks`. All of it is a matter of
milliseconds and loads nothing heavy, so it runs before Ray, torch or vLLM is imported.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from asyncrl.config import engine_checks, logging_rules, model_checks, places
from asyncrl.config.code_checks import conversation_problems, importable, user_code
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.config.trainer_rules import epoch_steps, fits, too_few_prompts

_JSON_LINES = (".jsonl", ".ndjson")
_DATA_SUFFIXES = (".parquet", *_JSON_LINES)
BUILTIN_REWARDS = ("exact_match", "math_verify", "reasoning_gym")

_USED_BY_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints")


def problems(config: Config, *, serve_only: bool = False) -> list[Problem]:
    """What the files and the environment say against `config`; `serve_only`: engines without training."""
    found = [*model_checks.problems(config), *_chat_template(config), *_api_key(config)]
    if serve_only:
        return [*found, *_port(config)]
    found += [
        *_data_files(config),
        *_length(config),
        *_reward(config),
        *conversation_problems(config),
        *_skip(config),
        *model_checks.training_problems(config),
    ]
    found += [*engine_checks.machine_problems(config), *_resume(config)]
    if config.ray.address is not None:  # the parts may run where these files are, though they are not here
        found = [replace(problem, severity="warning") for problem in found]
    return [*found, *engine_checks.problems(config), *logging_rules.missing_packages(config), *_run_dir(config)]


def num_prompts(config: Config) -> int | None:
    """Rows of the training set before filtering; None where counting them would mean to load a library."""
    if config.data.reasoning_gym is not None:
        return config.data.reasoning_gym.train_size
    total = 0
    for name in config.data.train_files:
        local = places.local(name)
        if local is None or local.suffix.lower() not in _JSON_LINES or not local.is_file():
            return None
        with local.open("rb") as stream:
            total += sum(1 for line in stream if line.strip())
    return min(total, config.data.max_train_samples or total)


def _length(config: Config) -> Iterator[Problem]:
    """The rules about a run's length, where the data decides it."""
    prompts = None if config.trainer.total_training_steps is not None else num_prompts(config)
    if prompts is not None:
        steps = epoch_steps(config, prompts)
        yield from fits(config, steps) if steps else [too_few_prompts(config, prompts)]


def _chat_template(config: Config) -> Iterator[Problem]:
    template = config.model.chat_template
    if template is not None and not ((local := places.local(template)) and local.is_file()):
        yield places.missing("model.chat_template", template, "the file")


def _data_files(config: Config) -> Iterator[Problem]:
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            local = places.local(name)
            if local is None or not local.is_file():
                yield places.missing(key, name, "the file")
            elif local.suffix.lower() not in _DATA_SUFFIXES:
                yield Problem(key, name, "it cannot be read by its suffix", f"use {' or '.join(_DATA_SUFFIXES)}")


def _skip(config: Config) -> Iterator[Problem]:
    for module in config.skip.modules:
        if not importable(module):
            yield Problem(
                "skip.modules", module, "there is no module of this name to import",
                "give its dotted name, and put it on the Python path or into this directory",
            )  # fmt: skip
    for role, section in config.skip.by_role().items():
        if not section.enable or not section.dump_dir:
            continue
        place = Path(section.dump_dir).expanduser().absolute()
        parent = next(path for path in (place, *place.parents) if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            key = f"skip.roles.{role}" if role in config.skip.roles else f"skip.{role}"
            why = "cannot be written" if parent.is_dir() else "is no directory"
            yield Problem(
                f"{key}.dump_dir", section.dump_dir, f"{parent} {why}, so nothing could be recorded",
                "give a directory that can be written",
            )  # fmt: skip


def _reward(config: Config) -> Iterator[Problem]:
    reward = config.reward
    if reward.function != "none":
        yield from user_code("reward.function", reward.function, BUILTIN_REWARDS, "reward")
    for function in reward.functions:
        if function.function != "none":
            yield from user_code("reward.functions.function", function.function, BUILTIN_REWARDS, "reward")
    variable = reward.judge.api_key_env
    if reward.judge.model is not None and variable is not None and not os.environ.get(variable):
        yield Problem(
            "reward.judge.api_key_env", variable, "the environment has no such variable, or it is empty",
            f"export {variable}=... first, or set reward.judge.api_key_env=null for an endpoint without keys",
        )  # fmt: skip


def _api_key(config: Config) -> Iterator[Problem]:
    variable = config.serve.api_key_env
    if variable is not None and not os.environ.get(variable):
        yield Problem(
            "serve.api_key_env",
            variable,
            "the environment has no such variable, or it is empty, so clients would need no key",
            f"export {variable}=... first, or set serve.api_key_env=null (on loopback only)",
        )


def _port(config: Config) -> Iterator[Problem]:
    family = socket.AF_INET6 if ":" in config.serve.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.serve.host, config.serve.port))
        except OSError as error:
            yield Problem(
                "serve.port",
                config.serve.port,
                f"{config.serve.host}:{config.serve.port} cannot be listened on: {error.strerror or error}",
                "choose another serve.port or serve.host, or stop what listens there",
            )


def _resume(config: Config) -> Iterator[Problem]:
    source = config.resume
    if source in ("none", "auto") or Path(source).expanduser().is_dir():
        return
    close = [] if "/" in source else get_close_matches(source, ("none", "auto"), n=1)
    fix = (
        f"did you mean {close[0]}?"
        if close
        else f"give none, auto, a run directory or one of its checkpoints; {places.like(Path(source))}"
    )
    yield Problem("resume", source, "there is no such directory to resume from", fix)


def _run_dir(config: Config) -> Iterator[Problem]:
    if config.run_dir is None:
        return
    path = Path(config.run_dir).expanduser()
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Problem(
            "run_dir", config.run_dir, f"{existing} is not a directory that can be written to", "choose another"
        )
    elif config.resume == "none" and any((path / name).exists() for name in _USED_BY_A_RUN):
        yield Problem(
            "run_dir",
            config.run_dir,
            "a run has been here already, and this one would overwrite its records",
            "choose another directory, or go on with it: resume=auto. Remove it only if `asyncrl status` says that no "
            "run is at work there, and you need nothing of it",
        )
