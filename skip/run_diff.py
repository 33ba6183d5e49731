"""Find the first step in which two runs over the same samples differ, in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index as integer
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.core.failures import ConfigError
from asyncrl.core.text import parse_json
from asyncrl.storage.run_dir import METRICS, find_run, read_lines

COMPARED = (
    "rewards",
    "staleness",
    "advantages/mean",
    "actor/loss",
    "actor/grad_norm",
    "critic/loss",
    "response_tokens/mean",
)
"""Metrics that are equal for equal samples and equal code, in the order in which a step computes them."""
MAX_DIGITS = 18
"""Limit for the digits of an integer, which is compared with floats."""


class StepDifference(NamedTuple):
    """The first step in which two runs differ."""

    step: int
    names: tuple[str, ...]
    one: Mapping[str, Any]
    other: Mapping[str, Any]


class RunComparison(NamedTuple):
    """The steps and metrics that two runs have in common, and where the runs differ."""

    steps: Sequence[int]
    names: Sequence[str]
    difference: StepDifference | None


def compare_runs(one: Path, other: Path, tolerance: float) -> RunComparison:
    """Compare the steps of two runs.

    Raises:
        ConfigError: one of them is not a run with steps, or they have none in common.
    """
    first, second = _steps(one), _steps(other)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ConfigError(f"{one} and {other} have no step in common: {_range(first)} and {_range(second)}")
    difference = first_difference([(step, first[step], second[step]) for step in common], tolerance)
    return RunComparison(common, _compared(first[common[0]]), difference)


def first_difference(
    steps: list[tuple[int, Mapping[str, Any], Mapping[str, Any]]], tolerance: float
) -> StepDifference | None:
    """Return the first step that differs. An item of `steps` has its number and the lines of both runs. Pure."""
    for step, one, other in steps:
        names = tuple(
            name for name in _compared({**one, **other}) if not _equal(one.get(name), other.get(name), tolerance)
        )
        if names:
            return StepDifference(step, names, {n: one.get(n) for n in names}, {n: other.get(n) for n in names})
    return None


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(first, second, tolerance) for first, second in pairs)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))
    return bool(one == other)


def _compared(line: Mapping[str, Any]) -> list[str]:
    return [name for name in COMPARED if name in line]


def _steps(run: Path) -> dict[int, Mapping[str, Any]]:
    """Return the line of each step, and the last one if it has several."""
    path = find_run(str(run)) / METRICS
    steps: dict[int, Mapping[str, Any]] = {}
    try:
        for line in read_lines(path):
            if line.endswith(b"\n"):  # a live run may be writing the last one
                row = parse_json(line, finite=True, max_digits=MAX_DIGITS)
                if row["kind"] == "step":
                    steps[integer(row["step"])] = row
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}: logging.sinks has no jsonl, or the run has no step") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not steps:
        raise ConfigError(f"{path} has no step yet")
    return steps


def _range(steps: Mapping[int, Any]) -> str:
    return f"{min(steps)} to {max(steps)}"
