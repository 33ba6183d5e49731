"""Checks that rows have the columns that the configuration names, and the answers that built-in rewards need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from asyncrl.config.problems import ConfigProblem, Severity
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.reward import COMPARING_REWARDS
from rollouter.prompts.dataset import PromptRow

_TRUTH_KEY = "data.ground_truth_key"
_KEYS = (_TRUTH_KEY, "data.reward_fn_key", "data.image_key", "data.video_key")
_USUAL_TRUTHS = ("answer", "ground_truth", "solution", "target", "label")
"""Columns that usually have the correct answer."""
_MOST_LISTED = 12


class ColumnCheck:
    """Collects which columns the checked rows of all files have."""

    def __init__(self, config: Config) -> None:
        self._reward = config.reward
        self._named = {key: str(getattr(config.data, key.removeprefix("data."))) for key in _KEYS}
        self._missing = {key for key, name in self._named.items() if name != _default(key)}
        """Keys that the user has set, and whose column no row has had."""
        self._columns: dict[str, None] = {}
        self._unanswered = ""
        """The first row without a correct answer."""

    def add(self, raw: Mapping[str, Any], row: PromptRow, where: str) -> None:
        """Record the columns of a row."""
        if self._missing or not self._columns:
            names = dict.fromkeys(_columns(raw))
            self._columns |= names
            self._missing -= {key for key in self._missing if self._named[key] in names}
        if row.ground_truth is None:
            self._unanswered = self._unanswered or where

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for each configured column that no row has, and for a row without the answer that a built-in
        reward needs."""
        if not self._columns:
            return
        for key in filter(self._missing.__contains__, _KEYS):
            consequence = f"no row has this column; the rows have {self._listed()}"
            yield ConfigProblem(key, self._named[key], consequence, self._fix(key))
        functions = [self._reward.function, *(one.function for one in self._reward.functions)]
        compares = [name for name in functions if name in COMPARING_REWARDS and self._reward.manager is None]
        key, name = _TRUTH_KEY, self._named[_TRUTH_KEY]
        if not compares or not self._unanswered or key in self._missing:
            return
        consequence = (
            f"{self._unanswered}: the row has no correct answer in this column, and {compares[0]} compares responses "
            f"with it; the rows have {self._listed()}"
        )
        severity: Severity = "warning" if self._reward.on_error == "drop" else "error"
        yield ConfigProblem(key, name, consequence, f"{self._fix(key)}, or use another reward.function", severity)

    def _listed(self) -> str:
        names = [name for name in self._columns if not any(one.startswith(f"{name}.") for one in self._columns)]
        return ", ".join(names[:_MOST_LISTED]) + (", …" if len(names) > _MOST_LISTED else "")

    def _fix(self, key: str) -> str:
        names = list(self._columns)
        close = get_close_matches(self._named[key], names, n=1)
        if key == _TRUTH_KEY:
            close += [name for name in _USUAL_TRUTHS if name in names]
            return f"set {key}={close[0]}" if close else f"set {key} to the column with the correct answer"
        return f"set {key}={close[0]}" if close else f"set {key} to a column of the rows, or leave it out"


def _default(key: str) -> Any:
    return DataConfig.model_fields[key.removeprefix("data.")].default


def _columns(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the columns of a row, and with a dot those of the values inside of a mapping."""
    for name, value in raw.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{below}" for below in _columns(value))
