"""The sample state machine and its books. Pure; the one authority over what happened to every sample.

    feed ─▶ RUNNING ─finish─▶ READY ─lease─▶ LEASED ─commit─▶ TRAINED
      ▲        │                │  ◀─release──┘ │                │
      ├─unfeed─┘                │               │                │
      ├─────────────redo────────┴───────────────┘                │
      │         RUNNING, READY, LEASED ─drop─▶ DROPPED(reason)   │
      └─────────or READY again─────────◀─rewind─ DROPPED(shutdown), TRAINED since a mark

Every sample reaches exactly one end in the surviving model. What was trained is kept, by id and completion number,
until a checkpoint covers it, and what was dropped for a shutdown until a rewind undoes that; other ended samples are
not kept: an id that was handed out and is not live has ended.
Two laws hold after every transition, each checked in O(1) between counters and the containers they don't count:

    fed           == running + ready + leased + trained + dropped
    next_index - 1 == fed + returned          (every index ever handed out is fed, or waits to be fed again)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, NamedTuple

from asyncrl.failures import BugError
from asyncrl.leases import Held, Leases
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.types import DropReason, SampleId


class _Kept(NamedTuple):
    """An end that a rewind may undo."""

    end: int
    """Which TRAINED it was, from 1: a mark lies between two of them. 0: it was dropped for a shutdown."""
    completion: int
    """0: it had not completed."""


class Ledger:
    """Which samples are live, in which state, and how many ended how.

    Every transition raises `BugError`, and changes nothing, if it is illegal. After `close()` all that was live is
    DROPPED(shutdown); work that was in flight then still reports in, and those late calls are legal and change nothing.
    An id that was never fed is a bug even then.
    """

    def __init__(self, prompts_per_epoch: int) -> None:
        if prompts_per_epoch < 1:
            raise BugError(f"a ledger over {prompts_per_epoch} prompts per epoch has no sample ids to give")
        self._prompts_per_epoch = prompts_per_epoch
        self._next_index = 1
        self._returned: list[SampleId] = []
        self._running: set[SampleId] = set()
        self._ready: dict[SampleId, int] = {}
        self._leased = Leases()
        self._completions = 0
        self._kept: dict[SampleId, _Kept] = {}
        self._ends = 0
        self._fed = 0
        self._trained = 0
        self._dropped = dict.fromkeys(DropReason, 0)
        self._closed = False

    @classmethod
    def restore(cls, snapshot: QueueSnapshot, prompts_per_epoch: int) -> Ledger:
        """The ledger of a resumed run: what had not ended will be fed again, first, under the same ids.

        Raises:
            BugError: the snapshot's indices and books don't balance.
        """
        ledger = cls(prompts_per_epoch)
        books = snapshot.books
        ended = books.trained + books.num_dropped
        outstanding = set(snapshot.outstanding)
        if len(outstanding) != len(snapshot.outstanding) or snapshot.next_index - 1 != ended + len(outstanding):
            raise BugError(
                f"the queue snapshot does not balance: indices up to {snapshot.next_index - 1} were fed, but "
                f"{books.trained} trained + {books.num_dropped} dropped + {len(outstanding)} outstanding (of "
                f"{len(snapshot.outstanding)} listed) = {ended + len(outstanding)}; resume from another checkpoint"
            )
        if stray := [str(i) for i in outstanding if i.index >= snapshot.next_index]:
            raise BugError(f"the queue snapshot lists {stray[0]} as outstanding; next is index {snapshot.next_index}")
        ledger._next_index = snapshot.next_index
        ledger._returned = list(outstanding)
        heapify(ledger._returned)
        ledger._fed = ended
        ledger._trained = books.trained
        ledger._dropped |= {DropReason(reason): count for reason, count in books.dropped.items()}
        ledger._balance()
        return ledger

    def dump(self) -> dict[str, Any]:
        """Everything, as JSON values; samples by their index. Equal ledgers give equal dumps."""
        return {
            "next_index": self._next_index,
            "returned": sorted(sample_id.index for sample_id in self._returned),
            "running": sorted(sample_id.index for sample_id in self._running),
            "ready": [[sample_id.index, completion] for sample_id, completion in self._ready.items()],
            "leased": sorted([i.index, *self._leased[i]] for i in self._leased),
            "kept": sorted([i.index, kept.end, kept.completion] for i, kept in self._kept.items()),
            "last_lease": self._leased.last,
            "completions": self._completions,
            "ends": self._ends,
            "fed": self._fed,
            "trained": self._trained,
            "dropped": {str(reason): count for reason, count in self._dropped.items()},
            "closed": self._closed,
        }

    @classmethod
    def load(cls, raw: Mapping[str, Any], prompts_per_epoch: int) -> Ledger:
        """What `dump` gave.

        Raises:
            BugError: its books don't balance.
            KeyError, TypeError, ValueError: it is no such dump.
        """
        ledger = cls(prompts_per_epoch)
        name = ledger.id_of
        ledger._next_index = raw["next_index"]
        ledger._returned = [name(index) for index in raw["returned"]]
        ledger._running = {name(index) for index in raw["running"]}
        ledger._ready = {name(index): completion for index, completion in raw["ready"]}
        held = {name(index): Held(lease_id, completion) for index, lease_id, completion in raw["leased"]}
        ledger._leased = Leases(raw["last_lease"], held)
        ledger._kept = {name(index): _Kept(end, completion) for index, end, completion in raw["kept"]}
        ledger._completions = raw["completions"]
        ledger._ends = raw["ends"]
        ledger._fed = raw["fed"]
        ledger._trained = raw["trained"]
        ledger._dropped |= {DropReason(reason): count for reason, count in raw["dropped"].items()}
        ledger._closed = raw["closed"]
        ledger._balance()
        return ledger

    # -------------------------------------------------------------------------------------------- questions

    @property
    def prompts_per_epoch(self) -> int:
        return self._prompts_per_epoch

    @property
    def ends(self) -> int:
        """How often a sample became TRAINED since this ledger began: what a mark remembers."""
        return self._ends

    @property
    def last_lease(self) -> int:
        return self._leased.last

    @property
    def fed(self) -> int:
        return self._fed

    @property
    def num_dropped(self) -> int:
        return sum(self._dropped.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def closed(self) -> bool:
        return self._closed

    def is_running(self, sample_id: SampleId) -> bool:
        return sample_id in self._running

    def is_ready(self, sample_id: SampleId) -> bool:
        return sample_id in self._ready

    def is_leased(self, sample_id: SampleId, lease_id: int | None = None) -> bool:
        """Under that lease, or any."""
        return sample_id in self._leased and lease_id in (None, self._leased[sample_id].lease_id)

    def held(self, lease_id: int) -> tuple[SampleId, ...]:
        """What is left of a lease. Raises `BugError` if it was never given."""
        return self._leased.left(lease_id)

    def was_fed(self, sample_id: SampleId) -> bool:
        """Its id was handed out at some time."""
        return 1 <= sample_id.index < self._next_index

    def is_live(self, sample_id: SampleId) -> bool:
        return sample_id in self._running or sample_id in self._ready or sample_id in self._leased

    def is_kept(self, sample_id: SampleId) -> bool:
        """It has ended, and a rewind may undo that."""
        return sample_id in self._kept

    def covered(self, sample_ids: Iterable[SampleId]) -> tuple[SampleId, ...]:
        """Of these, what has ended for good."""
        returned = set(self._returned)
        return tuple(
            sample_id
            for sample_id in sample_ids
            if self.was_fed(sample_id)
            and not (self.is_live(sample_id) or sample_id in self._kept or sample_id in returned)
        )

    def is_late(self, sample_id: SampleId) -> bool:
        """The queue is closed, and with that this sample's life."""
        return self._closed and self.was_fed(sample_id)

    def id_of(self, index: int) -> SampleId:
        return SampleId((index - 1) // self._prompts_per_epoch, index)

    def next_ids(self, number: int) -> tuple[SampleId, ...]:
        """What the next so many calls of `feed` give."""
        again = nsmallest(number, self._returned)
        fresh = range(self._next_index, self._next_index + number - len(again))
        return (*again, *map(self.id_of, fresh))

    def ready(self) -> Collection[SampleId]:
        """READY samples in the order in which they completed."""
        return self._ready.keys()

    def ready_in_feed_order(self, *, to_the_end: bool = False) -> Collection[SampleId]:
        """READY samples by index, up to the first one that was fed and may still become READY; or all of them."""
        ready = sorted(self._ready, key=lambda sample_id: sample_id.index)
        missing = min((sample_id.index for sample_id in (*self._running, *self._returned[:1])), default=None)
        if to_the_end or missing is None:
            return ready
        return [sample_id for sample_id in ready if sample_id.index < missing]

    def books(self) -> Books:
        return Books(
            fed=self._fed,
            running=len(self._running),
            ready=len(self._ready),
            leased=len(self._leased),
            trained=self._trained,
            dropped={str(reason): count for reason, count in self._dropped.items()},
        )

    def snapshot(self, version: int) -> QueueSnapshot:
        """Enough for `restore`. What is live now counts as outstanding."""
        outstanding = sorted([*self._returned, *self._running, *self._ready, *self._leased])
        return QueueSnapshot(self._next_index, tuple(outstanding), self.books(), version)

    def state(self, sample_id: SampleId) -> str:
        """The state's name, for people."""
        if sample_id in self._running:
            return "RUNNING"
        if sample_id in self._ready:
            return "READY"
        if sample_id in self._leased:
            return f"LEASED (lease {self._leased[sample_id].lease_id})"
        if sample_id in self._returned:
            return "waiting to be fed again"
        return "TRAINED or DROPPED" if self.was_fed(sample_id) else "never fed"

    def illegal(self, sample_id: SampleId, attempted: str) -> BugError:
        return BugError(f"illegal transition: {attempted} of {sample_id}, which is {self.state(sample_id)}")

    # -------------------------------------------------------------------------------------------- transitions

    def feed(self) -> SampleId:
        """→ RUNNING: a returned id if there is one, in feed order, else the next fresh one."""
        if self._closed:
            raise BugError("the queue is closed; no sample can be fed")
        if self._returned:
            sample_id = heappop(self._returned)
        else:
            sample_id = self.id_of(self._next_index)
            self._next_index += 1
        self._running.add(sample_id)
        self._fed += 1
        self._balance()
        return sample_id

    def unfeed(self, sample_id: SampleId) -> None:
        """RUNNING → as if it had never been fed: the grant did not reach whoever asked for it."""
        if self.is_late(sample_id):
            return
        if sample_id not in self._running:
            raise self.illegal(sample_id, "unfeed")
        self._running.remove(sample_id)
        self._return(sample_id)
        self._balance()

    def finish(self, sample_id: SampleId) -> bool:
        """RUNNING → READY. False: too late, the queue is closed."""
        if self.is_late(sample_id):
            return False
        if sample_id not in self._running:
            raise self.illegal(sample_id, "finish")
        self._running.remove(sample_id)
        self._completions += 1
        self._ready[sample_id] = self._completions
        self._balance()
        return True

    def lease(self, sample_ids: Sequence[SampleId]) -> int:
        """READY → LEASED, all together; returns the lease's id, from 1."""
        for sample_id in sample_ids:
            if sample_id not in self._ready:
                raise self.illegal(sample_id, "lease")
        _refuse_twice("a lease", sample_ids)
        lease_id = self._leased.give([(sample_id, self._ready.pop(sample_id)) for sample_id in sample_ids])
        self._balance()
        return lease_id

    def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        """LEASED → TRAINED for these of the lease: all or, if one of them cannot be, none."""
        if self._closed and all(self.was_fed(sample_id) for sample_id in sample_ids):
            return
        for sample_id in sample_ids:
            if not self.is_leased(sample_id, lease_id):
                raise self.illegal(sample_id, f"commit under lease {lease_id}")
        _refuse_twice(f"commit under lease {lease_id}", sample_ids)
        for sample_id in sample_ids:
            self._ends += 1
            self._kept[sample_id] = _Kept(self._ends, self._leased.take(sample_id))
            self._trained += 1
        self._balance()

    def release(self, lease_id: int) -> tuple[SampleId, ...]:
        """LEASED → READY for what is left of the lease, back at its place in completion order; returns those ids."""
        released = self.held(lease_id)
        for sample_id in released:
            self._ready[sample_id] = self._leased.take(sample_id)
        if released:
            self._sort_ready()
        self._balance()
        return released

    def release_all(self) -> tuple[SampleId, ...]:
        """LEASED → READY for everything: whoever held it is gone."""
        return tuple(sample_id for lease_id in self._leased.open() for sample_id in self.release(lease_id))

    def give_back_running(self) -> tuple[SampleId, ...]:
        """RUNNING → to be fed again for everything: whoever ran it is gone."""
        given_back = tuple(sorted(self._running))
        for sample_id in given_back:
            self.unfeed(sample_id)
        return given_back

    def redo(self, sample_id: SampleId) -> bool:
        """READY or LEASED → to be fed again: its payload is lost. False: too late, the queue is closed."""
        if self.is_late(sample_id):
            return False
        if sample_id in self._ready:
            del self._ready[sample_id]
        elif sample_id in self._leased:
            self._leased.take(sample_id)
        else:
            raise self.illegal(sample_id, "redo")
        self._return(sample_id)
        self._balance()
        return True

    def drop(self, sample_id: SampleId, reason: DropReason) -> bool:
        """Any live state → DROPPED(reason). False: too late, the queue is closed."""
        if self.is_late(sample_id):
            return False
        completion = 0
        if sample_id in self._running:
            self._running.remove(sample_id)
        elif sample_id in self._ready:
            completion = self._ready.pop(sample_id)
        elif sample_id in self._leased:
            completion = self._leased.take(sample_id)
        else:
            raise self.illegal(sample_id, f"drop ({reason})")
        if reason == DropReason.SHUTDOWN:
            self._kept[sample_id] = _Kept(0, completion)
        self._dropped[reason] += 1
        self._balance()
        return True

    def close(self) -> None:
        """Everything live → DROPPED(shutdown). Closing twice is closing once."""
        for sample_id in [*self._running, *self._ready, *self._leased]:
            self.drop(sample_id, DropReason.SHUTDOWN)
        self._closed = True

    def cover(self, ends: int) -> tuple[SampleId, ...]:
        """What was TRAINED up to the mark `ends` is final: a checkpoint holds it. Returns those ids."""
        covered = tuple(sample_id for sample_id, kept in self._kept.items() if 0 < kept.end <= ends)
        for sample_id in covered:
            del self._kept[sample_id]
        return covered

    def rewind(self, ends: int, has_payload: Callable[[SampleId], bool], again: Sequence[SampleId] = ()) -> None:
        """Back to the mark `ends`, and open again if closed.

        LEASED, TRAINED since and DROPPED(shutdown) → READY, at their places in completion order; those without a
        payload, and `again`, which were TRAINED and covered → to be fed again.
        """
        if stray := set(again).difference(self.covered(again)):
            raise self.illegal(min(stray), "rewind")
        if len(again) > self._trained - sum(kept.end > 0 for kept in self._kept.values()):
            raise BugError(f"illegal transition: rewind of {len(again)} covered samples; fewer have been trained")
        _refuse_twice("a rewind", again)
        self._closed = False
        self.release_all()
        undone = {sample_id: kept for sample_id, kept in self._kept.items() if kept.end == 0 or kept.end > ends}
        for sample_id, kept in undone.items():
            del self._kept[sample_id]
            if kept.end:
                self._trained -= 1
            else:
                self._dropped[DropReason.SHUTDOWN] -= 1
            if kept.completion:
                self._ready[sample_id] = kept.completion
            else:
                self._return(sample_id)
        for sample_id in again:
            self._trained -= 1
            self._return(sample_id)
        for sample_id in [sample_id for sample_id in self._ready if not has_payload(sample_id)]:
            del self._ready[sample_id]
            self._return(sample_id)
        self._sort_ready()
        self._balance()

    # -------------------------------------------------------------------------------------------- inside

    def _return(self, sample_id: SampleId) -> None:
        self._fed -= 1
        heappush(self._returned, sample_id)

    def _sort_ready(self) -> None:
        self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1]))

    def _balance(self) -> None:
        live = len(self._running) + len(self._ready) + len(self._leased)
        if self._fed != live + self._trained + self.num_dropped or self._next_index - 1 != self._fed + len(
            self._returned
        ):
            raise BugError(
                f"the books don't balance: fed {self._fed}, running {len(self._running)}, ready {len(self._ready)}, "
                f"leased {len(self._leased)}, trained {self._trained}, dropped {self.num_dropped}; "
                f"next index {self._next_index}, {len(self._returned)} waiting to be fed again"
            )


def _refuse_twice(attempted: str, sample_ids: Sequence[SampleId]) -> None:
    if len(set(sample_ids)) != len(sample_ids):
        raise BugError(f"{attempted} names a sample twice: {', '.join(map(str, sample_ids))}")
