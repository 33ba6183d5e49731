"""What a round of chaos came to: a table for people, JSON for whoever compares rounds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import ACTORS, DRIVER_DOWN, ENGINES, KINDS, Strike
from benchmarks.chaos.harness import Options, Outcome
from benchmarks.report import report

AIM = "none lost, none doubled, none hung; median recovery under 20 s for an actor and 60 s for an engine, on two cores"


def tell(outcome: Outcome, options: Options, json_path: Path | None) -> bool:
    """Print the table and write the JSON. Returns whether a promise was broken."""
    broken = [f"{violation.promise}: {violation.told}" for violation in outcome.violations]
    unasked = [strike for strike in outcome.strikes if not strike.lived and strike.kind.target not in DRIVER_DOWN]
    report(
        "chaos",
        rows(outcome.strikes) or [{"fault": "none", "dealt": 0}],
        json_path,
        aim=AIM,
        seed=options.seed,
        faults=len(outcome.strikes),
        median_recovery_s=medians(outcome.strikes),
        launches=outcome.launches,
        ended_unasked=len(unasked),
        samples=outcome.samples,
        steps=outcome.steps,
        lineages=outcome.lineages,
        wall_s=outcome.wall_s,
        violations=broken,
        verdict="broken" if broken else "kept",
    )
    if json_path is not None:  # with what is too long for people
        told = json.loads(json_path.read_text(encoding="utf-8"))
        told |= {"each": [_plain(strike) for strike in outcome.strikes], "deaths": outcome.deaths}
        json_path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return bool(broken)


def rows(strikes: Sequence[Strike]) -> list[dict[str, Any]]:
    """One for each kind that was dealt."""
    found = []
    for kind in KINDS:
        dealt = [strike for strike in strikes if strike.kind == kind]
        if not dealt:
            continue
        times = [strike.recovered_s for strike in dealt if strike.recovered_s is not None]
        found.append(
            {
                "fault": kind.name,
                "dealt": len(dealt),
                "got over": len(times),
                "launch lived": sum(strike.lived for strike in dealt),
                "median s": statistics.median(times) if times else "-",
                "max s": max(times, default="-"),
            }
        )
    return found


def medians(strikes: Sequence[Strike]) -> dict[str, float | None]:
    """Seconds until at work again, by group of targets; None: none was dealt and got over."""
    groups = {"actors": ACTORS, "engines": ENGINES, "launches": DRIVER_DOWN}
    times = {
        name: [
            strike.recovered_s for strike in strikes if strike.kind.target in targets and strike.recovered_s is not None
        ]
        for name, targets in groups.items()
    }
    return {name: round(statistics.median(found), 2) if found else None for name, found in times.items()}


def _plain(strike: Strike) -> dict[str, Any]:
    return {
        "number": strike.number,
        "fault": strike.kind.name,
        "at": strike.at,
        "whom": sorted(f"{part}: {name}" for part, name in strike.parts),
        "pids": sorted(strike.pids),
        "recovered_s": strike.recovered_s,
        "lived": strike.lived,
        "note": strike.note,
    }
