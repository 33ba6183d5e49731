"""Decide when to report a problem and its end: once each, after the condition has held for some time. Pure.

             bad for `hold_s`                    good for `calm_s`
    quiet ────────────────────▶ open (warning) ────────────────────▶ quiet (recovery)

Between the two thresholds a value is `fair`: it neither raises an alarm nor ends one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl.core.process_health import Problem

Condition = Literal["bad", "fair", "good"]
AlarmLevel = Literal["warning", "hint"]
GONE_S = 60.0
"""A problem without results for this long is forgotten, because its subject has ended."""


class RuleResult(NamedTuple):
    """The result of one rule for one subject at one moment."""

    key: str
    """Kind and subject: `lag/rollouter`."""
    condition: Condition
    text: str
    """Description of the problem with measured values, and its remedy."""
    recovery: str
    """The message when the problem is over."""
    hold_s: float
    calm_s: float
    level: AlarmLevel = "warning"


class HealthNotice(NamedTuple):
    level: AlarmLevel | Literal[""]
    """The level for `View.message`; empty for a recovery."""
    key: str
    text: str


@dataclass(slots=True)
class _Alarm:
    updated_s: float
    bad_since_s: float | None = None
    good_since_s: float | None = None
    problem: Problem | None = None
    """Set while the alarm is open."""


class Alarms:
    """All alarms of a run, by key."""

    def __init__(self) -> None:
        self._alarms: dict[str, _Alarm] = {}

    @property
    def open(self) -> tuple[Problem, ...]:
        """Return the reported problems that are still open, oldest first."""
        problems = [alarm.problem for alarm in self._alarms.values() if alarm.problem is not None]
        return tuple(sorted(problems, key=lambda problem: (problem.since, problem.key)))

    def observe(self, now_s: float, now: float, results: Iterable[RuleResult]) -> list[HealthNotice]:
        """Return the notices that are due.

        Args:
            now_s: monotonic.
            now: wall clock.
            results: at most one for each key. The condition of a key without a result is unknown.
        """
        notices: list[HealthNotice] = []
        for result in results:
            alarm = self._alarms.setdefault(result.key, _Alarm(now_s))
            alarm.updated_s = now_s
            alarm.bad_since_s = _since(alarm.bad_since_s, now_s, result.condition == "bad")
            alarm.good_since_s = _since(alarm.good_since_s, now_s, result.condition == "good")
            if alarm.problem is None:
                if alarm.bad_since_s is not None and now_s - alarm.bad_since_s >= result.hold_s:
                    alarm.problem = Problem(result.key, now - (now_s - alarm.bad_since_s), result.text)
                    notices.append(HealthNotice(result.level, result.key, result.text))
            elif alarm.good_since_s is not None and now_s - alarm.good_since_s >= result.calm_s:
                alarm.problem = None
                notices.append(HealthNotice("", result.key, result.recovery))
        for key, alarm in list(self._alarms.items()):
            if now_s - alarm.updated_s > GONE_S:
                del self._alarms[key]
            elif alarm.updated_s < now_s:
                alarm.bad_since_s = alarm.good_since_s = None
        return notices


def _since(before: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before is None else before
