"""What a run owes at its end, checked between its own records and what the harness has seen. Pure.

journal        what happened to each sample: TRAINED, or DROPPED with a reason; the versions that it was made by
trained.jsonl  what the Trainer took a gradient on, rewinds applied: what is in the surviving model
turn log       which turns were completed, by sample and place in its group, and the versions of their tokens
broken calls   what replicas had told of their responses when they failed, and what was asked for then (`watch`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.types import DropReason, SampleId, SampleMeta, Span

MAX_NAMED = 5
"""Samples named in one message."""


class Violation(NamedTuple):
    """A promise that was broken, and how."""

    promise: str
    told: str


class Fate(NamedTuple):
    """What the journal says became of one sample."""

    sample_id: SampleId
    state: str
    """`trained`, `dropped`, or a state that is no end."""
    reason: str = ""


class TurnDone(NamedTuple):
    """A turn that was completed and written down."""

    sample_id: SampleId
    key: str
    num_tokens: int
    spans: tuple[Span, ...]


class BrokenCall(NamedTuple):
    """One response whose replica or engine failed while it was made."""

    request: str
    told: tuple[int, ...]
    """The tokens that had been told of by then."""
    asked: tuple[int, ...] | None = None
    """Those with which it was asked for again; None: it never was."""
    turn: tuple[int, ...] | None = None
    """What it came to; None: whoever asked for it has died, or has given it up."""
    at: float = 0.0
    """Wall clock."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """The records of one run that has ended in order."""

    fates: Sequence[Fate]
    counts: SampleCounts
    trained: Sequence[Mapping[str, Any]]
    """The lines of trained.jsonl."""
    turns: Sequence[TurnDone] = ()
    """Every turn that was completed and written down, in order."""
    metas: Mapping[SampleId, SampleMeta] = field(default_factory=dict)
    """What the journal knows of each sample that was READY, as it was made last."""
    generated_anew: Collection[SampleId] = field(default_factory=frozenset)
    """Samples whose finished payload was lost or damaged: their turns are rightly made twice."""
    rewinds: Sequence[WeightsVersion] = ()
    """What training has gone back to, in the journal's order."""
    broken_calls: Sequence[BrokenCall] = ()
    max_staleness: int | None = None
    """As configured; None: without a bound."""
    completed: bool = True
    """It went to its end. One that was stopped may have ids that wait to be fed again, which are not fed then."""


def surviving_steps(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of the steps that are in the surviving model, in order."""
    steps: list[Mapping[str, Any]] = []
    for line in lines:
        if "rewound_to_step" in line:
            steps = [step for step in steps if step["step"] <= line["rewound_to_step"]]
        else:
            steps.append(line)
    return steps


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[SampleId]:
    """The samples in the surviving model, in the order in which they were trained; one trained twice is there twice."""
    return [SampleId.parse(name) for step in surviving_steps(lines) for name in step["samples"]]


def violations(accounts: Accounts) -> list[Violation]:
    """Every promise that these records break; none: all were kept."""
    return [
        *_ends(accounts),
        *_trained_once(accounts),
        *_balanced(accounts),
        *_turns_once(accounts),
        *_versions(accounts),
        *_spans(accounts),
        *_tokens_outlive(accounts),
    ]


def _ends(accounts: Accounts) -> list[Violation]:
    """Each index from 1 on has exactly one fate, and it is an end."""
    found = []
    counts = Counter(fate.sample_id.index for fate in accounts.fates)
    if twice := [index for index, count in counts.items() if count > 1]:
        found.append(Violation("each sample once", f"the journal has feed index {_named(twice)} more than once"))
    if missing := sorted(set(range(1, max(counts, default=0) + 1)) - counts.keys()):
        found.append(Violation("nothing lost", f"feed index {_named(missing)} was passed over"))
    ends = ("trained", "dropped") if accounts.completed else ("trained", "dropped", "outstanding")
    if live := [fate for fate in accounts.fates if fate.state not in ends]:
        names = _named([f"{fate.sample_id} ({fate.state})" for fate in live])
        found.append(Violation("nothing lost", f"{names} has reached no end"))
    reasons = {str(reason) for reason in DropReason}
    if silent := [fate.sample_id for fate in accounts.fates if fate.state == "dropped" and fate.reason not in reasons]:
        found.append(Violation("dropped with a reason", f"{_named(silent)} was dropped without one"))
    return found


def _trained_once(accounts: Accounts) -> list[Violation]:
    found = []
    in_model = surviving(accounts.trained)
    counts = Counter(in_model)
    if twice := [sample_id for sample_id, count in counts.items() if count > 1]:
        found.append(Violation("trained once", f"{_named(twice)} is in the surviving model more than once"))
    in_journal = {fate.sample_id for fate in accounts.fates if fate.state == "trained"}
    if unbooked := [sample_id for sample_id in counts if sample_id not in in_journal]:
        found.append(
            Violation("records agree", f"{_named(unbooked)} is in the surviving model, but not TRAINED in the journal")
        )
    if untrained := sorted(in_journal - counts.keys()):
        found.append(
            Violation("nothing lost", f"{_named(untrained)} is TRAINED in the journal, but not in the surviving model")
        )
    return found


def _balanced(accounts: Accounts) -> list[Violation]:
    counts, found = accounts.counts, []
    total = counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
    if counts.fed != total:
        found.append(
            Violation("sample counts are consistent", f"fed {counts.fed}, but the states add up to {total}: {counts}")
        )
    states = Counter(fate.state for fate in accounts.fates)
    if (fed := len(accounts.fates) - states["outstanding"]) != counts.fed:
        found.append(
            Violation("sample counts are consistent", f"fed {counts.fed} in the sample counts, {fed} in the journal")
        )
    for state, booked in (("trained", counts.trained), ("dropped", counts.num_dropped)):
        if states[state] != booked:
            found.append(
                Violation(
                    "sample counts are consistent",
                    f"{booked} {state} in the sample counts, {states[state]} in the journal",
                )
            )
    reasons = Counter(fate.reason for fate in accounts.fates if fate.state == "dropped")
    booked_reasons = Counter({reason: count for reason, count in counts.dropped.items() if count})
    if reasons != booked_reasons:
        found.append(
            Violation(
                "sample counts are consistent",
                f"dropped by reason: counts {dict(booked_reasons)}, journal {dict(reasons)}",
            )
        )
    return found


def _turns_once(accounts: Accounts) -> list[Violation]:
    turns = ((turn.sample_id, turn.key) for turn in accounts.turns if turn.sample_id not in accounts.generated_anew)
    again = [f"{sample_id}/{key}" for (sample_id, key), count in Counter(turns).items() if count > 1]
    return [Violation("turns once", f"turn {_named(again)} was generated again")] if again else []


def _versions(accounts: Accounts) -> list[Violation]:
    """What was trained was made by versions that there were, none of them too old."""
    early, late = [], []
    for line in surviving_steps(accounts.trained):
        for name in line["samples"]:
            sample_id = SampleId.parse(name)
            meta = accounts.metas.get(sample_id)
            if meta is None or sample_id in accounts.generated_anew:
                continue  # that of which the journal knows may have been made after this step
            # After a rewind a sample may be of a version that the Trainer has not reached again.
            if line["lineage"] == 0 and meta.newest_version > line["version"]:
                early.append(f"{name} (made by version {meta.newest_version}, trained at {line['version']})")
            if accounts.max_staleness is not None and line["version"] - meta.oldest_version > accounts.max_staleness:
                late.append(f"{name} (made by version {meta.oldest_version}, trained at {line['version']})")
    found = []
    if early:
        found.append(Violation("versions in order", f"{_named(early)} is of a version that was not there yet"))
    if late:
        found.append(Violation("staleness bound", f"{_named(late)} was older than {accounts.max_staleness} versions"))
    return found


def _spans(accounts: Accounts) -> list[Violation]:
    """The versions of each turn's tokens are in order, and the journal has a sample under those of its turns."""
    wrong = [
        f"{turn.sample_id}/{turn.key} {[tuple(span) for span in turn.spans]}"
        for turn in accounts.turns
        if not _plausible(turn, accounts.rewinds)
    ]
    found = [Violation("spans in order", f"turn {_named(wrong)}")] if wrong else []
    by_sample: dict[SampleId, list[TurnDone]] = {}
    for turn in accounts.turns:
        if turn.sample_id not in accounts.generated_anew:
            by_sample.setdefault(turn.sample_id, []).append(turn)
    other = []
    for sample_id, turns in by_sample.items():
        meta = accounts.metas.get(sample_id)
        if meta is None or len(turns) != meta.num_trajectories:
            continue  # it never was READY
        versions = [span.version for turn in turns for span in turn.spans]
        if (min(versions), max(versions)) != (meta.oldest_version, meta.newest_version):
            told = f"{meta.oldest_version} to {meta.newest_version}"
            other.append(f"{sample_id} (journal: versions {told}; turns: {min(versions)} to {max(versions)})")
    if other:
        found.append(Violation("records agree", _named(other)))
    return found


def _plausible(turn: TurnDone, rewinds: Sequence[WeightsVersion]) -> bool:
    starts = [span.first_token for span in turn.spans]
    versions = [span.version for span in turn.spans]
    if not starts:
        return turn.num_tokens == 0
    if starts[0] != 0 or starts[-1] >= turn.num_tokens or any(a >= b for a, b in pairwise(starts)):
        return False
    # Versions go down only where training went back, and then not below where it went back to.
    downs = [after for before, after in pairwise(versions) if after <= before]
    return all(any(rewind.version <= after for rewind in rewinds) for after in downs)


def _tokens_outlive(accounts: Accounts) -> list[Violation]:
    """Tokens that a replica had told of when it failed are asked for no second time, and are in the response."""
    found = []
    again = [call for call in accounts.broken_calls if call.asked is not None and call.asked != call.told]
    if again:
        names = [f"{call.request} ({len(call.told)} tokens told, {len(call.asked or ())} kept)" for call in again]
        found.append(Violation("tokens outlive their engine", f"{_named(names)} was asked for with others"))
    lost = [
        call for call in accounts.broken_calls if call.turn is not None and call.turn[: len(call.told)] != call.told
    ]
    if lost:
        names = [f"{call.request} ({len(call.told)} tokens told)" for call in lost]
        found.append(Violation("tokens outlive their engine", f"{_named(names)} came back with others"))
    return found


def _named(things: Sequence[Any]) -> str:
    more = f" and {len(things) - MAX_NAMED} more" if len(things) > MAX_NAMED else ""
    return ", ".join(str(thing) for thing in things[:MAX_NAMED]) + more
