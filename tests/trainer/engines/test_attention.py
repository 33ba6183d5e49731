"""Packed rows have the scores of padded ones for every architecture that can be packed; others are detected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import SHAPE, VOCAB
from trainer.engines.compute import attention
from trainer.engines.compute.attention import NAME, Packing, enable_packing, packed_attention
from trainer.engines.compute.scorer import Scorer

NEOX = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PACKABLE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2 with windows": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "qwen3 moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, decoder_sparse_step=1),
    "mistral": MistralConfig(**SHAPE, sliding_window=4),
    "gemma 3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3),
    "gpt-neox": GPTNeoXConfig(**NEOX),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0),
    "cohere": CohereConfig(**SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "opt": OPTConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
                     word_embed_proj_dim=16, init_std=0.3),
    "deepseek v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 2}, moe_intermediate_size=8, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
NOT_PACKABLE: dict[str, tuple[PreTrainedConfig, str]] = {
    "gemma 2": (Gemma2Config(**SHAPE, head_dim=8), "softcap"),
    "falcon": (FalconConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2), "its own"),
    "lfm2, convolutions": (Lfm2Config(**SHAPE, block_ff_dim=32, full_attn_idxs=[1]), "change each other"),
    "qwen3-next, linear attention": (
        Qwen3NextConfig(
            **SHAPE, **EXPERTS, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        ),
        "change each other",
    ),
}  # fmt: skip
FLOAT32_INSIDE = ("gemma 3", "cohere")
"""Models that compute norms and rotations in float32 for any dtype of the weights."""
BATCH = make_batch([3, 1, 5, 2, 4, 7], [9, 12, 1, 3, 10, 5], vocab=VOCAB)
ROWS = [1, 0, 5, 3, 2, 4]


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default implementation does not support float64
    return model.eval()


def scored(model: PreTrainedModel, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Return log-probs, and the gradient of a weighted sum of them for all weights as one vector."""
    scorer = Scorer(model, model_type="language_model", device=torch.device("cpu"), autocast=None, packed=packed)
    micro = scorer.lay_out(BATCH, ROWS, BATCH["loss_mask"])
    log_probs = scorer(micro).log_probs
    (log_probs * torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)).sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return log_probs.detach(), torch.cat(gradients)


@pytest.mark.parametrize("name", PACKABLE)
def test_packed_rows_have_the_scores_of_padded_rows(name: str) -> None:
    padded = scored(make_model(PACKABLE[name]), packed=False)
    model = make_model(PACKABLE[name])
    assert enable_packing(model)
    packed = scored(model, packed=True)
    for left, right in zip(padded, packed, strict=True):
        limit = 1e-6 if name in FLOAT32_INSIDE else 1e-12
        assert (left - right).abs().max() <= limit * max(1.0, float(left.abs().max()))


@pytest.mark.parametrize("name", NOT_PACKABLE)
def test_models_that_mix_sequences_are_not_packed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, reason = NOT_PACKABLE[name]
    model = make_model(config, torch.float32)
    expected = model(torch.arange(6)[None]).logits
    assert not enable_packing(model)
    assert reason in caplog.text
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(torch.arange(6)[None]).logits, expected)


def test_a_model_that_takes_packed_rows_still_takes_padding_masks() -> None:
    """Generation pads rows on the left and passes a mask."""
    model = make_model(PACKABLE["llama"])
    ids, mask = torch.tensor([[0, 0, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1]])
    expected = model(ids, attention_mask=mask).logits
    assert enable_packing(model)
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    assert not torch.allclose(model(ids).logits, expected)


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Compute attention `[1, H, T, D]` with an explicit mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    allowed = (number[:, None] == number) & (place[:, None] >= place)
    if window is not None:
        allowed &= place[:, None] - place < window
    logits = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1) @ value


@pytest.mark.parametrize("kernel", [False, True], ids=["products of matrices", "varlen kernel"])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_attention_equals_attention_with_an_explicit_mask(
    window: int | None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The varlen kernel runs only on GPUs, so the test replaces it by a plain function with its documented
    arguments."""

    def varlen(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        assert cu_q.dtype == torch.int32 and max_q == max_k == 7 and enable_gqa and scale == 0.3
        assert torch.equal(cu_q, cu_k) and window_size[1] == 0
        left = None if window_size[0] == -1 else window_size[0] + 1
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        return reference(q, k, v, cu_q.diff().tolist(), left)[0].transpose(0, 1)

    if kernel:
        monkeypatch.setattr(attention, "varlen_attn", varlen)
        monkeypatch.setattr(attention, "_has_varlen_kernel", lambda _query, _value: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 13, 8, dtype=torch.float64) for heads in (4, 2, 2))
    packing = Packing([5, 1, 7], "cpu")
    output, _ = packed_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, sliding_window=window, packing=packing
    )
    expected = reference(query, key, value, packing.lengths, window).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_only_sdpa_models_are_packed() -> None:
    model = AutoModelForCausalLM.from_config(PACKABLE["llama"], attn_implementation="eager")
    assert not enable_packing(model)
    assert model.config._attn_implementation == "eager" != NAME


@pytest.mark.parametrize(("size", "value_size", "expected"), [(64, 64, True), (192, 128, False), (20, 20, False)])
def test_the_kernel_needs_equal_head_sizes(
    size: int, value_size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    query, value = (
        SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=(1, 2, 5, wide))
        for wide in (size, value_size)
    )
    assert attention._has_varlen_kernel(query, value) is expected  # type: ignore[arg-type]
