"""A tiny model learns the rewarded tokens from its own samples, through rows, experience, losses and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.core.records import Metrics
from asyncrl.core.types import FinishReason, Row, Sample, SampleId, Span
from tests.fakes.inline_group import InlineGroup
from tests.fakes.trainer_model import VOCAB, make_config, write_model
from trainer.algorithms.objective import PolicyLoss, ValueLoss
from trainer.batches import RowRules, prepare_sample
from trainer.experience import ExperienceBuilder
from trainer.workers.placement import plan_groups, reference_is_actor

LENGTH, GROUP, GROUPS, STEPS = 4, 8, 4, 30
REWARDED = 3
RULES = RowRules(mask_beyond=None, group_filter=None, vocab_size=VOCAB)


class Run:
    """The roles of a configuration in this process."""

    def __init__(self, config: Config, roles: dict[str, InlineGroup]) -> None:
        self.config = config
        self.roles = roles
        self.actor = roles["actor"]
        self.experience = ExperienceBuilder(config, **roles)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(0)
        self.kl_coef: float | None = None

    @classmethod
    async def start(cls, config: Config) -> Run:
        roles = {
            plan.role: await InlineGroup.start(plan.spec_on("cpu"), role=plan.role)
            for group in plan_groups(config)
            for plan in group.roles
        }
        await roles["actor"].set_loss_fn(PolicyLoss(config.algorithm, config.rollout.response_length))
        if "critic" in roles:
            await roles["critic"].set_loss_fn(ValueLoss(config.critic.cliprange_value))
        return cls(config, roles)

    async def close(self) -> None:
        for group in self.roles.values():
            await group.close()

    def draw(self, index: int) -> Sample:
        """Sample `GROUP` responses to one prompt; the reward is the share of `REWARDED` tokens."""
        prompt = torch.tensor([1 + index % 5, 2])
        model = self.actor._rank._workers["actor"].engine.model  # type: ignore[attr-defined]
        tokens, log_probs = prompt.repeat(GROUP, 1), []
        with torch.no_grad():
            for _ in range(LENGTH):
                logits = model(tokens).logits[:, -1].log_softmax(-1)
                drawn = torch.multinomial(logits.exp(), 1, generator=self.generator)
                log_probs.append(logits.gather(-1, drawn))
                tokens = torch.cat([tokens, drawn], dim=1)
        responses = tokens[:, len(prompt) :].numpy().astype(np.int32)
        behaviour = torch.cat(log_probs, dim=1).numpy()
        rows = tuple(
            Row(
                prompt_ids=prompt.numpy().astype(np.int32),
                response_ids=responses[row],
                response_mask=np.ones(LENGTH, dtype=np.bool_),
                rollout_log_probs=behaviour[row],
                spans=(Span(0, 0),),
                finish_reason=FinishReason.LENGTH,
                reward=float((responses[row] == REWARDED).mean()),
                trajectory=row,
            )
            for row in range(GROUP)
        )
        return Sample(SampleId(0, index + 1), rows)

    async def step(self, number: int) -> tuple[float, Metrics]:
        """Run a step, and return the mean reward before it and its metrics."""
        drawn = [self.draw(number * GROUPS + index) for index in range(GROUPS)]
        samples = [prepare_sample(sample, lease_id=1, trainer_version=0, rules=RULES) for sample in drawn]
        batch, metrics, self.kl_coef = await self.experience.make(samples, trainer_version=0, kl_coef=self.kl_coef)
        if "critic" in self.roles:
            metrics |= await self.roles["critic"].train_batch(batch)
        metrics |= await self.actor.train_batch(batch)
        return float(np.mean([sample.rewards for sample in samples])), metrics


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"algorithm": {"adv_estimator": "gae"}, "critic": {"optim": {"lr": 0.01}}}, id="ppo"),
        pytest.param(
            {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.01}, "model": {"lora_rank": 8, "lora_alpha": 32.0}},
            id="grpo-kl-lora",
        ),
        pytest.param(
            {"algorithm": {"use_kl_in_reward": True, "rollout_correction": {"bypass_mode": False}}},
            id="decoupled-kl-in-reward",
        ),
    ],
)
async def test_a_policy_learns_rewarded_tokens(tmp_path: Path, sections: dict[str, Any]) -> None:
    adapters = sections.get("model", {})
    others = {name: section for name, section in sections.items() if name != "model"}
    config = make_config(write_model(tmp_path), trainer={"strategy": "local"}, **others)
    config = config.model_copy(update={"model": config.model.model_copy(update=adapters)})
    run = await Run.start(config)
    assert reference_is_actor(config) == bool(adapters)
    history = []
    for number in range(STEPS):
        reward, metrics = await run.step(number)
        history.append(reward)
        # on-policy: the engine scores the tokens as they were drawn
        assert abs(metrics["rollout/mismatch_kl"]) < 1e-6
        assert abs(metrics["actor/ratio_mean"] - 1) < 1e-4
    await run.close()
    assert np.mean(history[:3]) < 3 / VOCAB
    assert np.mean(history[-3:]) > 0.6
    if config.needs_critic:
        assert metrics["critic/return_mean"] > 0.6
        assert metrics["critic/value_mean"] == pytest.approx(metrics["critic/return_mean"], abs=0.2)
    if config.algorithm.use_kl_in_reward:
        assert metrics["reward/kl"] > 1.0  # in nats per response: the policy moved away from its initial state
