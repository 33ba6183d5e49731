"""The sample state machine and its books. Pure; the one authority over what happened to every sample.

    feed ─▶ RUNNING ─finish─▶ READY ─lease─▶ LEASED ─commit─▶ TRAINED
      ▲        │                ▲  ◀─release──┘ │
      └─unfeed─┘                └──────┬────────┘
                RUNNING, READY, LEASED ─drop─▶ DROPPED(reason)

Every sample reaches exactly one end. Ended samples are not kept: an id that was handed out and is not live has ended.
Two laws hold after every transition, each checked in O(1) between counters and the containers they don't count:

    fed           == running + ready + leased + trained + dropped
    next_index - 1 == fed + returned          (every index ever handed out is fed, or waits to be fed again)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from asyncrl.failures import BugError
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.types import DropReason, SampleId


class _Held(NamedTuple):
    lease_id: int
    completion: int


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
        self._leased: dict[SampleId, _Held] = {}
        self._open_leases: dict[int, set[SampleId]] = {}
        self._last_lease = 0
        self._completions = 0
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

    # -------------------------------------------------------------------------------------------- questions

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

    def is_ready(self, sample_id: SampleId) -> bool:
        return sample_id in self._ready

    def ready(self) -> Iterable[SampleId]:
        """READY samples in the order in which they completed."""
        return self._ready.keys()

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
        return "TRAINED or DROPPED" if self._was_handed_out(sample_id) else "never fed"

    # -------------------------------------------------------------------------------------------- transitions

    def feed(self) -> SampleId:
        """→ RUNNING: a returned id if there is one, in feed order, else the next fresh one."""
        if self._closed:
            raise BugError("the queue is closed; no sample can be fed")
        if self._returned:
            sample_id = heappop(self._returned)
        else:
            sample_id = SampleId((self._next_index - 1) // self._prompts_per_epoch, self._next_index)
            self._next_index += 1
        self._running.add(sample_id)
        self._fed += 1
        self._balance()
        return sample_id

    def unfeed(self, sample_id: SampleId) -> None:
        """RUNNING → as if it had never been fed: the grant did not reach whoever asked for it."""
        if self._is_late(sample_id):
            return
        if sample_id not in self._running:
            raise self._illegal(sample_id, "unfeed")
        self._running.remove(sample_id)
        self._fed -= 1
        heappush(self._returned, sample_id)
        self._balance()

    def finish(self, sample_id: SampleId) -> bool:
        """RUNNING → READY. False: too late, the queue is closed."""
        if self._is_late(sample_id):
            return False
        if sample_id not in self._running:
            raise self._illegal(sample_id, "finish")
        self._running.remove(sample_id)
        self._completions += 1
        self._ready[sample_id] = self._completions
        self._balance()
        return True

    def lease(self, sample_ids: Sequence[SampleId]) -> int:
        """READY → LEASED, all together; returns the lease's id, from 1."""
        for sample_id in sample_ids:
            if sample_id not in self._ready:
                raise self._illegal(sample_id, "lease")
        _refuse_twice("a lease", sample_ids)
        self._last_lease += 1
        lease_id = self._last_lease
        for sample_id in sample_ids:
            self._leased[sample_id] = _Held(lease_id, self._ready.pop(sample_id))
        self._open_leases[lease_id] = set(sample_ids)
        self._balance()
        return lease_id

    def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        """LEASED → TRAINED for these of the lease: all or, if one of them cannot be, none."""
        if self._closed and all(self._was_handed_out(sample_id) for sample_id in sample_ids):
            return
        held = self._open_leases.get(lease_id, set())
        for sample_id in sample_ids:
            if sample_id not in held:
                raise self._illegal(sample_id, f"commit under lease {lease_id}")
        _refuse_twice(f"commit under lease {lease_id}", sample_ids)
        for sample_id in sample_ids:
            self._leave_lease(sample_id)
            self._trained += 1
        self._balance()

    def release(self, lease_id: int) -> tuple[SampleId, ...]:
        """LEASED → READY for what is left of the lease, back at its place in completion order; returns those ids."""
        if not 1 <= lease_id <= self._last_lease:
            raise BugError(f"lease {lease_id} was never given; the last one is {self._last_lease}")
        released = sorted(self._open_leases.get(lease_id, ()))
        for sample_id in released:
            self._ready[sample_id] = self._leave_lease(sample_id)
        if released:
            self._ready = dict(sorted(self._ready.items(), key=lambda item: item[1]))
        self._balance()
        return tuple(released)

    def drop(self, sample_id: SampleId, reason: DropReason) -> bool:
        """Any live state → DROPPED(reason). False: too late, the queue is closed."""
        if self._is_late(sample_id):
            return False
        if sample_id in self._running:
            self._running.remove(sample_id)
        elif sample_id in self._ready:
            del self._ready[sample_id]
        elif sample_id in self._leased:
            self._leave_lease(sample_id)
        else:
            raise self._illegal(sample_id, f"drop ({reason})")
        self._dropped[reason] += 1
        self._balance()
        return True

    def close(self) -> None:
        """Everything live → DROPPED(shutdown). Closing twice is closing once."""
        for sample_id in [*self._running, *self._ready, *self._leased]:
            self.drop(sample_id, DropReason.SHUTDOWN)
        self._closed = True

    # -------------------------------------------------------------------------------------------- inside

    def _leave_lease(self, sample_id: SampleId) -> int:
        """Forget that it is leased; returns its completion number."""
        lease_id, completion = self._leased.pop(sample_id)
        lease = self._open_leases[lease_id]
        lease.remove(sample_id)
        if not lease:
            del self._open_leases[lease_id]
        return completion

    def _was_handed_out(self, sample_id: SampleId) -> bool:
        return 1 <= sample_id.index < self._next_index

    def _is_late(self, sample_id: SampleId) -> bool:
        return self._closed and self._was_handed_out(sample_id)

    def _illegal(self, sample_id: SampleId, attempted: str) -> BugError:
        return BugError(f"illegal transition: {attempted} of {sample_id}, which is {self.state(sample_id)}")

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
