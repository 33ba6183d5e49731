"""The reward of a trajectory: what functions, tools, users, judge and reward model give it, weighted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio
from anyio import to_thread

from asyncrl.config.reward_rules import has_conversations, part_weights
from asyncrl.config.schema import Config
from asyncrl.ports import RewardScorer, Score
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt
from rollouter.rewards.conversation import Conversation, conversation
from rollouter.rewards.earned import ToolScores, TurnRewards
from rollouter.rewards.judge import Judge
from rollouter.rewards.loading import RewardFunction
from rollouter.rewards.scorer import Scorer
from rollouter.rewards.weighted import Source, WeightedScorer
from rollouter.template import Decode


class ModelScorer(Protocol):
    """A reward model."""

    async def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """One finite number per conversation."""


class ModelScores:
    """`RewardScorer` on a reward model."""

    whole_group = False

    def __init__(self, model: ModelScorer, decode: Decode) -> None:
        self._model = model
        self._decode = decode

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Raises as the model does: InfraError, DataError."""
        read = await to_thread.run_sync(
            lambda: [conversation(prompt, one, self._decode(one.turn_ids())) for one in trajectories]
        )
        return [Score(value) for value in await self._model.score(read)]


def function_scorer(config: Config, functions: Mapping[str, RewardFunction], decode: Decode) -> WeightedScorer:
    """The run's functions, by the names of their parts (`load_reward_functions`), as one scorer."""
    weights, reward = part_weights(config), config.reward
    places = anyio.CapacityLimiter(reward.max_concurrency)
    sources = [
        Source(
            name,
            weights[name],
            Scorer(
                function,
                decode,
                timeout_s=reward.timeout_s,
                max_concurrency=reward.max_concurrency,
                places=places,
            ),
        )
        for name, function in functions.items()
    ]
    return WeightedScorer(sources, tell_parts=len(weights) > 1)


class CombinedScorer:
    """`RewardScorer` of a whole run, for training and validation: `functions`, and everything else that scores.

    Where a run has more than one source, `Score.extra` has the part of each before its weight: `rule`, the names of
    further functions, `tools`, `turns`, `judge`, `model`. With `reward_model.placement: worker` the Trainer adds the
    model's part to what it trains on; here, and so in validation, it is missing.
    """

    def __init__(self, functions: RewardScorer, config: Config, decode: Decode, model: ModelScorer | None) -> None:
        """
        Args:
            functions: See `function_scorer`; they have their weights already.
            model: The served one; None: there is none.

        Raises:
            ConfigError: nobody can be asked at `reward.judge`.
        """
        weights = part_weights(config)
        others: dict[str, RewardScorer] = {}
        if has_conversations(config):
            others |= {"tools": ToolScores(), "turns": TurnRewards()}
        self._judge = Judge(config.reward.judge, decode) if config.reward.judge.model is not None else None
        if self._judge is not None:
            others["judge"] = self._judge
        if model is not None:
            others["model"] = ModelScores(model, decode)
        sources = [Source(None, 1.0, functions)]
        sources += [Source(name, weights[name], scorer) for name, scorer in others.items()]
        self._sum = WeightedScorer(sources, tell_parts=len(weights) > 1)

    @property
    def whole_group(self) -> bool:
        return self._sum.whole_group

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory.

        Raises:
            UserCodeError: from a function, a tool's reward or the judge.
            InfraError, DataError: from the model.
        """
        return await self._sum.score(prompt, trajectories)

    async def aclose(self) -> None:
        """Close the connections to the judge."""
        if self._judge is not None:
            await self._judge.aclose()
