"""Payloads in Ray's object store: for runs without a journal, whose payloads need not outlive their processes.

Rollouter: payloads ─put─▶ object store ─get─▶ Trainer
              │                                 ▲
              └─ SampleMeta + PayloadRef ─▶ sample queue ─ lease of references
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from asyncrl.convoy import Convoy
from asyncrl.failures import DeadlineError, InfraError
from asyncrl.payloads import Packed, pack, unpack
from asyncrl.types import Sample, sample_meta

logger = logging.getLogger(__name__)

MAX_SHARED_BYTES = 32 << 20
"""Most payload bytes that share one object of the store: what one unfinished sample can keep alive of the others."""


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
        DeadlineError: the store did not take or give a payload within `call_timeout_s`.
        InfraError: the store cannot take a payload, or cannot be reached.
    """

    def __init__(self, call_timeout_s: float) -> None:
        self._call_timeout_s = call_timeout_s
        self._puts = Convoy(self._put_many, max_weight=MAX_SHARED_BYTES)

    async def put(self, sample: Sample) -> PayloadRef:
        return await self._puts.join(sample, weight=sample_meta(sample).payload_bytes)

    async def get(self, payloads: Sequence[PayloadRef]) -> list[Sample | None]:
        """All of them in one call to the store. Arrays are read-only views of shared memory. None: it is lost."""
        refs = list(dict.fromkeys(payload.ref for payload in payloads))
        objects = await anyio.to_thread.run_sync(self._get_blocking, refs, abandon_on_cancel=True)
        packed = dict(zip(refs, objects, strict=True))
        found = [(packed[payload.ref], payload.position) for payload in payloads]
        return [unpack(shared, position) if shared is not None else None for shared, position in found]

    async def _put_many(self, samples: Sequence[Sample]) -> Sequence[PayloadRef]:
        try:
            with anyio.fail_after(self._call_timeout_s):
                # Nothing can interrupt a put: on its thread it may go on, but nobody waits for it any more.
                ref = await anyio.to_thread.run_sync(_put_blocking, samples, abandon_on_cancel=True)
        except TimeoutError as error:
            size = sum(sample_meta(sample).payload_bytes for sample in samples)
            raise DeadlineError(
                f"the object store did not take {len(samples)} sample payloads ({size} bytes) within "
                f"{self._call_timeout_s:g} s: look at the room it has (ray.object_store_memory_bytes) and at the disk "
                "it spills to; raise timeouts.call_s if the machine is overloaded"
            ) from error
        return [PayloadRef(ref, position) for position in range(len(samples))]

    def _get_blocking(self, refs: list[Any]) -> list[Packed | None]:
        try:
            return ray.get(refs, timeout=self._call_timeout_s)
        except ObjectLostError as error:
            if len(refs) > 1:
                return [packed for ref in refs for packed in self._get_blocking([ref])]
            logger.error("sample payloads are lost from the object store: %s", str(error).splitlines()[0])
            return [None]
        except GetTimeoutError as error:
            raise DeadlineError(
                f"sample payloads did not arrive within {self._call_timeout_s:g} s; raise timeouts.call_s if they are "
                "large or the network is slow"
            ) from error
        except RayError as error:
            raise InfraError.wrap("sample payloads cannot be had from the object store", error) from None


def _put_blocking(samples: Sequence[Sample]) -> Any:
    try:
        return ray.put(pack(samples))
    except RayError as error:
        raise InfraError.wrap(f"the object store cannot take {len(samples)} sample payloads", error) from None
