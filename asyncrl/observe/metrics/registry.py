"""The registry of all metric names with units and meanings, read from `metrics.toml`; other names cannot be recorded.

`python -m asyncrl.observe.metrics.registry > docs/metrics.md` writes it as a page.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from asyncrl.core.failures import BugError


class Metric(NamedTuple):
    name: str
    """May contain placeholders such as `<data_source>`, which match any non-empty text."""
    unit: str
    """`1` for a plain number or a share; otherwise `s`, `tokens`, `samples`, `versions`, `nats`, …"""
    meaning: str


SECTIONS: dict[str, tuple[Metric, ...]] = {
    title: tuple(Metric(name, unit, meaning) for name, (unit, meaning) in rows.items())
    for title, rows in tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")).items()
}
"""All metrics, by section of docs/metrics.md."""
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

PLACEHOLDER = re.compile(r"<([a-z_]+)>")
_EXACT = {metric.name: metric for metric in METRICS if "<" not in metric.name}
_PATTERNS = [
    (re.compile(PLACEHOLDER.sub(r"(?P<\1>.+)", re.escape(metric.name)), re.DOTALL), metric)
    for metric in METRICS
    if "<" in metric.name
]


def describe(name: str) -> Metric:
    """Return the registered metric of this name. Raises `BugError` if there is none."""
    return find(name)[0]


@lru_cache(maxsize=10_000)  # reward functions, tools and agents name metrics, without end
def find(name: str) -> tuple[Metric, Mapping[str, str]]:
    """Return the registered metric of this name, and the values of its placeholders.

    Raises:
        BugError: `name` is not registered.
    """
    if name in _EXACT:
        return _EXACT[name], {}
    for pattern, metric in _PATTERNS:
        if found := pattern.fullmatch(name):
            return metric, found.groupdict()
    near = difflib.get_close_matches(name, _EXACT, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"metric {name!r} is not registered{hint}. Metrics without documentation cannot be "
        "recorded: add it to asyncrl/observe/metrics/metrics.toml with its unit and meaning."
    )


@lru_cache(maxsize=10_000)  # a resumed run asks for every name of every row
def is_known(name: str) -> bool:
    """Return whether a metric of this name is registered."""
    return name in _EXACT or any(pattern.fullmatch(name) for pattern, _ in _PATTERNS)


def check(names: Iterable[str]) -> None:
    """Raise `BugError` if a name is not registered."""
    for name in names:
        describe(name)


_HEAD = """\
# Metrics

Generated from `asyncrl/observe/metrics/metrics.toml` by `make docs`.

A run directory contains `metrics.jsonl`, with one JSON object per line, and the same numbers as TensorBoard files;
`logging.sinks` selects these and other destinations ([profiling.md](profiling.md)). Every line has

| key | meaning |
|---|---|
| `kind` | `step`, `apply` or `validation` |
| `step` | optimizer step, from 1; on an `apply` line, the newest step at that time |
| `version` | version of the published weights; 0 is the initial model |
| `lineage` | how often the run has gone back to a checkpoint; lines after that checkpoint are removed |
| `time_s` | seconds since the run started; a resumed run continues from its last line |

and, as further keys, the metrics below. `step` lines also have `rewards` (the mean reward of each trained sample) and
`staleness` (of each sample, in versions); `validation` lines have a few `examples`. Numbers that are not finite are
written as null; unknown values are absent.
"""


def markdown() -> str:
    """Return the page `docs/metrics.md`."""
    lines = [_HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
