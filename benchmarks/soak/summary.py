"""The growth of each role, as a table and as JSON, and the reasons for exit code 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from benchmarks.chaos.outcome import ChaosOutcome
from benchmarks.report import Table
from benchmarks.soak import growth
from benchmarks.soak.growth import Floats, Growth, Lifetime, Verdict
from benchmarks.soak.processes import PARTS, Recording

AIMS = dict.fromkeys(("memory", "descriptors"), f"no process grows by more than {growth.LIMIT_PERCENT:g} % an hour")
SHARED = "shared memory"
_WORST: tuple[Verdict, ...] = ("grows", "unclear", "ok", "too short")


class Judged(NamedTuple):
    """A verdict and its growth, which is None if the series is too short."""

    verdict: Verdict
    growth: Growth | None


class RoleGrowth(NamedTuple):
    """The processes of one role, and the worst of their growths."""

    name: str
    lifetimes: tuple[Lifetime, ...]
    num_judged: int
    memory: Judged
    descriptors: Judged


def role_growths(recording: Recording, warm_up_s: float) -> list[RoleGrowth]:
    """Judge each process by itself, and return the worst of each role: the run's parts, other processes, and the shared
    memory, which no process owns. A warm-up begins at a process's start, but not before the run's first step."""
    trained_at = next((sample.at for sample in recording.samples if sample.step > 0), math.inf)
    found = []
    for name, group in groupby(growth.lifetimes(recording.samples), key=lambda one: one.role):
        found.append(_role(name, tuple(group), trained_at, warm_up_s))
    found.sort(key=lambda role: (PARTS.index(role.name) if role.name in PARTS else len(PARTS), role.name))
    at, shared = np.array([(sample.at, sample.shared_mb) for sample in recording.samples]).T
    nothing = np.zeros_like(at)
    return [*found, _role(SHARED, (Lifetime(SHARED, 0, at[0], at, shared, nothing, nothing),), trained_at, warm_up_s)]


def _role(name: str, lifetimes: tuple[Lifetime, ...], trained_at: float, warm_up_s: float) -> RoleGrowth:
    def judged(one: Lifetime, values: Floats, floor: float) -> Judged:
        fitted = growth.fit(one.at, values, max(one.started, trained_at) + warm_up_s)
        return Judged(growth.judge(fitted, floor), fitted)

    memory = [judged(one, one.memory_mb, growth.MEMORY_FLOOR_MB) for one in lifetimes]
    descriptors = [judged(one, one.descriptors, growth.DESCRIPTORS_FLOOR) for one in lifetimes]
    num_judged = sum(one.growth is not None for one in memory)
    return RoleGrowth(name, lifetimes, num_judged, _worst(memory), _worst(descriptors))


def _worst(judged: Sequence[Judged]) -> Judged:
    """Return the worst verdict, and of several such the largest growth."""
    return min(judged, key=lambda one: (_WORST.index(one.verdict), -one.growth.percent_per_h if one.growth else 0.0))


def tables(roles: Sequence[RoleGrowth]) -> dict[str, Table]:
    """Return a table for memory and one for descriptors, with a row for each role: the median of its processes, and the
    worst growth with its interval, in percent per hour."""
    memory, descriptors = [], []
    for role in roles:
        counts = {"role": role.name, "processes": len(role.lifetimes), "judged": role.num_judged}
        memory.append(counts | {"MB": _median(one.memory_mb for one in role.lifetimes)} | _growth(role.memory))
        if role.name != SHARED:
            medians = {
                "threads": round(_median(one.threads for one in role.lifetimes)),
                "descriptors": round(_median(one.descriptors for one in role.lifetimes)),
            }
            descriptors.append({"role": role.name} | medians | _growth(role.descriptors))
    return {"memory": memory, "descriptors": descriptors}


def _median(series: Iterable[Floats]) -> float:
    return float(np.median(np.concatenate(list(series))))


def _growth(judged: Judged) -> dict[str, Any]:
    found = judged.growth
    values = (None, None, None) if found is None else (found.percent_per_h, found.low, found.high)
    rounded = (None if value is None else round(value, 2) for value in values)
    return {**dict(zip(("%/h", "low", "high"), rounded, strict=True)), "verdict": judged.verdict}


def reasons(roles: Sequence[RoleGrowth], outcome: ChaosOutcome | None, *, wants_faults: bool) -> list[str]:
    """Return the reasons for exit code 1: broken promises, growth, and what could not be judged.

    `outcome`: None if only a recording is judged.
    """
    found = [] if outcome is None else [f"{one.promise}: {one.details}" for one in outcome.violations]
    if outcome is not None and wants_faults and not outcome.faults:
        found.append("no fault was injected: --hours is shorter than --faults-every, or the run did not train")
    for role in roles:
        for unit, judged in (("MB of memory", role.memory), ("descriptors", role.descriptors)):
            if judged.verdict == "grows" and judged.growth is not None:
                slope, low, high, level, _ = judged.growth
                interval = f"{slope:+.1f} % an hour ({low:+.1f} to {high:+.1f})"
                found.append(f"{role.name} grows: {interval} of {level:.1f} {unit}")
    short = [role.name for role in roles if role.name in PARTS and not role.num_judged]
    missing = [part for part in PARTS if part not in {role.name for role in roles}]
    if short or missing:
        least = growth.MIN_SPAN_S / 60
        names = ", ".join([*short, *missing])
        found.append(
            f"too short to judge: no process of {names} lived for {least:g} min after --warm-up; use more --hours"
        )
    return found
