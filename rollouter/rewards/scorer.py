"""Calling the reward function: off the event loop, within a deadline and a bound on concurrency, results checked."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import anyio
from anyio import to_process, to_thread

from asyncrl.failures import AsyncRLError, UserCodeError, first_failure
from asyncrl.ports import Score
from asyncrl.types import Prompt, Turn
from rollouter.rewards.loading import RewardFunction
from rollouter.template import Decode


class Scorer:
    """`RewardScorer` on one reward function.

    A sync function runs in a worker thread. A thread cannot be killed: one that runs past its deadline fails its sample
    and is left behind. Async functions run on the event loop and must not block it.
    """

    def __init__(self, function: RewardFunction, decode: Decode, *, timeout_s: float, max_concurrency: int) -> None:
        self._function = function
        self._decode = decode
        self._timeout_s = timeout_s
        cores = os.cpu_count() or 1
        # A call's deadline starts once it has its place here: waiting for one is nobody's fault.
        self._calls = anyio.CapacityLimiter(min(max_concurrency, cores) if function.in_process else max_concurrency)
        # `_calls` alone bounds the calls; an abandoned thread must not take a place for good.
        self._unbounded = anyio.CapacityLimiter(math.inf)

    async def score(self, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]:
        texts = await to_thread.run_sync(
            lambda: [self._decode(turn.response_ids) for turn in turns], limiter=self._unbounded
        )
        if self._function.batch:
            return await self._score_group(prompt, texts)
        scores: list[Score | None] = [None] * len(texts)

        async def score_one(number: int) -> None:
            scores[number] = await self._score_text(prompt, texts[number])

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(texts)):
                    group.start_soon(score_one, number)
        except BaseExceptionGroup as error:
            raise first_failure(error) from error
        return [score for score in scores if score is not None]

    async def _score_group(self, prompt: Prompt, texts: list[str]) -> list[Score]:
        results = await self._call(
            prompt,
            texts,
            data_sources=[prompt.data_source] * len(texts),
            solution_strs=texts,
            ground_truths=[prompt.ground_truth] * len(texts),
            extra_infos=[dict(prompt.extra_info) for _ in texts],
        )
        if not isinstance(results, Sequence) and hasattr(results, "tolist"):
            results = results.tolist()
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(texts):
            raise UserCodeError(
                f"{self._about(prompt, texts)} returned {_shown(results)}; expected a list of {len(texts)} scores"
            )
        return [self._checked(result, prompt, text) for result, text in zip(results, texts, strict=True)]

    async def _score_text(self, prompt: Prompt, text: str) -> Score:
        result = await self._call(
            prompt,
            [text],
            data_source=prompt.data_source,
            solution_str=text,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
        )
        return self._checked(result, prompt, text)

    async def _call(self, prompt: Prompt, texts: Sequence[str], **arguments: Any) -> Any:
        """One call, its exceptions typed."""
        call = partial(self._function.call, **arguments, **self._function.kwargs)
        async with self._calls:
            with anyio.move_on_after(self._timeout_s) as deadline:
                try:
                    if self._function.is_async:
                        return await call()
                    if self._function.in_process:
                        return await to_process.run_sync(call, cancellable=True, limiter=self._unbounded)
                    return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._unbounded)
                except Exception as error:
                    cause = error.message if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
                    raise UserCodeError.wrap(f"{self._about(prompt, texts)} raised {cause}", error) from error
            assert deadline.cancelled_caught
        raise UserCodeError(
            f"{self._about(prompt, texts)} did not return within reward.timeout_s = {self._timeout_s:g} s; raise it, "
            "or bound what the function does"
        )

    def _checked(self, result: Any, prompt: Prompt, text: str) -> Score:
        """A finite score and those extras that are finite numbers; text among the extras is nobody's metric."""
        extras: Mapping[str, Any] = {}
        value = result
        if isinstance(result, Mapping):
            if "score" not in result:
                raise UserCodeError(
                    f"{self._about(prompt, [text])} returned a mapping without 'score': {_shown(result)}"
                )
            value = result["score"]
            extras = {key: item for key, item in result.items() if key != "score"}
        number = _finite(value)
        if number is None:
            raise UserCodeError(
                f"{self._about(prompt, [text])} returned {_shown(value)}; expected a finite number, or a mapping with "
                "one under 'score'"
            )
        checked = {str(key): _finite(item) for key, item in extras.items()}
        return Score(number, {key: item for key, item in checked.items() if item is not None})

    def _about(self, prompt: Prompt, texts: Sequence[str]) -> str:
        index = prompt.extra_info.get("index")
        row = f"{prompt.data_source!r}" if index is None else f"{prompt.data_source!r}, row {index}"
        return f"reward function {self._function.name} on a response to {row} ({_shown(texts[0])})"


def _finite(value: Any) -> float | None:
    """The value as float if it is one finite number: Python's, numpy's, or a tensor of one element."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
