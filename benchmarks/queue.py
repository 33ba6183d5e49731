"""Measure throughput and latency of the sample queue, against a plain Ray actor around a deque.

    journal on    producer ─ put ─▶ files on disk ◀─ get ─ consumer     the queue actor gets metadata and references,
                  and writes its journal before it answers
    journal off   producer ─ put ─▶ object store ◀─ get ─ consumer      the same in memory, without a journal
    deque         producer ─ pickled payload ─▶ actor ─ pickled payload ─▶ consumer, one call per sample and side

Each transport moves the same samples, from one producer actor that handles 64 samples concurrently to one consumer
actor that takes 64 at a time and reads every byte; at most 256 samples are in the queue. The rate is measured at full
speed. Latency is measured separately, at a low rate with a waiting consumer: at full speed it would be 256 divided by
the rate. Rounds of all transports alternate within one run. Rates are medians over rounds, ratios are medians of the
ratios of neighbouring rounds, latencies are percentiles over all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import anyio
import numpy as np
import ray

from asyncrl.core.ports import PayloadStore
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import FinishReason, Row, Sample, SampleId, Span, sample_meta
from asyncrl.queue.actor import QueueClient, start_queue
from asyncrl.queue.payloads import FilePayloads, RayPayloads
from asyncrl.queue.sample_queue import QueueOptions, SampleQueue
from benchmarks.report import Table, arguments, report
from benchmarks.running import alternating, local_ray, ratio

MAX_RUNNING = 64
LEASE = 64
QUEUE_CAPACITY = 4 * LEASE
TRAJECTORIES = 8
CALL_TIMEOUT_S = 120.0
LEASES_PER_CHECKPOINT = 8
"""Payload files are deleted once a checkpoint covers their samples."""


def make_sample(num_bytes: int, seed: int = 0) -> Sample:
    """Make a group of 8 scored trajectories with about `num_bytes` of arrays."""
    per_row = num_bytes // TRAJECTORIES
    prompt_tokens = min(128, per_row // 8)
    tokens = max(1, (per_row - 4 * prompt_tokens) // 9)
    rng = np.random.default_rng(seed)
    rows = tuple(
        Row(
            prompt_ids=rng.integers(0, 32000, prompt_tokens, dtype=np.int32),
            response_ids=rng.integers(0, 32000, tokens, dtype=np.int32),
            response_mask=np.ones(tokens, dtype=np.bool_),
            rollout_log_probs=rng.standard_normal(tokens, dtype=np.float32),
            spans=(Span(0, 0),),
            finish_reason=FinishReason.STOP,
            reward=1.0,
            trajectory=number,
        )
        for number in range(TRAJECTORIES)
    )
    return Sample(SampleId(0, 1), rows)


class SampleReader:
    """Copies every byte of a sample into reused memory, so that page faults do not dominate the figures."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes, dtype=np.uint8)

    def read(self, sample: Sample) -> None:
        for row in sample.rows:
            for array in (row.prompt_ids, row.response_ids, row.response_mask, row.rollout_log_probs):
                np.copyto(self._memory[: array.nbytes].view(array.dtype), array)


class QueueTransport(Protocol):
    """Moves samples from the producer to the consumer."""

    async def produce(self, num_samples: int, make: Callable[[int], Sample], pace: Pacer) -> None: ...

    async def consume(self, num_samples: int, batch: int, took: Callable[[list[Sample]], None]) -> None: ...


class Pacer:
    """Releases one sample every `interval_s`, counted from the first; 0 releases them without a delay."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._start = time.monotonic()
        self._count = itertools.count()

    async def next(self) -> None:
        if self._interval_s:
            due = self._start + next(self._count) * self._interval_s
            await anyio.sleep(max(0.0, due - time.monotonic()))


class ThroughQueue:
    """The sample queue: the producer admits, puts and offers; the consumer leases, gets and commits."""

    def __init__(self, handle: Any, payloads: PayloadStore) -> None:
        self._queue: SampleQueue = QueueClient(handle, CALL_TIMEOUT_S)
        self._payloads = payloads

    async def produce(self, num_samples: int, make: Callable[[int], Sample], pace: Pacer) -> None:
        running = anyio.Semaphore(MAX_RUNNING)
        async with anyio.create_task_group() as tasks:
            fed = 0
            while fed < num_samples:
                admission = await self._queue.admit(min(MAX_RUNNING, num_samples - fed), timeout_s=10)
                fed += len(admission.sample_ids)
                for sample_id in admission.sample_ids:
                    await running.acquire()
                    await pace.next()
                    tasks.start_soon(self._one, make(sample_id.index), running)

    async def _one(self, sample: Sample, running: anyio.Semaphore) -> None:
        await self._queue.offer(sample_meta(sample), await self._payloads.put(sample))
        running.release()

    async def consume(self, num_samples: int, batch: int, took: Callable[[list[Sample]], None]) -> None:
        trained = 0
        while trained < num_samples:
            version = trained // LEASE
            lease = await self._queue.lease(min(batch, num_samples - trained), trainer_version=version, timeout_s=10)
            if not lease.samples:
                continue
            samples = await self._payloads.get([queued.payload for queued in lease.samples])
            took([sample for sample in samples if sample is not None])
            trained += len(lease.samples)
            async with anyio.create_task_group() as tasks:
                ids = [queued.meta.sample_id for queued in lease.samples]
                tasks.start_soon(self._queue.commit, lease.lease_id, ids)
                if trained // LEASE > version:
                    tasks.start_soon(self._queue.set_applied_version, trained // LEASE)
            if trained // LEASE > version and trained // LEASE % LEASES_PER_CHECKPOINT == 0:
                await self._queue.mark(trained // LEASE)
                await self._queue.cover(trained // LEASE, trained // LEASE)


class DequeActor:
    """The baseline: a deque of payloads; producers wait while it is full, consumers while it is empty."""

    def __init__(self, size: int) -> None:
        self._deque: deque[bytes] = deque()
        self._size = size
        self._changed = asyncio.Condition()

    async def put(self, payload: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._deque) < self._size)
            self._deque.append(payload)
            self._changed.notify_all()

    async def get(self) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._deque) > 0)
            payload = self._deque.popleft()
            self._changed.notify_all()
            return payload


class ThroughDeque:
    """Sends each pickled sample through the actor's mailbox, as verl does."""

    def __init__(self, handle: Any) -> None:
        self._actor = handle

    async def produce(self, num_samples: int, make: Callable[[int], Sample], pace: Pacer) -> None:
        running = anyio.Semaphore(MAX_RUNNING)
        async with anyio.create_task_group() as tasks:
            for index in range(1, num_samples + 1):
                await running.acquire()
                await pace.next()
                tasks.start_soon(self._one, make(index), running)

    async def _one(self, sample: Sample, running: anyio.Semaphore) -> None:
        await self._actor.put.remote(ray.cloudpickle.dumps(sample))
        running.release()

    async def consume(self, num_samples: int, batch: int, took: Callable[[list[Sample]], None]) -> None:
        taken = 0
        while taken < num_samples:
            wanted = min(batch, num_samples - taken)
            payloads = await asyncio.gather(*(self._actor.get.remote() for _ in range(wanted)))
            took([ray.cloudpickle.loads(payload) for payload in payloads])
            taken += wanted


TRANSPORTS: dict[str, Callable[[Any, Path], QueueTransport]] = {
    "journal on": lambda handle, run_dir: ThroughQueue(handle, FilePayloads(run_dir, incarnation=1)),
    "journal off": lambda handle, _: ThroughQueue(handle, RayPayloads(CALL_TIMEOUT_S)),
    "deque": lambda handle, _: ThroughDeque(handle),
}


class ProducerActor:
    async def run(
        self, transport: str, handle: Any, run_dir: Path, num_samples: int, num_bytes: int, interval_s: float
    ) -> float:
        """Produce the samples and return the start time; `generate_s` of a sample holds the time it was made."""
        # No two samples of a batch may share an array: pickle would write it once.
        pool = [make_sample(num_bytes, seed) for seed in range(max(8, min(MAX_RUNNING, (64 << 20) // num_bytes)))]
        started = time.monotonic()

        def make(index: int) -> Sample:
            return replace(pool[index % len(pool)], sample_id=SampleId(0, index), generate_s=time.monotonic())

        await TRANSPORTS[transport](handle, run_dir).produce(num_samples, make, Pacer(interval_s))
        return started


class ConsumerActor:
    async def run(
        self, transport: str, handle: Any, run_dir: Path, num_samples: int, num_bytes: int, batch: int
    ) -> tuple[float, list[float]]:
        """Consume the samples; return the end time and the latency of each sample in seconds."""
        latencies: list[float] = []
        seen: set[int] = set()
        reader = SampleReader(num_bytes)

        def took(samples: list[Sample]) -> None:
            now = time.monotonic()
            latencies.extend(now - sample.generate_s for sample in samples)
            seen.update(sample.sample_id.index for sample in samples)
            for sample in samples:
                reader.read(sample)

        await TRANSPORTS[transport](handle, run_dir).consume(num_samples, batch, took)
        if len(seen) != num_samples:
            raise RuntimeError(f"{num_samples} samples were taken, but only {len(seen)} different ones")
        return time.monotonic(), latencies


def start(transport: str, run_dir: Path) -> Any:
    """Start an empty queue of this kind with room for `QUEUE_CAPACITY` samples."""
    if transport == "deque":
        actor: Any = ray.remote(DequeActor)
        return actor.options(num_cpus=0, max_concurrency=1000).remote(QUEUE_CAPACITY)
    pacing = Pacing(samples_per_version=LEASE, staleness_threshold=QUEUE_CAPACITY / LEASE - 1)
    options = QueueOptions(prompts_per_epoch=1 << 40, pacing=pacing)
    return start_queue(options, run_dir=run_dir if transport == "journal on" else None)


class StreamRunner:
    """Sends one stream of samples from the producer to the consumer through an empty queue.

    Args:
        root: the parent of the run directories, each of which is removed after its round.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        producer: Any = ray.remote(ProducerActor)
        consumer: Any = ray.remote(ConsumerActor)
        self._producer = producer.options(num_cpus=0).remote()
        self._consumer = consumer.options(num_cpus=0).remote()

    def __call__(
        self, transport: str, num_bytes: int, num_samples: int, *, interval_s: float = 0.0
    ) -> tuple[float, list[float]]:
        """Return samples per second, and the latency of each sample in seconds."""
        with tempfile.TemporaryDirectory(dir=self._root) as directory:
            run_dir = Path(directory)
            handle = start(transport, run_dir)
            ray.get(handle.__ray_ready__.remote())
            batch = 1 if interval_s else LEASE
            taken = self._consumer.run.remote(transport, handle, run_dir, num_samples, num_bytes, batch)
            produced = self._producer.run.remote(transport, handle, run_dir, num_samples, num_bytes, interval_s)
            started = ray.get(produced)
            ended, latencies = ray.get(taken)
            ray.kill(handle)
        return num_samples / (ended - started), latencies


@dataclass(frozen=True, slots=True)
class PayloadSize:
    name: str
    num_bytes: int
    num_samples: int
    """Samples of a round at full speed."""
    paced: int
    interval_s: float


SIZES = (
    PayloadSize("1 KB", 1_000, 4000, 150, 0.02),
    PayloadSize("100 KB", 100_000, 4000, 150, 0.02),
    PayloadSize("5 MB", 5_000_000, 320, 50, 0.04),
)


AIM = "journal off at 3 times the deque's rate or more, journal on at 0.8 of journal off or more, at 100 KB"


def main() -> None:
    parser = arguments(__doc__, "queue")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each transport and size (default 3)")
    names = [size.name for size in SIZES]
    parser.add_argument("--sizes", nargs="+", choices=names, default=names, help="sizes of a sample (default: all)")
    parser.add_argument(
        "--journal", action=argparse.BooleanOptionalAction, default=True, help="also measure with the journal (default)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path.cwd(),
        help="a directory on the disk to measure (default: the working directory)",
    )
    args = parser.parse_args()
    transports = [transport for transport in TRANSPORTS if args.journal or transport != "journal on"]
    rows: Table = []
    ratios: dict[str, dict[str, float]] = {}
    memory = {"object_store_memory": 3 << 30}
    with (
        local_ray("bench-queue", **memory),
        tempfile.TemporaryDirectory(dir=args.dir, prefix="queue-benchmark-") as root,
    ):
        one_round = StreamRunner(Path(root))
        for size in (size for size in SIZES if size.name in args.sizes):
            rates, latencies = measure(one_round, size, transports, args.rounds)
            for transport in transports:
                row = {"size": size.name, "through": transport}
                rows.append({**row, **figures(rates[transport], latencies[transport], size.num_bytes)})
            for one, other in itertools.pairwise(transports):
                ratios.setdefault(f"{one} / {other}", {})[size.name] = round(ratio(rates[one], rates[other]), 2)
    report("queue", rows, args.json, aim=AIM, ratio=ratios)


def measure(
    one_round: StreamRunner, size: PayloadSize, transports: Sequence[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the rate of each round and the latencies of all samples, by transport.

    The transports alternate; the first round is a warm-up and does not count.
    """
    rates: dict[str, list[float]] = {transport: [] for transport in transports}
    latencies: dict[str, list[float]] = {transport: [] for transport in transports}
    for counts, transport in alternating(transports, rounds):
        rate, _ = one_round(transport, size.num_bytes, size.num_samples)
        _, paced = one_round(transport, size.num_bytes, size.paced, interval_s=size.interval_s)
        if counts:
            rates[transport].append(rate)
            latencies[transport] += paced
    return rates, latencies


def figures(rates: list[float], latencies: list[float], num_bytes: int) -> dict[str, float]:
    rate = statistics.median(rates)
    return {
        "samples/s": rate,
        "min": min(rates),
        "max": max(rates),
        "MB/s": rate * num_bytes / 1e6,
        "p50 ms": 1e3 * float(np.percentile(latencies, 50)),
        "p99 ms": 1e3 * float(np.percentile(latencies, 99)),
    }


if __name__ == "__main__":
    main()
