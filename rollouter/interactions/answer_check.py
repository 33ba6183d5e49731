"""A reward function asked about one answer in the middle of a conversation."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
from anyio import to_process, to_thread

from asyncrl.config.schema import RewardConfig
from asyncrl.failures import ConfigError
from rollouter.interactions.base import EpisodeContext
from rollouter.rewards.loading import load_reward_function


class AnswerCheck:
    """Like `reward.function`, which it may be, too: a built-in name, or `module:function` with the same arguments."""

    def __init__(self, function: str, kwargs: Mapping[str, Any]) -> None:
        """Find the function.

        Raises:
            ConfigError: there is none of that name, or it cannot be called with the arguments.
            UserCodeError: its module raised when it was imported.
        """
        try:
            self._function = load_reward_function(RewardConfig(function=function, kwargs=dict(kwargs)))
        except ConfigError as error:
            # The loader names the keys of the run's own reward.
            raise ConfigError(error.message.removeprefix("reward."), error.cause) from error
        if self._function.takes_trajectory:
            raise ConfigError(
                f"function: {function} wants the whole trajectory, and here it is asked in the middle of one"
            )
        # Calls are bounded by the interaction's max_concurrency; an abandoned thread must not take a place for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)
        self._processes = anyio.CapacityLimiter(os.cpu_count() or 1)

    async def score(self, text: str, context: EpisodeContext) -> float:
        """What the function gives `text`. Functions that are not async run off the event loop.

        Raises:
            ValueError: it gave something else than a finite number, or a mapping with one under `score`.
            Exception: whatever the function raises.
        """
        function = self._function
        row = {
            "data_source": context.data_source,
            "solution_str": text,
            "ground_truth": context.ground_truth,
            "extra_info": dict(context.extra_info),
        }
        arguments: dict[str, Any] = {f"{name}s": [value] for name, value in row.items()} if function.batch else row
        call = partial(function.call, **arguments, **function.kwargs)
        if function.is_async:
            result = await call()
        elif function.in_process:
            result = await to_process.run_sync(call, cancellable=True, limiter=self._processes)
        else:
            result = await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._unbounded)
        if function.batch:
            result = result[0]
        value = result.get("score") if isinstance(result, Mapping) else result
        if value is None or not math.isfinite(float(value)):
            raise ValueError(f"{function.name} returned {result!r}; expected a finite number, or a mapping with one")
        return float(value)
