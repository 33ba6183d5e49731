"""The vLLM engine behind Ray Serve that all measurements share, and its count of generated tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet, StoreStatus
from asyncrl.weights.object_store import ServedRun, start_store
from benchmarks.agents.conversations import MAX_MODEL_LEN, MODEL
from benchmarks.agents.lag import measure_lag
from benchmarks.agents.over_sampling import measure_over_sampling
from benchmarks.agents.tools import measure_tools
from benchmarks.report import Table
from benchmarks.running import local_ray, print_progress, serving

NAMESPACE = "bench-agents"
COUNT_S = 30.0
"""Timeout for the engine to report that it has no requests."""


class BenchmarkEngine:
    """A fleet of one engine."""

    def __init__(self, fleet: EngineFleet, store: Any) -> None:
        """`store`: the handle of the weight store, to which replicas report."""
        self.fleet = fleet
        self._store = store

    async def generated_tokens(self) -> int:
        """Wait until no request is in flight, then return the tokens generated so far, including aborted requests."""
        since = time.time() + 0.1
        with anyio.fail_after(COUNT_S):
            while True:
                status: StoreStatus = await self._store.status.remote()
                for report in status.replicas:
                    if report.reported_at > since and not report.in_flight:
                        return report.generated_tokens
                await anyio.sleep(0.1)


@asynccontextmanager
async def running_engine() -> AsyncIterator[BenchmarkEngine]:
    """Start an engine for the duration of the block; Ray has to be connected."""
    config = Config.model_validate({"model": {"path": MODEL}, "rollout": {"max_model_len": MAX_MODEL_LEN}})
    store = start_store(NAMESPACE, ServedRun.of(config, name="the benchmark", namespace=NAMESPACE))
    async with serving(config, NAMESPACE) as fleet:
        yield BenchmarkEngine(fleet, store)


def measure_on_engine(only: Collection[str], rounds: int, jitter: float) -> dict[str, Table]:
    """Start Ray and an engine, and measure the tables of `only` that need one."""
    with local_ray(NAMESPACE):
        return anyio.run(_measure, only, rounds, jitter)


async def _measure(only: Collection[str], rounds: int, jitter: float) -> dict[str, Table]:
    print_progress("starting the engine")
    tables: dict[str, Table] = {}
    async with running_engine() as engine:
        if "tools" in only:
            tables["tools"] = await measure_tools(engine.fleet, rounds, jitter=jitter)
        if "lag" in only:
            tables["lag"] = await measure_lag(engine.fleet, rounds)
        if "over_sampling" in only:
            tables["over_sampling"] = await measure_over_sampling(engine.fleet, engine.generated_tokens, rounds)
    return tables
