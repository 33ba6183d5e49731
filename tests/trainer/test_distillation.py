"""On-policy distillation: the reverse KL divergence from a teacher in the advantages, and its gradient in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.types import FinishReason, Row, Sample, SampleId, Span
from asyncrl.observe.metrics.registry import describe
from tests.fakes.inline_group import InlineGroup
from tests.fakes.trainer_model import VOCAB, make_config, write_model
from trainer.algorithms.advantages import Advantages, with_teacher
from trainer.algorithms.losses import Rows, policy_terms
from trainer.algorithms.objective import PolicyLoss
from trainer.batches import RowRules, prepare_sample
from trainer.experience import ExperienceBuilder
from trainer.workers.placement import plan_groups

RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=VOCAB)
LENGTHS = (5, 2, 4, 7)
"""Response tokens of two samples with two trajectories each."""
REWARDS = (1.0, 0.0, 0.5, 0.5)
logits = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


@given(policy=logits, teacher=logits, coefficient=st.floats(0.1, 3.0), objective=st.sampled_from(["ppo", "reinforce"]))
def test_the_expected_gradient_is_that_of_the_reverse_kl(
    policy: list[float], teacher: list[float], coefficient: float, objective: str
) -> None:
    """On-policy, over all tokens that may be sampled, weighted with their probabilities."""
    scores = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    log_probs, wanted = scores.log_softmax(0), torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
    old = log_probs.detach()
    zeros, mask = torch.zeros(5, 1, dtype=torch.float64), torch.ones(5, 1, dtype=torch.bool)
    added = with_teacher(Advantages(zeros, zeros), (old - wanted)[:, None], mask, coefficient)
    algorithm = AlgorithmConfig.model_validate({"policy_loss": objective, "clip_ratio_c": None})
    terms = policy_terms(log_probs, old, added.advantages[:, 0], Rows(torch.arange(5), 5), algorithm)
    (gradient,) = torch.autograd.grad((old.exp() * terms.loss).sum(), scores, retain_graph=True)
    divergence = coefficient * (log_probs.exp() * (log_probs - wanted)).sum()
    (expected,) = torch.autograd.grad(divergence, scores)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@given(data=st.data(), coefficient=st.floats(0.1, 3.0))
def test_tokens_of_tools_stay_without_an_advantage(data: st.DataObject, coefficient: float) -> None:
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4)))
    ratio = torch.linspace(-2, 2, mask.numel(), dtype=torch.float64).reshape(mask.shape)
    before = Advantages(torch.ones_like(ratio) * mask, torch.full_like(ratio, 0.5) * mask)
    after = with_teacher(before, ratio.masked_fill(~mask, math.nan), mask, coefficient)
    torch.testing.assert_close(after.advantages, torch.where(mask, 1.0 - coefficient * ratio, 0.0))
    assert torch.equal(after.returns, before.returns)


# ------------------------------------------------------------------------------------------------ in ranks


async def start(config: Config) -> dict[str, InlineGroup]:
    """Start the roles in this process, in float64."""
    roles = {
        plan.role: await InlineGroup.start(replace(plan.spec_on("cpu"), float64=True), role=plan.role)
        for group in plan_groups(config)
        for plan in group.roles
    }
    await roles["actor"].set_loss_fn(PolicyLoss(config.algorithm, config.rollout.response_length))
    return roles


def plain_log_probs(path: Path, samples: list[Sample]) -> list[Tensor]:
    """Return the float64 log-probs of each row's response, one row at a time; the first model's have a gradient."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    found = []
    for row in (row for sample in samples for row in sample.rows):
        ids = torch.tensor([*row.prompt_ids.tolist(), *row.response_ids.tolist()])
        scores = model(ids[None]).logits[0].log_softmax(-1)
        found.append(scores[len(row.prompt_ids) - 1 : -1].gather(-1, ids[len(row.prompt_ids) :, None])[:, 0])
    return found


def make_samples(path: Path) -> list[Sample]:
    """Return samples whose behaviour policy was close to the model at `path`. One has a tool's token."""
    generator = np.random.default_rng(0)
    rows = [
        Row(
            prompt_ids=np.array([1, 2 + number // 2], dtype=np.int32),
            response_ids=generator.integers(0, VOCAB, length).astype(np.int32),
            response_mask=np.ones(length, dtype=np.bool_),
            rollout_log_probs=np.zeros(length, dtype=np.float32),
            spans=(Span(0, 0),),
            finish_reason=FinishReason.LENGTH,
            reward=reward,
            trajectory=number % 2,
        )
        for number, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]
    rows[0] = replace(rows[0], response_mask=np.array([True, True, False, True, True]))
    samples = [Sample(SampleId(0, 1), tuple(rows[:2])), Sample(SampleId(0, 2), tuple(rows[2:]))]
    scores = iter(plain_log_probs(path, samples))

    def behaved(row: Row) -> Row:
        drift = generator.normal(0.0, 0.2, len(row.response_ids))
        return replace(row, rollout_log_probs=(next(scores).detach().numpy() + drift).astype(np.float32))

    return [replace(sample, rows=tuple(behaved(row) for row in sample.rows)) for sample in samples]


def plain_loss(config: Config, samples: list[Sample], current: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """Return PPO's loss token by token, with the advantages of the rewards (GRPO, or none) and of the teacher."""
    rewards = np.array(REWARDS).reshape(2, 2)
    grouped = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    of_reward = np.zeros(4) if config.algorithm.adv_estimator == "on_policy_distill" else grouped.ravel()
    losses = []
    for number, row in enumerate(row for sample in samples for row in sample.rows):
        for token in np.flatnonzero(row.response_mask):
            behaviour = float(row.rollout_log_probs[token])
            advantage = of_reward[number] - config.teacher.coef * (behaviour - float(teacher[number][token]))
            ratio = torch.exp(current[number][token] - behaviour)
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            losses.append(torch.minimum(loss, torch.tensor(-3.0 * advantage)) if advantage < 0 else loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("estimator", ["on_policy_distill", "grpo"])
async def test_the_gradient_is_that_of_a_plain_loop(tmp_path: Path, estimator: str) -> None:
    student, teacher = write_model(tmp_path / "student"), write_model(tmp_path / "teacher", seed=1, hidden=24)
    config = make_config(
        student,
        trainer={"strategy": "local"},
        algorithm={"adv_estimator": estimator},
        teacher={"path": str(teacher), "coef": 0.7},
        reward={"function": "none"},
    )
    samples, roles = make_samples(student), await start(config)
    leased = [prepare_sample(sample, lease_id=1, trainer_version=0, rules=RULES) for sample in samples]
    builder = ExperienceBuilder(config, **roles)  # type: ignore[arg-type]
    batch, metrics, _ = await builder.make(leased, trainer_version=0)
    assert "teacher_log_probs" not in batch
    measured = await roles["actor"].forward_backward(batch)
    model = roles["actor"]._rank._workers["actor"].engine.model  # type: ignore[attr-defined]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for role in roles.values():
        await role.close()

    plain = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: plain)
        current = plain_log_probs(student, samples)
    wanted = [scores.detach() for scores in plain_log_probs(teacher, samples)]
    loss = plain_loss(config, samples, current, wanted)
    loss.backward()
    assert measured["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    pairs = zip((row for sample in samples for row in sample.rows), wanted, strict=True)
    gaps = [row.rollout_log_probs[row.response_mask] - scores.numpy()[row.response_mask] for row, scores in pairs]
    assert metrics["teacher/reverse_kl"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-5)
    describe("teacher/reverse_kl")


async def test_the_policy_becomes_its_teacher(tmp_path: Path) -> None:
    """A tiny policy samples, and is trained without any reward until it samples as the teacher, which is larger."""
    sections: dict[str, Any] = {"algorithm": {"adv_estimator": "on_policy_distill"}, "reward": {"function": "none"}}
    teacher = write_model(tmp_path / "teacher", seed=1, hidden=24)
    student = write_model(tmp_path / "student")
    config = make_config(student, trainer={"strategy": "local"}, teacher={"path": str(teacher)}, **sections)
    roles = await start(config)
    builder = ExperienceBuilder(config, **roles)  # type: ignore[arg-type]
    model = roles["actor"]._rank._workers["actor"].engine.model  # type: ignore[attr-defined]
    generator, history = torch.Generator().manual_seed(0), []
    for _ in range(60):
        with torch.no_grad():
            prompts = torch.tensor([[1, 2 + number % 4] for number in range(32)])
            scores = model(prompts).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        old = scores.gather(-1, drawn).float().numpy()
        samples = [one_token(number, prompts[number], drawn[number], old[number]) for number in range(32)]
        leased = [prepare_sample(sample, lease_id=1, trainer_version=0, rules=RULES) for sample in samples]
        batch, metrics, _ = await builder.make(leased, trainer_version=0)
        await roles["actor"].train_batch(batch)
        history.append(metrics["teacher/reverse_kl"])
    for role in roles.values():
        await role.close()
    assert np.mean(history[:5]) > 0.5
    assert np.mean(history[-10:]) < 0.4 * np.mean(history[:5])


def one_token(number: int, prompt: Tensor, response: Tensor, log_prob: np.ndarray) -> Sample:
    row = Row(
        prompt_ids=prompt.numpy().astype(np.int32),
        response_ids=response.numpy().astype(np.int32),
        response_mask=np.ones(1, dtype=np.bool_),
        rollout_log_probs=log_prob,
        spans=(Span(0, 0),),
        finish_reason=FinishReason.LENGTH,
        reward=0.0,
        trajectory=0,
    )
    return Sample(SampleId(0, number + 1), (row,))
