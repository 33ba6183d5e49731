"""Stand-ins for what the train loop drives: worker, publisher, checkpoints; and samples to feed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.manifest import Progress
from asyncrl.ports import Metrics, Publication, QueueSnapshot, TrainingWorker, TrainRow
from asyncrl.sample_queue import LocalSampleQueue
from asyncrl.types import FinishReason, Sample, SampleId, Span, Trajectory, sample_meta


class FakeWorker:
    """`TrainingWorker` whose weights are the number of steps. `on_step` runs in each step, before it counts."""

    def __init__(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        self.on_step = on_step
        self.steps: list[list[SampleId]] = []
        self.rows: list[Sequence[TrainRow]] = []

    def train_mini_batch(self, rows: Sequence[TrainRow]) -> Metrics:
        self.on_step(len(self.steps) + 1)
        self.steps.append(list(dict.fromkeys(row.sample_id for row in rows)))
        self.rows.append(rows)
        return {"actor/loss": 0.5, "actor/lr": 0.1}

    def infer_batch(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        return [np.zeros(len(row.response_ids), dtype=np.float32) for row in rows]

    def weights(self, dtype: str) -> Iterator[tuple[str, NDArray[Any]]]:
        yield "steps", np.array([len(self.steps)], dtype=dtype)

    def save_checkpoint(self, directory: Path) -> None:
        (directory / "hf").mkdir()
        (directory / "hf" / "config.json").write_text("{}")
        (directory / "hf" / "model.safetensors").write_bytes(b"weights" * 10)
        (directory / "engine.json").write_text(f'{{"step": {len(self.steps)}}}')

    def load_checkpoint(self, directory: Path) -> None:
        raise NotImplementedError


class FakePublisher:
    """`WeightPublisher` that remembers `(version, step, weights' step, validate)`."""

    def __init__(self, on_publish: Callable[[int], Any] = lambda version: None) -> None:
        self.on_publish = on_publish
        self.published: list[tuple[int, int, int, bool]] = []

    async def publish(
        self, version: int, step: int, tensors: Mapping[str, NDArray[Any]], *, validate: bool
    ) -> Publication:
        self.published.append((version, step, int(tensors["steps"][0]), validate))
        outcome = self.on_publish(version)
        if outcome is not None:
            await outcome
        return Publication(version, step, 0, {}, validate=validate)


class FakeCheckpoints:
    """Keeps what would be written."""

    def __init__(self) -> None:
        self.saved: list[tuple[Progress, QueueSnapshot]] = []

    def save(self, worker: TrainingWorker, progress: Progress, queue: QueueSnapshot) -> Path:
        self.saved.append((progress, queue))
        return Path(f"step_{progress.step}")


def make_sample(
    sample_id: SampleId,
    rewards: Sequence[float] = (0.0, 1.0),
    *,
    spans: Sequence[Span] = (Span(0, 0),),
    length: int = 4,
) -> Sample:
    """One trajectory per reward, `length` response tokens each."""
    rows = tuple(
        Trajectory(
            prompt_ids=np.array([1, 2], dtype=np.int32),
            response_ids=np.arange(length, dtype=np.int32),
            response_mask=np.ones(length, dtype=np.bool_),
            rollout_log_probs=np.full(length, -1.0, dtype=np.float32),
            spans=tuple(spans),
            finish_reason=FinishReason.STOP,
            reward=reward,
        )
        for reward in rewards
    )
    return Sample(sample_id, rows)


async def feed(
    queue: LocalSampleQueue, number: int, make: Callable[[SampleId], Sample] = make_sample
) -> list[SampleId]:
    """Admit `number` samples and finish them at once, in order."""
    sample_ids: list[SampleId] = []
    while len(sample_ids) < number:
        admission = await queue.admit(number - len(sample_ids), timeout_s=5.0)
        assert admission.sample_ids, "the queue gave no permit"
        for sample_id in admission.sample_ids:
            sample = make(sample_id)
            await queue.offer(sample_meta(sample), sample)
        sample_ids += admission.sample_ids
    return sample_ids
