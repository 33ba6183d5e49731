"""The real Rollouter, queue, journal and Ray Serve, on engines that answer at once: CPU time per response and rate."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil
from ray import serve

from asyncrl.config.compose import check_config
from asyncrl.config.schema import Config
from asyncrl.core.staleness import Pacing
from asyncrl.driver.actors import SupervisedRollouter
from asyncrl.profiling import ProfilerSettings
from asyncrl.queue.actor import QueueClient, start_queue
from asyncrl.queue.sample_queue import QueueOptions
from asyncrl.storage.run_dir import RunDir
from asyncrl.weights.object_store import start_store
from benchmarks.report import Table
from benchmarks.running import local_ray, print_progress
from benchmarks.scale.engines import start_instant_app
from benchmarks.scale.throttle import throttled
from rollouter.weight_updates import RolloutStart

LEASE = 16
LIMIT_S = 300.0
"""Timeout of one measurement."""
REST = "other"
"""All other processes below this one: raylet, GCS, Serve's controller."""


@dataclass(frozen=True, slots=True)
class GlueWork:
    """What one measurement generates."""

    samples: int
    """Measured samples. A quarter as many are generated before them, so that caches and connections exist."""
    group: int = 8
    tokens: int = 60
    concurrent: int = 64
    """`rollout.max_concurrent_samples`."""
    replicas: int = 1
    workers: int = 0
    """`rollout.num_workers`."""
    worker_share: float = 1.0
    """Share of the time for which each worker may run."""

    @property
    def warm_up(self) -> int:
        return max(LEASE, self.samples // 4)

    def config(self) -> Config:
        overrides = (
            f"rollout.n={self.group}",
            f"rollout.response_length={self.tokens}",
            f"rollout.num_replicas={self.replicas}",
            f"rollout.max_concurrent_samples={self.concurrent}",
            f"rollout.num_workers={self.workers}",
        )
        return check_config(None, overrides).require()


def measure_glue(works: Sequence[GlueWork]) -> Table:
    """Return a row for each measurement, each on a new Ray cluster and a new run directory."""
    rows = []
    for work in works:
        print_progress(f"glue, {work.replicas} replicas, {work.workers} workers")
        namespace = f"bench-scale-{work.replicas}-{work.workers}"
        with (
            tempfile.TemporaryDirectory(prefix="scale-benchmark-") as directory,
            local_ray(namespace, num_cpus=work.replicas + 1),
        ):
            try:
                rows.append(anyio.run(_measure, work, Path(directory), namespace))
            finally:
                serve.shutdown()
    return rows


async def _measure(work: GlueWork, directory: Path, namespace: str) -> dict[str, Any]:
    config = work.config()
    replicas = await start_instant_app(config, namespace)
    total = work.warm_up + work.samples
    rollouter = SupervisedRollouter(config, RunDir(directory), rollout_start=lambda: RolloutStart(False))
    await rollouter.start(1)
    # Two leases more than are in generation may be admitted: only the system limits the rate, and nothing runs ahead.
    pacing = Pacing(LEASE, work.concurrent / LEASE + 1, total)
    handle = start_queue(
        QueueOptions(rollouter.prepared["num_prompts"], pacing),
        run_dir=directory,
        profiler=ProfilerSettings.of(config.profiler, directory),
    )
    queue = QueueClient(handle, config.timeouts.call_s)
    await queue.attach("rollouter", 1)
    rollouter.queue, rollouter.queue_handle, rollouter.store_handle = queue, handle, start_store(namespace)
    found: dict[str, Any] = {}

    async def consume() -> None:
        await _take(queue, 0, LEASE)  # from then on, all processes exist
        status = await rollouter.status(config.timeouts.call_s)
        assert status is not None
        parts = {
            "Rollouter": [status["pid"]],
            "workers": [worker["pid"] for worker in status.get("workers", ())],
            "replicas": replicas,
            "queue": [(await queue.status()).pid],
        }
        # The warm-up, too, or the samples in flight at its end would have had workers that are not throttled.
        with throttled(parts["workers"] if work.worker_share < 1 else (), work.worker_share):
            await _take(queue, LEASE, work.warm_up)
            status = await rollouter.status(config.timeouts.call_s)
            assert status is not None
            before, started = _cpu_seconds(parts), time.perf_counter()
            await _take(queue, work.warm_up, total)
            seconds, after = time.perf_counter() - started, _cpu_seconds(parts)
        # Samples that were complete but not leased at the start have cost their time before.
        responses = (total - status["samples_done"]) * work.group
        found["responses/s"] = responses / seconds
        found.update({f"{part} ms": 1e3 * (after[part] - before[part]) / responses for part in after})
        await queue.close()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            async for _ in rollouter.run():
                pass
    await rollouter.kill()
    return {"replicas": work.replicas, "workers": work.workers, **found}


async def _take(queue: QueueClient, taken: int, until: int) -> None:
    """Lease and commit samples until the run has taken `until`; each lease counts as a version."""
    while taken < until:
        lease = await queue.lease(min(LEASE, until - taken), trainer_version=taken // LEASE, timeout_s=10.0)
        if lease.samples:
            await queue.commit(lease.lease_id, [sample.meta.sample_id for sample in lease.samples])
            taken += len(lease.samples)
            await queue.set_applied_version(taken // LEASE)


def _cpu_seconds(parts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the CPU seconds of all threads of each part's processes, and of the rest of Ray."""
    named = {pid: part for part, pids in parts.items() for pid in pids}
    seconds = dict.fromkeys([*parts, REST], 0.0)
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[named.get(process.pid, REST)] += times.user + times.system
    return seconds
