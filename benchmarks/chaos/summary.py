"""The result of a round of chaos, as tables and as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.chaos.faults import ACTORS, ENGINES, KINDS, FaultKind, InjectedFault
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import BrokenCall
from benchmarks.report import report, write_json

Group = Literal["actors", "engines", "launches", "drivers", "rewards"]
Verdict = Literal["kept", "broken", "short", "slow"]

AIM = "no sample lost or doubled, no hang; median recovery under 20 s (actors) and 60 s (engines) on two cores"
AIM_S: dict[Group, float] = {"actors": 20.0, "engines": 60.0}
MIN_FAULTS = 5
"""Number of faults from which on the median of a group is judged."""
GROUPS: tuple[Group, ...] = ("actors", "engines", "launches", "drivers", "rewards")
"""Groups of comparable recoveries; `launches`: faults that end a launch, `drivers`: a stopped driver."""
BOUNDS_S = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
BAR_CELLS = 40


def report_outcome(outcome: ChaosOutcome, options: ChaosOptions, json_path: Path | None) -> bool:
    """Print the tables, write the JSON, and return whether the round passed."""
    verdict, reasons = judge(outcome, options)
    faults = outcome.faults
    unexpected = [fault for fault in faults if not fault.launch_survived and not fault.kind.ends_launch]
    groups = by_group(faults)
    report(
        "chaos",
        rows(faults) or [{"fault": "none", "injected": 0}],
        json_path,
        aim=AIM,
        seed=options.seed,
        faults=len(faults),
        planned=options.num_faults,
        median_recovery_s={name: group["median_s"] for name, group in groups.items()},
        not_recovered={name: group["not_recovered"] for name, group in groups.items()},
        aim_met=aim_met(faults),
        not_injected=dict(outcome.not_injected),
        launches=outcome.launches,
        unexpected_launch_ends=len(unexpected),
        last_launch=outcome.last_launch or "none (--no-finish)",
        samples=outcome.samples,
        steps=outcome.steps,
        lineages=outcome.lineages,
        turns_checked=outcome.num_turns,
        broken_calls=tokens_of(outcome.broken_calls),
        wall_s=outcome.wall_s,
        violations=_broken(outcome),
        verdict=verdict,
    )
    console = Console(highlight=False)
    for line in histogram(faults):
        console.print(line, markup=False)
    for line in reasons:
        console.print(f"FAILED: {line}", markup=False)
    if json_path is not None:  # with details that are too long for the console
        result = json.loads(json_path.read_text(encoding="utf-8"))
        result |= {"groups": groups, "injected_faults": injected_faults(faults, outcome.broken_calls)}
        write_json(json_path, result | {"ended_launches": outcome.ended_launches, "failed": reasons})
    return verdict == "kept"


def judge(outcome: ChaosOutcome, options: ChaosOptions) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the reasons why it is not `kept`.

    `broken`: a promise was broken. `short`: fewer faults than requested were injected, or none. `slow`: with --aim, an
    aim was missed, or no group had enough faults. The first one that applies is returned, with the reasons of all.
    """
    broken, short, slow = _broken(outcome), _short(outcome, options), _slow(outcome.faults) if options.aim else []
    verdict: Verdict = "broken" if broken else "short" if short else "slow" if slow else "kept"
    return verdict, [*broken, *short, *slow]


def _broken(outcome: ChaosOutcome) -> list[str]:
    return [f"{violation.promise}: {violation.details}" for violation in outcome.violations]


def _short(outcome: ChaosOutcome, options: ChaosOptions) -> list[str]:
    injected = len(outcome.faults)
    if injected and (options.num_faults is None or injected >= options.num_faults):
        return []
    limit = f"the limit of {options.limit_s / 60:g} minutes (--minutes) was reached"
    why = "the run could not be restarted" if outcome.gave_up else limit
    if not injected:
        return [f"no fault was injected, so nothing was tested: {why}"]
    return [f"{injected} of {options.num_faults} faults (--faults) were injected: {why}"]


def _slow(faults: Sequence[InjectedFault]) -> list[str]:
    met, groups = aim_met(faults), by_group(faults)
    if not any(judged is not None for judged in met.values()):
        return [f"the aims cannot be judged (--aim): neither {' nor '.join(AIM_S)} had {MIN_FAULTS} faults"]
    return [
        f"median recovery of {name} was not under {AIM_S[name]:g} s (--aim): of {group['injected']} faults "
        f"{group['not_recovered']} did not recover, and the others have a median of {group['median_s']} s"
        for name, group in groups.items()
        if met.get(name) is False
    ]


def group_of(kind: FaultKind) -> Group:
    """Return the one of `GROUPS` to which faults of this kind belong."""
    if kind.ends_launch:
        return "launches"
    if kind.target == "driver":
        return "drivers"
    if kind.target == "reward":
        return "rewards"
    assert kind.target in ACTORS | ENGINES, kind
    return "actors" if kind.target in ACTORS else "engines"


def rows(faults: Sequence[InjectedFault]) -> list[dict[str, Any]]:
    """Return a table row for each kind of fault that was injected."""
    table = []
    for kind in KINDS:
        if injected := [fault for fault in faults if fault.kind == kind]:
            times = _times(injected)
            table.append(
                {
                    "fault": kind.name,
                    "injected": len(injected),
                    "not recovered": len(injected) - len(times),
                    "launch survived": sum(fault.launch_survived for fault in injected),
                    "median s": statistics.median(times) if times else "-",
                    "max s": max(times, default="-"),
                    "steps lost": sum(fault.steps_lost for fault in injected),
                }
            )
    return table


def by_group(faults: Sequence[InjectedFault]) -> dict[Group, dict[str, Any]]:
    """Return, by group, the number of faults, the number without recovery, and the median and maximum recovery time of
    the others, which are None if there are no others."""
    groups: dict[Group, dict[str, Any]] = {}
    for name in GROUPS:
        injected = [fault for fault in faults if group_of(fault.kind) == name]
        times = _times(injected)
        groups[name] = {
            "injected": len(injected),
            "not_recovered": len(injected) - len(times),
            "median_s": round(statistics.median(times), 2) if times else None,
            "max_s": round(max(times), 2) if times else None,
        }
    return groups


def aim_met(faults: Sequence[InjectedFault]) -> dict[Group, bool | None]:
    """Return, by group with an aim, whether its median recovery meets the aim; a fault without recovery counts as
    infinitely long. None: the group has fewer than `MIN_FAULTS` faults."""
    met: dict[Group, bool | None] = {}
    for name, aim_s in AIM_S.items():
        injected = [fault for fault in faults if group_of(fault.kind) == name]
        times = [math.inf if fault.recovered_s is None else fault.recovered_s for fault in injected]
        met[name] = statistics.median(times) < aim_s if len(times) >= MIN_FAULTS else None
    return met


def histogram(faults: Sequence[InjectedFault]) -> list[str]:
    """Return histograms of the recovery times by group, as lines of text."""
    lines = []
    for name in GROUPS:
        injected = [fault for fault in faults if group_of(fault.kind) == name]
        if not injected:
            continue
        times = _times(injected)
        counts: dict[str, int] = {}
        for low, high in zip((0.0, *BOUNDS_S), (*BOUNDS_S, float("inf")), strict=True):
            label = f"< {high:g} s" if high < float("inf") else "longer"
            counts[label] = sum(low <= time < high for time in times)
        counts["never"] = len(injected) - len(times)
        scale = min(1.0, BAR_CELLS / max(counts.values()))
        lines += [f"recovery, {name}", *(_bar(label, count, scale) for label, count in counts.items() if count)]
    return lines


def tokens_of(calls: Sequence[BrokenCall]) -> dict[str, int]:
    """Return the number of responses whose replica failed, of the tokens that these had then, and of those tokens that
    are in complete responses. The other tokens were lost with the Rollouter or with dropped samples."""
    whole = [call for call in calls if call.turn is not None and call.turn[: len(call.received)] == call.received]
    return {
        "responses": len(calls),
        "tokens_received": sum(len(call.received) for call in calls),
        "tokens_kept": sum(len(call.received) for call in whole),
    }


def injected_faults(faults: Sequence[InjectedFault], calls: Sequence[BrokenCall]) -> list[dict[str, Any]]:
    """Return every fault as plain values. A broken call is counted with the last fault before it."""
    result = []
    ends = [*(fault.at for fault in faults[1:]), float("inf")]
    for fault, end in zip(faults, ends, strict=False):
        result.append(
            {
                "number": fault.number,
                "fault": fault.kind.name,
                "at": fault.at,
                "at_s": round(fault.at - faults[0].at, 1),
                "targets": sorted(f"{part}: {name}" for part, name in fault.parts),
                "pids": sorted(fault.pids),
                "recovered_s": fault.recovered_s,
                "launch_survived": fault.launch_survived,
                "lost": {
                    "steps": fault.steps_lost,
                    "restart_details": list(fault.restart_details),
                    **tokens_of([call for call in calls if fault.at <= call.at < end]),
                },
                "note": fault.note,
            }
        )
    return result


def _times(faults: Sequence[InjectedFault]) -> list[float]:
    return [fault.recovered_s for fault in faults if fault.recovered_s is not None]


def _bar(label: str, count: int, scale: float) -> str:
    return f"  {label:>7}  {'█' * max(1, round(count * scale))} {count}"
