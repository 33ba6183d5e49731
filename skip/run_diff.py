"""`asyncrl skip diff`: where two runs over the same samples part. Reads `metrics.jsonl` only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from asyncrl.cli.inspect import find_run
from asyncrl.failures import ConfigError
from asyncrl.run_dir import METRICS

ASKED = (
    "rewards",
    "staleness",
    "advantages/mean",
    "actor/loss",
    "actor/grad_norm",
    "critic/loss",
    "response_tokens/mean",
)
"""What equal samples and equal code give equal values of, in the order in which a step comes to them."""


class Difference(NamedTuple):
    """The first step at which two runs have something else."""

    step: int
    names: tuple[str, ...]
    one: Mapping[str, Any]
    other: Mapping[str, Any]


def diff(one: Path, other: Path, tolerance: float, as_json: bool) -> int:
    """Exit code 1 if they differ in a step that both have.

    Raises:
        ConfigError: one of them is no run with steps, or they have none in common.
    """
    mine, yours = _steps(one), _steps(other)
    common = sorted(mine.keys() & yours.keys())
    if not common:
        raise ConfigError(f"{one} and {other} have no step in common: {_told(mine)} and {_told(yours)}")
    found = first_difference([(step, mine[step], yours[step]) for step in common], tolerance)
    if as_json:
        click.echo(json.dumps({"steps": len(common), "difference": found and found._asdict()}, indent=2))
    elif found is None:
        click.echo(f"{len(common)} steps are equal, {common[0]} to {common[-1]}: {', '.join(_asked(mine[common[0]]))}")
    else:
        click.echo(f"step {found.step} of {len(common)} common ones is the first that differs:")
        for name in found.names:
            click.echo(f"  {name:20} {_shown(found.one[name], found.other[name])}")
    return 0 if found is None else 1


def first_difference(
    steps: list[tuple[int, Mapping[str, Any], Mapping[str, Any]]], tolerance: float
) -> Difference | None:
    """Steps and their lines of both runs, in order. Pure."""
    for step, one, other in steps:
        names = tuple(
            name for name in _asked({**one, **other}) if not _equal(one.get(name), other.get(name), tolerance)
        )
        if names:
            return Difference(step, names, {n: one.get(n) for n in names}, {n: other.get(n) for n in names})
    return None


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(first, second, tolerance) for first, second in pairs)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))
    return bool(one == other)


def _asked(line: Mapping[str, Any]) -> list[str]:
    return [name for name in ASKED if name in line]


def _steps(run: Path) -> dict[int, Mapping[str, Any]]:
    """The step lines of a run; where training went back, those that stay."""
    run_dir = find_run(str(run))
    steps: dict[int, Mapping[str, Any]] = {
        line["step"]: line for line in _lines(run_dir / METRICS) if line.get("kind") == "step"
    }
    if not steps:
        raise ConfigError(f"{run_dir / METRICS} has no step yet")
    return steps


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # a run that is at work may be writing one
                    yield json.loads(line)
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}: logging.sinks has no jsonl, or the run no step") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _told(steps: Mapping[int, Any]) -> str:
    return f"{min(steps)} to {max(steps)}"


def _shown(one: Any, other: Any) -> str:
    """Of lists, the first items that differ."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 0)
        return f"{one[place]!r} and {other[place]!r}, sample {place + 1} of {len(one)}"
    return f"{_brief(one)} and {_brief(other)}"


def _brief(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, list) else "none" if value is None else repr(value)
