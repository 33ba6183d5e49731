"""The reward of a response: what the function gives it and what a reward model does, weighted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.failures import first_failure
from asyncrl.ports import RewardScorer, Score
from asyncrl.types import Prompt, Turn
from rollouter.template import Decode


class ModelScorer(Protocol):
    """A reward model."""

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        """One finite number per response text."""


class CombinedScorer:
    """`RewardScorer`: reward = `reward.weight` x rule + `reward_model.weight` x model, for training and validation.

    With a reward model, `Score.extra` has the parts before their weights: `rule`, what the function gave, and `model`.
    With `reward_model.placement: worker` the Trainer adds the model's part to what it trains on; here, and so in
    validation, there is only the rule's.
    """

    def __init__(self, rule: RewardScorer, config: Config, decode: Decode, model: ModelScorer | None) -> None:
        self._rule = rule
        self._model = model
        self._decode = decode
        self._weight = config.reward.weight
        self._model_weight = config.reward_model.weight
        self._tell_parts = config.reward_model.placement != "off"

    async def score(self, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]:
        """One score per turn.

        Raises:
            UserCodeError: from the function.
            InfraError, DataError: from the model.
        """
        if self._model is None:
            rule = await self._rule.score(prompt, turns)
            return [self._combined(score, None) for score in rule]
        rule, model = await self._both(self._model, prompt, turns)
        return [self._combined(score, value) for score, value in zip(rule, model, strict=True)]

    async def _both(
        self, scorer: ModelScorer, prompt: Prompt, turns: Sequence[Turn]
    ) -> tuple[list[Score], list[float]]:
        """Function and model side by side."""
        rule: list[Score] = []
        model: list[float] = []

        async def ask_model() -> None:
            texts = await to_thread.run_sync(lambda: [self._decode(turn.response_ids) for turn in turns])
            model.extend(await scorer.score(prompt, texts))

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(ask_model)
                rule.extend(await self._rule.score(prompt, turns))
        except BaseExceptionGroup as error:
            raise first_failure(error) from error
        return rule, model

    def _combined(self, rule: Score, model: float | None) -> Score:
        reward = self._weight * rule.reward
        parts: dict[str, float] = {"rule": rule.reward} if self._tell_parts else {}
        if model is not None:
            reward += self._model_weight * model
            parts["model"] = model
        return Score(reward, {**rule.extra, **parts})
