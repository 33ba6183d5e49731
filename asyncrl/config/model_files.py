"""Reads config.json and the safetensors headers of models on this machine, and never their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.assets import resolve

_LONGEST_HEADER = 100 * 2**20
"""Maximum size of a header that safetensors accepts, in bytes."""


def local_path(path: str) -> Path | None:
    """Return the location of `path` on this machine, or None for an `asyncrl://` name that is not shipped."""
    try:
        return Path(resolve(path))
    except FileNotFoundError:
        return None


def model_config(path: str) -> Mapping[str, Any]:
    """Return the config.json of a model; empty if it is not on this machine or not readable."""
    local = local_path(path)
    try:
        loaded = json.loads((local / "config.json").read_text(encoding="utf-8")) if local is not None else {}
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model; empty if its files are not on this machine or not readable."""
    local = local_path(path)
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(local.glob("*.safetensors")) if local is not None else ():
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            shapes |= {name: tuple(item["shape"]) for name, item in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the library that loads the file reports what is wrong with it
    return shapes


def num_parameters(path: str) -> int | None:
    """Return the number of parameters of a model, or None if it is not on this machine."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values()) or None
