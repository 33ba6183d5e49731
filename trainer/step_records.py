"""What the loop reports of each optimizer step: metrics, events and the record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from asyncrl.core.records import Metrics, RecordSink, StepRecord
from asyncrl.core.types import FinishReason, Provenance
from asyncrl.profiling import profile
from asyncrl.profiling.profiler import ProfilerSpan
from asyncrl.storage.checkpoint_manifest import Progress
from trainer.batches import TrainRow, TrainSample, rows_by_trajectory

LAST_STALENESS_BUCKET = 3
"""The staleness histogram counts samples of this staleness or more together."""
MAX_EXTRA_NAMES = 1_000
"""Largest number of different metrics `reward/extra/<name>` that one Trainer reports."""

logger = logging.getLogger(__name__)


class StepRecorder:
    """Times one step after another, and puts a record of each into a sink."""

    def __init__(self, progress: Progress, *, lineage: int, clock: Callable[[], float]) -> None:
        self._progress = progress
        self._lineage = lineage
        self._clock = clock
        self._began = self._started = 0.0
        self.metrics: Metrics = {}
        """Metrics of the step that has begun."""
        self._extra_names: set[str] = set()
        self._warned_of_names = False

    def begin(self) -> None:
        """Assign the following events and metrics to the next step."""
        profile.set_position(step=self._progress.step + 1, version=self._progress.version)
        self._began, self._started = time.perf_counter(), self._clock()
        self.metrics = {"timing/wait_samples_s": 0.0, "timing/publish_s": 0.0}

    @contextmanager
    def phase(self, name: str, metric: str = "", **fields: Any) -> Iterator[ProfilerSpan]:
        """Record a part of the step as the event `trainer.<name>` with these fields, and as `timing/<metric>_s`, by
        default `timing/<name>_s`."""
        started = self._clock()
        with profile.span(f"trainer.{name}", **fields) as span:
            yield span
        self.metrics[f"timing/{metric or name}_s"] = self._clock() - started

    def add_extras(self, samples: Sequence[TrainSample]) -> None:
        """Add the means of the named numbers that come with rewards, over the trajectories that have them.

        User code and agents choose the names, and this process, the driver and the trackers remember each one. So names
        beyond the first `MAX_EXTRA_NAMES` of this process are left out, with one warning.
        """
        extras: dict[str, list[float]] = {}
        for sample in samples:
            for trajectory in rows_by_trajectory(sample.rows):
                for name, value in trajectory[0].reward_extra.items():
                    if name not in self._extra_names:
                        if len(self._extra_names) >= MAX_EXTRA_NAMES:
                            self._warn_of_name(name, sample)
                            continue
                        self._extra_names.add(name)
                    extras.setdefault(name, []).append(value)
        self.metrics |= {f"reward/extra/{name}": sum(values) / len(values) for name, values in sorted(extras.items())}

    def _warn_of_name(self, name: str, sample: TrainSample) -> None:
        if not self._warned_of_names:
            logger.warning(
                "reward/extra/%s of %s is not reported, and neither is any other new name: samples have brought %d "
                "different names already. Let reward functions, tools and agents use the same names for all samples",
                *(name, sample.sample_id, MAX_EXTRA_NAMES),
            )
        self._warned_of_names = True

    async def end(self, sink: RecordSink, committed: Sequence[TrainSample]) -> None:
        """Put the record of the step into `sink`, and record its event."""
        progress, now, metrics = self._progress, self._clock(), self.metrics
        self.metrics = {}
        metrics |= {"timing/step_s": now - self._started, "time/monotonic_s": now}
        rewards = tuple(sum(sample.rewards) / len(sample.rewards) for sample in committed)
        ages = tuple(sample.staleness for sample in committed)
        await sink.put(StepRecord(progress.step, progress.version, metrics, rewards, ages, self._lineage))
        profile.record_ended(
            "step",
            time.perf_counter() - self._began,
            wait_samples_s=metrics["timing/wait_samples_s"],
            samples=len(committed),
            tokens=metrics["tokens/trained"],
            reward=metrics["reward/mean"],
            lineage=self._lineage,
        )


def note_trained(samples: Sequence[TrainSample]) -> None:
    """Record an event of each sample whose gradient is in the weights."""
    if profile.records("sample.trained"):
        for sample in samples:
            profile.note(
                "sample.trained",
                sample=str(sample.sample_id),
                staleness=sample.staleness,
                versions=sample.version_span,
                reward=sum(sample.rewards) / len(sample.rewards),
                tokens=sample.response_tokens,
            )


def role_metrics(role: str, metrics: Metrics) -> Metrics:
    """Prefix a role's metrics with its name, except those that already have a prefix."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items() if name != "tokens"}


def batch_metrics(batch: TensorDict) -> Metrics:
    """Return metrics of the tensors of a step."""
    has_gradient = ((batch["advantages"] != 0) & batch["loss_mask"]).any(dim=1)
    groups = batch["groups"]
    zero = [not bool(has_gradient[groups == group].any()) for group in groups.unique()]
    return {
        "advantages/zero_share": sum(zero) / len(zero),
        "tokens/trained": float(batch["loss_mask"].sum()),
    }


def sample_metrics(samples: Sequence[TrainSample]) -> Metrics:
    """Return metrics of the samples of a step. A trajectory counts once, however many rows it has."""
    rewards = np.array([reward for sample in samples for reward in sample.rewards])
    trajectories = [trajectory for sample in samples for trajectory in rows_by_trajectory(sample.rows)]
    lengths = np.array([sum(len(row.response_ids) for row in trajectory) for trajectory in trajectories])
    truncated = np.array([trajectory[-1].finish_reason is FinishReason.LENGTH for trajectory in trajectories])
    ages = np.array([sample.staleness for sample in samples])
    spans = [sample.version_span for sample in samples if sample.version_span > 0]
    seconds = np.array([sample.processing_s for sample in samples])
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "response_tokens/length_share": float(truncated.mean()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/share_{age}": float((ages == age).mean()) for age in range(LAST_STALENESS_BUCKET)},
        f"staleness/share_{LAST_STALENESS_BUCKET}": float((ages >= LAST_STALENESS_BUCKET).mean()),
        "partial/count": float(len(spans)),
        "partial/ratio": len(spans) / len(samples),
        "partial/max_span": float(max(spans, default=0)),
        "processing_s/mean": float(seconds.mean()),
        "processing_s/min": float(seconds.min()),
        "processing_s/max": float(seconds.max()),
        "processing_s/p50": p50,
        "processing_s/p95": p95,
        "processing_s/p99": p99,
        **_optional_metrics(samples, trajectories, lengths),
    }


def _optional_metrics(
    samples: Sequence[TrainSample], trajectories: Sequence[Sequence[TrainRow]], lengths: NDArray[np.int64]
) -> Metrics:
    """Return metrics of multi-turn trajectories and of replayed samples."""
    metrics = Metrics()
    sampled = np.array([sum(int(row.response_mask.sum()) for row in trajectory) for trajectory in trajectories])
    if (sampled != lengths).any():
        metrics["sampled_tokens/mean"] = float(sampled.mean())
    num_rows = [len(trajectory) for trajectory in trajectories]
    if max(num_rows) > 1:
        metrics["rows/per_trajectory"] = sum(num_rows) / len(num_rows)
    provenances = [sample.provenance for sample in samples]
    generated, substituted = provenances.count(Provenance.GENERATED), provenances.count(Provenance.SUBSTITUTED)
    if generated < len(provenances):
        metrics["skip/replayed_share"] = 1 - generated / len(provenances)
        metrics["skip/substituted_share"] = substituted / len(provenances)
    return metrics
