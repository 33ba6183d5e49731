"""The reward that all compared systems use. Peers import it in environments without asyncrl."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def share_of_digits(text: str) -> float:
    """Return the share of the characters that are digits, which a random model learns to raise within a few steps.

    Special tokens such as `<pad>` do not count, because only some of the systems keep them in the text.
    """
    text = re.sub(r"<[a-z]+>", "", text)
    return sum(character in "0123456789" for character in text) / max(1, len(text))


def digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Score a response by its share of digits, as asyncrl calls reward functions."""
    return share_of_digits(solution_str)
