"""Compute report.json from the events of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncrl.observe.formats import count, seconds
from asyncrl.observe.report.findings import RunData, rank_findings
from asyncrl.observe.report.load import Events
from asyncrl.observe.report.requests import logical_requests, request_figures
from asyncrl.observe.report.samples import share_figures, trace_samples, turn_figures
from asyncrl.observe.report.statistics import complement, summarize, to_json, total
from asyncrl.observe.report.steps import (
    find_outages,
    folded_figures,
    gpu_memory_figures,
    idle_figures,
    step_figures,
)
from asyncrl.observe.report.versions import limit_figures, staleness_figures, waste_figures, weight_sync_figures
from asyncrl.observe.status.run_status import ENDED
from asyncrl.observe.status.summary import SavedSummary

FORMAT = 2
"""The version of report.json."""
LIVE = "running"
"""`about["status"]` of a run that has not ended."""


def analyse(events: Events, about: Mapping[str, Any], summary: SavedSummary | None) -> dict[str, Any]:
    """Return report.json without its plots.

    Args:
        events: the events of the run, at least one.
        about: `name, run_dir, experiment, status, level, response_length`, as far as known, and `started_at`, the
            wall-clock time of the launch or of the last resumption.
        summary: summary.json; None: there is none.
    """
    completed = about.get("status") in ENDED
    start, end, down = find_outages(events, completed=completed, launched_at=about.get("started_at"))
    requests = logical_requests(events)
    histories = trace_samples(events, requests)
    requests["step"] = histories.step_of(requests["index"].where(requests["of_last_generation"], 0), requests["step"])
    done = requests[~requests["aborted"]]
    figures: dict[str, Any] = {
        "requests": request_figures(requests),
        "shares": share_figures(histories),
        "turns": turn_figures(events, requests, histories),
        "steps": step_figures(events, histories, done, start),
        "idle": idle_figures(events, start, end, down, completed=completed),
        "staleness": staleness_figures(events, histories),
        "weight_sync": weight_sync_figures(events),
        "gpu_memory": gpu_memory_figures(events, start),
        "waste": waste_figures(events, histories),
        "lower_limits": limit_figures(events, histories, requests, about.get("response_length")),
        "own_events": [
            {"event": name, **(summarize(np.concatenate(events.own[name])) or {})} for name in sorted(events.own)
        ],
        "folded": folded_figures(events.folded) if events.folded is not None and events.folded.spans else None,
    }
    # `starting_s` is unknown without `started_at`, or if that is the time of a resumption.
    started_at, run_s = about.get("started_at"), None if summary is None else summary.wall_s
    starting_s = start - started_at if started_at is not None and started_at <= start else None
    ending_s = max(0.0, started_at + run_s - end) if starting_s is not None and started_at and run_s else None
    run = {
        **about,
        "wall_s": figures["idle"]["wall_s"],
        "down_s": total(down),
        "starting_s": starting_s,
        "ending_s": ending_s,
        "first_event": start,
        "last_event": end,
        "steps": len(histories.steps),
        "last_step": histories.steps["step"].max() if len(histories.steps) else None,
        "samples_trained": len(histories.trained_in),
        "samples_unrecorded": len(histories.trained_in) - int(histories.samples["generated"].notna().sum()),
        "trajectories": figures["turns"]["trajectories"],
        "requests": len(done),
        "validation_requests": int((events["request"]["index"] == 0).sum()),
        "replicas": sorted(str(each) for each in events["request"]["replica"].dropna().unique()),
        "sampled_tokens": figures["waste"]["sampled_tokens"],
        "events": events.num_events,
        "event_files": events.num_files,
        "torn_lines": events.num_torn,
        "unknown_events": events.num_unknown,
        "dropped_events": events["profiler.dropped"]["events"].sum(),
    }
    data = RunData(events, histories, requests, figures, summary, complement(down, start, end))
    report = {"format": FORMAT, "run": run, "notes": _notes(run, figures, events, completed=completed)}
    return to_json({**report, "findings": rank_findings(data), **figures})


def _notes(run: Mapping[str, Any], figures: Mapping[str, Any], events: Events, *, completed: bool) -> list[str]:
    """Return what a reader has to know before trusting the figures."""
    unrecorded, abandoned = run["samples_unrecorded"], sorted({row["step"] for row in figures["steps"]["abandoned"]})
    folded = figures["folded"]
    # A live run is still writing the last lines of its files.
    torn = run["torn_lines"] - (events.num_unfinished if run.get("status") == LIVE else 0)
    ending = f", and ending it {seconds(run['ending_s'])}" if run["ending_s"] is not None else ""
    notes = (
        (folded,
         f"The events of steps {folded['first_step']} to {folded['last_step']} were replaced by sums, because all "
         "events together exceeded profiler.keep_gb: figures cover the later steps only. The page has a table of the "
         "earlier ones. Samples that were generated before are among those of which no event shows how." if folded else
         ""),
        (run["starting_s"] is not None,
         f"Starting the run took {seconds(run['starting_s'])}, until its first sample{ending}: all figures cover the "
         f"{seconds(run['wall_s'])} in between."),
        (run["dropped_events"],
         f"{run['dropped_events']:.0f} events did not fit into the buffer and are missing: raise "
         "profiler.buffer_events, or record less with profiler.level=summary."),
        (unrecorded,
         f"No event shows how {count(unrecorded, 'trained sample')} {'was' if unrecorded == 1 else 'were'} generated. "
         "A Rollouter that is killed loses the events of its last half second. Such samples count as trained, but "
         "figures of requests, turns and waits do not include them."),
        (torn > 0,
         f"{count(torn, 'damaged line')} {'was' if torn == 1 else 'were'} left out: a process was killed while it "
         "wrote."),
        (not completed, _unfinished(run, figures["idle"])),
        (run["unknown_events"],
         f"{run['unknown_events']} events have names that this version of asyncrl does not know."),
        (abandoned,
         f"Training went back: steps {', '.join(map(str, abandoned))} were repeated. Figures by step cover only the "
         "final steps; figures of replicas, tools and rewards also cover the work of the repeated ones."),
        (run["down_s"],
         f"The run was down, or nothing was recorded, for {run['down_s']:.0f} s; shares refer to the rest."),
        (run.get("level") != "full" and not len(events["sample.slot"]),
         "Waits for a generation slot, writing of samples and the work of ranks inside a step are recorded only with "
         "profiler.level=full; here they count as other time."),
        (not run["requests"],
         "No request of a training sample was recorded: figures of requests, turns and replicas are empty."),
        (run["requests"] and not figures["shares"]["trajectories"],
         "No sample was trained yet: figures that need a sample's whole lifetime are empty."),
    )  # fmt: skip
    return [text for applies, text in notes if applies]


def _unfinished(run: Mapping[str, Any], idle: Mapping[str, Any]) -> str:
    why = "The run is live" if run.get("status") == LIVE else "The run did not shut down cleanly"
    sides = [("the Trainer's", idle["trainer"]), ("the Rollouter's", idle["rollouter"])]
    ends = " and ".join(f"{name} at {seconds(side['known_s'])}" for name, side in sides if side is not None)
    text = f"{why}, and no event shows what was still running at the end: idle figures end with the last "
    text += f"event of each side ({ends} of {seconds(idle['wall_s'])})"
    if idle["in_flight"]:
        text += f"; {count(idle['in_flight'], 'sample')} without an end count as in generation until then"
    return f"{text}."
