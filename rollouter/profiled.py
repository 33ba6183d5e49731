"""What the Rollouter's events tell of trajectories, samples and rewards; recorded with this process's `profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.ports import RewardScorer, Score
from asyncrl.profiling import profile
from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt, Sample

SURPLUS = "surplus"
"""Why a trajectory ended, in events: it is whole and does not count, as enough others had ended before."""


def trajectory_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Of `trajectory`'s event. The calls of a turn are made at once: the longest one counts."""
    turns = trajectory.turns
    tool_s = sum(max((call.wait_s + call.duration_s for call in turn.calls), default=0.0) for turn in turns)
    return {
        "turns": len(turns),
        "calls": trajectory.num_calls,
        "tokens": sum(len(row.response_ids) for row in trajectory.rows),
        "sampled_tokens": trajectory.num_sampled,
        "finish_reason": str(trajectory.finish_reason),
        "generate_s": round(sum(turn.generate_s for turn in turns), 6),
        "tool_s": round(tool_s, 6),
        "user_s": round(sum(turn.user_s for turn in turns), 6),
    }


def mean_reward(sample: Sample) -> float:
    """Over its trajectories."""
    rewards = {row.trajectory: row.reward for row in sample.rows}
    return sum(rewards.values()) / len(rewards)


async def ask_scorer(scorer: RewardScorer, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
    """One call of the reward. Raises as the scorer does."""
    with profile.span("reward.score", trajectories=len(trajectories)) as span:
        scores = await scorer.score(prompt, trajectories)
        if scores:
            span.add(reward=sum(score.reward for score in scores) / len(scores))
        return scores
