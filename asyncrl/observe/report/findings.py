"""Find what cost the run the most time, with a remedy for each finding. Pure.

Alarms (something is slower than its peers or than usual) rank before hints (how the run is balanced). Lost seconds are
wall clock: the time in which at least one call was late, or, for a slow replica, the part of its busy time that its
peers would not have needed. Findings are therefore comparable, and none costs more than the duration of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.observe.formats import count, percent, seconds
from asyncrl.observe.report.load import Events
from asyncrl.observe.report.samples import CriticalPath, TracedSamples
from asyncrl.observe.report.statistics import (
    EMPTY,
    Intervals,
    difference,
    find_outliers,
    intersection,
    spans,
    total,
    union,
)
from asyncrl.observe.report.versions import waste_by_reason
from asyncrl.observe.status.summary import Recovery, SavedSummary

ALARM_S = (3.0, 10.0)
ALARM_SHARE = 0.02
"""A finding that costs less than this share of the run, clipped to these seconds, is a hint instead of an alarm."""
MIN_LOST_S = 1.0
SLOW_RATIO = 1.5
"""Least ratio of a slow replica's seconds per token, or of a slow rank's seconds, to those of its peers."""
LOADED_RATIO = 1.3
"""A replica that samples more than this many times its peers' tokens per second is slow because it has more work."""
SLOW_TOOL_RATIO = 10.0
"""Least ratio of a slow tool's median to that of the other tools."""
REWARD_SHARE = 0.3
"""A slow reward takes at least this share of the time in which a sample is generated and scored."""
LARGE_SHARE = 0.05
"""Balance hints below this share of the run are left out."""
SLOWER_SIDE_RATIO = 2.0
"""One side counts as slower if the other one is idle at least this many times as long."""
FIRST_WAIT_SHARE = 0.2
"""The first wait is mentioned if it is more than this share of all waits."""
LONG_STALL_S = 5.0
"""Shorter stalls are common where processes outnumber cores."""
_STUCK_S, _STUCK_RATIO = 10.0, 5.0
_SAME_RECOVERY_S = 0.05
_TIMES = ["timestamp", "end"]

_DISK = "The disk of the run directory is slow or shared: put run_dir on a local one."
_MACHINE = "Check its machine for other work on its cores or GPU, a throttled GPU, swapping, or a slow link."


class _FindingKind(NamedTuple):
    what: str
    """The subject of the finding."""
    remedy: str
    is_hint: bool = False
    """Findings of this kind are never alarms."""


_hint = partial(_FindingKind, is_hint=True)
_KINDS = {
    "replica_slow": _FindingKind("replica",
        f"{_MACHINE} Then restart it: `asyncrl status` names its process."),
    "replica_loaded": _hint("replica",
        "Requests are not spread evenly: rollout.max_concurrent_samples may be too low for this number of replicas."),
    "request_stuck": _FindingKind("request",
        "Look in logs/ at what its replica was doing then: a crash, a restart, or preemption because the KV cache was "
        "full (rollout.gpu_memory_utilization, rollout.cpu_kv_cache_gib, rollout.max_num_seqs)."),
    "tool_hang": _FindingKind("tool",
        "Find out what {name} waits on. A lower timeout_s for it in rollout.multi_turn.tools bounds what one call can "
        "cost."),
    "tool_slow": _FindingKind("tool",
        "Make {name} faster, or let more of its calls run at once (its max_concurrency or rate in "
        "rollout.multi_turn.tools)."),
    "reward_hang": _FindingKind("reward",
        "Look at what the reward does with this sample (`asyncrl show`). A lower reward.timeout_s bounds a call."),
    "reward_slow": _FindingKind("reward",
        "Make the reward faster, or let more of its calls run at once: reward.max_concurrency, "
        "reward.judge.max_concurrency, reward_model.num_replicas."),
    "user_hang": _FindingKind("user", "Find out what the user or environment waits on."),
    "weight_sync_hang": _FindingKind("weight_sync",
        "The weight-sync table shows which phase it was, and report.json also on which replica; logs/ shows what "
        "happened there."),
    "trainer_hang": _FindingKind("trainer",
        "Compare the step's tokens with those of other steps; logs/ of the ranks show more, and profiler.steps traces "
        "a step."),
    "checkpoint_hang": _FindingKind("checkpoint", f"{_DISK} Or save less often: trainer.save_freq."),
    "queue_hang": _FindingKind("queue", _DISK),
    "disk_hang": _FindingKind("disk", _DISK),
    "rank_slow": _FindingKind("rank", _MACHINE),
    "trainer_waits": _hint("trainer",
        "Give generation more resources (rollout.num_replicas), or let it run further ahead with a higher "
        "async_training.staleness_threshold. Alarms above, if there are any, may be the cause."),
    "rollouter_idle": _hint("rollouter",
        "Give training more resources, or let generation run further ahead with a higher "
        "async_training.staleness_threshold."),
    "sides_alternate": _hint("trainer",
        "Let generation run further ahead (a higher async_training.staleness_threshold), or publish more often (a "
        "lower async_training.trigger_parameter_sync_step), so that it may continue sooner."),
    "long_tail": _hint("request",
        "If responses are long, lower rollout.response_length (see what lower limits would do), or use over-sampling "
        "(rollout.over_sample). async_training.partial_rollout keeps long responses from holding up weight syncs."),
    "weight_sync": _hint("weight_sync",
        "Publish less often (async_training.trigger_parameter_sync_step); the weight-sync table shows which phase "
        "takes the time."),
    "checkpoints": _hint("checkpoint", "Save less often: trainer.save_freq."),
    "loop_stall": _FindingKind("part",
        "Something blocks it: user code that does not await (rewards, tools, agents), or too few cores."),
    "restarts": _hint("part",
        "`asyncrl status` shows the restarts and their causes. More frequent checkpoints (trainer.save_freq) make "
        "going back cheaper."),
    "waste": _hint("tokens",
        "If samples are dropped as stale, raise async_training.max_staleness or lower staleness_threshold. Surplus can "
        "be kept (rollout.over_sample.unfinished) or reduced (fewer rollout.over_sample.trajectories)."),
}  # fmt: skip
_CALLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tool_hang", "A tool", ("tool.execute",)),
    ("reward_hang", "The reward", ("reward.score", "sample.reward")),
    ("user_hang", "An interaction", ("user.step",)),
    ("weight_sync_hang", "A weight sync",
     ("sync.load", "sync.drain", "sync.pause", "sync.fetch", "sync.verify", "sync.put", "sync.gather", "sync.apply")),
    ("trainer_hang", "The Trainer",
     ("trainer.experience", "trainer.critic", "trainer.update", "trainer.publish")),
    ("checkpoint_hang", "A checkpoint", ("trainer.checkpoint",)),
    ("queue_hang", "The queue",
     ("queue.commit", "sample.payload", "sample.offer", "trainer.fetch", "trainer.commit")),
    ("disk_hang", "The disk", ("dump.write", "kept.write", "turnlog.write", "skip.read", "skip.write")),
)  # fmt: skip
"""Kinds of calls with a common cause. Inner calls come first: time that an inner call explains is not reported again
for an outer one."""
_NAMES = {"tool.execute": "tool", "user.step": "interaction"}
"""Events for calls of several kinds, and the column that names the kind."""


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    """One of `_KINDS`."""
    name: str
    """The replica, tool, event or part."""
    seconds_lost: float
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """`step, replica, request, sample, trajectory, turn, event, duration_s, normal_s`, as they apply."""
    is_hint: bool = False
    """Whether the finding is a hint even though its kind can be an alarm."""


@dataclass(frozen=True, slots=True)
class RunData:
    """The data that findings are derived from."""

    events: Events
    histories: TracedSamples
    requests: pd.DataFrame
    """The result of `logical_requests`, with the `step` that trained the sample."""
    figures: Mapping[str, Any]
    """The figures of report.json."""
    summary: SavedSummary | None
    up: Intervals
    """The time from the first sample to the last event, without outages."""

    @property
    def wall_s(self) -> float:
        return float(self.figures["idle"]["wall_s"])

    @property
    def waits(self) -> Intervals:
        return spans(self.events["trainer.wait_samples"])

    def lost(self, intervals: Intervals) -> float:
        """Return how many seconds of the run the intervals cover."""
        return total(intersection(intervals, self.up))

    def evidence(self, row: pd.Series, event: str, duration_s: float, normal_s: float) -> dict[str, Any]:
        """Return where a row happened, and how long it should have taken."""
        names = ("step", "replica", "request", "sample", "trajectory", "turn")
        place = {name: row[name] for name in names if name in row.index and not pd.isna(row[name])}
        if row["index"] in self.histories.trained_in.index:
            place["step"] = self.histories.trained_in[row["index"]]  # rather than the step current at the time
        place = {key: value for key, value in place.items() if not (key in ("trajectory", "turn") and value < 0)}
        return {**place, "event": event, "duration_s": duration_s, "normal_s": normal_s}


def rank_findings(run: RunData) -> list[dict[str, Any]]:
    """Return all findings as they appear in report.json, the worst first."""
    path = CriticalPath(run.events)
    findings = [
        *_slow_replicas(run), *_stuck_requests(run), *_slow_tools(run, path), *_slow_reward(run, path),
        *_late_calls(run), *_slow_ranks(run), *_idle_sides(run), *_long_tail(run), *_large_shares(run), *_stalls(run),
        *_restarts(run),
    ]  # fmt: skip
    low, high = ALARM_S
    threshold = min(high, max(low, ALARM_SHARE * run.wall_s))
    rows = []
    for finding in findings:
        lost = min(finding.seconds_lost, max(0.0, run.wall_s))  # clocks differ a little
        if lost < MIN_LOST_S:
            continue
        kind = _KINDS[finding.kind]
        is_hint = finding.is_hint or kind.is_hint or lost < threshold
        rows.append(
            {
                "kind": finding.kind,
                "what": kind.what,
                "name": finding.name,
                "severity": "hint" if is_hint else "alarm",
                "seconds_lost": lost,
                "share_of_run": lost / run.wall_s if run.wall_s > 0 else None,
                "evidence": dict(finding.evidence),
                "text": finding.text,
                "remedy": kind.remedy.format(name=finding.name),
            }
        )
    return sorted(rows, key=lambda row: (row["severity"] != "alarm", -row["seconds_lost"]))


# ---------------------------------------------------------------------------------------------- stragglers


def _slow_replicas(run: RunData) -> Iterator[Finding]:
    """Compare each replica with the median of the others: by decoding, and if none is slow, by all of its work."""
    by = run.requests.groupby("replica", observed=True)
    sums = by[["decode_s", "response_tokens", "duration_s", "gate_s", "paused_s"]].sum()
    sums["work_s"] = sums["duration_s"] - sums["gate_s"] - sums["paused_s"]
    sums["busy"] = [total(spans(own)) for _, own in by]
    sums["pace"] = sums["response_tokens"] / sums["busy"].clip(lower=1e-9)
    sums = sums[(by.size() >= 5) & (sums["response_tokens"] >= 50)]
    for column, verb in (("decode_s", "decodes a token in"), ("work_s", "does the work for a token in")):
        rates = sums[column] / sums["response_tokens"]
        usual = pd.Series({replica: rates.drop(replica).median() for replica in rates.index}, dtype="float64")
        slow = rates[(usual > 0) & (rates >= SLOW_RATIO * usual)]
        for replica, rate in slow.items():
            own, busy = run.requests[run.requests["replica"] == replica], float(sums.loc[replica, "busy"])
            # Only the part of `busy` that this kind of work takes could be saved.
            share = sums.loc[replica, column] / max(sums.loc[replica, "work_s"], 1e-9)
            lost = float(busy * share * (1 - usual[replica] / rate))
            pace = float(sums.loc[replica, "pace"] / sums["pace"].drop(replica).median())
            is_loaded = pace > LOADED_RATIO
            peers = "its peer takes" if len(rates) == 2 else f"the median of its {len(rates) - 1} peers is"
            worst = own.loc[own["decode_s" if column == "decode_s" else "duration_s"].idxmax()]
            yield Finding(
                "replica_loaded" if is_loaded else "replica_slow", str(replica), min(lost, busy),
                f"Replica {replica} {verb} {seconds(rate)}; {peers} {seconds(usual[replica])}: it is "
                f"{rate / usual[replica]:.1f} times as slow. It was busy for {seconds(busy)}, of which its peers would "
                f"have needed {seconds(busy - lost)}."
                + (f" But it sampled {pace:.1f} times as many tokens a second: it had more work." if is_loaded else ""),
                {**run.evidence(worst, "request", rate, usual[replica]), "replica": replica},
            )  # fmt: skip
        if len(slow):
            return


def _stuck_requests(run: RunData) -> Iterator[Finding]:
    """Find requests that took far longer than their tokens and the speed of their replica explain."""
    rows = run.requests
    if len(rows) < 10:
        return
    work = (rows["duration_s"] - rows["gate_s"] - rows["paused_s"]).astype("float64")
    replica, tokens = rows["replica"].astype("str"), rows["response_tokens"]
    rate = work.groupby(replica).transform("sum") / tokens.groupby(replica).transform("sum").clip(1)
    excess = work - 2 * rate * tokens - work.groupby(replica).transform("median")
    usual = float(work.median())
    stuck = excess > max(_STUCK_S, _STUCK_RATIO * usual)
    if not stuck.any():
        return
    worst = rows.loc[excess.idxmax()]
    # The first requests of a replica warm it up: compilers, caches.
    warm_at = replica.map(rows["end"].groupby(replica).min())
    is_first = bool((rows["timestamp"] < warm_at)[stuck].all())
    yield Finding(
        "request_stuck", str(worst["request"]),
        run.lost(union((rows["end"] - excess)[stuck].to_numpy(), rows["end"][stuck].to_numpy())),
        f"{count(int(stuck.sum()), 'request')} of {len(rows)} took far longer than their tokens explain. The worst, "
        f"{worst['request']} on replica {worst['replica']}, took {seconds(worst['duration_s'])} for "
        f"{worst['response_tokens']:.0f} tokens." + (" Each was among the first of its replica." if is_first else ""),
        run.evidence(worst, "request", worst["duration_s"], usual), is_hint=is_first,
    )  # fmt: skip


def _slow_ranks(run: RunData) -> Iterator[Finding]:
    """Compare the ranks of a role by their passes, because whole calls include waits for the other ranks."""
    rows = pd.concat([run.events["rank.forward"], run.events["rank.backward"]], ignore_index=True)
    for role, own in rows.groupby("role", observed=True):
        sums = own.groupby("rank")["duration_s"].sum()
        for rank, spent in sums.items():
            usual = float(sums.drop(rank).median()) if len(sums) > 1 else 0.0
            if usual > 0 and spent > SLOW_RATIO * usual:
                yield Finding(
                    "rank_slow", f"{role} {rank:.0f}", spent - usual,
                    f"Rank {rank:.0f} of {role} spent {seconds(spent)} in forward and backward passes, its peers "
                    f"{seconds(usual)}: the others wait for it in every collective.",
                    {"rank": rank, "event": "rank.backward", "duration_s": spent, "normal_s": usual},
                )  # fmt: skip


# ---------------------------------------------------------------------------------------------- late and slow calls


def _slow_tools(run: RunData, path: CriticalPath) -> Iterator[Finding]:
    calls = run.events["tool.execute"]
    calls = calls[calls["duration_s"] > 0]  # without calls that were refused at once
    medians = calls.groupby("tool", observed=True)["duration_s"].median()
    for tool, own in calls.groupby("tool", observed=True):
        others = medians.drop(tool)
        usual = float(others.median()) if len(others) else 0.0
        if usual > 0 and medians[tool] >= max(1.0, SLOW_TOOL_RATIO * usual):
            waited = total(intersection(path.calls(own), run.waits))
            yield Finding(
                "tool_slow", str(tool), waited,
                f"The tool {tool} is always slow: half of its {len(own)} calls take {seconds(medians[tool])} or more, "
                f"the median of the other tools is {seconds(usual)}. The Trainer waited {seconds(waited)} for its "
                "answers.",
                run.evidence(own.loc[own["duration_s"].idxmax()], "tool.execute", medians[tool], usual),
            )  # fmt: skip


def _slow_reward(run: RunData, path: CriticalPath) -> Iterator[Finding]:
    scored, generated = run.events["sample.reward"], run.events["sample.generate"]
    scored = scored[scored["index"] > 0]
    generated = generated[(generated["index"] > 0) & (generated["replayed"].fillna(0) != 1)]
    if not len(scored) or not len(generated):
        return
    scoring, generating = float(scored["duration_s"].median()), float(generated["duration_s"].median())
    if scoring >= max(1.0, REWARD_SHARE * (scoring + generating)):
        waited = total(intersection(path.rewards(), run.waits))
        yield Finding(
            "reward_slow", "sample.reward", waited,
            f"The reward is always slow: scoring takes {seconds(scoring)} or more for half of the samples, after "
            f"{seconds(generating)} of generation. The Trainer waited {seconds(waited)} for nothing but the reward.",
            run.evidence(scored.loc[scored["duration_s"].idxmax()], "sample.reward", scoring, generating),
        )  # fmt: skip


def _late_calls(run: RunData) -> Iterator[Finding]:
    """Find single calls that took far longer than such calls usually do."""
    starts = _process_starts(run)
    for kind, subject, events in _CALLS:
        explained = EMPTY
        for event in events:
            rows = run.events[event]
            rows = rows[rows["duration_s"] > 0]  # without tool calls that were refused at once
            for name, own in rows.groupby(_NAMES[event], observed=True) if event in _NAMES else ((event, rows),):
                late = find_outliers(own)
                if late is None:
                    continue
                lost = run.lost(difference(late.lost, explained))
                explained = union(*np.concatenate((explained, late.lost)).T)
                if lost < 0.3 * run.lost(late.lost):
                    continue
                worst = late.worst
                place = f" on replica {worst['replica']}" if not pd.isna(worst["replica"]) else ""
                status = f" (status {worst['status']})" if event == "tool.execute" else ""
                warms_up = kind not in ("tool_hang", "reward_hang")
                is_first = warms_up and bool(late.calls.index.isin(_first_calls(own, starts)).all())
                first = " It was the first one." if len(late.calls) == 1 else " Each was the first of its process."
                yield Finding(
                    kind, str(name), lost,
                    f"{subject} was slow: {len(late.calls)} of {count(late.num_calls, 'call')} of `{name}` took far "
                    f"longer than usual, the longest {seconds(worst['duration_s'])}{status}{place} in step "
                    f"{worst['step']}, the median is {seconds(late.median_s)}." + (first if is_first else ""),
                    run.evidence(worst, event, worst["duration_s"], late.median_s), is_hint=is_first,
                )  # fmt: skip


def _process_starts(run: RunData) -> NDArray[np.float64]:
    """Return when processes may have been restarted: after a part was replaced, an outage or a rewind."""
    steps = run.events["step"]
    lineages = steps.groupby(steps["lineage"].fillna(0)).agg(first=("timestamp", "min"), last=("end", "max"))
    # A lineage's first calls come before its first step, and after the last step of the lineage before.
    restarted = run.events["part.restarted"]["timestamp"]
    return np.unique(np.concatenate([restarted, run.up[1:, 0], lineages["first"][1:], lineages["last"][:-1]]))


def _first_calls(calls: pd.DataFrame, starts: NDArray[np.float64]) -> pd.Index:
    """Return the rows of the first call of each process, which warms it up (compilers, caches, connections)."""
    by = [pd.Series(np.searchsorted(starts, calls["timestamp"].to_numpy(), side="right"), index=calls.index)]
    by += [calls[column].astype("str") for column in ("replica", "role", "rank") if column in calls]
    return calls.groupby(by, sort=False, dropna=False).head(1).index


# ---------------------------------------------------------------------------------------------- balance


def _idle_sides(run: RunData) -> Iterator[Finding]:
    idle, wall = run.figures["idle"], run.wall_s
    trainer_s = idle["trainer"]["idle_s"]
    rollouter_s = idle["rollouter"]["idle_s"] if idle["rollouter"] is not None else 0.0
    longer_s, shorter_s = max(trainer_s, rollouter_s), min(trainer_s, rollouter_s)
    if wall <= 0 or longer_s <= LARGE_SHARE * wall:
        return
    first = idle["first_wait_s"] or 0
    first_wait = f", {seconds(first)} of that for the first samples" if first > FIRST_WAIT_SHARE * trainer_s else ""
    waited = (
        f"The Trainer waited for samples for {seconds(trainer_s)}, {percent(trainer_s / wall)} of the run{first_wait}"
    )
    idled = f"Nothing was in generation for {seconds(rollouter_s)}, {percent(rollouter_s / wall)} of the run"
    kind, event, lost = "trainer_waits", "trainer.wait_samples", trainer_s
    text = f"{waited}: generation is the slower side."
    if shorter_s > LARGE_SHARE * wall and longer_s < SLOWER_SIDE_RATIO * shorter_s:
        kind = "sides_alternate"
        text = f"The two sides wait for each other alternately. {waited}. {idled}. Pacing lets them overlap too little."
    elif rollouter_s > trainer_s:
        kind, event, lost = "rollouter_idle", "sample.generate", rollouter_s
        text = f"{idled}: training is the slower side, or pacing holds generation back."
    yield Finding(kind, event, lost, text, {"event": event})


def _long_tail(run: RunData) -> Iterator[Finding]:
    """Report a long tail, which costs the time in which the Trainer waits for the last tenth of a step's requests."""
    requests = run.figures["requests"]
    if not requests["time"]["by_step"] or requests["time"]["done_early"] < 0.7:
        return
    ends = run.requests[~run.requests["aborted"]].groupby("step")["end"]
    lost = run.lost(intersection(union(ends.quantile(0.9).to_numpy(), ends.max().to_numpy()), run.waits))
    slowest = requests["slowest"][0]
    place = {name: slowest[name] for name in ("step", "replica", "request", "sample", "trajectory", "turn")}
    normal_s = requests["time"]["all"]["median"]
    yield Finding(
        "long_tail", str(slowest["request"]), lost,
        f"Requests have a long tail: {percent(requests['time']['done_early'])} of them are done in "
        f"{percent(requests['tail_at'])} of the time of their step's longest. The Trainer waited {seconds(lost)} for "
        "the last tenth of them.",
        {**place, "event": "request", "duration_s": slowest["duration_s"], "normal_s": normal_s},
    )  # fmt: skip


def _large_shares(run: RunData) -> Iterator[Finding]:
    """Report pauses, checkpoints and wasted tokens that take a large share of the run."""
    paused, waste = run.figures["weight_sync"]["paused_share"] or 0.0, run.figures["waste"]
    saving_s, wasted = run.lost(spans(run.events["trainer.checkpoint"])), waste["share"] or 0.0
    reasons = ", ".join(f"{tokens:.0f} {reason}" for reason, tokens in waste_by_reason(waste))
    for kind, name, event, lost, text in (
        ("weight_sync", "sync.pause", "sync.pause", paused * run.wall_s,
         f"Replicas were paused for {percent(paused)} of the run to load weights."),
        ("checkpoints", "trainer.checkpoint", "trainer.checkpoint", saving_s,
         f"Checkpoints held training up for {seconds(saving_s)}, "
         f"{percent(saving_s / run.wall_s if run.wall_s > 0 else None)} of the run."),
        ("waste", "sampled", "sample.dropped" if waste["dropped"] else "trajectory", wasted * run.wall_s,
         f"{percent(wasted)} of the sampled tokens were wasted ({reasons})."),
    ):  # fmt: skip
        if lost > LARGE_SHARE * run.wall_s:
            yield Finding(kind, name, lost, text, {"event": event})


def _stalls(run: RunData) -> Iterator[Finding]:
    """Report each part with a long stall, and all others as one finding."""
    stalls = run.events["loop.stall"]
    if len(run.up):
        stalls = stalls[stalls["timestamp"] >= run.up[0, 0]]  # starting parts import modules
    longest = stalls.groupby("part", observed=True)["duration_s"].transform("max")
    is_long = longest >= LONG_STALL_S
    short = stalls[~is_long]
    groups = [(str(part), own) for part, own in stalls[is_long].groupby("part", observed=True)]
    if len(short):
        groups.append((", ".join(sorted(map(str, short["part"].unique()))), short))
    for part, own in groups:
        worst, lost = own.loc[own["duration_s"].idxmax()], run.lost(spans(own))
        yield Finding(
            "loop_stall", part, lost,
            f"The event loop of {part} was blocked {count(len(own), 'time')}, for {seconds(lost)} in all and "
            f"{seconds(worst['duration_s'])} at most.",
            {"step": worst["step"], "event": "loop.stall", "duration_s": worst["duration_s"]},
            is_hint=worst["duration_s"] < LONG_STALL_S,
        )  # fmt: skip


def _restarts(run: RunData) -> Iterator[Finding]:
    """Report restarts: those with an event, and those that only summary.json lists."""
    restarts, abandoned = run.events["part.restarted"], run.histories.abandoned
    only_in_summary = _recoveries_without_event(restarts, run.summary)
    repeated_s = run.lost(spans(abandoned))
    more_s = sum(entry.recovered_s or 0.0 for entry in only_in_summary)
    down_s = run.lost(spans(restarts)) + more_s
    lost = run.lost(spans(pd.concat([abandoned[_TIMES], restarts[_TIMES]]))) + more_s
    if lost <= 0:
        return
    causes = [(str(part), str(cause)) for part, cause in zip(restarts["part"], restarts["cause"], strict=True)]
    causes += [(entry.part, entry.cause) for entry in only_in_summary]
    text = []
    if causes:
        replaced = ", ".join(
            f"{part} {count(number, 'time')}" for part, number in Counter(part for part, _ in causes).items()
        )
        text.append(f"Replaced: {replaced}; recovering took {seconds(down_s)}.")
    if len(abandoned):
        steps = f"{count(len(abandoned), 'step')} {'was' if len(abandoned) == 1 else 'were'}"
        text.append(f"Training went back: {steps} repeated ({seconds(repeated_s)}).")
    if causes:
        part, cause = causes[0]
        text.append(f"The first cause, of the {part}: {(cause.splitlines() or ['unknown'])[0].rstrip('.')}.")
    rows = abandoned if len(abandoned) else restarts
    event = "part.restarted" if len(restarts) else "step"
    evidence = {"step": rows["step"].iloc[0], "event": event} if len(rows) else {}
    yield Finding("restarts", causes[0][0] if causes else "trainer", lost, " ".join(text), evidence)


def _recoveries_without_event(restarts: pd.DataFrame, summary: SavedSummary | None) -> list[Recovery]:
    known = [(str(part), float(took)) for part, took in zip(restarts["part"], restarts["duration_s"], strict=True)]
    missing = []
    for entry in summary.recovery if summary is not None else ():
        if (took := entry.recovered_s) is None:
            continue
        same = next((one for one in known if one[0] == entry.part and abs(one[1] - took) < _SAME_RECOVERY_S), None)
        if same is None:
            missing.append(entry)
        else:
            known.remove(same)
    return missing
