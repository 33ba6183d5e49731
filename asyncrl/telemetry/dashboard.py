"""Everything the live view shows, as one immutable value: drawing it from another thread needs no lock. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from asyncrl.health.facts import RunHealth
from asyncrl.ports import Books, PartName
from asyncrl.run_state import Restart
from asyncrl.waits import Wait


@dataclass(frozen=True, slots=True)
class SyncShown:
    """The newest weight sync."""

    count: int
    pause_s: float | None
    publish_to_applied_s: float


@dataclass(frozen=True, slots=True)
class Dashboard:
    total_steps: int | None = None
    first_step: int = 0
    """Steps done before this process began: where a resumed run's progress starts."""
    step: int = 0
    version: int = 0
    lineage: int = 0
    restarts: tuple[Restart, ...] = ()
    """The newest."""
    earlier_restarts: Mapping[PartName, int] = field(default_factory=dict)
    """How many there were before those, by part."""
    reward_now: float | None = None
    """Mean of the last step."""
    rewards: tuple[float, ...] = ()
    """The course of the run, evenly spaced."""
    reward_first: float | None = None
    reward_last: float | None = None
    validations: tuple[tuple[int, float], ...] = ()
    """`(version, mean reward)`."""
    books: Books = field(default_factory=Books)
    staleness_mean: float | None = None
    staleness_max: float | None = None
    generated_per_s: float | None = None
    trained_per_s: float | None = None
    idle_trainer: float | None = None
    idle_rollouter: float | None = None
    sync: SyncShown | None = None
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)
    """By part."""
    health: RunHealth = field(default_factory=RunHealth)
    step_times: tuple[float, ...] = ()
    """When the last steps ended, on the view's clock: the estimate of the end comes from these."""

    def eta_s(self, now_s: float) -> float | None:
        """Seconds until the last step, at the pace of the last ones."""
        if self.total_steps is None or len(self.step_times) < 2:
            return None
        pace_s = (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
        return max((self.total_steps - self.step) * pace_s - (now_s - self.step_times[-1]), 0.0)


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, from their lowest to their highest mean."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    if high <= low:
        return _LEVELS[0] * count
    return "".join(_LEVELS[round((mean - low) / (high - low) * (len(_LEVELS) - 1))] for mean in means)


def span(seconds: float) -> str:
    """`0:07`, `12:34`, `3:04:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_s(seconds: float) -> str:
    """`28 ms`, `1.4 s`, `2:05`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else span(seconds)


def restart_line(restart: Restart) -> str:
    """What happened, why, and once it has recovered, how long it took and what it went back to."""
    if restart.recovered_at is None:
        return f"the {restart.part} is being replaced: {_first_line(restart.cause)}"
    detail = f"; {restart.detail}" if restart.detail else ""
    taken_s = restart.recovered_at - restart.failed_at
    return f"the {restart.part} is back after {short_s(taken_s)}{detail} ({_first_line(restart.cause)})"


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no cause known")


def number(value: float | None, form: str = ".3f") -> str:
    """`value`, or a dash for what is not known yet."""
    return "-" if value is None else format(value, form)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"
