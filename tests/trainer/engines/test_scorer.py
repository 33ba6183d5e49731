"""Log-probs, entropies, values and rewards compared with a plain call of the model; logits in chunks; saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    CohereConfig,
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from asyncrl.core.failures import ConfigError
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import SHAPE, VOCAB, random_model
from tests.fakes.wrapped_model import Wrapper, wrap
from trainer.engines.base import ModelType
from trainer.engines.compute import scorer
from trainer.engines.compute.attention import enable_packing
from trainer.engines.compute.scorer import Scorer, behind_head, score_logits

CPU = torch.device("cpu")
WITHOUT_PADDING = SHAPE | {"pad_token_id": None}
LLAMA = LlamaConfig(**WITHOUT_PADDING)
PROMPTS, RESPONSES = [3, 1, 5, 2, 4, 7], [9, 12, 1, 3, 10, 5]
BATCH = make_batch(PROMPTS, RESPONSES, vocab=VOCAB)
ROWS = [1, 0, 5, 3, 2, 4]


def make_model(
    kind: ModelType = "language_model", config: PreTrainedConfig = LLAMA, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    return random_model(config, kind).to(dtype).eval()


def make_scorer(model: PreTrainedModel, kind: ModelType = "language_model", **settings: Any) -> Scorer:
    return Scorer(model, model_type=kind, device=CPU, **{"autocast": None} | settings)


def by_row(model: nn.Module, temperature: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Return log-probs and entropies of the trained tokens of each of `ROWS`, computed from all logits of one row."""
    for row in ROWS:
        length = PROMPTS[row] + RESPONSES[row]
        tokens = BATCH["input_ids"][row, :length]
        log_p = torch.log_softmax(model(tokens[None]).logits[0] / temperature, dim=-1)
        places = BATCH["loss_mask"][row].nonzero().flatten() + PROMPTS[row] - 1
        yield log_p[places, tokens[places + 1]], -(log_p[places].exp() * log_p[places]).sum(-1)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*model.parameters()])])


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        Gemma2Config(**{**WITHOUT_PADDING, "pad_token_id": 0}, head_dim=8, final_logit_softcapping=2.0),
        CohereConfig(**{**WITHOUT_PADDING, "pad_token_id": 0}, logit_scale=0.3),
    ],
    ids=["llama", "soft caps", "scaled"],
)
def test_gradients_are_those_of_the_plain_model(
    config: PreTrainedConfig, pieces: bool, of_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setitem(scorer.MAX_LOGITS, "cpu", 7 * VOCAB)
    monkeypatch.setitem(scorer.BLOCK_LOGITS, "cpu", 5 * VOCAB)
    model = make_model(config=config)
    temperature = 0.7 if pieces else 1.0
    log_probs, entropy = (torch.cat(parts) for parts in zip(*by_row(model, temperature), strict=True))
    factors = torch.linspace(-1.0, 1.0, len(log_probs), dtype=torch.float64)
    score = make_scorer(model, temperature=temperature)
    calls: list[int] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[1]))
    scores = score(score.lay_out(BATCH, ROWS, BATCH["loss_mask"]), entropy_gradient=of_entropy)
    assert calls == [0 if pieces else len(log_probs)]
    assert scores.log_probs.requires_grad and scores.entropy.requires_grad == of_entropy
    expected = gradient(model, (log_probs * factors + of_entropy * 0.5 * entropy * factors**2).sum())
    got = gradient(model, (scores.log_probs * factors + of_entropy * 0.5 * scores.entropy * factors**2).sum())
    limit = 1e-12 if config.model_type == "llama" else 1e-6  # the others have float32 norms
    assert (got - expected).abs().max() <= limit * expected.abs().max()
    torch.testing.assert_close(scores.log_probs, log_probs, rtol=limit, atol=limit)
    torch.testing.assert_close(scores.entropy, entropy, rtol=limit, atol=limit)
    with torch.no_grad():
        again = score(score.lay_out(BATCH, ROWS, BATCH["loss_mask"]))
    torch.testing.assert_close(again.log_probs, log_probs, rtol=limit, atol=limit)


def test_score_logits_passes_the_gradient_check() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: score_logits(x, targets, 0.7, entropy_gradient=True), (values,))
    assert torch.autograd.gradcheck(lambda x: score_logits(x, targets, 0.7)[0], (values,))


def test_only_the_logits_are_saved_for_backward() -> None:
    values = torch.randn(50, 400, requires_grad=True, dtype=torch.float32).bfloat16()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = score_logits(values, torch.zeros(50, dtype=torch.int64))
    assert log_probs.dtype == torch.float32
    large = [tensor for tensor in saved if tensor.numel() >= 50 * 400]
    assert [tensor.data_ptr() for tensor in large] == [values.data_ptr()]


def test_large_logits_do_not_overflow() -> None:
    values = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 0.0, 1.0]])
    log_probs, entropy = score_logits(values, torch.tensor([0, 2]))
    torch.testing.assert_close(log_probs, torch.log_softmax(values, -1)[[0, 1], [0, 2]])
    assert torch.isfinite(entropy).all() and entropy[0] == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pad_token_id", [None, 0, 7])
def test_rewards_are_those_of_the_plain_model(packed: bool, pad_token_id: int | None) -> None:
    """The reward is read from the last token even if that is the padding token, which the model's own pooling skips."""
    config = Qwen3Config(**{**WITHOUT_PADDING, "pad_token_id": pad_token_id}, head_dim=8)
    model, plain = make_model("reward_model", config), make_model("reward_model", config)
    if packed:
        assert enable_packing(model)
    score = make_scorer(model, "reward_model", packed=packed)
    micro = score.lay_out(BATCH, ROWS, BATCH["loss_mask"])
    rewards = score(micro).log_probs
    plain.config.pad_token_id = None
    expected = [plain(BATCH["input_ids"][row : row + 1, : PROMPTS[row] + RESPONSES[row]]).logits[0, 0] for row in ROWS]
    torch.testing.assert_close(rewards, torch.stack(expected), rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, len(ROWS), dtype=torch.float64)
    torch.testing.assert_close(
        gradient(model, (rewards * weights).sum()), gradient(plain, (torch.stack(expected) * weights).sum())
    )


def test_a_model_without_the_needed_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM: has no head called"):
        make_scorer(make_model(), "value_model")


@pytest.mark.parametrize("kind", get_args(ModelType))
def test_a_pass_without_scores_still_reaches_every_weight(kind: ModelType) -> None:
    """A rank without rows runs its backward pass through all layers with zeros, because other ranks wait in
    collectives."""
    model = make_model(kind)
    score = make_scorer(model, kind)
    scores = score(score.lay_out(BATCH, [0], torch.zeros_like(BATCH["loss_mask"])))
    (0.0 * scores.log_probs).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_a_direct_call_of_the_model_still_returns_all_logits() -> None:
    model = make_model()
    expected = model(BATCH["input_ids"]).logits
    make_scorer(model)
    assert torch.equal(model(BATCH["input_ids"]).logits, expected)


def test_unknown_operations_after_the_head_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert behind_head(make_model()) is not None
    model = make_model()
    plain_forward = type(model).forward

    def odd_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain_forward(self, *args, **kwargs)
        output.logits = output.logits.abs().sqrt()
        return output

    monkeypatch.setattr(type(model), "forward", odd_forward)
    assert behind_head(model) is None
    monkeypatch.setitem(scorer.MAX_LOGITS, "cpu", VOCAB)
    expected = torch.cat([log_probs for log_probs, _ in by_row(model)])
    score = make_scorer(model)
    scores = score(score.lay_out(BATCH, ROWS, BATCH["loss_mask"]))
    torch.testing.assert_close(scores.log_probs, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", get_args(ModelType))
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp2"])
def test_wrapped_models_have_the_scores_of_plain_ones(
    wrapper: Wrapper, kind: ModelType, pieces: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed call through a wrapper gives the same scores and gradients as a padded call of the plain model."""
    if pieces:
        monkeypatch.setitem(scorer.MAX_LOGITS, "cpu", 7 * VOCAB)
    plain, model = make_model(kind), make_model(kind)
    factors = torch.linspace(-1.0, 1.0, 60, dtype=torch.float64)

    def backward(score: Scorer) -> Tensor:
        scores = score(score.lay_out(BATCH, ROWS, BATCH["loss_mask"])).log_probs
        (scores * factors[: len(scores)]).sum().backward()
        return scores.detach()

    expected = backward(make_scorer(plain, kind))
    assert enable_packing(model)
    module = wrap(wrapper, model)
    got = backward(make_scorer(model, kind, module=module, packed=True))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    shares: list[Any] = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    total = torch.cat([(grad.to_local() if isinstance(grad, DTensor) else grad).flatten() for grad in shares])
    wanted = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    torch.testing.assert_close(total.square().sum(), wanted.square().sum(), rtol=1e-12, atol=0)
