"""The task that the user's program receives for one trajectory. It contains plain values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PostReward = Callable[[float | None, Mapping[str, float], bool], None]


def _nowhere(reward: float | None, metrics: Mapping[str, float], done: bool) -> None:
    raise RuntimeError("this AgentTask belongs to no trajectory, so a reward cannot be posted")


@dataclass(frozen=True, slots=True, eq=False)
class AgentTask:
    """One trajectory to produce. Its key works until the program has ended."""

    base_url: str
    """URL of the OpenAI API, ending in `/v1` as clients expect."""
    api_key: str
    """Key of this trajectory alone: every turn requested with it is recorded and trained on."""
    model: str
    """The model's name at the endpoint."""
    messages: tuple[Mapping[str, Any], ...]
    """The prompt."""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = "default"
    sample_id: str = ""
    """`sample_0_42`; in validation the prompt's name."""
    trajectory: int = 0
    """The trajectory's number within the sample, from 0."""
    post: PostReward = _nowhere

    def post_reward(
        self, reward: float | None = None, *, metrics: Mapping[str, float] | None = None, done: bool = False
    ) -> None:
        """Do the same as `POST /v1/reward`, from any thread: the last reward counts, metrics are merged.

        Args:
            reward: The trajectory's reward; None leaves it unchanged.
            metrics: Further numbers about the trajectory.
            done: Whether the trajectory is over and gets no more turns.

        Raises:
            ValueError: a number is not finite.
            RuntimeError: the trajectory is over already, or its metrics have names that cannot be reported.
        """
        self.post(reward, metrics or {}, done)

    def as_json(self) -> dict[str, Any]:
        """Return everything but `post`, for a program in another process."""
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "model": self.model,
            "messages": [dict(message) for message in self.messages],
            "ground_truth": self.ground_truth,
            "extra_info": dict(self.extra_info),
            "data_source": self.data_source,
            "sample_id": self.sample_id,
            "trajectory": self.trajectory,
        }
