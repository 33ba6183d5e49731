"""`trainer` and the models beside the policy: engines, optimizers, steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.base import Dtype, NonNegative, Positive, Section, Share


class OptimConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled from the gradient."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, down to `min_lr_ratio` at the last step."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of the peak."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""


class EngineConfig(Section):
    """How a model is run in the Trainer's processes."""

    strategy: str = "fsdp2"
    """Engine backend: `fsdp2`, `fsdp`, `ddp`, `local` (one process), or one that a package has registered under the
    entry point group `asyncrl.engines`, such as `torchtitan` and `megatron`."""
    num_workers: Positive = 1
    """Processes (ranks) of the group; with GPUs, one GPU each."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU when there is one."""
    dtype: Dtype = "float32"
    """Of the forward and backward pass; master weights and optimizer are float32."""
    cpu_threads: Positive = 1
    """Threads of each process on CPU."""
    ppo_max_token_len: Positive = 16384
    """Most tokens of one micro-batch of one rank (of a sequence-parallel group, where there is one)."""
    use_remove_padding: bool = True
    """Pack sequences without padding where the attention supports it."""
    gradient_checkpointing: bool = False
    """Trade compute for activation memory."""
    activation_offload: bool = False
    """Keep activations for the backward pass in CPU memory."""
    param_offload: bool = False
    """Keep weights in CPU memory while they are not computed with."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory between steps."""
    torch_compile: bool = False
    """Compile each transformer layer."""
    use_liger: bool = False
    """Liger kernels, on GPUs; needs the package liger-kernel."""
    ulysses_sequence_parallel_size: Positive = 1
    """Ranks that share one sequence (https://arxiv.org/abs/2309.14509); divides num_workers and the number of heads."""


class RoleConfig(Section):
    """Where another model of the Trainer lives. null: as the trainer's own."""

    placement: Literal["actor", "own"] = "actor"
    """actor: in the processes of the trained policy; own: in processes of its own."""
    strategy: str | None = None
    """See trainer.strategy."""
    num_workers: Positive | None = None
    """See trainer.num_workers; with `placement: own`."""
    device: Literal["auto", "cpu", "cuda"] | None = None
    """See trainer.device; with `placement: own`."""
    dtype: Dtype | None = None
    """See trainer.dtype."""
    cpu_threads: Positive | None = None
    """See trainer.cpu_threads; with `placement: own`."""
    ppo_max_token_len: Positive | None = None
    """See trainer.ppo_max_token_len."""
    param_offload: bool | None = None
    """See trainer.param_offload."""


class RewardModelConfig(Section):
    """A model that scores responses, besides the reward function."""

    placement: Literal["off", "serve", "worker"] = "off"
    """off: none; serve: a Ray Serve deployment that the Rollouter asks; worker: a role of the Trainer, which scores
    what it trains on and no validation."""
    path: str | None = None
    """Sequence-classification model with one label, in Hugging Face format (safetensors), with its own tokenizer and
    chat template."""
    weight: float = 1.0
    """Of the model's score in the reward. With `placement: serve` the reward of validation has it too."""
    num_replicas: Positive = 1
    """Of the Serve deployment; one GPU each where the cluster has any."""
    max_batch_size: Positive = 32
    """Responses scored in one forward pass of the Serve deployment."""
    trust_remote_code: bool = False
    """Let the model's directory run its own Python code. Only for sources you trust."""
    worker: RoleConfig = RoleConfig()
    """With `placement: worker`: how and where it runs."""


class RefConfig(RoleConfig):
    """The frozen reference policy. With LoRA and `placement: actor` it is the policy without its adapters."""


class CriticConfig(RoleConfig):
    """The value model, with `algorithm.adv_estimator: gae`."""

    path: str | None = None
    """Model it starts from; null: model.path. A missing value head starts at 0."""
    ppo_epochs: Positive = 1
    """Passes over each lease."""
    cliprange_value: Annotated[float, Field(gt=0)] | None = 0.5
    """Values are clipped to so much around those at the lease's start; null: not clipped."""
    warmup_steps: NonNegative = 0
    """Steps in which only the critic learns."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class TrainerConfig(EngineConfig):
    """The training loop, and the engine of the trained policy."""

    total_training_steps: Positive | None = None
    """Optimizer steps of the run; null: as many as `total_epochs` gives."""
    total_epochs: Positive = 1
    """Passes over the training prompts, when `total_training_steps` is null."""
    ppo_mini_batch_size: Positive = 32
    """Samples (prompts) per optimizer step."""
    ppo_epochs: Positive = 1
    """Passes over each lease; every mini-batch of every pass is one optimizer step."""
    optim: OptimConfig = OptimConfig()
    val_before_train: bool = True
    """Validate version 0."""
    test_freq: int = -1
    """Validate every so many steps; -1: only before and after."""
    partial_final_batch: Literal["train", "drop"] = "train"
    """Samples at the end that do not fill a lease: train on them, in steps that may be smaller, or leave them out."""
    save_freq: int = -1
    """Checkpoint every so many steps; -1: only at the end."""
    save_last: bool = True
    """Checkpoint at the end of the run."""
    max_checkpoints_to_keep: Positive = 2
    """Older checkpoints are deleted once a newer one is complete."""
