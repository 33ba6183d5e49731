"""What a reward function is called with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt
from rollouter.rewards.loading import RewardFunction


def single(function: RewardFunction, prompt: Prompt, trajectory: Trajectory, text: str) -> dict[str, Any]:
    """For one trajectory; `text` is what the assistant said last."""
    arguments: dict[str, Any] = {
        "data_source": prompt.data_source,
        "solution_str": text,
        "ground_truth": prompt.ground_truth,
        "extra_info": extra_info(prompt, trajectory),
        **function.kwargs,
    }
    return {**arguments, "trajectory": trajectory} if function.takes_trajectory else arguments


def batch(
    function: RewardFunction, prompt: Prompt, trajectories: Sequence[Trajectory], texts: Sequence[str]
) -> dict[str, Any]:
    """For trajectories of one prompt."""
    arguments: dict[str, Any] = {
        "data_sources": [prompt.data_source] * len(texts),
        "solution_strs": list(texts),
        "ground_truths": [prompt.ground_truth] * len(texts),
        "extra_infos": [extra_info(prompt, trajectory) for trajectory in trajectories],
        **function.kwargs,
    }
    return {**arguments, "trajectories": list(trajectories)} if function.takes_trajectory else arguments


def extra_info(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """The row's columns; of a conversation, also what happened in it. The function's own copy, as far as it is flat."""
    columns = dict(prompt.extra_info)
    if not trajectory.messages:
        return columns
    return columns | {
        "messages": [dict(message) for message in trajectory.messages],
        "num_turns": len(trajectory.turns),
        "num_tool_calls": trajectory.num_calls,
        "finish_reason": str(trajectory.finish_reason),
        "tool_scores": dict(trajectory.scores),
        "turn_rewards": [turn.reward for turn in trajectory.turns],
    }
