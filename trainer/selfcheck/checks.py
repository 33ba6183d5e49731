"""Checks of the engine contract: results equal those of a plain loop, state survives, all ranks refuse bad input."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.trainer_rules import STRATEGIES_WITH_MESHES
from asyncrl.core.failures import BugError, ConfigError, DataError, DivergenceError
from trainer.algorithms.objective import PolicyLoss
from trainer.engines import dist
from trainer.engines.base import BaseEngine, Loss, LossParts, ModelType, Tokens, TokenScores
from trainer.engines.compute.micro_batches import activations_on_cpu
from trainer.engines.registry import find_engine, new_engine
from trainer.engines.replicated import DdpEngine
from trainer.selfcheck.setting import (
    CHECKS,
    EXACT,
    EXPERTS,
    OPTIM,
    SAME,
    SINGLE,
    Check,
    CheckSetting,
    Reference,
    StepResult,
    check,
    close,
    copies,
    make_batch,
    make_loss,
    model_paths,
    one_step,
    plain_model,
    plain_scores,
    raises,
    same_step,
    same_weights,
    share_of,
    take_step,
    true,
    two_steps,
    weights_of,
)


@check()
def policy_steps_equal_the_reference(setting: CheckSetting) -> None:
    _follow_the_reference(setting, make_loss())


@check()
def policy_steps_with_kl_and_entropy_equal_the_reference(setting: CheckSetting) -> None:
    loss = make_loss(loss_agg_mode="seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.05)
    _follow_the_reference(setting, loss, temperature=0.7)


@check()
def rows_of_one_trajectory_count_as_one(setting: CheckSetting) -> None:
    loss, batch = make_loss(loss_agg_mode="seq-mean-token-mean"), make_batch(8, 6)
    batch["loss_mask"][1] = False  # no token of one row of a trajectory is trained
    batch["loss_mask"][6] = False  # no token of a whole trajectory is trained
    batch["trajectories"] = torch.tensor([0, 0, 0, 1, 2, 2, 3, 4])
    trained = batch["loss_mask"].sum(dim=1)
    same = batch["trajectories"][:, None] == batch["trajectories"]
    batch["trajectory_tokens"] = (same * trained).sum(dim=1)
    engine = setting.engine(float64=True, ppo_max_token_len=48)
    _step_as_the_reference(Reference(setting.spec(), loss), engine, loss, batch, first=2)


@check("value_model")
def value_steps_equal_the_reference(setting: CheckSetting) -> None:
    _follow_the_reference(setting, make_loss("value_model"), "value_model")


def _follow_the_reference(
    setting: CheckSetting,
    loss: Loss,
    model_type: ModelType = "language_model",
    *,
    temperature: float = 1.0,
    tolerance: float = EXACT,
    **changes: Any,
) -> None:
    """Compare three steps, with rows of unequal length that are unevenly divided over ranks, in many micro-batches."""
    reference = Reference(setting.spec(model_type, temperature=temperature, **changes), loss)
    engine = setting.engine(model_type, float64=True, temperature=temperature, ppo_max_token_len=48, **changes)
    for seed, first in ((1, 4), (2, 7), (3, 1)):
        _step_as_the_reference(reference, engine, loss, make_batch(8, seed), first=first, tolerance=tolerance)
    same_weights(weights_of(engine), reference.weights(), 10 * tolerance, "after three steps")


@check(num_ranks=(2, 4), backends=STRATEGIES_WITH_MESHES)
def groups_of_ranks_with_copies_equal_the_reference(setting: CheckSetting) -> None:
    directory, batch = _fresh(setting, "copies"), make_batch(8, 3)
    for size in range(1, dist.world_size()):
        if dist.world_size() % size:
            raises(ConfigError, "does not divide", partial(setting.engine, fsdp_size=size))
            continue
        _follow_the_reference(setting, make_loss(), fsdp_size=size)
        engine, other = setting.engine(fsdp_size=size, float64=True), setting.engine(float64=True)
        _continue_in(other, engine, directory, batch)


@check(num_ranks=(2, 4), backends=STRATEGIES_WITH_MESHES)
def ranks_that_share_layers_equal_the_reference(setting: CheckSetting) -> None:
    _follow_the_reference(setting, make_loss(), tensor_parallel_size=2)
    changes: dict[str, Any] = {"tensor_parallel_size": 2, "fsdp_size": 1, "path": str(setting.directory / "with_norms")}
    exact = 10 * EXACT if setting.backend == "torchtitan" else EXACT  # its norms do not compute in float32
    _follow_the_reference(setting, make_loss(), tolerance=exact, **changes)
    engine, plain, batch = setting.engine(tensor_parallel_size=2), setting.engine(), make_batch(8, 3)
    layout = engine.layout
    true(layout[2:] == (layout.rank // 2, layout.world_size // 2, layout.rank % 2 == 0), f"not the rows of {layout}")
    rows, expected = engine.infer(share_of(engine, batch)), plain.infer(batch)
    mine = share_of(engine, TensorDict({"number": torch.arange(8)}, batch_size=[8]))["number"]
    close(rows["log_probs"], expected["log_probs"][mine], SAME, "log-probs")
    reason = "num_key_value_heads" if dist.world_size() == 4 else "does not divide"
    raises(ConfigError, reason, partial(setting.engine, tensor_parallel_size=4))


@check("value_model", num_ranks=(2, 4), backends=("fsdp2",))
def ranks_that_share_layers_give_the_same_values(setting: CheckSetting) -> None:
    _follow_the_reference(setting, make_loss("value_model"), "value_model", tensor_parallel_size=2)


@check(num_ranks=(2, 4), backends=STRATEGIES_WITH_MESHES)
def checkpoints_do_not_depend_on_shared_layers(setting: CheckSetting) -> None:
    directory, batch = _fresh(setting, "shared"), make_batch(8, 3)
    for first, second in ((2, 1), (1, 2)):
        engine, other = (setting.engine(tensor_parallel_size=size, float64=True) for size in (first, second))
        _continue_in(other, engine, directory, batch)


@check(num_ranks=(2, 4), backends=("fsdp2",))
def ranks_that_share_experts_equal_the_reference(setting: CheckSetting) -> None:
    for name in ("qwen2_moe", "qwen3_moe"):
        _follow_with_experts(setting, name, tensor_parallel_size=2)
    directory, path = _fresh(setting, "shared_experts"), str(setting.directory / "qwen3_moe")
    engine, other = (setting.engine(tensor_parallel_size=size, float64=True, path=path) for size in (2, 1))
    _continue_in(other, engine, directory, make_batch(8, 3))


@check()
def balanced_experts_equal_the_reference(setting: CheckSetting) -> None:
    has_loss = find_engine(setting.backend).balances_experts
    reason = "no experts" if has_loss else "no load-balancing loss"
    raises(ConfigError, reason, partial(setting.engine, router_aux_loss_coef=0.1))
    if has_loss:
        for name in EXPERTS:
            _follow_with_experts(setting, name)


@check(num_ranks=(2, 4), backends=("fsdp2",))
def experts_fewer_than_ranks_equal_the_reference(setting: CheckSetting) -> None:
    _follow_with_experts(setting, "1_experts")
    _follow_with_experts(setting, "2_experts", tensor_parallel_size=2)
    directory, batch, path = _fresh(setting, "few_experts"), make_batch(8, 3), str(setting.directory / "1_experts")
    for first, second in ((None, 1), (1, None)):
        engine, other = (setting.engine(fsdp_size=size, float64=True, path=path) for size in (first, second))
        _continue_in(other, engine, directory, batch)


@check(num_ranks=(2, 4), backends=("fsdp2",))
def ranks_whose_experts_get_no_token_equal_the_reference(setting: CheckSetting) -> None:
    batch = make_batch(8, 3)
    batch["prompt_lens"][:] = batch["response_lens"][:] = 1  # each row is a micro-batch of one position
    batch["response_mask"][:, 1:] = batch["loss_mask"][:, 1:] = False
    changes: dict[str, Any] = {"path": str(setting.directory / "qwen3_moe"), "tensor_parallel_size": 2}
    engine = setting.engine(float64=True, ppo_max_token_len=1, **changes)
    reference = Reference(setting.spec(**changes), make_loss())
    _step_as_the_reference(reference, engine, make_loss(), batch, tolerance=10 * EXACT)


@check()
def the_load_of_experts_is_that_of_rows_with_trained_tokens(setting: CheckSetting) -> None:
    if not find_engine(setting.backend).balances_experts:
        return
    changes, batch = _with_experts(setting, "qwen3_moe"), make_batch(8, 3)
    batch["advantages"][::2] = 0.0
    batch["loss_mask"][5:] = False
    engine, reference = setting.engine(float64=True, **changes), Reference(setting.spec(**changes), make_loss())
    figures = engine.forward_backward(share_of(engine, batch, 5), make_loss())
    close(figures["actor/router_aux_loss"], reference.balance(batch).detach(), EXACT, "load-balancing loss")
    true(1 / 4 < figures["actor/busiest_expert_share"] <= 1 / 2, "share of the busiest of 4 experts, 2 of a token")
    plain = one_step(setting, batch, first=5, **changes)
    for other in ({"ppo_max_token_len": 1}, {"use_remove_padding": False}, {"gradient_checkpointing": True}):
        same_step(one_step(setting, batch, first=5, **changes, **other), plain)


@check(num_ranks=(2,))
def sequence_parallel_ranks_balance_experts_alike(setting: CheckSetting) -> None:
    if find_engine(setting.backend).balances_experts:
        changes = _with_experts(setting, "qwen3_moe")
        for limit in (48, 16384):
            parallel = one_step(setting, ulysses_sequence_parallel_size=2, ppo_max_token_len=limit, **changes)
            same_step(parallel, one_step(setting, **changes), SAME / 10)


def _with_experts(setting: CheckSetting, name: str) -> dict[str, Any]:
    """Return the settings of a mixture of experts with the load-balancing loss."""
    return {"path": str(setting.directory / name), "router_aux_loss_coef": 0.1}


def _follow_with_experts(setting: CheckSetting, name: str, **changes: Any) -> None:
    changes |= _with_experts(setting, name)
    _follow_the_reference(setting, make_loss(), tolerance=10 * EXACT, **changes)  # routers compute in float32


def _step_as_the_reference(
    reference: Reference,
    engine: BaseEngine,
    loss: Loss,
    *batches: TensorDict,
    first: int = 0,
    tolerance: float = EXACT,
) -> None:
    """Take one step on all batches, and compare its loss and its gradient norm with those of the reference."""
    expected, expected_norm = reference.step(*batches)
    total = 0.0
    for batch in batches:
        figures = engine.forward_backward(share_of(engine, batch, first), loss)
        close(figures["tokens"], float(batch["loss_mask"].sum()), 0.0, "trained tokens")
        total += figures["loss"]
    close(total, expected, tolerance, "loss")
    close(engine.optim_step(total).grad_norm, expected_norm, tolerance, "gradient norm")


@check()
def two_passes_before_a_step_add_up(setting: CheckSetting) -> None:
    loss, batches = make_loss(), [make_batch(6, 4), make_batch(5, 5)]
    reference, engine = Reference(setting.spec(), loss), setting.engine(float64=True)
    batches[1]["advantages"][::2] = 0.0
    _step_as_the_reference(reference, engine, loss, *batches)
    engine.forward_backward(share_of(engine, batches[0]), loss)
    engine.zero_grad()
    _step_as_the_reference(reference, engine, loss, batches[1])


@check()
def log_probs_and_entropies_equal_transformers(setting: CheckSetting) -> None:
    _infer_as_transformers(setting, "language_model", ("log_probs", "entropy"))


@check("value_model")
def values_equal_transformers(setting: CheckSetting) -> None:
    engine, batch = setting.engine("value_model"), make_batch(5, 1)
    close(engine.infer(share_of(engine, batch))["values"].abs().max(), 0.0, 0.0, "values of a head that starts at 0")
    take_step(engine, batch)
    weights = weights_of(engine)
    model = plain_model(model_paths(setting.directory)["value_model"], "value_model", torch.float32)
    if dist.rank() == 0:
        model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()}, strict=True)
        _compare_rows(engine, share_of(engine, batch), model, "value_model", ("values",))
    else:
        engine.infer(share_of(engine, batch))


@check("reward_model")
def scores_equal_transformers(setting: CheckSetting) -> None:
    _infer_as_transformers(setting, "reward_model", ("scores",))


def _infer_as_transformers(setting: CheckSetting, model_type: ModelType, keys: Sequence[str]) -> None:
    engine = setting.engine(model_type, ppo_max_token_len=48, optim=None)
    model = plain_model(model_paths(setting.directory)[model_type], model_type, torch.float32)
    for first in (3, 6):
        _compare_rows(engine, share_of(engine, make_batch(7, 1), first), model, model_type, keys)


def _compare_rows(
    engine: BaseEngine, batch: TensorDict, model: Any, model_type: ModelType, keys: Sequence[str]
) -> None:
    results = engine.infer(batch)
    with torch.no_grad():
        for number in range(len(batch)):
            expected = plain_scores(model, model_type, batch[number])
            for key, values in zip(keys, expected, strict=False):
                row = results[key][number]
                got = row[: len(values)] if row.ndim else row[None]
                close(got, values, SINGLE, f"{key} of row {number}")
                if row.ndim:
                    close(row[len(values) :].abs().sum(), 0.0, 0.0, f"{key} beyond row {number}")


@check()
def micro_batches_do_not_change_a_step(setting: CheckSetting) -> None:
    for limit in (1, 30):
        same_step(one_step(setting, ppo_max_token_len=limit), one_step(setting))


@check()
def packed_rows_equal_padded_ones(setting: CheckSetting) -> None:
    same_step(one_step(setting), one_step(setting, use_remove_padding=False))
    batch, found = make_batch(8, 2), []
    for flag in (True, False):
        engine = setting.engine(use_remove_padding=flag)
        rows = share_of(engine, batch)
        log_probs = engine.infer(rows)["log_probs"]
        loss, outcome = take_step(engine, batch)
        found.append((log_probs, loss, outcome.grad_norm))
    for name, packed, padded in zip(("log-probs", "loss", "gradient norm"), *found, strict=True):
        close(packed, padded, SAME, f"{name} in float32")


@check()
def gradient_checkpointing_gives_the_same_step(setting: CheckSetting) -> None:
    same_step(one_step(setting, gradient_checkpointing=True), one_step(setting))


@check()
def offloading_gives_the_same_step(setting: CheckSetting) -> None:
    offloaded = one_step(setting, param_offload=True, optimizer_offload=True, activation_offload=True)
    same_step(offloaded, one_step(setting))


@check(num_ranks=(2, 4), backends=STRATEGIES_WITH_MESHES)
def offloaded_activations_of_shared_layers_give_the_same_step(setting: CheckSetting) -> None:
    engine = setting.engine(tensor_parallel_size=2, float64=True)
    with activations_on_cpu(min_bytes=0):
        offloaded = two_steps(engine, make_batch(6, 1))
    same_step(offloaded, one_step(setting, tensor_parallel_size=2))


@check()
def moving_away_and_back_gives_the_same_step(setting: CheckSetting) -> None:
    engine, loss, batch = setting.engine(float64=True), make_loss(), make_batch(6, 1)
    engine.to("cpu")
    figures = engine.forward_backward(share_of(engine, batch), loss)
    engine.to("cpu")
    outcome = engine.optim_step(figures["loss"])
    engine.to("cpu", grad=False)
    engine.forward_backward(share_of(engine, batch), loss)
    second = engine.optim_step(0.0)
    same_step(StepResult([figures["loss"], outcome.grad_norm, second.grad_norm], weights_of(engine)), one_step(setting))


@check(num_ranks=(2,))
def sequence_parallel_ranks_give_the_same_step(setting: CheckSetting) -> None:
    parallel = one_step(setting, ulysses_sequence_parallel_size=2)
    same_step(parallel, one_step(setting), SAME / 10)
    engine, batch = setting.engine(ulysses_sequence_parallel_size=2), make_batch(5, 2)
    layout = engine.layout
    true(layout[2:] == (0, 1, layout.rank == 0), f"two ranks that share sequences get the same rows, not {layout}")
    plain = setting.engine()
    expected = plain.infer(batch)
    for key, values in engine.infer(batch).items():
        close(values, expected[key], SAME, key)


@check("value_model", num_ranks=(2,))
def sequence_parallel_ranks_give_the_same_values(setting: CheckSetting) -> None:
    batch, found = make_batch(6, 1), []
    for size in (2, 1):
        engine = setting.engine("value_model", float64=True, ulysses_sequence_parallel_size=size)
        for _ in range(2):
            loss, outcome = take_step(engine, batch)
        found.append((loss, outcome.grad_norm, engine.infer(batch)["values"]))
    for name, parallel, plain in zip(("loss", "gradient norm", "values"), *found, strict=True):
        close(parallel, plain, EXACT if name != "values" else SAME, name)


@check()
def rows_without_a_gradient_may_skip_the_backward_pass(setting: CheckSetting) -> None:
    batch = make_batch(8, 1)
    batch["advantages"][::2] = 0.0
    same_step(one_step(setting, batch), one_step(setting, batch, loss=_AllRows()))
    engine = setting.engine(float64=True)
    take_step(engine, batch)
    before = copies(weights_of(engine))
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    close(take_step(engine, batch)[1].grad_norm, 0.0, 0.0, "norm of a gradient of 0")
    after = weights_of(engine)
    if dist.rank() == 0:
        true(any((after[name] != before[name]).any() for name in before), "momentum must move the weights")


@check()
def passes_are_in_bfloat16_and_weights_in_float32(setting: CheckSetting) -> None:
    full, half = setting.engine(), setting.engine(dtype="bfloat16")
    batch = make_batch(6, 1)
    share = share_of(full, batch)
    error = float((full.infer(share)["log_probs"] - half.infer(share)["log_probs"]).abs().max())
    true(0 < error < 0.2, f"log-probs in bfloat16 are off by {error:.1e}; expected more than 0 and less than 0.2")
    take_step(half, batch)
    if dist.rank() == 0:
        fine = any((tensor != tensor.bfloat16().float()).any() for tensor in weights_of(half).values())
        true(fine, "weights after a step must be more precise than bfloat16")
    else:
        weights_of(half)


@check()
def weights_that_are_not_trained_are_in_bfloat16(setting: CheckSetting) -> None:
    batch = make_batch(6, 1)
    frozen, trained = setting.engine(dtype="bfloat16", optim=None), setting.engine(dtype="bfloat16")
    share = share_of(frozen, batch)
    error = float((frozen.infer(share)["log_probs"] - trained.infer(share)["log_probs"]).abs().max())
    true(error < 0.2, f"log-probs with weights in bfloat16 are off by {error:.1e}; expected less than 0.2")
    parameters = list(getattr(frozen, "model", torch.nn.Module()).parameters())
    dtypes = {parameter.dtype for parameter in parameters}
    true(dtypes <= {torch.bfloat16}, f"weights that are not trained must be bfloat16, not {dtypes}")


@check("value_model")
def values_in_bfloat16_come_from_a_float32_head(setting: CheckSetting) -> None:
    engine, full = (setting.engine("value_model", dtype=dtype) for dtype in ("bfloat16", "float32"))
    batch = make_batch(6, 1)
    share = share_of(engine, batch)
    for one in (engine, full):
        take_step(one, batch)
    _finer_than_bfloat16(engine.infer(share)["values"], full.infer(share)["values"])


@check("reward_model")
def scores_in_bfloat16_come_from_a_float32_head(setting: CheckSetting) -> None:
    engine, full = (setting.engine("reward_model", dtype=dtype) for dtype in ("bfloat16", "float32"))
    share = share_of(engine, make_batch(6, 1))
    _finer_than_bfloat16(engine.infer(share)["scores"], full.infer(share)["scores"])


def _finer_than_bfloat16(got: Tensor, full: Tensor) -> None:
    error = float((got - full).abs().max())
    true(0 < error < 0.2, f"values in bfloat16 are off by {error:.1e}; expected more than 0 and less than 0.2")
    true(bool((got != got.bfloat16().float()).any()), "values must be more precise than bfloat16")


@check()
def gradients_in_bfloat16_add_up_in_float32(setting: CheckSetting) -> None:
    """Many copies of one row, each in its own micro-batch, have the same gradient as two; powers of two are exact."""
    row = make_batch(1, 1)
    norms = []
    for times in (2, 32):
        engine = setting.engine(dtype="bfloat16", ppo_max_token_len=1)
        norms.append(take_step(engine, TensorDict.cat([row] * times))[1].grad_norm)
    close(norms[1] / norms[0], 1.0, 1e-5, "gradient norm of 32 equal rows against that of 2")


class _AllRows(PolicyLoss):
    """Runs a backward pass for every row."""

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig(), 20)

    def needs_gradient(self, batch: TensorDict) -> Tensor:
        return batch["loss_mask"].any(dim=1)


@check()
def a_step_that_is_not_finite_changes_nothing(setting: CheckSetting) -> None:
    engine, same, loss = setting.engine(), setting.engine(), make_loss()
    batch = make_batch(6, 1)
    for one in (engine, same):
        take_step(one, batch)
    before = copies(weights_of(engine))
    bad = batch.clone()
    bad["advantages"][-1] = math.nan  # on the last rank only
    figures = engine.forward_backward(share_of(engine, bad), loss)
    raises(DivergenceError, "step 2", lambda: engine.optim_step(figures["loss"]))
    figures = engine.forward_backward(share_of(engine, batch), loss)
    raises(DivergenceError, "step 2", lambda: engine.optim_step(math.inf if dist.rank() == 0 else figures["loss"]))
    true(engine.step == 1, "a step that is not taken must not be counted")
    same_weights(weights_of(engine), before, 0.0, "after a step that was not taken")
    for one in (engine, same):
        take_step(one, batch)
    same_weights(weights_of(engine), copies(weights_of(same)), 0.0, "after the next step: the optimizer's state")


@check()
def training_continues_from_a_checkpoint_bit_for_bit(setting: CheckSetting) -> None:
    directory = _fresh(setting, "steps")
    batch, optim = make_batch(6, 1), OPTIM.model_copy(update={"decay": "linear", "warmup_steps": 1})
    engine = setting.engine(optim=optim)
    engine.plan(5)
    take_step(engine, batch)
    engine.save(directory)
    outcomes = [take_step(engine, batch) for _ in range(2)]
    engine.finish_save()
    expected = copies(weights_of(engine))
    other = setting.engine(optim=optim)
    other.plan(5)
    if isinstance(other, DdpEngine) and dist.world_size() > 2:
        take_step(other, batch)  # DDP regroups gradients after its first step, which changes the order of their sums
    for target in (engine, other):
        target.load(directory)
        repeated = [take_step(target, batch) for _ in range(2)]
        true(repeated == outcomes, f"steps after a load are {repeated}, before it {outcomes}")
        same_weights(weights_of(target), expected, 0.0, "after the same steps from a checkpoint")


@check()
def a_load_forgets_the_gradient(setting: CheckSetting) -> None:
    directory = _fresh(setting, "pending")
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    engine.save(directory)
    engine.finish_save()
    engine.forward_backward(share_of(engine, make_batch(5, 2)), make_loss())
    engine.load(directory)
    same_step(two_steps(engine, batch), one_step(setting))


@check(num_ranks=(2,))
def what_one_rank_cannot_read_is_refused_on_both(setting: CheckSetting) -> None:
    whole, empty = _fresh(setting, "whole"), _fresh(setting, "empty")
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    stepped = two_steps(engine, batch)
    engine.save(whole)
    engine.finish_save()
    other = setting.engine(float64=True)
    for rank in range(2):
        raises(ConfigError, "empty", partial(other.load, empty if dist.rank() == rank else whole))
    true(other.step == 0, "a refused load must not change the step count")
    other.load(whole)
    same_weights(weights_of(other), stepped.weights, 0.0, "after a load on both ranks")


@check()
def reset_is_a_fresh_engine(setting: CheckSetting) -> None:
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    take_step(engine, batch)
    gc.collect()
    models = _num_models()
    engine.reset()
    true(engine.step == 0, "a reset must set the step count to 0")
    true(_num_models() == models, f"after a reset there are {_num_models()} models, before it {models}")
    same_step(two_steps(engine, batch), one_step(setting))


@check()
def exported_weights_are_those_of_the_files(setting: CheckSetting) -> None:
    engine = setting.engine()
    saved = load_file(model_paths(setting.directory)["language_model"] / "model.safetensors")
    same_weights(weights_of(engine), saved, 0.0, "exported")
    half = dict(engine.weights("bfloat16"))
    if dist.rank() == 0:
        for name, tensor in half.items():
            true(tensor.dtype == torch.bfloat16 and tensor.is_contiguous(), f"{name} must be bfloat16 and contiguous")
            true(torch.equal(tensor, saved[name].bfloat16()), f"{name} must be the rounded weight")


@check()
def adapters_learn_and_switch_off(setting: CheckSetting) -> None:
    engine, plain, batch = setting.engine(lora_rank=4), setting.engine(), make_batch(6, 1)
    share = share_of(engine, batch)
    base = plain.infer(share)["log_probs"]
    close(engine.infer(share)["log_probs"], base, SAME, "a fresh adapter changes nothing")
    for _ in range(2):
        take_step(engine, batch)
    with engine.adapters_off():
        close(engine.infer(share)["log_probs"], base, SAME, "log-probs without the adapter")
    tuned = engine.infer(share)["log_probs"]
    merged, before = weights_of(engine), weights_of(plain)
    if dist.rank() == 0:
        true(float((tuned - base).abs().max()) > 1e-3, "two steps must change the log-probs")
        true(merged.keys() == before.keys(), "merged weights must have the model's own names")
        model = plain_model(model_paths(setting.directory)["language_model"], "language_model", torch.float32)
        model.load_state_dict(merged, strict=False)
        with torch.no_grad():
            for number in range(len(share)):
                expected, _ = plain_scores(model, "language_model", share[number])
                close(tuned[number][: len(expected)], expected, SINGLE, f"log-probs of merged weights, row {number}")
    raises(ConfigError, "lora_rank", lambda: plain.adapters_off().__enter__())


def _continue_in(other: BaseEngine, engine: BaseEngine, directory: Path, batch: TensorDict) -> None:
    """Check that another engine goes on from the checkpoint of a step as the engine that has written it."""
    take_step(engine, batch)
    engine.save(directory)
    engine.finish_save()
    other.load(directory)
    same_step(two_steps(other, batch), two_steps(engine, batch))


def _fresh(setting: CheckSetting, name: str) -> Path:
    """Create a directory that all ranks see."""
    directory = setting.directory / setting.backend / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _num_models() -> int:
    return sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects())


@check()
def bad_input_is_refused_on_every_rank(setting: CheckSetting) -> None:
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
    raises(ConfigError, "model.path", lambda: new_engine(missing))
    raises(ConfigError, "float16", lambda: setting.engine(dtype="float16"))
    raises(ConfigError, "temperature", lambda: setting.engine(temperature=0.0))


@check()
def a_pass_that_fails_leaves_no_gradient(setting: CheckSetting) -> None:
    """The loss fails on every rank in its second micro-batch, and `zero_grad` discards the first one's gradient."""
    engine, batch = setting.engine(float64=True, ppo_max_token_len=1), make_batch(6, 1)
    share = share_of(engine, batch)
    for _ in range(2):
        raises(DataError, "a loss", lambda: engine.forward_backward(share, _FailsLater()))
        engine.zero_grad()
    same_step(two_steps(engine, batch), one_step(setting))


@check()
def a_step_needs_a_gradient(setting: CheckSetting) -> None:
    engine, batch = setting.engine(float64=True), make_batch(6, 1)
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    stepped = two_steps(engine, batch)
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    engine.forward_backward(share_of(engine, batch), make_loss())
    engine.zero_grad()
    raises(BugError, "forward_backward", lambda: engine.optim_step(0.0))
    true(engine.step == 2, f"{engine.step} steps were counted, of 2 taken")
    same_step(stepped, one_step(setting))


@check()
def a_rank_without_trained_tokens_does_not_change_the_step(setting: CheckSetting) -> None:
    batch = make_batch(6, 1)
    filled = TensorDict.cat([batch, batch[:2]])
    filled["loss_mask"][6:] = False
    filled["old_log_probs"][6:] = -math.inf  # these values are not used
    same_step(one_step(setting, filled, first=6), one_step(setting))


class _FailsLater(PolicyLoss):
    """A loss that fails in its second micro-batch."""

    def __init__(self) -> None:
        super().__init__(AlgorithmConfig(), 20)
        self._calls = 0

    def __call__(self, scores: TokenScores, tokens: Tokens) -> LossParts:
        self._calls += 1
        if self._calls == 2:
            raise DataError("a loss that fails")
        return super().__call__(scores, tokens)


def checks_of(backend: str, device: str, num_ranks: int) -> list[Check]:
    """Return the checks that apply to a backend: those for its model types and this number of ranks.

    Raises:
        ConfigError: there is no such backend, or its package is missing.
    """
    able = find_engine(backend).model_types
    return [
        one
        for one in CHECKS
        if one.model_type in able
        and (not one.num_ranks or num_ranks in one.num_ranks)
        and (not one.backends or backend in one.backends)
    ]
