"""What an engine is made of, as files: safetensors and JSON, no pickle. And its weights, as arrays for the engines.

hf/                     model weights and configuration, tokenizer: from_pretrained loads it
optimizer.safetensors   `{parameter}.exp_avg`, `.exp_avg_sq`, `.step`
rng.safetensors         torch's generators
engine.json             optimizer steps taken: all the schedule needs
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.assets import resolve
from asyncrl.config.schema import ModelConfig
from asyncrl.failures import ConfigError
from asyncrl.manifest import HF_DIRECTORY
from trainer.engine.local import LocalEngine, load_model
from trainer.engine.optim import load_optimizer_tensors, optimizer_tensors

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


def save_engine(engine: LocalEngine, directory: Path, model: ModelConfig) -> None:
    """Write the engine's whole state into `directory`, which exists."""
    hf = directory / HF_DIRECTORY
    engine.model.save_pretrained(hf)
    copy_tokenizer(model, hf)
    save_file(optimizer_tensors(engine.model, engine.optimizer), directory / "optimizer.safetensors")
    save_file(_rng_tensors(), directory / "rng.safetensors")
    (directory / "engine.json").write_text(json.dumps({"step": engine.step}))


def load_engine(engine: LocalEngine, directory: Path) -> None:
    """Put back what `save_engine` wrote, bit for bit.

    Raises:
        ConfigError: files are missing or damaged, or belong to another model. The message names the file and the fix.
    """
    try:
        step = int(json.loads((directory / "engine.json").read_text())["step"])
        moments = load_file(directory / "optimizer.safetensors")
        generators = load_file(directory / "rng.safetensors")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError.wrap(
            f"{directory}: the checkpoint is damaged ({error}); delete it to go on from the one before, or use "
            "resume=none",
            error,
        ) from None
    _load_weights(engine, directory / HF_DIRECTORY)
    load_optimizer_tensors(engine.model, engine.optimizer, moments)
    _restore_rng(generators)
    engine.step = step


def export_weights(
    engine: LocalEngine, dtype: Literal["float32", "bfloat16", "float16"]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Hugging Face checkpoint names and contiguous CPU arrays; bfloat16 as its bits in uint16.

    A tied output head appears once, under the embedding's name, as in a checkpoint. On CPU in float32 the arrays are
    the live weights, not copies: use them before the next optimizer step.
    """
    target = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    live = {name: parameter.detach() for name, parameter in engine.model.named_parameters()}
    for name, tensor in revert_weight_conversion(engine.model, live).items():
        array = tensor.to(device="cpu", dtype=target).contiguous()
        yield name, (array.view(torch.uint16) if dtype == "bfloat16" else array).numpy()


def copy_tokenizer(model: ModelConfig, target: Path) -> None:
    """The run's tokenizer and chat template into `target`, file by file when it is a directory."""
    source = resolve(model.tokenizer_path or model.path)
    if Path(source).is_dir():
        for pattern in TOKENIZER_FILES:
            for file in sorted(Path(source).glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, target / file.name)
    else:
        AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code).save_pretrained(target)
    if model.chat_template is not None:
        shutil.copyfile(resolve(model.chat_template), target / "chat_template.jinja")


def _load_weights(engine: LocalEngine, directory: Path) -> None:
    saved = dict(load_model(directory).named_parameters())
    live = dict(engine.model.named_parameters())
    for name in sorted(saved.keys() | live.keys()):
        shapes = [tuple(side[name].shape) if name in side else None for side in (saved, live)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{directory}: weights of another model: {name} has shape {shapes[0]} there and {shapes[1]} in "
                "model.path; give the model that this run trained, or use resume=none"
            )
    with torch.no_grad():
        for name, parameter in live.items():
            parameter.copy_(saved[name])


def _rng_tensors() -> dict[str, Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
