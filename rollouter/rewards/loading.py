"""From `reward.function` to a function that can be called, checked before the first response exists."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.schema import RewardConfig
from asyncrl.failures import ConfigError, UserCodeError
from rollouter.rewards.builtin import BATCH, BUILT_IN, IN_PROCESS

SINGLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function and how it is called. Its arguments are given by name; they are verl's.

    Single: `f(data_source, solution_str, ground_truth, extra_info, **kwargs)` returns a number, or a mapping with
    `score` and further numbers. Batch: `f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`, lists of
    one group, returns a list of those.
    """

    name: str
    call: Callable[..., Any]
    kwargs: Mapping[str, Any]
    batch: bool
    is_async: bool
    in_process: bool
    """Runs in a worker process, which a deadline kills, instead of a thread, which nothing can."""


def load_reward_function(config: RewardConfig) -> RewardFunction:
    """Find the function and check that it can be called.

    Raises:
        ConfigError: nothing of that name, not callable, or a signature that does not take the arguments.
        UserCodeError: the module raised when it was imported.
    """
    if ":" not in config.function:
        return _built_in(config)
    location, _, path = config.function.rpartition(":")
    target: Any = _import_file(location) if location.endswith(".py") else _import_module(location)
    for part in path.split("."):
        if not hasattr(target, part):
            names = [name for name in vars(target) if not name.startswith("_")] if hasattr(target, "__dict__") else []
            raise ConfigError(f"reward.function: {location} has no {part!r}{_nearest(part, names)}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"reward.function: {config.function} is a {type(target).__name__}, not a function")
    is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)
    function = RewardFunction(
        config.function, target, config.kwargs, batch=config.batch, is_async=is_async, in_process=False
    )
    _check_signature(function)
    return function


def _built_in(config: RewardConfig) -> RewardFunction:
    name = config.function
    if name not in BUILT_IN:
        raise ConfigError(
            f"reward.function: {name!r} is no built-in{_nearest(name, list(BUILT_IN))}; your own is written "
            "module:function or path/file.py:function"
        )
    call = BUILT_IN[name]
    function = RewardFunction(
        name, call, config.kwargs, batch=name in BATCH, is_async=False, in_process=name in IN_PROCESS
    )
    _check_signature(function)
    if "pattern" in config.kwargs:
        _check_pattern(config.kwargs["pattern"])
    return function


def _check_pattern(pattern: Any) -> None:
    try:
        groups = re.compile(pattern).groups if pattern is not None else 1
    except (re.error, TypeError) as error:
        raise ConfigError(f"reward.kwargs.pattern: {pattern!r} is not a regular expression: {error}") from error
    if groups < 1:
        raise ConfigError(f"reward.kwargs.pattern: {pattern!r} has no group; put the answer in parentheses")


def _check_signature(function: RewardFunction) -> None:
    arguments = BATCH_ARGUMENTS if function.batch else SINGLE_ARGUMENTS
    try:
        signature = inspect.signature(function.call)
    except ValueError:  # some compiled functions have none to look at
        return
    try:
        signature.bind(**dict.fromkeys(arguments), **function.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.function: {function.name}{signature} cannot be called with {', '.join(arguments)} (by name, since "
            f"reward.batch is {str(function.batch).lower()}) and reward.kwargs {dict(function.kwargs)!r}: {error}"
        ) from error


def _import_module(name: str) -> ModuleType:
    # A console script does not look into the directory it is started in; `python` does.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError.wrap(f"reward.function: importing {name} failed: {error}", error) from error
        siblings = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"reward.function: there is no module {error.name!r}{_nearest(error.name, siblings)}; looked in {here} and "
            "the installed packages"
        ) from error
    except Exception as error:
        raise UserCodeError.wrap(f"reward.function: importing {name} failed: {error}", error) from error


def _import_file(location: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"reward.function: there is no file {path}{_nearest(path.name, siblings)}")
    name = f"asyncrl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserCodeError.wrap(f"reward.function: importing {path} failed: {error}", error) from error
    return module


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(sorted(names)[:8])}" if names else ""
