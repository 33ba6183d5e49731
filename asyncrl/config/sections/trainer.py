"""`trainer`, `ref`, `teacher`, `critic`, `reward_model`: steps, engines, optimizers and models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.config.sections.base import ConfigSection, Device, Dtype, NodePool, NonNegative, Positive, Share, Threads


def _check_frequency(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("that is no number of steps; give 1 or more, or -1 for none during the run")
    return value


Frequency = Annotated[int, AfterValidator(_check_frequency)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(ConfigSection):
    """The AdamW optimizer and its learning rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the denominator for numerical stability."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay, decoupled from the gradient."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up; `linear` and `cosine` reach `min_lr_ratio` at the last step."""
    min_lr_ratio: Share = 0.0
    """Final learning rate as a share of the peak."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""


class EngineConfig(ConfigSection):
    """How a model runs in the Trainer's processes."""

    strategy: str = "fsdp2"
    """Engine backend: `fsdp2`, `fsdp`, `ddp`, `local` (one process), `torchtitan`, `megatron_layers`, `nemo_automodel`,
    `veomni`, the name of an entry point of the group `asyncrl.engines`, or your own, `module:Class` or
    `path/file.py:Class`."""
    num_workers: Positive = 1
    """Number of processes (ranks) in the group; on GPUs, each has one GPU."""
    device: Device = "auto"
    """Device of the model; auto: GPUs if the machine or the cluster has any when the processes start, and not only the
    one of the engine. cuda: a run on a cluster also waits for GPUs of nodes that have yet to join (docs/deploy.md)."""
    dtype: Dtype = "float32"
    """Precision of the forward and backward pass; weights that are trained and the optimizer are float32."""
    cpu_threads: Threads = 1
    """Threads of each process, and the CPUs that it reserves on a cluster at `ray.address`, also if it has a GPU; auto:
    on CPU its share of this machine's CPUs (docs/training.md), on a GPU 1."""
    max_cpu_threads: Positive | None = None
    """Most threads of each process on CPU: a run tries more than `cpu_threads`, and keeps what is faster; null: no
    trial."""
    ppo_max_token_len: Positive = 16384
    """Maximum number of tokens in a micro-batch of one rank, or of one sequence-parallel group."""
    attn_implementation: Literal["sdpa", "flash_attention_2", "eager", "flex_attention"] = "sdpa"
    """How models of the Trainer compute attention, by its name in transformers. Only `sdpa` packs sequences; it uses a
    FlashAttention kernel on GPUs in half precision (docs/training.md)."""
    use_remove_padding: bool = True
    """Pack sequences without padding where the attention supports it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time."""
    activation_offload: bool = False
    """Keep activations for the backward pass in CPU memory."""
    param_offload: bool = False
    """Keep weights in CPU memory while they are not in use."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory between steps."""
    torch_compile: bool = False
    """Compile each transformer layer."""
    use_liger: bool = False
    """Use Liger kernels on GPUs; needs the package liger-kernel."""
    fsdp_size: Positive | None = None
    """Number of ranks over which fsdp2, torchtitan or nemo_automodel splits a model, which must divide num_workers;
    null: all. Each group of this size has the whole model, so that weights are exchanged within the group, for example
    a node, and only gradients between groups (HSDP)."""
    tensor_parallel_size: Positive = 1
    """Number of ranks that share each layer's matrices, attention heads and experts (fsdp2, torchtitan,
    nemo_automodel). They compute the same rows. It must divide num_workers and the numbers of attention heads, of
    key-value heads and of experts. What each of them has is split over the other ranks."""
    ulysses_sequence_parallel_size: Positive = 1
    """Number of ranks that share one sequence (https://arxiv.org/abs/2309.14509). It must divide num_workers and the
    number of attention heads."""

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that compute the same rows."""
        return self.ulysses_sequence_parallel_size * self.tensor_parallel_size

    @property
    def fewest_ranks(self) -> int:
        """The smallest number of ranks that the sizes of groups allow; the others are its multiples."""
        return math.lcm(self.ulysses_sequence_parallel_size, self.tensor_parallel_size * (self.fsdp_size or 1))


class RoleConfig(ConfigSection):
    """Where and how another model of the Trainer runs. A key that is null has the value of the policy's key."""

    placement: Literal["actor", "own"] = "actor"
    """actor: in the processes of the policy; own: in separate processes."""
    strategy: str | None = None
    """See trainer.strategy."""
    num_workers: Positive | None = None
    """See trainer.num_workers; with `placement: own`."""
    device: Device | None = None
    """See trainer.device; with `placement: own`."""
    dtype: Dtype | None = None
    """Precision of the passes, and of the weights if they are not trained; null: for the critic trainer.dtype, for
    other models bfloat16 on GPUs and trainer.dtype on CPU."""
    cpu_threads: Positive | None = None
    """See trainer.cpu_threads; with `placement: own`."""
    ppo_max_token_len: Positive | None = None
    """See trainer.ppo_max_token_len."""
    param_offload: bool | None = None
    """See trainer.param_offload."""


class RewardModelConfig(ConfigSection):
    """A model that scores responses, besides the reward function."""

    placement: Literal["off", "serve", "worker"] = "off"
    """off: no reward model; serve: a Ray Serve deployment that the Rollouter calls; worker: a model of the Trainer,
    which scores training samples but not validation."""
    path: str | None = None
    """Directory of a sequence-classification model with one label, in Hugging Face format (safetensors), including its
    tokenizer and chat template."""
    weight: float = 1.0
    """Weight of the model's score in the reward; with `placement: serve` also in validation."""
    num_replicas: Positive = 1
    """Replicas of the Serve deployment, with one GPU each if engines would have GPUs (rollout.device)."""
    max_batch_size: Positive = 32
    """Responses scored in one forward pass of the Serve deployment."""
    trust_remote_code: bool = False
    """Run Python code from the model's directory. Set this only for sources that you trust."""
    worker: RoleConfig = RoleConfig()
    """How and where the reward model runs with `placement: worker`."""


class RefConfig(RoleConfig):
    """The frozen reference policy. With LoRA and `placement: actor` it is the policy without its adapters."""


class TeacherConfig(RoleConfig):
    """A frozen model that the policy learns from: the reverse KL divergence from it, token by token on the policy's own
    samples, is added to the advantages (docs/algorithms/on_policy_distill.md). `algorithm.adv_estimator:
    on_policy_distill` learns from it alone."""

    path: str | None = None
    """Model of any size with the tokenizer of the policy; null: no teacher."""
    coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the reverse KL divergence in the advantages."""


class CriticConfig(RoleConfig):
    """The value model, with `algorithm.adv_estimator: gae`."""

    path: str | None = None
    """Initial model of the critic; null: model.path. A missing value head starts at 0."""
    ppo_epochs: Positive = 1
    """Passes over each lease."""
    cliprange_value: Annotated[float, Field(gt=0)] | None = 0.5
    """New values are clipped to this range around the values at the start of the lease; null: no clipping."""
    warmup_steps: NonNegative = 0
    """Steps in which only the critic learns."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class TrainerConfig(EngineConfig, NodePool):
    """The training loop, and the engine of the trained policy."""

    total_training_steps: NonNegative | None = None
    """Optimizer steps of the run; null: `total_epochs` decides. 0: the model is validated and not trained, as by
    `asyncrl eval`, and no Trainer is started."""
    total_epochs: Positive = 1
    """Passes over the training prompts, when `total_training_steps` is null."""
    ppo_mini_batch_size: Positive = 32
    """Samples (prompts) per optimizer step."""
    ppo_epochs: Positive = 1
    """Passes over each lease; every mini-batch of every pass is one optimizer step."""
    optim: OptimConfig = OptimConfig()
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss that is added to the loss of a mixture of experts (docs/training.md); 0: none.
    Models were pretrained with values around 0.001."""
    val_before_train: bool = True
    """Validate version 0, the initial model."""
    test_freq: Frequency = -1
    """Steps between validations; -1: validate only before and after training."""
    validation_data_dir: str | None = None
    """Directory for every answer of each validation (`step_000050.jsonl`) and its figures (`step_000050.json`); null:
    they are not written."""
    lend_after_s: Annotated[float, Field(gt=0)] | None = None
    """Lend the Trainer's GPUs to generation when it has waited this many seconds for samples, until it has them; null:
    never. Additional engines, `num_workers` / rollout.tensor_parallel_size, sleep on these GPUs meanwhile
    (docs/gpu.md)."""
    partial_final_batch: Literal["train", "drop"] = "train"
    """Treatment of samples at the end that do not fill a lease: train on them, in smaller steps, or leave them out."""
    save_freq: Frequency = -1
    """Steps between checkpoints; -1: write one only at the end."""
    checkpoint_dir: str | None = None
    """Directory of the checkpoints, for this run alone, or an `fsspec` URL such as `s3://bucket/run`; null:
    `checkpoints` in the run directory. On storage that survives the machine of the driver, `resume=auto` continues the
    run on another machine from its last checkpoint (docs/reliability.md)."""
    save_last: bool = True
    """Write a checkpoint at the end of the run."""
    hf_export: Literal["every", "last", "never"] = "every"
    """Which checkpoints contain the policy in Hugging Face format, as `hf/`: `every` one, the `last` one of the run, or
    `never`. To write it, rank 0 needs memory for the whole model."""
    hf_export_dtype: Dtype = "float32"
    """Type of the exported weights. Weights are trained in float32, so other types round them; bfloat16 takes half the
    space."""
    max_checkpoints_to_keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted once a newer one is complete."""
