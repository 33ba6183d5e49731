"""The load-balancing loss of experts: its value, what counts, and which models have it. Steps with it are in the
contract (`trainer.selfcheck.checks`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl.core.failures import ConfigError
from tests.fakes.trainer_model import SHAPE, make_spec, random_model
from trainer.engines.compute.experts import BalancingLoss, ExpertLoad, Routers
from trainer.engines.compute.media import MediaInputs
from trainer.engines.compute.packing import MicroBatch
from trainer.engines.compute.scorer import Scorer
from trainer.engines.registry import new_engine
from trainer.selfcheck.setting import make_batch, make_loss

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, head_dim=8),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, pad_token_id=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_the_loss_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    routers, ids = Routers(model, 0.1), torch.randint(0, 24, (3, 7))
    real = torch.arange(7) < torch.tensor([7, 4, 2])[:, None]
    with torch.no_grad(), routers.recording() as logits:
        model(input_ids=ids)
    load, losses = routers.load(logits, real), []
    for layer in range(2):
        balancing = BalancingLoss(1.0)
        part = balancing.part(ExpertLoad(*(sums[layer : layer + 1] for sums in load[:2]), load.tokens))
        expected = load_balancing_loss_func((logits[layer].reshape(21, 4),), 4, 2, real)
        torch.testing.assert_close(part, expected)
        losses.append(part)
    balancing = BalancingLoss(0.5)
    torch.testing.assert_close(balancing.part(load), 0.5 * torch.stack(losses).mean())
    metrics = balancing.metrics()
    assert metrics["actor/router_aux_loss"] == pytest.approx(float(torch.stack(losses).mean()))
    assert metrics["actor/busiest_expert_share"] == pytest.approx(float(load.chosen.max()) / (2 * int(real.sum())))


def test_the_loss_ranges_from_the_experts_of_a_token_to_all_experts() -> None:
    even, one = torch.full((1, 4), 0.25), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    ten = torch.tensor(10)
    assert float(BalancingLoss(1.0).part(ExpertLoad(even * 20, even * 10, ten))) == pytest.approx(2.0)
    assert float(BalancingLoss(1.0).part(ExpertLoad(one * 10, one * 10, ten))) == pytest.approx(4.0)


def test_the_gradient_is_that_of_the_loss_with_the_same_choices() -> None:
    """Compare with finite differences, for two micro-batches."""
    config = Qwen3MoeConfig(**SHAPE | {"num_hidden_layers": 1}, **EXPERTS, num_experts=4, head_dim=8)
    model = random_model(config, "language_model").double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    routers, parts = Routers(model, 0.1), torch.randint(0, 24, (2, 3, 7))

    def counted() -> tuple[BalancingLoss, list[ExpertLoad]]:
        balancing, loads = BalancingLoss(0.1), []
        for ids in parts:
            with routers.recording() as logits:
                model(input_ids=ids)
            loads.append(routers.load(logits, torch.ones_like(ids, dtype=torch.bool)))
        balancing.count(loads)
        return balancing, loads

    balancing, loads = counted()
    torch.stack([balancing.part(load) for load in loads]).sum().backward()
    for name in ("mlp.gate", "self_attn.o_proj"):
        weight: Any = model.get_submodule(f"model.layers.0.{name}").weight
        direction, values = torch.randn_like(weight), []
        with torch.no_grad():
            for step in (1e-4, -2e-4):
                weight += step * direction
                values.append(counted()[0].value)
        slope = float((weight.grad * direction).sum())
        assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-2) and abs(slope) > 1e-4


@pytest.mark.parametrize(("coef", "limit", "passes"), [(0.0, 1, 4), (0.5, 1, 8), (0.5, 2048, 1)])
def test_what_it_costs(tmp_path: Path, coef: float, limit: int, passes: int) -> None:
    random_model(MODELS["qwen3_moe"], "language_model").save_pretrained(tmp_path)
    engine: Any = new_engine(replace(make_spec(tmp_path, ppo_max_token_len=limit), router_aux_loss_coef=coef))
    calls: list[Any] = []
    engine.model.register_forward_pre_hook(lambda *call: calls.append(call))
    figures = engine.forward_backward(make_batch(4, 1), make_loss())
    assert len(calls) == passes and ("actor/router_aux_loss" in figures) == (coef > 0)
    routers = [module for module in engine.model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    assert [len(router._forward_hooks) for router in routers] == [int(coef > 0)] * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(**SHAPE), "LlamaForCausalLM has no experts"),
        (
            DeepseekV3Config(
                **SHAPE | {"num_key_value_heads": 2}, **EXPERTS, n_routed_experts=4, n_group=2, topk_group=1,
                first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
                v_head_dim=4,
            ),
            "DeepseekV3ForCausalLM has no load-balancing loss in transformers",
        ),
        (
            JambaConfig(**SHAPE, num_experts=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
            "JambaForCausalLM has no load-balancing loss",
        ),
    ],
)  # fmt: skip
def test_models_without_this_loss_are_refused(config: PretrainedConfig, words: str) -> None:
    with torch.device("meta"):
        model = random_model(config, "language_model")
    with pytest.raises(ConfigError, match=rf"^trainer\.router_aux_loss_coef=0\.1: {words}.*set .*=0$"):
        Routers(model, 0.1)


def test_a_router_that_is_not_called_is_an_error() -> None:
    model = random_model(MODELS["mixtral"], "language_model")
    routers = Routers(model, 0.1)
    with routers.recording() as logits:
        model.model.layers[0](torch.zeros(1, 3, 16), position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)))
    with pytest.raises(ConfigError, match="did not route 3 positions once in each of its 2 layers"):
        routers.load(logits, torch.ones(1, 3, dtype=torch.bool))
    routers.detach()
    with routers.recording() as nothing:
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64))
    assert nothing == []


class BlankImage:
    """Adds a wider row, as a `MediaEncoder` does for the blank image of a micro-batch without media."""

    def encode(self, micro: MicroBatch) -> MediaInputs:
        ids = micro.input_ids
        blank = torch.ones(1, ids.shape[1] + 5, dtype=torch.int64)
        return MediaInputs(torch.cat([torch.nn.functional.pad(ids, (0, 5)), blank]), {}, None)


def test_the_row_of_a_blank_image_does_not_count() -> None:
    model, batch = random_model(MODELS["mixtral"], "language_model"), make_batch(3, 1)
    encoder: Any = BlankImage()
    scorer = Scorer(
        model, model_type="language_model", device=torch.device("cpu"), autocast=None, media_encoder=encoder,
        routers=Routers(model, 0.1),
    )  # fmt: skip
    plain = scorer.lay_out(batch, [0, 1, 2], batch["loss_mask"])
    beside = replace(plain, media=((), (), ()), prompt_lens=batch["prompt_lens"])
    with torch.no_grad():
        (scores, load), (other_scores, other_load) = scorer.with_experts(plain), scorer.with_experts(beside)
    torch.testing.assert_close(scores, other_scores)
    torch.testing.assert_close(load, other_load)
    assert int(load.tokens) == int((batch["prompt_lens"] + batch["response_lens"] - 1).sum())


@pytest.mark.slow
def test_compiled_layers_have_the_same_loss(tmp_path: Path) -> None:
    random_model(MODELS["qwen3_moe"], "language_model").save_pretrained(tmp_path)
    found = []
    for compiles in (False, True):
        engine = new_engine(replace(make_spec(tmp_path, torch_compile=compiles), router_aux_loss_coef=1.0))
        figures = engine.forward_backward(make_batch(4, 1), make_loss())
        found.append((figures["actor/router_aux_loss"], engine.optim_step(0.0).grad_norm))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_adapters_get_its_gradient(tmp_path: Path) -> None:
    random_model(MODELS["qwen3_moe"], "language_model").save_pretrained(tmp_path)
    spec = replace(make_spec(tmp_path), router_aux_loss_coef=1.0)
    batch = make_batch(4, 1)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    norms = []
    for changed in (spec, replace(spec, model=spec.model.model_copy(update={"lora_rank": 2}))):
        engine = new_engine(changed)
        figures = engine.forward_backward(batch, make_loss())
        assert figures["loss"] == pytest.approx(figures["actor/router_aux_loss"])
        norms.append(engine.optim_step(0.0).grad_norm)
    assert all(norm > 0 for norm in norms)
