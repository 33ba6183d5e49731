"""The sample queue as a Ray actor, its client, and payloads in Ray's object store.

    Rollouter: payload ─put─▶ object store ◀─get─ Trainer
                  │                               ▲
                  └─ SampleMeta + reference ─▶ QueueActor ─ lease of references

The actor sees metadata and references. Payload bytes go from the producer into shared memory and from there to the
consumer; they pass neither the actor's mailbox nor its heap.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.ports import Admission, Lease, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.types import DropReason, Sample, SampleId, SampleMeta

# A parked admit or lease holds one of the actor's slots, and so does every call in flight. Concurrency groups would not
# do: Ray gives each its own event loop, and the queue's conditions belong to one.
MAX_CONCURRENCY = 1000

T = TypeVar("T")


class QueueActor:
    """`LocalSampleQueue` behind Ray calls. `ask` is a caller's own name for a call that may park, see `abandon`."""

    def __init__(self, options: QueueOptions, restore: QueueSnapshot | None = None) -> None:
        self._queue = LocalSampleQueue(options, restore)
        self._parked: dict[str, anyio.CancelScope] = {}

    async def admit(self, ask: str, max_samples: int, timeout_s: float) -> Admission:
        waiting = self._queue.admit(max_samples, timeout_s=timeout_s)
        return await self._park(ask, waiting, Admission((), closed=False))

    async def lease(self, ask: str, num_samples: int, trainer_version: int, timeout_s: float) -> Lease:
        waiting = self._queue.lease(num_samples, trainer_version=trainer_version, timeout_s=timeout_s)
        return await self._park(ask, waiting, Lease(0, (), ended=False))

    async def abandon(self, ask: str) -> None:
        """Whoever asked has gone: a call that is still parked answers "nothing" at once."""
        if (scope := self._parked.get(ask)) is not None:
            scope.cancel()

    async def unfeed(self, sample_ids: Sequence[SampleId]) -> None:
        await self._queue.unfeed(sample_ids)

    async def offer_many(self, samples: Sequence[QueuedSample]) -> list[AsyncRLError | None]:
        return await self._queue.offer_many(samples)

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        await self._queue.drop(sample_id, reason)

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        await self._queue.commit(lease_id, sample_ids)

    async def release(self, lease_id: int) -> None:
        await self._queue.release(lease_id)

    async def set_applied_version(self, version: int) -> None:
        await self._queue.set_applied_version(version)

    async def end_stream(self) -> None:
        await self._queue.end_stream()

    async def close(self) -> None:
        await self._queue.close()

    async def snapshot(self) -> QueueSnapshot:
        return await self._queue.snapshot()

    async def status(self) -> QueueStatus:
        return await self._queue.status()

    async def _park(self, ask: str, waiting: Awaitable[T], nothing: T) -> T:
        with anyio.CancelScope() as scope:
            self._parked[ask] = scope
            try:
                return await waiting
            finally:
                del self._parked[ask]
        return nothing


def start_queue(options: QueueOptions, restore: QueueSnapshot | None = None, *, name: str | None = None) -> Any:
    """Start the queue actor in this Ray job and return its handle.

    It is never restarted: its ledger lives in its memory, and a fresh one would hand out ids a second time.
    """
    actor: Any = ray.remote(QueueActor)
    shell = actor.options(name=name, num_cpus=0, max_restarts=0, max_concurrency=MAX_CONCURRENCY)
    return shell.remote(options, restore)


@dataclass(eq=False, slots=True)
class _Outgoing:
    sample: QueuedSample
    sent: bool = False
    error: AsyncRLError | None = None


@dataclass(eq=False, slots=True)
class _Outbox:
    """Offers that wait while another is on its way; they leave together."""

    lock: anyio.Lock = field(default_factory=anyio.Lock)
    waiting: list[_Outgoing] = field(default_factory=list)


class QueueClient:
    """`ports.SampleQueue` over the actor. Make one per event loop.

    Every call ends within `call_timeout_s`, on top of its own `timeout_s` if it has one.

    Raises:
        DeadlineError: the actor did not answer in time.
        InfraError: the actor is gone.
        BugError: an illegal transition.
    """

    def __init__(self, handle: Any, call_timeout_s: float) -> None:
        self._actor = handle
        self._call_timeout_s = call_timeout_s
        self._asks = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._outbox = _Outbox()

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        def give_back(admission: Admission) -> Any:
            return self._actor.unfeed.remote(admission.sample_ids) if admission.sample_ids else None

        ask = next(self._asks)
        ref = self._actor.admit.remote(ask, max_samples, timeout_s)
        return await self._grant("admit", ask, ref, timeout_s, give_back)

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """Offers made while one is on its way travel together in the next call; a lone one leaves at once."""
        outgoing = _Outgoing(QueuedSample(meta, payload))
        self._outbox.waiting.append(outgoing)
        try:
            async with self._outbox.lock:
                if not outgoing.sent:
                    await self._send_waiting()
        finally:
            if not outgoing.sent:
                self._outbox.waiting.remove(outgoing)
        if outgoing.error is not None:
            raise outgoing.error

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        await self._call("drop", self._actor.drop.remote(sample_id, reason))

    async def lease(self, num_samples: int, *, trainer_version: int, timeout_s: float) -> Lease:
        def give_back(lease: Lease) -> Any:
            return self._actor.release.remote(lease.lease_id) if lease.samples else None

        ask = next(self._asks)
        ref = self._actor.lease.remote(ask, num_samples, trainer_version, timeout_s)
        return await self._grant("lease", ask, ref, timeout_s, give_back)

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        await self._call("commit", self._actor.commit.remote(lease_id, tuple(sample_ids)))

    async def release(self, lease_id: int) -> None:
        await self._call("release", self._actor.release.remote(lease_id))

    async def set_applied_version(self, version: int) -> None:
        await self._call("set_applied_version", self._actor.set_applied_version.remote(version))

    async def end_stream(self) -> None:
        await self._call("end_stream", self._actor.end_stream.remote())

    async def close(self) -> None:
        await self._call("close", self._actor.close.remote())

    async def snapshot(self) -> QueueSnapshot:
        return await self._call("snapshot", self._actor.snapshot.remote())

    async def status(self) -> QueueStatus:
        return await self._call("status", self._actor.status.remote())

    async def _send_waiting(self) -> None:
        """One call for all that waits. Shielded: its outcome belongs to every one of them, not only to the caller."""
        batch, self._outbox.waiting = self._outbox.waiting, []
        for outgoing in batch:
            outgoing.sent = True
        with anyio.CancelScope(shield=True):
            try:
                ref = self._actor.offer_many.remote([outgoing.sample for outgoing in batch])
                errors = await self._call("offer", ref)
            except AsyncRLError as error:
                errors = [error] * len(batch)
        for outgoing, problem in zip(batch, errors, strict=True):
            outgoing.error = problem

    async def _grant(
        self, method: str, ask: str, ref: Any, timeout_s: float, give_back: Callable[[Any], Any]
    ) -> Any:
        """The answer to a call that may park. If the caller is cancelled, what was granted meanwhile goes back."""
        try:
            return await self._call(method, ref, timeout_s)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                self._actor.abandon.remote(ask)
                returned = give_back(await self._call(method, ref))
                if returned is not None:
                    await self._call(method, returned)
            raise

    async def _call(self, method: str, ref: Any, timeout_s: float = 0.0) -> Any:
        limit_s = timeout_s + self._call_timeout_s
        try:
            with anyio.fail_after(limit_s):
                return await ref
        except TimeoutError as error:
            raise DeadlineError(
                f"the sample queue did not answer `{method}` within {limit_s:g} s; what it granted, if anything, is "
                "unknown, so the run cannot go on. A larger timeouts.call_s helps if the machine is overloaded"
            ) from error
        except RayTaskError as error:
            raise _original(error, method) from None
        except RayError as error:
            raise InfraError.wrap(f"the sample queue is gone, and its ledger with it (in `{method}`)", error) from None


def _original(error: RayTaskError, method: str) -> AsyncRLError:
    """What the actor raised, as it raised it."""
    origin = error.cause
    if isinstance(origin, AsyncRLError):
        return origin
    return BugError.wrap(f"the sample queue failed in `{method}`", error)


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """A payload in the object store. Wrapped, because Ray replaces a bare reference argument by what it refers to."""

    ref: Any


class RayPayloads:
    """`ports.PayloadStore` in Ray's object store, on the machine of whoever puts.

    A payload lives as long as somebody holds its reference: the queue does until the sample ends. It is lost with the
    process that put it.

    Raises:
        DeadlineError: a payload could not be fetched within `call_timeout_s`.
        InfraError: a payload is lost.
    """

    def __init__(self, call_timeout_s: float) -> None:
        self._call_timeout_s = call_timeout_s

    async def put(self, sample: Sample) -> PayloadRef:
        return PayloadRef(await anyio.to_thread.run_sync(ray.put, sample))

    async def get(self, payloads: Sequence[PayloadRef]) -> list[Sample]:
        """All of them in one call to the store. Arrays are read-only views of shared memory where Ray allows it."""
        refs = [payload.ref for payload in payloads]
        return await anyio.to_thread.run_sync(self._get_blocking, refs, abandon_on_cancel=True)

    def _get_blocking(self, refs: list[Any]) -> list[Sample]:
        try:
            return ray.get(refs, timeout=self._call_timeout_s)
        except GetTimeoutError as error:
            raise DeadlineError(
                f"{len(refs)} sample payloads did not arrive within {self._call_timeout_s:g} s; raise timeouts.call_s "
                "if they are large or the network is slow"
            ) from error
        except RayError as error:
            raise InfraError.wrap("a sample payload is lost from the object store", error) from None
