"""`model` and `data`: the trained model, the prompts, and the rules between their keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.problems import ConfigRule, RuleFunction, no_effect
from asyncrl.config.sections.base import ConfigSection, NonNegative, Positive


class ModelConfig(ConfigSection):
    """The model that is trained and served."""

    path: str = "asyncrl://quickstart"
    """Directory of a model in Hugging Face format (safetensors), or its name on the Hugging Face Hub.
    `asyncrl://quickstart` is a small model inside the package."""
    tokenizer_path: str | None = None
    """Directory of the tokenizer; null: the directory of the model."""
    chat_template: str | None = None
    """File with a Jinja chat template; null: the template of the tokenizer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`."""
    trust_remote_code: bool = False
    """Run Python code from the model's directory. Set this only for sources that you trust."""
    lora_rank: NonNegative = 0
    """Train low-rank adapters of this rank (LoRA) and freeze the weights; 0: train the weights."""
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    """Adapters are scaled by `lora_alpha / lora_rank`."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Layers that get an adapter: `all-linear`, or names such as `[q_proj, v_proj]`."""


class ReasoningGymConfig(ConfigSection):
    """A procedural task of reasoning-gym that generates the prompts, instead of files."""

    task: str
    """Name of the reasoning-gym data set, e.g. `chain_sum`."""
    train_size: Positive = 4096
    """Number of prompts in the training set."""
    val_size: NonNegative = 128
    """Number of prompts in the validation set, which is generated from another seed."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the task, e.g. `{min_terms: 2, max_terms: 6}`."""
    system_prompt: str | None = None
    """A system message before each question."""


class DataConfig(ConfigSection):
    """Where prompts come from. Rows have verl's fields: prompt, data_source, reward_model.ground_truth, extra_info."""

    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files with training prompts; `asyncrl://quickstart/train.jsonl` is inside the package."""
    val_files: tuple[str, ...] = ()
    """Files with validation prompts; empty: the run does not validate."""
    reasoning_gym: ReasoningGymConfig | None = None
    """Generate prompts from a reasoning-gym task instead of files."""
    max_prompt_length: Positive = 512
    """Maximum length of a prompt in tokens, after the chat template."""
    overlong_prompts: Literal["filter", "left", "right", "middle", "error"] = "filter"
    """Treatment of longer prompts: `filter` leaves them out and counts them; `left`, `right` and `middle` remove tokens
    there; `error` stops the run."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch, with `seed`; false: keep the order of the files."""
    max_train_samples: Positive | None = None
    """Number of rows to use, from the first one; null: all."""
    max_val_samples: Positive | None = None
    """Number of validation rows to use, from the first one; null: all."""


_GYM_AND_FILES = "data.reasoning_gym.task = {c.data.reasoning_gym.task} generates the prompts, and files are not read"

RULES: tuple[RuleFunction, ...] = (
    ConfigRule("data.train_files", lambda c: c.data.reasoning_gym is None and not c.data.train_files,
               "there are no prompts to train on",
               "set data.train_files=[FILE.parquet] (or .jsonl), or data.reasoning_gym.task, or data=quickstart"),
    ConfigRule("data.train_files", lambda c: c.data.reasoning_gym and c.data.train_files,
               _GYM_AND_FILES, "set data.train_files=[] or data.reasoning_gym=null"),
    ConfigRule("data.val_files", lambda c: c.data.reasoning_gym and c.data.val_files,
               _GYM_AND_FILES, "set data.val_files=[] or data.reasoning_gym=null"),
)  # fmt: skip

NO_EFFECT = (
    no_effect("model.lora_alpha model.target_modules", lambda c: c.model.lora_rank == 0,
              "model.lora_rank is 0", "set model.lora_rank"),
)  # fmt: skip
