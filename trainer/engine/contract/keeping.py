"""State: steps not taken, checkpoints, resets, exports, adapters."""

from __future__ import annotations

import gc
import math
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from asyncrl.failures import ConfigError, DivergenceError
from trainer.engine import dist
from trainer.engine.contract.reference import close, make_batch, model_paths, plain_model, plain_scores
from trainer.engine.contract.setting import (
    OPTIM,
    SAME,
    SINGLE,
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


@check()
def a_step_that_is_not_finite_changes_nothing(setting: Setting) -> None:
    engine, same, loss = setting.engine(), setting.engine(), make_loss()
    batch = make_batch(6, 1)
    for one in (engine, same):
        one.optim_step(one.forward_backward(share_of(one, batch), loss)["loss"])
    before = copies(weights_of(engine))
    bad = batch.clone()
    bad["advantages"][-1] = math.nan  # on the last rank only
    figures = engine.forward_backward(share_of(engine, bad), loss)
    raises(DivergenceError, "step 2", lambda: engine.optim_step(figures["loss"]))
    figures = engine.forward_backward(share_of(engine, batch), loss)
    raises(DivergenceError, "step 2", lambda: engine.optim_step(math.inf if dist.rank() == 0 else figures["loss"]))
    true(engine.step == 1, "the step is not counted")
    same_weights(weights_of(engine), before, 0.0, "after a step that was not taken")
    for one in (engine, same):
        one.optim_step(one.forward_backward(share_of(one, batch), loss)["loss"])
    same_weights(weights_of(engine), copies(weights_of(same)), 0.0, "after the next step: the optimizer's state")


@check()
def a_checkpoint_goes_on_bit_for_bit(setting: Setting) -> None:
    directory = _fresh(setting, "steps")
    batch, loss, optim = make_batch(6, 1), make_loss(), OPTIM.model_copy(update={"decay": "linear", "warmup_steps": 1})
    engine = setting.engine(optim=optim)
    engine.plan(5)
    engine.optim_step(engine.forward_backward(share_of(engine, batch), loss)["loss"])
    engine.save(directory)
    outcomes = [engine.optim_step(engine.forward_backward(share_of(engine, batch), loss)["loss"]) for _ in range(2)]
    engine.finish_save()
    expected = copies(weights_of(engine))
    other = setting.engine(optim=optim)
    other.plan(5)
    for target in (engine, other):
        target.load(directory)
        again = [target.optim_step(target.forward_backward(share_of(target, batch), loss)["loss"]) for _ in range(2)]
        true(again == outcomes, f"steps after a load are {again}, before it {outcomes}")
        same_weights(weights_of(target), expected, 0.0, "after the same steps from a checkpoint")


@check()
def a_load_forgets_the_gradient(setting: Setting) -> None:
    directory = _fresh(setting, "pending")
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    engine.save(directory)
    engine.finish_save()
    engine.forward_backward(share_of(engine, make_batch(5, 2)), make_loss())
    engine.load(directory)
    same_step(two_steps(engine, batch, make_loss()), one_step(setting, batch))


@check(num_ranks=2)
def what_one_rank_cannot_read_is_refused_on_both(setting: Setting) -> None:
    whole, empty = _fresh(setting, "whole"), _fresh(setting, "empty")
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    stepped = two_steps(engine, batch, make_loss())
    engine.save(whole)
    engine.finish_save()
    other = setting.engine(float64=True)
    for rank in range(2):
        raises(ConfigError, "empty", partial(other.load, empty if dist.rank() == rank else whole))
    true(other.step == 0, "nothing was loaded")
    other.load(whole)
    same_weights(weights_of(other), stepped.weights, 0.0, "loaded at last")


@check()
def reset_is_a_fresh_engine(setting: Setting) -> None:
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    engine.optim_step(engine.forward_backward(share_of(engine, batch), make_loss())["loss"])
    gc.collect()
    models = _num_models()
    engine.reset()
    true(engine.step == 0, "no step was taken")
    true(_num_models() == models, f"after a reset there are {_num_models()} models, before it {models}")
    same_step(two_steps(engine, batch, make_loss()), one_step(setting, batch))


@check()
def exported_weights_are_those_of_the_files(setting: Setting) -> None:
    engine = setting.engine()
    saved = load_file(model_paths(setting.directory)["language_model"] / "model.safetensors")
    same_weights(weights_of(engine), saved, 0.0, "exported")
    half = dict(engine.weights("bfloat16"))
    if dist.rank() == 0:
        for name, tensor in half.items():
            true(tensor.dtype == torch.bfloat16 and tensor.is_contiguous(), f"{name} is bfloat16 and contiguous")
            true(torch.equal(tensor, saved[name].bfloat16()), f"{name} is the rounded weight")


@check()
def adapters_learn_and_switch_off(setting: Setting) -> None:
    engine, plain, batch = setting.engine(lora_rank=4), setting.engine(), make_batch(6, 1)
    share = share_of(engine, batch)
    base = plain.infer(share)["log_probs"]
    close(engine.infer(share)["log_probs"], base, SAME, "a fresh adapter changes nothing")
    for _ in range(2):
        engine.optim_step(engine.forward_backward(share, make_loss())["loss"])
    with engine.adapters_off():
        close(engine.infer(share)["log_probs"], base, SAME, "log-probs without the adapter")
    tuned = engine.infer(share)["log_probs"]
    merged, before = weights_of(engine), weights_of(plain)
    if dist.rank() == 0:
        true(float((tuned - base).abs().max()) > 1e-3, "two steps change the log-probs")
        true(merged.keys() == before.keys(), "merged weights have the model's own names")
        model = plain_model(model_paths(setting.directory)["language_model"], "language_model", torch.float32)
        model.load_state_dict(merged, strict=False)
        with torch.no_grad():
            for number in range(len(share)):
                expected, _ = plain_scores(model, "language_model", share[number])
                close(tuned[number][: len(expected)], expected, SINGLE, f"log-probs of merged weights, row {number}")
    raises(ConfigError, "lora_rank", lambda: plain.adapters_off().__enter__())


def _fresh(setting: Setting, name: str) -> Path:
    """A directory that all ranks see."""
    directory = setting.directory / setting.backend / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _num_models() -> int:
    return sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects())
