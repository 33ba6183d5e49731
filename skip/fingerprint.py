"""Fingerprints of calls: two calls of a stage with equal fingerprints may share a record.

A fingerprint is a flat mapping from a field's name to a short text, the value itself or its digest. It has fields
instead of one hash, so that messages can name what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig

Fingerprint = Mapping[str, str]

SHORT = 64
"""Texts up to this length are kept as they are."""
_LIKE_JSON = re.compile(r'[-\d"\[{]|null$|true$|false$|NaN$|Infinity$')
"""A text that could be mistaken for another value is kept with quotes."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
CONFIGS = ("config.json", "generation_config.json")
"""Files with the architecture, and with the tokens that end a response."""
TOKENIZER = ("token", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece", "sentencepiece")
"""Prefixes of a tokenizer's files."""
FULL_DIGEST_BYTES = 16 << 20
"""Larger files contain weights, and only `NUM_BLOCKS` blocks of each are read."""
NUM_BLOCKS = 1024
BLOCK_BYTES = 4 << 10
"""Size of a block. The blocks are so close together that every layer's matrix contains some."""


def field(value: Any) -> str:
    """Return `value` (JSON types, numpy arrays and collections of them) as a field of at most `SHORT` characters.

    Equal values give equal texts in every process: mappings are sorted by key.

    Raises:
        TypeError: a value of another type, for which equality is not defined.
    """
    if type(value) is int:
        return str(value)
    text = value if isinstance(value, str) and not _LIKE_JSON.match(value) else _ENCODER.encode(value)
    if len(text) <= SHORT:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]


def differing(recorded: Fingerprint, requested: Fingerprint) -> tuple[str, ...]:
    """Return the names of the fields that differ, including those that only one fingerprint has."""
    names = sorted({*recorded, *requested})
    return tuple(name for name in names if recorded.get(name) != requested.get(name))


def model_identity(model: ModelConfig) -> str:
    """Return a digest of weights and architecture, or the model's name if it is not a directory here. Blocking."""
    path = Path(resolve(model.path))
    if not path.is_dir():
        return model.path
    names = [name for name in sorted(os.listdir(path)) if name.endswith(WEIGHTS) or name in CONFIGS]
    return _digest(path, names)


def tokenizer_identity(model: ModelConfig) -> str:
    """Return a digest of the tokenizer's files and the chat template. Blocking."""
    path = Path(resolve(model.tokenizer_path or model.path))
    digest = model.tokenizer_path or model.path
    if path.is_dir():
        digest = _digest(path, [name for name in sorted(os.listdir(path)) if name.startswith(TOKENIZER)])
    if model.chat_template is None:
        return digest
    template = Path(resolve(model.chat_template))
    return f"{digest}+{_digest(template.parent, [template.name])}"


def _digest(folder: Path, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        with open(folder / name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{name}:{size}:".encode())
            if size <= FULL_DIGEST_BYTES:
                digest.update(file.read())
                continue
            for number in range(NUM_BLOCKS):
                file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return "sha256:" + digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = np.ascontiguousarray(value)
        return f"{data.dtype}{list(data.shape)}:{hashlib.sha256(data.data).hexdigest()}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a fingerprint cannot contain {type(value).__name__}: {value!r}")


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain, ensure_ascii=False)
