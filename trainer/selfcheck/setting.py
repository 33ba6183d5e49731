"""The parts that checks share: tiny models, batches of unequal rows, a plain float64 training loop, and comparisons.

The plain loop shares only the loss with the engines. It takes one row at a time, with full logits, on one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from asyncrl.core.failures import AsyncRLError
from trainer.algorithms.objective import PolicyLoss, ValueLoss
from trainer.engines import dist
from trainer.engines.base import BaseEngine, EngineSpec, Loss, ModelType, StepOutcome, Tokens, TokenScores
from trainer.engines.models import quiet
from trainer.engines.registry import new_engine

VOCAB = 24

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attention_dropout": 0.5,  # as in some published models; training must disable it
}


_EXPERTS: dict[str, Any] = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS: dict[str, tuple[Any, PretrainedConfig]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_EXPERTS, head_dim=8)),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig(**_EXPERTS, shared_expert_intermediate_size=16)),
}
"""Mixtures of experts by the name of their directory."""

FEW_EXPERTS = {
    f"{number}_experts": Qwen3MoeConfig(**_EXPERTS | {"num_experts": number, "num_experts_per_tok": number}, head_dim=8)
    for number in (1, 2)
}
"""Mixtures of so few experts that a rank may get none, by the name of their directory. A token chooses all of them."""


def write_models(directory: Path) -> dict[ModelType, Path]:
    """Write two-layer Llamas of a few thousand parameters; a Qwen 3, which has norms of attention heads, as
    `with_norms`; and mixtures of experts, as in `EXPERTS` and `FEW_EXPERTS`. A value model starts from the language
    model's files. The padding token of `with_norms` is in the middle of the vocabulary, and in batches as any other."""
    torch.manual_seed(0)
    language, reward = directory / "language_model", directory / "reward_model"
    with quiet():
        LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(language)
        norms = Qwen3Config(**SHAPE, head_dim=8, pad_token_id=VOCAB // 2)
        Qwen3ForCausalLM(norms).save_pretrained(directory / "with_norms")
        LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)).save_pretrained(reward)
        for name, (model, config) in EXPERTS.items():
            model(config).save_pretrained(directory / name)
        for name, config in FEW_EXPERTS.items():
            Qwen3MoeForCausalLM(config).save_pretrained(directory / name)
    return model_paths(directory)


def model_paths(directory: Path) -> dict[ModelType, Path]:
    language = directory / "language_model"
    return {"language_model": language, "value_model": language, "reward_model": directory / "reward_model"}


def make_batch(num_rows: int, seed: int) -> TensorDict:
    """Return rows of many lengths with random tokens, masks and fields; every row has a trained token."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 9, (num_rows,), generator=generator)
    responses = torch.randint(1, 20, (num_rows,), generator=generator)
    total, width = int((prompts + responses).max()), int(responses.max())
    response_mask = torch.arange(width) < responses[:, None]
    loss_mask = response_mask & (torch.rand(num_rows, width, generator=generator) < 0.8)
    loss_mask[:, 0] = True

    def noise(mean: float, scale: float) -> Tensor:
        return (mean + scale * torch.randn(num_rows, width, generator=generator)) * response_mask

    ids = torch.randint(1, VOCAB, (num_rows, total), generator=generator)
    fields = {
        "input_ids": ids * (torch.arange(total) < (prompts + responses)[:, None]),
        "prompt_lens": prompts,
        "response_lens": responses,
        "response_mask": response_mask,
        "loss_mask": loss_mask,
        "rollout_log_probs": noise(-3.0, 0.3),
        "old_log_probs": noise(-3.0, 0.3),
        "ref_log_probs": noise(-3.0, 0.3),
        "advantages": torch.randn(num_rows, 1, generator=generator) * response_mask,
        "values": noise(0.0, 0.3),
        "returns": noise(0.5, 1.0),
    }
    return TensorDict(fields, batch_size=[num_rows])


class Reference:
    """One model in float64 with AdamW, trained with a loss row by row, and with the load-balancing loss of all rows."""

    def __init__(self, spec: EngineSpec, loss: Loss) -> None:
        assert spec.optim is not None, "the reference is trained"
        self.model = plain_model(Path(spec.model.path), spec.model_type, torch.float64)
        self._spec, self._loss, self._optim = spec, loss, spec.optim
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=spec.optim.lr,
            betas=spec.optim.betas,
            eps=spec.optim.eps,
            weight_decay=spec.optim.weight_decay,
        )

    def step(self, *batches: TensorDict) -> tuple[float, float]:
        """Take one optimizer step on the sum of the batches' losses. Return that sum, and the gradient's norm."""
        loss = torch.stack([part for batch in batches for part in self._losses(batch)]).sum()
        if coef := self._spec.router_aux_loss_coef:
            loss = loss + coef * torch.stack([self.balance(batch) for batch in batches]).sum()
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optim.clip_grad)
        self._optimizer.step()
        return loss.item(), norm.item()

    def balance(self, batch: TensorDict) -> Tensor:
        """Return the load-balancing loss of the rows with a trained token."""
        top_k, logits = self.model.config.num_experts_per_tok, []
        for row, trained in zip(batch, batch["loss_mask"].any(dim=1), strict=True):
            if trained:  # the last token predicts nothing, so engines do not compute it
                ids = row["input_ids"][None, : int(row["prompt_lens"] + row["response_lens"]) - 1]
                logits.append(self.model(input_ids=ids, output_router_logits=True).router_logits)
        losses = []
        for layer in zip(*logits, strict=True):
            probabilities = torch.cat(layer).softmax(dim=1)
            chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k).indices, 1.0)
            losses.append(probabilities.shape[1] * (chosen.mean(dim=0) * probabilities.mean(dim=0)).sum())
        return torch.stack(losses).mean()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in files."""
        weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return dict(revert_weight_conversion(self.model, weights))

    def _losses(self, batch: TensorDict) -> Iterator[Tensor]:
        """Yield the weighted loss of each row with a trained token."""
        masks = batch["loss_mask"]
        labels = batch.get("trajectories", torch.arange(len(batch))).tolist()
        trained = Counter[int]()
        for label, count in zip(labels, masks.sum(dim=1).tolist(), strict=True):
            trained[label] += count
        num_trajectories = sum(count > 0 for count in trained.values())
        for number, label in enumerate(labels):
            row, mask = batch[number], masks[number]
            if not mask.any():
                continue
            by_trajectory = self._loss.agg_mode == "seq-mean-token-mean"
            denominator = trained[label] * num_trajectories if by_trajectory else int(masks.sum())
            scores, entropy = plain_scores(self.model, self._spec.model_type, row, self._spec.temperature)
            kept = mask[: len(scores)]
            fields = {key: value[mask].double() for key, value in row.items() if value.dtype == torch.float32}
            weight = torch.full((int(mask.sum()),), 1.0 / denominator, dtype=torch.float64)
            tokens = Tokens(fields, weight, torch.zeros(len(weight), dtype=torch.int64), 1)
            yield self._loss(TokenScores(scores[kept], entropy[kept]), tokens).loss


def plain_model(path: Path, model_type: ModelType, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model as transformers does, in eval mode. The head of a value model is 0."""
    with quiet():
        if model_type == "language_model":
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
            model.set_experts_implementation("eager")  # grouped products have no float64
            return model
        if model_type == "reward_model":
            return AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
        model = AutoModelForTokenClassification.from_pretrained(path, dtype=dtype, num_labels=1).eval()
    for parameter in model.score.parameters():
        parameter.data.zero_()
    return model


def plain_scores(
    model: PreTrainedModel, model_type: ModelType, row: TensorDict, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Score one row's response tokens `[L]`: log-probs and entropies, or values and zeros, or a reward model's
    score."""
    prompt, length = int(row["prompt_lens"]), int(row["response_lens"])
    ids = row["input_ids"][None, : prompt + length]
    logits = model(input_ids=ids).logits[0]
    if model_type == "reward_model":
        return logits, torch.zeros_like(logits)
    before = logits[prompt - 1 : prompt + length - 1]
    if model_type == "value_model":
        return before[:, 0], torch.zeros_like(before[:, 0])
    log_probs = torch.log_softmax(before / temperature, dim=-1)
    chosen = log_probs.gather(-1, ids[0, prompt:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(dim=-1)


def close(got: float | Tensor, expected: float | Tensor, tolerance: float, what: str) -> None:
    """Raise AssertionError if the two differ by more than `tolerance`, relative to the larger of 1 and `expected`."""
    left, right = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if left.shape != right.shape:
        raise AssertionError(f"{what}: shape {tuple(left.shape)}, expected {tuple(right.shape)}")
    error = float(((left - right).abs() / right.abs().clamp(min=1.0)).max()) if left.numel() else 0.0
    if not (math.isfinite(error) and error <= tolerance):
        raise AssertionError(f"{what}: off by {error:.2e}, at most {tolerance:.0e} is allowed")


OPTIM = OptimConfig(lr=1e-2, clip_grad=0.7)
"""With this learning rate, three steps change weights by a few percent. Most gradient norms exceed `clip_grad`."""

EXACT = 5e-7
"""Tolerance for float64 arithmetic in another order; some models compute norms in float32 nevertheless."""

SINGLE = 2e-5
"""Tolerance for float32 arithmetic compared with float64."""

SAME = 1e-6
"""Tolerance between two computations in float32."""


@dataclass(frozen=True, slots=True)
class CheckSetting:
    """The engine settings, models and directory that a check uses."""

    backend: str
    device: str
    directory: Path
    """A directory that all ranks see, with the models (`write_models`), and for checkpoints."""
    baseline: list[StepResult] = field(default_factory=list)
    """The result of `one_step` with default arguments, once computed; many checks compare with it."""

    def spec(self, model_type: ModelType = "language_model", **changes: Any) -> EngineSpec:
        """Return an engine's specification. `changes` are fields of EngineSpec, EngineConfig or ModelConfig."""
        fields: dict[str, Any] = {"optim": OPTIM} if model_type != "reward_model" else {}
        model: dict[str, Any] = {"path": str(model_paths(self.directory)[model_type])}
        engine: dict[str, Any] = {"strategy": self.backend, "device": self.device, "num_workers": dist.world_size()}
        for key, value in changes.items():
            owner = engine if key in EngineConfig.model_fields else model if key in ModelConfig.model_fields else fields
            owner[key] = value
        return EngineSpec(model_type, ModelConfig(**model), EngineConfig(**engine), **fields)

    def engine(self, model_type: ModelType = "language_model", **changes: Any) -> BaseEngine:
        return new_engine(self.spec(model_type, **changes))


class Check(NamedTuple):
    name: str
    run: Callable[[CheckSetting], None]
    model_type: ModelType
    num_ranks: tuple[int, ...]
    """The numbers of ranks on which the check can run; empty: any number."""
    backends: tuple[str, ...]
    """The backends that the check is for; empty: all."""


CHECKS: list[Check] = []


def check(
    model_type: ModelType = "language_model", *, num_ranks: tuple[int, ...] = (), backends: tuple[str, ...] = ()
) -> Callable[[Callable[[CheckSetting], None]], Callable[[CheckSetting], None]]:
    def add(run: Callable[[CheckSetting], None]) -> Callable[[CheckSetting], None]:
        CHECKS.append(Check(run.__name__, run, model_type, num_ranks, backends))
        return run

    return add


class StepResult(NamedTuple):
    figures: list[float]
    weights: dict[str, Tensor]


def one_step(
    setting: CheckSetting, batch: TensorDict | None = None, *, loss: Loss | None = None, first: int = 0, **changes: Any
) -> StepResult:
    is_default = batch is None and loss is None and not first and not changes
    if is_default and setting.baseline:
        return setting.baseline[0]
    engine = setting.engine(**({"float64": True} | changes))
    step = two_steps(engine, make_batch(6, 1) if batch is None else batch, loss, first)
    if is_default:
        setting.baseline.append(step)
    return step


def take_step(
    engine: BaseEngine, batch: TensorDict, loss: Loss | None = None, first: int = 0
) -> tuple[float, StepOutcome]:
    """Take a step on this rank's share (`share_of`) of `batch`. Return the loss and the outcome."""
    value = engine.forward_backward(share_of(engine, batch, first), loss or make_loss(engine.spec.model_type))["loss"]
    return value, engine.optim_step(value)


def two_steps(engine: BaseEngine, batch: TensorDict, loss: Loss | None = None, first: int = 0) -> StepResult:
    """Take two steps, because only the second one uses the optimizer's state."""
    (value, outcome), (_, second) = (take_step(engine, batch, loss, first) for _ in range(2))
    return StepResult([value, outcome.grad_norm, second.grad_norm], copies(weights_of(engine)))


def same_step(got: StepResult, expected: StepResult, tolerance: float = EXACT) -> None:
    for name, left, right in zip(("loss", "first norm", "second norm"), got.figures, expected.figures, strict=True):
        close(left, right, tolerance, name)
    same_weights(got.weights, expected.weights, max(tolerance, SAME / 10) * 10, "after two steps")


def make_loss(model_type: ModelType = "language_model", **algorithm: Any) -> Loss:
    return ValueLoss(0.5) if model_type == "value_model" else PolicyLoss(AlgorithmConfig(**algorithm), 20)


def share_of(engine: BaseEngine, batch: TensorDict, first: int = 0) -> TensorDict:
    """Return this rank's rows of `batch`. The first data rank gets `first` rows; 0: half of them. A rank without rows
    gets one without trained tokens, as in `trainer.workers.dispatch`."""
    layout = engine.layout
    if layout.data_size == 1:
        return batch
    cut = first or len(batch) // 2
    bounds = [0, *(cut + (len(batch) - cut) * rank // (layout.data_size - 1) for rank in range(layout.data_size))]
    rows = batch[bounds[layout.data_rank] : bounds[layout.data_rank + 1]]
    if len(rows) == 0:
        rows = batch[:1].clone()
        if "loss_mask" in rows:
            rows["loss_mask"] = torch.zeros_like(rows["loss_mask"])
    return rows


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """Return the whole weights on rank 0, and no elements on other ranks."""
    return dict(engine.weights("float32"))


def copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def same_weights(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, when: str) -> None:
    if dist.rank() != 0:
        return
    true(got.keys() == expected.keys(), f"{when}: weights are called {sorted(got)}, not {sorted(expected)}")
    for name, tensor in expected.items():
        close(got[name], tensor, tolerance, f"{name} {when}")


def true(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def raises(kind: type[AsyncRLError], words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        true(words in str(error), f"the message of {kind.__name__} lacks {words!r}: {error}")
        return
    raise AssertionError(f"{kind.__name__} about {words!r} was expected")
