"""Model FLOPs utilization: the arithmetic, compared with numbers counted by hand, and the table of peaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3MoeConfig,
)

from tests.fakes.losses import Likelihood
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import SHAPE, VOCAB, write_model
from trainer.engines import torch_engine
from trainer.engines.base import EngineSpec
from trainer.engines.compute.flops import ModelShape, Utilization, peak_flops
from trainer.workers.worker import TrainingWorker

CONFIG = SimpleNamespace(num_hidden_layers=3, num_attention_heads=4, hidden_size=32, head_dim=None)


def known(model: Any) -> ModelShape:
    shape = ModelShape.of_model(model)
    assert shape is not None
    return shape


def test_each_parameter_takes_six_flops_per_token() -> None:
    shape = ModelShape(parameters=1e9, trained=1e9, attention_width=0)
    assert shape.flops([1000], backward=True) == 6e12
    assert shape.flops([400, 600], backward=True) == 6e12
    assert shape.flops([1000], backward=False) == 2e12


def test_attention_grows_with_the_square_of_a_sequence() -> None:
    """Each head and layer has two products of T x T x head size, half of which the causal mask removes, and twice as
    many in the backward pass.
    """
    shape = ModelShape(parameters=0, trained=0, attention_width=3 * 4 * 8)
    forward = 3 * 4 * (2 * 2 * 100 * 100 * 8) / 2
    assert shape.flops([100], backward=False) == forward
    assert shape.flops([100], backward=True) == 3 * forward
    assert shape.flops([50, 50], backward=True) == 1.5 * forward


def test_frozen_weights_have_no_weight_gradients() -> None:
    shape = ModelShape.of(CONFIG, [("base", 1000, False), ("lora_a", 10, True)])
    assert shape is not None
    assert shape == (1010, 10, 3 * 32)
    assert shape._replace(attention_width=0).flops([1], backward=True) == 4 * 1010 + 2 * 10


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[Any, float]] = {
    "tied": (LlamaConfig(**SHAPE, tie_word_embeddings=True), 0),
    "embedding": (LlamaConfig(**SHAPE, tie_word_embeddings=False), VOCAB * 16),
    "positions": (GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=512), 512 * 16),
    "idle experts": (
        Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, decoder_sparse_step=1, tie_word_embeddings=True),
        2 * 4 * 3 * 16 * 32 * 3 / 4,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_unused_experts_do_not_count(name: str) -> None:
    config, idle = MODELS[name]
    model = AutoModelForCausalLM.from_config(config)
    shape = known(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters()) - idle
    assert shape.attention_width == 2 * 16


def test_flops_of_a_real_model_equal_torchs_count(tmp_path: Path) -> None:
    """torch counts matrix products, including both halves of the attention matrix, and no norms."""
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path), attn_implementation="eager").train(False)
    ids = torch.arange(20)[None] % VOCAB
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    shape = known(model)
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    counted = shape._replace(parameters=shape.parameters - norms, trained=shape.trained - norms)
    # torch also counts the other half of the attention matrix.
    expected = counted.flops([20], backward=True) + 6 * shape.attention_width * 20 * 20
    # The embeddings, the input of the first layer, also need a gradient, so all products have two backward products.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


DENSE = [("layers.0.mlp.w", 1000, True)]
ROUTED = [("layers.0.mlp.experts.w", 1000, True)]
RENAMED = [("layers.0.block_sparse_moe.input_linear.w", 1000, True)]


@pytest.mark.parametrize(
    ("model_type", "sizes", "changes", "expected"),
    [
        ("llama", DENSE, {}, (1000, 32 * 32 * 128)),
        ("qwen2", DENSE, {}, (1000, 32 * 4096)),
        ("gemma3_text", DENSE, {}, (1000, 26 * 8 * 256)),
        ("qwen3_moe", ROUTED, {}, (1000 * 8 / 128, 24 * 2048)),
        ("mixtral", ROUTED, {}, (1000 * 2 / 8, 32 * 4096)),
        ("deepseek_v3", ROUTED, {}, (1000 * 8 / 256, 61 * 128 * (128 + 64 + 128) // 2)),
        ("qwen3_next", ROUTED, {}, (1000 * 10 / 512, 12 * 16 * 256)),  # 36 of 48 layers have linear attention
        ("deepseek_v2", ROUTED, {"num_experts_per_tok": 8}, (1000 * 8 / 64, 32 * 32 * (128 + 64 + 128) // 2)),
        ("deepseek_v2", ROUTED, {}, None),  # the number of experts per token is missing
        ("dots1", ROUTED, {}, None),  # the number of experts is missing
        ("granitemoe", RENAMED, {}, None),  # the experts have another name
        ("gemma4_text", DENSE, {}, None),  # each kind of layer has another head size
        ("mamba", DENSE, {}, None),
        ("mamba2", DENSE, {}, None),
        ("zamba2", DENSE, {}, None),  # some layers are of a special kind
    ],
)  # fmt: skip
def test_shapes_follow_from_configurations_of_transformers(
    model_type: str, sizes: list[tuple[str, int, bool]], changes: dict[str, Any], expected: tuple[float, int] | None
) -> None:
    """A configuration without the needed sizes has no shape, and loading its model does not fail."""
    config = AutoConfig.for_model(model_type, **changes).get_text_config()
    shape = ModelShape.of(config, sizes)
    assert (shape and (shape.parameters, shape.attention_width)) == expected


def test_models_without_attention_have_no_shape() -> None:
    assert ModelShape.of_model(torch.nn.Linear(2, 2)) is None
    config = MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=2)
    assert ModelShape.of_model(MambaForCausalLM(config)) is None


def test_an_engine_without_a_shape_has_no_meter(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(spec, engine=spec.engine.model_copy(update={"dtype": "bfloat16", "device": "cuda"}))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=2))
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE))
    assert torch_engine._meter(mamba, spec, torch.device("cuda")) is None
    assert torch_engine._meter(llama, spec, torch.device("cuda")) is not None


# ------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4), ("NVIDIA H200 NVL", 835.5), ("NVIDIA GH200 480GB", 989.4), ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H800", 989.4), ("NVIDIA H800 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA A40", 149.7),
        ("NVIDIA L40S", 362.0), ("NVIDIA L40", 181.0), ("NVIDIA L4", 121.0), ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0), ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)  # fmt: skip
def test_known_devices_have_a_peak(name: str, tflops: float) -> None:
    assert peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H200 MIG 1g.18gb", "AMD MI300X", "",
    ],
)  # fmt: skip
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_utilization_is_the_share_of_the_peak() -> None:
    used = Utilization(ModelShape(1e9, 1e9, 0), 100e12, sharing=2)
    used.add([500, 500], backward=True)
    used.add([1000], backward=False)
    assert used.of(0.1) == pytest.approx((6e12 + 2e12) / 2 / (0.1 * 100e12))
    used.reset()
    assert used.of(0.1) == 0.0


# ------------------------------------------------------------------------------------------------ engines


def test_there_is_no_utilization_on_cpu(spec: EngineSpec) -> None:
    worker = _worker(spec)
    assert "mfu" not in worker.train_batch(BATCH)
    worker.close()


def test_rows_without_trained_tokens_do_not_count_in_utilization(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test measures as on a GPU with a known peak."""
    shapes: list[ModelShape] = []

    def metered(model: Any, *args: Any) -> Utilization:
        shapes.append(known(model))
        return Utilization(shapes[0], 1e12)

    monkeypatch.setattr(torch_engine, "_meter", metered)
    monkeypatch.setattr("torch.cuda.synchronize", lambda *args: None)
    monkeypatch.setattr("trainer.workers.worker.time", SimpleNamespace(perf_counter=lambda: 5.0))
    monkeypatch.setattr("trainer.engines.torch_engine.time", SimpleNamespace(perf_counter=lambda: 7.0))
    worker = _worker(spec)
    batch = BATCH.clone()
    batch["loss_mask"][0] = False
    for _ in range(2):  # the second step starts again from 0
        metrics = worker.train_batch(batch)
        lengths = [prompt + response - 1 for prompt, response in zip(*LENGTHS, strict=True)][1:]
        assert metrics["mfu"] == pytest.approx(shapes[0].flops(lengths, backward=True) / (2.0 * 1e12))
    worker.close()


LENGTHS = [3, 5, 1, 4, 2], [4, 2, 6, 1, 5]
BATCH = make_batch(*LENGTHS, vocab=VOCAB)


def _worker(spec: EngineSpec) -> TrainingWorker:
    worker = TrainingWorker(spec)
    worker.plan(10)
    worker.set_loss_fn(Likelihood())
    return worker
