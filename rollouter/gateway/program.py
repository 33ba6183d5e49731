"""The user's agent, however it is written: loaded once, run once per trajectory, its result checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import anyio
from anyio import to_thread

from asyncrl.config.sections.multi_turn import AgentConfig
from asyncrl.failures import AsyncRLError, BugError, ConfigError, UserCodeError
from rollouter.gateway.command import CommandProgram
from rollouter.gateway.requests import PostedReward, checked_reward
from rollouter.gateway.task import AgentTask
from rollouter.user_code import load_object

KEY = "rollout.agent.program"


class Program(Protocol):
    """Makes trajectories."""

    async def run(self, task: AgentTask) -> Any:
        """Make one. Returns what it is worth, see `read_result`, or None.

        Raises:
            UserCodeError: it failed.
        """


def load_program(settings: AgentConfig) -> Program:
    """
    Raises:
        ConfigError: there is no such function or program, or it takes something else than one task.
        UserCodeError: its module raised when it was imported.
    """
    if settings.command:
        return CommandProgram(settings.command)
    if settings.program is None:
        raise BugError("an agent without a program")
    function = load_object(settings.program, KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}: {settings.program} is {type(function).__name__}; expected a function")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{KEY}: {settings.program}{inspect.signature(function)} does not suit; it is called with one AgentTask: "
            f"{error}"
        ) from error
    except ValueError:  # written in C, say: there is no signature
        pass
    return FunctionProgram(settings.program, function, settings.max_concurrency)


class FunctionProgram:
    """A function. One that is not `async` has a thread of its own."""

    def __init__(self, name: str, function: Callable[[AgentTask], Any], max_concurrency: int) -> None:
        self._name = name
        self._function = function
        called = function if inspect.isfunction(function) or inspect.ismethod(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(called)
        self._threads = anyio.CapacityLimiter(max_concurrency)

    async def run(self, task: AgentTask) -> Any:
        """See `Program`. A thread cannot be ended: one that is cancelled is left behind, and its key is worth nothing.

        Raises:
            UserCodeError: it raised. An error of ours that it raises is passed on: `DataError` drops the sample.
        """
        try:
            if self._is_async:
                return await self._function(task)
            result = await to_thread.run_sync(self._function, task, abandon_on_cancel=True, limiter=self._threads)
            return await result if inspect.isawaitable(result) else result
        except AsyncRLError:
            raise
        except Exception as error:
            raise UserCodeError.wrap(f"{KEY}: {self._name} raised {type(error).__name__}: {error}", error) from error


def read_result(result: Any) -> PostedReward:
    """What a program returned: nothing, a number, or a mapping of `reward` and `metrics`.

    Raises:
        UserCodeError: it is something else.
    """
    reward: Any = result
    metrics: Mapping[str, Any] = {}
    try:
        if isinstance(result, Mapping):
            if unknown := result.keys() - {"reward", "metrics"}:
                raise ValueError(f"the key {min(map(str, unknown))!r} means nothing; there are reward and metrics")
            reward, metrics = result.get("reward"), result.get("metrics") or {}
        return checked_reward(reward, metrics, False)
    except (ValueError, AttributeError) as error:
        raise UserCodeError(
            f"{KEY}: an agent returned what is no reward: {error}. It may return None, a finite number, or a mapping "
            "with reward and metrics"
        ) from error
