"""What can happen to the queue, as values, and their rows in the journal. Pure.

A transition says what happened, not why: replaying needs neither pacing nor a clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.payloads import FileRef
from asyncrl.ports import QueuedSample
from asyncrl.types import DropReason, Provenance, SampleId, SampleMeta


@dataclass(frozen=True, slots=True)
class Admitted:
    """→ RUNNING. `ask` is the caller's own name for its call, empty if it gave none."""

    ask: str
    sample_ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Unfed:
    """RUNNING → to be fed again: the grant did not reach whoever asked for it."""

    ask: str
    sample_ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """RUNNING → READY, in this order of completion."""

    samples: tuple[QueuedSample, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Any live state → DROPPED."""

    reason: DropReason
    sample_ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Leased:
    """READY → LEASED."""

    ask: str
    lease_id: int
    sample_ids: tuple[SampleId, ...]
    ended: bool
    """As the answer said it."""


@dataclass(frozen=True, slots=True)
class Committed:
    """LEASED → TRAINED."""

    lease_id: int
    sample_ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """LEASED → READY for what is left of the lease."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Redone:
    """READY or LEASED → to be fed again."""

    sample_id: SampleId


@dataclass(frozen=True, slots=True)
class Applied:
    """Every replica serves this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Everything live → DROPPED(shutdown)."""


@dataclass(frozen=True, slots=True)
class Marked:
    """The checkpoint of `step` begins."""

    step: int


@dataclass(frozen=True, slots=True)
class Covered:
    """The checkpoint of `step` is on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class Attached:
    """A new incarnation of a part begins."""

    part: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Rewound:
    """Training goes on from the checkpoint of `step`, see `ports.QueueControl.rewind`."""

    step: int
    version: int
    lineage: int
    total_samples: int | None
    again: tuple[SampleId, ...] = ()
    """TRAINED since that step and covered by later checkpoints, which are given up: fed again."""


Transition = (
    Admitted | Unfed | Finished | Dropped | Leased | Committed | Released | Redone | Applied | Closed
    | Marked | Covered | Attached | Rewound
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ rows


class Row(NamedTuple):
    """A transition in the journal. `body` is a JSON array; samples are named by their index."""

    kind: str
    body: str


def indices(sample_ids: Iterable[SampleId]) -> list[int]:
    """How rows name samples."""
    return [sample_id.index for sample_id in sample_ids]


def entry_of(sample: QueuedSample) -> list[Any]:
    """How rows hold a READY sample; `Reading.sample_of` reads it."""
    meta, payload = sample
    return [meta.sample_id.index, *meta[1:], payload]


_TO_BODY: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    Admitted: ("admit", lambda t: [t.ask, indices(t.sample_ids)]),
    Unfed: ("unfeed", lambda t: [t.ask, indices(t.sample_ids)]),
    Finished: ("finish", lambda t: [entry_of(sample) for sample in t.samples]),
    Dropped: ("drop", lambda t: [str(t.reason), indices(t.sample_ids)]),
    Leased: ("lease", lambda t: [t.ask, t.lease_id, indices(t.sample_ids), t.ended]),
    Committed: ("commit", lambda t: [t.lease_id, indices(t.sample_ids)]),
    Released: ("release", lambda t: [t.lease_id]),
    Redone: ("redo", lambda t: [t.sample_id.index]),
    Applied: ("apply", lambda t: [t.version]),
    Closed: ("close", lambda t: []),
    Marked: ("mark", lambda t: [t.step]),
    Covered: ("covered", lambda t: [t.step]),
    Attached: ("attach", lambda t: [t.part, t.incarnation]),
    Rewound: ("rewind", lambda t: [t.step, t.version, t.lineage, t.total_samples, indices(t.again)]),
}


def to_row(transition: Transition) -> Row:
    """Payloads are `FileRef`s, or None."""
    kind, body = _TO_BODY[type(transition)]
    return Row(kind, json.dumps(body(transition), separators=(",", ":")))


class Reading(NamedTuple):
    """What reading rows takes: which epoch an index belongs to."""

    prompts_per_epoch: int

    def id_of(self, index: int) -> SampleId:
        return SampleId((index - 1) // self.prompts_per_epoch, index)

    def ids_of(self, indices: Iterable[int]) -> tuple[SampleId, ...]:
        epoch = self.prompts_per_epoch
        return tuple([SampleId((index - 1) // epoch, index) for index in indices])

    def sample_of(self, entry: list[Any]) -> QueuedSample:
        index, oldest, newest, rows, tokens, size, provenance, payload = entry
        meta = SampleMeta(self.id_of(index), oldest, newest, rows, tokens, size, Provenance(provenance))
        return QueuedSample(meta, FileRef(*payload) if payload else None)


_FROM_BODY: dict[str, Callable[[Reading, list[Any]], Transition]] = {
    "admit": lambda read, b: Admitted(b[0], read.ids_of(b[1])),
    "unfeed": lambda read, b: Unfed(b[0], read.ids_of(b[1])),
    "finish": lambda read, b: Finished(tuple([read.sample_of(entry) for entry in b])),
    "drop": lambda read, b: Dropped(DropReason(b[0]), read.ids_of(b[1])),
    "lease": lambda read, b: Leased(b[0], b[1], read.ids_of(b[2]), b[3]),
    "commit": lambda read, b: Committed(b[0], read.ids_of(b[1])),
    "release": lambda read, b: Released(b[0]),
    "redo": lambda read, b: Redone(read.id_of(b[0])),
    "apply": lambda read, b: Applied(b[0]),
    "close": lambda read, b: Closed(),
    "mark": lambda read, b: Marked(b[0]),
    "covered": lambda read, b: Covered(b[0]),
    "attach": lambda read, b: Attached(b[0], b[1]),
    "rewind": lambda read, b: Rewound(b[0], b[1], b[2], b[3], read.ids_of(b[4])),
}


def from_row(row: Row, read: Reading) -> Transition:
    """Raises `KeyError`, `IndexError`, `TypeError` or `ValueError` if it is no such row."""
    return _FROM_BODY[row.kind](read, json.loads(row.body))
