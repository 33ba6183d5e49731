"""Which samples teach nothing. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence


def group_is_flat(rewards: Sequence[float]) -> bool:
    """Whether all trajectories of a sample got the same reward, so that a group-relative advantage is 0 for each.

    What dynamic sampling drops (DAPO, https://arxiv.org/abs/2503.14476 eq. 11).
    """
    return all(reward == rewards[0] for reward in rewards)
