"""One replica: an `AsyncLLM` under `ray.serve.llm`, with token-exact generation and live weight updates.

generate_tokens ──▶ generation ──▶ gate ──▶ AsyncLLM
apply_version ────▶ weights ──────▶ │          │      fetch, pause, load, resume, verify
attach ───────────▶ weights, health                   follow the store of another run
Serve asks it to end ──▶ generation                   hand all requests back: their callers continue them elsewhere
weight store ◀───── health ◀────────┴──────────┘      reports, pings; ends the process, so that Serve replaces it
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import ConfigError, InfraError, ReplicaLeftError
from asyncrl.core.ports import Accepted, ApplyReport, GenerateRequest, Publication
from asyncrl.profiling import profile
from asyncrl.storage.media import restrict_formats
from asyncrl.weights.broadcast import BroadcastMember
from asyncrl.weights.object_store import ServedRun, StoreGpuTurns, attached_run
from rollouter.serving.autoscaling import replica_metrics
from rollouter.serving.client import Delta, EventBatch
from rollouter.serving.http_metrics import engine_metrics
from rollouter.serving.options import ReplicaFacts, ServingOptions, app_namespace
from rollouter.serving.ray_internals import LLMServer, asked_to_end
from rollouter.serving.replica.engine import OpenAIEngine, RolloutEngine
from rollouter.serving.replica.event_forwarding import EventForwarder
from rollouter.serving.replica.generation import TokenGeneration
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.weights import PauseMode, WeightUpdates

LEAVE_POLL_S = 0.1
"""Interval at which a replica checks whether Serve has asked it to end. Serve has no call that tells it in time."""


class RolloutServer(LLMServer):
    """`LLMServer` with the methods that the Rollouter calls."""

    async def __init__(self, options: ServingOptions, *, openai: bool) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine and, if there is a run whose weight store has a version, apply the newest one before any
        request.

        Raises:
            InfraError: the engine does not start.
        """
        context = serve.get_replica_context()
        self._facts = ReplicaFacts.of(options, context.replica_id.unique_id)
        self._namespace = options.namespace or app_namespace(context.app_name)
        self._forwarder = EventForwarder(self._facts.replica)
        self._looking = asyncio.Lock()
        self._knows_run = options.namespace is not None
        """Whether every later run reaches this replica by `attach`. The replicas of a run's own serve no other run."""
        self._call_s = options.timeouts.call_s
        found = await attached_run(self._namespace, limit_s=self._call_s)
        # A run that these engines do not fit is refused when it attaches, or at its first call.
        store, run = (None, ServedRun()) if found is None or self._misfit(found[1]) else found
        profile.configure(f"replica-{self._facts.replica}", run.profiler)
        self._health = ReplicaHealth(
            replica=self._facts.replica,
            node_id=ray.get_runtime_context().get_node_id(),
            engine_s=options.timeouts.engine_s,
        )
        self._health.report_to(store)
        self._lent = options.lent
        if options.shares_gpus and store is not None:
            await wait_for_gpus(store, self._call_s)
        await super().__init__(LLMConfig(**options.llm_config), engine_cls=OpenAIEngine if openai else RolloutEngine)
        llm = self.engine.client
        await self._health.attach(self.engine)
        await llm.update_weight_version("0")
        self._weights = WeightUpdates(self.engine, self._health, self._namespace, options.timeouts)
        self._generation = TokenGeneration(
            llm, self._health, self._weights.gate, self._weights.pauses, lambda: self._weights.adapter
        )
        if store is not None:
            # The files of a separately deployed model need not be those with which the run begins, and a run of
            # adapters begins with an adapter.
            serves_initial = options.namespace is not None and not run.adapters
            await self._weights.follow(store, run, serves_initial=serves_initial)
            await self._weights.start()
        gc.collect()
        gc.freeze()  # otherwise collections during a request search all that vLLM has loaded
        self._health.up = True
        self._health.end_update()
        self._health.in_background(self._await_leave())

    async def _start_engine(self) -> None:
        """Start the engine without the actor to which `LLMServer` reports Ray's usage statistics: importing vLLM once
        more costs this actor 4 s of CPU time and 400 MB, just before the first sample."""
        await self.engine.start()

    async def _await_leave(self) -> None:
        """Hand all requests back once Serve asks this replica to end. Serve gives it `graceful_shutdown_timeout_s`."""
        while not asked_to_end():  # noqa: ASYNC110  see LEAVE_POLL_S
            await asyncio.sleep(LEAVE_POLL_S)
        self._health.enter("leaving")
        self._generation.hand_back()

    async def attach(self) -> None:
        """Serve the versions of the run that attaches to this application, and report to it.

        Raises:
            ConfigError: the engine does not fit the run. The replica stays as it is.
            InfraError: there is no such run any more, or its store does not answer.
        """
        async with self._looking:
            if (found := await attached_run(self._namespace, limit_s=self._call_s)) is None:
                raise InfraError(f"no run is attached any more: Ray namespace {self._namespace} has no weight store")
            await self._follow(*found)

    async def _join(self) -> None:
        """Serve the run that attached while this replica started, before the run's first call.

        The broadcast of `attach` did not reach the replica then. As Serve knows it at its first call, all later
        broadcasts reach it.

        Raises:
            ConfigError, InfraError: see `attach`.
        """
        if self._knows_run:
            return
        async with self._looking:
            if self._knows_run:  # another call has looked meanwhile
                return
            if (found := await attached_run(self._namespace, limit_s=self._call_s)) is not None:
                await self._follow(*found)
            self._knows_run = True

    async def _follow(self, store: Any, run: ServedRun) -> None:
        if not self._weights.follows(store):
            if problem := self._misfit(run):
                raise ConfigError(f"rollout.attach: {problem}")
            self._forwarder.take_all()  # events of an earlier run
            profile.configure(f"replica-{self._facts.replica}", run.profiler)
            await self._weights.follow(store, run, serves_initial=False)
            self._health.report_to(store)
        self._knows_run = True

    def _misfit(self, run: ServedRun) -> str:
        """Return why this engine cannot generate for the run, or an empty string."""
        return self._facts.misfit(run.engines) if run.engines is not None else ""

    async def reconfigure(self, timeouts: TimeoutsConfig) -> None:
        """Use other time limits. The engine is not restarted."""
        self._weights.timeouts = timeouts
        self._health.engine_s = timeouts.engine_s

    async def generate_tokens(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Accepted | EventBatch | list[Delta], None]:
        """See `TokenGeneration.run`. The stream also contains this replica's profiler events.

        The first call waits until the replica serves the newest version. One on lent GPUs gets it whenever it wakes up
        or starts, and none is published before it sleeps again.
        """
        if not (self._health.leaving or self._lent):
            await self._join()
            await self._weights.join()
        async with aclosing(self._forwarder.attach(self._generation.run(requests))) as items:
            async for item in items:
                yield item

    async def broadcast_member(self) -> BroadcastMember:
        """See `WeightUpdates.member`. Raises as `apply_version`."""
        await self._check_present()
        return self._weights.member()

    async def apply_version(
        self, publication: Publication, mode: PauseMode, clear_kv: bool, broadcast: bool, run: str
    ) -> ApplyReport:
        """See `WeightUpdates.apply`. The report also contains this replica's profiler events.

        Raises:
            ReplicaLeftError: this replica is leaving, so it serves no further request.
        """
        await self._check_present()
        report = await self._weights.apply(publication, mode, clear_kv, broadcast, run)
        self._generation.closed = False
        return replace(report, events=tuple(self._forwarder.take_all()))

    async def sleep_engine(self) -> None:
        """See `WeightUpdates.sleep`. With lent GPUs, hand all requests back first, and those that still arrive, as a
        replica that leaves. Raises also as `apply_version`."""
        await self._check_present()
        if self._lent:
            self._generation.closed = True
            self._generation.hand_back()
        await self._weights.sleep("abort" if self._lent else "wait")

    async def wake_engine(self) -> None:
        """See `WeightUpdates.wake`. Raises also as `apply_version`."""
        await self._check_present()
        await self._weights.wake()
        self._generation.closed = False

    async def _check_present(self) -> None:
        if self._health.leaving:
            raise ReplicaLeftError(f"replica {self._facts.replica} is leaving")
        await self._join()

    def engine_metrics(self) -> str:
        """Return this replica's metrics for Prometheus."""
        return engine_metrics(self._facts.replica, self._health.weights_version.version)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `rollouter.serving.autoscaling` needs in Serve's controller. Serve calls this method."""
        return replica_metrics(self._health.wanted_replicas)

    async def check_health(self) -> None:
        """Raise if the replica must be replaced. Serve calls this method, and replaces the replica if it raises."""
        if self._health.broken:
            raise InfraError(self._health.broken)
        await super().check_health()


async def wait_for_gpus(store: Any, call_s: float) -> None:
    """Return once it is the engines' turn on the GPUs that they share with the ranks. A replica that is replaced during
    the ranks' turn would take memory that the ranks need, or find too little and fail."""
    turns = StoreGpuTurns(store, call_s=call_s)
    while await turns.wait("engines", "wanted", timeout_s=call_s) is None:
        pass


async def start_server(options: ServingOptions, *, openai: bool) -> RolloutServer:
    """Return a started server, with vLLM's OpenAI front end if `openai`."""
    if openai:
        restrict_formats()  # vLLM opens the images of HTTP requests itself
    server = RolloutServer.__new__(RolloutServer)
    # Serve awaits asynchronous constructors; plain Python does not.
    await server.__init__(options, openai=openai)  # type: ignore[misc]
    return server
