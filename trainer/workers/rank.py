"""One process of a group: the workers of the roles placed there, on one thread, and what became of each call.

Nothing here knows Ray: `trainer.group` puts a `Rank` into an actor, `trainer.inline` keeps one in the caller's process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist

from asyncrl.config.schema import Dtype
from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.health.processes import OwnHealth
from asyncrl.ports import Publication, WeightPublisher
from asyncrl.profiling import profile
from trainer.engine.base import EngineSpec, Layout
from trainer.engine.dist import BACKENDS, guarded, leave
from trainer.outcomes import Answer
from trainer.placement import Role
from trainer.roles import Published
from trainer.tracing import NO_PROFILING, RankProfiling, Tracer, prepare
from trainer.worker import TrainingWorker

T = TypeVar("T")


class Meeting(NamedTuple):
    """Where the ranks of a group find each other."""

    rank: int
    world_size: int
    local_rank: int
    """On GPUs: which of those that the process sees is its own. On CPU: how many ranks before it are on its machine."""
    host: str
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """As torchrun sets it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


class Rank:
    """Calls run one at a time, in the order in which they come. `status`, `stay`, `written` and `republish` go beside
    them, on the event loop: a rank that computes says so all the same.

    What its calls took goes along with their answers, unless this process writes events itself.

    Args:
        publisher: where `publish` of rank 0 puts weights.
        group: its name, for traces.
    """

    def __init__(
        self,
        publisher: WeightPublisher | None = None,
        profiling: RankProfiling = NO_PROFILING,
        group: str = "actor",
    ) -> None:
        # One thread for good: torch keeps the number of threads, the current GPU and more by thread.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._publisher = publisher
        self._offering = anyio.Lock()
        self._profiling = profiling
        self._group = group
        self._tracer = Tracer(NO_PROFILING, group, 0)
        self._workers: dict[Role, TrainingWorker] = {}
        self._store: dist.TCPStore | None = None
        self._meeting = Meeting(0, 1, 0, "", 0)
        self._doing = ""
        self._since = time.monotonic()
        self._health: OwnHealth | None = None

    async def host(self, host: str, timeout_s: float) -> Answer:
        """Rank 0: open the place to meet at `host`, an address of this machine; answers with its port.

        The store takes a port itself and keeps it: one that is merely found to be free may be taken by others.
        """

        def open_store() -> int:
            self._store = dist.TCPStore(
                host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
            return self._store.port

        return await self._answer("opening the meeting place", open_store)

    async def join(self, meeting: Meeting, device: Literal["cpu", "cuda"], timeout_s: float) -> Answer:
        """Be in a process group with the others; `timeout_s` bounds this and every collective operation."""
        self._meeting = meeting
        os.environ.update(meeting.environment)
        return await self._answer("joining the group", _join, meeting, self._store, device, timeout_s)

    async def load(self, specs: Mapping[Role, EngineSpec]) -> Answer:
        """Make the roles' workers, one after the other; answers with `{role: Layout}`. Collective."""

        def make() -> dict[Role, Layout]:
            for role, spec in specs.items():
                with guarded(f"loading {role}"):
                    self._workers[role] = TrainingWorker(spec)
            layouts = {role: worker.layout for role, worker in self._workers.items()}
            number = next((layout.rank for layout in layouts.values()), 0)
            self._tracer = Tracer(self._profiling, self._group, number)
            return layouts

        prepare(self._profiling, may_have_gpu=any(spec.engine.device != "cpu" for spec in specs.values()))
        return await self._answer("loading", make)

    async def call(self, role: Role, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call a method of the role's worker."""
        worker = self._workers[role]
        return await self._call(role, method, lambda: getattr(worker, method)(*args, **kwargs))

    async def publish(self, role: Role, dtype: Dtype, version: int, step: int, validate: bool) -> Answer:
        """Collect the role's weights on rank 0, which offers them as `version` and answers with what is `Published`."""
        worker, started = self._workers[role], time.monotonic()
        collected = await self._call(role, "weights", lambda: worker.weights(dtype), "sync.gather", version=version)
        if collected.error is not None or worker.layout.rank != 0:
            return collected._replace(value=None)
        gathered = time.monotonic()
        try:
            with profile.span("sync.put", role=role, rank=0, version=version) as span:
                publication = await self._offer(version, step, collected.value, validate)
                span.add(bytes=publication.num_bytes)
            published = Published(publication, gathered - started, time.monotonic() - gathered)
            answer = Answer(published, None)
        except Exception as error:  # noqa: BLE001 - typed, and given to the caller
            answer = Answer(None, typed(error, f"publishing version {version}"), apart=True)
        return answer._replace(events=[*collected.events, *profile.drain()])

    async def republish(self) -> Answer:
        """On rank 0: offer what it published last again, beside other calls. What is being published is waited for."""
        try:
            if self._publisher is not None:
                async with self._offering:
                    await self._publisher.republish()
            return Answer(None, None)
        except Exception as error:  # noqa: BLE001 - typed, and given to the caller
            return Answer(None, typed(error, "publishing again"), apart=True)

    async def end_trace(self, step: int) -> Answer:
        """`step` is over; answers with what went wrong with its trace (`Tracer.end`)."""
        return await self._answer("writing a trace", self._tracer.end, step)

    async def stay(self) -> None:
        """As long as this process lives: whoever waits for it hears of its death."""
        await anyio.sleep_forever()

    async def written(self, role: Role) -> None:
        """Until this rank has written its files of the role's checkpoint, beside other calls: those go on."""
        await anyio.to_thread.run_sync(self._workers[role].engine.wait_for_files, abandon_on_cancel=True)

    async def status(self) -> dict[str, Any]:
        """`rank`, `pid`, `doing` (empty: nothing) and since when, `for_s`; `health` (`ProcessHealth`)."""
        if self._health is None:
            self._health = OwnHealth(f"rank-{self._group}-{self._meeting.rank}")
        return {
            "rank": self._meeting.rank,
            "pid": os.getpid(),
            "doing": self._doing,
            "for_s": time.monotonic() - self._since,
            "health": self._health.tell(),
        }

    async def close(self) -> Answer:
        """Close every worker, leave the process group and end the thread, whatever fails. Answers with the first
        failure, as of a checkpoint that nobody has waited for."""

        def end() -> None:
            self._tracer.end()
            closing = [worker.close for worker in self._workers.values()]
            if self._store is not None or self._meeting.world_size > 1:
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

    async def _offer(self, version: int, step: int, tensors: Mapping[str, Any], validate: bool) -> Publication:
        if self._publisher is None:
            raise BugError("a rank without a publisher was asked to publish")
        async with self._offering:
            return await self._publisher.publish(version, step, tensors, validate=validate)

    async def _call(
        self, role: Role, method: str, function: Callable[[], Any], event: str = "rank.call", **fields: Any
    ) -> Answer:
        """`function`, as an event of this rank and in its trace."""
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

    async def _answer(self, what: str, function: Callable[..., Any], *args: Any) -> Answer:
        try:
            answer = Answer(await self._run(what, function, *args), None)
        except Exception as error:  # noqa: BLE001 - typed, and given to the caller
            answer = Answer(None, typed(error, what))
        return answer._replace(events=profile.drain())

    async def _run(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """On the thread. A call that was cancelled is waited for all the same: a model has one user at a time."""

        def run() -> T:
            self._doing, self._since = what, time.monotonic()
            try:
                with guarded(what):
                    return function(*args)
            finally:
                self._doing, self._since = "", time.monotonic()

        future = asyncio.wrap_future(self._thread.submit(run))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()


def typed(error: Exception, what: str) -> AsyncRLError:
    """The failure as one of ours, its traceback as text."""
    if isinstance(error, AsyncRLError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return InfraError.wrap(
            f"{what}: out of GPU memory; lower ppo_max_token_len, or use gradient_checkpointing, param_offload, "
            "optimizer_offload or more ranks",
            error,
        )
    return BugError.wrap(f"{what} failed: {type(error).__name__}: {error}", error)


def _join(meeting: Meeting, store: dist.TCPStore | None, device: Literal["cpu", "cuda"], timeout_s: float) -> None:
    limit = timedelta(seconds=timeout_s)
    try:
        if store is None:
            store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        if device == "cuda":
            torch.cuda.set_device(meeting.local_rank)
        dist.init_process_group(
            BACKENDS[device], store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=limit
        )
    except RuntimeError as error:
        raise DeadlineError.wrap(
            f"rank {meeting.rank} of {meeting.world_size} found no process group at {meeting.host}:{meeting.port} "
            f"within {timeout_s:g} s; look for a rank that did not start, or raise timeouts.collective_s",
            error,
        ) from None
