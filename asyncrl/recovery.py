"""The queue's state, which only transitions change, and how it is rebuilt from them. Pure.

    decide (sample_queue) ─▶ Transition ─apply─▶ QueueState          live
                                 └─to_row─▶ journal ─from_row─▶ apply ─▶ the same QueueState     after a crash

What is rebuilt cannot differ from what was there, because nothing else changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from asyncrl.failures import BugError
from asyncrl.ledger import Ledger
from asyncrl.lineage import Line
from asyncrl.ports import Books, QueuedSample, QueueSnapshot
from asyncrl.transitions import (
    Admitted,
    Applied,
    Attached,
    Closed,
    Committed,
    Covered,
    Dropped,
    Finished,
    Leased,
    Marked,
    Reading,
    Redone,
    Released,
    Rewound,
    Row,
    Transition,
    Unfed,
    entry_of,
    from_row,
    indices,
    to_row,
)
from asyncrl.types import Provenance, SampleId

REMEMBERED_ASKS = 256
"""Grants whose answer may still be on its way when the queue's process dies; more than callers are ever parked."""


class _Grant(NamedTuple):
    """An answered `lease`."""

    lease_id: int
    sample_ids: tuple[SampleId, ...]
    ended: bool


class QueueState:
    """All that the queue knows and must not lose. Only `apply` changes it.

    `keeps_payloads`: entries stay until a checkpoint covers their sample, because a rewind can use them; else until it
    is trained.
    """

    def __init__(self, ledger: Ledger, *, keeps_payloads: bool, version: int = 0, total_samples: int | None = None):
        self.ledger = ledger
        self.keeps_payloads = keeps_payloads
        self.version = version
        self.total_samples = total_samples
        self.line = Line()
        self.incarnations: dict[str, int] = {}
        self.last_rewind: Rewound | None = None
        self._cut_off = 0
        """The Rollouter's incarnation that was generating when the queue was closed; 0: none was."""
        self._marks: dict[int, int] = {}
        self._covered_step = -1
        self._entries: dict[SampleId, QueuedSample] = {}
        self._admissions: dict[str, tuple[SampleId, ...]] = {}
        self._leases: dict[str, _Grant] = {}
        self._files: dict[str, int] = {}
        self._idle_files: set[str] = set()
        self.payload_bytes = 0
        self._replayed = 0
        self._substituted = 0

    @classmethod
    def begin(
        cls,
        prompts_per_epoch: int,
        restore: QueueSnapshot | None = None,
        *,
        keeps_payloads: bool,
        total_samples: int | None = None,
    ) -> QueueState:
        """Of a new run, or of one that goes on from a checkpoint and nothing else."""
        ledger = Ledger(prompts_per_epoch) if restore is None else Ledger.restore(restore, prompts_per_epoch)
        version = 0 if restore is None else restore.version
        state = cls(ledger, keeps_payloads=keeps_payloads, version=version, total_samples=total_samples)
        if restore is None:
            state._marks[0] = 0
        else:
            state._replayed, state._substituted = restore.books.replayed, restore.books.substituted
        return state

    # -------------------------------------------------------------------------------------------- questions

    @property
    def lineage(self) -> int:
        return self.line.lineage

    def books(self) -> Books:
        """The ledger's, and how many samples came out of records."""
        return replace(self.ledger.books(), replayed=self._replayed, substituted=self._substituted)

    def snapshot(self) -> QueueSnapshot:
        """Enough for `begin`."""
        return replace(self.ledger.snapshot(self.version), books=self.books())

    def entry(self, sample_id: SampleId) -> QueuedSample | None:
        return self._entries.get(sample_id)

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def heard_from(self, part: str) -> int:
        """Calls of that part's incarnations before this one are refused: another has taken its place, or has to.

        So it is with a Rollouter that was generating when the queue was closed, once a rewind has opened it again: what
        it is still at was given back, and would be generated twice.
        """
        newest = self.incarnations.get(part, 0)
        cut_off = part == "rollouter" and not self.ledger.closed
        return max(newest, self._cut_off + 1) if cut_off else newest

    def is_generated(self, sample_id: SampleId) -> bool:
        """Its turns are not needed any more: its payload is there, or it has ended for good."""
        return sample_id in self._entries or bool(self.ledger.covered((sample_id,)))

    def admission(self, ask: str) -> tuple[SampleId, ...] | None:
        """What this ask was answered with, if it was and that has not been given back."""
        return self._admissions.get(ask)

    def lease(self, ask: str) -> _Grant | None:
        """What this ask was answered with, if it was."""
        return self._leases.get(ask)

    @property
    def is_new(self) -> bool:
        """Nothing has happened in the run, and no checkpoint was there before it: step 0 is here."""
        return self._marks == {0: 0} and self.ledger.fed == 0

    def has_mark(self, step: int) -> bool:
        """A rewind to `step` needs no help: what was trained since is still known, or nothing was."""
        return step in self._marks or (self.ledger.ends == 0 and not self._marks)

    def is_covering(self, step: int) -> bool:
        """A `Covered` of that step has something to do. An older one was outdone by a later checkpoint."""
        return step in self._marks and step != self._covered_step

    def names_file(self, file: str) -> bool:
        """A payload in `file` may still be asked for."""
        return file in self._files

    def take_idle_files(self) -> set[str]:
        """Payload files that were needed and are not any more; each is told once."""
        idle, self._idle_files = self._idle_files, set()
        return idle

    # -------------------------------------------------------------------------------------------- changes

    def apply(self, transition: Transition) -> None:
        """Raises `BugError`, and changes nothing, if it is illegal."""
        _APPLY[type(transition)](self, transition)

    def _admitted(self, t: Admitted) -> None:
        if (expected := self.ledger.next_ids(len(t.sample_ids))) != t.sample_ids:
            raise BugError(f"illegal transition: feed of {_told(t.sample_ids)}; next is {_told(expected)}")
        for _ in t.sample_ids:
            self.ledger.feed()
        _remember(self._admissions, t.ask, t.sample_ids)

    def _unfed(self, t: Unfed) -> None:
        for sample_id in t.sample_ids:
            if not self.ledger.is_running(sample_id) and not self.ledger.is_late(sample_id):
                raise self.ledger.illegal(sample_id, "unfeed")
        for sample_id in t.sample_ids:
            self.ledger.unfeed(sample_id)
        self._admissions.pop(t.ask, None)

    def _finished(self, t: Finished) -> None:
        for sample in t.samples:
            if not self.ledger.is_running(sample.meta.sample_id):
                raise self.ledger.illegal(sample.meta.sample_id, "finish")
        for sample in t.samples:
            self.ledger.finish(sample.meta.sample_id)
            self._hold(sample)
            self._replayed += sample.meta.provenance is not Provenance.GENERATED
            self._substituted += sample.meta.provenance is Provenance.SUBSTITUTED

    def _dropped(self, t: Dropped) -> None:
        for sample_id in t.sample_ids:
            if not self.ledger.is_live(sample_id):
                raise self.ledger.illegal(sample_id, f"drop ({t.reason})")
        for sample_id in t.sample_ids:
            self.ledger.drop(sample_id, t.reason)
            self._let_go_unless_kept(sample_id)

    def _leased(self, t: Leased) -> None:
        if (number := self.ledger.last_lease + 1) != t.lease_id:
            raise BugError(f"illegal transition: lease {t.lease_id}; next is {number}")
        self.ledger.lease(t.sample_ids)
        _remember(self._leases, t.ask, _Grant(t.lease_id, t.sample_ids, t.ended))

    def _committed(self, t: Committed) -> None:
        self.ledger.commit(t.lease_id, t.sample_ids)
        for sample_id in t.sample_ids:
            self._let_go_unless_kept(sample_id)

    def _redone(self, t: Redone) -> None:
        self.ledger.redo(t.sample_id)
        self._let_go(t.sample_id)

    def _applied(self, t: Applied) -> None:
        if t.version < self.version:
            raise BugError(f"version {t.version} applied after version {self.version}: versions only grow")
        self.version = t.version

    def _closed(self, t: Closed) -> None:
        if self.ledger.num_running:
            self._cut_off = self.incarnations.get("rollouter", 0)
        self.ledger.close()
        for sample_id in list(self._entries):
            self._let_go_unless_kept(sample_id)

    def _marked(self, t: Marked) -> None:
        self._marks[t.step] = self.ledger.ends
        if t.step == self._covered_step:
            self._covered_step = -1

    def _covered(self, t: Covered) -> None:
        ends = self._marks.get(t.step)
        if ends is None:
            raise BugError(f"the checkpoint of step {t.step} is on disk, but was never begun")
        for sample_id in self.ledger.cover(ends):
            self._let_go(sample_id)
        self._marks = {step: mark for step, mark in self._marks.items() if mark >= ends and step >= t.step}
        self._covered_step = t.step

    def _attached(self, t: Attached) -> None:
        if t.incarnation <= self.incarnations.get(t.part, 0):
            raise BugError(f"incarnation {t.incarnation} of the {t.part} is attached already, or was")
        self.incarnations[t.part] = t.incarnation
        if t.part == "rollouter":
            self.ledger.give_back_running()
            self._admissions.clear()
            if not self.keeps_payloads:
                # They were in the memory of the process that has died.
                for sample_id in tuple(self.ledger.ready()):
                    self.ledger.redo(sample_id)
                    self._let_go(sample_id)
        elif t.part == "trainer":
            self.ledger.release_all()
            self._leases.clear()

    def _rewound(self, t: Rewound) -> None:
        if t.lineage <= self.lineage:
            raise BugError(f"illegal transition: rewind into lineage {t.lineage} out of lineage {self.lineage}")
        # Without a mark, it lies before everything that is kept: what is behind that, `again` names.
        ends = self._marks.get(t.step, 0)
        self.ledger.rewind(ends, self._entries.__contains__, t.again)
        self._marks = {step: mark for step, mark in self._marks.items() if step < t.step} | {t.step: ends}
        self.line = self.line.rewound(t.step, t.lineage)
        self.version, self.total_samples = t.version, t.total_samples
        self._leases.clear()
        self.last_rewind = t

    def _released(self, t: Released) -> None:
        self.ledger.release(t.lease_id)

    # -------------------------------------------------------------------------------------------- entries

    def _hold(self, sample: QueuedSample) -> None:
        self._entries[sample.meta.sample_id] = sample
        self.payload_bytes += sample.meta.payload_bytes
        file = getattr(sample.payload, "file", None)
        if file is not None:
            self._files[file] = self._files.get(file, 0) + 1
            self._idle_files.discard(file)

    def _let_go_unless_kept(self, sample_id: SampleId) -> None:
        if not (self.keeps_payloads and self.ledger.is_kept(sample_id)):
            self._let_go(sample_id)

    def _let_go(self, sample_id: SampleId) -> None:
        sample = self._entries.pop(sample_id, None)
        if sample is None:
            return
        self.payload_bytes -= sample.meta.payload_bytes
        file = getattr(sample.payload, "file", None)
        if file is not None:
            self._files[file] -= 1
            if not self._files[file]:
                del self._files[file]
                self._idle_files.add(file)

    # -------------------------------------------------------------------------------------------- whole

    def dump(self) -> dict[str, Any]:
        """Everything, as JSON values if the payloads are. Equal states give equal dumps."""
        return {
            "ledger": self.ledger.dump(),
            "entries": [entry_of(self._entries[sample_id]) for sample_id in sorted(self._entries)],
            "replayed": self._replayed,
            "substituted": self._substituted,
            "version": self.version,
            "line": self.line.dump(),
            "total_samples": self.total_samples,
            "incarnations": dict(self.incarnations),
            "cut_off": self._cut_off,
            "marks": [[step, ends] for step, ends in sorted(self._marks.items())],
            "covered_step": self._covered_step,
            "admissions": [[ask, indices(ids)] for ask, ids in self._admissions.items()],
            "leases": [[ask, g.lease_id, indices(g.sample_ids), g.ended] for ask, g in self._leases.items()],
            "last_rewind": None if self.last_rewind is None else to_row(self.last_rewind).body,
        }

    @classmethod
    def load(cls, raw: Mapping[str, Any], read: Reading, *, keeps_payloads: bool) -> QueueState:
        """What `dump` gave.

        Raises:
            BugError: its books don't balance.
            KeyError, IndexError, TypeError, ValueError: it is no such dump.
        """
        ledger = Ledger.load(raw["ledger"], read.prompts_per_epoch)
        state = cls(ledger, keeps_payloads=keeps_payloads, version=raw["version"], total_samples=raw["total_samples"])
        for entry in raw["entries"]:
            state._hold(read.sample_of(entry))
        state._replayed, state._substituted = raw["replayed"], raw["substituted"]
        state.line = Line.load(raw["line"])
        state.incarnations = dict(raw["incarnations"])
        state._cut_off = raw["cut_off"]
        state._marks = {step: ends for step, ends in raw["marks"]}
        state._covered_step = raw["covered_step"]
        state._admissions = {ask: read.ids_of(indices) for ask, indices in raw["admissions"]}
        state._leases = {a: _Grant(number, read.ids_of(ids), ended) for a, number, ids, ended in raw["leases"]}
        if raw["last_rewind"] is not None:
            last = from_row(Row("rewind", raw["last_rewind"]), read)
            state.last_rewind = last if isinstance(last, Rewound) else None
        return state


_APPLY: dict[type, Callable[[QueueState, Any], None]] = {
    Admitted: QueueState._admitted,
    Unfed: QueueState._unfed,
    Finished: QueueState._finished,
    Dropped: QueueState._dropped,
    Leased: QueueState._leased,
    Committed: QueueState._committed,
    Released: QueueState._released,
    Redone: QueueState._redone,
    Applied: QueueState._applied,
    Closed: QueueState._closed,
    Marked: QueueState._marked,
    Covered: QueueState._covered,
    Attached: QueueState._attached,
    Rewound: QueueState._rewound,
}


def _remember(asks: dict[str, Any], ask: str, answer: Any) -> None:
    if not ask:
        return
    asks[ask] = answer
    if len(asks) > REMEMBERED_ASKS:
        del asks[next(iter(asks))]


def _told(sample_ids: Iterable[SampleId]) -> str:
    return ", ".join(map(str, sample_ids)) or "nothing"
