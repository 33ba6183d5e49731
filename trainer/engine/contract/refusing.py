"""Bad input: a typed error on every rank, and nothing changed."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.failures import BugError, ConfigError, DataError
from trainer.algorithms.objective import PolicyLoss
from trainer.engine.base import LossParts, Tokens, TokenScores
from trainer.engine.contract.reference import make_batch
from trainer.engine.contract.setting import (
    Setting,
    check,
    copies,
    make_loss,
    one_step,
    raises,
    same_step,
    same_weights,
    share_of,
    true,
    two_steps,
    weights_of,
)
from trainer.engine.registry import EngineRegistry


@check()
def bad_input_is_refused_on_every_rank(setting: Setting) -> None:
    engine, batch, loss = setting.engine(), make_batch(6, 1), make_loss()
    before = copies(weights_of(engine))
    odd = batch.clone()
    odd["input_ids"][-1, 0] = 10**6
    raises(DataError, "vocabulary", lambda: engine.forward_backward(share_of(engine, odd), loss))
    raises(DataError, "vocabulary", lambda: engine.infer(share_of(engine, odd)))
    none = batch.clone()
    none["loss_mask"] = torch.zeros_like(none["loss_mask"])
    raises(DataError, "trained token", lambda: engine.forward_backward(share_of(engine, none), loss))
    same_weights(weights_of(engine), before, 0.0, "after refused batches")
    missing = setting.spec(path=str(setting.directory / "nothing"))
    raises(ConfigError, "model.path", lambda: EngineRegistry.new(missing))
    raises(ConfigError, "float16", lambda: setting.engine(dtype="float16"))
    raises(ConfigError, "temperature", lambda: setting.engine(temperature=0.0))


@check()
def a_pass_that_fails_leaves_no_gradient(setting: Setting) -> None:
    """After zero_grad, that is; the loss fails on every rank, in its second micro-batch."""
    engine, batch = setting.engine(float64=True, ppo_max_token_len=1), make_batch(6, 1)
    share = share_of(engine, batch)
    for _ in range(2):
        raises(DataError, "a loss", lambda: engine.forward_backward(share, _FailsLater()))
        engine.zero_grad()
    same_step(two_steps(engine, batch, make_loss()), one_step(setting, batch))


@check()
def a_step_needs_a_gradient(setting: Setting) -> None:
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    stepped = two_steps(engine, batch, make_loss())
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    engine.forward_backward(share_of(engine, batch), make_loss())
    engine.zero_grad()
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    true(engine.step == 2, f"{engine.step} steps were counted, of 2 taken")
    same_step(stepped, one_step(setting, batch))


@check()
def a_rank_with_nothing_to_train_keeps_company(setting: Setting) -> None:
    batch = make_batch(6, 1)
    filled = TensorDict.cat([batch, batch[:2]])
    filled["loss_mask"][6:] = False
    filled["old_log_probs"][6:] = -math.inf  # whatever stands there is never looked at
    same_step(one_step(setting, filled, first=6), one_step(setting, batch))


class _FailsLater(PolicyLoss):
    """Of the second micro-batch it sees."""

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig(), 20)
        self._calls = 0

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        self._calls += 1
        if self._calls == 2:
            raise DataError("a loss that fails")
        return super().__call__(scores, tokens)
