"""The model and the prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.sections.base import NonNegative, Positive, Section


class ModelConfig(Section):
    """The model that is trained and served."""

    path: str = "asyncrl://quickstart"
    """Directory in Hugging Face format (safetensors), or a hub name. `asyncrl://quickstart` is shipped here."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; null: `path`."""
    chat_template: str | None = None
    """File with a Jinja chat template; null: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Given to the chat template, say `{enable_thinking: false}`."""
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
    val_size: NonNegative = 128
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
