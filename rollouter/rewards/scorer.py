"""Calling a reward function: off the event loop, within a deadline and a bound on concurrency."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

import anyio
from anyio import to_process, to_thread

from asyncrl.failures import AsyncRLError, UserCodeError, first_failure
from asyncrl.ports import Score
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt
from rollouter.rewards import arguments
from rollouter.rewards.loading import RewardFunction
from rollouter.rewards.results import listed, score_of, shown
from rollouter.template import Decode


class Scorer:
    """`RewardScorer` on one reward function.

    A sync function runs in a worker thread. A thread cannot be killed: one that runs past its deadline fails its sample
    and is left behind. Async functions run on the event loop and must not block it.
    """

    def __init__(
        self,
        function: RewardFunction,
        decode: Decode,
        *,
        timeout_s: float,
        max_concurrency: int,
        places: anyio.CapacityLimiter | None = None,
    ) -> None:
        """
        Args:
            timeout_s: Deadline of one call, seconds. It starts once the call has its place: waiting is nobody's fault.
            max_concurrency: Calls at once.
            places: Shared with other functions, in place of `max_concurrency`.
        """
        self._function = function
        self._decode = decode
        self._timeout_s = timeout_s
        self._calls = places or anyio.CapacityLimiter(max_concurrency)
        self._processes: AbstractAsyncContextManager[Any] = (
            anyio.CapacityLimiter(os.cpu_count() or 1) if function.in_process else nullcontext()
        )
        # `_calls` alone bounds the calls; an abandoned thread must not take a place for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)

    @property
    def whole_group(self) -> bool:
        return self._function.whole_group

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        texts = await to_thread.run_sync(
            lambda: [self._decode(trajectory.turn_ids()) for trajectory in trajectories], limiter=self._unbounded
        )
        if self._function.batch and texts:
            return await self._score_group(prompt, trajectories, texts)
        scores: list[Score | None] = [None] * len(texts)

        async def score_one(number: int) -> None:
            scores[number] = await self._score_one(prompt, trajectories[number], texts[number])

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(texts)):
                    group.start_soon(score_one, number)
        except BaseExceptionGroup as error:
            raise first_failure(error) from error
        return [score for score in scores if score is not None]

    async def _score_group(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], texts: Sequence[str]
    ) -> list[Score]:
        about = self._about(prompt, texts[0])
        results = await self._call(about, arguments.batch(self._function, prompt, trajectories, texts))
        return [
            score_of(result, self._about(prompt, text), num_turns=len(trajectory.turns))
            for result, trajectory, text in zip(
                listed(results, about, length=len(texts)), trajectories, texts, strict=True
            )
        ]

    async def _score_one(self, prompt: Prompt, trajectory: Trajectory, text: str) -> Score:
        about = self._about(prompt, text)
        result = await self._call(about, arguments.single(self._function, prompt, trajectory, text))
        return score_of(result, about, num_turns=len(trajectory.turns))

    async def _call(self, about: str, given: Mapping[str, Any]) -> Any:
        """One call, its exceptions typed."""
        call = partial(self._function.call, **given)
        async with self._processes, self._calls:
            with anyio.move_on_after(self._timeout_s) as deadline:
                try:
                    if self._function.is_async:
                        return await call()
                    if self._function.in_process:
                        return await to_process.run_sync(call, cancellable=True, limiter=self._unbounded)
                    return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._unbounded)
                except Exception as error:
                    cause = error.message if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
                    raise UserCodeError.wrap(f"{about} raised {cause}", error) from error
            assert deadline.cancelled_caught
        raise UserCodeError(
            f"{about} did not return within reward.timeout_s = {self._timeout_s:g} s; raise it, or bound what the "
            "function does"
        )

    def _about(self, prompt: Prompt, text: str) -> str:
        index = prompt.extra_info.get("index")
        row = f"{prompt.data_source!r}" if index is None else f"{prompt.data_source!r}, row {index}"
        return f"reward function {self._function.name} on a response to {row} ({shown(text)})"
