"""Every key a user can set, with its one default. Pure: importing this loads pydantic and nothing heavier.

Key names follow verl's where verl has the concept. `docs/config.md` is generated from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ModelConfig(Section):
    """The model that is trained and served."""

    path: str = "asyncrl://quickstart"
    """Directory in Hugging Face format (safetensors), or a hub name. `asyncrl://quickstart` is shipped here."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; null: `path`."""
    chat_template: str | None = None
    """File with a Jinja chat template; null: the tokenizer's own."""
    trust_remote_code: bool = False
    """Let the model's directory run its own Python code. Only for sources you trust."""
    lora_rank: NonNegative = 0
    """Train low-rank adapters of this rank (LoRA) instead of the weights; 0: the weights themselves."""
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Layers that get an adapter: `all-linear`, or names such as `[q_proj, v_proj]`."""


class ReasoningGymConfig(Section):
    """Procedural tasks instead of files: prompts come from reasoning-gym by task name."""

    task: str
    """Data set name, e.g. `chain_sum`."""
    train_size: Positive = 4096
    """Prompts in the training set."""
    val_size: Positive = 128
    """Prompts in the validation set, generated from another seed."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the task, e.g. `{min_terms: 2, max_terms: 6}`."""
    system_prompt: str | None = None
    """A system message put before each question."""


class DataConfig(Section):
    """Where prompts come from. Rows have verl's fields: prompt, data_source, reward_model.ground_truth, extra_info."""

    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files; `asyncrl://quickstart/train.jsonl` is shipped here."""
    val_files: tuple[str, ...] = ()
    """Validation files; none: no validation."""
    reasoning_gym: ReasoningGymConfig | None = None
    """Generate prompts from a reasoning-gym task instead of files."""
    max_prompt_length: Positive = 512
    """Longest prompt, in tokens, after the chat template."""
    overlong_prompts: Literal["filter", "left", "right", "middle", "error"] = "filter"
    """What happens to longer ones: filtered out (and counted), cut on a side or in the middle, or an error."""
    shuffle: bool = True
    """Another seeded order every epoch; false: file order."""
    max_train_samples: Positive | None = None
    """Use only the first so many rows."""
    max_val_samples: Positive | None = None
    """Use only the first so many validation rows."""


class KlControlConfig(Section):
    """How much the KL divergence from the reference counts in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the coefficient follows the measured KL towards `target_kl` (https://arxiv.org/abs/1909.08593)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    """The coefficient, or where the adaptive one starts."""
    target_kl: Annotated[float, Field(gt=0)] = 0.1
    """Of the adaptive controller, in nats per response."""
    horizon: Positive = 10000
    """Of the adaptive controller: responses over which an error of 20 % or more changes it by a factor of about 1.2."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): groups that teach nothing are dropped as `filtered` and replaced by others."""

    enable: bool = False
    """Drop samples whose responses all have the same reward."""
    max_consecutive: Positive = 256
    """So many filtered samples in a row, without a usable one, stop the run: the task is too hard or too easy."""


class RolloutCorrectionConfig(Section):
    """Correction for tokens sampled by an older policy, or by an engine that computes differently."""

    bypass_mode: bool = True
    """true: the proximal policy is the behaviour policy as recorded. false: its log-probs are recomputed by the
    Trainer when a lease starts (decoupled PPO, https://arxiv.org/abs/2505.24298)."""
    rollout_is: Literal["none", "token", "sequence"] = "none"
    """Importance weights proximal / behaviour: none, of each token, or the product over a response."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Weights outside the thresholds: cut to the upper one (TIS), or set to 0 (MIS, IcePop)."""
    rollout_is_threshold: Annotated[float, Field(gt=0)] = 2.0
    """Upper threshold of a weight."""
    rollout_is_threshold_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower threshold of a weight, with `rollout_is_mode: mask`; 0: none. IcePop: 0.5 with an upper one of 5."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the lease; needs `bypass_mode: false`."""
    rollout_rs: Literal[
        "none", "geometric",
        "token_k1", "token_k2", "token_k3",
        "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        "seq_max_k1", "seq_max_k2", "seq_max_k3",
    ] = "none"  # fmt: skip
    """Rejection: leave out tokens, or whole responses, whose divergence between behaviour and proximal policy is out
    of bounds. geometric: by the geometric mean of the token ratios."""
    rollout_rs_threshold: Annotated[float, Field(gt=0)] = 1.001
    """Upper bound: of the ratio for `geometric`, of |k1|, k2 or k3 in nats otherwise."""
    rollout_rs_threshold_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the ratio for `geometric`; 0: one over the upper bound."""


class AlgorithmConfig(Section):
    """Advantages and losses. docs/algorithms/ has a page for each name."""

    adv_estimator: Literal[
        "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gae"
    ] = "grpo"
    """How rewards become advantages. `gae` trains a critic (see `critic`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation (GRPO); false: only subtract the mean (Dr.GRPO)."""
    gamma: Share = 1.0
    """Discount per token of `gae` and `reinforce_plus_plus`."""
    lam: Share = 1.0
    """Trace decay of `gae`."""
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = "ppo"
    """The objective."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped at 1 minus this."""
    clip_ratio_high: Annotated[float, Field(gt=0)] = 0.2
    """The probability ratio is clipped at 1 plus this."""
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: for negative advantages the loss is bounded as if the ratio were at most this; null: off."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"  # fmt: skip
    """What a mini-batch's loss is the mean of."""
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of `seq-mean-token-sum-norm`, in tokens; null: rollout.response_length."""
    entropy_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL loss against the frozen reference model."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k3"
    """Estimator of the KL divergence (Schulman, http://joschu.net/blog/kl-approx.html)."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reference model from each token's reward."""
    kl_penalty: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator of that divergence."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1: off. Below 1, recorded log-probs are of the truncated distribution's parent."""
    top_k: int = -1
    """-1: off."""
    min_p: Share = 0.0
    """Minimum probability relative to the most likely token; 0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""


class ValSamplingConfig(SamplingConfig):
    """Sampling for validation."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    n: Positive = 1
    """Responses per validation prompt."""


class RolloutConfig(Section):
    """Generation: the engines and what is asked of them."""

    n: Positive = 8
    """Responses per prompt (the GRPO group)."""
    response_length: Positive = 256
    """Most tokens of a response."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn for training."""
    val: ValSamplingConfig = ValSamplingConfig()
    """How tokens are drawn for validation."""
    num_replicas: Positive = 1
    """vLLM engines behind Ray Serve."""
    tensor_parallel_size: Positive = 1
    """GPUs (or CPU processes) of one engine."""
    max_concurrent_samples: Positive = 64
    """Samples in generation at once, over all replicas."""
    max_num_seqs: Positive = 256
    """Sequences one engine decodes together."""
    max_model_len: Positive | None = None
    """Context of the engine in tokens; null: data.max_prompt_length + rollout.response_length."""
    dtype: Dtype = "float32"
    """Of weights and activations in the engine. float32 on CPUs without AVX-512, bfloat16 on GPUs."""
    enforce_eager: bool = True
    """false: CUDA graphs, on GPUs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory for one engine."""
    cpu_kv_cache_gib: Positive = 1
    """Memory for the KV cache of an engine on CPU, in GiB."""
    cpu_threads: Positive = 1
    """Threads of an engine on CPU."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed on to vLLM's AsyncEngineArgs as they are."""
    max_attempts: Positive = 3
    """Tries of one generate call, or one call to the reward model, over failures of a replica; aborts by a weight sync
    don't count."""


class OverlongBufferConfig(Section):
    """Soft punishment of overlong responses (DAPO, https://arxiv.org/abs/2503.14476, eq. 13)."""

    enable: bool = False
    """Subtract from the reward of responses that reach into the last `len` tokens before rollout.response_length."""
    len: Positive = 64
    """Tokens over which the punishment rises from 0 to `penalty_factor`."""
    penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """Punishment of a response of full length."""


class RewardConfig(Section):
    """How a response is scored."""

    function: str = "exact_match"
    """`exact_match`, `math_verify`, `reasoning_gym`, or your own: `module:function` or `path/file.py:function`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments given to every call."""
    batch: bool = False
    """The function takes lists, a whole group at a time, and returns a list."""
    on_error: Literal["stop", "drop"] = "stop"
    """A function that raises stops the run, or drops the sample within `max_errors`."""
    max_errors: NonNegative = 16
    """With `on_error: drop`: the run stops when more samples than this were dropped for it."""
    timeout_s: Seconds = 60.0
    """Deadline of one call, of the function or of the reward model's Serve deployment."""
    max_concurrency: Positive = 8
    """Calls at once."""
    weight: float = 1.0
    """Of the function's score in the reward; the rest is `reward_model.weight` times the model's."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()


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
    save_freq: int = -1
    """Checkpoint every so many steps; -1: only at the end."""
    save_last: bool = True
    """Checkpoint at the end of the run."""
    max_checkpoints_to_keep: Positive = 2
    """Older checkpoints are deleted once a newer one is complete."""


class AsyncTrainingConfig(Section):
    """How far generation and training may drift apart. docs/design.md §3 has the four usual modes."""

    staleness_threshold: Annotated[float, Field(ge=0)] = 1.0
    """Generation may run this many versions' worth of samples ahead; 0: on-policy pacing."""
    trigger_parameter_sync_step: Positive = 1
    """A version is published every so many leases."""
    require_batches: Positive = 1
    """Mini-batches per lease; each is one optimizer step."""
    partial_rollout: bool = True
    """Responses in flight at a weight sync go on under the new weights; false: the sync waits for them."""
    partial_mode: Literal["keep", "abort"] = "keep"
    """How they go on: frozen in the engine with their KV cache, or handed back to the client and resubmitted."""
    max_staleness: NonNegative | None = None
    """Bound on `trainer version - oldest version of any token`; null: none."""
    stale_action: Literal["drop", "mask", "keep"] = "drop"
    """Beyond the bound: drop the sample, mask its too old tokens, or train on it and only count it."""


class WeightSyncConfig(Section):
    """From trainer to engines."""

    backend: Literal["object_store"] = "object_store"
    """How versions travel."""
    verify: Literal["every", "first", "off"] = "every"
    """Compare the engine's weights with the published checksums after each load, only the first, or never."""
    clear_kv_cache: bool = False
    """With `partial_mode: keep`: recompute the KV cache of running requests under the new weights."""


class LoggingConfig(Section):
    """What a run writes and shows."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """auto: a live view on a terminal, plain lines elsewhere."""
    jsonl: bool = True
    """metrics.jsonl in the run directory."""
    tensorboard: bool = True
    """TensorBoard files in the run directory."""
    level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of the log files in the run directory and of what reaches the terminal."""


class TimeoutsConfig(Section):
    """Deadlines, in seconds."""

    start_s: Seconds = 600.0
    """For an engine or the trainer to come up."""
    call_s: Seconds = 60.0
    """For a call between parts that should answer at once."""
    generate_s: Seconds = 600.0
    """For one generate call."""
    train_s: Seconds = 1800.0
    """For one call to the training processes: a step, or a forward pass over a lease."""
    collective_s: Seconds = 300.0
    """For one collective operation between training processes."""
    apply_s: Seconds = 300.0
    """For a replica to load a version."""
    watchdog_s: Seconds = 600.0
    """A run in which nothing moves for so long stops and says what it waits on."""
    stop_s: Seconds = 15.0
    """For a clean stop: checkpoint, summary, Ray and Serve down."""


class RayConfig(Section):
    """The Ray cluster."""

    address: str | None = None
    """null: a private one on this machine, gone at the end; else `auto` or `host:port`."""
    object_store_memory_bytes: Positive | None = None
    """Of a private cluster; null: Ray decides."""


class ServeConfig(Section):
    """The HTTP side of `asyncrl serve`."""

    host: str = "127.0.0.1"
    """Loopback unless you say otherwise, and then `api_key_env` is needed."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """TCP port."""
    api_key_env: str | None = None
    """Environment variable that holds the API key clients must send."""


class Config(Section):
    """The whole run."""

    mode: Literal["fully_async", "sync"] = "fully_async"
    """Set by `asyncrl launch`."""
    project_name: str = "asyncrl"
    """Groups experiments in metric sinks."""
    experiment_name: str = "quickstart"
    """Names the directory of its runs below runs/."""
    run_dir: str | None = None
    """null: runs/<experiment_name>/<time>/."""
    resume: str = "none"
    """`none`; `auto`: the newest checkpoint of this experiment, if there is one; or a run or checkpoint directory."""
    seed: NonNegative = 0
    """Of data order and torch. Same seed: same prompts in the same feed order."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    logging: LoggingConfig = LoggingConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    ray: RayConfig = RayConfig()
    serve: ServeConfig = ServeConfig()

    @property
    def samples_per_lease(self) -> int:
        return self.trainer.ppo_mini_batch_size * self.async_training.require_batches

    @property
    def samples_per_version(self) -> int:
        """`S` of docs/design.md §3."""
        return self.samples_per_lease * self.async_training.trigger_parameter_sync_step

    @property
    def steps_per_lease(self) -> int:
        """Optimizer steps of the policy that one lease gives."""
        return self.async_training.require_batches * self.trainer.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator == "gae"

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_model_len or self.data.max_prompt_length + self.rollout.response_length
