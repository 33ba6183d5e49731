"""A turn's samples → everything that its steps need.

    rows ─▶ batch ─▶ ask the roles ─▶ token rewards ─▶ advantages, returns ─▶ off-policy correction
                     old_log_probs    score + reward model                    is_weights, loss_mask
                     ref_log_probs    overlong punishment, KL
                     values, scores

The roles are asked in forward passes of their ranks; what follows is plain float64 arithmetic on whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyio import to_thread
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.failures import DataError
from asyncrl.records import Metrics
from skip import SkipManager
from trainer.algorithms.advantages import AdvantageInputs, advantage_estimator
from trainer.algorithms.corrections import correct
from trainer.algorithms.objective import explained_variance
from trainer.algorithms.shaping import (
    Rewards,
    combined_scores,
    kl_penalised,
    laid_out,
    next_kl_coefficient,
    overlong_penalty,
    scores_of,
)
from trainer.algorithms.trajectories import Trajectories
from trainer.placement import reference_is_actor
from trainer.roles import RoleGroup
from trainer.rows import TrainSample
from trainer.tensors import MEDIA_KEYS, to_batch
from trainer.worker import NEEDED


class Experience(NamedTuple):
    batch: TensorDict
    """Rows in the samples' order, with what the Trainer adds (`trainer.tensors`)."""
    metrics: Metrics
    kl_coef: float | None
    """The adaptive KL coefficient from the next turn on; None: it does not adapt, or there is no KL in the reward."""


class ExperienceBuilder:
    """Asks the roles and does the arithmetic.

    Args:
        ref: None where the actor without its adapters is the reference, or where there is none.
    """

    def __init__(
        self,
        config: Config,
        *,
        actor: RoleGroup,
        ref: RoleGroup | None = None,
        critic: RoleGroup | None = None,
        reward_model: RoleGroup | None = None,
    ) -> None:
        self._config = config
        self._actor = actor
        self._ref = ref
        self._critic = critic
        self._reward_model = reward_model

    async def make(
        self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None = None
    ) -> Experience:
        """See the head of this file.

        Args:
            kl_coef: where an adaptive coefficient stands; None: at its start. A fixed one is the configuration's.

        Raises:
            DataError: a role answered with a number that is not finite, for a token or response that counts.
            InfraError, DeadlineError: a role's ranks died or did not answer.
        """
        rows = [row for sample in samples for row in sample.rows]
        batch = await to_thread.run_sync(to_batch, rows)
        await self._ask(batch)
        return await to_thread.run_sync(learn_from, batch, self._config, trainer_version, kl_coef)

    async def _ask(self, batch: TensorDict) -> None:
        """Add what the roles say to `batch`. One after the other: most roles share their ranks."""
        asked = batch.select(*NEEDED, *MEDIA_KEYS, strict=False)  # what a forward pass takes; the rest need not travel
        # In bypass mode the behaviour policy is the proximal one, so nobody has to compute it.
        batch["old_log_probs"] = batch["rollout_log_probs"]
        if not self._config.algorithm.rollout_correction.bypass_mode:
            batch["old_log_probs"] = (await self._actor.infer_batch(asked))["log_probs"]
        if self._ref is not None or reference_is_actor(self._config):
            batch["ref_log_probs"] = await self._ref_log_probs(asked)
        if self._critic is not None:
            batch["values"] = (await self._critic.infer_batch(asked))["values"]
        if self._reward_model is not None:
            batch["model_scores"] = (await self._reward_model.infer_batch(asked))["scores"]

    @SkipManager.annotate(role="ref_log_prob")
    async def _ref_log_probs(self, asked: TensorDict) -> Tensor:
        """Of the reference's ranks, or of the actor's without their adapters. Its step is the loop's."""
        if self._ref is not None:
            return (await self._ref.infer_batch(asked))["log_probs"]
        return (await self._actor.infer_batch(asked, adapters=False))["log_probs"]


def learn_from(batch: TensorDict, config: Config, trainer_version: int, kl_coef: float | None) -> Experience:
    """Rewards, advantages and correction of a lease whose roles have answered. Changes `batch`.

    Raises:
        DataError: see `ExperienceBuilder.make`.
    """
    _check_finite(batch)
    algorithm, trajectories = config.algorithm, Trajectories.of(batch["trajectories"])
    rewards, metrics, kl_coef = _rewards(batch, trajectories, config, kl_coef)
    inputs = AdvantageInputs(
        token_rewards=rewards.tokens,
        scores=scores_of(rewards, trajectories),
        response_mask=batch["response_mask"],
        groups=batch["groups"],
        trajectories=trajectories,
        values=batch.get("values"),
        baseline_rewards=batch.get("baseline_rewards"),
    )
    if "turn_rewards" in batch:
        del batch["turn_rewards"]  # the ranks have no use for them
    estimated = advantage_estimator(algorithm)(inputs)
    batch["advantages"], batch["returns"] = estimated.advantages.float(), estimated.returns.float()
    # After a rewind a sample may be of versions that the Trainer has yet to reach again.
    ages = (trainer_version - batch["versions"]).clamp(min=0)
    corrected = correct(
        batch["old_log_probs"], batch["rollout_log_probs"], batch["loss_mask"], ages, algorithm.rollout_correction
    )
    metrics |= corrected.metrics | _advantage_metrics(batch)
    batch["loss_mask"] = corrected.loss_mask
    if corrected.is_weights is not None:
        batch["is_weights"] = corrected.is_weights
    if trajectories.forked:
        batch["trajectory_tokens"] = trajectories.spread(trajectories.sum(corrected.loss_mask.sum(dim=1)))
    batch["token_ages"] = (ages * batch["response_mask"]).float()
    return Experience(batch, metrics, kl_coef)


def _rewards(
    batch: TensorDict, trajectories: Trajectories, config: Config, kl_coef: float | None
) -> tuple[Rewards, Metrics, float | None]:
    """Rewards of tokens, float64, what to tell of them, and the next adaptive KL coefficient."""
    algorithm, mask = config.algorithm, batch["response_mask"]
    scores, metrics = batch["rewards"][trajectories.first], Metrics()
    if "model_scores" in batch:
        # The last row is the conversation as it ended. The Rollouter has weighted its own share already.
        model_scores = batch["model_scores"][trajectories.last]
        scores = combined_scores(scores, model_scores, model_weight=config.reward_model.weight)
        metrics["reward/model_mean"] = float(model_scores.mean())
    if "baseline_rewards" in batch:
        metrics["reward/baseline_mean"] = float(batch["baseline_rewards"][trajectories.first].mean())
    if config.reward.overlong_buffer.enable:
        lengths = trajectories.sum(batch["response_lens"])
        punishment = overlong_penalty(lengths, config.rollout.response_length, config.reward.overlong_buffer)
        scores = scores + punishment
        metrics["reward/overlong_mean"] = float(punishment.mean())
    rewards = laid_out(trajectories.spread(scores), mask, trajectories, batch.get("turn_rewards"))
    next_kl_coef = None
    if algorithm.use_kl_in_reward:
        adapts = algorithm.kl_ctrl.type == "adaptive"
        # A checkpoint's coefficient must not outlive a change of the configuration that fixes it.
        coefficient = kl_coef if adapts and kl_coef is not None else algorithm.kl_ctrl.kl_coef
        penalised = kl_penalised(
            rewards,
            batch["old_log_probs"],
            batch["ref_log_probs"],
            mask,
            trajectories,
            kind=algorithm.kl_penalty,
            coefficient=coefficient,
        )
        rewards = penalised.rewards
        metrics |= {"reward/kl": penalised.kl, "reward/kl_coef": coefficient}
        if adapts:
            next_kl_coef = next_kl_coefficient(coefficient, penalised.kl, len(trajectories), algorithm.kl_ctrl)
    if metrics:
        metrics["reward/shaped_mean"] = float(scores_of(rewards, trajectories).mean())
    return rewards, metrics, next_kl_coef


def _advantage_metrics(batch: TensorDict) -> Metrics:
    """Over the tokens that came in for training, before any is rejected."""
    mask = batch["loss_mask"]
    advantages = batch["advantages"][mask].double()
    metrics = {
        "advantages/mean": float(advantages.mean()),
        "advantages/std": float(advantages.std(correction=0)),
        "advantages/max": float(advantages.max()),
        "advantages/min": float(advantages.min()),
    }
    if "values" in batch:
        metrics["critic/explained_variance"] = explained_variance(batch["values"], batch["returns"], mask)
    return metrics


_ANSWERS = {
    "old_log_probs": "log-probs of the policy",
    "ref_log_probs": "log-probs of the reference",
    "values": "values of the critic",
}


def _check_finite(batch: TensorDict) -> None:
    for key, what in _ANSWERS.items():
        if key in batch:
            wrong = (~batch[key].isfinite() & batch["response_mask"]).sum().item()
            if wrong:
                raise DataError(
                    f"{wrong} {what} are not finite, in a lease of {len(batch)} rows: nothing can be learned from "
                    "them. Check that model's weights, and the data types trainer.dtype, ref.dtype and critic.dtype"
                )
    if "model_scores" in batch and not batch["model_scores"].isfinite().all():
        raise DataError(
            "the reward model's scores are not all finite: check reward_model.path and reward_model.worker.dtype"
        )
