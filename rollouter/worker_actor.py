"""The Ray actor of a worker, and the Rollouter's link to it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.exceptions import RayError, RayTaskError

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.core.worker_threads import keep_worker_threads
from asyncrl.profiling import ProfilerSettings, profile
from rollouter.coverage import UnavailableFleet
from rollouter.group_workers.worker import Command, GroupWorker, WorkerReport
from rollouter.loading import load_scoring
from rollouter.rewards.scorer import CombinedScorer
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.handles import connect
from rollouter.serving.lending import LendingFleet, run_fleet
from rollouter.serving.reward_model import ServedRewardModel

KILL_S = 5.0
"""Time limit for Ray to accept that a worker is ended."""


class WorkerActor:
    """A `GroupWorker` in a process of its own, on any node."""

    def __init__(self, config: Config, place: int) -> None:
        self._config = config
        self._place = place
        self._worker: GroupWorker | None = None
        self._running: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load tokenizer, reward functions and agent. Raises as `loading.load_scoring`."""
        keep_worker_threads()
        profile.configure(f"worker-{self._place}", ProfilerSettings.of(self._config.profiler, None))
        self._loaded = await to_thread.run_sync(load_scoring, self._config)

    async def start(self, *, has_engines: bool) -> None:
        """Accept commands from now on. Call it after `load`, and once the engines are up."""
        config, loaded = self._config, self._loaded
        context = ray.get_runtime_context()
        namespace = context.namespace
        served: ServedRewardModel | None = None
        fleet: ServeFleet | UnavailableFleet = UnavailableFleet()
        if config.reward_model.placement == "serve":
            served = await connect(partial(ServedRewardModel, config, namespace=namespace), config.timeouts.call_s)
        if has_engines:
            fleet = await connect(partial(run_fleet, config, namespace=namespace), config.timeouts.call_s)
        scorer = CombinedScorer(loaded.scorer, config, loaded.decode, served)
        self._worker = worker = GroupWorker(fleet, scorer, loaded.agent, node_id=context.get_node_id())
        if isinstance(fleet, LendingFleet):
            worker.use_lent = fleet.use_lent
        gc.collect()
        gc.freeze()  # see `RolloutActor`
        ready = anyio.Event()
        self._running = asyncio.create_task(worker.run(ready.set), name="worker")
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            waiting.cancel()
            await self._running

    async def post(self, commands: Sequence[Command]) -> None:
        """See `GroupWorker.post`."""
        self._checked().post(commands)

    async def take(self) -> WorkerReport:
        """See `GroupWorker.take`. Raises the failure that has ended the worker."""
        worker = self._checked()
        if self._running is not None and self._running.done():
            await self._running
        return await worker.take()

    def _checked(self) -> GroupWorker:
        if self._worker is None:
            raise BugError("a worker is used before WorkerActor.start")
        return self._worker


class ActorLink:
    """A `WorkerLink` to a `WorkerActor`, which this process owns: it ends with this process."""

    def __init__(self, config: Config, place: int) -> None:
        self._config = config
        self._place = place
        self._timeouts = config.timeouts
        self._actor: Any = None

    def _create(self) -> Any:
        """Create the actor. Ray never restarts it: the `WorkerPool` starts another one. Blocks until Ray's GCS
        answers."""
        actor: Any = ray.remote(WorkerActor)
        return actor.options(num_cpus=0, max_restarts=0, max_concurrency=16, scheduling_strategy="SPREAD").remote(
            self._config, self._place
        )

    async def load(self) -> None:
        """Create the actor, and see `WorkerActor.load`. Each may take `timeouts.start_s`, or else `InfraError` is
        raised."""
        creating = to_thread.run_sync(self._create, abandon_on_cancel=True)
        self._actor = await self._call(creating, "its creation", self._timeouts.start_s)
        await self._call(self._actor.load.remote(), "loading", self._timeouts.start_s)

    async def start(self, *, has_engines: bool) -> None:
        """See `WorkerActor.start`."""
        await self._call(self._actor.start.remote(has_engines=has_engines), "starting", self._timeouts.start_s)

    async def post(self, commands: Sequence[Command]) -> None:
        await self._call(self._actor.post.remote(commands), "taking commands", self._timeouts.call_s)

    async def take(self) -> WorkerReport:
        report: WorkerReport = await self._call(self._actor.take.remote(), "reporting", self._timeouts.call_s)
        return report

    async def kill(self) -> None:
        if self._actor is None:
            return
        with anyio.move_on_after(KILL_S), suppress(RayError):
            await to_thread.run_sync(partial(ray.kill, self._actor), abandon_on_cancel=True)

    async def _call(self, ref: Awaitable[Any], doing: str, limit_s: float) -> Any:
        try:
            with anyio.fail_after(limit_s):
                return await ref
        except TimeoutError:
            raise DeadlineError(f"worker {self._place} did not finish {doing} within {limit_s:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, AsyncRLError):
                raise error.cause from None
            raise BugError.wrap(f"worker {self._place} failed in {doing}: {error.cause}", error) from None
        except RayError as error:
            message = f"the process of worker {self._place} died; logs/ray in the run directory may say why"
            raise InfraError.wrap(message, error) from None


async def start_link(config: Config, place: int, *, has_engines: bool) -> ActorLink:
    """Start a worker in the middle of a run."""
    link = ActorLink(config, place)
    try:
        await link.load()
        await link.start(has_engines=has_engines)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await link.kill()
        raise
    return link
