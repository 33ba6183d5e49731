"""Several scorers as one: the weighted sum of what they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio

from asyncrl.failures import UserCodeError, first_failure
from asyncrl.ports import RewardScorer, Score
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt


class Source(NamedTuple):
    """One of the things that a reward is made of."""

    name: str | None
    """Of its part in `Score.extra`; None: it tells its parts itself."""
    weight: float
    scorer: RewardScorer


class WeightedScorer:
    """`RewardScorer`: each source times its weight, turn by turn where a source says so. All are asked at once."""

    def __init__(self, sources: Sequence[Source], *, tell_parts: bool) -> None:
        """`tell_parts`: `Score.extra` has what each source gave, before its weight, by the source's name."""
        self._sources = tuple(sources)
        self._tell_parts = tell_parts

    @property
    def whole_group(self) -> bool:
        return any(source.scorer.whole_group for source in self._sources)

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory.

        Raises:
            UserCodeError: two sources use one name for an extra; and what the sources raise, the first failure alone.
        """
        given: list[list[Score]] = [[] for _ in self._sources]

        async def ask(number: int) -> None:
            given[number] = await self._sources[number].scorer.score(prompt, trajectories)

        try:
            async with anyio.create_task_group() as group:
                for number in range(len(self._sources)):
                    group.start_soon(ask, number)
        except BaseExceptionGroup as error:
            raise first_failure(error) from error
        return [self._sum([scores[number] for scores in given]) for number in range(len(trajectories))]

    def _sum(self, scores: Sequence[Score]) -> Score:
        """Of one trajectory, by source."""
        reward = 0.0
        extra: dict[str, float] = {}
        turns: list[float] = []
        for source, score in zip(self._sources, scores, strict=True):
            reward += source.weight * score.reward
            told = dict(score.extra)
            if self._tell_parts and source.name is not None:
                _join(told, {source.name: score.reward})
            _join(extra, told)
            if score.turn_rewards:
                own = [source.weight * value for value in score.turn_rewards]
                turns = [one + other for one, other in zip(turns, own, strict=True)] if turns else own
        return Score(reward, extra, tuple(turns) if any(turns) else ())


def _join(extra: dict[str, float], more: dict[str, float]) -> None:
    if clash := extra.keys() & more.keys():
        name = min(clash)
        raise UserCodeError(
            f"two numbers of one response are called {name!r}: parts of the reward (reward.functions.name) and what "
            "functions return beside 'score' need names of their own; rename one"
        )
    extra.update(more)
