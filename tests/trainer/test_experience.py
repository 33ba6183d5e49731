"""From samples to the batch of a step: calls to roles, and the arithmetic compared with plain float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError
from asyncrl.core.types import Sample, SampleId, Span
from asyncrl.observe.metrics.registry import describe
from skip import SkipManager
from tests.fakes.advantage_references import gae
from tests.fakes.trainer_parts import FakeGroup, forked, make_sample
from trainer.batches import RowRules, TrainSample, prepare_sample
from trainer.experience import Experience, ExperienceBuilder

RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=None)
VERSION = 5
LENGTHS = (4, 2, 3)
REWARDS = ((1.0, 0.0), (0.5, 0.25), (0.0, 0.0))


def samples(**changes: Any) -> list[TrainSample]:
    """Return three groups of two responses with different lengths and ages; the first has a tool token."""
    made: list[Sample] = []
    for index, (length, rewards) in enumerate(zip(LENGTHS, REWARDS, strict=True), start=1):
        sample = make_sample(SampleId(0, index), rewards, length=length, spans=[Span(0, index)])
        made.append(replace(sample, **changes))
    mask = np.array([True, False, True, True])
    made[0] = replace(made[0], rows=tuple(replace(row, response_mask=mask) for row in made[0].rows))
    return [prepare_sample(sample, lease_id=1, trainer_version=VERSION, rules=RULES) for sample in made]


def answers(key: str, seed: int, *, scale: float = 0.2, offset: float = -1.0) -> FakeGroup:
    """Return a role whose only result, `key`, is random numbers that depend on `seed` and the shape of the batch."""

    def score(batch: TensorDict) -> TensorDict:
        shape = (len(batch),) if key == "scores" else tuple(batch["response_mask"].shape)
        generator = torch.Generator().manual_seed(seed)
        drawn = offset + scale * torch.randn(shape, generator=generator)
        return TensorDict({key: drawn}, batch_size=[len(batch)])

    group = FakeGroup()
    group.scores = score
    return group


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"rollout": {"n": 2, "response_length": 4}} | sections)


async def make(config: Config, made: list[TrainSample] | None = None, **roles: FakeGroup) -> Experience:
    roles = {"actor": FakeGroup()} | roles
    builder = ExperienceBuilder(config, **roles)
    kl_coef = None
    experience = await builder.make(made or samples(), trainer_version=VERSION, kl_coef=kl_coef)
    for name in experience.metrics:
        describe(name)
    return experience


def array(experience: Experience, key: str) -> np.ndarray:
    return experience.batch[key].double().numpy()


async def test_the_default_has_no_forward_pass_and_group_advantages() -> None:
    actor = FakeGroup()
    batch, metrics, kl_coef = await make(config_of(), actor=actor)
    assert actor.asked == []
    assert kl_coef is None
    assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])
    assert "is_weights" not in batch
    for group, rewards in enumerate(REWARDS):
        r = np.array(rewards)
        expected = np.zeros(2) if r[0] == r[1] else (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        for row in range(2):
            mask = batch["response_mask"][2 * group + row].numpy()
            wanted = np.where(mask, expected[row], 0.0)
            np.testing.assert_allclose(batch["advantages"][2 * group + row].numpy(), wanted, rtol=1e-6)
    assert batch["token_ages"][:, 0].tolist() == [4, 4, 3, 3, 2, 2]
    assert batch["token_ages"][0].tolist() == [4, 0, 4, 4]  # 0 for tokens that were not sampled
    assert batch["advantages"].dtype is batch["returns"].dtype is batch["token_ages"].dtype is torch.float32
    assert metrics["advantages/max"] == pytest.approx(float(batch["advantages"].max()))
    assert "reward/shaped_mean" not in metrics


@pytest.mark.parametrize("adapters", [False, True])
async def test_the_reference_is_a_separate_model_or_the_actor_without_adapters(adapters: bool) -> None:
    config = config_of(algorithm={"use_kl_loss": True}, model={"lora_rank": 4 if adapters else 0})
    actor, ref = answers("log_probs", 1), answers("log_probs", 2)
    batch, _, _ = await make(config, actor=actor, **({} if adapters else {"ref": ref}))
    assert (actor.asked, ref.asked) == (([("infer", False)], []) if adapters else ([], [("infer", True)]))
    asked = actor if adapters else ref
    torch.testing.assert_close(batch["ref_log_probs"], asked.scores(batch)["log_probs"])


@pytest.mark.parametrize("adapters", [False, True])
async def test_the_reference_is_computed_once_and_then_replayed(tmp_path: Path, adapters: bool) -> None:
    sections = {
        "algorithm": {"use_kl_loss": True, "rollout_correction": {"bypass_mode": False}},
        "model": {"lora_rank": 4 if adapters else 0},
    }
    section = {"enable": True, "dump_dir": str(tmp_path), "steps": "1-2"}
    config = config_of(**sections, skip={"ref_log_prob": section})
    plain = await make(
        config_of(**sections), actor=answers("log_probs", 1), **({} if adapters else {"ref": answers("log_probs", 2)})
    )
    for asks, step in ((True, 1), (False, 1), (True, 3), (True, 3)):
        actor, ref = answers("log_probs", 1), answers("log_probs", 2)
        with SkipManager.session(config):
            SkipManager.set_step(step)
            found = await make(config, actor=actor, **({} if adapters else {"ref": ref}))
        assert actor.asked == [("infer", True), *([("infer", False)] if adapters and asks else [])]
        assert ref.asked == ([("infer", True)] if asks and not adapters else [])
        assert found.batch.keys() == plain.batch.keys()
        for name in sorted(plain.batch.keys()):
            one, other = found.batch[name], plain.batch[name]
            assert (one.dtype, one.numpy().tobytes()) == (other.dtype, other.numpy().tobytes()), name


async def test_log_probs_of_the_policy_are_not_replayed(tmp_path: Path) -> None:
    section = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    config = config_of(algorithm={"rollout_correction": {"bypass_mode": False}}, skip={"ref_log_prob": section})
    with SkipManager.session(config):
        await make(config, actor=answers("log_probs", 1))
        assert SkipManager.status() == {"ref_log_prob": {}}


async def test_decoupled_ppo_computes_old_log_probs_and_weights() -> None:
    correction = {"bypass_mode": False, "rollout_is": "token", "rollout_is_threshold": 1.05}
    experience = await make(
        config_of(algorithm={"rollout_correction": correction}), actor=answers("log_probs", 3, scale=0.1)
    )
    old, behaviour = array(experience, "old_log_probs"), array(experience, "rollout_log_probs")
    mask = experience.batch["loss_mask"].numpy()
    ratio = np.exp(old - behaviour)
    wanted = np.where(mask, np.minimum(ratio, 1.05), 0.0)
    np.testing.assert_allclose(array(experience, "is_weights"), wanted, rtol=1e-5)
    inside = ratio[mask]
    assert experience.metrics["correction/clipped_share"] == pytest.approx(np.mean(inside > 1.05))
    assert experience.metrics["correction/is_weight_mean"] == pytest.approx(np.minimum(inside, 1.05).mean(), rel=1e-5)
    log_ratio = (old - behaviour)[mask]
    # k3 of KL(behaviour || proximal), from tokens of the behaviour policy
    assert experience.metrics["correction/mismatch_kl"] == pytest.approx(
        (np.expm1(log_ratio) - log_ratio).mean(), rel=1e-3
    )


async def test_rejected_tokens_are_not_in_the_loss_but_in_the_baseline_of_their_group() -> None:
    correction = {"bypass_mode": False, "rollout_rs": "token_k1", "rollout_rs_threshold": 0.1}
    config = config_of(algorithm={"rollout_correction": correction})
    experience = await make(config, actor=answers("log_probs", 3, scale=0.2))
    plain = await make(config_of())
    old, behaviour = array(experience, "old_log_probs"), array(experience, "rollout_log_probs")
    before = plain.batch["loss_mask"].numpy()
    wanted = before & (np.abs(old - behaviour) <= 0.1)
    assert 0 < wanted.sum() < before.sum()
    assert np.array_equal(experience.batch["loss_mask"].numpy(), wanted)
    assert torch.equal(experience.batch["response_mask"], plain.batch["response_mask"])
    assert torch.equal(experience.batch["advantages"], plain.batch["advantages"])
    assert experience.metrics["correction/rejected_share"] == pytest.approx(1 - wanted.sum() / before.sum())


async def test_an_adaptive_coefficient_continues() -> None:
    config = config_of(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}})
    builder = ExperienceBuilder(config, actor=FakeGroup(), ref=answers("log_probs", 4))
    experience = await builder.make(samples(), trainer_version=VERSION, kl_coef=0.7)
    assert experience.metrics["reward/kl_coef"] == 0.7
    assert experience.kl_coef is not None and 0.69 < experience.kl_coef < 0.71


async def test_a_fixed_coefficient_comes_from_the_configuration_and_not_from_a_checkpoint() -> None:
    config = config_of(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "fixed", "kl_coef": 0.05}})
    builder = ExperienceBuilder(config, actor=FakeGroup(), ref=answers("log_probs", 4))
    experience = await builder.make(samples(), trainer_version=VERSION, kl_coef=0.7)
    assert experience.metrics["reward/kl_coef"] == 0.05
    assert experience.kl_coef is None


async def test_gae_uses_the_values_of_the_critic() -> None:
    gamma, lam = 0.9, 0.8
    config = config_of(algorithm={"adv_estimator": "gae", "gamma": gamma, "lam": lam})
    critic = answers("values", 6, offset=0.3)
    experience = await make(config, critic=critic)
    batch, values = experience.batch, array(experience, "values")
    mask = batch["response_mask"].numpy()
    rewards = np.zeros_like(values)
    for row, reward in enumerate(np.ravel(REWARDS)):
        rewards[row, np.flatnonzero(mask[row])[-1]] = reward
    wanted, returns = map(np.array, gae(rewards.tolist(), mask.astype(int).tolist(), values.tolist(), gamma, lam))
    np.testing.assert_allclose(array(experience, "advantages"), wanted, atol=1e-5)
    np.testing.assert_allclose(array(experience, "returns"), returns, atol=1e-6)
    explained = 1 - (returns - values)[mask].var() / returns[mask].var()
    assert experience.metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-4)


async def test_the_greedy_baseline_is_subtracted() -> None:
    experience = await make(config_of(algorithm={"adv_estimator": "remax"}), samples(baseline_reward=0.5))
    mask = experience.batch["response_mask"].numpy()
    wanted = np.where(mask, (np.ravel(REWARDS) - 0.5)[:, None], 0.0)
    np.testing.assert_allclose(array(experience, "advantages"), wanted, atol=1e-6)
    assert experience.metrics["reward/baseline_mean"] == 0.5


MASKS = [[1, 0, 1], [1, 1]]
"""The response masks of the two rows into which the first trajectory of the second sample is forked."""
LABELS = [0, 1, 2, 2, 3, 4, 5]


def forked_samples(*turn_rewards: Any) -> list[TrainSample]:
    """Return samples with a forked trajectory."""
    made = [make_sample(SampleId(0, index), rewards) for index, rewards in enumerate(REWARDS, start=1)]
    made[1] = forked(made[1], 0, *MASKS, turn_rewards=turn_rewards)
    return [prepare_sample(sample, lease_id=1, trainer_version=VERSION, rules=RULES) for sample in made]


def by_trajectory(per_row: np.ndarray, labels: list[int]) -> np.ndarray:
    return np.array([per_row[np.array(labels) == label].sum(axis=0) for label in range(6)])


@pytest.mark.parametrize("forked", [False, True])
async def test_a_trajectory_has_one_score_and_counts_once_in_its_group(forked: bool) -> None:
    """The score combines the reward, the model's score of the last row, the overlong penalty and the KL of all rows."""
    config = config_of(
        algorithm={
            "use_kl_in_reward": True,
            "adv_estimator": "rloo",
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.01, "horizon": 100},
        },
        reward={"overlong_buffer": {"enable": True, "len": 2, "penalty_factor": 0.5}},
        reward_model={"placement": "worker", "path": "rm", "weight": 2.0},
        rollout={"n": 2, "response_length": 6 if forked else 4},
    )
    ref, model = answers("log_probs", 4), answers("scores", 5, offset=0.5)
    experience = await make(config, forked_samples() if forked else samples(), ref=ref, reward_model=model)
    batch, metrics = experience.batch, experience.metrics
    labels = LABELS if forked else list(range(6))
    if forked:
        assert batch["trajectories"].tolist() == LABELS
    mask = batch["response_mask"].numpy()
    kl = np.where(mask, array(experience, "old_log_probs") - array(experience, "ref_log_probs"), 0.0)
    model_scores = array(experience, "model_scores")[np.searchsorted(labels, range(6), side="right") - 1]
    lengths, free = ([4, 4, 5, 4, 4, 4], 4) if forked else (np.repeat(LENGTHS, 2), 2)
    punishment = -0.5 * np.clip((np.array(lengths) - free) / 2, 0, 1)
    scores = np.ravel(REWARDS) + 2.0 * model_scores + punishment - 0.1 * by_trajectory(kl.sum(axis=1), labels)
    for row, label in enumerate(labels):
        wanted = np.where(mask[row], scores[label] - scores[label ^ 1], 0.0)
        np.testing.assert_allclose(batch["advantages"][row].numpy(), wanted, rtol=1e-4, atol=1e-6)
    assert metrics["reward/kl"] == pytest.approx(kl.sum() / 6, rel=1e-5)
    assert metrics["reward/kl_coef"] == 0.1
    assert metrics["reward/overlong_mean"] == pytest.approx(punishment.mean())
    assert metrics["reward/model_mean"] == pytest.approx(model_scores.mean())
    assert metrics["reward/shaped_mean"] == pytest.approx(scores.mean(), rel=1e-5)
    error = np.clip(metrics["reward/kl"] / 0.01 - 1, -0.2, 0.2)
    assert experience.kl_coef == pytest.approx(0.1 * (1 + error * 6 / 100))


async def test_rows_have_the_trained_tokens_of_their_trajectory_after_rejection() -> None:
    correction = {"bypass_mode": False, "rollout_rs": "token_k1", "rollout_rs_threshold": 0.1}
    config = config_of(algorithm={"rollout_correction": correction})
    batch = (await make(config, forked_samples(), actor=answers("log_probs", 3, scale=0.2))).batch
    trained = batch["loss_mask"].numpy().sum(axis=1)
    assert 0 < trained.sum() < batch["response_mask"].sum()
    assert batch["trajectory_tokens"].tolist() == by_trajectory(trained, LABELS)[LABELS].tolist()
    assert "trajectory_tokens" not in (await make(config, actor=answers("log_probs", 3))).batch


async def test_gae_uses_turn_rewards_in_a_forked_trajectory() -> None:
    """The reward is 0.5, of which -0.25 is on token 0 of the first row and 1.0 on token 0 of the second row."""
    gamma, lam = 0.9, 0.8
    config = config_of(algorithm={"adv_estimator": "gae", "gamma": gamma, "lam": lam})
    experience = await make(config, forked_samples([(0, -0.25)], [(0, 1.0)]), critic=answers("values", 6, offset=0.3))
    batch, values = experience.batch, array(experience, "values")
    mask = batch["response_mask"].numpy()
    rewards = np.zeros_like(values)
    rewards[[0, 1, 4, 5, 6], 3] = np.delete(np.ravel(REWARDS), 2)
    rewards[2, [0, 2]] = -0.25, 0.75  # the reward of the second row is at the end of the first one
    rewards[3, [0, 1]] = 1.0, -0.25
    wanted, returns = map(np.array, gae(rewards.tolist(), mask.astype(int).tolist(), values.tolist(), gamma, lam))
    np.testing.assert_allclose(array(experience, "advantages"), wanted, atol=1e-5)
    np.testing.assert_allclose(array(experience, "returns"), returns, atol=1e-6)
    assert "turn_rewards" not in batch


async def test_turn_rewards_do_not_change_outcome_estimators() -> None:
    plain, split = [
        (await make(config_of(), forked_samples(*turns))).batch["advantages"]
        for turns in ((), ([(0, 0.1), (2, 0.7)], [(1, 1 / 3)]))
    ]
    assert torch.equal(plain, split)


@pytest.mark.parametrize(
    ("key", "role", "algorithm", "message"),
    [
        ("log_probs", "actor", {"rollout_correction": {"bypass_mode": False}}, "log-probs of the policy"),
        ("log_probs", "ref", {"use_kl_loss": True}, "log-probs of the reference"),
        ("log_probs", "teacher", {"adv_estimator": "on_policy_distill"}, "log-probs of the teacher"),
        ("values", "critic", {"adv_estimator": "gae"}, "values of the critic"),
        ("scores", "reward_model", {}, "reward model's scores"),
    ],
)
async def test_results_that_are_not_finite_are_refused(
    key: str, role: str, algorithm: dict[str, Any], message: str
) -> None:
    config = config_of(algorithm=algorithm, reward_model={"placement": "worker" if key == "scores" else "off"})
    with pytest.raises(DataError, match=message):
        await make(config, **{role: answers(key, 1, offset=float("nan"))})
