"""When a problem is told, and when that it is over: once each, and not for a moment's sake. Pure.

             bad for `hold_s`                     well for `calm_s`
    quiet ─────────────────────▶ told (warning) ────────────────────▶ quiet (good news)

Between the two thresholds a value is `fair`: it neither raises an alarm nor ends one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl.health.facts import Problem

Condition = Literal["bad", "fair", "well"]
GONE_S = 60.0
"""A problem of which nothing is known for so long is forgotten: its subject has ended."""


class Judgement(NamedTuple):
    """One rule's verdict on one subject at one moment."""

    key: str
    """Kind and subject: `lag/rollouter`."""
    condition: Condition
    text: str
    """What is wrong, with figures, and what helps."""
    over: str
    """What is said when it is well again."""
    hold_s: float
    calm_s: float
    level: Literal["warning", "hint"] = "warning"


class Told(NamedTuple):
    level: Literal["warning", "hint", ""]
    """As `View.message` takes it; empty: good news."""
    key: str
    text: str


@dataclass(slots=True)
class _Alarm:
    seen_s: float
    bad_s: float | None = None
    """Since when it is bad without a break."""
    well_s: float | None = None
    """Since when it is well without a break."""
    problem: Problem | None = None
    """It has been told."""


class Alarms:
    """All alarms of a run, by key."""

    def __init__(self) -> None:
        self._alarms: dict[str, _Alarm] = {}

    @property
    def open(self) -> tuple[Problem, ...]:
        """What was told and is not over, the oldest first."""
        found = [alarm.problem for alarm in self._alarms.values() if alarm.problem is not None]
        return tuple(sorted(found, key=lambda problem: (problem.since, problem.key)))

    def observe(self, now_s: float, now: float, judgements: Iterable[Judgement]) -> list[Told]:
        """What is to be told now.

        Args:
            now_s: monotonic.
            now: wall clock.
            judgements: at most one for a key. Of a key without one nothing is known just now.
        """
        told: list[Told] = []
        for judgement in judgements:
            alarm = self._alarms.setdefault(judgement.key, _Alarm(now_s))
            alarm.seen_s = now_s
            alarm.bad_s = _since(alarm.bad_s, now_s, judgement.condition == "bad")
            alarm.well_s = _since(alarm.well_s, now_s, judgement.condition == "well")
            if alarm.problem is None:
                if alarm.bad_s is not None and now_s - alarm.bad_s >= judgement.hold_s:
                    alarm.problem = Problem(judgement.key, now - (now_s - alarm.bad_s), judgement.text)
                    told.append(Told(judgement.level, judgement.key, judgement.text))
            elif alarm.well_s is not None and now_s - alarm.well_s >= judgement.calm_s:
                alarm.problem = None
                told.append(Told("", judgement.key, judgement.over))
        for key, alarm in list(self._alarms.items()):
            if now_s - alarm.seen_s > GONE_S:
                del self._alarms[key]
            elif alarm.seen_s < now_s:
                alarm.bad_s = alarm.well_s = None
        return told


def _since(before: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before is None else before
