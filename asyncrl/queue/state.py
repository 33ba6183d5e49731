"""The queue's state: the state of every sample, and everything else that must survive a crash. Pure.

    admit ─▶ RUNNING ─offer─▶ READY ─lease─▶ LEASED ─commit─▶ TRAINED
      ▲         │               │  ◀─release──┘ │                │
      ├─ return ┘               │               │                │
      ├───────────requeue───────┴───────────────┘                │
      │          RUNNING, READY, LEASED ─drop─▶ DROPPED(reason)  │
      └──────────or READY again────────◀─rewind─ DROPPED(shutdown), TRAINED since a mark

Only operations (`asyncrl.queue.operations`) change it, live and when it is rebuilt from the journal, so both give the
same state. Every sample reaches exactly one end in the surviving model. Trained samples are remembered, by id and
completion number, until a checkpoint covers them, and those dropped for a shutdown until a rewind revives them.
Other ended samples are forgotten: an id that was handed out and is not live has ended. Two invariants hold after
every operation:

    fed            == running + ready + leased + trained + dropped
    next_index - 1 == fed + returned          (every index ever handed out is fed, or waits to be fed again)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappush, nsmallest
from operator import index as integer
from typing import Any, NamedTuple

from asyncrl.core.failures import BugError
from asyncrl.core.ports import QueuedSample, QueueSnapshot, SampleCounts
from asyncrl.core.types import DropReason, Provenance, SampleId, SampleMeta
from asyncrl.storage.checkpoint_manifest import LineageHistory
from asyncrl.storage.sample_bytes import FileRef
from asyncrl.storage.segments import checked_segment

REMEMBERED_REQUESTS = 256
"""Number of grants to remember, because their answers may be in flight when the queue's process dies. It exceeds the
number of waiting callers."""


class LeasedSample(NamedTuple):
    lease_id: int
    completion: int
    """The sample's place in completion order."""


class ReversibleEnd(NamedTuple):
    """The end of a sample that a rewind may undo."""

    number: int
    """Number of samples TRAINED up to and including this one, which is compared with marks. 0: the sample was dropped
    for a shutdown."""
    completion: int
    """The sample's place in completion order; 0: it had not completed."""


class GrantedLease(NamedTuple):
    lease_id: int
    sample_ids: tuple[SampleId, ...]
    ended: bool


class QueueState:
    """Samples by state, their counts, payloads, marks, and recent answers.

    Args:
        keeps_payloads: whether the entry of a sample stays until a checkpoint covers the sample, because a rewind can
            reuse it, or only until the sample is trained.
    """

    def __init__(self, prompts_per_epoch: int, *, keeps_payloads: bool, total_samples: int | None = None) -> None:
        if prompts_per_epoch < 1:
            raise BugError(f"a queue over {prompts_per_epoch} prompts per epoch cannot assign sample ids")
        self.prompts_per_epoch = prompts_per_epoch
        self.keeps_payloads = keeps_payloads
        self.total_samples = total_samples
        self.version = 0
        self.history = LineageHistory()
        self.incarnations: dict[str, int] = {}
        self.last_rewind: dict[str, Any] | None = None
        """Step, version, lineage and total samples of the last rewind."""
        self.interrupted_rollouter = 0
        """The Rollouter's incarnation that was generating when the queue was closed; 0: none was."""
        self.next_index = 1
        self.returned: list[SampleId] = []
        """A heap of samples to be fed again."""
        self.running: set[SampleId] = set()
        self.ready: dict[SampleId, int] = {}
        """Completion numbers, ascending."""
        self.leased: dict[SampleId, LeasedSample] = {}
        self.reversible: dict[SampleId, ReversibleEnd] = {}
        self.last_lease = 0
        self.completions = 0
        self.num_commits = 0
        """Number of transitions to TRAINED since this state began; marks store it."""
        self.fed = 0
        self.trained = 0
        self.trained_tokens = 0
        """Tokens that the steps of the surviving model have trained, counted once per pass."""
        self.dropped = dict.fromkeys(DropReason, 0)
        self.replayed = 0
        self.substituted = 0
        self.closed = False
        self.marks: dict[int, int] = {}
        """By step, the value of `num_commits` when its checkpoint began."""
        self.covered_step = -1
        self.admissions: dict[str, tuple[SampleId, ...]] = {}
        """Remembered grants of permits by request id."""
        self.leases: dict[str, GrantedLease] = {}
        """Remembered leases by request id."""
        self.entries: dict[SampleId, QueuedSample] = {}
        self.payload_bytes = 0
        self._samples_in_file: dict[str, int] = {}
        self._idle_files: set[str] = set()

    @classmethod
    def begin(
        cls,
        prompts_per_epoch: int,
        restore: QueueSnapshot | None = None,
        *,
        keeps_payloads: bool,
        total_samples: int | None = None,
    ) -> QueueState:
        """Return the state of a new run, or of one that resumes from a checkpoint alone and feeds its unfinished
        samples first.

        Raises:
            BugError: the snapshot's indices and sample counts are inconsistent.
        """
        state = cls(prompts_per_epoch, keeps_payloads=keeps_payloads, total_samples=total_samples)
        if restore is None:
            state.marks[0] = 0
            return state
        counts, outstanding = restore.counts, set(restore.outstanding)
        ended = counts.trained + counts.num_dropped
        if len(outstanding) != len(restore.outstanding) or restore.next_index - 1 != ended + len(outstanding):
            raise BugError(
                f"the queue snapshot is inconsistent: indices up to {restore.next_index - 1} were fed, but "
                f"{counts.trained} trained + {counts.num_dropped} dropped + {len(outstanding)} outstanding (of "
                f"{len(restore.outstanding)} listed) = {ended + len(outstanding)}; resume from another checkpoint"
            )
        if stray := [str(sample_id) for sample_id in outstanding if sample_id.index >= restore.next_index]:
            raise BugError(f"the queue snapshot lists {stray[0]} as outstanding; next is index {restore.next_index}")
        state.version = restore.version
        state.next_index = restore.next_index
        state.returned = list(outstanding)
        heapify(state.returned)
        state.fed, state.trained = ended, counts.trained
        state.dropped |= {DropReason(reason): count for reason, count in counts.dropped.items()}
        state.replayed, state.substituted = counts.replayed, counts.substituted
        state.check_counts()
        return state

    # -------------------------------------------------------------------------------------------- queries

    @property
    def lineage(self) -> int:
        return self.history.lineage

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def is_new(self) -> bool:
        """Whether no operation has happened and the run did not begin from a checkpoint."""
        return self.marks == {0: 0} and self.fed == 0

    @property
    def is_of_checkpoint(self) -> bool:
        """Whether no operation has happened since the run began from a checkpoint."""
        return self.num_commits == 0 and not self.marks

    def counts(self) -> SampleCounts:
        return SampleCounts(
            fed=self.fed,
            running=len(self.running),
            ready=len(self.ready),
            leased=len(self.leased),
            trained=self.trained,
            dropped={str(reason): count for reason, count in self.dropped.items()},
            replayed=self.replayed,
            substituted=self.substituted,
        )

    def snapshot(self) -> QueueSnapshot:
        """Return the snapshot from which `begin` starts. Live samples count as outstanding."""
        outstanding = sorted([*self.returned, *self.live()])
        return QueueSnapshot(self.next_index, tuple(outstanding), self.counts(), self.version)

    def id_of(self, index: int) -> SampleId:
        return SampleId((index - 1) // self.prompts_per_epoch, index)

    def next_ids(self, number: int) -> tuple[SampleId, ...]:
        """Return the next ids to be fed: returned ones in feed order, then fresh ones."""
        again = nsmallest(number, self.returned)
        fresh = range(self.next_index, self.next_index + number - len(again))
        return (*again, *map(self.id_of, fresh))

    def was_fed(self, sample_id: SampleId) -> bool:
        """Whether the id has been handed out."""
        return 1 <= sample_id.index < self.next_index

    def live(self) -> list[SampleId]:
        return [*self.running, *self.ready, *self.leased]

    def is_live(self, sample_id: SampleId) -> bool:
        return sample_id in self.running or sample_id in self.ready or sample_id in self.leased

    def is_late(self, sample_id: SampleId) -> bool:
        """Whether closing the queue ended this sample: reports about it are legal and change nothing."""
        return self.closed and self.was_fed(sample_id)

    def is_leased(self, sample_id: SampleId, lease_id: int) -> bool:
        return sample_id in self.leased and self.leased[sample_id].lease_id == lease_id

    def left_of_lease(self, lease_id: int) -> tuple[SampleId, ...]:
        """Return the samples that are still leased under `lease_id`. Raises `BugError` if it was never granted."""
        if not 1 <= lease_id <= self.last_lease:
            raise BugError(f"lease {lease_id} was never granted; the last one is {self.last_lease}")
        return tuple(sorted(sample_id for sample_id in self.leased if self.is_leased(sample_id, lease_id)))

    def ended_for_good(self, sample_ids: Iterable[SampleId]) -> tuple[SampleId, ...]:
        """Return the samples that have ended and that no rewind to a remembered mark can revive."""
        returned = set(self.returned)
        return tuple(
            sample_id
            for sample_id in sample_ids
            if self.was_fed(sample_id)
            and not (self.is_live(sample_id) or sample_id in self.reversible or sample_id in returned)
        )

    def needs_no_turns(self, sample_id: SampleId) -> bool:
        """Whether the sample's payload is stored, or the sample has ended for good."""
        return sample_id in self.entries or bool(self.ended_for_good((sample_id,)))

    def ready_in_feed_order(self, *, skip_missing: bool = False) -> Collection[SampleId]:
        """Return READY samples by index, up to the first sample that may still become READY; `skip_missing`: all of
        them."""
        ready = sorted(self.ready, key=lambda sample_id: sample_id.index)
        missing = min((sample_id.index for sample_id in (*self.running, *self.returned[:1])), default=None)
        if skip_missing or missing is None:
            return ready
        return [sample_id for sample_id in ready if sample_id.index < missing]

    def oldest_accepted_incarnation(self, part: str) -> int:
        """Return the oldest incarnation whose calls are accepted; earlier ones have been replaced, or must be.

        A Rollouter that was generating when the queue was closed must be replaced once a rewind reopens the queue: its
        running samples were given back, and would be generated twice.
        """
        newest = self.incarnations.get(part, 0)
        if part == "rollouter" and not self.closed:
            return max(newest, self.interrupted_rollouter + 1) if self.interrupted_rollouter else newest
        return newest

    def has_mark(self, step: int) -> bool:
        """Whether the state can rewind to `step` by itself, because it still knows all samples trained since."""
        return step in self.marks or self.is_of_checkpoint

    def is_file_needed(self, file: str) -> bool:
        return file in self._samples_in_file

    def take_idle_files(self) -> set[str]:
        """Return the payload files that have become unneeded since the last call."""
        idle, self._idle_files = self._idle_files, set()
        return idle

    def name_of_state(self, sample_id: SampleId) -> str:
        if sample_id in self.running:
            return "RUNNING"
        if sample_id in self.ready:
            return "READY"
        if sample_id in self.leased:
            return f"LEASED (lease {self.leased[sample_id].lease_id})"
        if sample_id in self.returned:
            return "waiting to be fed again"
        return "TRAINED or DROPPED" if self.was_fed(sample_id) else "never fed"

    def illegal(self, attempted: str, sample_id: SampleId) -> BugError:
        return BugError(f"illegal transition: {attempted} of {sample_id}, which is {self.name_of_state(sample_id)}")

    # -------------------------------------------------------------------------------------------- for operations

    def require(self, attempted: str, sample_ids: Sequence[SampleId], legal: Callable[[SampleId], bool]) -> None:
        """Raise `BugError` unless the operation is legal for each sample and names none twice."""
        for sample_id in sample_ids:
            if not legal(sample_id):
                raise self.illegal(attempted, sample_id)
        if len(set(sample_ids)) != len(sample_ids):
            raise BugError(f"{attempted} names a sample twice: {', '.join(map(str, sample_ids))}")

    def remove_live(self, sample_id: SampleId) -> int:
        """Remove a live sample from its state; return its completion number, 0 if it is RUNNING."""
        if sample_id in self.running:
            self.running.remove(sample_id)
            return 0
        if sample_id in self.ready:
            return self.ready.pop(sample_id)
        return self.leased.pop(sample_id).completion

    def return_to_feed(self, sample_id: SampleId) -> None:
        """Add a sample, which was removed from its state, to those that are fed again under their ids."""
        self.fed -= 1
        heappush(self.returned, sample_id)

    def requeue(self, sample_id: SampleId) -> None:
        self.remove_live(sample_id)
        self.return_to_feed(sample_id)
        self.forget_payload(sample_id)

    def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        completion = self.remove_live(sample_id)
        if reason == DropReason.SHUTDOWN:
            self.reversible[sample_id] = ReversibleEnd(0, completion)
        self.dropped[reason] += 1
        self.forget_payload_unless_reversible(sample_id)

    def make_ready(self, completions: Mapping[SampleId, int]) -> None:
        """Put samples back at their places in completion order."""
        self.ready = dict(sorted({**self.ready, **completions}.items(), key=lambda item: item[1]))

    def release(self, sample_ids: Iterable[SampleId]) -> None:
        self.make_ready({sample_id: self.leased.pop(sample_id).completion for sample_id in sample_ids})

    def keep_payload(self, sample: QueuedSample) -> None:
        self.entries[sample.meta.sample_id] = sample
        self.payload_bytes += sample.meta.payload_bytes
        if (file := getattr(sample.payload, "file", None)) is not None:
            self._samples_in_file[file] = self._samples_in_file.get(file, 0) + 1
            self._idle_files.discard(file)

    def forget_payload(self, sample_id: SampleId) -> None:
        if (sample := self.entries.pop(sample_id, None)) is None:
            return
        self.payload_bytes -= sample.meta.payload_bytes
        if (file := getattr(sample.payload, "file", None)) is not None:
            self._samples_in_file[file] -= 1
            if not self._samples_in_file[file]:
                del self._samples_in_file[file]
                self._idle_files.add(file)

    def forget_payload_unless_reversible(self, sample_id: SampleId) -> None:
        if not (self.keeps_payloads and sample_id in self.reversible):
            self.forget_payload(sample_id)

    def check_counts(self) -> None:
        """Raise `BugError` unless the two invariants hold."""
        live = len(self.running) + len(self.ready) + len(self.leased)
        handed_out = self.fed + len(self.returned)
        if self.fed != live + self.trained + self.num_dropped or self.next_index - 1 != handed_out:
            raise BugError(
                f"the sample counts are inconsistent: fed {self.fed}, running {len(self.running)}, "
                f"ready {len(self.ready)}, leased {len(self.leased)}, trained {self.trained}, "
                f"dropped {self.num_dropped}; next index {self.next_index}, "
                f"{len(self.returned)} waiting to be fed again"
            )

    # -------------------------------------------------------------------------------------------- as JSON

    def dump(self) -> dict[str, Any]:
        """Return the whole state; it consists of JSON values if the payloads do. Equal states give equal dumps."""
        return {
            **{name: getattr(self, name) for name in (*_NUMBERS, "total_samples", "last_rewind", "closed")},
            "history": self.history.dump(),
            "incarnations": dict(self.incarnations),
            "returned": sorted(indices(self.returned)),
            "running": sorted(indices(self.running)),
            "ready": [[sample_id.index, completion] for sample_id, completion in self.ready.items()],
            "leased": sorted([sample_id.index, *leased] for sample_id, leased in self.leased.items()),
            "reversible": sorted([sample_id.index, *end] for sample_id, end in self.reversible.items()),
            "dropped": {str(reason): count for reason, count in self.dropped.items()},
            "marks": [list(mark) for mark in sorted(self.marks.items())],
            "admissions": [[request_id, indices(ids)] for request_id, ids in self.admissions.items()],
            "leases": [[request_id, *granted._replace(sample_ids=indices(granted.sample_ids))]  # type: ignore[arg-type]
                       for request_id, granted in self.leases.items()],
            "entries": [entry_of(self.entries[sample_id]) for sample_id in sorted(self.entries)],
        }  # fmt: skip

    @classmethod
    def load(cls, raw: Mapping[str, Any], prompts_per_epoch: int, *, keeps_payloads: bool) -> QueueState:
        """Restore what `dump` returned.

        Raises:
            BugError: its sample counts are inconsistent.
            KeyError, IndexError, TypeError, ValueError, AttributeError: it is not a valid dump.
        """
        state = cls(prompts_per_epoch, keeps_payloads=keeps_payloads)
        id_of = state.id_of
        for name in _NUMBERS:
            setattr(state, name, integer(raw[name]))
        state.total_samples = None if raw["total_samples"] is None else integer(raw["total_samples"])
        state.last_rewind, state.closed = raw["last_rewind"], bool(raw["closed"])
        state.history = LineageHistory.load(raw["history"])
        # The names of the next incarnation's files contain its number.
        state.incarnations = {part: integer(number) for part, number in raw["incarnations"].items()}
        state.returned = list(map(id_of, raw["returned"]))
        state.running = set(map(id_of, raw["running"]))
        state.ready = {id_of(index): completion for index, completion in raw["ready"]}
        state.leased = {id_of(index): LeasedSample(*leased) for index, *leased in raw["leased"]}
        state.reversible = {id_of(index): ReversibleEnd(*end) for index, *end in raw["reversible"]}
        state.dropped |= {DropReason(reason): integer(count) for reason, count in raw["dropped"].items()}
        state.marks = dict(raw["marks"])
        state.admissions = {request_id: tuple(map(id_of, ids)) for request_id, ids in raw["admissions"]}
        state.leases = {
            request_id: GrantedLease(lease_id, tuple(map(id_of, ids)), ended)
            for request_id, lease_id, ids, ended in raw["leases"]
        }
        for entry in raw["entries"]:
            state.keep_payload(sample_of(entry, prompts_per_epoch))
        state.check_counts()
        return state


_NUMBERS = (
    "version", "interrupted_rollouter", "next_index", "last_lease", "completions", "num_commits", "fed", "trained",
    "trained_tokens", "replayed", "substituted", "covered_step",
)  # fmt: skip


def indices(sample_ids: Iterable[SampleId]) -> list[int]:
    return [sample_id.index for sample_id in sample_ids]


def entry_of(sample: QueuedSample) -> list[Any]:
    """Return a sample's metadata and payload reference as JSON values; `sample_of` reads them."""
    meta, payload = sample
    return [meta.sample_id.index, *meta[1:], payload]


def sample_of(entry: Sequence[Any], prompts_per_epoch: int) -> QueuedSample:
    """Return the sample of `entry_of`. Raises `TypeError` or `ValueError` for anything else, such as a payload outside
    of the directory of payloads."""
    index, oldest, newest, rows, tokens, size, provenance, payload = entry
    sample_id = SampleId((index - 1) // prompts_per_epoch, index)
    meta = SampleMeta(sample_id, oldest, newest, rows, tokens, size, Provenance(provenance))
    if payload is None:
        return QueuedSample(meta, None)
    file, position = payload
    return QueuedSample(meta, FileRef(checked_segment(file), integer(position)))
