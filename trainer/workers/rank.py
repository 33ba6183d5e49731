"""One process of a group, which runs the workers of its roles on one thread and returns an `CallResult` to each call.

This module doesn't use Ray: `trainer.workers.processes` makes a `Rank` an actor.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist

from asyncrl.config.sections.base import Dtype
from asyncrl.core.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.core.ports import WeightBucket, WeightPublisher, WeightsProbe, WeightUpload
from asyncrl.profiling import profile
from asyncrl.profiling.process_usage import ProcessHealth, ProcessMonitor
from asyncrl.weights.transport import in_buckets
from trainer.engines.base import EngineSpec, Layout
from trainer.engines.dist import BACKENDS, gpu_memory, guarded, leave
from trainer.workers.outcomes import CallResult
from trainer.workers.placement import Role
from trainer.workers.tracing import NO_PROFILING, RankProfiling, Tracer, set_up_profiling
from trainer.workers.worker import PublishedVersion, TrainingWorker

T = TypeVar("T")


class Rendezvous(NamedTuple):
    """The address at which the ranks of a group form a process group."""

    rank: int
    world_size: int
    local_rank: int
    """On GPUs, the index of the rank's GPU among those that the process sees. On CPU, the number of earlier ranks on
    the same machine."""
    host: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that torchrun sets."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


class Rank:
    """Runs calls one at a time, in order. `health`, `wait_forever`, `wait_for_files` and `republish` run
    concurrently on the event loop, even while the rank computes.

    An answer contains the events of its call, unless this process writes events itself.

    Args:
        publisher: receives the weights in `publish` on rank 0.
        group: name of the group, for traces.
    """

    def __init__(
        self,
        publisher: WeightPublisher | None = None,
        profiling: RankProfiling = NO_PROFILING,
        group: str = "actor",
    ) -> None:
        # Always the same thread, because torch stores the number of threads, the current GPU and more per thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._publisher = publisher
        self._publish_lock = anyio.Lock()
        self._profiling = profiling
        self._group = group
        self._tracer = Tracer(NO_PROFILING, group, 0)
        self._workers: dict[Role, TrainingWorker] = {}
        self._store: dist.TCPStore | None = None
        self._rendezvous = Rendezvous(0, 1, 0, "", 0)
        self._health: ProcessMonitor | None = None

    async def open_store(self, host: str, timeout_s: float) -> CallResult:
        """On rank 0, open the process group's store at `host`, an address of this machine. Answers with its port.

        The store chooses its port itself, because another process could take a port that was only checked to be free.
        """

        def open_tcp_store() -> int:
            self._store = dist.TCPStore(
                host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
            return self._store.port

        return await self._answer("opening the store", open_tcp_store)

    async def join(self, rendezvous: Rendezvous, device: Literal["cpu", "cuda"], timeout_s: float) -> CallResult:
        """Join the process group; `timeout_s` bounds this and every collective operation."""
        self._rendezvous = rendezvous
        os.environ.update(rendezvous.environment)
        return await self._answer("joining the group", _join, rendezvous, self._store, device, timeout_s)

    async def load(self, specs: Mapping[Role, EngineSpec]) -> CallResult:
        """Create the roles' workers, one after the other. Answers with `{role: Layout}`. Collective."""

        def make() -> dict[Role, Layout]:
            for role, spec in specs.items():
                with guarded(f"loading {role}"):
                    self._workers[role] = TrainingWorker(spec)
            layouts = {role: worker.layout for role, worker in self._workers.items()}
            number = next((layout.rank for layout in layouts.values()), 0)
            self._tracer = Tracer(self._profiling, self._group, number)
            return layouts

        set_up_profiling(self._profiling, may_have_gpu=any(spec.engine.device != "cpu" for spec in specs.values()))
        return await self._answer("loading", make)

    async def call(self, role: Role, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallResult:
        """Call a method of the role's worker."""
        worker = self._workers[role]
        return await self._call(role, method, lambda: getattr(worker, method)(*args, **kwargs))

    async def publish(
        self, role: Role, dtype: Dtype, version: int, step: int, validate: bool, probe: bool
    ) -> CallResult:
        """Publish the role's weights as `version`. All ranks collect them one by one; rank 0 sends them in buckets
        and returns a `PublishedVersion`."""
        worker, publisher, started = self._workers[role], self._publisher, time.monotonic()
        what = f"publishing version {version}"
        if publisher is None:
            return CallResult(None, BugError(f"{what}: a rank without a publisher was asked to publish"), local=True)
        upload = publisher.begin(version)
        sender = BucketSender(upload, version)

        def collect() -> WeightsProbe | None:
            weights_probe = worker.probe() if probe else None
            sender.send(in_buckets(worker.weights(dtype), publisher.bucket_bytes))
            return weights_probe

        collected = await self._call(role, "weights", collect, "sync.gather", version=version)
        if collected.error is not None or worker.layout.rank != 0:
            return collected._replace(value=None)
        try:
            if sender.failure is not None:
                raise sender.failure
            collected_s = time.monotonic() - started - sender.waited_s
            async with self._publish_lock:
                publication = await upload.publish(step, validate=validate, probe=collected.value)
            put_s = time.monotonic() - started - collected_s
            answer = CallResult(PublishedVersion(publication, collected_s, put_s), None)
        except Exception as error:  # noqa: BLE001 - converted, and returned to the caller
            answer = CallResult(None, as_typed_error(error, what), local=True)
        return answer._replace(events=[*collected.events, *profile.drain()])

    async def republish(self) -> CallResult:
        """On rank 0, offer the last published version again, concurrently with other calls. A version that is being
        collected does not delay it; one that is being announced does."""
        try:
            if self._publisher is not None:
                async with self._publish_lock:
                    await self._publisher.republish()
            return CallResult(None, None)
        except Exception as error:  # noqa: BLE001 - converted, and returned to the caller
            return CallResult(None, as_typed_error(error, "publishing again"), local=True)

    async def end_trace(self, step: int) -> CallResult:
        """Write the trace of `step`. Answers with a description of a problem, if there was one (`Tracer.end`)."""
        return await self._answer("writing a trace", self._tracer.end, step)

    async def wait_forever(self) -> None:
        """Never return, so that the pending call fails as soon as this process dies."""
        await anyio.sleep_forever()

    async def wait_for_files(self, role: Role) -> None:
        """Wait until this rank has written its files of the role's checkpoint; other calls may run meanwhile."""
        await anyio.to_thread.run_sync(self._workers[role].engine.wait_for_files, abandon_on_cancel=True)

    async def health(self) -> ProcessHealth | None:
        if self._health is None:
            self._health = ProcessMonitor(f"rank-{self._group}-{self._rendezvous.rank}")
        if (memory := gpu_memory()) is not None:
            free, total = memory
            used = {"used_bytes": total - free, "total_bytes": total}
            profile.record_ended("gpu.memory", 0.0, role=self._group, rank=self._rendezvous.rank, **used)
        return self._health.measure()

    async def close(self) -> CallResult:
        """Close every worker, leave the process group and end the thread, even if one of these fails. Answers with the
        first failure, for example that of an unfinished checkpoint."""

        def end() -> None:
            self._tracer.end()
            closing = [worker.close for worker in self._workers.values()]
            if self._store is not None or self._rendezvous.world_size > 1:
                closing.append(leave)
            failures = []
            for close in closing:
                try:
                    close()
                except Exception as error:  # noqa: BLE001 - raised below, once the others are closed too
                    failures.append(error)
            if failures:
                raise failures[0]

        try:
            return await self._answer("closing", end)
        finally:
            self._thread.shutdown(wait=False)

    async def _call(
        self, role: Role, method: str, function: Callable[[], Any], event: str = "rank.call", **fields: Any
    ) -> CallResult:
        """Run `function` as an event of this rank and in its trace."""
        what, rank = f"{role}.{method}", self._workers[role].layout.rank
        if event == "rank.call":
            fields["method"] = method

        def run() -> Any:
            with (
                profile.context(role=role, rank=rank),
                self._tracer.call(profile.place[0], what),
                profile.span(event, sync=True, **fields),
            ):
                return function()

        return await self._answer(what, run)

    async def _answer(self, what: str, function: Callable[..., Any], *args: Any) -> CallResult:
        try:
            answer = CallResult(await self._run(what, function, *args), None)
        except Exception as error:  # noqa: BLE001 - converted, and returned to the caller
            answer = CallResult(None, as_typed_error(error, what))
        return answer._replace(events=profile.drain())

    async def _run(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Run on the worker thread. If the caller is cancelled, still wait for the call, because a model runs one
        call at a time."""

        def run() -> T:
            with guarded(what):
                return function(*args)

        future = asyncio.wrap_future(self._thread.submit(run))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()


class BucketSender:
    """Sends buckets from the engine's thread to an upload on the event loop, each while the next one is collected.

    Create it on the event loop.
    """

    def __init__(self, upload: WeightUpload, version: int) -> None:
        self._upload, self._version = upload, version
        self._loop = asyncio.get_running_loop()
        self.failure: BaseException | None = None
        """Why the upload failed."""
        self.waited_s = 0.0
        """Time for which the engine's thread waited for the upload."""

    def send(self, buckets: Iterator[WeightBucket]) -> None:
        """Send the buckets. Blocking; call it on the engine's thread.

        Later buckets are collected even if one could not be sent, because the other ranks take part in collecting them.
        """
        sending: Future[None] | None = None
        try:
            for bucket in buckets:
                self._wait(sending)
                sending = None
                if self.failure is None:
                    sending = asyncio.run_coroutine_threadsafe(self._put(bucket), self._loop)
                del bucket  # the upload alone holds it while the next one is collected
        finally:
            self._wait(sending)  # the arrays may be the live weights

    async def _put(self, bucket: WeightBucket) -> None:
        with profile.span("sync.put", version=self._version) as span:
            span.add(bytes=await self._upload.put(bucket))

    def _wait(self, sending: Future[None] | None) -> None:
        if sending is None:
            return
        started = time.monotonic()
        try:
            self.failure = sending.exception()  # `put` has a deadline
        except CancelledError as error:
            self.failure = error
        self.waited_s += time.monotonic() - started


def as_typed_error(error: Exception, what: str) -> AsyncRLError:
    """Convert a failure into an `AsyncRLError` with its traceback as text."""
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return InfraError.wrap(
            f"{what}: out of GPU memory; lower ppo_max_token_len, or use gradient_checkpointing, param_offload, "
            "optimizer_offload or more ranks",
            error,
        )
    return BugError.wrap(f"{what} failed: {type(error).__name__}: {error}", error)


def _join(
    rendezvous: Rendezvous, store: dist.TCPStore | None, device: Literal["cpu", "cuda"], timeout_s: float
) -> None:
    limit = timedelta(seconds=timeout_s)
    try:
        if store is None:
            store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
        if device == "cuda":
            torch.cuda.set_device(rendezvous.local_rank)
        dist.init_process_group(
            BACKENDS[device], store=store, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=limit
        )
    except RuntimeError as error:
        raise DeadlineError.wrap(
            f"rank {rendezvous.rank} of {rendezvous.world_size} found no process group at "
            f"{rendezvous.host}:{rendezvous.port} within {timeout_s:g} s; look for a rank that did not start, or raise "
            "timeouts.collective_s",
            error,
        ) from None
