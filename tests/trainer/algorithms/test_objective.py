"""The losses that engines differentiate, compared with their formulas, and their metrics."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import BugError
from trainer.algorithms.objective import PolicyLoss, ValueLoss, explained_variance, finish_metrics
from trainer.engines.base import LossParts, Tokens, TokenScores

ROW = [0, 0, 1, 1, 1]
WEIGHT = [0.1, 0.3, 0.2, 0.15, 0.25]
CURRENT = [-1.0, -2.0, -0.5, -3.0, -0.1]
OLD = [-1.1, -1.5, -0.6, -3.0, -0.4]
ROLLOUT = [-1.3, -1.5, -0.2, -2.0, -0.9]
REF = [-0.9, -2.5, -0.5, -2.0, -0.3]
ADVANTAGES = [1.0, 1.0, -2.0, -2.0, -2.0]
IS_WEIGHTS = [0.5, 1.0, 0.0, 2.0, 1.5]
ENTROPY = [0.3, 0.2, 1.1, 0.6, 0.9]
AGES = [0.0, 0.0, 1.0, 4.0, 7.0]
FIELDS = {"advantages": ADVANTAGES, "old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "ref_log_probs": REF}


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(**more: list[float]) -> Tokens:
    fields = {name: tensor(values) for name, values in (FIELDS | more).items()}
    return Tokens(fields, tensor(WEIGHT), torch.tensor(ROW), 2)


def policy_loss(keys: dict[str, Any], log_probs: list[float] = CURRENT, **more: list[float]) -> LossParts:
    loss = PolicyLoss(AlgorithmConfig.model_validate(keys), 16)
    return loss(TokenScores(tensor(log_probs).requires_grad_(), tensor(ENTROPY).requires_grad_()), tokens(**more))


def ppo(current: float, old: float, advantage: float) -> float:
    ratio = math.exp(current - old)
    loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    return min(loss, -3.0 * advantage) if advantage < 0 else loss


def weighted(values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(WEIGHT, values, strict=True))


def ppo_losses() -> list[float]:
    return [ppo(*token) for token in zip(CURRENT, OLD, ADVANTAGES, strict=True)]


def test_the_loss_without_further_terms_is_the_objective() -> None:
    parts = policy_loss({})
    assert parts.loss.item() == pytest.approx(weighted(ppo_losses()), rel=1e-12)
    assert {name: value.item() for name, value in parts.sums.items()} == {"actor/pg_loss": parts.loss.item()}
    torch.testing.assert_close(parts.means["actor/entropy"], tensor(ENTROPY))
    ratios = [math.exp(current - old) for current, old in zip(CURRENT, OLD, strict=True)]
    torch.testing.assert_close(parts.means["actor/ratio_mean"], tensor(ratios))
    changes = [old - current for current, old in zip(CURRENT, OLD, strict=True)]
    torch.testing.assert_close(parts.means["actor/ppo_kl"], tensor(changes))
    gaps = [current - behaviour for current, behaviour in zip(CURRENT, ROLLOUT, strict=True)]
    torch.testing.assert_close(parts.means["rollout/mismatch_kl"], tensor([math.exp(d) - 1 - d for d in gaps]))
    assert not any(value.requires_grad for value in (parts.means | parts.sums).values())


def test_kl_loss_and_entropy_bonus_are_added_to_the_weighted_objective() -> None:
    """The importance weights multiply the policy objective but neither the KL loss nor the entropy."""
    parts = policy_loss(
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.4,
            "entropy_coeff": 0.05,
            "rollout_correction": {"bypass_mode": False, "rollout_is": "token"},
        },
        is_weights=IS_WEIGHTS,
    )
    pg = weighted([loss * weight for loss, weight in zip(ppo_losses(), IS_WEIGHTS, strict=True)])
    kl = weighted([math.exp(ref - p) - 1 - (ref - p) for p, ref in zip(CURRENT, REF, strict=True)])
    assert parts.sums["actor/pg_loss"].item() == pytest.approx(pg, rel=1e-12)
    assert parts.sums["actor/kl_loss"].item() == pytest.approx(kl, rel=1e-12)
    assert parts.loss.item() == pytest.approx(pg + 0.4 * kl - 0.05 * weighted(ENTROPY), rel=1e-12)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coeff": 0.1},
        {"policy_loss": "reinforce"},
    ],
)
def test_gradients_of_the_whole_loss_equal_finite_differences(keys: dict[str, Any]) -> None:
    loss = PolicyLoss(AlgorithmConfig.model_validate(keys), 16)

    def whole(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return loss(TokenScores(log_probs, entropy), tokens()).loss

    inputs = (tensor(CURRENT).requires_grad_(), tensor(ENTROPY).requires_grad_(loss.entropy_gradient))
    assert torch.autograd.gradcheck(whole, inputs)
    assert loss.entropy_gradient is bool(keys.get("entropy_coeff"))


BYPASS = {
    "token": [math.exp(p - b) for p, b in zip(CURRENT, ROLLOUT, strict=True)],
    "sequence": [math.exp(0.3 - 0.5)] * 2 + [math.exp(-0.3 - 1.0 + 0.8)] * 3,
}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_reinforce_in_bypass_mode_weighs_with_the_current_policy(level: str) -> None:
    """The weights are the ratios of current to behaviour policy, truncated at 1.2, and have no gradient."""
    log_probs = tensor(CURRENT).requires_grad_()
    keys = {"policy_loss": "reinforce", "rollout_correction": {"rollout_is": level, "rollout_is_threshold": 1.2}}
    loss = PolicyLoss(AlgorithmConfig.model_validate(keys), 16)
    parts = loss(TokenScores(log_probs, tensor(ENTROPY)), tokens(old_log_probs=ROLLOUT))
    weights = [min(weight, 1.2) for weight in BYPASS[level]]
    expected = [-a * p * w for a, p, w in zip(ADVANTAGES, CURRENT, weights, strict=True)]
    assert parts.loss.item() == pytest.approx(weighted(expected), rel=1e-12)
    (gradient,) = torch.autograd.grad(parts.loss, log_probs)
    torch.testing.assert_close(
        gradient, tensor([-a * w * share for a, w, share in zip(ADVANTAGES, weights, WEIGHT, strict=True)])
    )
    torch.testing.assert_close(parts.means["correction/is_weight_mean"], tensor(weights))
    assert parts.means["correction/clipped_share"].tolist() == [float(weight > 1.2) for weight in BYPASS[level]]


def test_ppo_in_bypass_mode_has_no_weights_besides_its_ratio() -> None:
    plain = policy_loss({}, old_log_probs=ROLLOUT)
    weighted_twice = policy_loss({"rollout_correction": {"rollout_is": "token"}}, old_log_probs=ROLLOUT)
    assert plain.loss.item() == weighted_twice.loss.item()


def test_rejection_in_bypass_mode_uses_the_current_policy_and_keeps_the_denominators() -> None:
    keys = {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.45}, "use_kl_loss": True}
    parts = policy_loss(keys, old_log_probs=ROLLOUT)
    keep = [abs(p - b) <= 0.45 for p, b in zip(CURRENT, ROLLOUT, strict=True)]
    losses = [ppo(*token) for token in zip(CURRENT, ROLLOUT, ADVANTAGES, strict=True)]
    assert keep == [True, False, True, False, False]
    expected = weighted([loss * one for loss, one in zip(losses, keep, strict=True)])
    assert parts.sums["actor/pg_loss"].item() == pytest.approx(expected, rel=1e-12)
    assert parts.sums["actor/kl_loss"].item() > 0
    assert parts.means["correction/rejected_share"].tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert parts.means["correction/masked_share"].tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_gspo_averages_over_the_rows_of_the_micro_batch() -> None:
    parts = policy_loss({"policy_loss": "gspo"})
    first = math.exp((0.1 - 0.5) / 2)
    second = math.exp((0.1 + 0.0 + 0.3) / 3)
    torch.testing.assert_close(parts.means["actor/ratio_mean"], tensor([first] * 2 + [second] * 3))


def test_metrics_by_age_cover_the_tokens_of_that_age() -> None:
    parts = policy_loss({}, token_ages=AGES)
    metrics = finish_metrics({name: float(values.mean()) for name, values in parts.means.items()})
    kl = [math.exp(p - b) - 1 - (p - b) for p, b in zip(CURRENT, ROLLOUT, strict=True)]
    assert metrics["rollout/mismatch_kl_age_0"] == pytest.approx(sum(kl[:2]) / 2)
    assert metrics["rollout/mismatch_kl_age_1"] == pytest.approx(kl[2])
    assert "rollout/mismatch_kl_age_2" not in metrics
    assert metrics["rollout/mismatch_kl_age_3"] == pytest.approx(sum(kl[3:]) / 2)
    assert metrics["rollout/token_share_age_3"] == pytest.approx(0.4)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(sum(kl) / 5)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BugError, match="'returns'"):
        ValueLoss(0.5)(TokenScores(tensor(CURRENT), tensor(ENTROPY)), tokens())


def batch(advantages: list[list[float]], mask: list[list[int]], **more: Any) -> TensorDict:
    fields = {"advantages": torch.tensor(advantages), "loss_mask": torch.tensor(mask).bool(), **more}
    return TensorDict(fields, batch_size=[len(mask)])


def test_rows_without_an_advantage_need_no_gradient() -> None:
    rows = batch(
        [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [float("nan"), 0.0], [1.0, 1.0]], [[1, 1], [1, 0], [1, 1], [1, 1], [0, 0]]
    )
    assert PolicyLoss(AlgorithmConfig(), 4).needs_gradient(rows).tolist() == [False, False, True, True, False]
    everything = [True, True, True, True, False]
    for keys in ({"use_kl_loss": True}, {"entropy_coeff": 0.1}):
        assert PolicyLoss(AlgorithmConfig(**keys), 4).needs_gradient(rows).tolist() == everything
    off = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.0)
    assert PolicyLoss(off, 4).needs_gradient(rows).tolist() == [False, False, True, True, False]
    assert ValueLoss(0.5).needs_gradient(rows).tolist() == everything


def test_a_row_whose_weights_are_0_needs_no_gradient() -> None:
    rows = batch([[1.0, 1.0]] * 2, [[1, 1]] * 2, is_weights=torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert PolicyLoss(AlgorithmConfig(), 4).needs_gradient(rows).tolist() == [False, True]


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo", "reinforce"])
def test_splitting_rows_over_micro_batches_changes_nothing(objective: str) -> None:
    whole = policy_loss({"policy_loss": objective})
    loss = PolicyLoss(AlgorithmConfig(policy_loss=objective), 16)
    parts = []
    for chosen in (slice(0, 2), slice(2, 5)):
        fields = {name: tensor(values)[chosen] for name, values in FIELDS.items()}
        row = torch.tensor(ROW)[chosen]
        scores = TokenScores(tensor(CURRENT)[chosen], tensor(ENTROPY)[chosen])
        parts.append(loss(scores, Tokens(fields, tensor(WEIGHT)[chosen], row - row[0], 1)).loss.item())
    assert sum(parts) == pytest.approx(whole.loss.item(), rel=1e-12)


def test_losses_are_pickled_with_their_denominators() -> None:
    loss = pickle.loads(pickle.dumps(PolicyLoss(AlgorithmConfig(loss_agg_mode="seq-mean-token-sum-norm"), 4096)))
    assert (loss.agg_mode, loss.agg_scale) == ("seq-mean-token-sum-norm", 4096.0)
    assert PolicyLoss(AlgorithmConfig(loss_scale_factor=100.0), 4096).agg_scale == 100.0
    scores = TokenScores(tensor(CURRENT), tensor(ENTROPY))
    assert loss(scores, tokens()).loss == policy_loss({}).loss
    critic = pickle.loads(pickle.dumps(ValueLoss(0.5)))
    assert (critic.agg_mode, critic.entropy_gradient) == ("token-mean", False)


VALUES, RETURNS = [-0.9, -0.9, -0.9, -2.0, 0.3], [1.0, -2.5, 0.0, -2.2, 0.3]


@pytest.mark.parametrize("cliprange", [0.5, None])
def test_the_loss_of_the_critic_follows_its_formula(cliprange: float | None) -> None:
    loss = ValueLoss(cliprange)
    scores = TokenScores(tensor(CURRENT).requires_grad_(), torch.zeros(5))
    parts = loss(scores, tokens(values=VALUES, returns=RETURNS))
    expected = []
    for predicted, value, wanted in zip(CURRENT, VALUES, RETURNS, strict=True):
        near = predicted if cliprange is None else min(max(predicted, value - cliprange), value + cliprange)
        expected.append(0.5 * max((predicted - wanted) ** 2, (near - wanted) ** 2))
    assert parts.loss.item() == pytest.approx(weighted(expected), rel=1e-12)
    assert parts.sums["critic/loss"].item() == parts.loss.item()
    torch.testing.assert_close(parts.means["critic/value_mean"], tensor(CURRENT))
    assert parts.means["critic/clip_fraction"].tolist() == [0.0, float(cliprange is not None), 0.0, 0.0, 0.0]
    assert torch.autograd.gradcheck(
        lambda values: loss(TokenScores(values, torch.zeros(5)), tokens(values=VALUES, returns=RETURNS)).loss,
        (scores.log_probs,),
    )


def test_explained_variance_separates_good_values_from_bad_ones() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert explained_variance(returns.clone(), returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0.0
