"""The result of a round of chaos, as tables and as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.chaos.faults import ACTORS, ENGINES, KINDS, Kind, Strike
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import BrokenCall
from benchmarks.report import report, write_json

Group = Literal["actors", "engines", "launches", "drivers", "rewards"]
Verdict = Literal["kept", "broken", "short", "slow"]

AIM = "no sample lost or doubled, no hang; median recovery under 20 s (actors) and 60 s (engines) on two cores"
AIM_S: dict[Group, float] = {"actors": 20.0, "engines": 60.0}
ENOUGH = 5
"""Number of faults from which on the median of a group is judged."""
GROUPS: tuple[Group, ...] = ("actors", "engines", "launches", "drivers", "rewards")
"""Groups of comparable recoveries; `launches`: faults that end a launch, `drivers`: a stopped driver."""
BOUNDS_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
BAR_CELLS = 40


def report_outcome(outcome: ChaosOutcome, options: ChaosOptions, json_path: Path | None) -> bool:
    """Print the tables, write the JSON, and return whether the round passed."""
    found, why = verdict(outcome, options)
    strikes = outcome.strikes
    unasked = [strike for strike in strikes if not strike.lived and not strike.kind.ends_launch]
    groups = by_group(strikes)
    report(
        "chaos",
        rows(strikes) or [{"fault": "none", "dealt": 0}],
        json_path,
        aim=AIM,
        seed=options.seed,
        faults=len(strikes),
        planned=options.num_faults,
        median_recovery_s={name: group["median_s"] for name, group in groups.items()},
        not_recovered={name: group["not_recovered"] for name, group in groups.items()},
        aim_met=aim_met(strikes),
        not_dealt=dict(outcome.not_dealt),
        launches=outcome.launches,
        ended_unasked=len(unasked),
        last_launch=outcome.finished or "none (--no-finish)",
        samples=outcome.samples,
        steps=outcome.steps,
        lineages=outcome.lineages,
        turns_checked=outcome.num_turns,
        broken_calls=tokens_of(outcome.broken_calls),
        wall_s=outcome.wall_s,
        violations=_broken(outcome),
        verdict=found,
    )
    console = Console(highlight=False)
    for line in histogram(strikes):
        console.print(line, markup=False)
    for line in why:
        console.print(f"FAILED: {line}", markup=False)
    if json_path is not None:  # with details that are too long for the console
        result = json.loads(json_path.read_text(encoding="utf-8"))
        result |= {"groups": groups, "each": each(strikes, outcome.broken_calls), "deaths": outcome.deaths}
        write_json(json_path, result | {"failed": why})
    return found == "kept"


def verdict(outcome: ChaosOutcome, options: ChaosOptions) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the reasons why it is not `kept`.

    `broken`: a promise was broken. `short`: fewer faults than requested were injected, or none. `slow`: with --aim, an
    aim was missed, or no group had enough faults. The first one that applies is returned, with the reasons of all.
    """
    broken, short, slow = _broken(outcome), _short(outcome, options), _slow(outcome.strikes) if options.aim else []
    found: Verdict = "broken" if broken else "short" if short else "slow" if slow else "kept"
    return found, [*broken, *short, *slow]


def _broken(outcome: ChaosOutcome) -> list[str]:
    return [f"{violation.promise}: {violation.details}" for violation in outcome.violations]


def _short(outcome: ChaosOutcome, options: ChaosOptions) -> list[str]:
    dealt = len(outcome.strikes)
    if dealt and (options.num_faults is None or dealt >= options.num_faults):
        return []
    limit = f"the limit of {options.limit_s / 60:g} minutes (--minutes) was reached"
    why = "the run could not be restarted" if outcome.gave_up else limit
    if not dealt:
        return [f"no fault was injected, so nothing was tested: {why}"]
    return [f"{dealt} of {options.num_faults} faults (--faults) were injected: {why}"]


def _slow(strikes: Sequence[Strike]) -> list[str]:
    met, groups = aim_met(strikes), by_group(strikes)
    if not any(judged is not None for judged in met.values()):
        return [f"the aims cannot be judged (--aim): neither {' nor '.join(AIM_S)} had {ENOUGH} faults"]
    return [
        f"median recovery of {name} was not under {AIM_S[name]:g} s (--aim): of {group['dealt']} faults "
        f"{group['not_recovered']} did not recover, and the others have a median of {group['median_s']} s"
        for name, group in groups.items()
        if met.get(name) is False
    ]


def group_of(kind: Kind) -> Group:
    """Return the one of `GROUPS` to which faults of this kind belong."""
    if kind.ends_launch:
        return "launches"
    if kind.target == "driver":
        return "drivers"
    if kind.target == "reward":
        return "rewards"
    assert kind.target in ACTORS | ENGINES, kind
    return "actors" if kind.target in ACTORS else "engines"


def rows(strikes: Sequence[Strike]) -> list[dict[str, Any]]:
    """Return a table row for each kind of fault that was injected."""
    found = []
    for kind in KINDS:
        if dealt := [strike for strike in strikes if strike.kind == kind]:
            times = _times(dealt)
            found.append(
                {
                    "fault": kind.name,
                    "dealt": len(dealt),
                    "not recovered": len(dealt) - len(times),
                    "launch lived": sum(strike.lived for strike in dealt),
                    "median s": statistics.median(times) if times else "-",
                    "max s": max(times, default="-"),
                    "steps lost": sum(strike.steps_lost for strike in dealt),
                }
            )
    return found


def by_group(strikes: Sequence[Strike]) -> dict[Group, dict[str, Any]]:
    """Return, by group, the number of faults, the number without recovery, and the median and maximum recovery time of
    the others, which are None if there are no others."""
    found: dict[Group, dict[str, Any]] = {}
    for name in GROUPS:
        dealt = [strike for strike in strikes if group_of(strike.kind) == name]
        times = _times(dealt)
        found[name] = {
            "dealt": len(dealt),
            "not_recovered": len(dealt) - len(times),
            "median_s": round(statistics.median(times), 2) if times else None,
            "max_s": round(max(times), 2) if times else None,
        }
    return found


def aim_met(strikes: Sequence[Strike]) -> dict[Group, bool | None]:
    """Return, by group with an aim, whether its median recovery meets the aim; a fault without recovery counts as
    infinitely long. None: the group has fewer than `ENOUGH` faults."""
    met: dict[Group, bool | None] = {}
    for name, aim_s in AIM_S.items():
        dealt = [strike for strike in strikes if group_of(strike.kind) == name]
        times = [math.inf if strike.recovered_s is None else strike.recovered_s for strike in dealt]
        met[name] = statistics.median(times) < aim_s if len(times) >= ENOUGH else None
    return met


def histogram(strikes: Sequence[Strike]) -> list[str]:
    """Return histograms of the recovery times by group, as lines of text."""
    lines = []
    for name in GROUPS:
        dealt = [strike for strike in strikes if group_of(strike.kind) == name]
        if not dealt:
            continue
        times = _times(dealt)
        counts: dict[str, int] = {}
        for low, high in zip((0.0, *BOUNDS_S), (*BOUNDS_S, float("inf")), strict=True):
            label = f"< {high:g} s" if high < float("inf") else "longer"
            counts[label] = sum(low <= time < high for time in times)
        counts["never"] = len(dealt) - len(times)
        scale = min(1.0, BAR_CELLS / max(counts.values()))
        lines += [f"recovery, {name}", *(_bar(label, count, scale) for label, count in counts.items() if count)]
    return lines


def tokens_of(calls: Sequence[BrokenCall]) -> dict[str, int]:
    """Return the number of responses whose replica failed, of the tokens that these had then, and of those tokens that
    are in complete responses. The other tokens were lost with the Rollouter or with dropped samples."""
    whole = [call for call in calls if call.turn is not None and call.turn[: len(call.received)] == call.received]
    return {
        "responses": len(calls),
        "tokens_told": sum(len(call.received) for call in calls),
        "tokens_kept": sum(len(call.received) for call in whole),
    }


def each(strikes: Sequence[Strike], calls: Sequence[BrokenCall]) -> list[dict[str, Any]]:
    """Return every fault as plain values. A broken call is counted with the last fault before it."""
    found = []
    ends = [*(strike.at for strike in strikes[1:]), float("inf")]
    for strike, end in zip(strikes, ends, strict=False):
        found.append(
            {
                "number": strike.number,
                "fault": strike.kind.name,
                "at": strike.at,
                "at_s": round(strike.at - strikes[0].at, 1),
                "whom": sorted(f"{part}: {name}" for part, name in strike.parts),
                "pids": sorted(strike.pids),
                "recovered_s": strike.recovered_s,
                "lived": strike.lived,
                "lost": {
                    "steps": strike.steps_lost,
                    "told": list(strike.lost),
                    **tokens_of([call for call in calls if strike.at <= call.at < end]),
                },
                "note": strike.note,
            }
        )
    return found


def _times(strikes: Sequence[Strike]) -> list[float]:
    return [strike.recovered_s for strike in strikes if strike.recovered_s is not None]


def _bar(label: str, count: int, scale: float) -> str:
    return f"  {label:>7}  {'█' * max(1, round(count * scale))} {count}"
