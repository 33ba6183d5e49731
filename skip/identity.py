"""Which model and tokenizer a run has, as short texts that are equal for equal files. Blocking."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from asyncrl.assets import resolve
from asyncrl.config.schema import ModelConfig

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
CONFIGS = ("config.json", "generation_config.json")
"""The second has the tokens that end a response."""
WHOLE_BYTES = 16 << 20
"""Files up to this size are read to their end. Of longer ones, which are weights, `NUM_BLOCKS` blocks are."""
NUM_BLOCKS = 1024
BLOCK_BYTES = 4 << 10
"""So close together that no layer's matrix lies between two of them."""


def model_identity(model: ModelConfig) -> str:
    """Of weights and architecture. A hub name that is no directory here stands for itself."""
    path = Path(resolve(model.path))
    if not path.is_dir():
        return model.path
    names = [name for name in sorted(os.listdir(path)) if name.endswith(WEIGHTS) or name in CONFIGS]
    return _digest(path, names)


def tokenizer_identity(model: ModelConfig) -> str:
    """Of the tokenizer's files and the chat template."""
    path = Path(resolve(model.tokenizer_path or model.path))
    digest = model.tokenizer_path or model.path
    if path.is_dir():
        kinds = (
            "token",
            "vocab",
            "merges",
            "special_tokens",
            "added_tokens",
            "chat_template",
            "spiece",
            "sentencepiece",
        )
        digest = _digest(path, [name for name in sorted(os.listdir(path)) if name.startswith(kinds)])
    if model.chat_template is None:
        return digest
    template = Path(resolve(model.chat_template))
    return f"{digest}+{_digest(template.parent, [template.name])}"


def _digest(folder: Path, names: list[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        with open(folder / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{name}:{size}:".encode())
            if size <= WHOLE_BYTES:
                found.update(file.read())
                continue
            for number in range(NUM_BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
    return "sha256:" + found.hexdigest()[:32]
