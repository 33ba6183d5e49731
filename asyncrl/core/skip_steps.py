"""Sets of steps, such as the steps of a role that are recorded and replayed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_ONE = re.compile(r"(\d+)")
_RANGE = re.compile(r"(\d+)\s*-\s*(\d+)")
EXPECTED = "a step (12), a range (1-128), several of them (1-128,200), or `all`"


class _Range(NamedTuple):
    first: int
    last: int


class StepSet:
    """A set of steps, stored as ranges."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), *, every: bool = False) -> None:
        """`ranges` of first and last step, both inclusive; `every`: all steps."""
        self._every = every
        self._ranges = () if every else _joined(ranges)

    @classmethod
    def parse(cls, value: object) -> StepSet:
        """Parse `12`, `"1-128,200"`, `"all"`, or a list of these.

        Raises:
            ValueError: it is something else; the message gives the value and the expected form.
        """
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        ranges: list[tuple[int, int]] = []
        every = False
        for item in items:
            for part in str(item).split(",") if isinstance(item, str) else [item]:
                if isinstance(part, str) and part.strip() == "all":
                    every = True
                else:
                    ranges.append(_parse_range(part))
        return cls(ranges, every=every)

    def __contains__(self, step: int) -> bool:
        return self._every or any(first <= step <= last for first, last in self._ranges)

    def __bool__(self) -> bool:
        return self._every or bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepSet) and (self._every, self._ranges) == (other._every, other._ranges)

    def __hash__(self) -> int:
        return hash((self._every, self._ranges))

    def __str__(self) -> str:
        if self._every:
            return "all"
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in self._ranges)

    def __repr__(self) -> str:
        return f"StepSet({self})"

    def has_from(self, first: int) -> bool:
        """Return whether the set has a step at or after `first`."""
        return self._every or any(last >= first for _, last in self._ranges)


def _parse_range(part: object) -> tuple[int, int]:
    if isinstance(part, int) and not isinstance(part, bool) and part >= 0:
        return part, part
    if isinstance(part, str):
        if match := _ONE.fullmatch(part.strip()):
            return int(match[1]), int(match[1])
        if match := _RANGE.fullmatch(part.strip()):
            first, last = int(match[1]), int(match[2])
            if first <= last:
                return first, last
            raise ValueError(f"{part.strip()!r} ends before it begins; expected {EXPECTED}")
    raise ValueError(f"{part!r} is no step; expected {EXPECTED}")


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[_Range, ...]:
    joined: list[_Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1].last + 1:
            joined[-1] = _Range(joined[-1].first, max(last, joined[-1].last))
        else:
            joined.append(_Range(first, last))
    return tuple(joined)
