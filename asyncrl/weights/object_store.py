"""Weights through Ray's object store: the Trainer puts a version there, every replica maps it from there.

The actor holds references only; the bytes never pass through its mailbox. Ray ties an object's life to the process that
put it, so a version lives as long as the Trainer that published it; a restarted Trainer publishes its checkpoint anew,
in a lineage of its own. A restarted store knows nothing until the Trainer has told it again (`republish`).

The store also keeps what replicas report of themselves, for whoever supervises the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.failures import BugError, DeadlineError, FencedError, InfraError
from asyncrl.health.processes import OwnHealth
from asyncrl.ports import Edition, Publication, ReplicaReport, StoreStatus
from asyncrl.weights.checksums import group_checksums
from asyncrl.weights.replica_reports import ReplicaReports

STORE_NAME = "weight_store"
HANDED_OUT_KEPT = 2
"""Versions that were handed out and are kept besides the newest: a replica may still be reading them."""
CHUNK_BYTES = 256 << 20
"""Objects of about this size: large enough to be cheap, small enough to be pulled in parallel between nodes."""
PARKED_CALLERS = 1000
RETRY_S = 0.2
"""Between two tries to reach a store that restarts."""


class WeightStoreActor:
    """Which versions exist, and the references to their bytes. Everything runs on the actor's own event loop."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._health = OwnHealth("store") if ray.is_initialized() else None
        self._versions: dict[Edition, tuple[Publication, list[ray.ObjectRef]]] = {}
        self._handed_out: list[Edition] = []
        self._told: Edition | None = None
        """Newest edition that somebody who waited for it has."""
        self._changed = asyncio.Condition()
        self._informed = not ray.get_runtime_context().was_current_actor_reconstructed
        """Whether there being no version means that none was published; a restarted store must be told first."""
        self._replicas = ReplicaReports()

    async def publish(self, publication: Publication, refs: Sequence[ray.ObjectRef], again: bool = False) -> None:
        """Make a version the newest. One that nobody has `heard_of` leaves its wish for validation to this one,
        unless this one comes from further back: training then gets to that version once more.

        Args:
            publication: What it is.
            refs: Its chunks.
            again: The publisher cannot know whether an earlier call has arrived: if it has, nothing happens.

        Raises:
            BugError: it is not newer than the newest one of its lineage.
            FencedError: training has gone on in a newer lineage.
        """
        async with self._changed:
            self._informed = True
            edition = publication.edition
            if (newest := self._newest()) is not None:
                if again and edition.lineage == newest.lineage and edition <= newest:
                    return
                if edition.lineage < newest.lineage:
                    raise FencedError(
                        f"version {edition.version} published by a Trainer of lineage {edition.lineage}, which another "
                        f"one of lineage {newest.lineage} has replaced"
                    )
                if edition <= newest:
                    raise BugError(
                        f"version {edition.version} published after version {newest.version}: "
                        "versions must ascend, or replicas would never fetch it"
                    )
                before = self._versions[newest][0]
                untold = self._told is None or newest > self._told
                if before.validate and untold and newest.version <= edition.version:
                    publication = replace(publication, validate=True)
            self._versions[edition] = (publication, list(refs))
            self._forget()
            self._changed.notify_all()

    async def nothing_published(self) -> None:
        """The publisher has published nothing: that the store holds none is true, and not for having forgotten it."""
        async with self._changed:
            self._informed = True
            self._changed.notify_all()

    async def latest(self) -> Publication | None:
        """The newest publication; it stays fetchable until `HANDED_OUT_KEPT` more have been handed out."""
        newest = self._newest()
        if newest is None:
            return None
        if newest not in self._handed_out:
            self._handed_out = [*self._handed_out, newest][-HANDED_OUT_KEPT:]
            self._forget()
        return self._versions[newest][0]

    async def wait_newer(self, edition: Edition, timeout_s: float) -> Publication | None:
        """The newest publication above `edition`; None if none came in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: (newest := self._newest()) is not None and newest > edition)
        except TimeoutError:
            return None
        return await self.latest()

    async def heard_of(self, edition: Edition) -> None:
        """The answer of `wait_newer` has arrived. Before, whoever waited may have died without it."""
        self._told = edition if self._told is None else max(self._told, edition)

    async def start_with(self, timeout_s: float, lost: Edition | None = None) -> Publication | None:
        """What a replica that starts shall serve: the newest publication, or None if nothing was ever published.

        Args:
            timeout_s: For a restarted store to be told, or for something newer than `lost`.
            lost: What it could not fetch: it is told again only when nothing newer came in time.

        Raises:
            DeadlineError: the store was not told in time.
        """

        def settled() -> bool:
            newest = self._newest()
            return newest > lost if newest is not None and lost is not None else self._informed

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            if not self._informed:
                raise DeadlineError("the weight store has restarted and nobody has published to it since") from None
        return await self.latest()

    async def tensors(self, edition: Edition) -> list[ray.ObjectRef]:
        """References to the chunks of a version; each is a dict of parameter name to array.

        Raises:
            InfraError: the version is no longer (or not yet) there.
        """
        if edition not in self._versions:
            held = ", ".join(map(_name, sorted(self._versions))) or "none"
            raise InfraError(f"the weight store does not hold version {_name(edition)} (it holds: {held})")
        return self._versions[edition][1]

    async def report(self, report: ReplicaReport) -> Edition | None:
        """What a replica says of itself. Returns the newest edition."""
        self._replicas.arrived(report, self._wall_clock())
        return self._newest()

    async def status(self) -> StoreStatus:
        now = self._wall_clock()
        health = self._health.tell() if self._health is not None else None
        return StoreStatus(os.getpid(), self._newest(), self._replicas.told(now), self._informed, now, health)

    def _newest(self) -> Edition | None:
        return max(self._versions, default=None)

    def _forget(self) -> None:
        for edition in self._versions.keys() - {self._newest(), *self._handed_out}:
            del self._versions[edition]


def start_store(namespace: str, *, max_restarts: int = 0) -> ray.actor.ActorHandle:
    """Create the run's store actor, on the caller's node, which the run cannot do without anyhow.

    Args:
        namespace: The run's Ray namespace.
        max_restarts: How often Ray may start it again; the handle stays good.
    """
    return (
        ray.remote(WeightStoreActor)
        .options(
            name=STORE_NAME,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=PARKED_CALLERS,
            max_restarts=max_restarts,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        )
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

    def __init__(self, store: ray.actor.ActorHandle, *, call_s: float, lineage: int = 0) -> None:
        self._store = store
        self._call_s = call_s
        self._lineage = lineage
        self._last: tuple[Publication, list[ray.ObjectRef]] | None = None
        """For `republish`: the references keep its bytes even when the store has lost them."""

    async def publish(
        self, version: int, step: int, tensors: Mapping[str, NDArray[Any]], *, validate: bool
    ) -> Publication:
        """Copy `tensors` into the object store, once, off the loop; then announce the version.

        Raises:
            InfraError: the object store has no room, or failed.
            DeadlineError: the object store did not take a chunk, or the store actor did not answer, within `call_s`.
            FencedError: training has gone on in a newer lineage.
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
            lineage=self._lineage,
        )
        await _ask(
            lambda again: self._store.publish.remote(publication, refs, again),
            self._call_s,
            f"publishing version {version}",
        )
        self._last = (publication, refs)
        return publication

    async def republish(self) -> None:
        """Offer the last publication again; a store that still has it ignores that.

        Raises:
            DeadlineError: the store actor did not answer within `call_s`.
            FencedError: training has gone on in a newer lineage.
        """
        last = self._last
        if last is None and self._lineage > 0:
            return  # A Trainer that goes on from a checkpoint is about to publish that: the store is told soon.
        if last is None:
            await _ask(lambda _: self._store.nothing_published.remote(), self._call_s, "publishing again")
            return
        what = f"publishing version {last[0].version} again"
        await _ask(lambda _: self._store.publish.remote(*last, True), self._call_s, what)

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
        """The newest publication, or None if nothing was ever published. A store that was restarted is told before it
        answers: what it has forgotten may be the last version of all.

        Raises:
            DeadlineError: it was not, within `call_s`.
        """
        until = anyio.current_time() + self._call_s
        newest: Publication | None = await _ask(
            lambda _: self._store.start_with.remote(max(0.0, until - anyio.current_time())),
            2 * self._call_s,
            "asking for the newest version",
        )
        return newest

    async def wait_newer(self, edition: Edition, *, timeout_s: float) -> Publication | None:
        """The newest publication above `edition`, or None if none came in `timeout_s`."""
        until = anyio.current_time() + timeout_s
        newest: Publication | None = await _ask(
            lambda _: self._store.wait_newer.remote(edition, max(0.0, until - anyio.current_time())),
            self._call_s + timeout_s,
            "waiting for a newer version",
        )
        if newest is not None:
            # Nobody waits for that: if it is lost, a validation is made once more at worst.
            self._store.heard_of.remote(newest.edition)
        return newest


async def _ask(call: Callable[[bool], Any], timeout_s: float, what: str) -> Any:
    """`_answer` to a call that is made again when the actor has died meanwhile, as long as it may be restarting.

    Args:
        call: Makes the call; told whether an earlier one may have arrived.
        timeout_s: For all tries.
        what: What is asked, for messages.
    """
    until = anyio.current_time() + timeout_s
    again = False
    while True:
        left_s = until - anyio.current_time()
        try:
            return await _answer(call(again), left_s, what)
        except _StoreGoneError:
            if anyio.current_time() + RETRY_S >= until:
                raise
        again = True
        await anyio.sleep(RETRY_S)


class _StoreGoneError(InfraError):
    """The actor is dead, or restarts."""


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
    except ray.exceptions.RayActorError as error:
        raise _StoreGoneError.wrap(f"{what}: the weight store is gone", error) from error
    except ray.exceptions.RayError as error:
        raise InfraError.wrap(f"{what}: the weight store cannot be reached", error) from error


def _name(edition: Edition) -> str:
    return f"{edition.version} of lineage {edition.lineage}" if edition.lineage else str(edition.version)


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
