"""Compute everything that the training steps of a leased batch need from its samples.

    rows ─▶ batch ─▶ forward passes ─▶ token rewards ─▶ advantages, returns ─▶ off-policy correction
                     old_log_probs    score + reward model                    is_weights, loss_mask
                     ref_log_probs    overlong punishment, KL      teacher's KL
                     values, scores
                     teacher_log_probs

The ranks of the roles run the forward passes; the rest is float64 arithmetic on whole groups in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyio import to_thread
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError
from asyncrl.core.records import Metrics
from skip import SkipManager
from trainer.algorithms.advantages import AdvantageInputs, advantage_estimator, with_teacher
from trainer.algorithms.corrections import correct
from trainer.algorithms.objective import explained_variance
from trainer.algorithms.rewards import (
    Rewards,
    Trajectories,
    combined_scores,
    kl_penalised,
    laid_out,
    next_kl_coefficient,
    overlong_penalty,
    scores_of,
)
from trainer.batches import TrainSample
from trainer.workers.placement import reference_is_actor
from trainer.workers.tensors import MEDIA_KEYS, to_batch
from trainer.workers.worker import REQUIRED_KEYS, RoleGroup


class Experience(NamedTuple):
    batch: TensorDict
    """Rows in the order of the samples, with the columns that the Trainer adds (`trainer.workers.tensors`)."""
    metrics: Metrics
    kl_coef: float | None
    """The adaptive KL coefficient for the next batch; None if it is fixed or the reward has no KL penalty."""


class ExperienceBuilder:
    """Runs the forward passes and computes advantages.

    Args:
        ref: the reference model; None if the actor without its adapters is the reference, or if none is needed.
    """

    def __init__(
        self,
        config: Config,
        *,
        actor: RoleGroup,
        ref: RoleGroup | None = None,
        teacher: RoleGroup | None = None,
        critic: RoleGroup | None = None,
        reward_model: RoleGroup | None = None,
    ) -> None:
        self._config = config
        self._actor = actor
        self._ref = ref
        self._teacher = teacher
        self._critic = critic
        self._reward_model = reward_model

    async def make(
        self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None = None
    ) -> Experience:
        """Compute everything that training on `samples` needs.

        Args:
            kl_coef: the current adaptive coefficient; None: its initial value. A fixed coefficient comes from the
                configuration.

        Raises:
            DataError: a forward pass returned a value that is not finite for a trained token or a response.
            InfraError, DeadlineError: a role's ranks died or did not answer.
        """
        rows = [row for sample in samples for row in sample.rows]
        batch = await to_thread.run_sync(to_batch, rows)
        await self._forward_passes(batch)
        return await to_thread.run_sync(compute_advantages, batch, self._config, trainer_version, kl_coef)

    async def _forward_passes(self, batch: TensorDict) -> None:
        """Add the results of the roles to `batch`. Roles run one after the other, because most share their ranks."""
        inputs = batch.select(*REQUIRED_KEYS, *MEDIA_KEYS, strict=False)  # the columns that forward passes read
        # In bypass mode the behaviour policy is used as the proximal one, which saves a forward pass.
        batch["old_log_probs"] = batch["rollout_log_probs"]
        if not self._config.algorithm.rollout_correction.bypass_mode:
            batch["old_log_probs"] = (await self._actor.infer_batch(inputs))["log_probs"]
        if self._ref is not None or reference_is_actor(self._config):
            batch["ref_log_probs"] = await self._ref_log_probs(inputs)
        if self._teacher is not None:
            batch["teacher_log_probs"] = (await self._teacher.infer_batch(inputs))["log_probs"]
        if self._critic is not None:
            batch["values"] = (await self._critic.infer_batch(inputs))["values"]
        if self._reward_model is not None:
            batch["model_scores"] = (await self._reward_model.infer_batch(inputs))["scores"]

    @SkipManager.annotate(role="ref_log_prob")
    async def _ref_log_probs(self, request: TensorDict) -> Tensor:
        """Compute reference log-probs on the ranks of the reference, or on the actor's ranks with adapters off. `skip`
        records them under the step that the loop has set."""
        if self._ref is not None:
            return (await self._ref.infer_batch(request))["log_probs"]
        return (await self._actor.infer_batch(request, adapters=False))["log_probs"]


def compute_advantages(batch: TensorDict, config: Config, trainer_version: int, kl_coef: float | None) -> Experience:
    """Compute rewards, advantages and the off-policy correction from the forward passes. Changes `batch`.

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
        del batch["turn_rewards"]  # the ranks do not need them
    estimated = advantage_estimator(algorithm)(inputs)
    if "teacher_log_probs" in batch:
        log_ratio = batch["old_log_probs"].double() - batch.pop("teacher_log_probs").double()
        estimated = with_teacher(estimated, log_ratio, batch["response_mask"], config.teacher.coef)
        metrics["teacher/reverse_kl"] = float(log_ratio[batch["loss_mask"]].mean())
    batch["advantages"], batch["returns"] = estimated.advantages.float(), estimated.returns.float()
    # After a rewind a sample may come from versions that the Trainer has not reached again.
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
    """Return rewards of tokens (float64), their metrics, and the next adaptive KL coefficient."""
    algorithm, mask = config.algorithm, batch["response_mask"]
    scores, metrics = batch["rewards"][trajectories.first], Metrics()
    if "model_scores" in batch:
        # The last row is the whole conversation. The Rollouter has already weighted its own score.
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
        # If the configuration now has a fixed coefficient, the checkpoint's adaptive one is ignored.
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
    """Return metrics over the tokens to be trained, before the off-policy correction has rejected any."""
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


_RESULTS = {
    "old_log_probs": "log-probs of the policy",
    "ref_log_probs": "log-probs of the reference",
    "teacher_log_probs": "log-probs of the teacher",
    "values": "values of the critic",
}


def _check_finite(batch: TensorDict) -> None:
    for key, name in _RESULTS.items():
        if key in batch:
            wrong = (~batch[key].isfinite() & batch["response_mask"]).sum().item()
            if wrong:
                raise DataError(
                    f"{wrong} {name} are not finite, in a batch of {len(batch)} rows, so the batch cannot be trained "
                    "on. Check that model's weights, and the data types trainer.dtype, ref.dtype, teacher.dtype and "
                    "critic.dtype"
                )
    if "model_scores" in batch and not batch["model_scores"].isfinite().all():
        raise DataError(
            "the reward model's scores are not all finite: check reward_model.path and reward_model.worker.dtype"
        )
