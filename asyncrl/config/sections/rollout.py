"""`rollout`: generation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from asyncrl.config.sections.base import Dtype, Positive, Section, Share
from asyncrl.config.sections.multi_turn import AgentConfig, MultiTurnConfig, OverSampleConfig


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
    """Most tokens of a response: of all its turns, and of what tools and users say between them."""
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
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    over_sample: OverSampleConfig = OverSampleConfig()
    agent: AgentConfig = AgentConfig()
    dump_dir: str | None = None
    """Write every trajectory there as JSONL: messages, tokens, masks, versions, timings, rewards. null: nowhere."""
