"""The weight store: the Trainer publishes versions, and every replica maps them.

The actor holds references only; the bytes never pass through its mailbox. Ray ties an object's life to the process that
put it, so a version exists as long as the Trainer that published it; a restarted Trainer publishes its checkpoint
again, in a new lineage. A restarted store is empty until the Trainer publishes again (`republish`).

The store also collects the replicas' reports about themselves, for the driver.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import anyio
import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.config.sections.run import BUCKET_BYTES
from asyncrl.core.failures import BugError, ConfigError, DeadlineError, FencedError, InfraError
from asyncrl.core.ports import (
    GpuTurn,
    Publication,
    ReplicaReport,
    StoreStatus,
    WantedReplicas,
    WeightBucket,
    WeightsProbe,
    WeightsVersion,
)
from asyncrl.profiling import PROFILING_OFF, ProfilerSettings
from asyncrl.profiling.process_usage import ProcessMonitor
from asyncrl.weights.broadcast import BroadcastRelay
from asyncrl.weights.checksums import WeightChecksums
from asyncrl.weights.deltas import DeltaChunk, DeltaWriter
from asyncrl.weights.disk import DiskChunk, stored_chunks
from asyncrl.weights.gpu_turns import GpuTurnRelay
from asyncrl.weights.transport import IN_RAY, OwnChunk, StoredChunk

logger = logging.getLogger(__name__)

ChunkHandle: TypeAlias = "ray.ObjectRef | StoredChunk"
STORE_NAME = "weight_store"
NUM_KEPT_VERSIONS = 2
"""Versions kept besides the newest because a replica may still be reading them."""
PARKED_CALLERS = 1000
KILLED_S = 10.0
"""Time after which the store of another run is not taken for that of a killed driver, which Ray ends within seconds."""
RETRY_S = 0.2
"""Pause between two tries to reach a store that restarts."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """What the replicas have to know of the run whose versions they serve."""

    name: str = ""
    """The run directory and the machine of the driver, for messages."""
    namespace: str = ""
    """Ray namespace of the run's actors."""
    verify: Literal["every", "first", "off"] = "every"
    max_mismatch_kl: float | None = None
    adapters: bool = False
    """Whether versions consist of LoRA adapters."""
    profiler: ProfilerSettings = PROFILING_OFF
    """The profiler settings of the replicas, which send their events with their answers."""
    agent_s: float = math.inf
    """`rollout.agent.timeout_s`: the time within which a request of an agent is answered."""
    engines: Any = None
    """If the run attaches to deployed replicas: what it needs of them (`rollouter.serving.options.ReplicaFacts`)."""

    @classmethod
    def of(cls, config: Config, *, name: str, namespace: str, engines: Any = None) -> Self:
        """Return the values of a run with this configuration."""
        sync = config.weight_sync
        return cls(
            name,
            namespace,
            sync.verify,
            sync.max_mismatch_kl,
            config.syncs_adapters,
            ProfilerSettings.of(config.profiler, None),
            config.rollout.agent.timeout_s,
            engines,
        )


class WeightStoreActor(GpuTurnRelay, BroadcastRelay):
    """Keeps the published versions and the references to their bytes. Everything runs on the actor's event loop."""

    def __init__(self, served: ServedRun | None = None, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._served = served or ServedRun()
        self._wall_clock = wall_clock
        self._health = ProcessMonitor("store") if ray.is_initialized() else None
        self._versions: dict[WeightsVersion, tuple[Publication, list[ChunkHandle]]] = {}
        self._handed_out: list[WeightsVersion] = []
        self._delivered: WeightsVersion | None = None
        """Newest weights version whose publication has reached the Rollouter."""
        self._changed = asyncio.Condition()
        self._knows_newest = not ray.get_runtime_context().was_current_actor_reconstructed
        """Whether an empty store means that nothing was published, which is unknown after a restart."""
        if not self._knows_newest:
            self._turn = None
        self._replicas = ReplicaReports()
        self._wanted_replicas: WantedReplicas | None = None

    async def served_run(self) -> ServedRun:
        """Return the run to which this store belongs."""
        return self._served

    async def publish(self, publication: Publication, refs: Sequence[ChunkHandle], again: bool = False) -> None:
        """Make a version the newest.

        If the previous newest version has not reached the Rollouter (`acknowledge`), this version takes over its
        request for validation, except after a rewind to a lower version: training reaches the previous one again.

        Args:
            publication: description of the version.
            refs: references to its chunks.
            again: whether an earlier call may have arrived; if it has, nothing happens.

        Raises:
            BugError: it is not newer than the newest one of its lineage.
            FencedError: training continues in a newer lineage.
        """
        async with self._changed:
            self._knows_newest = True
            weights_version = publication.weights_version
            if (newest := self._newest()) is not None:
                if again and weights_version.lineage == newest.lineage and weights_version <= newest:
                    return
                if weights_version.lineage < newest.lineage:
                    raise FencedError(
                        f"version {weights_version.version} was published by a Trainer of lineage "
                        f"{weights_version.lineage}, which a Trainer of lineage {newest.lineage} has replaced"
                    )
                if weights_version <= newest:
                    raise BugError(
                        f"version {weights_version.version} published after version {newest.version}: "
                        "versions must ascend, or replicas would never fetch it"
                    )
                before = self._versions[newest][0]
                undelivered = self._delivered is None or newest > self._delivered
                if before.validate and undelivered and newest.version <= weights_version.version:
                    publication = replace(publication, validate=True)
            self._versions[weights_version] = (publication, list(refs))
            self._begin_lineage(weights_version.lineage)
            self._forget()
            self._changed.notify_all()

    async def nothing_published(self) -> None:
        """Record that the publisher has published nothing, so an empty store is up to date."""
        async with self._changed:
            self._knows_newest = True
            self._changed.notify_all()

    async def latest(self) -> Publication | None:
        """Return the newest publication; it stays available until `NUM_KEPT_VERSIONS` more have been handed out."""
        newest = self._newest()
        if newest is None:
            return None
        if newest not in self._handed_out:
            self._handed_out = [*self._handed_out, newest][-NUM_KEPT_VERSIONS:]
            self._forget()
        return self._versions[newest][0]

    async def wait_newer(self, weights_version: WeightsVersion, timeout_s: float) -> Publication | None:
        """Return the newest publication above `weights_version`; None: there was none in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: (newest := self._newest()) is not None and newest > weights_version
                )
        except TimeoutError:
            return None
        return await self.latest()

    async def acknowledge(self, weights_version: WeightsVersion) -> None:
        """Record that the answer of `wait_newer` has arrived."""
        self._delivered = weights_version if self._delivered is None else max(self._delivered, weights_version)

    async def start_with(self, timeout_s: float, lost: WeightsVersion | None = None) -> Publication | None:
        """Return what a starting replica serves: the newest publication, or None if nothing was ever published.

        Args:
            timeout_s: time limit for a publication to a restarted store, or for one newer than `lost`.
            lost: the version that it could not fetch, which is returned again only if no newer one came in time.

        Raises:
            DeadlineError: nothing was published to a restarted store in time.
        """

        def settled() -> bool:
            newest = self._newest()
            return newest > lost if newest is not None and lost is not None else self._knows_newest

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            if not self._knows_newest:
                raise DeadlineError(
                    "the weight store has restarted, and nothing has been published to it since"
                ) from None
        return await self.latest()

    async def tensors(self, weights_version: WeightsVersion) -> list[ChunkHandle]:
        """Return references to the chunks of a version; each is a dict of parameter name to array.

        Raises:
            InfraError: the store no longer has the version, or does not have it yet.
        """
        if weights_version not in self._versions:
            held = ", ".join(map(_name, sorted(self._versions))) or "none"
            raise InfraError(f"the weight store does not hold version {_name(weights_version)} (it holds: {held})")
        return self._versions[weights_version][1]

    async def report(self, report: ReplicaReport) -> WantedReplicas | None:
        """Record a replica's report about itself. Return the driver's last decision about the number of replicas
        (`want_replicas`); None: there is none."""
        self._replicas.add(report, self._wall_clock())
        return self._wanted_replicas

    async def want_replicas(self, wanted: WantedReplicas) -> None:
        """Answer this decision to the replicas' reports from now on."""
        self._wanted_replicas = wanted

    async def status(self) -> StoreStatus:
        now = self._wall_clock()
        health = self._health.measure() if self._health is not None else None
        replicas = self._replicas.recent(now)
        return StoreStatus(
            os.getpid(),
            self._newest(),
            replicas,
            self._knows_newest,
            now,
            health,
            self._wanted_replicas,
            self.fallback,
        )

    def _newest(self) -> WeightsVersion | None:
        return max(self._versions, default=None)

    def _forget(self) -> None:
        for weights_version in self._versions.keys() - {self._newest(), *self._handed_out}:
            del self._versions[weights_version]


def start_store(namespace: str, served: ServedRun | None = None, *, max_restarts: int = 0) -> ray.actor.ActorHandle:
    """Create the run's store actor on the caller's node, because the run cannot continue without that node anyway.

    Args:
        namespace: The Ray namespace in which the replicas look for the store. It ends with the driver that created it.
        served: The run, for replicas that ask.
        max_restarts: How often Ray may start it again; the handle stays valid.

    Raises:
        ValueError: the namespace has a store.
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
        .remote(served)
    )


async def claim_store(namespace: str, served: ServedRun, *, max_restarts: int, limit_s: float) -> ray.actor.ActorHandle:
    """Create the run's store in a namespace of which other runs may have used the replicas. Only one run at a time can.

    Ray ends the store of a driver that has died, which may take some seconds.

    Raises:
        ConfigError: another run has had the store for `KILLED_S`.
        DeadlineError: within `limit_s`, the store of an earlier driver of this run has not ended, or Ray has created
            none.
    """
    start = partial(start_store, namespace, served, max_restarts=max_restarts)
    refuse_at = anyio.current_time() + min(limit_s / 2, KILLED_S)
    is_taken = False
    owner: ServedRun | None = None
    with anyio.move_on_after(limit_s):
        while True:
            try:
                return await anyio.to_thread.run_sync(start, abandon_on_cancel=True)
            except ValueError:
                is_taken = True
            except GetTimeoutError:
                pass  # Ray's control process is slow
            with suppress(InfraError, GetTimeoutError):  # it is ending, or Ray's control process is slow
                store = await anyio.to_thread.run_sync(find_store, namespace, abandon_on_cancel=True)
                if store is not None:
                    owner = await answer_of(store.served_run.remote(), limit_s, "asking for the attached run")
            if owner is not None and owner.name != served.name and anyio.current_time() >= refuse_at:
                raise ConfigError(
                    f"rollout.attach: the run {owner.name} is attached to these rollout servers, which can serve "
                    "the weights of one run only; wait for its end or stop it, or attach to another application"
                )
            await anyio.sleep(RETRY_S)
    if not is_taken:
        raise DeadlineError(f"Ray has not created the weight store within {limit_s:g} s (timeouts.start_s)")
    if owner is not None:
        raise DeadlineError(
            f"an earlier driver of this run ({served.name}) still holds these rollout servers after {limit_s:g} s "
            "(timeouts.start_s), although its run directory is not locked any more: it may hang while it ends"
        )
    raise DeadlineError(
        f"the weight store of another run in Ray namespace {namespace} has not answered for {limit_s:g} s "
        "(timeouts.start_s), so nothing is known of that run, which holds these rollout servers: end its "
        "driver, or attach to another application"
    )


def find_store(namespace: str) -> ray.actor.ActorHandle | None:
    """Return the run's store, or None if there is none (`asyncrl serve` has none)."""
    try:
        return ray.get_actor(STORE_NAME, namespace=namespace)
    except ValueError:
        return None


async def attached_run(namespace: str, *, limit_s: float) -> tuple[ray.actor.ActorHandle, ServedRun] | None:
    """Return the weight store in a namespace and the run to which it belongs, or None if there is no run.

    Raises:
        InfraError: the store has not answered within `limit_s`, for example because it restarts.
    """
    try:
        with anyio.fail_after(limit_s):
            while (store := await anyio.to_thread.run_sync(find_store, namespace, abandon_on_cancel=True)) is not None:
                with suppress(_StoreGoneError):  # it ends, or it restarts
                    return store, await answer_of(store.served_run.remote(), limit_s, "asking for the attached run")
                await anyio.sleep(RETRY_S)
    except TimeoutError as error:
        raise DeadlineError(
            f"asking for the attached run: the weight store in Ray namespace {namespace} did not answer within "
            f"{limit_s:g} s"
        ) from error
    return None


class ObjectStorePublisher:
    """The Trainer's access to the store (`ports.WeightPublisher`). It is pickled to the process that has the weights.
    Use it on one event loop."""

    def __init__(
        self,
        store: ray.actor.ActorHandle,
        *,
        call_s: float,
        lineage: int = 0,
        backend: str = "object_store",
        directory: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        max_deltas: int = 0,
    ) -> None:
        """
        Args:
            backend: `weight_sync.backend`.
            directory: where the backend `disk` keeps its files.
            max_deltas: `weight_sync.max_deltas`, for the backend `disk`.
        """
        self.bucket_bytes = bucket_bytes
        self._store = store
        self._call_s = call_s
        self._lineage = lineage
        self._backend = backend
        self._directory = directory
        self._unusable = f"weight_sync.dir: {directory} cannot be used"
        self._deltas = DeltaWriter(directory, max_deltas) if max_deltas else None
        self._is_sending = False
        """Whether a thread of this process takes part in broadcasts (`weight_sync.backend: nccl`)."""
        self._stored: list[list[OwnChunk | DiskChunk]] = []
        """What the last publications need outside of the object store."""
        self._last: tuple[Publication, list[ChunkHandle]] | None = None
        """Last publication, for `republish`; the references keep the bytes alive even if the store has lost them."""

    def begin(self, version: int) -> ObjectStoreUpload:
        """See `ports.WeightPublisher`."""
        return ObjectStoreUpload(self, version)

    async def announce(self, publication: Publication, refs: Sequence[ChunkHandle]) -> Publication:
        """Make a version the newest one, now that all of its chunks are stored. Return its final description.

        Raises:
            DeadlineError: the store actor did not answer within `call_s`.
            FencedError: training continues in a newer lineage.
        """
        publication = replace(publication, published_at_s=time.time(), lineage=self._lineage)
        await _ask(
            lambda again: self._store.publish.remote(publication, refs, again),
            self._call_s,
            f"publishing version {publication.version}",
        )
        self._last = (publication, list(refs))
        if self._backend == "nccl" and not self._is_sending:
            self._is_sending = True
            threading.Thread(target=self._send_broadcasts, name="broadcast", daemon=True).start()
        await self._drop_old(refs)
        return publication

    def _send_broadcasts(self) -> None:
        """Take part in broadcasts, on a thread of this process. If this ends, versions go through the object store."""
        try:
            from asyncrl.weights.nccl import BroadcastSender  # it imports vLLM, which takes seconds

            BroadcastSender(self._store, lineage=self._lineage, bucket_bytes=self.bucket_bytes).run()
        except FencedError as error:
            logger.info("versions are no longer broadcast from this process: %s", error)
        except Exception as error:
            logger.exception("versions are no longer broadcast to the engines' GPUs")
            lines = str(error).splitlines() or [""]
            problem = f"rank 0 of the Trainer: {type(error).__name__}: {lines[0]}"
            self._store.end_rounds.remote(self._lineage, problem)

    async def republish(self) -> None:
        """Publish the last publication again; a store that still has it ignores this.

        Raises:
            DeadlineError: the store actor did not answer within `call_s`.
            FencedError: training continues in a newer lineage.
        """
        last = self._last
        if last is None and self._lineage > 0:
            return  # A Trainer that resumes from a checkpoint publishes it soon.
        if last is None:
            await _ask(lambda _: self._store.nothing_published.remote(), self._call_s, "publishing again")
            return
        what = f"publishing version {last[0].version} again"
        await _ask(lambda _: self._store.publish.remote(*last, True), self._call_s, what)

    async def _drop_old(self, refs: Sequence[ChunkHandle]) -> None:
        """Free what only versions need that the store has forgotten, as Ray does for its own objects."""
        stored = [ref for ref in refs if isinstance(ref, OwnChunk | DiskChunk)]
        stored += [file for ref in refs if isinstance(ref, DeltaChunk) for file in ref.files]
        self._stored.append(stored)
        while len(self._stored) > NUM_KEPT_VERSIONS + 2:
            forgotten = self._stored.pop(0)
            needed = {chunk.url for kept in self._stored for chunk in kept if isinstance(chunk, DiskChunk)}
            for chunk in forgotten:
                if not (isinstance(chunk, DiskChunk) and chunk.url in needed):
                    await self._in_thread(f"{self._backend} did not free a chunk of an old version", chunk.drop)

    async def _in_thread(self, problem: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a backend outside of the object store.

        Raises:
            InfraError: the filesystem failed.
            DeadlineError: it did not answer within `call_s`.
            UserCodeError: the user's class failed.
        """
        try:
            with _deadline(problem, self._call_s):
                return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
        except OSError as error:
            raise InfraError.wrap(f"{problem}: {error}", error) from error

    async def collect_leftovers(self) -> None:
        """Take over the files of a Trainer that has died. They are deleted in time, as engines may still read them."""
        if self._backend == "disk" and not self._stored:
            self._stored.append([*await self._in_thread(self._unusable, stored_chunks, self._directory)])

    async def put(self, bucket: WeightBucket, version: int) -> ChunkHandle:
        """Copy a bucket into the object store in a thread, or to where the backend keeps it, once for all replicas.

        Raises:
            InfraError: the object store or the filesystem has no room, or failed.
            DeadlineError: it did not take the bucket within `call_s`.
            UserCodeError: the user's class failed.
        """
        size = sum(array.nbytes for array in bucket.values())
        if self._deltas is not None:
            return await self._in_thread(self._unusable, self._deltas.put, bucket)
        if self._backend == "disk":
            return await self._in_thread(self._unusable, DiskChunk.put, self._directory, bucket)
        if self._backend not in IN_RAY:
            problem = f"{self._backend} did not take {size} bytes of version {version}"
            return await self._in_thread(problem, OwnChunk.put, self._backend, bucket)
        room = f"{NUM_KEPT_VERSIONS + 2} versions must fit; raise ray.object_store_memory_bytes"
        try:
            with anyio.fail_after(self._call_s):
                # A put cannot be interrupted: it may continue on its thread after the deadline.
                return await anyio.to_thread.run_sync(ray.put, bucket, abandon_on_cancel=True)
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
                f"the object store could not take {size} bytes of version {version}; check the disk it spills to and "
                f"the node's Ray logs",
                error,
            ) from error


class ObjectStoreUpload:
    """A version on its way to the store (`ports.WeightUpload`)."""

    def __init__(self, publisher: ObjectStorePublisher, version: int) -> None:
        self._publisher = publisher
        self._version = version
        self._chunks: list[ChunkHandle] = []
        self._checksums = WeightChecksums()
        self._num_bytes = self._sent_bytes = 0

    async def put(self, bucket: WeightBucket) -> int:
        """Store a bucket and return the bytes that this took. Raises as `ObjectStorePublisher.put`."""
        if not self._chunks:
            await self._publisher.collect_leftovers()
        chunk = await self._publisher.put(bucket, self._version)
        self._chunks.append(chunk)
        await anyio.to_thread.run_sync(self._checksums.add, bucket)
        num_bytes = sum(array.nbytes for array in bucket.values())
        self._num_bytes += num_bytes
        sent_bytes = chunk.sent_bytes if isinstance(chunk, DeltaChunk) else num_bytes
        self._sent_bytes += sent_bytes
        return sent_bytes

    async def publish(self, step: int, *, validate: bool, probe: WeightsProbe | None = None) -> Publication:
        """Announce the version. Raises as `ObjectStorePublisher.announce`."""
        checksums = self._checksums.by_group()
        publication = Publication(
            self._version, step, self._num_bytes, checksums, probe, validate=validate, sent_bytes=self._sent_bytes
        )
        return await self._publisher.announce(publication, self._chunks)


@contextmanager
def _deadline(problem: str, limit_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(limit_s):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"{problem} within timeouts.call_s = {limit_s:g} s") from error


class ObjectStoreFeed:
    """The Rollouter's access to the store (`ports.WeightFeed`)."""

    def __init__(self, store: ray.actor.ActorHandle, *, call_s: float) -> None:
        self._store = store
        self._call_s = call_s

    async def latest(self) -> Publication | None:
        """Return the newest publication, or None if nothing was ever published.

        A restarted store answers only after the next publication, because it has lost the newest one.

        Raises:
            DeadlineError: the store did not answer within `call_s`.
        """
        until = anyio.current_time() + self._call_s
        newest: Publication | None = await _ask(
            lambda _: self._store.start_with.remote(max(0.0, until - anyio.current_time())),
            2 * self._call_s,
            "asking for the newest version",
        )
        return newest

    async def wait_newer(self, weights_version: WeightsVersion, *, timeout_s: float) -> Publication | None:
        """Return the newest publication above `weights_version`, or None if there was none within `timeout_s`."""
        until = anyio.current_time() + timeout_s
        newest: Publication | None = await _ask(
            lambda _: self._store.wait_newer.remote(weights_version, max(0.0, until - anyio.current_time())),
            self._call_s + timeout_s,
            "waiting for a newer version",
        )
        if newest is not None:
            # Not awaited: if the call is lost, at worst one validation is repeated.
            self._store.acknowledge.remote(newest.weights_version)
        return newest


class StoreGpuTurns:
    """The access of both sides to the turns on shared GPUs (`ports.GpuTurns`)."""

    def __init__(self, store: ray.actor.ActorHandle, *, call_s: float, lineage: int = 0) -> None:
        """`lineage`: that of the Trainer."""
        self._store = store
        self._call_s = call_s
        self._lineage = lineage

    async def take(self) -> None:
        limit_s = self._call_s
        while not await _ask(
            lambda _: self._store.want_gpus.remote(self._lineage, limit_s), 2 * limit_s, "waiting for the GPUs"
        ):
            pass

    async def give_back(self) -> None:
        await _ask(lambda _: self._store.return_gpus.remote(self._lineage), self._call_s, "returning the GPUs")

    async def wait(self, *turns: GpuTurn, timeout_s: float) -> GpuTurn | None:
        until = anyio.current_time() + timeout_s
        turn: GpuTurn | None = await _ask(
            lambda _: self._store.wait_gpu_turn.remote(turns, max(0.0, until - anyio.current_time())),
            self._call_s + timeout_s,
            "waiting for the turn on the GPUs",
        )
        return turn

    async def grant(self) -> None:
        await _ask(lambda _: self._store.grant_gpus.remote(), self._call_s, "granting the GPUs")


async def _ask(call: Callable[[bool], Any], timeout_s: float, what: str) -> Any:
    """Call the actor, and repeat the call if the actor has died and may be restarting.

    Args:
        call: makes the call; its argument is whether an earlier call may have arrived.
        timeout_s: time limit for all tries together.
        what: description of the call for messages.
    """
    until = anyio.current_time() + timeout_s
    again = False
    while True:
        left_s = until - anyio.current_time()
        try:
            return await answer_of(call(again), left_s, what)
        except _StoreGoneError:
            if anyio.current_time() + RETRY_S >= until:
                raise
        again = True
        await anyio.sleep(RETRY_S)


class _StoreGoneError(InfraError):
    """The actor is dead or is being restarted."""


async def answer_of(ref: Any, timeout_s: float, what: str) -> Any:
    """Await the actor's answer and convert its failures."""
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


def _name(weights_version: WeightsVersion) -> str:
    return (
        f"{weights_version.version} of lineage {weights_version.lineage}"
        if weights_version.lineage
        else str(weights_version.version)
    )


FORGET_REPLICA_S = 600.0
"""Reports older than this are dropped."""


class ReplicaReports:
    """The last report of each replica. All times are on the caller's wall clock."""

    def __init__(self) -> None:
        self._last: dict[str, ReplicaReport] = {}

    def add(self, report: ReplicaReport, now: float) -> None:
        """Store the replica's last report, with its times converted to this clock."""
        self._last[report.replica] = _shifted(report, now - report.reported_at)

    def recent(self, now: float) -> tuple[ReplicaReport, ...]:
        """Return the reports of the last minutes, oldest first."""
        self._last = {
            name: report for name, report in self._last.items() if now - report.reported_at <= FORGET_REPLICA_S
        }
        return tuple(sorted(self._last.values(), key=lambda report: report.reported_at))


def on_clock(status: StoreStatus, now: float) -> StoreStatus:
    """Convert the times of a status that has just arrived to the clock whose current time is `now`."""
    shift_s = now - status.at
    return replace(status, at=now, replicas=tuple(_shifted(report, shift_s) for report in status.replicas))


def _shifted(report: ReplicaReport, seconds: float) -> ReplicaReport:
    return replace(report, reported_at=report.reported_at + seconds, phase_since=report.phase_since + seconds)
