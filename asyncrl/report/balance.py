"""Findings about the run as a whole: who waits for whom, tails, restarts, what is thrown away. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.report.findings import Finding
from asyncrl.report.load import Events
from asyncrl.report.words import percent, seconds

MUCH_SHARE = 0.05
"""Of the run: less than that is not worth a word."""
LONG_STALL_S = 5.0
"""Short ones are many where processes outnumber cores; they tell of the machine."""


def hints(figures: Mapping[str, Any], events: Events, summary: Mapping[str, Any], begun: float) -> Iterator[Finding]:
    """`figures`: those of report.json. `summary`: summary.json, or nothing. `begun`: when the first sample was."""
    wall = figures["idle"]["wall_s"]
    yield from _sides(figures["idle"], wall)
    yield from _tail(figures["requests"], figures["steps"])
    yield from _sync(figures["weight_sync"], wall)
    yield from _checkpoints(events, wall)
    yield from _stalls(events, begun)
    yield from _restarts(figures["steps"], summary)
    yield from _thrown_away(figures["thrown_away"], wall)


def _sides(idle: Mapping[str, Any], wall: float) -> Iterator[Finding]:
    trainer, rollouter = idle["trainer"], idle["rollouter"]
    if trainer["idle_s"] > MUCH_SHARE * wall:
        yield Finding(
            "trainer_waits", "trainer", "trainer.wait_samples", trainer["idle_s"],
            f"The Trainer waited for samples for {seconds(trainer['idle_s'])}, {percent(trainer['share'])} of the "
            "run: generation "
            "is the slower side.",
            "Give generation more: rollout.num_replicas, or let it run further ahead with "
            "async_training.staleness_threshold. Alarms above, if there are any, may be the cause.",
            {"event": "trainer.wait_samples"}, hint=True,
        )  # fmt: skip
    if rollouter and rollouter["idle_s"] > MUCH_SHARE * wall:
        yield Finding(
            "rollouter_idle", "rollouter", "sample.generate", rollouter["idle_s"],
            f"Nothing was in generation for {seconds(rollouter['idle_s'])}, {percent(rollouter['share'])} of the "
            "run: training is "
            "the slower side, or pacing holds generation back.",
            "Give training more, or let generation run further ahead with async_training.staleness_threshold.",
            {"event": "sample.generate"}, hint=True,
        )  # fmt: skip


def _tail(requests: Mapping[str, Any], steps: Mapping[str, Any]) -> Iterator[Finding]:
    rows = requests["time"]["by_step"]
    lost = sum(row["max"] - row["p90"] for row in rows)
    if not rows or requests["time"]["done_early"] < 0.7:
        return
    slowest, whole = requests["slowest"][0], sum(row["duration_s"] for row in steps["by_step"])
    yield Finding(
        "long_tail", "request", str(slowest["request"]), min(lost, whole or lost),
        f"Requests have a long tail: {percent(requests['time']['done_early'])} of them are done in "
        f"{percent(requests['tail_at'])} of "
        f"the time of their step's longest. Waiting for the last tenth took {seconds(lost)}, added up over the steps.",
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


def _checkpoints(events: Events, wall: float) -> Iterator[Finding]:
    spent = events.of("trainer.checkpoint")["duration_s"].sum()
    if spent > MUCH_SHARE * wall:
        yield Finding(
            "checkpoints", "checkpoint", "trainer.checkpoint", spent,
            f"Training stood still for {seconds(spent)} for checkpoints, {percent(spent / wall)} of the run.",
            "Save less often: trainer.save_freq.", {"event": "trainer.checkpoint"}, hint=True,
        )  # fmt: skip


def _stalls(events: Events, begun: float) -> Iterator[Finding]:
    stalls = events.of("loop.stall")
    stalls = stalls[stalls["timestamp"] >= begun]  # while parts start, they import
    for part, own in stalls.groupby("part", observed=True):
        worst = own.loc[own["duration_s"].idxmax()]
        spent = own["duration_s"].sum()
        yield Finding(
            "loop_stall", "part", str(part), spent,
            f"The event loop of {part} stood still {len(own)} times, for {seconds(spent)} in all and "
            f"{seconds(worst['duration_s'])} at most: nothing moved there meanwhile.",
            "Something blocks it: user code that does not await (rewards, tools, agents), or a machine with too few "
            "cores.",
            {"step": worst["step"], "event": "loop.stall", "duration_s": worst["duration_s"]},
            hint=worst["duration_s"] < LONG_STALL_S,
        )  # fmt: skip


def _restarts(steps: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[Finding]:
    again = sum(row["duration_s"] for row in steps["abandoned"])
    down = sum(entry.get("recovered_s") or 0.0 for entry in summary.get("recovery") or ())
    if again + down <= 0:
        return
    causes = [f"{entry['part']}: {entry['cause']}" for entry in summary.get("recovery") or ()]
    first = f" The first cause: {causes[0].splitlines()[0]}" if causes else ""
    yield Finding(
        "restarts", "part", str(causes[0].split(":")[0]) if causes else "trainer", again + down,
        f"Parts were replaced, and training went back: {len(steps['abandoned'])} steps were done again "
        f"({seconds(again)}), "
        f"and recovering took {seconds(down)}.{first}",
        "`asyncrl status` tells the restarts and their causes. Checkpoints more often (trainer.save_freq) make going "
        "back "
        "cheaper.",
        {"event": "part.restarted", **({"step": steps["abandoned"][0]["step"]} if steps["abandoned"] else {})},
        hint=True,
    )  # fmt: skip


def _thrown_away(waste: Mapping[str, Any], wall: float) -> Iterator[Finding]:
    share = waste["share"] or 0.0
    if share > MUCH_SHARE:
        dropped = ", ".join(f"{row['tokens']:.0f} {row['reason']}" for row in waste["dropped"] if row["tokens"])
        yield Finding(
            "thrown_away", "tokens", "sampled", share * wall,
            f"{percent(share)} of the sampled tokens were thrown away ({dropped or 'cut as surplus'}).",
            "Dropped as stale: async_training.max_staleness or a lower staleness_threshold. Surplus: "
            "rollout.over_sample.unfinished keeps it.",
            {"event": "sample.dropped"}, hint=True,
        )  # fmt: skip
