"""The sample queue as a Ray actor, and its client.

    Rollouter: payload ─put─▶ files, or object store ◀─get─ Trainer
                  │                                         ▲
                  └─ SampleMeta + reference ─▶ QueueActor ──┘ lease of references

The actor sees metadata and references. Payload bytes go from the producer to a disk or into shared memory, and from
there to the consumer; they pass neither the actor's mailbox nor its heap.
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.convoy import Convoy
from asyncrl.failures import AsyncRLError, BugError, DeadlineError, FencedError, InfraError
from asyncrl.health.processes import OwnHealth
from asyncrl.journal import Journal
from asyncrl.ports import Admission, Lease, PartName, QueuedSample, QueueSnapshot, QueueStatus
from asyncrl.profiling import OFF, Setup, profile
from asyncrl.run_dir import JOURNAL
from asyncrl.sample_queue import Caller, LocalSampleQueue, QueueOptions
from asyncrl.segments import remove_segments, segment_incarnation, segment_sizes
from asyncrl.turn_files import forget_old_turns
from asyncrl.types import DropReason, SampleId, SampleMeta

logger = logging.getLogger(__name__)

# A parked admit or lease holds one of the actor's slots, and so does every call in flight. Concurrency groups would not
# do: Ray gives each its own event loop, and the queue's conditions belong to one.
MAX_CONCURRENCY = 1000

MAX_OFFERS = 256
"""Most samples in one call to the actor."""

T = TypeVar("T")


class QueueActor:
    """`LocalSampleQueue` behind Ray calls.

    With a journal Ray may restart its process: the state is rebuilt, and the handle stays good. What keeps the journal
    from being used is raised by every call.
    """

    def __init__(
        self,
        options: QueueOptions,
        restore: QueueSnapshot | None = None,
        run_dir: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        profiler: Setup = OFF,
    ) -> None:
        profile.configure("queue", profiler)
        self._health = OwnHealth("queue") if ray.is_initialized() else None
        self._run_dir = run_dir
        self._told: tuple[str, ...] = ()
        self._parked: dict[str, anyio.CancelScope] = {}
        self._broken: AsyncRLError | None = None
        try:
            if run_dir is None:
                self._ready_queue = LocalSampleQueue(options, restore)
            else:
                self._ready_queue = self._from_journal(run_dir, options, restore, identity or {})
        except AsyncRLError as error:
            self._broken = error

    def _from_journal(
        self, run_dir: Path, options: QueueOptions, restore: QueueSnapshot | None, identity: Mapping[str, Any]
    ) -> LocalSampleQueue:
        continuing = ray.get_runtime_context().was_current_actor_reconstructed
        journal = Journal.open(
            run_dir / JOURNAL,
            num_prompts=options.prompts_per_epoch,
            identity=identity,
            restore=restore,
            total_samples=options.pacing.total_samples,
            continuing=continuing,
        )
        self._told = journal.told
        if not continuing:
            # Nobody lives yet who could offer what is in them.
            unnamed = [file for file in segment_sizes(run_dir) if not journal.state.names_file(file)]
            remove_segments(run_dir, unnamed)
        return LocalSampleQueue(options, journal=journal, state=journal.state)

    @property
    def _queue(self) -> LocalSampleQueue:
        if self._broken is not None:
            raise self._broken
        return self._ready_queue

    async def admit(self, caller: Caller, max_samples: int, timeout_s: float) -> Admission:
        waiting = self._queue.admit(max_samples, timeout_s=timeout_s, caller=caller)
        return await self._park(caller.ask, waiting, Admission((), closed=False))

    async def enough(self, caller: Caller, known: bool, timeout_s: float) -> bool:
        return await self._queue.enough(known, timeout_s=timeout_s, caller=caller)

    async def lease(self, caller: Caller, num_samples: int, trainer_version: int, timeout_s: float) -> Lease:
        profile.at(step=caller.step, version=trainer_version)
        waiting = self._queue.lease(num_samples, trainer_version=trainer_version, timeout_s=timeout_s, caller=caller)
        return await self._park(caller.ask, waiting, Lease(0, (), ended=False))

    async def abandon(self, ask: str) -> None:
        """Whoever asked has gone: a call that is still parked answers "nothing" at once."""
        if (scope := self._parked.get(ask)) is not None:
            scope.cancel()

    async def unfeed(self, caller: Caller, sample_ids: Sequence[SampleId]) -> None:
        await self._queue.unfeed(sample_ids, caller=caller)

    async def offer_many(self, caller: Caller, samples: Sequence[QueuedSample]) -> list[AsyncRLError | None]:
        return await self._queue.offer_many(samples, caller=caller)

    async def drop(self, caller: Caller, sample_id: SampleId, reason: DropReason) -> None:
        await self._queue.drop(sample_id, reason, caller=caller)

    async def commit(self, caller: Caller, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        profile.at(step=caller.step)
        await self._queue.commit(lease_id, sample_ids, caller=caller)

    async def release(self, caller: Caller, lease_id: int) -> None:
        await self._queue.release(lease_id, caller=caller)

    async def redo(self, caller: Caller, sample_id: SampleId) -> None:
        await self._queue.redo(sample_id, caller=caller)

    async def set_applied_version(self, caller: Caller, version: int, lineage: int) -> None:
        await self._queue.set_applied_version(version, lineage=lineage, caller=caller)

    async def close(self, caller: Caller) -> None:
        await self._queue.close(caller=caller)
        if profile.on:
            await anyio.to_thread.run_sync(profile.flush)

    async def mark(self, caller: Caller, step: int) -> QueueSnapshot:
        return await self._queue.mark(step, caller=caller)

    async def confirm(self, caller: Caller, step: int) -> None:
        await self._queue.confirm(step, caller=caller)

    async def covered(self, caller: Caller, step: int) -> None:
        await self._queue.covered(step, caller=caller)
        await self._remove(self._queue.state.take_idle_files())

    async def attach(self, caller: Caller, part: PartName, incarnation: int) -> None:
        await self._queue.attach(part, incarnation)
        if part == "rollouter":
            # Segments whose offers never came: of their writers none will be heard any more.
            state = self._queue.state
            old = {file for file in await self._segments() if (segment_incarnation(file) or 0) < incarnation}
            await self._remove({file for file in old if not state.names_file(file)})
            await self._forget_turns(incarnation)

    async def rewind(self, caller: Caller, step: int, version: int, lineage: int, total_samples: int | None) -> None:
        await self._queue.rewind(step, version=version, lineage=lineage, total_samples=total_samples)

    async def status(self, caller: Caller) -> QueueStatus:
        health = self._health.tell() if self._health is not None else None
        return replace(await self._queue.status(), pid=os.getpid(), told=self._told, health=health)

    async def _segments(self) -> Iterable[str]:
        if self._run_dir is None:
            return ()
        return await anyio.to_thread.run_sync(segment_sizes, self._run_dir)

    async def _remove(self, files: Collection[str]) -> None:
        if self._run_dir is not None and files:
            await anyio.to_thread.run_sync(remove_segments, self._run_dir, files)

    async def _forget_turns(self, incarnation: int) -> None:
        """Of samples that were READY when the Rollouter before this incarnation died, or had ended."""
        if self._run_dir is not None:
            await forget_old_turns(self._run_dir, incarnation, self._queue.state.is_generated)

    async def _park(self, ask: str, waiting: Awaitable[T], nothing: T) -> T:
        with anyio.CancelScope() as scope:
            if (earlier := self._parked.get(ask)) is not None:
                earlier.cancel()  # nobody hears its answer any more
            self._parked[ask] = scope
            try:
                return await waiting
            finally:
                # The same call may have been made again meanwhile, over a connection that broke.
                if self._parked.get(ask) is scope:
                    del self._parked[ask]
        return nothing


def start_queue(
    options: QueueOptions,
    restore: QueueSnapshot | None = None,
    *,
    run_dir: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    name: str | None = None,
    profiler: Setup = OFF,
) -> Any:
    """Start the queue actor in this Ray job, on the caller's node: it writes the run directory. Returns its handle.

    Args:
        restore: books of the checkpoint that the run goes on from, for a run without a journal or with a lost one.
        run_dir: keeps the journal there, and deletes payload files there. None: no journal; then the actor is never
            restarted, because a fresh ledger would hand out ids a second time.
        identity: what runs that go on from this journal must have in common with this one.
        max_restarts: of its process, over its life; -1: no limit.
    """
    actor: Any = ray.remote(QueueActor)
    restarts = 0 if run_dir is None else max_restarts
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    shell = actor.options(
        name=name,
        num_cpus=0,
        max_restarts=restarts,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=here,
    )
    return shell.remote(options, restore, run_dir, identity, profiler)


class QueueClient:
    """`ports.SampleQueue` and `ports.QueueControl` over the actor. Make one per event loop.

    Every call ends within `call_timeout_s`, on top of its own `timeout_s` if it has one. A call that meets a queue
    whose process is being replaced is made again within that time; what it had done already is not done twice.

    Args:
        part, incarnation: who calls: once a newer incarnation is attached, every call of an older one is refused.

    Raises:
        DeadlineError: the actor did not answer, or did not come back, in time.
        FencedError: the caller was replaced.
        InfraError: the actor is gone for good, or its journal cannot be written.
        BugError: an illegal transition.
    """

    def __init__(
        self,
        handle: Any,
        call_timeout_s: float,
        *,
        part: PartName | Literal["driver"] = "driver",
        incarnation: int = 0,
    ) -> None:
        self._actor = handle
        self._call_timeout_s = call_timeout_s
        self._caller = Caller(part, incarnation)
        self._asks = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._offers = Convoy(self._offer_many, max_weight=MAX_OFFERS)

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        ask = next(self._asks)

        async def give_back(admission: Admission) -> None:
            if admission.sample_ids:
                await self._call("unfeed", admission.sample_ids, ask=ask)

        return await self._grant("admit", ask, (max_samples,), timeout_s, give_back)

    async def enough(self, known: bool, *, timeout_s: float) -> bool:
        return await self._call("enough", known, timeout_s=timeout_s)

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """Offers made while one is on its way travel together in the next call; a lone one leaves at once."""
        await self._offers.join(QueuedSample(meta, payload))

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        await self._call("drop", sample_id, reason)

    async def lease(self, num_samples: int, *, trainer_version: int, timeout_s: float) -> Lease:
        async def give_back(lease: Lease) -> None:
            if lease.samples:
                await self._call("release", lease.lease_id)

        return await self._grant("lease", next(self._asks), (num_samples, trainer_version), timeout_s, give_back)

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        await self._call("commit", lease_id, tuple(sample_ids))

    async def release(self, lease_id: int) -> None:
        await self._call("release", lease_id)

    async def redo(self, sample_id: SampleId) -> None:
        await self._call("redo", sample_id)

    async def set_applied_version(self, version: int, *, lineage: int = 0) -> None:
        await self._call("set_applied_version", version, lineage)

    async def close(self) -> None:
        await self._call("close")

    async def mark(self, step: int) -> QueueSnapshot:
        return await self._call("mark", step)

    async def confirm(self, step: int) -> None:
        await self._call("confirm", step)

    async def covered(self, step: int) -> None:
        await self._call("covered", step)

    async def attach(self, part: PartName, incarnation: int) -> None:
        await self._call("attach", part, incarnation)

    async def rewind(self, step: int, *, version: int, lineage: int, total_samples: int | None) -> None:
        await self._call("rewind", step, version, lineage, total_samples)

    async def status(self) -> QueueStatus:
        return await self._call("status")

    async def _offer_many(self, samples: Sequence[QueuedSample]) -> Sequence[AsyncRLError | None]:
        return await self._call("offer_many", list(samples))

    async def _grant(
        self,
        method: str,
        ask: str,
        args: tuple[Any, ...],
        timeout_s: float,
        give_back: Callable[[Any], Awaitable[None]],
    ) -> Any:
        """The answer to a call that may park. If the caller is cancelled, what was granted meanwhile goes back."""
        sent: list[Any] = []
        try:
            return await self._call(method, *args, timeout_s=timeout_s, ask=ask, sent=sent)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                self._actor.abandon.remote(ask)
                try:
                    await give_back(await self._call(method, *args, timeout_s=0.0, ask=ask, sent=sent))
                except FencedError:  # what the old incarnation held has been given back already
                    pass
                except InfraError as error:
                    # It is given back when the next incarnation is attached; the cancellation is what counts.
                    logger.warning("what `%s` granted could not be given back: %s", method, error.brief)
            raise

    async def _call(
        self, method: str, *args: Any, timeout_s: float | None = None, ask: str = "", sent: list[Any] | None = None
    ) -> Any:
        """
        Args:
            timeout_s: how long the call may park, which is its last argument then.
            sent: gets the reference of the call; one that is in it already is waited for first.
        """
        limit_s = (timeout_s or 0.0) + self._call_timeout_s
        sent = [] if sent is None else sent
        caller = self._caller._replace(ask=ask, step=profile.place[0])
        remote = getattr(self._actor, method)
        began = anyio.current_time()
        try:
            with anyio.fail_after(limit_s):
                while True:
                    if not sent:
                        park = () if timeout_s is None else (max(0.0, timeout_s - anyio.current_time() + began),)
                        sent.append(remote.remote(caller, *args, *park))
                    try:
                        return await sent[-1]
                    except ActorUnavailableError:
                        # Its process died, or the network did: nobody knows what became of the call. The next one
                        # waits inside Ray until the process is back, and may be made more than once. One that parks
                        # does not: Ray would park it anew after it was abandoned.
                        sent.clear()
                        caller = caller._replace(again=True)
                        remote = getattr(self._actor, method).options(max_task_retries=-1 if timeout_s is None else 0)
        except TimeoutError as error:
            state = "did not come back and answer" if caller.again else "did not answer"
            raise DeadlineError(
                f"the sample queue {state} `{method}` within {limit_s:g} s; what it granted, if anything, is "
                "unknown. A larger timeouts.call_s helps if the machine is overloaded"
            ) from error
        except RayTaskError as error:
            raise _original(error, method) from None
        except RayError as error:
            raise InfraError.wrap(f"the sample queue is gone for good (in `{method}`)", error) from None


def _original(error: RayTaskError, method: str) -> AsyncRLError:
    """What the actor raised, as it raised it."""
    origin = error.cause
    if isinstance(origin, AsyncRLError):
        return origin
    return BugError.wrap(f"the sample queue failed in `{method}`", error)
