"""What a stage was asked: two calls with the same fingerprint may share a record. Pure.

A fingerprint is a flat mapping from a field's name to a short text: the value itself where it is short, else its
digest. Kept by field, and not as one hash, so that a mismatch can be told by name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Fingerprint = Mapping[str, str]

SHORT = 64
"""Texts up to this length are kept as they are."""
_LIKE_JSON = re.compile(r'[-\d"\[{]|null$|true$|false$|NaN$|Infinity$')
"""A text that could be taken for another value is kept with quotes."""


def field(value: Any) -> str:
    """One field: `value`, of JSON types, numpy arrays and mappings or sequences of them, in at most `SHORT` letters.

    Equal values give equal texts, in every process: mappings are sorted by key.

    Raises:
        TypeError: a value of another type, of which nobody knows when two are equal.
    """
    if type(value) is int:
        return str(value)
    text = value if isinstance(value, str) and not _LIKE_JSON.match(value) else _ENCODER.encode(value)
    if len(text) <= SHORT:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:32]


def differing(recorded: Fingerprint, wanted: Fingerprint) -> tuple[str, ...]:
    """The fields in which they differ, those that only one has included; in order of name."""
    names = sorted({*recorded, *wanted})
    return tuple(name for name in names if recorded.get(name) != wanted.get(name))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        data = np.ascontiguousarray(value)
        return f"{data.dtype}{list(data.shape)}:{hashlib.sha256(data.data).hexdigest()}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in a fingerprint: {value!r}")


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain, ensure_ascii=False)
