"""The Rollouter as a Ray actor: adapters around `rollouter.rollouter`, and nothing that decides."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.failures import BugError
from asyncrl.health.processes import OwnHealth
from asyncrl.payload_files import make_payloads
from asyncrl.profiling import Setup, profile
from asyncrl.queue_actor import QueueClient
from asyncrl.record_stream import stream_records
from asyncrl.records import RecordSink, RunRecord
from asyncrl.turn_files import FileTurns, NoTurns
from asyncrl.weights.object_store import ObjectStoreFeed
from rollouter.coverage import NoFleet, ToCome, first_uncovered
from rollouter.dump import make_dump
from rollouter.gateway.errors import unknown_key
from rollouter.gateway.external import ExternalAgent
from rollouter.gateway.responses import Answer
from rollouter.rewards.combination import CombinedScorer
from rollouter.rewards.model import ServedModel
from rollouter.rollouter import Rollouter, RolloutStart, Task, load_task
from rollouter.serving.agents import endpoint_url, rollouter_name
from rollouter.serving.fleet import ServeFleet
from skip import SkipManager

MAX_CONCURRENCY = 16
FLUSH_S = 5.0
"""For events that are not on the disk when `run` ends."""
AGENT_REQUESTS = 10_000
"""Requests of agents at once, besides; the HTTP side lets no more through (`rollouter.serving.agents`)."""


class RolloutActor:
    """See `start_rollouter`. `run` stays inside; the other calls come beside it."""

    def __init__(self, config: Config, incarnation: int = 1) -> None:
        self._config = config
        self._incarnation = incarnation
        self._task: Task | None = None
        self._run_dir: Path | None = None
        self._rollouter: Rollouter | None = None
        self._stopped = False
        self._health = OwnHealth("rollouter") if ray.is_initialized() else None

    async def prepare(self, run_dir: str) -> Mapping[str, int]:
        """Load data, tokenizer and reward function; needs no engine, so it can run while they start.

        Returns:
            `num_prompts` per epoch, `num_val_prompts`, `num_filtered` and `num_val_filtered` (over-length prompts).

        Raises:
            ConfigError, DataError, UserCodeError: what is wrong with them.
        """
        profile.configure("rollouter", Setup.of(self._config.profiler, Path(run_dir)))
        await to_thread.run_sync(SkipManager.init, self._config)
        task = await to_thread.run_sync(load_task, self._config, Path(run_dir) / "cache")
        self._task, self._run_dir = task, Path(run_dir)
        return {
            "num_prompts": len(task.prompts),
            "num_val_prompts": len(task.val_prompts) if task.val_prompts is not None else 0,
            "num_filtered": task.num_filtered,
            "num_val_filtered": task.num_val_filtered,
        }

    async def first_uncovered(self, to_come: ToCome) -> str:
        """See `rollouter.coverage`. After `prepare`."""
        if self._task is None:
            raise BugError("RolloutActor.first_uncovered before prepare")
        look = partial(first_uncovered, self._config, self._task.prompts, to_come, self._task.agent)
        return await to_thread.run_sync(look, abandon_on_cancel=True)

    async def run(self, queue_handle: Any, store_handle: Any, start: RolloutStart) -> AsyncIterator[RunRecord]:
        """Generate until the queue ends; yields what happened as it happens. After `prepare` and `start_app`.

        Raises:
            FencedError: a newer incarnation is at work.
            AsyncRLError: the first failure of any part.
        """
        if self._task is None or self._run_dir is None:
            raise BugError("RolloutActor.run before prepare")
        run = partial(self._run, self._task, self._run_dir, queue_handle, store_handle, start)
        async for record in stream_records("rollouter", run):
            yield record

    async def _run(
        self, task: Task, run_dir: Path, queue_handle: Any, store_handle: Any, start: RolloutStart, sink: RecordSink
    ) -> None:
        config, call_s = self._config, self._config.timeouts.call_s
        namespace = ray.get_runtime_context().namespace
        served = ServedModel(config, namespace=namespace) if config.reward_model.placement == "serve" else None
        scorer = CombinedScorer(task.scorer, config, task.decode, served)
        if isinstance(task.agent, ExternalAgent) and start.has_engines:
            url = await to_thread.run_sync(endpoint_url, namespace, abandon_on_cancel=True)
            task.agent.serve_at(url, self._incarnation)
        turns: FileTurns | NoTurns = FileTurns(run_dir, self._incarnation) if config.journal == "on" else NoTurns()
        self._rollouter = Rollouter(
            config,
            task._replace(scorer=scorer),
            queue=QueueClient(queue_handle, call_s, part="rollouter", incarnation=self._incarnation),
            payloads=make_payloads(config, run_dir, self._incarnation),
            turns=turns,
            feed=ObjectStoreFeed(store_handle, call_s=call_s),
            fleet=ServeFleet(config, namespace=namespace) if start.has_engines else NoFleet(),
            sink=sink,
            start=start,
            dump=make_dump(config, run_dir, task.decode),
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

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> Answer:
        """A request with a trajectory's key, see `Gateway.answer`."""
        agent = self._task.agent if self._task is not None else None
        if not isinstance(agent, ExternalAgent):
            refusal = unknown_key()
            return Answer(refusal.status, refusal.body)
        return await agent.gateway.answer(key, path, body)

    async def stop(self) -> None:
        """End `run` soon, without a last apply. For an orderly end close the queue instead."""
        self._stopped = True
        if self._rollouter is not None:
            self._rollouter.stop()

    async def status(self) -> Mapping[str, Any]:
        """`incarnation`, `pid`, `node_id`, and in a Ray run `health` (`ProcessHealth`) of this process; from `run` on
        `profiler` (`Profiler.status`) and everything of `Rollouter.status` too."""
        own: dict[str, Any] = {
            "incarnation": self._incarnation,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
        }
        if self._health is not None:
            own["health"] = self._health.tell()
        if self._rollouter is None:
            return own
        return {**own, "profiler": profile.status(), **self._rollouter.status()}


def start_rollouter(config: Config, *, incarnation: int = 1) -> Any:
    """Start the actor in this Ray job, on the caller's node: it writes the run directory. Returns its handle.

    Ray never restarts it: the next incarnation is the supervisor's to start, once the queue knows of it.
    """
    actor: Any = ray.remote(RolloutActor)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    shell = actor.options(
        name=rollouter_name(incarnation),
        num_cpus=0,
        max_restarts=0,
        max_concurrency=MAX_CONCURRENCY + AGENT_REQUESTS * config.rollout.agent.enabled,
        scheduling_strategy=here,
    )
    return shell.remote(config, incarnation)
