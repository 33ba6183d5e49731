"""Weights through Ray's object store: the Trainer puts a version there, every replica maps it from there.

The actor holds references only; the bytes never pass through its mailbox. Ray ties an object's life to the process that
put it, so a version lives as long as the Trainer that published it; a restarted Trainer publishes its checkpoint anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import ray
from numpy.typing import NDArray

from asyncrl.failures import BugError, DeadlineError, InfraError
from asyncrl.ports import Publication
from asyncrl.weights.checksums import group_checksums

STORE_NAME = "weight_store"
HANDED_OUT_KEPT = 2
"""Versions that were handed out and are kept besides the newest: a replica may still be reading them."""
CHUNK_BYTES = 256 << 20
"""Objects of about this size: large enough to be cheap, small enough to be pulled in parallel between nodes."""
PARKED_CALLERS = 1000


class WeightStoreActor:
    """Which versions exist, and the references to their bytes. Everything runs on the actor's own event loop."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[Publication, list[ray.ObjectRef]]] = {}
        self._handed_out: list[int] = []
        self._told = -1
        """Newest version that `wait_newer` has answered with."""
        self._published = asyncio.Condition()

    async def ready(self) -> None:
        """Answers once the actor is up."""

    async def publish(self, publication: Publication, refs: Sequence[ray.ObjectRef]) -> None:
        """Make a version the newest. One that `wait_newer` never told of leaves its wish for validation to this one.

        Raises:
            BugError: it is not newer than the newest one.
        """
        async with self._published:
            if self._versions and publication.version <= max(self._versions):
                raise BugError(
                    f"version {publication.version} published after version {max(self._versions)}: "
                    "versions must ascend, or replicas would never fetch it"
                )
            if self._versions:
                before = self._versions[max(self._versions)][0]
                if before.validate and before.version > self._told:
                    publication = replace(publication, validate=True)
            self._versions[publication.version] = (publication, list(refs))
            self._forget()
            self._published.notify_all()

    async def latest(self) -> Publication | None:
        """The newest publication; it stays fetchable until `HANDED_OUT_KEPT` more have been handed out."""
        if not self._versions:
            return None
        newest = max(self._versions)
        if newest not in self._handed_out:
            self._handed_out = [*self._handed_out, newest][-HANDED_OUT_KEPT:]
            self._forget()
        return self._versions[newest][0]

    async def wait_newer(self, version: int, timeout_s: float) -> Publication | None:
        """The newest publication above `version`; None if none came in time."""
        try:
            async with asyncio.timeout(timeout_s), self._published:
                await self._published.wait_for(lambda: max(self._versions, default=-1) > version)
        except TimeoutError:
            return None
        newest = await self.latest()
        if newest is not None:
            self._told = newest.version
        return newest

    def _forget(self) -> None:
        newest = max(self._versions)
        for version in self._versions.keys() - {newest, *self._handed_out}:
            del self._versions[version]

    async def tensors(self, version: int) -> list[ray.ObjectRef]:
        """References to the chunks of a version; each is a dict of parameter name to array.

        Raises:
            InfraError: the version is no longer (or not yet) there.
        """
        if version not in self._versions:
            held = ", ".join(map(str, sorted(self._versions))) or "none"
            raise InfraError(f"the weight store does not hold version {version} (it holds: {held})")
        return self._versions[version][1]


def start_store(namespace: str) -> ray.actor.ActorHandle:
    """Create the run's store actor; `namespace` is the run's Ray namespace."""
    return (
        ray.remote(WeightStoreActor)
        .options(name=STORE_NAME, namespace=namespace, num_cpus=0, max_concurrency=PARKED_CALLERS)
        .remote()
    )


def find_store(namespace: str) -> ray.actor.ActorHandle | None:
    """The run's store, or None if there is none (`asyncrl serve` has none)."""
    try:
        return ray.get_actor(STORE_NAME, namespace=namespace)
    except ValueError:
        return None


class ObjectStorePublisher:
    """The Trainer's side (`ports.WeightPublisher`). Travels to the process that has the weights; use it on one loop."""

    def __init__(self, store: ray.actor.ActorHandle, *, call_s: float) -> None:
        self._store = store
        self._call_s = call_s

    async def publish(
        self, version: int, step: int, tensors: Mapping[str, NDArray[Any]], *, validate: bool
    ) -> Publication:
        """Copy `tensors` into the object store, once, off the loop; then announce the version.

        Raises:
            InfraError: the object store has no room, or failed.
            DeadlineError: the object store did not take a chunk, or the store actor did not answer, within `call_s`.
        """
        checksums = await anyio.to_thread.run_sync(group_checksums, tensors)
        refs = [await self._put(chunk, version) for chunk in _chunks(tensors)]
        publication = Publication(
            version=version,
            step=step,
            num_bytes=sum(array.nbytes for array in tensors.values()),
            checksums=checksums,
            validate=validate,
            published_at_s=time.time(),
        )
        await _answer(self._store.publish.remote(publication, refs), self._call_s, f"publishing version {version}")
        return publication

    async def _put(self, chunk: Mapping[str, NDArray[Any]], version: int) -> ray.ObjectRef:
        size = sum(array.nbytes for array in chunk.values())
        room = f"{HANDED_OUT_KEPT + 2} versions must fit; raise ray.object_store_memory_bytes"
        try:
            with anyio.fail_after(self._call_s):
                # Nothing can interrupt a put: on its thread it may go on, but nobody waits for it any more.
                return await anyio.to_thread.run_sync(ray.put, chunk, abandon_on_cancel=True)
        except TimeoutError as error:
            raise DeadlineError(
                f"the object store did not take {size} bytes of version {version} within {self._call_s:g} s: {room}, "
                "or timeouts.call_s if the machine is overloaded"
            ) from error
        except ray.exceptions.ObjectStoreFullError as error:
            raise InfraError.wrap(
                f"the object store has no room for {size} bytes of version {version}: {room}", error
            ) from error
        except ray.exceptions.RayError as error:
            raise InfraError.wrap(
                f"the object store could not take {size} bytes of version {version}; look at the disk it spills to and "
                "at the node's Ray logs",
                error,
            ) from error


class ObjectStoreFeed:
    """The Rollouter's side (`ports.WeightFeed`)."""

    def __init__(self, store: ray.actor.ActorHandle, *, call_s: float) -> None:
        self._store = store
        self._call_s = call_s

    async def latest(self) -> Publication | None:
        return await _answer(self._store.latest.remote(), self._call_s, "asking for the newest version")

    async def wait_newer(self, version: int, *, timeout_s: float) -> Publication | None:
        """The newest publication above `version`, or None if none came in `timeout_s`."""
        return await _answer(
            self._store.wait_newer.remote(version, timeout_s),
            self._call_s + timeout_s,
            f"waiting for a version above {version}",
        )


async def _answer(ref: Any, timeout_s: float, what: str) -> Any:
    """The actor's answer, its failures as ours."""
    try:
        with anyio.fail_after(timeout_s):
            return await ref
    except TimeoutError as error:
        raise DeadlineError(f"{what}: the weight store did not answer within {timeout_s:g} s") from error
    except ray.exceptions.RayTaskError as error:
        ours = isinstance(error.cause, InfraError | BugError)
        raise (error.cause if ours else InfraError.wrap(what, error)) from None
    except ray.exceptions.RayError as error:
        raise InfraError.wrap(f"{what}: the weight store is gone", error) from error


def _chunks(tensors: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """Consecutive tensors packed into dicts of about `CHUNK_BYTES`; a tensor is never split."""
    chunks: list[dict[str, NDArray[Any]]] = [{}]
    size = 0
    for name, array in tensors.items():
        if chunks[-1] and size + array.nbytes > CHUNK_BYTES:
            chunks.append({})
            size = 0
        chunks[-1][name] = np.ascontiguousarray(array)
        size += array.nbytes
    return chunks
