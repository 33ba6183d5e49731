"""What lost most time, ranked: alarms, where something is slower than its peers or than itself, before hints, which
tell how a run is balanced. Pure.

Seconds lost are wall clock: the time in which at least one call was late, or, of a slow replica, the part of its busy
time that its peers would not have needed. So findings can be compared, and none is longer than the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.report.critical import Chain
from asyncrl.report.excess import excess
from asyncrl.report.intervals import Intervals, intersection, total, union, without
from asyncrl.report.lives import Lives
from asyncrl.report.load import Events
from asyncrl.report.words import seconds

ALARM_S = (3.0, 10.0)
ALARM_SHARE = 0.02
"""An alarm loses such a share of the run, within these seconds; what loses less is a hint."""
LEAST_LOST_S = 1.0
"""Less is not told."""
SLOW_REPLICA = 1.5
"""Its seconds per token over its peers'."""
MORE_LOADED = 1.3
"""Its tokens per second over its peers': it is slow because it does more."""
SLOW_TOOL = 10.0
"""Its median over the other tools'."""
DOMINATES = 0.3
"""Share of the time in which a sample is made."""
_STUCK_S, _STUCK_RATIO = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    what: str
    """Which sort of thing: replica, tool, reward, request, …"""
    name: str
    """Which one."""
    seconds_lost: float
    text: str
    remedy: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Where to look: `step, replica, request, sample, trajectory, turn, event, duration_s, normal_s`, as they apply."""
    hint: bool = False
    """How the run is, rather than something gone wrong."""

    def severity(self, wall_s: float) -> Literal["alarm", "hint"]:
        low, high = ALARM_S
        return "hint" if self.hint or self.seconds_lost < min(high, max(low, ALARM_SHARE * wall_s)) else "alarm"


@dataclass(frozen=True, slots=True)
class Material:
    """What findings are made of."""

    events: Events
    lives: Lives
    requests: pd.DataFrame
    """See `requests.logical`; with `step` as the report counts it."""
    waits: Intervals
    """When the Trainer waited for samples."""
    up: Intervals
    """From the first sample to the last event, without the time in which the run was down."""
    fresh: NDArray[np.float64]
    """When processes may have begun anew: parts were replaced, the run was down, training went back. Ascending."""

    def lost(self, intervals: Intervals) -> float:
        """Seconds of the run in them."""
        return total(intersection(intervals, self.up))


def begun_anew(events: Events, down: Intervals) -> NDArray[np.float64]:
    """See `Material.fresh`."""
    steps = events.of("step")
    lineages = steps.groupby(steps["lineage"].fillna(0)).agg(first=("timestamp", "min"), last=("end", "max"))
    # What a lineage begins with comes before its first step, and after the last step of the one before.
    times = (events.of("part.restarted")["timestamp"], down[:, 0], lineages["first"][1:], lineages["last"][:-1])
    return np.unique(np.concatenate([np.asarray(each, dtype="float64") for each in times]))


def rank(found: list[Finding], wall_s: float) -> list[dict[str, Any]]:
    """As they go into report.json, the worst first."""
    told = []
    for one in found:
        one = replace(one, seconds_lost=min(one.seconds_lost, max(0.0, wall_s)))  # clocks differ a little
        if one.seconds_lost < LEAST_LOST_S:
            continue
        told.append(
            {
                "kind": one.kind,
                "what": one.what,
                "name": one.name,
                "severity": one.severity(wall_s),
                "seconds_lost": one.seconds_lost,
                "share_of_run": one.seconds_lost / wall_s if wall_s > 0 else None,
                "evidence": dict(one.evidence),
                "text": one.text,
                "remedy": one.remedy,
            }
        )
    return sorted(told, key=lambda row: (row["severity"] != "alarm", -row["seconds_lost"]))


def anomalies(material: Material) -> Iterator[Finding]:
    """Where something is slower than its peers, or than itself."""
    chain = Chain(material.events)
    yield from _replicas(material)
    yield from _requests(material)
    yield from _tools(material, chain)
    yield from _rewards(material, chain)
    yield from _calls(material)
    yield from _ranks(material)


# ---------------------------------------------------------------------------------------------- replicas, requests


def _replicas(material: Material) -> Iterator[Finding]:
    """Each against the median of the others."""
    rows = material.requests
    by = rows.groupby("replica", observed=True)
    sums = by[["decode_s", "response_tokens", "duration_s", "gate_s", "paused_s"]].sum()
    sums["work_s"] = sums["duration_s"] - sums["gate_s"] - sums["paused_s"]
    sums["count"] = by.size()
    sums["busy"] = [total(union(own["timestamp"].to_numpy(), own["end"].to_numpy())) for _, own in by]
    sums["pace"] = sums["response_tokens"] / sums["busy"].clip(lower=1e-9)
    sums = sums[(sums["count"] >= 5) & (sums["response_tokens"] >= 50)]
    for column, words in (("decode_s", "decodes a token in"), ("work_s", "takes a token's worth of work in")):
        rates = sums[column] / sums["response_tokens"]
        found = False
        for replica, rate in rates.items():
            peers = rates.drop(replica)
            usual = float(peers.median()) if len(peers) else 0.0
            if usual <= 0 or rate < SLOW_REPLICA * usual:
                continue
            own = rows[rows["replica"] == replica]
            busy = float(sums.loc[replica, "busy"])
            # Of `busy`, only what this kind of work takes can be won back.
            lost = busy * float(sums.loc[replica, column] / max(sums.loc[replica, "work_s"], 1e-9)) * (1 - usual / rate)
            worst = own.loc[(own[column] if column in own else own["duration_s"]).idxmax()]
            found = True
            pace = float(sums.loc[replica, "pace"]) / float(sums["pace"].drop(replica).median())
            loaded = pace > MORE_LOADED
            yield Finding(
                "replica_slow", "replica", str(replica), min(lost, busy),
                f"Replica {replica} {words} {seconds(rate)}; {_peers(len(peers))} {seconds(usual)}: it is "
                f"{rate / usual:.1f} times as slow. It was busy for {seconds(busy)}, of which its peers would have "
                f"needed {seconds(busy - lost)}."
                + (f" But it made {pace:.1f} times as many tokens a second: it had more to do." if loaded else ""),
                "Requests are not spread evenly: rollout.max_concurrent_samples may be low for so many replicas."
                if loaded
                else "Look at its machine: other work on the same cores or GPU, a throttled GPU, swapping. Then "
                "restart it: `asyncrl status` names its process.",
                {**_where(material, worst), "replica": replica, "event": "request", "duration_s": rate,
                 "normal_s": usual},
                hint=loaded,
            )  # fmt: skip
        if found:
            return


def _peers(count: int) -> str:
    return "its peer takes" if count == 1 else f"the median of its {count} peers is"


def _requests(material: Material) -> Iterator[Finding]:
    """Those whose time neither their tokens nor their replica's pace explain."""
    rows = material.requests
    if len(rows) < 10:
        return
    work = (rows["duration_s"] - rows["gate_s"] - rows["paused_s"]).astype("float64")
    replica = rows["replica"].astype("str")
    rate = work.groupby(replica).transform("sum") / rows["response_tokens"].groupby(replica).transform("sum").clip(1)
    more = work - 2 * rate * rows["response_tokens"] - work.groupby(replica).transform("median")
    stuck = more > max(_STUCK_S, _STUCK_RATIO * float(work.median()))
    if not stuck.any():
        return
    lost = union((rows["end"] - more)[stuck].to_numpy(), rows["end"][stuck].to_numpy())
    worst = rows.loc[more.idxmax()]
    # The first ones of a replica warm it up: compilers, caches.
    warm = replica.map(rows["end"].groupby(replica).min())
    first = bool((rows["timestamp"] < warm)[stuck].all())
    yield Finding(
        "request_stuck", "request", str(worst["request"]), material.lost(lost),
        f"{_count(int(stuck.sum()), 'request')} of {len(rows)} took far longer than their tokens explain. The worst, "
        f"{worst['request']} on replica {worst['replica']}, took {seconds(worst['duration_s'])} for "
        f"{worst['response_tokens']:.0f} tokens." + (" They were its first." if first else ""),
        "Look in logs/ at what its replica was doing then: a crash, a restart, or preemption for want of KV cache "
        "(rollout.gpu_memory_utilization, rollout.cpu_kv_cache_gib, rollout.max_num_seqs).",
        {**_where(material, worst), "event": "request", "duration_s": worst["duration_s"],
         "normal_s": float(work.median())},
        hint=first,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- tools, rewards


def _tools(material: Material, chain: Chain) -> Iterator[Finding]:
    calls = material.events.of("tool.execute")
    calls = calls[calls["duration_s"] > 0]  # a call that is refused at once is none
    medians = calls.groupby("tool", observed=True)["duration_s"].median()
    for tool, own in calls.groupby("tool", observed=True):
        found = excess(own)
        if found is not None:
            worst = found.worst
            yield Finding(
                "tool_hang", "tool", str(tool), material.lost(found.lost),
                f"{_count(len(found.calls), 'call')} of {found.num_calls} to the tool {tool} hung: the longest took "
                f"{seconds(worst['duration_s'])} (status {worst['status']}), half of all take at most "
                f"{seconds(found.median_s)}.",
                f"Find out what {tool} waits on. A lower timeout_s for it in rollout.multi_turn.tools bounds what one "
                "call can cost.",
                {**_where(material, worst), "event": "tool.execute", "duration_s": worst["duration_s"],
                 "normal_s": found.median_s},
            )  # fmt: skip
        others = medians.drop(tool)
        usual = float(others.median()) if len(others) else 0.0
        if usual > 0 and medians[tool] >= max(1.0, SLOW_TOOL * usual):
            waited = intersection(chain.calls(own), material.waits)
            worst = own.loc[own["duration_s"].idxmax()]
            yield Finding(
                "tool_slow", "tool", str(tool), total(waited),
                f"The tool {tool} is slow all the time: half of its {len(own)} calls take {seconds(medians[tool])} "
                "or more, "
                f"the other tools' {seconds(usual)}. The Trainer waited {seconds(total(waited))} for its answers.",
                f"Make {tool} faster, or let more of its calls run at once (its max_concurrency or rate in "
                "rollout.multi_turn.tools).",
                {**_where(material, worst), "event": "tool.execute", "duration_s": medians[tool], "normal_s": usual},
            )  # fmt: skip


def _rewards(material: Material, chain: Chain) -> Iterator[Finding]:
    for event in ("reward.score", "sample.reward"):
        rows = material.events.of(event)
        found = excess(rows)
        if found is None:
            continue
        worst = found.worst
        yield Finding(
            "reward_hang", "reward", event, material.lost(found.lost),
            f"{_count(len(found.calls), 'call')} of {found.num_calls} of the reward took far longer than the others: "
            f"the longest {seconds(worst['duration_s'])} for {worst['sample']}, half of all at most "
            f"{seconds(found.median_s)}.",
            "Look at what the reward does with this sample (`asyncrl show`). A lower reward.timeout_s bounds a call.",
            {**_where(material, worst), "event": event, "duration_s": worst["duration_s"], "normal_s": found.median_s},
        )  # fmt: skip
        break
    rows = material.events.of("sample.reward")
    rows = rows[rows["index"] > 0]
    made = material.events.of("sample.generate")
    made = made[(made["index"] > 0) & (made["replayed"].fillna(0) != 1)]
    if not len(rows) or not len(made):
        return
    scoring, making = float(rows["duration_s"].median()), float(made["duration_s"].median())
    if scoring < 1.0 or scoring < DOMINATES * (scoring + making):
        return
    waited = intersection(chain.rewards(), material.waits)
    worst = rows.loc[rows["duration_s"].idxmax()]
    yield Finding(
        "reward_slow", "reward", "sample.reward", total(waited),
        f"The reward is slow all the time: half of the samples are scored for {seconds(scoring)} or more, after "
        f"{seconds(making)} of generation. The Trainer waited {seconds(total(waited))} for nothing but that.",
        "Make the reward faster, or let more of its calls run at once: reward.max_concurrency, "
        "reward.judge.max_concurrency, reward_model.num_replicas.",
        {**_where(material, worst), "event": "sample.reward", "duration_s": scoring, "normal_s": making},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- all other calls

_SYNC = "See the weight-sync table: which phase it was, and on which replica. logs/ says what went on there."
_TRAINER = "Compare its tokens with other steps'; logs/ of the ranks say more, and profiler.steps looks inside."
_DISK = "The disk of the run directory is slow or shared: put run_dir on a local one."
_CALLS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("user.step",), "user", "An interaction", "Find out what the user or environment waits on."),
    (("sync.load", "sync.drain", "sync.pause", "sync.fetch", "sync.verify", "sync.put", "sync.gather", "sync.apply"),
     "weight_sync", "A weight sync", _SYNC),
    (("trainer.experience", "trainer.critic", "trainer.update", "trainer.publish"),
     "trainer", "The Trainer", _TRAINER),
    (("trainer.checkpoint",), "checkpoint", "A checkpoint", _DISK + " Or save less often: trainer.save_freq."),
    (("queue.commit", "sample.payload", "sample.offer", "trainer.fetch", "trainer.commit"),
     "queue", "The queue", _DISK),
    (("dump.write", "turnlog.write", "skip.read", "skip.write"), "disk", "A record", _DISK),
)  # fmt: skip
"""Events of one concern, those inside others first: what an inner one explains is not told again for the outer one."""


def _calls(material: Material) -> Iterator[Finding]:
    """Single calls that took far longer than the same calls usually do."""
    for events, what, subject, remedy in _CALLS:
        told: Intervals = np.empty((0, 2))
        for event in events:
            rows = material.events.of(event)
            by = "interaction" if event == "user.step" else None
            for name, own in rows.groupby(by, observed=True) if by else ((event, rows),):
                found = excess(own)
                if found is None:
                    continue
                lost = material.lost(without(found.lost, told))
                told = _join(told, found.lost)
                if lost < 0.3 * material.lost(found.lost):
                    continue
                worst = found.worst
                first = bool(found.calls.index.isin(_firsts(material, own)).all())
                whose = " It was the first one." if len(found.calls) == 1 else " Each was the first of its process."
                yield Finding(
                    f"{what}_hang", what, str(name), lost,
                    f"{subject} was slow: {_count(len(found.calls), 'time')} of {found.num_calls} `{name}` took far "
                    f"longer than usual, the longest {seconds(worst['duration_s'])}{_on(worst)}, the median is "
                    f"{seconds(found.median_s)}." + (whose if first else ""),
                    remedy,
                    {**_where(material, worst), "event": event, "duration_s": worst["duration_s"],
                     "normal_s": found.median_s},
                    hint=first,
                )  # fmt: skip


def _firsts(material: Material, calls: pd.DataFrame) -> pd.Index:
    """The first one of each process, by row: it warms it up (compilers, caches, connections)."""
    by = [pd.Series(np.searchsorted(material.fresh, calls["timestamp"].to_numpy(), side="right"), index=calls.index)]
    by += [calls[column].astype("str") for column in ("replica", "role", "rank") if column in calls]
    return calls.groupby(by, sort=False, dropna=False).head(1).index


def _ranks(material: Material) -> Iterator[Finding]:
    """Ranks of a role against each other. Only forward and backward passes tell (profiler.level=full): in a call as a
    whole they wait for each other."""
    rows = pd.concat([material.events.of("rank.forward"), material.events.of("rank.backward")], ignore_index=True)
    for role, own in rows.groupby("role", observed=True):
        sums = own.groupby("rank")["duration_s"].sum()
        for number, spent in sums.items():
            usual = float(sums.drop(number).median()) if len(sums) > 1 else 0.0
            if usual > 0 and spent > SLOW_REPLICA * usual:
                yield Finding(
                    "rank_slow", "rank", f"{role} {number:.0f}", spent - usual,
                    f"Rank {number:.0f} of {role} spent {seconds(spent)} in forward and backward passes, its peers "
                    f"{seconds(usual)}: the others wait for it in every collective.",
                    "Look at its machine: other work on its cores or GPU, a throttled GPU, a slow link.",
                    {"rank": number, "event": "rank.backward", "duration_s": spent, "normal_s": usual},
                )  # fmt: skip


# ---------------------------------------------------------------------------------------------- words


def _join(left: Intervals, right: Intervals) -> Intervals:
    both = np.concatenate((left, right))
    return union(both[:, 0], both[:, 1])


def _where(material: Material, row: pd.Series) -> dict[str, Any]:
    names = ("step", "replica", "request", "sample", "trajectory", "turn")
    told = {name: row[name] for name in names if name in row.index and not pd.isna(row[name])}
    if row["index"] in material.lives.trained_in.index:
        told["step"] = material.lives.trained_in[row["index"]]  # rather than the one under way at the time
    return {name: value for name, value in told.items() if not (name in ("trajectory", "turn") and value < 0)}


def _on(row: pd.Series) -> str:
    replica = f" on replica {row['replica']}" if not pd.isna(row["replica"]) else ""
    return f"{replica} in step {row['step']}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
