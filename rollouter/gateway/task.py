"""What the user's program is told of the trajectory that it is to make. Nothing but plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Post = Callable[[float | None, Mapping[str, float], bool], None]


def _nowhere(reward: float | None, metrics: Mapping[str, float], done: bool) -> None:
    raise RuntimeError("this AgentTask belongs to no trajectory, so there is nobody to post a reward to")


@dataclass(frozen=True, slots=True, eq=False)
class AgentTask:
    """One trajectory. Its key works until the program has ended."""

    base_url: str
    """Of the OpenAI API, as clients want it: ends in `/v1`."""
    api_key: str
    """Of this trajectory alone: whatever is asked with it is recorded and trained on."""
    model: str
    """The name to ask for."""
    messages: tuple[Mapping[str, Any], ...]
    """The prompt."""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = "default"
    sample_id: str = ""
    """`sample_0_42`; of validation, the prompt's name there."""
    trajectory: int = 0
    """Which of the sample's trajectories it is, from 0."""
    post: Post = _nowhere

    def post_reward(
        self, reward: float | None = None, *, metrics: Mapping[str, float] | None = None, done: bool = False
    ) -> None:
        """What `POST /v1/reward` does, from any thread: the last reward counts, metrics are joined.

        Args:
            reward: What the trajectory is worth; None: leave it as it is.
            metrics: Further numbers about it.
            done: The trajectory is over: no more turns.

        Raises:
            ValueError: a number is not finite. RuntimeError: the trajectory is over already.
        """
        self.post(reward, metrics or {}, done)

    def as_json(self) -> dict[str, Any]:
        """Everything but `post`, for a program of another process."""
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
