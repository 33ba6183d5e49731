"""Models that a configuration names: whether they are there, and whether they are what their key needs.

Read are config.json and the headers of safetensors files: names and shapes, never a weight.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from asyncrl.config import places
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config

ALL_LINEAR = "all-linear"
REWARD_HEADS = ("score", "classifier")
"""What Hugging Face calls the head of a sequence classifier."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_LAST_LAYER = re.compile(r"(score|classifier)(\.out_proj)?\.weight$")
_NOT_ADAPTED = ("lm_head", "embed_out", "embed_tokens", "wte", "wpe")
"""Matrices of a language model that are no linear layers within it."""
_DEFAULT_LABELS = 2
"""Hugging Face's, which it leaves out of config.json."""
_LONGEST_HEADER = 100 * 2**20
"""Bytes: safetensors' own bound."""

Shapes = Mapping[str, tuple[int, ...]]


def problems(config: Config) -> Iterator[Problem]:
    """Of the policy's own model: what serving it needs."""
    yield from _directory("model.path", config.model.path, ("config.json",))
    if config.model.tokenizer_path is not None:
        yield from _directory(
            "model.tokenizer_path", config.model.tokenizer_path, (), "null takes the one that is with model.path"
        )
    limit = model_config(config.model.path).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_model_len > limit:
        yield Problem(
            "rollout.max_model_len",
            config.max_model_len,
            f"the model at {config.model.path} has positions for {limit} tokens; the engine would refuse to start",
            f"lower data.max_prompt_length + rollout.response_length (or rollout.max_model_len) to {limit} or less",
        )


def training_problems(config: Config) -> Iterator[Problem]:
    """Of the layers to adapt, and of the models besides the policy."""
    yield from _targets(config)
    if config.needs_critic and config.critic.path is not None:
        fix = "critic.path=null starts from model.path, with a new value head"
        yield from _directory("critic.path", config.critic.path, ("config.json",), fix)
    if config.reward_model.placement != "off" and config.reward_model.path is not None:
        fix = "reward_model.placement=off does without one"
        found = list(_directory("reward_model.path", config.reward_model.path, ("config.json",), fix))
        yield from found or _reward_model(config)


def model_config(path: str) -> Mapping[str, Any]:
    """The config.json of the model at `path`; empty if it is not on this machine or not readable as such."""
    local = places.local(path)
    if local is None or not (local / "config.json").is_file():
        return {}
    try:
        loaded = json.loads((local / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def shapes(path: str) -> Shapes:
    """Each tensor of the model at `path`; empty if its files are not on this machine or not readable."""
    local = places.local(path)
    files = sorted(local.glob("*.safetensors")) if local is not None and local.is_dir() else []
    found: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            found |= {name: tuple(item["shape"]) for name, item in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # what loads it says what is wrong with it
    return found


def num_parameters(path: str) -> int | None:
    """Parameters of the model at `path`; None if it is not on this machine."""
    return sum(math.prod(shape) for shape in shapes(path).values()) or None


def _directory(key: str, path: str, needed: tuple[str, ...], otherwise: str = "") -> Iterator[Problem]:
    """Whether `path` has the files that are `needed`, and with any of them weights too.

    Args:
        otherwise: what else the key may be, for one that names nothing.
    """
    local = places.local(path)
    also = f"; {otherwise}" if otherwise else ""
    if local is not None and local.is_dir():
        for name in needed:
            if not (local / name).is_file():
                yield Problem(
                    key,
                    path,
                    f"it has no {name}, so it is no model in Hugging Face format",
                    "point it at the directory that save_pretrained wrote",
                )
        if needed and not any(local.glob("*.safetensors")):
            yield Problem(
                key,
                path,
                "it has no *.safetensors weights; pickled weights are never read",
                "convert it: save_pretrained(DIR, safe_serialization=True)",
            )
    elif local is None or not _HUB_NAME.fullmatch(path):
        yield places.missing(key, path, "the directory", also)
    elif os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") and not _in_hub_cache(path):
        yield Problem(
            key,
            path,
            "it is no directory here, not in the hub's cache, and HF_HUB_OFFLINE forbids a download",
            f"{places.like(local)}; or unset HF_HUB_OFFLINE{also}",
        )


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _targets(config: Config) -> Iterator[Problem]:
    """Names in `model.target_modules` that no matrix in the model's files has.

    Files may lack a prefix that the modules have (`transformer.h.0` is saved as `h.0`), so either may end the other.
    """
    wanted = config.model.target_modules
    if config.model.lora_rank == 0 or wanted == ALL_LINEAR:
        return
    suffix = ".weight"
    modules = [
        name.removesuffix(suffix)
        for name, shape in shapes(config.model.path).items()
        if name.endswith(suffix) and len(shape) == 2 and name.split(".")[-2] not in _NOT_ADAPTED
    ]
    if not modules:
        return
    known = sorted({module.rpartition(".")[2] for module in modules})
    for target in (wanted,) if isinstance(wanted, str) else wanted:
        if not any(f".{module}".endswith(f".{target}") or target.endswith(f".{module}") for module in modules):
            close = get_close_matches(target, known, n=1)
            hint = f"instead of {target}, did you mean {close[0]}? " if close else ""
            yield Problem(
                "model.target_modules",
                wanted,
                f"the model at {config.model.path} has no linear layer called {target}, so it would get no adapter",
                f"{hint}There are {', '.join(known)}; or {ALL_LINEAR}",
            )


def _reward_model(config: Config) -> Iterator[Problem]:
    """Whether it gives one score: as config.json says, or by its head where the Trainer, which wants one, loads it."""
    model = config.reward_model
    assert model.path is not None
    settings, found = model_config(model.path), shapes(model.path)
    heads = {name: shape for name, shape in found.items() if set(name.split(".")[:-1]) & set(REWARD_HEADS)}
    kinds = [str(kind) for kind in settings.get("architectures") or ()]
    fix = "give a sequence-classification model with one label, saved by save_pretrained"
    if kinds and all(kind.endswith(_LANGUAGE_MODELS) for kind in kinds) and not heads:
        yield Problem(
            "reward_model.path",
            model.path,
            f"it is a language model ({', '.join(kinds)}) and has no head that scores: its scores would be random",
            fix,
        )
        return
    rows = [shape[0] for name, shape in heads.items() if _LAST_LAYER.search(name) and shape]
    told = settings.get("id2label", settings.get("num_labels"))
    labels = len(told) if isinstance(told, dict) else told
    if model.placement == "worker" and rows:
        labels = rows[0]
    elif model.placement == "serve" and settings and labels is None:
        labels = _DEFAULT_LABELS
    if isinstance(labels, int) and labels != 1:
        yield Problem("reward_model.path", model.path, f"the model has {labels} labels: a reward is one number", fix)
