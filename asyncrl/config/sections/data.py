"""`model`, `data`, `sft`: the trained model, prompts and demonstrations, and the checks of their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from asyncrl import assets
from asyncrl.config.environment import (
    check_code,
    check_model_path,
    check_protocol,
    local_path,
    model_config,
    not_there,
    tensor_shapes,
    writable_parent,
)
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, no_effect
from asyncrl.config.sections.base import ConfigSection, FileNames, ImportPath, NonNegative, Positive
from asyncrl.core.failures import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

_JSON_LINES = (".jsonl", ".ndjson")
HUB = "hub:"
DATA_SUFFIXES = (".parquet", *_JSON_LINES, ".json")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "hdfs": "pyarrow, and Hadoop's client libraries",
    "http": "aiohttp requests",
    "https": "aiohttp requests",
    "hf": "huggingface_hub",
    "hub:": "datasets",
    "oss": "ossfs",
}
"""The package of each filesystem of `fsspec` that needs one."""
_HUB_FORM = re.compile(
    r"hub:(?P<dataset>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^@:]+))?(?::(?:(?P<config>[^:/]+)/)?(?P<split>[^:/]+))?"
)
_HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+")
_ALL_LINEAR = "all-linear"
_NOT_ADAPTED = ("lm_head", "embed_out", "embed_tokens", "wte", "wpe")
"""Names of matrices that get no adapter: embeddings and output heads."""
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM has for the largest rank of adapters."""
_ENGINE_LAYERS = frozenset(
    ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
)
"""Names of the layers whose adapters engines load (`weight_sync.lora=adapter`)."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys in config.json of mixtures of experts."""
_WITHOUT_ENGINE_ADAPTERS = {
    **dict.fromkeys(NUM_EXPERTS, "it is a mixture of experts"),
    "kv_lora_rank": "it has latent attention (MLA)",
    "vision_config": "it has a vision tower",
    "audio_config": "it has an audio tower",
}
"""Keys in config.json of models whose adapters engines do not load."""


class HubName(NamedTuple):
    """A split of a data set on the Hugging Face Hub: `hub:owner/name[@revision][:[config/]split]`."""

    name: str
    """As written."""
    dataset: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, name: str, key: str) -> HubName:
        """Read a name. Without a split, it means the split `train` of training files.

        Raises:
            ConfigError: it is not of this form, or it lacks a split that has no default.
        """
        match = _HUB_FORM.fullmatch(name)
        form = "hub:owner/name:split, with @revision and config/ where needed: hub:openai/gsm8k:main/test"
        if match is None:
            raise ConfigError(f"{key}: {name} does not name a data set on the hub; write {form}")
        split = match["split"] or ("train" if key == "data.train_files" else None)
        if split is None:
            raise ConfigError(f"{key}: {name} names no split, and only training has a default (train); write {form}")
        return cls(name, match["dataset"], match["revision"], match["config"], split)


def is_remote(name: str) -> bool:
    """Return whether a data file is named by a URL or is on the hub."""
    return name.startswith(HUB) or ("://" in name and not name.startswith(assets.SCHEME))


def data_suffix(name: str) -> str:
    """Return the suffix of a file, or of the path of a URL, in lower case."""
    path = name.partition("://")[2].partition("?")[0] if "://" in name else name
    return PurePosixPath(path).suffix.lower()


def protocol_package(name: str) -> str:
    """Return the packages that pip has to install for a URL."""
    protocol = HUB if name.startswith(HUB) else name.partition("://")[0]
    return _PACKAGES.get(protocol, f"the package of fsspec for {protocol}://")


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
    target_modules: str | tuple[str, ...] = _ALL_LINEAR
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

    train_files: FileNames = ()
    """Parquet, JSON or JSONL files with training prompts: paths, `fsspec` URLs such as `s3://bucket/train.parquet`, or
    data sets of the Hugging Face Hub, `hub:owner/name:split`. `asyncrl://quickstart/train.jsonl` is inside the
    package. A single file may be given without a list."""
    val_files: FileNames = ()
    """Files with validation prompts; empty: the run does not validate."""
    prompt_key: str = "prompt"
    """Column with the prompt: chat messages, or a text that becomes the user's message."""
    ground_truth_key: str = "reward_model.ground_truth"
    """Column with the correct answer; a dot leads into a mapping."""
    reward_fn_key: str = "data_source"
    """Column with the origin of the row, by which reward functions may choose."""
    image_key: str = "images"
    """Column with the images of the prompt."""
    video_key: str = "videos"
    """Column with the videos of the prompt."""
    reasoning_gym: ReasoningGymConfig | None = None
    """Generate prompts from a reasoning-gym task instead of files."""
    dataset: ImportPath | None = None
    """Your own function that returns the rows, instead of files (docs/extending.md)."""
    dataset_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `dataset`."""
    max_prompt_length: Positive = 512
    """Maximum length of a prompt in tokens, after the chat template."""
    overlong_prompts: Literal["filter", "left", "right", "middle", "error"] = "filter"
    """Treatment of longer prompts: `filter` leaves them out and counts them; `left`, `right` and `middle` remove tokens
    there; `error` stops the run."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch, with `seed`; false: keep the order of the files."""
    sampler: ImportPath | None = None
    """Your own function that returns the order of the prompts in an epoch (docs/extending.md); null: see `shuffle`."""
    max_train_samples: Positive | None = None
    """Number of rows to use, from the first one; null: all."""
    max_val_samples: Positive | None = None
    """Number of validation rows to use, from the first one; null: all."""
    num_workers: NonNegative | None = None
    """Processes that check and tokenize the rows; 0: none but the Rollouter's; null: one per CPU, up to 16. Small data
    sets need fewer. The result does not depend on it."""
    cache_dir: str = "~/.asyncrl/data"
    """Directory in which launches keep downloads and tokenized prompts for the next ones. What no launch has used for
    30 days is deleted."""


class SftConfig(ConfigSection):
    """How `asyncrl sft` reads the demonstrations in the files of `data` (docs/sft.md). A row has chat messages, or a
    prompt and a response."""

    messages_key: str = "messages"
    """Column of the chat messages. All turns of the assistant are trained, unless `turns` is `last`."""
    response_key: str = "response"
    """Column of the response, a text, of rows without messages; their prompt is in `data.prompt_key`."""
    turns: Literal["all", "last"] = "all"
    """Which turns of the assistant are trained."""
    max_length: Positive = 2048
    """Maximum length of a conversation in tokens; longer ones are left out and counted."""


def num_prompts(config: Config) -> int | None:
    """Return the number of rows of the training set before filtering, or None if counting them needs a library."""
    if config.data.dataset is not None:
        return None
    if config.data.reasoning_gym is not None:
        return config.data.reasoning_gym.train_size
    total = 0
    for name in config.data.train_files:
        local = None if is_remote(name) else local_path(name)
        if local is None or local.suffix.lower() not in _JSON_LINES or not local.is_file():
            return None
        with local.open("rb") as stream:
            total += sum(1 for line in stream if line.strip())
    return min(total, config.data.max_train_samples or total)


def _policy(config: Config) -> Iterator[ConfigProblem]:
    path, tokenizer = config.model.path, config.model.tokenizer_path
    yield from check_model_path("model.path", path)
    if tokenizer is not None:
        otherwise = "; null means the tokenizer at model.path"
        yield from check_model_path("model.tokenizer_path", tokenizer, otherwise, is_model=False)
    limit = model_config(path).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_model_len > limit:
        positions = f"the model at {path} has positions for {limit} tokens"
        if config.mode == "sft":
            consequence = f"{positions}; longer conversations cannot be trained"
            yield ConfigProblem("sft.max_length", config.max_model_len, consequence, f"set sft.max_length={limit}")
            return
        consequence = f"{positions}; the engine would refuse to start"
        lengths = "data.max_prompt_length + rollout.response_length (or rollout.max_model_len)"
        yield ConfigProblem("rollout.max_model_len", config.max_model_len, consequence, f"lower {lengths} to {limit}")


def _chat_template(config: Config) -> Iterator[ConfigProblem]:
    template = config.model.chat_template
    if template is not None and not ((local := local_path(template)) and local.is_file()):
        yield not_there("model.chat_template", template, "the file")


def _data_files(config: Config) -> Iterator[ConfigProblem]:
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            local = None if is_remote(name) else local_path(name)
            if name.startswith(HUB):
                yield from _hub_name(key, name)
            elif not is_remote(name) and (local is None or not local.is_file()):
                yield not_there(key, name, "the file", _hub_hint(name))
            elif data_suffix(name) not in DATA_SUFFIXES:
                consequence = "files with this suffix cannot be read"
                yield ConfigProblem(key, name, consequence, f"use {' or '.join(DATA_SUFFIXES)}{_hub_hint(name)}")
            elif is_remote(name):
                yield from check_protocol(key, name, "it cannot be read", protocol_package(name))


def _hub_hint(name: str) -> str:
    """Return the end of a fix for a name that may be meant as a data set of the Hugging Face Hub."""
    dataset = name.removeprefix("hf://").removeprefix("datasets/")
    if data_suffix(name) in DATA_SUFFIXES or not _HUB_DATASET.fullmatch(dataset):
        return ""
    return f"; a data set of the Hugging Face Hub is written {HUB}{dataset}:SPLIT"


def _hub_name(key: str, name: str) -> Iterator[ConfigProblem]:
    try:
        HubName.parse(name, key)
    except ConfigError as error:
        consequence, _, fix = error.message.removeprefix(f"{key}: {name} ").partition("; ")
        yield ConfigProblem(key, name, f"it {consequence}", fix)


def _cache_dir(config: Config) -> Iterator[ConfigProblem]:
    parent, obstacle = writable_parent(Path(config.data.cache_dir))
    if obstacle and config.data.train_files:
        yield ConfigProblem("data.cache_dir", config.data.cache_dir, f"{parent} {obstacle}", "choose another directory")


def _own_code(config: Config) -> Iterator[ConfigProblem]:
    for key, name in (("data.dataset", config.data.dataset), ("data.sampler", config.data.sampler)):
        if name is not None:
            yield from check_code(key, name, (), "function")


def engine_lora_rank(model: ModelConfig) -> int | None:
    """Return the smallest value of vLLM's `max_lora_rank` that holds the model's adapters, or None if there is none."""
    return next((rank for rank in _ENGINE_RANKS if rank >= model.lora_rank), None)


def adapted_layers(model: ModelConfig) -> list[str]:
    """Return the last parts of the names of the layers that get an adapter, sorted: `down_proj`, `q_proj`, ….

    If the files of the model are not on this machine, those of `all-linear` are unknown, and the list is empty.
    """
    modules, targets = _linear_layers(model.path), model.target_modules
    if targets != _ALL_LINEAR:
        names = (targets,) if isinstance(targets, str) else targets
        found = [module for module in modules if any(_fits(name, module) for name in names)]
        modules = found if modules else list(names)
    return sorted({module.rpartition(".")[2] for module in modules})


def _linear_layers(path: str) -> list[str]:
    """Return the names of the matrices in a model's files that may get an adapter."""
    return [
        name.removesuffix(".weight")
        for name, shape in tensor_shapes(path).items()
        if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] not in _NOT_ADAPTED
    ]


def _fits(target: str, module: str) -> bool:
    return f".{module}".endswith(f".{target}") or target.endswith(f".{module}")


def _adapter_sync(config: Config) -> Iterator[ConfigProblem]:
    """Check that engines can load the adapters of the model."""
    key, value, merged = "weight_sync.lora", config.weight_sync.lora, "set weight_sync.lora=merged"
    if value != "adapter" or config.model.lora_rank == 0:
        return
    described = model_config(config.model.path)
    described = {**described, **(described.get("text_config") or {})}
    for name, reason in _WITHOUT_ENGINE_ADAPTERS.items():
        if described.get(name):
            consequence = (
                f"the model at {config.model.path} cannot be served from its adapters: {reason} ({name} in its "
                "config.json), for which engines load merged weights only"
            )
            yield ConfigProblem(key, value, consequence, merged)
            return
    layers = adapted_layers(config.model)
    if others := [name for name in layers if name not in _ENGINE_LAYERS]:
        known = [name for name in layers if name in _ENGINE_LAYERS]
        fix = f"set model.target_modules=[{','.join(known)}], or {merged.removeprefix('set ')}" if known else merged
        loaded = ", ".join(sorted(_ENGINE_LAYERS))
        consequence = f"{', '.join(others)} would get adapters, and engines load those of {loaded} only"
        yield ConfigProblem("model.target_modules", config.model.target_modules, consequence, fix)


def _target_modules(config: Config) -> Iterator[ConfigProblem]:
    """Check that each name in `model.target_modules` is a matrix in the model's files.

    Files may lack a prefix that the modules have (`transformer.h.0` is saved as `h.0`), so a target also matches a
    saved name that it ends with.
    """
    targets = config.model.target_modules
    if config.model.lora_rank == 0 or targets == _ALL_LINEAR:
        return
    modules = _linear_layers(config.model.path)
    known = sorted({module.rpartition(".")[2] for module in modules})
    for target in (targets,) if isinstance(targets, str) else targets:
        if modules and not any(_fits(target, one) for one in modules):
            close = get_close_matches(target, known, n=1)
            hint = f"instead of {target}, did you mean {close[0]}? " if close else ""
            yield ConfigProblem(
                "model.target_modules",
                targets,
                f"the model at {config.model.path} has no linear layer called {target}, so it would get no adapter",
                f"{hint}There are {', '.join(known)}; or {_ALL_LINEAR}",
            )


_GYM_AND_FILES = "data.reasoning_gym.task = {c.data.reasoning_gym.task} generates the prompts, and files are not read"

RULES: tuple[RuleFunction, ...] = (
    ConfigRule("data.train_files",
               lambda c: not (c.data.reasoning_gym or c.data.train_files or c.data.dataset or c.validates_only),
               "there are no prompts to train on",
               "set data.train_files=[FILE.parquet] (or .jsonl), data.reasoning_gym.task, data.dataset, or "
               "data=quickstart"),
    ConfigRule("data.dataset", lambda c: c.data.dataset
               and (c.data.reasoning_gym or c.data.train_files or c.data.val_files),
               "it returns the rows of training and validation, and data.reasoning_gym or files would not be used",
               "set data.train_files=[] data.val_files=[] data.reasoning_gym=null, or data.dataset=null"),
    ConfigRule("data.train_files", lambda c: c.data.reasoning_gym and c.data.train_files,
               _GYM_AND_FILES, "set data.train_files=[] or data.reasoning_gym=null"),
    ConfigRule("data.val_files", lambda c: c.data.reasoning_gym and c.data.val_files,
               _GYM_AND_FILES, "set data.val_files=[] or data.reasoning_gym=null"),
    ConfigRule("data.reasoning_gym", lambda c: c.mode == "sft" and c.data.reasoning_gym,
               "its rows are questions without responses, and `asyncrl sft` learns from responses",
               "set data.reasoning_gym=null and data.train_files"),
    ConfigRule("data.sampler", lambda c: c.mode == "sft" and c.data.sampler,
               "it orders the prompts of a launch; `asyncrl sft` orders rows by data.shuffle and seed",
               "leave it out", "warning"),
)  # fmt: skip

ENGINE_ENVIRONMENT: tuple[RuleFunction, ...] = (_policy, _chat_template)
"""Checks for a run and for `asyncrl serve`."""

ENVIRONMENT: tuple[RuleFunction, ...] = (
    *ENGINE_ENVIRONMENT,
    _data_files,
    _cache_dir,
    _own_code,
    _target_modules,
    _adapter_sync,
)

NO_EFFECT = (
    no_effect("model.lora_alpha model.target_modules", lambda c: c.model.lora_rank == 0,
              "model.lora_rank is 0", "set model.lora_rank"),
    no_effect("data.prompt_key data.ground_truth_key data.reward_fn_key data.image_key data.video_key",
              lambda c: c.data.reasoning_gym is not None, "data.reasoning_gym generates the rows",
              "set data.reasoning_gym=null"),
    no_effect("data.num_workers", lambda c: c.data.reasoning_gym is not None or c.data.dataset is not None,
              "rows that are not in files are tokenized by the Rollouter", "give files"),
    no_effect("data.dataset_kwargs", lambda c: c.data.dataset is None, "data.dataset is null", "set data.dataset"),
    no_effect("data.shuffle", lambda c: c.data.sampler is not None,
              "data.sampler = {c.data.sampler} orders the prompts", "set data.sampler=null"),
)  # fmt: skip
