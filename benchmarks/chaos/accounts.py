"""What a run owes at its end, checked between its journal, the Trainer's own record and the turn log. Pure.

journal        what happened to each sample: TRAINED, or DROPPED with a reason
trained.jsonl  what the Trainer took a gradient on, rewinds applied: what is in the surviving model
turn log       which turns were completed, by sample and place in its group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.ports import Books
from asyncrl.types import DropReason, SampleId

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


@dataclass(frozen=True, slots=True)
class Accounts:
    """The records of one run that has ended in order."""

    fates: Sequence[Fate]
    books: Books
    trained: Sequence[Mapping[str, Any]]
    """The lines of trained.jsonl."""
    turns: Sequence[tuple[SampleId, str]] = ()
    """Every turn that was completed and written down, in order, by sample and key."""
    generated_anew: Collection[SampleId] = field(default_factory=frozenset)
    """Samples whose finished payload was lost or damaged: their turns are rightly made twice."""
    completed: bool = True
    """It went to its end. One that was stopped may have ids that wait to be fed again, which are not fed then."""


def surviving(lines: Iterable[Mapping[str, Any]]) -> list[SampleId]:
    """The samples in the surviving model, in the order in which they were trained; one trained twice is there twice."""
    steps: list[tuple[int, list[SampleId]]] = []
    for line in lines:
        if "rewound_to_step" in line:
            steps = [step for step in steps if step[0] <= line["rewound_to_step"]]
        else:
            steps.append((line["step"], [SampleId.parse(name) for name in line["samples"]]))
    return [sample_id for _, sample_ids in steps for sample_id in sample_ids]


def violations(accounts: Accounts) -> list[Violation]:
    """Every promise that these records break; none: all were kept."""
    return [
        *_ends(accounts),
        *_trained_once(accounts),
        *_balanced(accounts),
        *_turns_once(accounts),
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
    books, found = accounts.books, []
    total = books.running + books.ready + books.leased + books.trained + books.num_dropped
    if books.fed != total:
        found.append(Violation("books balance", f"fed {books.fed}, but the states add up to {total}: {books}"))
    states = Counter(fate.state for fate in accounts.fates)
    if (fed := len(accounts.fates) - states["outstanding"]) != books.fed:
        found.append(Violation("books balance", f"fed {books.fed} in the books, {fed} in the journal"))
    for state, booked in (("trained", books.trained), ("dropped", books.num_dropped)):
        if states[state] != booked:
            found.append(Violation("books balance", f"{booked} {state} in the books, {states[state]} in the journal"))
    reasons = Counter(fate.reason for fate in accounts.fates if fate.state == "dropped")
    booked_reasons = Counter({reason: count for reason, count in books.dropped.items() if count})
    if reasons != booked_reasons:
        found.append(
            Violation("books balance", f"dropped by reason: books {dict(booked_reasons)}, journal {dict(reasons)}")
        )
    return found


def _turns_once(accounts: Accounts) -> list[Violation]:
    counts = Counter(turn for turn in accounts.turns if turn[0] not in accounts.generated_anew)
    again = [f"{sample_id}/{key}" for (sample_id, key), count in counts.items() if count > 1]
    return [Violation("turns once", f"turn {_named(again)} was generated again")] if again else []


def _named(things: Sequence[Any]) -> str:
    more = f" and {len(things) - MAX_NAMED} more" if len(things) > MAX_NAMED else ""
    return ", ".join(str(thing) for thing in things[:MAX_NAMED]) + more
