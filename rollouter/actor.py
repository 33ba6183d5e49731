"""The Ray actor that runs the Rollouter. It connects `rollouter.rollouter` to Ray and makes no decisions."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, DeadlineError, InfraError
from asyncrl.core.ports import SharedGpus
from asyncrl.core.records import RecordSink, RunRecord, stream_records
from asyncrl.core.tasks import task_group
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.process_usage import ProcessMonitor
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.payloads import make_payloads
from asyncrl.queue.turn_log import FileTurns, NoTurns
from asyncrl.weights.object_store import ObjectStoreFeed, StoreGpuTurns
from rollouter.agent.parsing import AUTO
from rollouter.coverage import RemainingSamples, UnavailableFleet, first_uncovered
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.protocol import GatewayResponse
from rollouter.gateway.session import AgentGateway
from rollouter.group_workers.pool import WorkerPool
from rollouter.loading import RolloutTask, load_task
from rollouter.rewards.scorer import CombinedScorer
from rollouter.rollouter import Rollouter
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.handles import connect
from rollouter.serving.http import endpoint_url, rollouter_name
from rollouter.serving.lending import lent_gpus, run_fleet
from rollouter.serving.options import rollout_app
from rollouter.serving.reward_model import ServedRewardModel
from rollouter.trajectory_dump import make_files
from rollouter.validation.evaluation import Evaluation
from rollouter.weight_updates import RolloutStart
from rollouter.worker_actor import ActorLink, start_link
from skip import SkipManager

MAX_CONCURRENCY = 16
FLUSH_S = 5.0
"""Maximum time that `run` waits at its end for profiler events to reach the disk."""
AGENT_REQUESTS = 10_000
"""Additional concurrent calls for agents. `rollouter.serving.http` forwards fewer requests at a time than this."""

logger = logging.getLogger(__name__)


class RolloutActor:
    """The Ray actor that `start_rollouter` starts. Its methods may be called while a run is in progress."""

    def __init__(self, config: Config, incarnation: int = 1) -> None:
        self._config = config
        self._incarnation = incarnation
        self._task: RolloutTask | None = None
        self._run_dir: Path | None = None
        self._rollouter: Rollouter | None = None
        self._loading = ""
        self._evaluation: Evaluation | None = None
        self._pool: WorkerPool | None = None
        """The workers of the evaluation."""
        self._stopped = False
        self._records: AsyncIterator[list[RunRecord]] | None = None
        self._links: list[ActorLink] = []
        self._health = ProcessMonitor("rollouter") if ray.is_initialized() else None

    async def prepare(self, run_dir: str) -> Mapping[str, Any]:
        """Load data, tokenizer and reward functions. This needs no engine, so it can run while the engines start.

        Returns:
            `num_prompts` per epoch, `num_val_prompts`, `num_filtered` and `num_val_filtered` (over-length prompts), and
            `call_format`: the parser of tool calls that `rollout.multi_turn.format: auto` has found, or "".

        Raises:
            ConfigError, DataError, UserCodeError: the data, the tokenizer or a reward function is unusable.
        """
        profile.configure("rollouter", ProfilerSettings.of(self._config.profiler, Path(run_dir)))
        await to_thread.run_sync(SkipManager.init, self._config)
        self._links = [ActorLink(self._config, place) for place in range(self._config.rollout.num_workers)]
        async with task_group() as tasks:
            for link in self._links:
                tasks.start_soon(link.load)
            task = await to_thread.run_sync(load_task, self._config, None, self._report)
        self._task, self._run_dir, self._loading = task, Path(run_dir), ""
        finds_format = self._config.rollout.multi_turn.format == AUTO
        return {
            "num_prompts": len(task.prompts),
            "num_val_prompts": len(task.val_prompts) if task.val_prompts is not None else 0,
            "num_filtered": task.num_filtered,
            "num_val_filtered": task.num_val_filtered,
            "call_format": task.agent.call_format if task.agent is not None and finds_format else "",
        }

    def _report(self, progress: str) -> None:
        logger.info("%s", progress)
        self._loading = progress

    async def first_uncovered(self, remaining: RemainingSamples) -> str:
        """See `rollouter.coverage`. Call it after `prepare`."""
        if self._task is None:
            raise BugError("RolloutActor.first_uncovered before prepare")
        find = partial(first_uncovered, self._config, self._task.prompts, remaining, self._task.agent)
        return await to_thread.run_sync(find, abandon_on_cancel=True)

    async def begin_run(self, queue_handle: Any, store_handle: Any, start: RolloutStart) -> None:
        """Begin to generate until the queue ends. Call it after `prepare` and `start_app`."""
        if self._task is None or self._run_dir is None:
            raise BugError("RolloutActor.begin_run before prepare")
        run = partial(self._run, self._task, self._run_dir, queue_handle, store_handle, start)
        self._records = stream_records("rollouter", run)

    async def next_records(self) -> list[RunRecord]:
        """Wait until there are records of the run, and return them. After the last one, return an empty list.

        Raises:
            FencedError: a newer incarnation is running.
            AsyncRLError: the first failure of any part.
        """
        if self._records is None:
            raise BugError("RolloutActor.next_records before begin_run")
        return await anext(self._records, [])

    async def _run(
        self,
        task: RolloutTask,
        run_dir: Path,
        queue_handle: Any,
        store_handle: Any,
        start: RolloutStart,
        sink: RecordSink,
    ) -> None:
        config, call_s = self._config, self._config.timeouts.call_s
        scorer, pool = await self._start_generation(task, has_engines=start.has_engines)
        turns: FileTurns | NoTurns = FileTurns(run_dir, self._incarnation) if config.journal == "on" else NoTurns()
        fleet = await connect(self._fleet, call_s) if start.has_engines else UnavailableFleet()
        gpu_turns = StoreGpuTurns(store_handle, call_s=call_s)
        self._rollouter = Rollouter(
            config,
            task._replace(scorer=scorer),
            queue=QueueClient(queue_handle, call_s, part="rollouter", incarnation=self._incarnation),
            payloads=make_payloads(config, run_dir, self._incarnation),
            turns=turns,
            feed=ObjectStoreFeed(store_handle, call_s=call_s),
            fleet=fleet,
            sink=sink,
            start=start,
            files=make_files(config, run_dir, task.decode),
            workers=pool,
            gpus=SharedGpus(gpu_turns, fleet) if config.takes_turns else None,
            lent=lent_gpus(gpu_turns, fleet) if config.lends_gpus else None,
        )
        SkipManager.watch(self._rollouter.waits.waiting)
        if self._stopped:
            self._rollouter.stop()
        try:
            await self._rollouter.run()
        finally:
            with anyio.move_on_after(FLUSH_S, shield=True):
                await to_thread.run_sync(profile.flush, abandon_on_cancel=True)
            await scorer.aclose()
        await turns.aclose()

    async def evaluate(self, file: str) -> Mapping[str, Any]:
        """Answer the validation set with the weights in the model's files, and append the answers to `file`. Return
        `Evaluation.status` at the end. Call it after `prepare` and `start_app`; `stop` ends it early.

        Raises:
            AsyncRLError: the first failure of any part.
        """
        if self._task is None:
            raise BugError("RolloutActor.evaluate before prepare")
        scorer, self._pool = await self._start_generation(self._task, has_engines=True)
        fleet = await connect(self._fleet, self._config.timeouts.call_s)
        self._evaluation = Evaluation(
            self._config, self._task._replace(scorer=scorer), Path(file), fleet=fleet, workers=self._pool
        )
        if self._stopped:
            self._evaluation.stop()
        try:
            await self._evaluation.run()
        finally:
            await scorer.aclose()
        return self._evaluation.status()

    async def _start_generation(
        self, task: RolloutTask, *, has_engines: bool
    ) -> tuple[CombinedScorer, WorkerPool | None]:
        """Return the scorer and the workers, which have started; make the address of agents known."""
        config = self._config
        gc.collect()
        gc.freeze()  # otherwise half of the CPU time per response goes into collections that search what is loaded
        namespace = ray.get_runtime_context().namespace
        served: ServedRewardModel | None = None
        if config.reward_model.placement == "serve":
            served = await connect(partial(ServedRewardModel, config, namespace=namespace), config.timeouts.call_s)
        scorer = CombinedScorer(task.scorer, config, task.decode, served)
        if isinstance(task.agent, ExternalAgent) and has_engines:
            task.agent.serve_at(await _find_endpoint(config, namespace), self._incarnation)
        async with task_group() as starting:
            for place in range(len(self._links)):
                starting.start_soon(self._start_worker, place, has_engines)
        start_worker = partial(start_link, config, has_engines=has_engines)
        pool = WorkerPool(self._links, start_worker, limit_s=config.timeouts.probe_s) if self._links else None
        return scorer, pool

    async def _start_worker(self, place: int, has_engines: bool) -> None:
        """Start a worker that has loaded, or another one if its process has died since."""
        try:
            await self._links[place].start(has_engines=has_engines)
        except InfraError as error:
            logger.warning("worker %s is replaced before its start: %s", place, error)
            await self._links[place].kill()
            self._links[place] = await start_link(self._config, place, has_engines=has_engines)

    def _fleet(self) -> ServeFleet:
        return run_fleet(self._config, namespace=ray.get_runtime_context().namespace)

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """Answer a request with a trajectory's key, see `AgentGateway.answer`."""
        return await self._gateway.answer(key, path, body)

    async def stream(self, key: str, path: str, body: Mapping[str, Any]) -> AsyncIterator[GatewayResponse | bytes]:
        """Answer a request for a turn with `stream: true`, see `AgentGateway.stream`."""
        async with aclosing(self._gateway.stream(key, path, body)) as items:
            async for item in items:
                yield item

    @property
    def _gateway(self) -> AgentGateway:
        """The gateway of the run's agents; without agents, one that knows no key."""
        agent = self._task.agent if self._task is not None else None
        return agent.gateway if isinstance(agent, ExternalAgent) else AgentGateway()

    async def stop(self) -> None:
        """End `run` soon, without applying the newest version. To let `run` complete, close the queue instead."""
        self._stopped = True
        if self._rollouter is not None:
            self._rollouter.stop()
        if self._evaluation is not None:
            self._evaluation.stop()

    async def status(self) -> Mapping[str, Any]:
        """Return `incarnation`, `pid` and `node_id` of this process, and in a Ray run its `health` (`ProcessHealth`).
        In an evaluation, also `evaluation` (`Evaluation.status`) and `WorkerPool.status`.

        Until `run` has been called, `loading` is the progress of `prepare`. Afterwards, the status also contains
        `profiler` (`Profiler.status`) and all entries of `Rollouter.status`.
        """
        own: dict[str, Any] = {
            "incarnation": self._incarnation,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
        }
        if self._health is not None:
            own["health"] = self._health.measure()
        if self._evaluation is not None:
            own["evaluation"] = self._evaluation.status()
        if self._pool is not None:
            own |= self._pool.status()
        if self._rollouter is None:
            return {**own, "loading": self._loading} if self._loading else own
        return {**own, "profiler": profile.status(), **self._rollouter.status()}


async def _find_endpoint(config: Config, namespace: str) -> str:
    """See `endpoint_url`. Raises also `DeadlineError`: Ray Serve did not answer within `timeouts.call_s`."""
    limit_s = config.timeouts.call_s
    try:
        with anyio.fail_after(limit_s):
            return await to_thread.run_sync(endpoint_url, rollout_app(config, namespace), abandon_on_cancel=True)
    except TimeoutError as error:
        raise DeadlineError(
            f"Ray Serve did not answer where agents reach the run (rollout.agent) within {limit_s:g} s "
            "(timeouts.call_s)"
        ) from error


def start_rollouter(config: Config, *, incarnation: int = 1) -> Any:
    """Start the actor in this Ray job and return its handle. It runs on the caller's node, where the run directory is.

    Ray never restarts the actor: the supervisor starts the next incarnation, after registering it with the queue.
    """
    actor: Any = ray.remote(RolloutActor)
    same_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote_actor = actor.options(
        name=rollouter_name(incarnation),
        num_cpus=0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY + AGENT_REQUESTS * config.rollout.agent.enabled,
        scheduling_strategy=same_node,
    )
    return remote_actor.remote(config, incarnation)
