"""Problems of a configuration as users read them, and the rules that find them. Pure.

A section's module declares its checks in tables: `RULES` (combinations that cannot work or will surprise), `NO_EFFECT`
(keys that other keys make meaningless) and `ENVIRONMENT` (what a machine of the run lacks). Texts are format strings:
`{c.rollout.n}` is a configured value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config.import_path import is_own

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

_LONGEST_VALUE, _LONGEST_KEY, _LONGEST_SENTENCE = 80, 200, 2000
"""Characters of a problem that are shown: files and command lines may have keys and values of any length."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A key, its value, the consequence of that value, and a fix."""

    key: str
    value: Any
    consequence: str
    fix: str
    severity: Severity = "error"
    where: str = ""
    """Where the value was written: `config.yaml line 12`, `command line`; empty for a default."""

    def __str__(self) -> str:
        place = f"  ({self.where})" if self.where else ""
        consequence, fix = _cut(self.consequence, _LONGEST_SENTENCE), _cut(self.fix, _LONGEST_SENTENCE)
        return f"{_cut(self.key, _LONGEST_KEY)} = {format_value(self.value)}{place}\n    {consequence}\n    fix: {fix}"


RuleFunction = Callable[["Config"], Iterator[ConfigProblem]]


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """Reports a problem of `key` in each configuration that `applies` accepts. An instance is a `RuleFunction`."""

    key: str
    applies: Callable[[Config], Any]
    consequence: str
    fix: str
    severity: Severity = "error"

    def __call__(self, config: Config) -> Iterator[ConfigProblem]:
        if self.applies(config):
            value = configured(config, self.key)
            texts = self.consequence.format(c=config), self.fix.format(c=config)
            yield ConfigProblem(self.key, value, *texts, self.severity)


@dataclass(frozen=True, slots=True)
class NoEffectRule:
    """Keys, as `fnmatch` patterns, that have no effect in each configuration that `applies` accepts."""

    patterns: tuple[str, ...]
    applies: Callable[[Config], Any]
    because: Callable[[Config], str]
    fix: str


def no_effect(patterns: str, applies: Callable[[Config], Any], because: str, fix: str) -> NoEffectRule:
    """Return the rule for keys (patterns separated by spaces) that have no effect under a condition."""
    return NoEffectRule(tuple(patterns.split()), applies, lambda config: because.format(c=config), fix)


def only_with(patterns: str, key: str, *values: Any) -> NoEffectRule:
    """Return the rule for keys (patterns separated by spaces) that have an effect only with these values of `key`, or
    perhaps with a function of the user's."""
    return NoEffectRule(
        tuple(patterns.split()),
        lambda config: not (configured(config, key) in values or is_own(configured(config, key))),
        lambda config: f"{key} is {format_value(configured(config, key))}",
        f"set {key} to {' or '.join(map(format_value, values))}",
    )


def configured(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def warning(key: str, value: Any, consequence: str, fix: str) -> ConfigProblem:
    """Return a problem that does not stop a run, because its value may be intended."""
    return ConfigProblem(key, value, consequence, fix, severity="warning")


def format_value(value: Any) -> str:
    """Return `value` as YAML on one line, shortened if it is long."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
    return _cut(text, _LONGEST_VALUE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def errors(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    return [problem for problem in problems if problem.severity == "error"]


def format_problems(problems: Sequence[ConfigProblem]) -> str:
    """Return all problems as one text with a headline."""
    noun = "problem" if len(problems) == 1 else "problems"
    return "\n".join([f"{len(problems)} {noun} in the configuration:", *(f"  {problem}" for problem in problems)])
