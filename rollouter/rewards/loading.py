"""From `reward.function` and `reward.functions` to functions that can be called, checked before the first response."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import RewardConfig, RewardFunctionConfig
from asyncrl.failures import ConfigError
from rollouter.rewards.builtin import BATCH, BUILT_IN, IN_PROCESS
from rollouter.user_code import load_object, nearest

SINGLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
NO_FUNCTION = "none"


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
    takes_trajectory: bool = False
    """It has a parameter `trajectory`, or with `batch` `trajectories`, and is given these too."""

    @property
    def whole_group(self) -> bool:
        """It wants all trajectories of a prompt in one call: what a user wrote may compare them."""
        return self.batch and self.name not in BUILT_IN

    @property
    def arguments(self) -> tuple[str, ...]:
        """What it is called with, besides `kwargs`."""
        names = BATCH_ARGUMENTS if self.batch else SINGLE_ARGUMENTS
        return (*names, _trajectory_argument(self.batch)) if self.takes_trajectory else names


def load_reward_functions(config: RewardConfig) -> dict[str, RewardFunction]:
    """All functions of a run, by the names of their parts: `rule` is `reward.function`.

    Raises:
        ConfigError, UserCodeError: as `load_reward_function`.
    """
    functions = {} if config.function == NO_FUNCTION else {"rule": load_reward_function(config)}
    for number, entry in enumerate(config.functions):
        functions[entry.name] = load_reward_function(entry, f"reward.functions[{number}]")
    return functions


def load_reward_function(config: RewardConfig | RewardFunctionConfig, key: str = "reward") -> RewardFunction:
    """Find the function and check that it can be called. `key`: of its section, for errors.

    Raises:
        ConfigError: nothing of that name, not callable, or a signature that does not take the arguments.
        UserCodeError: the module raised when it was imported.
    """
    name = config.function
    built_in = ":" not in name
    if built_in and name not in BUILT_IN:
        raise ConfigError(
            f"{key}.function: {name!r} is no built-in{nearest(name, list(BUILT_IN))}; your own is written "
            "module:function or path/file.py:function"
        )
    target = BUILT_IN[name] if built_in else load_object(name, f"{key}.function")
    if not callable(target):
        raise ConfigError(f"{key}.function: {name} is a {type(target).__name__}, not a function")
    batch = name in BATCH if built_in else config.batch
    signature = _signature(target)
    function = RewardFunction(
        name,
        target,
        config.kwargs,
        batch=batch,
        is_async=inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__),
        in_process=name in IN_PROCESS,
        takes_trajectory=signature is not None and _trajectory_argument(batch) in signature.parameters,
    )
    if signature is not None:
        _check_call(function, signature, key)
    if built_in and "pattern" in config.kwargs:
        _check_pattern(config.kwargs["pattern"], key)
    return function


def _trajectory_argument(batch: bool) -> str:
    return "trajectories" if batch else "trajectory"


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except ValueError:  # some compiled functions have none to look at
        return None


def _check_pattern(pattern: Any, key: str) -> None:
    try:
        groups = re.compile(pattern).groups if pattern is not None else 1
    except (re.error, TypeError) as error:
        raise ConfigError(f"{key}.kwargs.pattern: {pattern!r} is not a regular expression: {error}") from error
    if groups < 1:
        raise ConfigError(f"{key}.kwargs.pattern: {pattern!r} has no group; put the answer in parentheses")


def _check_call(function: RewardFunction, signature: inspect.Signature, key: str) -> None:
    arguments = function.arguments
    try:
        signature.bind(**dict.fromkeys(arguments), **function.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}.function: {function.name}{signature} cannot be called with {', '.join(arguments)} (by name, since "
            f"{key}.batch is {str(function.batch).lower()}) and {key}.kwargs {dict(function.kwargs)!r}: {error}"
        ) from error
