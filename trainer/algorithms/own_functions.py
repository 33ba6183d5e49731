"""Checks the user's own functions of `algorithm` before a run: each is imported and called once on a toy batch.

The calls take the code's own way (`advantage_estimator`, `policy_terms`, ...), so a function that passes fits there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.import_path import call_problem, load_function, placed
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import own_functions
from asyncrl.core.failures import AsyncRLError, UserCodeError
from trainer.algorithms.advantages import AdvantageInputs, advantage_estimator
from trainer.algorithms.corrections import importance_weights, rejection_mask
from trainer.algorithms.losses import Rows, kl_estimate, policy_terms
from trainer.algorithms.rewards import Trajectories
from trainer.engines.compute.packing import token_weights

_MASK = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]).bool()
"""Sampled tokens of 4 trajectories, in 2 groups."""
_FIX = "correct the function; docs/extending.md has an example of each"


def check_own_functions(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem for each of the user's functions that cannot be imported, does not take the arguments, raises on
    a toy batch, or returns something that cannot be used."""
    for key, name in own_functions(config).items():
        arguments, call = _CALLS[key.removeprefix("algorithm.")]
        function = None
        try:
            function = load_function(name, key, {})
            if problem := call_problem(function, *arguments):
                raise UserCodeError(f"it is called with ({', '.join(arguments)}): {problem}")
            _check_numbers(call(config, name), name)
        except AsyncRLError as error:
            yield ConfigProblem(key, name, placed(error.message.removeprefix(f"{key}: "), function), _FIX)


def _check_numbers(values: Any, name: str) -> None:
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, Tensor) and not value.double().isfinite().all():
            raise UserCodeError(f"{name} returned numbers that are not finite for a plain batch")


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _advantages(config: Config, name: str) -> Any:
    trajectories = Trajectories.of(torch.arange(4))
    whole = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    tokens = torch.zeros(4, 5, dtype=torch.float64).scatter(1, torch.tensor([[4], [1], [4], [1]]), whole[:, None])
    inputs = AdvantageInputs(
        token_rewards=tokens,
        scores=whole,
        response_mask=_MASK,
        groups=torch.tensor([0, 0, 1, 1]),
        trajectories=trajectories,
    )
    return advantage_estimator(config.algorithm)(inputs)


def _rows() -> Rows:
    return Rows(_MASK.nonzero()[:, 0], len(_MASK))


def _terms(config: Config, name: str) -> Any:
    log_probs = (_noise(int(_MASK.sum())) - 2.0).requires_grad_()
    old, advantages = log_probs.detach() + 0.1, _noise(len(log_probs)).sign()
    terms = policy_terms(log_probs, old, advantages, _rows(), config.algorithm)
    if not terms.loss.requires_grad:
        raise UserCodeError(f"{name} returned a loss without a gradient in log_probs, so nothing would be learned")
    return terms.loss, *torch.autograd.grad(terms.loss.sum(), log_probs)


def _weights(config: Config, name: str) -> Any:
    batch = TensorDict({"loss_mask": _MASK}, batch_size=[len(_MASK)])
    return token_weights(batch, (float(_MASK.sum()), 4.0), name, 100.0)


def _kl(config: Config, name: str, key: str) -> Any:
    return kl_estimate(_noise(8) - 2.0, _noise(8) - 2.1, name, key)


def _drops(config: Config, name: str) -> Any:
    answer = load_function(name, "algorithm.filter_groups.drop", {})([1.0, 0.0, 1.0, 0.5])
    if not isinstance(answer, bool):
        raise UserCodeError(f"{name} returned {answer!r}; expected True or False")


_LOG_RATIO = ("log_ratio", "rows")
_LOG_PROBS = ("log_probs", "ref_log_probs")
_CALLS: dict[str, tuple[tuple[str, ...], Callable[[Config, str], Any]]] = {
    "adv_estimator": (("inputs", "algorithm"), _advantages),
    "policy_loss": (("log_probs", "old_log_probs", "advantages", "rows", "algorithm"), _terms),
    "loss_agg_mode": (("counts",), _weights),
    "kl_loss_type": (_LOG_PROBS, lambda config, name: _kl(config, name, "algorithm.kl_loss_type")),
    "kl_penalty": (_LOG_PROBS, lambda config, name: _kl(config, name, "algorithm.kl_penalty")),
    "rollout_correction.rollout_is": (
        _LOG_RATIO,
        lambda config, name: importance_weights(_noise(12) / 10, _rows(), config.algorithm.rollout_correction).weights,
    ),
    "rollout_correction.rollout_rs": (
        _LOG_RATIO,
        lambda config, name: rejection_mask(_noise(12) / 10, _rows(), config.algorithm.rollout_correction),
    ),
    "filter_groups.drop": (("rewards",), _drops),
}
"""Arguments, for messages, and the call by key."""
