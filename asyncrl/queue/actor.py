"""The sample queue as a Ray actor, and its client.

    Rollouter: payload ─put─▶ files, or object store ◀─get─ Trainer
                  │                                         ▲
                  └─ SampleMeta + reference ─▶ QueueActor ──┘ lease of references

The actor sees metadata and references. Payload bytes go from the producer to a disk or into shared memory, and from
there to the consumer; they pass through neither the actor's mailbox nor its heap.
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.core.call_batcher import CallBatcher
from asyncrl.core.failures import AsyncRLError, BugError, DeadlineError, FencedError, InfraError
from asyncrl.core.ports import PartName, QueuedSample, QueueSnapshot
from asyncrl.core.types import SampleMeta
from asyncrl.core.worker_threads import keep_worker_threads
from asyncrl.profiling import PROFILING_OFF, ProfilerSettings, profile
from asyncrl.profiling.process_usage import ProcessMonitor
from asyncrl.queue.core import Operation, ParkingOperation, QueueOptions
from asyncrl.queue.journal import Journal
from asyncrl.queue.operations import (
    AttachPart,
    CloseQueue,
    CommitSamples,
    CoverCheckpoint,
    LeaseSamples,
    OfferSamples,
    ReadStatus,
)
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueCaller, SampleQueue
from asyncrl.queue.turn_log import forget_old_turns
from asyncrl.storage.run_dir import JOURNAL
from asyncrl.storage.segments import remove_segments, segment_incarnation, segment_sizes

logger = logging.getLogger(__name__)

# A parked call holds one of the actor's slots, and so does every other call in flight. Concurrency groups do not
# help: Ray gives each its own event loop, and the queue's conditions belong to one.
MAX_CONCURRENCY = 1000

MAX_OFFERS = 256
"""Maximum number of samples in one call to the actor."""


class QueueActor:
    """`LocalSampleQueue` behind Ray calls.

    With a journal, Ray may restart the actor's process: the state is rebuilt, and the handle stays valid. If the
    journal cannot be used, every call raises the reason.
    """

    def __init__(
        self,
        options: QueueOptions,
        restore: QueueSnapshot | None = None,
        run_dir: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        profiler: ProfilerSettings = PROFILING_OFF,
    ) -> None:
        profile.configure("queue", profiler)
        self._health = ProcessMonitor("queue") if ray.is_initialized() else None
        self._run_dir = run_dir
        self._notices: tuple[str, ...] = ()
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
        self._notices = journal.notices
        if not continuing:
            # No Rollouter is running yet, so nothing can refer to the other files.
            remove_segments(
                run_dir, [file for file in segment_sizes(run_dir) if not journal.state.is_file_needed(file)]
            )
        return LocalSampleQueue(options, journal=journal, state=journal.state)

    @property
    def _queue(self) -> LocalSampleQueue:
        if self._broken is not None:
            raise self._broken
        return self._ready_queue

    async def call(self, caller: QueueCaller, operation: Operation, timeout_s: float | None = None) -> Any:
        """Perform the operation, delete the files that are not needed after it, and return its answer."""
        keep_worker_threads()  # the journal writes in one, and each call is a task of its own
        match operation:
            case LeaseSamples():
                profile.set_position(step=caller.step, version=operation.trainer_version)
            case CommitSamples():
                profile.set_position(step=caller.step)
        answer = await self._parked_call(caller, operation, timeout_s)
        match operation:
            case ReadStatus():
                health = self._health.measure() if self._health is not None else None
                return replace(answer, pid=os.getpid(), notices=self._notices, health=health)
            case CoverCheckpoint():
                await self._remove(self._queue.state.take_idle_files())
            case AttachPart(part="rollouter", incarnation=incarnation):
                # Remove segments that were never offered; calls of their writers are refused from now on.
                state = self._queue.state
                old = [file for file in await self._segments() if (segment_incarnation(file) or 0) < incarnation]
                await self._remove([file for file in old if not state.is_file_needed(file)])
                await self._forget_turns(incarnation)
            case CloseQueue() if profile.enabled:
                await anyio.to_thread.run_sync(profile.flush)
        return answer

    async def abandon(self, request_id: str) -> None:
        """Answer the call of a caller that is gone with an empty answer, if the call is still parked."""
        if (scope := self._parked.get(request_id)) is not None:
            scope.cancel()

    async def _parked_call(self, caller: QueueCaller, operation: Operation, timeout_s: float | None) -> Any:
        waiting = self._queue.call(operation, timeout_s=timeout_s, caller=caller)
        if not isinstance(operation, ParkingOperation):
            return await waiting
        request_id = operation.request_id
        with anyio.CancelScope() as scope:
            if (earlier := self._parked.get(request_id)) is not None:
                earlier.cancel()  # its answer cannot arrive any more
            self._parked[request_id] = scope
            try:
                return await waiting
            finally:
                # After a broken connection, the same call may have been made a second time.
                if self._parked.get(request_id) is scope:
                    del self._parked[request_id]
        return operation.timed_out()

    async def _segments(self) -> Iterable[str]:
        if self._run_dir is None:
            return ()
        return await anyio.to_thread.run_sync(segment_sizes, self._run_dir)

    async def _remove(self, files: Collection[str]) -> None:
        if self._run_dir is not None and files:
            await anyio.to_thread.run_sync(remove_segments, self._run_dir, files)

    async def _forget_turns(self, incarnation: int) -> None:
        """Forget the turns of samples whose payload is stored, or that have ended for good."""
        if self._run_dir is not None:
            await forget_old_turns(self._run_dir, incarnation, self._queue.state.needs_no_turns)


def start_queue(
    options: QueueOptions,
    restore: QueueSnapshot | None = None,
    *,
    run_dir: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    profiler: ProfilerSettings = PROFILING_OFF,
) -> Any:
    """Start the queue actor in this Ray job, on the caller's node, because it writes the run directory. Return its
    handle.

    Args:
        restore: sample counts of the checkpoint that the run resumes from, used if the journal is off or lost.
        run_dir: holds the journal and the payload files. None: no journal; then the actor is never
            restarted, because a fresh ledger would hand out ids a second time.
        identity: settings that a run which resumes from this journal may not change.
        max_restarts: maximum number of restarts of its process; -1: no limit.
    """
    actor: Any = ray.remote(QueueActor)
    restarts = 0 if run_dir is None else max_restarts
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    shell = actor.options(
        num_cpus=0,
        max_restarts=restarts,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=here,
    )
    return shell.remote(options, restore, run_dir, identity, profiler)


class QueueClient(SampleQueue):
    """Client of the actor that implements `SampleQueue`. Create one per event loop.

    Every call ends within `call_timeout_s`, plus its `timeout_s` if it has one. While the queue's process
    is being replaced, the call is repeated within that time; its effect happens only once.

    Args:
        part, incarnation: the caller; once a newer incarnation is attached, calls of older ones are refused.

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
        self._caller = QueueCaller(part, incarnation)
        self._request_ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._offers = CallBatcher(self._offer_many, max_weight=MAX_OFFERS)

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """See `SampleQueue`. Offers that are made while another is being sent share the next call."""
        await self._offers.submit(QueuedSample(meta, payload))

    async def _offer_many(self, samples: Sequence[QueuedSample]) -> Sequence[AsyncRLError | None]:
        return await self.call(OfferSamples(tuple(samples)))

    async def call(self, operation: Operation, *, timeout_s: float | None = None) -> Any:
        """See `SampleQueue`. If the caller is cancelled, a grant made in the meantime is given back."""
        if not isinstance(operation, ParkingOperation):
            return await self._carry(operation, timeout_s)
        operation = replace(operation, request_id=next(self._request_ids))
        sent: list[Any] = []
        try:
            return await self._carry(operation, timeout_s, sent)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                self._actor.abandon.remote(operation.request_id)
                try:
                    undo = operation.undo(await self._carry(operation, 0.0, sent))
                    if undo is not None:
                        await self._carry(undo)
                except FencedError:  # the grants of the old incarnation have been given back already
                    pass
                except InfraError as error:
                    # The grant is given back when the next incarnation is attached; raise the cancellation.
                    logger.warning("the grant of %s could not be given back: %s", _name(operation), error.brief)
            raise

    async def _carry(self, operation: Operation, timeout_s: float | None = None, sent: list[Any] | None = None) -> Any:
        """Send the operation repeatedly until it is answered.

        Args:
            timeout_s: how long the call may park; None: it never parks.
            sent: receives the reference of the call; if it already has one, that call is awaited first.
        """
        limit_s = (timeout_s or 0.0) + self._call_timeout_s
        sent = [] if sent is None else sent
        caller = self._caller._replace(step=profile.place[0])
        method = self._actor.call
        began = anyio.current_time()
        try:
            with anyio.fail_after(limit_s):
                while True:
                    if not sent:
                        left_s = None if timeout_s is None else max(0.0, timeout_s - anyio.current_time() + began)
                        sent.append(method.remote(caller, operation, left_s))
                    try:
                        return await sent[-1]
                    except ActorUnavailableError:
                        # The queue's process or the network failed, so the result of the call is unknown. With
                        # retries, Ray holds the next call until the process is back, and may repeat it. A call that
                        # parks has no retries, because Ray would park it again after it was abandoned.
                        sent.clear()
                        caller = caller._replace(retried=True)
                        method = self._actor.call.options(max_task_retries=-1 if timeout_s is None else 0)
        except TimeoutError as error:
            state = "did not come back and answer" if caller.retried else "did not answer"
            raise DeadlineError(
                f"the sample queue {state} {_name(operation)} within {limit_s:g} s; the call may have had an effect. A "
                f"larger timeouts.call_s helps if the machine is overloaded"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, AsyncRLError):
                raise error.cause from None
            raise BugError.wrap(f"the sample queue failed in {_name(operation)}", error) from None
        except RayError as error:
            raise InfraError.wrap(f"the sample queue is gone for good (in {_name(operation)})", error) from None


def _name(operation: Operation) -> str:
    return f"`{type(operation).__name__}`"
