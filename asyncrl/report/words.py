"""What each figure shows, in a sentence or two with its numbers. Pure.

An empty text means that the run has nothing for the figure, and it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asyncrl.report.lives import KINDS
from asyncrl.report.waste import reasons_of

Report = Mapping[str, Any]
CHEAP = 0.02
"""Share of the reward; a limit that loses no more is worth telling."""


class Figure(NamedTuple):
    id: str
    """Of its PNG, and of its place on the page."""
    section: str
    title: str
    words: Callable[[Report], str]


def seconds(value: float | None) -> str:
    """`12 ms`, `3.4 s`, `2 min 5 s`, `1 h 02 min`."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.0f} %" if 0.1 <= share <= 0.995 or share in (0, 1) else f"{100 * share:.3g} %"


def count(number: float, noun: str) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,.0f} {noun}" if number == 1 else f"{number:,.0f} {noun}s"


def _step_times(report: Report) -> str:
    time = report["requests"]["time"]
    if not time["by_step"]:
        return ""
    every = time["all"]
    worst = max(time["by_step"], key=lambda row: row["done_early"])
    return (
        f"Half of the {count(every['count'], 'request')} take at most {seconds(every['median'])}, 95 % at most "
        f"{seconds(every['p95'])}, the longest {seconds(every['max'])}. On average {percent(time['done_early'])} of "
        f"the requests of a step are done in {percent(report['requests']['tail_at'])} of the time of its longest: the "
        f"higher that is, the longer the tail. It is highest in step {worst['step']}: {percent(worst['done_early'])}."
    )


def _replica_times(report: Report) -> str:
    rows = [row for row in report["requests"]["by_replica"] if row["decode_s_per_token"] is not None]
    if not rows or not report["requests"]["time"]["by_replica"]:
        return ""
    slow = max(rows, key=lambda row: row["decode_s_per_token"])
    fast = min(rows, key=lambda row: row["decode_s_per_token"])
    if len(rows) == 1:
        return f"The one replica decodes a token of a request in {seconds(slow['decode_s_per_token'])}."
    return (
        f"Replica {slow['replica']} is the slowest: it decodes a token of a request in "
        f"{seconds(slow['decode_s_per_token'])}, the fastest, {fast['replica']}, in "
        f"{seconds(fast['decode_s_per_token'])}. Curves of equally fast replicas lie on each other."
    )


def _lengths(report: Report) -> str:
    every = report["requests"]["length"]["all"]
    if every is None:
        return ""
    return (
        f"Half of the responses (of one request each) have at most {every['median']:.0f} tokens, 95 % at most "
        f"{every['p95']:.0f}, the longest {every['max']:.0f}."
    )


def _shares(report: Report) -> str:
    shares = report["shares"]
    if not shares["table"]:
        return ""
    first = [row for row in shares["table"] if row["kind"] != "other"][:3]
    named = ", ".join(f"{row['percent']:.0f} % {KINDS[row['kind']]}" for row in first)
    number = shares["trajectories"]
    return (
        f"A trajectory lives {seconds(shares['whole_s_mean'])} on average, from the ask for a permit until its "
        f"gradient is in a step; most of that: {named}. Shares are averages over {number:,} "
        f"{'trajectory' if number == 1 else 'trajectories'}, and add up to 100 %."
    )


def _course(report: Report) -> str:
    course = report["shares"]["course"]
    if len(course) < 2:
        return ""
    first, last = course[0]["percent"], course[-1]["percent"]
    kind = max(KINDS, key=lambda each: abs(last[each] - first[each]))
    return (
        f"From the first to the last step, the greatest change is in “{KINDS[kind]}”: from {first[kind]:.0f} % to "
        f"{last[kind]:.0f} % of a trajectory's time."
    )


def _life(report: Report) -> str:
    life = report["shares"]["life"]
    if not life:
        return ""
    told = []
    for bar in life:
        kind = max(bar["seconds"], key=bar["seconds"].__getitem__)
        told.append(
            f"a sample at the {'median' if bar['which'] == 'median' else '95th percentile'} lives "
            f"{seconds(bar['whole_s'])}, of it {seconds(bar['seconds'][kind])} {KINDS[kind]}"
        )
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}. Of each sample, the trajectory is told that the others waited for."


def _turns(report: Report) -> str:
    turns = report["turns"]
    if not turns["by_turn"] or turns["turns"] is None:
        return ""
    slow = max(turns["by_turn"], key=lambda row: row["generation_s"] + row["tool_s"] + row["user_s"])
    named = {"generation": slow["generation_s"], "in tools": slow["tool_s"], "users and environments": slow["user_s"]}
    parts = ", ".join(f"{seconds(value)} {name}" for name, value in named.items() if value)
    return (
        f"Trajectories take {turns['turns']['mean']:.1f} turns on average, {turns['turns']['max']:.0f} at most. The "
        f"costliest is turn {slow['turn']} (counted from 0): {parts}."
    )


def _steps(report: Report) -> str:
    durations = report["steps"]["durations"]
    if durations is None:
        return ""
    outliers = report["steps"]["outliers"]
    text = f"The median step takes {seconds(durations['median'])}, the longest {seconds(durations['max'])}. "
    if not outliers:
        return text + f"None stands out ({report['steps']['rule']})."
    names = ", ".join(str(row["step"]) for row in outliers[:8])
    verb = "stands" if len(outliers) == 1 else "stand"
    return text + f"{count(len(outliers), 'step')} {verb} out: {names} ({report['steps']['rule']}). Causes are below."


def _idle(report: Report) -> str:
    idle = report["idle"]
    if idle["wall_s"] <= 0:
        return ""
    trainer, rollouter = idle["trainer"], idle["rollouter"]
    text = (
        f"The Trainer waited for samples for {percent(trainer['share'])} of the run ({seconds(trainer['idle_s'])}, "
        f"at most {seconds(trainer['longest_s'])} at once)"
    )
    if idle["first_wait_s"] is not None:
        text += f"; its first wait, before anything was generated, is {seconds(idle['first_wait_s'])} of that"
    if rollouter is not None:
        text += (
            f". Nothing was in generation, neither samples nor the validation set, for {percent(rollouter['share'])} "
            f"({seconds(rollouter['idle_s'])}, at most {seconds(rollouter['longest_s'])} at once)"
        )
    sides = [side for side in (trainer, rollouter) if side is not None]
    unknown = " Grey: not known." if any(None in side["strip"] for side in sides) else ""
    return text + f". The darker, the more of that moment was idle.{unknown}"


def _staleness(report: Report) -> str:
    told = report["staleness"]
    if not told["staleness"]["histogram"]:
        return ""
    spans = told["version_span"]["histogram"]
    mixed = sum(number for span, number in spans.items() if span != "0") / max(1, sum(spans.values()))
    return (
        f"Trained samples are {told['staleness']['mean']:.2f} versions old on average, "
        f"{told['staleness']['max']:.0f} at "
        f"most; {percent(mixed)} of them were sampled by more than one version."
    )


def _weight_sync(report: Report) -> str:
    phases = {row["phase"]: row for row in report["weight_sync"]["phases"]}
    if not phases:
        return ""
    text = ""
    if "sync.apply" in phases:
        row = phases["sync.apply"]
        text = (
            f"Of {count(row['count'], 'sync')}, half reach all replicas within {seconds(row['median'])}, the slowest "
        )
        text += f"took {seconds(row['max'])}. "
    if "sync.pause" in phases:
        row = phases["sync.pause"]
        text += f"A replica stands still for {seconds(row['median'])}, at most {seconds(row['max'])}: "
        text += f"{percent(report['weight_sync']['paused_share'])} of the time that replicas lived."
    return text or "What the phases of the weight syncs took."


def _thrown_away(report: Report) -> str:
    waste = report["thrown_away"]
    if not waste["sampled_tokens"] or not (waste["thrown_away_tokens"] or waste["aborted"]["attempts"]):
        return ""
    aborted = waste["aborted"]
    return (
        f"{waste['thrown_away_tokens']:,.0f} of {waste['sampled_tokens']:,.0f} sampled tokens "
        f"({percent(waste['share'])}) were thrown away{_why(waste)}. Weight syncs or callers aborted "
        f"{count(aborted['attempts'], 'attempt')} with {aborted['tokens']:,.0f} tokens; {aborted['resumed']} were "
        f"gone on with, for {seconds(aborted['prefill_again_s'])} of prefill a second time."
    )


def _why(waste: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{tokens:,.0f} {reason}" for reason, tokens in reasons_of(waste))
    return f" ({reasons})" if reasons else ""


def _limits(report: Report) -> str:
    told = report["lower_limits"]
    if not told["limits"]:
        return ""
    number = count(told["trajectories"], "response")
    text = f"The longest of {number} has {told['longest']:.0f} tokens, tools' answers included. "
    rows = [row for row in told["limits"] if row["cut_share"] > 0]
    if not rows:
        return text + "No lower limit that is looked at would cut any."
    known = all(row["reward_lost_share"] is not None for row in rows)
    cheap = [row for row in rows if known and row["reward_lost_share"] <= CHEAP]
    best = cheap[0] if cheap else rows[-1]
    lost = f", lose {percent(best['reward_lost_share'])} of the reward" if known else ""
    text += (
        f"A limit of {best['limit']} tokens would cut {percent(best['cut_share'])} of the trajectories{lost} and save "
        f"{percent(best['longest_trajectory_saved_share'])} of the time in requests of each step's longest trajectory. "
    )
    if known:
        return text + f"Counted: {told['reward_from']}; what is cut is worth nothing."
    why = "no reward is among the events" if told["reward_from"] is None else "no reward is worth more than another"
    return text + f"What that costs cannot be told: {why}."


FIGURES = (
    Figure("request_times", "Requests", "How long requests take, by step", _step_times),
    Figure("request_times_by_replica", "Requests", "How long requests take, by replica", _replica_times),
    Figure("response_lengths", "Requests", "How long responses are", _lengths),
    Figure("event_shares", "Where the time goes", "Where a trajectory's time goes", _shares),
    Figure("event_shares_by_step", "Where the time goes", "The same, over the run", _course),
    Figure("life", "Where the time goes", "The life of a sample", _life),
    Figure("turns", "Turns", "Turns: what each costs, and how many there are", _turns),
    Figure("steps", "Steps", "How long steps take", _steps),
    Figure("idle", "Idle time", "When a side had nothing to do", _idle),
    Figure("staleness", "Weight versions", "How stale samples are", _staleness),
    Figure("weight_sync", "Weight versions", "What a weight sync takes", _weight_sync),
    Figure("thrown_away", "Work for nothing", "Tokens that were thrown away", _thrown_away),
    Figure("lower_limits", "Work for nothing", "What a lower response limit would do", _limits),
)


def figures(report: Report) -> list[dict[str, str]]:
    """Those that the run has something for, in order: `id, section, title, text, png`."""
    return [
        {"id": each.id, "section": each.section, "title": each.title, "text": text, "png": f"{each.id}.png"}
        for each in FIGURES
        if (text := each.words(report))
    ]
