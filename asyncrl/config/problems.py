"""What is wrong with a configuration, in the form people get to read it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.schema import Config

_LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: which key, what its value leads to, and what to do instead."""

    key: str
    value: Any
    consequence: str
    fix: str
    severity: Literal["error", "warning"] = "error"
    where: str = ""
    """Where the value was written: `config.yaml line 12`, `command line`; empty: it is a default."""

    def __str__(self) -> str:
        place = f"  ({self.where})" if self.where else ""
        return f"{self.key} = {show(self.value)}{place}\n    {self.consequence}\n    fix: {self.fix}"


Given = Collection[str]
"""Keys that the user wrote and that differ from their default."""
Rule = Callable[[Config, Given], Iterator[Problem]]


def warning(key: str, value: Any, consequence: str, fix: str) -> Problem:
    """What will surprise, and still may be meant."""
    return Problem(key, value, consequence, fix, severity="warning")


def show(value: Any) -> str:
    """`value` as YAML would have it, on one line, cut where it gets long."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def report(problems: Sequence[Problem]) -> str:
    """All of `problems` as one text, with a headline."""
    noun = "problem" if len(problems) == 1 else "problems"
    body = "\n".join(f"  {problem}" for problem in problems)
    return f"{len(problems)} {noun} in the configuration:\n{body}"
