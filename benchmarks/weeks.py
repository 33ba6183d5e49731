"""Simulate weeks of a run: samples through the queue, its journal, the turn log and the event files, without models.

At ten points of the run: microseconds per sample (and those of CPU, which other processes do not distort), memory, the
number of Python's allocated blocks (which does not depend on the allocator of the C library), the size of journal, turn
log and events, how long a commit takes, how long it takes to read what going back to the oldest checkpoint needs (and
the longest commit meanwhile), and to rebuild the queue's state from the journal. At the end: the seconds of
`asyncrl report`. The exit code is 1 if one of the aims is missed.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import psutil

from asyncrl.config.sections.observe import ProfilerConfig
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import FinishReason, SampleId, SampleMeta, Span, Turn
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.files import EVENTS_DIRECTORY
from asyncrl.queue.core import QueueOptions
from asyncrl.queue.journal import Journal
from asyncrl.queue.journal_reader import read_head
from asyncrl.queue.operations import OfferSamples
from asyncrl.queue.sample_queue import LocalSampleQueue, QueuedSample
from asyncrl.queue.turn_log import FileTurns
from asyncrl.storage.run_dir import JOURNAL, SAMPLES
from asyncrl.storage.sample_bytes import FileRef
from benchmarks.report import Table, arguments, positive, report
from benchmarks.running import megabytes, print_progress, run_asyncrl

PROMPTS = 100_000
BATCH = 64
"""Samples per step."""
POINTS = 10
MAX_JOURNAL_MB = 50.0
MAX_REOPEN_S = 3.0
"""Seconds of CPU."""
MAX_CALL_S = 1.0
MAX_GROWTH = 1.1
"""Largest ratio of the allocated blocks at the end to those at half of the run."""
AIM = "flat cost and memory; journal below 50 MB; reopening below 3 s; no call waits for a scan of the journal"
TURN = Turn(np.arange(64, dtype=np.int32), np.zeros(64, np.float32), (Span(0, 0),), FinishReason.STOP)


class SimulatedRun:
    """A run whose parts answer at once. Every `save_freq` steps it has a checkpoint, and the newest `keep` are kept."""

    def __init__(self, run_dir: Path, save_freq: int, keep: int, n: int) -> None:
        self._run_dir = run_dir
        self._save_freq = save_freq
        self._n = n
        self._turns = FileTurns(run_dir, 1)
        self._kept: deque[int] = deque(maxlen=keep)
        self._step = 0
        self._next_file = count(1)
        self.calls_s: list[float] = []
        """Durations of the Trainer's commits since the last point."""
        self._journal = Journal.open(run_dir / JOURNAL, num_prompts=PROMPTS, identity={})
        options = QueueOptions(PROMPTS, Pacing(samples_per_version=BATCH, staleness_threshold=1.0))
        self._queue = LocalSampleQueue(options, journal=self._journal, state=self._journal.state)

    def rebuild(self) -> tuple[float, float]:
        """Rebuild the queue's state as another process does; return the seconds that pass, and those of CPU."""
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        head = read_head(self._run_dir)
        assert head is not None and not head.damage
        return time.perf_counter() - begun, time.thread_time() - begun_cpu

    async def train(self, num_samples: int) -> None:
        for _ in range(0, num_samples, BATCH):
            await self._train_step()

    async def scan_while_committing(self) -> tuple[float, float]:
        """Read what a rewind to the oldest checkpoint needs; return its seconds, and those of the longest commit."""
        self.calls_s.clear()
        done = anyio.Event()
        begun = time.perf_counter()

        async def scan() -> None:
            await self._journal.trained_since(self._kept[0] if self._kept else 0)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scan)
            while not done.is_set():
                await self._train_step()
        return time.perf_counter() - begun, max(self.calls_s)

    async def _train_step(self) -> None:
        self._step += 1
        step, queue = self._step, self._queue
        profile.set_position(step=step, version=step - 1)
        await queue.set_applied_version(step - 1)
        ids = (await queue.admit(BATCH, timeout_s=0)).sample_ids
        async with anyio.create_task_group() as tasks:
            for sample_id in ids:
                tasks.start_soon(self._turns.record, sample_id, {"0/0": TURN})
        for sample_id in ids:
            self._note_generation(str(sample_id))
        await queue.call(OfferSamples(tuple(self._queued(ids, step))))
        async with anyio.create_task_group() as tasks:
            for sample_id in ids:
                tasks.start_soon(self._turns.forget, sample_id)
        begun = time.perf_counter()
        lease = await queue.lease(BATCH, trainer_version=step - 1, timeout_s=0)
        trained = [sample.meta.sample_id for sample in lease.samples]
        await queue.commit(lease.lease_id, trained)
        self.calls_s.append((time.perf_counter() - begun) / 2)
        for sample_id in trained:
            self._note_training(str(sample_id))
        profile.record_ended("step", 1.0, wait_samples_s=0.1, samples=BATCH, tokens=64 * BATCH, reward=0.5, lineage=0)
        if self._save_freq > 0 and step % self._save_freq == 0:
            await queue.mark(step)
            self._kept.append(step)
            await queue.cover(step, self._kept[0])
            queue.state.take_idle_files()
        await anyio.to_thread.run_sync(profile.flush)

    def _queued(self, ids: Sequence[SampleId], step: int) -> list[QueuedSample]:
        file = f"1-{next(self._next_file)}.safetensors"
        return [
            QueuedSample(SampleMeta(sample_id, step - 1, step - 1, self._n, self._n, 4096), FileRef(file, place))
            for place, sample_id in enumerate(ids)
        ]

    def _note_generation(self, sample: str) -> None:
        """Record the events of a sample's generation at the level `summary`."""
        profile.note("sample.admitted", sample=sample, permit_wait_s=0.01)
        for number in range(self._n):
            own = {"sample": sample, "trajectory": number}
            profile.record_ended(
                "request", 1.5, request=f"{sample}/{number}-1", turn=0, prompt_tokens=60, response_tokens=64,
                finish_reason="stop", gate_s=0.0, queued_s=0.01, prefill_s=0.02, decode_s=1.4, paused_s=0.0,
                in_flight=8, replica="one", **own,
            )  # fmt: skip
            profile.record_ended(
                "trajectory", 1.5, turns=1, calls=0, tokens=64, sampled_tokens=64, finish_reason="stop",
                generate_s=1.5, tool_s=0.0, user_s=0.0, **own,
            )  # fmt: skip
            profile.record_ended("reward.score", 0.01, trajectories=1, reward=0.5, **own)
        profile.record_ended("sample.generate", 1.5, sample=sample, trajectories=self._n, tokens=64 * self._n)
        profile.record_ended("sample.reward", 0.01, sample=sample)
        profile.note("sample.ready", sample=sample, reward=0.5, tokens=64 * self._n, versions=0)

    def _note_training(self, sample: str) -> None:
        profile.note("sample.leased", sample=sample, staleness=0)
        profile.note("sample.trained", sample=sample, staleness=0, versions=0, reward=0.5, tokens=64 * self._n)


async def simulate(run_dir: Path, options: Any) -> Table:
    run = SimulatedRun(run_dir, options.save_freq, options.keep, options.n)
    process, rows = psutil.Process(), []
    for point in range(1, POINTS + 1):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        await run.train(options.samples // POINTS)
        took, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
        call_ms = (1000 * np.percentile(run.calls_s, [50, 99, 100])).tolist()
        back_s, longest_s = await run.scan_while_committing()
        reopen_s, reopen_cpu_s = await anyio.to_thread.run_sync(run.rebuild)
        run.calls_s.clear()
        rows.append(
            {
                "samples": point * (options.samples // POINTS),
                "us": 1e6 * took / (options.samples // POINTS),
                "cpu_us": 1e6 * cpu / (options.samples // POINTS),
                "memory_mb": process.memory_info().rss / 1e6,
                "blocks": _allocated_blocks(),
                "journal_mb": megabytes(run_dir, JOURNAL),
                "turns_mb": megabytes(run_dir / SAMPLES),
                "events_mb": megabytes(run_dir / EVENTS_DIRECTORY),
                "call_p50_ms": call_ms[0],
                "call_p99_ms": call_ms[1],
                "call_max_ms": call_ms[2],
                "back_s": back_s,
                "back_call_max_ms": 1000 * longest_s,
                "reopen_s": reopen_s,
                "reopen_cpu_s": reopen_cpu_s,
            }
        )
        print_progress(str(rows[-1]))
    return rows


def _allocated_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def missed_aims(rows: Table, keep_gb: float) -> list[str]:
    """Return a line for each aim that the run has missed."""

    def largest(column: str) -> float:
        return max(float(row[column]) for row in rows)

    growth = rows[-1]["blocks"] / rows[POINTS // 2 - 1]["blocks"]
    found = [
        (largest("journal_mb") > MAX_JOURNAL_MB, f"the journal has {largest('journal_mb'):.0f} MB"),
        (largest("reopen_cpu_s") > MAX_REOPEN_S, f"rebuilding takes {largest('reopen_cpu_s'):.1f} s of CPU"),
        (
            largest("back_call_max_ms") > 1000 * MAX_CALL_S,
            f"a commit during a scan took {largest('back_call_max_ms') / 1000:.1f} s",
        ),
        (largest("events_mb") > 1.1 * 1000 * keep_gb, f"the events have {largest('events_mb'):.0f} MB"),
        (growth > MAX_GROWTH, f"memory grows: {growth - 1:.0%} more allocated blocks in the second half of the run"),
    ]
    return [text for is_missed, text in found if is_missed]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "weeks")
    parser.add_argument("--samples", type=positive, default=1_000_000, help="samples of the run (default 1,000,000)")
    parser.add_argument("--save-freq", type=int, default=50, help="trainer.save_freq (default 50 steps of 64 samples)")
    parser.add_argument("--keep", type=positive, default=2, help="trainer.max_checkpoints_to_keep (default 2)")
    parser.add_argument("--n", type=positive, default=8, help="rollout.n, on which the number of events depends")
    parser.add_argument("--keep-gb", type=float, default=2.0, help="profiler.keep_gb (default 2)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="weeks-benchmark-") as root:
        run_dir = Path(root)
        (run_dir / "config.yaml").write_text("experiment_name: weeks\n", encoding="utf-8")
        settings = ProfilerSettings.of(ProfilerConfig(keep_gb=options.keep_gb), run_dir, rotates=True)
        profile.configure("rollouter", settings)
        rows = anyio.run(simulate, run_dir, options)
        profile.close()
        begun = time.perf_counter()
        run_asyncrl("report", str(run_dir), "--out", str(run_dir / "report"))
        report_s = time.perf_counter() - begun
    missed = missed_aims(rows, options.keep_gb)
    report("weeks", rows, options.json, aim=AIM, report_s=report_s, missed="; ".join(missed))
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
