"""What an engine is compared with: tiny models, batches of unequal rows, and a plain float64 training loop over them.

Nothing here is shared with the engines: one row at a time, whole logits, no packing, no ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

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
    PreTrainedModel,
)

from asyncrl.config.schema import AlgorithmConfig, OptimConfig
from trainer.engine.base import ModelType
from trainer.engine.models import quiet

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
    "attention_dropout": 0.5,  # as some published models have it; training has to switch it off
}


def write_models(directory: Path) -> dict[ModelType, Path]:
    """Two-layer Llamas of a few thousand parameters. A value model starts from the language model's files."""
    torch.manual_seed(0)
    language, reward = directory / "language_model", directory / "reward_model"
    with quiet():
        LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(language)
        LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)).save_pretrained(reward)
    return model_paths(directory)


def model_paths(directory: Path) -> dict[ModelType, Path]:
    language = directory / "language_model"
    return {"language_model": language, "value_model": language, "reward_model": directory / "reward_model"}


def make_batch(num_rows: int, seed: int) -> TensorDict:
    """Rows of many lengths with random tokens, masks and fields; every row has a trained token."""
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
    """One model in float64, AdamW, and PPO's policy or value loss written out."""

    def __init__(
        self,
        path: Path,
        model_type: ModelType,
        optim: OptimConfig,
        algorithm: AlgorithmConfig | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        self.model = plain_model(path, model_type, torch.float64)
        self._model_type = model_type
        self._optim = optim
        self._algorithm = algorithm or AlgorithmConfig()
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )

    def step(self, *batches: TensorDict) -> tuple[float, float]:
        """One optimizer step on the sum of the batches' losses. Returns that, and the gradient's norm."""
        loss = torch.stack([self._loss(batch) for batch in batches]).sum()
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optim.clip_grad)
        self._optimizer.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _loss(self, batch: TensorDict) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        masks = batch["loss_mask"]
        num_tokens = int(masks.sum())
        labels = batch.get("trajectories", torch.arange(len(batch))).tolist()
        trained = Counter[int]()
        for label, count in zip(labels, masks.sum(dim=1).tolist(), strict=True):
            trained[label] += count
        num_trajectories = sum(count > 0 for count in trained.values())
        for number in range(len(batch)):
            row, mask = batch[number], masks[number]
            if not mask.any():
                continue
            fields = {key: value[mask].double() for key, value in row.items() if value.dtype == torch.float32}
            scores, entropy = plain_scores(self.model, self._model_type, row, self._temperature)
            kept = mask[: len(scores)]
            one = self._value_terms if self._model_type == "value_model" else self._policy_terms
            terms = one(scores[kept], entropy[kept], fields)
            if self._model_type == "value_model" or self._algorithm.loss_agg_mode == "token-mean":
                total = total + terms.sum() / num_tokens
            else:
                total = total + terms.sum() / trained[labels[number]] / num_trajectories
        return total

    def _policy_terms(self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        algorithm = self._algorithm
        terms = []
        for token, log_prob in enumerate(log_probs):
            advantage = fields["advantages"][token]
            ratio = torch.exp(log_prob - fields["old_log_probs"][token])
            low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
            term = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, low, high))
            if advantage < 0 and algorithm.clip_ratio_c is not None:
                term = torch.minimum(term, -advantage * algorithm.clip_ratio_c)
            if algorithm.use_kl_loss:
                difference = log_prob - fields["ref_log_probs"][token]
                term = term + algorithm.kl_loss_coef * (torch.exp(-difference) - 1.0 + difference)
            terms.append(term - algorithm.entropy_coeff * entropy[token])
        return torch.stack(terms)

    def _value_terms(self, values: Tensor, _entropy: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        returns, old = fields["returns"], fields["values"]
        near = torch.clamp(values, old - 0.5, old + 0.5)
        return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def plain_model(path: Path, model_type: ModelType, dtype: torch.dtype) -> PreTrainedModel:
    """As transformers loads it, in eval mode; a value model's head at 0."""
    with quiet():
        if model_type == "language_model":
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        if model_type == "reward_model":
            return AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
        model = AutoModelForTokenClassification.from_pretrained(path, dtype=dtype, num_labels=1).eval()
    for parameter in model.score.parameters():
        parameter.data.zero_()
    return model


def plain_scores(
    model: PreTrainedModel, model_type: ModelType, row: TensorDict, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Of one row's response tokens `[L]`: log-probs and entropies, or values and zeros; of a reward model its score."""
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
    """Raises AssertionError unless both differ by at most `tolerance`, relative to the larger of 1 and `expected`."""
    left, right = torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if left.shape != right.shape:
        raise AssertionError(f"{what}: shape {tuple(left.shape)}, expected {tuple(right.shape)}")
    error = float(((left - right).abs() / right.abs().clamp(min=1.0)).max()) if left.numel() else 0.0
    if not (math.isfinite(error) and error <= tolerance):
        raise AssertionError(f"{what}: off by {error:.2e}, at most {tolerance:.0e} is allowed")
