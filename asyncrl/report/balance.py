"""Findings about the run as a whole: who waits for whom, tails, restarts, what is thrown away. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from asyncrl.report.findings import Finding, Material
from asyncrl.report.intervals import Intervals, intersection, union
from asyncrl.report.waste import reasons_of
from asyncrl.report.words import count, percent, seconds

MUCH_SHARE = 0.05
"""Of the run: less than that is not worth a word."""
SLOWER_SIDE = 2.0
"""It keeps the other one idle for so many times as long as it is idle itself."""
FIRST_SHARE = 0.2
"""Of all waits: the first one is told apart from there on."""
_TIMES = ["timestamp", "end"]
_SAME_S = 0.05
"""The same recovery, in the events and in summary.json."""
LONG_STALL_S = 5.0
"""Short ones are many where processes outnumber cores; they tell of the machine."""


def hints(figures: Mapping[str, Any], material: Material, summary: Mapping[str, Any]) -> Iterator[Finding]:
    """`figures`: those of report.json. `summary`: summary.json, or nothing."""
    wall = figures["idle"]["wall_s"]
    yield from _sides(figures["idle"], wall)
    yield from _tail(figures["requests"], material)
    yield from _sync(figures["weight_sync"], wall)
    yield from _checkpoints(material, wall)
    yield from _stalls(material)
    yield from _restarts(material, summary)
    yield from _thrown_away(figures["thrown_away"], wall)


def _sides(idle: Mapping[str, Any], wall: float) -> Iterator[Finding]:
    trainer, rollouter = idle["trainer"], idle["rollouter"]
    waits, idles = (side is not None and side["idle_s"] > MUCH_SHARE * wall for side in (trainer, rollouter))
    if waits and idles:
        more, less = sorted((trainer["idle_s"], rollouter["idle_s"]), reverse=True)
        if more < SLOWER_SIDE * less:
            yield _in_turns(idle, wall)
            return
        waits, idles = trainer["idle_s"] == more, rollouter["idle_s"] == more
    if waits:
        yield Finding(
            "trainer_waits", "trainer", "trainer.wait_samples", trainer["idle_s"],
            f"The Trainer waited for samples for {seconds(trainer['idle_s'])}, "
            f"{percent(trainer['idle_s'] / wall)} of the run{_first(idle)}: generation is the slower side.",
            "Give generation more: rollout.num_replicas, or let it run further ahead with "
            "async_training.staleness_threshold. Alarms above, if there are any, may be the cause.",
            {"event": "trainer.wait_samples"}, hint=True,
        )  # fmt: skip
    if idles:
        yield Finding(
            "rollouter_idle", "rollouter", "sample.generate", rollouter["idle_s"],
            f"Nothing was in generation for {seconds(rollouter['idle_s'])}, "
            f"{percent(rollouter['idle_s'] / wall)} of the run: training is the slower side, or pacing holds "
            "generation back.",
            "Give training more, or let generation run further ahead with async_training.staleness_threshold.",
            {"event": "sample.generate"}, hint=True,
        )  # fmt: skip


def _in_turns(idle: Mapping[str, Any], wall: float) -> Finding:
    trainer, rollouter = idle["trainer"]["idle_s"], idle["rollouter"]["idle_s"]
    return Finding(
        "in_turns", "trainer", "trainer.wait_samples", trainer,
        f"The sides wait for each other in turns: the Trainer waited for samples for {seconds(trainer)}, "
        f"{percent(trainer / wall)} of the run{_first(idle)}, and nothing was in generation for {seconds(rollouter)}. "
        "Neither is the slower side: pacing lets them overlap too little.",
        "Let generation run further ahead (a higher async_training.staleness_threshold), or publish more often (a "
        "lower async_training.trigger_parameter_sync_step), so that it is let on sooner.",
        {"event": "trainer.wait_samples"}, hint=True,
    )  # fmt: skip


def _first(idle: Mapping[str, Any]) -> str:
    """The wait that every run begins with, where it is much of all."""
    first, all_ = idle["first_wait_s"], idle["trainer"]["idle_s"]
    return f" (the first samples took {seconds(first)} of it)" if first and first > FIRST_SHARE * all_ else ""


def _tail(requests: Mapping[str, Any], material: Material) -> Iterator[Finding]:
    """What it costs: the Trainer waits, and of the requests of its step only the last tenth is not done."""
    if not requests["time"]["by_step"] or requests["time"]["done_early"] < 0.7:
        return
    ends = material.requests[~material.requests["aborted"]].groupby("step")["end"]
    last_tenth = union(ends.quantile(0.9).to_numpy(), ends.max().to_numpy())
    lost = material.lost(intersection(last_tenth, material.waits))
    slowest = requests["slowest"][0]
    yield Finding(
        "long_tail", "request", str(slowest["request"]), lost,
        f"Requests have a long tail: {percent(requests['time']['done_early'])} of them are done in "
        f"{percent(requests['tail_at'])} of the time of their step's longest. The Trainer waited {seconds(lost)} for "
        "the last tenth of them.",
        "If responses are long (see what lower limits would do): a lower rollout.response_length, or over-sampling "
        "(rollout.over_sample). async_training.partial_rollout keeps them from holding up weight syncs.",
        {name: slowest[name] for name in ("step", "replica", "request", "sample", "trajectory", "turn")}
        | {"event": "request", "duration_s": slowest["duration_s"], "normal_s": requests["time"]["all"]["median"]},
        hint=True,
    )  # fmt: skip


def _sync(sync: Mapping[str, Any], wall: float) -> Iterator[Finding]:
    share = sync["paused_share"] or 0.0
    if share > MUCH_SHARE:
        yield Finding(
            "weight_sync", "weight_sync", "sync.pause", share * wall,
            f"Replicas stood still for {percent(share)} of the run to load weights.",
            "Publish less often (async_training.trigger_parameter_sync_step); the table of the weight sync says which "
            "phase takes the time.",
            {"event": "sync.pause"}, hint=True,
        )  # fmt: skip


def _checkpoints(material: Material, wall: float) -> Iterator[Finding]:
    spent = material.lost(_times(material.events.of("trainer.checkpoint")))
    if spent > MUCH_SHARE * wall:
        yield Finding(
            "checkpoints", "checkpoint", "trainer.checkpoint", spent,
            f"Training stood still for {seconds(spent)} for checkpoints, {percent(spent / wall)} of the run.",
            "Save less often: trainer.save_freq.", {"event": "trainer.checkpoint"}, hint=True,
        )  # fmt: skip


def _stalls(material: Material) -> Iterator[Finding]:
    stalls = material.events.of("loop.stall")
    if len(material.up):
        stalls = stalls[stalls["timestamp"] >= material.up[0, 0]]  # while parts start, they import
    for part, own in stalls.groupby("part", observed=True):
        worst = own.loc[own["duration_s"].idxmax()]
        spent = material.lost(_times(own))
        yield Finding(
            "loop_stall", "part", str(part), spent,
            f"The event loop of {part} stood still {len(own)} times, for {seconds(spent)} in all and "
            f"{seconds(worst['duration_s'])} at most: nothing moved there meanwhile.",
            "Something blocks it: user code that does not await (rewards, tools, agents), or a machine with too few "
            "cores.",
            {"step": worst["step"], "event": "loop.stall", "duration_s": worst["duration_s"]},
            hint=worst["duration_s"] < LONG_STALL_S,
        )  # fmt: skip


def _restarts(material: Material, summary: Mapping[str, Any]) -> Iterator[Finding]:
    """The events tell when; of a run that has none of them, and of more than it has, summary.json tells how long."""
    events, abandoned = material.events.of("part.restarted"), material.lives.abandoned
    more = _untold(events, summary)
    again = material.lost(_times(abandoned))
    down = material.lost(_times(events)) + sum(entry["recovered_s"] for entry in more)
    lost = material.lost(_times(pd.concat([abandoned[_TIMES], events[_TIMES]]))) + down - material.lost(_times(events))
    if lost <= 0:
        return
    causes = [(str(row["part"]), str(row["cause"])) for _, row in events.iterrows()]
    causes += [(str(entry["part"]), str(entry["cause"])) for entry in more]
    counts = Counter(part for part, _ in causes)
    replaced = ", ".join(f"{part} {count(number, 'time')}" for part, number in counts.items())
    text = f"Replaced: {replaced}; recovering took {seconds(down)}." if causes else ""
    if len(abandoned):
        text += f" Training went back: {count(len(abandoned), 'step')} {'was' if len(abandoned) == 1 else 'were'} done "
        text += f"again ({seconds(again)})."
    if causes:
        part, cause = causes[0]
        text += f" The first cause, of the {part}: {(cause.splitlines() or ['unknown'])[0].rstrip('.')}."
    first = abandoned.iloc[0] if len(abandoned) else events.iloc[0] if len(events) else None
    evidence: dict[str, Any] = {} if first is None else {"step": first["step"]}
    if len(events) or len(abandoned):
        evidence["event"] = "part.restarted" if len(events) else "step"
    yield Finding(
        "restarts", "part", causes[0][0] if causes else "trainer", lost, text.strip(),
        "`asyncrl status` tells the restarts and their causes. Checkpoints more often (trainer.save_freq) make going "
        "back cheaper.",
        evidence, hint=True,
    )  # fmt: skip


def _untold(events: pd.DataFrame, summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Recoveries of summary.json that are not among the events."""
    known = [(str(row["part"]), float(row["duration_s"])) for _, row in events.iterrows()]
    more = []
    for entry in summary.get("recovery") or ():
        if entry.get("recovered_s") is None:
            continue
        same = [one for one in known if one[0] == entry["part"] and abs(one[1] - entry["recovered_s"]) < _SAME_S]
        if same:
            known.remove(same[0])
        else:
            more.append(entry)
    return more


def _times(rows: pd.DataFrame) -> Intervals:
    return union(rows["timestamp"].to_numpy(), rows["end"].to_numpy())


def _thrown_away(waste: Mapping[str, Any], wall: float) -> Iterator[Finding]:
    share = waste["share"] or 0.0
    if share > MUCH_SHARE:
        told = ", ".join(f"{tokens:.0f} {reason}" for reason, tokens in reasons_of(waste))
        yield Finding(
            "thrown_away", "tokens", "sampled", share * wall,
            f"{percent(share)} of the sampled tokens were thrown away ({told}).",
            "Dropped as stale: async_training.max_staleness or a lower staleness_threshold. Surplus: "
            "rollout.over_sample.unfinished keeps it, and fewer rollout.over_sample.trajectories make less of it.",
            {"event": "sample.dropped" if waste["dropped"] else "trajectory"}, hint=True,
        )  # fmt: skip
