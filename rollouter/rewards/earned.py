"""What tools, users and environments gave a trajectory while it lasted: of the whole of it, and of its turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncrl.failures import UserCodeError
from asyncrl.ports import Score
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt


class ToolScores:
    """`RewardScorer`: the sum of `Trajectory.scores`."""

    whole_group = False

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """
        Raises:
            UserCodeError: one of them is no finite number.
        """
        return [Score(sum(_checked(trajectory.scores), 0.0)) for trajectory in trajectories]


class TurnRewards:
    """`RewardScorer`: each turn's own reward."""

    whole_group = False

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """
        Raises:
            UserCodeError: one of them is no finite number.
        """
        each = [
            _checked({f"turn {number}": turn.reward for number, turn in enumerate(trajectory.turns)})
            for trajectory in trajectories
        ]
        return [Score(sum(rewards, 0.0), turn_rewards=rewards) for rewards in each]


def _checked(given: Mapping[str, float]) -> tuple[float, ...]:
    for name, value in given.items():
        if not math.isfinite(value):
            raise UserCodeError(f"the reward from {name} is {value}; tools and environments must give finite numbers")
    return tuple(float(value) for value in given.values())
