"""The one-process engine: float32 master weights, one device, gradients accumulated over micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, DivergenceError
from trainer.batching import MicroBatch
from trainer.engine.optim import adamw, learning_rate
from trainer.engine.policy import PolicyModel, TokenScores

CPU_MICRO_BATCH_TOKENS = 4096
"""Larger ones fall out of a CPU's caches: of a 1M-parameter model 11,000 tokens/s at 2,000 tokens, 9,000 at 13,000."""
OVERHEAD_TOKENS = {"cpu": 96, "cuda": 1024}
"""What one pass costs beyond its tokens, in tokens. It only decides how finely rows are cut."""


class StepOutcome(NamedTuple):
    step: int
    grad_norm: float
    """Global norm before clipping."""
    lr: float


class LocalEngine:
    """Model, optimizer and schedule on one device. Not thread-safe: one call at a time.

    Raises:
        ConfigError: the model cannot be loaded, or the configuration asks for what this engine cannot do.
    """

    def __init__(self, config: Config) -> None:
        self.device = pick_device(config.trainer.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.trainer.cpu_threads)
        torch.manual_seed(config.seed)
        self.step = 0
        self.total_steps = config.trainer.total_training_steps
        """Of the whole run; where it depends on the data, set it before the first step."""
        self.optim = config.trainer.optim
        self._config = config
        self._temperature = _train_temperature(config)
        self._autocast = _autocast_dtype(config)
        model = load_model(config.model.path, trust_remote_code=config.model.trust_remote_code)
        if config.trainer.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.policy = self._wrap(model.train())  # train mode is what turns checkpointing on; dropout is 0 everywhere
        self.reference = self._frozen_reference() if config.algorithm.use_kl_loss else None
        self.optimizer = adamw(model, self.optim)

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def micro_batch_tokens(self) -> int:
        limit = self._config.trainer.ppo_max_token_len
        return min(limit, CPU_MICRO_BATCH_TOKENS) if self.device.type == "cpu" else limit

    @property
    def overhead_tokens(self) -> int:
        return OVERHEAD_TOKENS[self.device.type]

    def reference_log_probs(self, batch: MicroBatch) -> Tensor | None:
        """float32 `[N]` of the frozen initial model; None without a KL loss."""
        if self.reference is None:
            return None
        with torch.no_grad():
            return self.reference.score(batch).log_probs

    def infer(self, batch: MicroBatch) -> TokenScores:
        with torch.inference_mode():
            return self.policy.score(batch)

    def optimizer_step(self, loss: float) -> StepOutcome:
        """Clip and apply the gradients that `backward` calls have accumulated, and clear them.

        Raises:
            DivergenceError: `loss` or the gradient is not finite. Weights and optimizer are as they were.
        """
        for parameter in self.model.parameters():
            if parameter.grad is None:  # a gradient of 0 still moves AdamW by its momentum; None would not
                parameter.grad = torch.zeros_like(parameter)
        try:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_grad))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DivergenceError(
                    f"step {self.step + 1}: loss {loss}, gradient norm {norm}. The step was not taken; the weights are "
                    f"those of step {self.step}; resume from a checkpoint with a smaller trainer.optim.lr "
                    f"(now {self.optim.lr:g}) or clip_grad (now {self.optim.clip_grad:g})"
                )
            rate = learning_rate(self.step + 1, self.total_steps, self.optim)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepOutcome(self.step, norm, rate)

    def _wrap(self, model: PreTrainedModel) -> PolicyModel:
        return PolicyModel(model, device=self.device, autocast=self._autocast, temperature=self._temperature)

    def _frozen_reference(self) -> PolicyModel:
        """Always the model of `model.path`, after a resume too: the reference is version 0."""
        model = load_model(self._config.model.path, trust_remote_code=self._config.model.trust_remote_code)
        return self._wrap(model.eval().requires_grad_(False))


def load_model(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM in float32 without dropout: dropout would make the current policy differ from the served one.

    Raises:
        ConfigError: no model there, or its files lack weights.
    """
    try:
        source = resolve(str(path))
        settings = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=_without_dropout(settings),
            dtype=torch.float32,
            use_safetensors=True,  # never a pickle from disk
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError.wrap(
            f"model.path={path}: no causal language model could be loaded from there; give a directory in Hugging Face "
            "format with config.json and safetensors, or a hub name",
            error,
        ) from None
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ConfigError(
            f"{path}: {len(report['missing_keys'])} weights are missing ({missing}, …), so they would be random"
        )
    return model


def pick_device(name: str) -> torch.device:
    """`auto`: a GPU when torch sees one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no GPU here; use trainer.device=auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _without_dropout(settings: PretrainedConfig) -> PretrainedConfig:
    for part in (settings, settings.get_text_config()):
        for key, value in vars(part).items():
            if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
                setattr(part, key, 0.0)
    return settings


def _train_temperature(config: Config) -> float:
    temperature = config.rollout.sampling.temperature
    if temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0: greedy responses of a group are all alike and their policy has no "
            "probabilities to train on; use a temperature above 0 (validation has its own)"
        )
    return temperature


def _autocast_dtype(config: Config) -> torch.dtype | None:
    if config.trainer.dtype == "float16":
        raise ConfigError(
            "trainer.dtype=float16: gradients would underflow without loss scaling, which is not done; use bfloat16"
        )
    return None if config.trainer.dtype == "float32" else torch.bfloat16
