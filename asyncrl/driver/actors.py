"""The driver's calls to Ray actors, and the Rollouter and the Trainer as parts that a `Supervisor` can replace.

Every call has a deadline, and Ray's errors are converted to this project's.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.exceptions import RayActorError, RayError, RayTaskError

from asyncrl.config.resources.plan import total_samples
from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.core.ports import PartName
from asyncrl.core.records import RunRecord
from asyncrl.driver.cluster.processes import end_known
from asyncrl.driver.resume import resume_in_run
from asyncrl.observe.status.run_status import ProcessInfo
from asyncrl.observe.status.summary import ResumePoint, attribute_failure_to
from asyncrl.queue.actor import QueueClient
from asyncrl.storage.checkpoint_claim import record_history
from asyncrl.storage.checkpoint_manifest import NO_REWINDS, Progress, Resume
from asyncrl.storage.run_dir import RunDir, disk_error
from rollouter.actor import start_rollouter
from rollouter.coverage import RemainingSamples
from rollouter.weight_updates import RolloutStart
from trainer.actor import start_trainer

KILL_S = 25.0
"""Time limit for a part's processes to end and for Ray to notice."""

ActorStatus = Mapping[str, Any]

logger = logging.getLogger(__name__)


async def call(part: str, ref: Awaitable[Any], timeout_s: float, *, doing: str) -> Any:
    """Return the result of `ref`.

    Raises:
        DeadlineError: there is no result within `timeout_s`.
        AsyncRLError: what the part raised; `InfraError` if its process is gone.
    """
    try:
        with anyio.fail_after(timeout_s):
            return await ref
    except TimeoutError:
        raise DeadlineError(f"the {part} did not finish {doing} within {timeout_s:g} s") from None
    except RayError as error:
        raise translate(part, error) from None


async def create(part: str, start: Callable[[], Any], timeout_s: float) -> Any:
    """Return the handle of the actor that `start` creates. This waits for Ray's GCS, so it happens in a thread.

    Raises:
        DeadlineError: the GCS did not answer within `timeout_s`. An actor that is created later ends at once, because
            nothing refers to it.
        InfraError: Ray cannot create it.
    """
    return await call(part, to_thread.run_sync(start, abandon_on_cancel=True), timeout_s, doing="its creation")


async def stream(part: str, actor: Any, begun: ray.ObjectRef) -> AsyncGenerator[RunRecord, None]:
    """Yield the records of a run that the call `begun` begins. The watchdog, not this function, limits the time between
    them.

    It repeats a call instead of reading a streaming generator, of which Ray keeps 0.5 KB in this process for every item
    until the generator ends.
    """
    try:
        await begun
        while records := await actor.next_records.remote():
            for record in records:
                yield record
    except RayError as error:
        raise translate(part, error) from None


async def kill(actor: Any, known: Collection[ProcessInfo], known_at: float) -> None:
    """Kill an actor, which Ray then does not restart, and the processes that it had at `known_at` (wall clock).

    This is bounded in time and shielded from cancellation. A process that is stopped (SIGSTOP) does not react to Ray,
    so processes on this machine are killed by their ids.
    """

    def kill_all() -> None:
        nodes = local_nodes()
        end_known([process.pid for process in known if process.node_id in nodes], known_at)
        with suppress(RayError):
            ray.kill(actor)

    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(KILL_S) as scope:
            await to_thread.run_sync(kill_all, abandon_on_cancel=True)
        if scope.cancelled_caught:
            logger.warning("Ray did not kill an actor within %g s; its further results are ignored", KILL_S)


async def kill_process_of(name: str, pid: int, known_at: float) -> bool:
    """End the process of a restartable actor of class `name` on this node, known as `pid` at `known_at` (wall clock).

    Returns:
        False: it had ended by itself, and its successor is left alone.
    """
    with anyio.CancelScope(shield=True):
        found = await to_thread.run_sync(partial(end_known, [pid], known_at, title=f"ray::{name}"))
    return found > 0


def local_nodes() -> frozenset[str]:
    """Return Ray's ids of the nodes on this machine: those with this node's address. Blocking."""
    mine = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()
    address = next((node["NodeManagerAddress"] for node in nodes if node["NodeID"] == mine), None)
    return frozenset({mine, *(node["NodeID"] for node in nodes if node["NodeManagerAddress"] == address)})


def translate(part: str, error: RayError) -> AsyncRLError:
    """Convert `error`, raised by a call to `part`, to an error of this project."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, AsyncRLError):
            return cause
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_error(Path(cause.filename or f"the {part}'s files"), cause)
        if isinstance(cause, OSError | RayError):
            return InfraError(f"the {part} failed: {cause}", str(error))
        return BugError(f"the {part} failed: {type(cause).__name__}: {cause}", str(error))
    if isinstance(error, RayActorError):
        return InfraError(f"the {part}'s process died; logs/ray in the run directory may say why", str(error))
    return InfraError.wrap(f"a call to the {part} failed: {error}", error)


@dataclass(eq=False)
class _SupervisedActor:
    """The successive actors of one part, and the processes that the newest one has reported."""

    config: Config
    run_dir: RunDir
    name: PartName = field(init=False)
    queue: QueueClient = field(init=False)
    queue_handle: Any = field(init=False)
    store_handle: Any = field(init=False)
    processes: tuple[ProcessInfo, ...] = field(default=(), init=False)
    _actor: Any = field(default=None, init=False)
    _reported_at: float = field(default=0.0, init=False)

    async def status(self, limit_s: float) -> ActorStatus | None:
        """Return the actor's `status`; None: there is no actor, or it is being replaced.

        Raises:
            DeadlineError: it did not answer within `limit_s`.
            InfraError: the actor is dead.
        """
        if (actor := self._actor) is None:
            return None
        try:
            status: ActorStatus = await call(self.name, actor.status.remote(), limit_s, doing="its status report")
        except DeadlineError:
            if actor is not self._actor:
                return None
            raise
        if actor is not self._actor:
            return None
        if status:
            self.processes, self._reported_at = tuple(self._list_processes(status)), time.time()
        return status

    def _list_processes(self, status: ActorStatus) -> list[ProcessInfo]:
        return [ProcessInfo(self.name, self.name, status["pid"], status["node_id"])]

    async def kill(self) -> None:
        actor, known, self._actor, self.processes = self._actor, self.processes, None, ()
        if actor is not None:
            await kill(actor, known, self._reported_at)

    async def stop(self) -> None:
        if self._actor is not None:
            await call(self.name, self._actor.stop.remote(), self.config.timeouts.call_s, doing="stopping")


@dataclass(eq=False)
class SupervisedRollouter(_SupervisedActor):
    """The `SupervisedPart` of the Rollouter."""

    rollout_start: Callable[[], RolloutStart]
    """Returns the start values of the next process, such as what it validates first."""
    name: PartName = field(default="rollouter", init=False)
    prepared: Mapping[str, Any] = field(default_factory=dict, init=False)
    """The answer of `RolloutActor.prepare`."""

    def _list_processes(self, status: ActorStatus) -> list[ProcessInfo]:
        workers = [
            ProcessInfo("worker", f"worker {one['worker']}", one["pid"], one["node_id"])
            for one in status.get("workers", ())
        ]
        return [*super()._list_processes(status), *workers]

    async def release_samples(self, incarnation: int) -> str:
        """Requeue the samples that were RUNNING and, without a journal, also those that were READY."""
        with attribute_failure_to("queue"):
            before = (await self.queue.status()).counts.fed
            await self.queue.attach("rollouter", incarnation)
            again = before - (await self.queue.status()).counts.fed
        return f"{again} samples are generated again"

    async def start(self, incarnation: int) -> None:
        """Load the data. Raises errors about the data, too, see `RolloutActor.prepare`."""
        start = partial(start_rollouter, self.config, incarnation=incarnation)
        self._actor = await create(self.name, start, self.config.timeouts.start_s)
        ref = self._actor.prepare.remote(str(self.run_dir.path))
        self.prepared = await call(self.name, ref, self.config.timeouts.start_s, doing="reading the data")

    async def first_uncovered(self, remaining: RemainingSamples) -> str:
        """Name the first sample that is not recorded, with the reason; empty: all are recorded.

        Raises the errors of `rollouter.coverage`."""
        limit_s = self.config.timeouts.start_s
        ref = self._actor.first_uncovered.remote(remaining)
        try:
            return str(await call(self.name, ref, limit_s, doing="checking the records"))
        except DeadlineError:
            return f"the records could not be checked within timeouts.start_s={limit_s:g}"

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        begun = self._actor.begin_run.remote(self.queue_handle, self.store_handle, self.rollout_start())
        async for record in stream(self.name, self._actor, begun):
            yield record


@dataclass(eq=False)
class SupervisedTrainer(_SupervisedActor):
    """The `SupervisedPart` of the Trainer, including its ranks."""

    resume: Resume | None
    """The checkpoint or the journal that the next process continues from."""
    on_rewind: Callable[[ResumePoint], Awaitable[None]]
    """Awaited after a rewind, with the point from which training continues."""
    validated_step: Callable[[], int | None]
    """See `Trainer.start`."""
    name: PartName = field(default="trainer", init=False)
    total_steps: int = field(default=0, init=False)
    num_prompts: int = field(default=0, init=False)
    """Prompts per epoch."""
    attention: str = field(default="", init=False)
    """How the policy's ranks compute attention, once they have loaded it."""
    _has_model: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._history = self.resume.history if self.resume is not None else NO_REWINDS

    @property
    def total_samples(self) -> int:
        """Number of samples that the whole run trains on."""
        at = self._progress
        return total_samples(
            self.config, self.total_steps, self.num_prompts, step=at.step, trained_samples=at.trained_samples
        )

    async def release_samples(self, incarnation: int) -> str:
        """Rewind the run to the newest checkpoint."""
        with attribute_failure_to("queue"):
            await self.queue.attach("trainer", incarnation)
        # After this, no earlier process can write or delete a checkpoint.
        self.resume = await to_thread.run_sync(resume_in_run, self.run_dir, self._history)
        self._history = self._history.after_rewind(self._progress.step)
        # Before the queue goes back: a launch without this run directory must not resume from an abandoned checkpoint.
        await to_thread.run_sync(record_history, self.run_dir, self._history, self.config.timeouts.call_s)
        with attribute_failure_to("queue"):
            before = (await self.queue.status()).counts.trained
            await self.rewind()
            again = before - (await self.queue.status()).counts.trained
        progress = self._progress
        where = str(self.resume.checkpoint) if self.resume is not None else ""
        await self.on_rewind(ResumePoint(progress.step, progress.version, where, self._history.lineage))
        return f"back to step {progress.step} (version {progress.version}); {again} samples are trained again"

    async def rewind(self) -> None:
        """Rewind the queue to the checkpoint that the Trainer continues from."""
        progress = self._progress
        await self.queue.rewind(
            progress.step,
            version=progress.version,
            lineage=self._history.lineage,
            total_samples=self.total_samples,
            trained_tokens=progress.trained_tokens,
        )

    async def start(self, incarnation: int) -> None:
        """Load the models. Raises errors about the models, too, see `Trainer.start`."""
        self._has_model = False
        start = partial(start_trainer, self.config, incarnation=incarnation)
        self._actor = await create(self.name, start, self.config.timeouts.start_s)
        checkpoint = self.resume if self.resume is not None and self.resume.checkpoint is not None else None
        ref = self._actor.start.remote(
            self.run_dir, checkpoint, self.store_handle, self._history, self.validated_step()
        )
        started = await call(self.name, ref, self.config.timeouts.start_s, doing="loading the model")
        self.attention = started["attention"]
        self._has_model = True

    async def run(self) -> AsyncGenerator[RunRecord, None]:
        begun = self._actor.begin_run.remote(self.queue_handle, self.total_steps)
        async for record in stream(self.name, self._actor, begun):
            yield record

    async def republish(self) -> None:
        """Offer the newest version again to a weight store that was restarted, if there is a model."""
        if self._has_model and self._actor is not None:
            limit_s = self.config.timeouts.train_s
            await call(self.name, self._actor.republish.remote(), limit_s, doing="publishing its version again")

    async def confirm_served(self) -> None:
        """Notify the process that the last version is applied and validated, so that it may end.

        Raises:
            InfraError: the notification did not arrive.
        """
        if self._actor is not None:
            await call(self.name, self._actor.confirm_served.remote(), self.config.timeouts.call_s, doing="ending")

    def _list_processes(self, status: ActorStatus) -> list[ProcessInfo]:
        ranks = [
            ProcessInfo("rank", f"rank {rank['group']}/{rank['rank']}", rank["pid"], rank["node_id"])
            for rank in status["ranks"]
        ]
        return [*super()._list_processes(status), *ranks]

    @property
    def _progress(self) -> Progress:
        return self.resume.manifest.progress if self.resume is not None else Progress()
