"""All figures of a run, as they go into report.json. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.report import balance, findings, idle, requests, shares, steps, turns, versions, waste
from asyncrl.report.intervals import complement, total, union
from asyncrl.report.lives import trace
from asyncrl.report.load import Events
from asyncrl.report.numbers import plain
from asyncrl.report.words import count, seconds
from asyncrl.run_state import ENDED

FORMAT = 1
"""Of report.json."""
LIVE = "running"
"""`about["status"]` of a run that has not ended."""


def analyse(events: Events, about: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """
    Args:
        events: at least one.
        about: `name, run_dir, experiment, status, level, response_length`, as far as known; `started_at`, wall clock,
            of the launch or its last resumption.
        summary: summary.json, or nothing.
    """
    over = about.get("status") in ENDED
    start, end, down = idle.window(events, over=over, launched_at=about.get("started_at"))
    made = requests.logical(events)
    lives = trace(events, made)
    made["step"] = lives.step_of(made["index"].where(made["counts"], 0), made["step"])
    done = made[~made["aborted"]]
    wall_s = end - start - total(down)
    figures = {
        "requests": requests.analyse(made),
        "shares": shares.analyse(lives),
        "turns": turns.analyse(events, made),
        "steps": steps.analyse(events, lives, done, start),
        "idle": idle.analyse(events, start, end, down, over=over),
        **{"staleness": versions.staleness(events, lives), "weight_sync": versions.weight_sync(events)},
        "thrown_away": waste.thrown_away(events, lives),
        "lower_limits": waste.lower_limits(events, lives, made, about.get("response_length")),
    }
    waits = events.of("trainer.wait_samples")
    waited = union(waits["timestamp"].to_numpy(), waits["end"].to_numpy())
    up = complement(down, start, end)
    material = findings.Material(events, lives, made, waited, up, findings.begun_anew(events, down))
    found = [*findings.anomalies(material), *balance.hints(figures, material, summary)]
    run = {
        **about,
        "wall_s": wall_s,
        "down_s": total(down),
        **_around(about.get("started_at"), summary.get("wall_s"), start, end),
        "first_event": start,
        "last_event": end,
        "steps": len(lives.steps),
        "last_step": lives.steps["step"].max() if len(lives.steps) else None,
        "samples_trained": len(lives.trained_in),
        "samples_unrecorded": len(lives.trained_in) - int(lives.samples["generated"].notna().sum()),
        "trajectories": figures["turns"]["trajectories"],
        "requests": len(done),
        "validation_requests": int((events.of("request")["index"] == 0).sum()),
        "replicas": sorted(str(each) for each in events.of("request")["replica"].dropna().unique()),
        "sampled_tokens": figures["thrown_away"]["sampled_tokens"],
        "events": events.num_events,
        "event_files": events.num_files,
        "torn_lines": events.num_torn,
        "unknown_events": events.num_unknown,
        "dropped_events": events.of("profiler.dropped")["events"].sum(),
    }
    report = {"format": FORMAT, "run": run, "notes": _notes(run, figures, events, over=over)}
    report["findings"] = findings.rank(found, wall_s)
    return {key: plain(value) for key, value in {**report, **figures}.items()}


def _around(started_at: float | None, whole_s: float | None, start: float, end: float) -> dict[str, float | None]:
    """Before the first sample and after the last event; None: not known, as of what came before a resumption."""
    starting = start - started_at if started_at is not None and started_at <= start else None
    ending = started_at + whole_s - end if starting is not None and started_at is not None and whole_s else None
    return {"starting_s": starting, "ending_s": None if ending is None else max(0.0, ending)}


def _notes(run: Mapping[str, Any], figures: Mapping[str, Any], events: Events, *, over: bool) -> list[str]:
    """What a reader has to know before trusting the figures."""
    told = []
    if run["starting_s"] is not None:
        ending = f", and ending it {seconds(run['ending_s'])}" if run["ending_s"] is not None else ""
        told.append(
            f"Starting the run took {seconds(run['starting_s'])}, until its first sample{ending}: all figures are of "
            f"the {seconds(run['wall_s'])} between."
        )
    if run["dropped_events"]:
        told.append(
            f"{run['dropped_events']:.0f} events did not fit into the buffer and are missing: raise "
            "profiler.buffer_events, or record less with profiler.level=summary."
        )
    if unrecorded := run["samples_unrecorded"]:
        told.append(
            f"How {count(unrecorded, 'trained sample')} {'was' if unrecorded == 1 else 'were'} generated is not among "
            "the events: they are lost, like the last half second of a Rollouter that is killed. They count as "
            "trained; figures of requests, turns and waits are without them."
        )
    # A run that lives is writing the last lines of its files.
    torn = run["torn_lines"] - (events.num_unfinished if run.get("status") == LIVE else 0)
    if torn > 0:
        verb = "was" if torn == 1 else "were"
        told.append(f"{count(torn, 'damaged line')} {verb} left out: a process was killed while it wrote.")
    if not over:
        told.append(_unfinished(run, figures["idle"]))
    if run["unknown_events"]:
        told.append(f"{run['unknown_events']} events have names that this version of asyncrl does not know.")
    if figures["steps"]["abandoned"]:
        steps = sorted({row["step"] for row in figures["steps"]["abandoned"]})
        told.append(
            f"Training went back: steps {', '.join(map(str, steps))} were done again. Figures by step are of those "
            "that survived; work of the others counts for replicas, tools and rewards."
        )
    if run["down_s"]:
        told.append(
            f"The run was down, or nothing was recorded, for {run['down_s']:.0f} s; shares are of the rest of the time."
        )
    if run.get("level") != "full" and not len(events.of("sample.slot")):
        told.append(
            "Waits for a place in generation, writing of samples and what ranks did inside a step are recorded only "
            "with profiler.level=full; here they count as other time."
        )
    if not run["requests"]:
        told.append("No request of a training sample was recorded: figures of requests, turns and replicas are empty.")
    elif not figures["shares"]["trajectories"]:
        told.append("No sample was trained yet: figures that need a sample's whole life are empty.")
    return told


def _unfinished(run: Mapping[str, Any], idle: Mapping[str, Any]) -> str:
    """An event is written when it ends."""
    why = "The run lives" if run.get("status") == LIVE else "The run did not end in good order"
    ends = [
        f"{name} at {seconds(side['known_s'])}"
        for name, side in (("the Trainer's", idle["trainer"]), ("the Rollouter's", idle["rollouter"]))
        if side is not None
    ]
    text = f"{why}, and what was under way at its last event is not among the events: idle figures end where the last "
    text += f"word of each side is ({' and '.join(ends)} of {seconds(idle['wall_s'])})"
    if idle["under_way"]:
        text += f"; {count(idle['under_way'], 'sample')} that came to no end count as in generation until then"
    return text + "."
