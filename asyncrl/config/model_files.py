"""Checks of the files of a model on this machine: weights against their index, tokenizer and chat template.

They read headers and small files, never weights, and import no library that loads a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.environment import local_path, model_config
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 * 2**20
"""Maximum size of a header that safetensors accepts, in bytes."""
_POINTER = b"version https://git-lfs"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.spm")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_COPY_AGAIN = "copy or download it again"


def check_model_files(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of all models of a run; models that are not on this machine are left out."""
    paths = {"model.path": config.model.path}
    if config.needs_critic and config.critic.path is not None:
        paths["critic.path"] = config.critic.path
    if config.teacher.path is not None:
        paths["teacher.path"] = config.teacher.path
    if config.reward_model.placement != "off" and config.reward_model.path is not None:
        paths["reward_model.path"] = config.reward_model.path
    for key, path in paths.items():
        if (folder := local_path(path)) is not None and folder.is_dir():
            yield from _weights(key, path, folder)
    yield from _tokenizer(config)


def _weights(key: str, path: str, folder: Path) -> Iterator[ConfigProblem]:
    """Yield a problem for the first file of weights that is missing or damaged, and for tensors that no file has."""
    tensors: dict[str, set[str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors[file.name] = _tensor_names(file)
        except ValueError as error:
            yield ConfigProblem(key, path, f"{file.name} {error}", _fix(file))
            return
    if not (folder / _INDEX).is_file():
        return
    try:
        files: Mapping[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        wanted = [(name, str(file)) for name, file in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield ConfigProblem(key, path, f"{_INDEX} has no weight_map that can be read", _COPY_AGAIN)
        return
    missing = sorted({file for _, file in wanted if file not in tensors})
    lost = [(name, file) for name, file in wanted if name not in tensors.get(file, {name})]
    if missing:
        consequence = f"{_INDEX} names {_some(missing)}, which {'is' if len(missing) == 1 else 'are'} not there"
        yield ConfigProblem(key, path, consequence, "copy or download the whole directory again")
    elif lost:
        consequence = f"{lost[0][1]} lacks {_some([name for name, _ in lost])}, which {_INDEX} says are in it"
        yield ConfigProblem(key, path, consequence, "the files are of different models; copy the whole directory again")


def _tensor_names(file: Path) -> set[str]:
    """Return the tensors of a file.

    Raises:
        ValueError: the file is damaged; the message says how, after its name.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if _POINTER.startswith(start) and start:
            raise ValueError("is a pointer of Git LFS, and not the weights")
        if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"has {size:,} bytes and no complete header: it was cut off, or is no safetensors file")
        try:
            header = json.loads(stream.read(length))
            names = {name for name in header if name != "__metadata__"}
            end = max((header[name]["data_offsets"][1] for name in names), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"has a header that cannot be read ({type(error).__name__}: {error})") from error
    if 8 + length + end != size:
        raise ValueError(f"has {size:,} bytes, and its header describes {8 + length + end:,}: it was cut off")
    return names


def _fix(file: Path) -> str:
    with file.open("rb") as stream:
        return "git lfs pull" if stream.read(len(_POINTER)) == _POINTER else _COPY_AGAIN


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _tokenizer(config: Config) -> Iterator[ConfigProblem]:
    """Yield a problem for a missing or damaged tokenizer, or else for a missing chat template."""
    model = config.model
    key, path = ("model.tokenizer_path", model.tokenizer_path) if model.tokenizer_path else ("model.path", model.path)
    folder = local_path(path)
    if folder is None or not folder.is_dir():
        return
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        consequence = "it has no tokenizer (no tokenizer.json, vocabulary or *.model)"
        fix = "save it there (tokenizer.save_pretrained), or set model.tokenizer_path to a directory that has one"
        yield ConfigProblem(key, path, consequence, fix)
        return
    settings: Any = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            settings = {}
        except (OSError, ValueError) as error:
            yield ConfigProblem(key, path, f"{name} cannot be read as JSON ({error}): it was cut off", _COPY_AGAIN)
            return
    has_template = isinstance(settings, Mapping) and settings.get("chat_template") is not None
    if not has_template and model.chat_template is None and not any((folder / one).exists() for one in _TEMPLATE_FILES):
        kind = model_config(path).get("model_type", "this model")
        consequence = (
            f"the tokenizer of {path} has none, so chat messages cannot be rendered ({kind} may be a base model)"
        )
        fix = "set model.chat_template to a file with a Jinja template, or model.path to an instruction-tuned model"
        yield ConfigProblem("model.chat_template", None, consequence, fix)
