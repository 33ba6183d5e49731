"""Check the promises of a run at its end: compare its records with each other and with observed calls. Pure.

journal        the fate of each sample: TRAINED, or DROPPED with a reason; the versions that generated it
trained.jsonl  the samples of each step, and the rewinds; from both follow the samples in the surviving model
turn log       the completed turns, by sample and position in its group, and the versions of their tokens
broken calls   the tokens that had been received when a replica failed, and those of the next attempt (`watch`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.types import DropReason, Provenance, SampleId, SampleMeta, Span
from asyncrl.storage.trained_steps import surviving_steps

MAX_NAMED = 5
"""Samples named in one message."""


class Violation(NamedTuple):
    """A broken promise."""

    promise: str
    details: str


class Fate(NamedTuple):
    """The last state of one sample in the journal."""

    sample_id: SampleId
    state: str
    """`trained`, `dropped`, or a state that is not final."""
    reason: str = ""


class CompletedTurn(NamedTuple):
    """A completed turn in a turn log."""

    sample_id: SampleId
    key: str
    num_tokens: int
    spans: tuple[Span, ...]


class BrokenCall(NamedTuple):
    """One response whose replica or engine failed while it was generated."""

    request: str
    received: tuple[int, ...]
    """Tokens that had been received by then."""
    resumed: tuple[int, ...] | None = None
    """Tokens with which the next attempt continued; None: there was no other attempt."""
    turn: tuple[int, ...] | None = None
    """The complete response; None: its Rollouter died, or the response was abandoned."""
    at: float = 0.0
    """Wall clock."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of one run that has ended."""

    fates: Sequence[Fate]
    counts: SampleCounts
    trained: Sequence[Mapping[str, Any]]
    """The lines of trained.jsonl."""
    turns: Sequence[CompletedTurn] = ()
    """All completed turns, in order."""
    metas: Mapping[SampleId, SampleMeta] = field(default_factory=dict)
    """The journal's last values of each sample that has ever been READY."""
    generated_anew: Collection[SampleId] = field(default_factory=frozenset)
    """Samples whose finished payload was lost or damaged: generating their turns twice is correct."""
    rewinds: Sequence[WeightsVersion] = ()
    """Versions to which training went back, in the journal's order."""
    served_when_fed: Mapping[SampleId, int] = field(default_factory=dict)
    """The version that all replicas served, or a newer one, when the sample was first fed, according to the journal."""
    broken_calls: Sequence[BrokenCall] = ()
    max_staleness: int | None = None
    """The configured bound; None: there is none."""
    completed: bool = True
    """Whether the run reached its last step. A stopped run may have `outstanding` samples, which it would feed again
    after a resume."""


def surviving_samples(lines: Iterable[Mapping[str, Any]]) -> list[SampleId]:
    """Return the samples in the surviving model in training order; a sample that was trained twice appears twice."""
    return [SampleId.parse(name) for step in surviving_steps(lines) for name in step["samples"]]


def violations(records: RunRecords) -> list[Violation]:
    """Return every promise that these records break."""
    checks = (_samples_end, _trained_once, _counts_agree, _turns_once, _versions, _spans, _tokens_survive)
    return [violation for check in checks for violation in check(records)]


def _named(promise: str, things: Sequence[Any], details: str) -> Iterator[Violation]:
    """Yield a violation that names the first of `things` in `details`, if there are any."""
    if things:
        more = f" and {len(things) - MAX_NAMED} more" if len(things) > MAX_NAMED else ""
        yield Violation(promise, details.format(", ".join(str(thing) for thing in things[:MAX_NAMED]) + more))


def _samples_end(records: RunRecords) -> Iterator[Violation]:
    """Check that each feed index from 1 on has exactly one fate, which is final."""
    counts = Counter(fate.sample_id.index for fate in records.fates)
    twice = [index for index, count in counts.items() if count > 1]
    yield from _named("each sample once", twice, "the journal has feed index {} more than once")
    missing = sorted(set(range(1, max(counts, default=0) + 1)) - counts.keys())
    yield from _named("nothing lost", missing, "feed index {} was skipped")
    ends = ("trained", "dropped") if records.completed else ("trained", "dropped", "outstanding")
    live = [f"{fate.sample_id} ({fate.state})" for fate in records.fates if fate.state not in ends]
    yield from _named("nothing lost", live, "{} has not reached a final state")
    reasons = {str(reason) for reason in DropReason}
    silent = [fate.sample_id for fate in records.fates if fate.state == "dropped" and fate.reason not in reasons]
    yield from _named("dropped with a reason", silent, "{} was dropped without a reason")


def _trained_once(records: RunRecords) -> Iterator[Violation]:
    counts = Counter(surviving_samples(records.trained))
    twice = [sample_id for sample_id, count in counts.items() if count > 1]
    yield from _named("trained once", twice, "{} is in the surviving model more than once")
    in_journal = {fate.sample_id for fate in records.fates if fate.state == "trained"}
    unrecorded = [sample_id for sample_id in counts if sample_id not in in_journal]
    yield from _named("records agree", unrecorded, "{} is in the surviving model, but not TRAINED in the journal")
    untrained = sorted(in_journal - counts.keys())
    yield from _named("nothing lost", untrained, "{} is TRAINED in the journal, but not in the surviving model")


def _counts_agree(records: RunRecords) -> Iterator[Violation]:
    counts, states = records.counts, Counter(fate.state for fate in records.fates)
    total = counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
    fed = len(records.fates) - states["outstanding"]
    reasons = Counter(fate.reason for fate in records.fates if fate.state == "dropped")
    counted = Counter({reason: count for reason, count in counts.dropped.items() if count})
    trained, dropped = counts.trained, counts.num_dropped
    comparisons = (
        (counts.fed, total, f"fed {counts.fed}, but the states add up to {total}: {counts}"),
        (counts.fed, fed, f"fed {counts.fed} in the sample counts, {fed} in the journal"),
        (trained, states["trained"], f"{trained} trained in the sample counts, {states['trained']} in the journal"),
        (dropped, states["dropped"], f"{dropped} dropped in the sample counts, {states['dropped']} in the journal"),
        (counted, reasons, f"dropped by reason: counts {dict(counted)}, journal {dict(reasons)}"),
    )
    for one, other, details in comparisons:
        if one != other:
            yield Violation("sample counts are consistent", details)


def _turns_once(records: RunRecords) -> Iterator[Violation]:
    turns = ((turn.sample_id, turn.key) for turn in records.turns if turn.sample_id not in records.generated_anew)
    again = [f"{sample_id}/{key}" for (sample_id, key), count in Counter(turns).items() if count > 1]
    yield from _named("turns once", again, "turn {} was generated again")


def _versions(records: RunRecords) -> Iterator[Violation]:
    """Check that the versions of trained samples existed when they were trained, and that none was too old."""
    early, late = [], []
    for line in surviving_steps(records.trained):
        for name in line["samples"]:
            sample_id = SampleId.parse(name)
            meta = records.metas.get(sample_id)
            if meta is None or sample_id in records.generated_anew:
                continue  # the journal's values may belong to a generation after this step
            # After a rewind a sample may come from a version that the Trainer has not reached again.
            if line["lineage"] == 0 and meta.newest_version > line["version"]:
                early.append(f"{name} (made by version {meta.newest_version}, trained at {line['version']})")
            if records.max_staleness is not None and line["version"] - meta.oldest_version > records.max_staleness:
                late.append(f"{name} (made by version {meta.oldest_version}, trained at {line['version']})")
    yield from _named("versions in order", early, "{} is of a version that did not exist yet")
    yield from _named("staleness bound", late, f"{{}} was older than {records.max_staleness} versions")


def _spans(records: RunRecords) -> Iterator[Violation]:
    """Check that the versions of each turn's tokens are in order, and that a sample's versions in the journal are those
    of its turns."""
    wrong = [
        f"{turn.sample_id}/{turn.key} {[tuple(span) for span in turn.spans]}"
        for turn in records.turns
        if not _plausible(turn, records)
    ]
    yield from _named("spans in order", wrong, "turn {}")
    by_sample: dict[SampleId, list[CompletedTurn]] = {}
    for turn in records.turns:
        if turn.sample_id not in records.generated_anew:
            by_sample.setdefault(turn.sample_id, []).append(turn)
    other = []
    for sample_id, turns in by_sample.items():
        meta = records.metas.get(sample_id)
        if meta is None or len(turns) != meta.num_trajectories:
            continue  # it has never been READY
        if meta.provenance is not Provenance.GENERATED:
            continue  # its record was read too late the first time, so the turns are not those that became READY
        versions = [span.version for turn in turns for span in turn.spans]
        if (min(versions), max(versions)) != (meta.oldest_version, meta.newest_version):
            recorded = f"{meta.oldest_version} to {meta.newest_version}"
            other.append(f"{sample_id} (journal: versions {recorded}; turns: {min(versions)} to {max(versions)})")
    yield from _named("records agree", other, "{}")


def _plausible(turn: CompletedTurn, records: RunRecords) -> bool:
    starts = [span.first_token for span in turn.spans]
    versions = [span.version for span in turn.spans]
    if not starts:
        return turn.num_tokens == 0
    if starts[0] != 0 or starts[-1] >= turn.num_tokens or any(a >= b for a, b in pairwise(starts)):
        return False
    # Versions decrease where training went back, and then not below the version to which it went back. They also
    # decrease where a turn moves to a replica that has not loaded the newer versions yet.
    oldest = records.served_when_fed.get(turn.sample_id, 0)
    return all(
        after > before or any(rewind.version <= after for rewind in records.rewinds) or oldest <= after < before
        for before, after in pairwise(versions)
    )


def _tokens_survive(records: RunRecords) -> Iterator[Violation]:
    """Check that tokens received before a replica failed are in the response, and were not generated again."""
    again, lost = [], []
    for call in records.broken_calls:
        received = len(call.received)
        if call.resumed is not None and call.resumed != call.received:
            again.append(f"{call.request} ({received} tokens received, {len(call.resumed)} kept)")
        if call.turn is not None and call.turn[:received] != call.received:
            lost.append(f"{call.request} ({received} tokens received)")
    yield from _named("tokens outlive their engine", again, "the next attempt of {} continued with other tokens")
    yield from _named("tokens outlive their engine", lost, "the response of {} has other tokens")
