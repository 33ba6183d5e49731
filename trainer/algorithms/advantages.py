"""Rewards of one group → advantages. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.failures import ConfigError

STD_EPSILON = 1e-6

Estimator = Callable[[NDArray[np.float64]], NDArray[np.float32]]
"""Rewards `[n]` of one sample's trajectories → advantages float32 `[n]`, one for all tokens of a trajectory."""


def grpo_advantages(rewards: NDArray[np.float64], *, norm_by_std: bool) -> NDArray[np.float32]:
    """Group-relative advantages: `A_i = (r_i - mean(r)) / (std(r) + 1e-6)`, std with n - 1.

    DeepSeekMath (https://arxiv.org/abs/2402.03300) eq. 1 ff.; without the division: Dr.GRPO
    (https://arxiv.org/abs/2503.20783). A group of equal rewards gives exact zeros.

    Raises:
        ConfigError: a group of one has no baseline.
    """
    if len(rewards) < 2:
        raise ConfigError(
            "rollout.n=1 with algorithm.adv_estimator=grpo: a group of one response has no baseline, so every "
            "advantage would be 0 and nothing would be learned; set rollout.n to 2 or more"
        )
    if np.all(rewards == rewards[0]):  # the mean of equal floats need not be that float
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    if norm_by_std:
        centred = centred / (rewards.std(ddof=1) + STD_EPSILON)
    return centred.astype(np.float32)


def estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The estimator that `algorithm.adv_estimator` names."""
    by_name: dict[str, Estimator] = {
        "grpo": lambda rewards: grpo_advantages(rewards, norm_by_std=algorithm.norm_adv_by_std_in_grpo),
    }
    return by_name[algorithm.adv_estimator]
