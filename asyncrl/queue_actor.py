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
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from asyncrl.convoy import Convoy
from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.payloads import Packed, pack, unpack
from asyncrl.ports import Admission, Lease, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.types import DropReason, Sample, SampleId, SampleMeta, sample_meta

# A parked admit or lease holds one of the actor's slots, and so does every call in flight. Concurrency groups would not
# do: Ray gives each its own event loop, and the queue's conditions belong to one.
MAX_CONCURRENCY = 1000

MAX_OFFERS = 256
"""Most samples in one call to the actor."""
MAX_SHARED_BYTES = 32 << 20
"""Most payload bytes that share one object of the store: what one unfinished sample can keep alive of the others."""

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
        self._offers = Convoy(self._offer_many, max_weight=MAX_OFFERS)

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        def give_back(admission: Admission) -> Any:
            return self._actor.unfeed.remote(admission.sample_ids) if admission.sample_ids else None

        ask = next(self._asks)
        ref = self._actor.admit.remote(ask, max_samples, timeout_s)
        return await self._grant("admit", ask, ref, timeout_s, give_back)

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """Offers made while one is on its way travel together in the next call; a lone one leaves at once."""
        await self._offers.join(QueuedSample(meta, payload))

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

    async def _offer_many(self, samples: Sequence[QueuedSample]) -> Sequence[AsyncRLError | None]:
        return await self._call("offer", self._actor.offer_many.remote(list(samples)))

    async def _grant(self, method: str, ask: str, ref: Any, timeout_s: float, give_back: Callable[[Any], Any]) -> Any:
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


class PayloadRef(NamedTuple):
    """A payload in the object store: the place of a sample in an object that it may share with others.

    The reference is nested, so it travels as a reference: Ray replaces a bare one among the arguments by the object.
    """

    ref: Any
    position: int


class RayPayloads:
    """`ports.PayloadStore` in Ray's object store, on the machine of whoever puts. Make one per event loop.

    An object costs the store about as much as copying a few hundred kilobytes, so samples that finish while a put is
    under way share the next object, up to `MAX_SHARED_BYTES`. It lives until the last of them ends: as long as somebody
    holds a reference, and the queue does. It is lost with the process that put it.

    Raises:
        DeadlineError: a payload could not be fetched within `call_timeout_s`.
        InfraError: a payload is lost, or the store cannot take it.
    """

    def __init__(self, call_timeout_s: float) -> None:
        self._call_timeout_s = call_timeout_s
        self._puts = Convoy(self._put_many, max_weight=MAX_SHARED_BYTES)

    async def put(self, sample: Sample) -> PayloadRef:
        return await self._puts.join(sample, weight=sample_meta(sample).payload_bytes)

    async def get(self, payloads: Sequence[PayloadRef]) -> list[Sample]:
        """All of them in one call to the store. Arrays are read-only views of shared memory."""
        refs = list(dict.fromkeys(payload.ref for payload in payloads))
        objects = await anyio.to_thread.run_sync(self._get_blocking, refs, abandon_on_cancel=True)
        packed = dict(zip(refs, objects, strict=True))
        return [unpack(packed[payload.ref], payload.position) for payload in payloads]

    async def _put_many(self, samples: Sequence[Sample]) -> Sequence[PayloadRef]:
        ref = await anyio.to_thread.run_sync(_put_blocking, samples)
        return [PayloadRef(ref, position) for position in range(len(samples))]

    def _get_blocking(self, refs: list[Any]) -> list[Packed]:
        try:
            return ray.get(refs, timeout=self._call_timeout_s)
        except GetTimeoutError as error:
            raise DeadlineError(
                f"sample payloads did not arrive within {self._call_timeout_s:g} s; raise timeouts.call_s if they are "
                "large or the network is slow"
            ) from error
        except RayError as error:
            raise InfraError.wrap("a sample payload is lost from the object store", error) from None


def _put_blocking(samples: Sequence[Sample]) -> Any:
    try:
        return ray.put(pack(samples))
    except RayError as error:
        raise InfraError.wrap(f"the object store cannot take {len(samples)} sample payloads", error) from None
