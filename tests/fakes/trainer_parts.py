"""Stand-ins for the parts around the train loop (ranks, experience, checkpoints, publishers), and samples to feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from asyncrl.core.failures import BugError
from asyncrl.core.ports import Publication, QueueSnapshot, WeightBucket, WeightsProbe
from asyncrl.core.records import Metrics, StepRecord
from asyncrl.core.types import FinishReason, Row, Sample, SampleId, Span, sample_meta
from asyncrl.queue.sample_queue import LocalSampleQueue, SampleQueue
from asyncrl.storage.checkpoint_manifest import Progress
from trainer.batches import TrainSample
from trainer.checkpoints import CheckpointDirectory, RoleCheckpoints
from trainer.experience import Experience
from trainer.workers.tensors import to_batch
from trainer.workers.worker import PublishedVersion, RoleGroup


class FakeGroup(RoleGroup):
    """A `RoleGroup` whose weights are the number of steps. `on_step` runs in each step before it is counted."""

    def __init__(
        self,
        on_step: Callable[[int], None] = lambda step: None,
        on_publish: Callable[[int], Any] = lambda version: None,
    ) -> None:
        self.on_step = on_step
        self.on_publish = on_publish
        self.steps: list[list[int]] = []
        """For each step, the first response token of its rows, which is the feed index in samples of `make_sample`."""
        self.batches: list[TensorDict] = []
        self.published: list[tuple[int, int, int, bool]] = []
        """`(version, step, the weights' step, validate)`."""
        self.threads: list[int] = []
        self.total_steps = 0
        self.metrics: Metrics = {}
        """Metrics that each step adds to the usual ones."""
        self.num_probes = 0
        self.scores: Callable[[TensorDict], TensorDict] = lambda batch: TensorDict({}, batch_size=batch.batch_size)
        self.asked: list[tuple[str, bool]] = []

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(method)

    async def republish(self) -> None:
        raise NotImplementedError

    async def wait_for_files(self) -> None:
        raise NotImplementedError

    async def attention(self) -> str:
        return "sdpa, packed rows"

    async def plan(self, total_steps: int) -> None:
        self.total_steps = total_steps

    async def set_threads(self, threads: int) -> None:
        self.threads.append(threads)

    async def train_batch(self, batch: TensorDict) -> Metrics:
        await anyio.lowlevel.checkpoint()
        self.on_step(len(self.steps) + 1)
        indices = batch["input_ids"][torch.arange(len(batch)), batch["prompt_lens"]].tolist()
        self.steps.append(list(dict.fromkeys(indices)))
        self.batches.append(batch)
        return {"loss": 0.5, "lr": 0.1, "tokens": float(batch["loss_mask"].sum())} | self.metrics

    async def infer_batch(self, batch: TensorDict, *, adapters: bool = True) -> TensorDict:
        self.asked.append(("infer", adapters))
        return self.scores(batch)

    async def publish(self, version: int, step: int, *, validate: bool, probe: bool = False) -> PublishedVersion:
        self.published.append((version, step, len(self.steps), validate))
        self.num_probes += probe
        outcome = self.on_publish(version)
        if outcome is not None:
            await outcome
        texts = WeightsProbe(((1, 2),), ((-0.5,),)) if probe else None
        return PublishedVersion(Publication(version, step, 0, {}, texts, validate=validate), 0.25, 0.5)

    async def step(self) -> int:
        return len(self.steps)


class FakeExperience:
    """Computes the advantage of a row as its reward minus its group's mean. `change` may alter the batch."""

    def __init__(self) -> None:
        self.change: Callable[[TensorDict], Any] = lambda batch: None
        self.kl_coefs: list[float | None] = []

    async def make(
        self, samples: Sequence[TrainSample], *, trainer_version: int, kl_coef: float | None = None
    ) -> Experience:
        self.kl_coefs.append(kl_coef)
        batch = to_batch([row for sample in samples for row in sample.rows])
        rewards, groups = batch["rewards"], batch["groups"]
        means = torch.stack([rewards[groups == group].mean() for group in groups])
        batch["advantages"] = (rewards - means).float()[:, None].expand(batch["loss_mask"].shape).contiguous()
        self.change(batch)
        return Experience(batch, {}, None if kl_coef is None else kl_coef / 2)


class FakeCheckpoints(RoleCheckpoints):
    """Keeps checkpoints in memory; `on_finish` runs while one is written."""

    def __init__(self, queue: SampleQueue, **options: Any) -> None:
        super().__init__(CheckpointDirectory(Path(), identity={}, keep=1), {}, queue, **options)
        self.begun: list[int] = []
        """The steps of the checkpoints."""
        self.exported: list[int] = []
        """The steps of those with an export."""
        self.saved: list[tuple[Progress, QueueSnapshot]] = []
        self.on_finish: Callable[[], Any] = lambda: None

    async def copy_roles(self, step: int, *, export: bool = True) -> Path:
        assert len(self.begun) == len(self.saved), "one checkpoint at a time"
        self.begun.append(step)
        self.exported += [step] * export
        return Path(f"step_{step}")

    async def finish(self, building: Path, progress: Progress, queue: QueueSnapshot) -> int:
        outcome = self.on_finish()
        if outcome is not None:
            await outcome
        self.saved.append((progress, queue))
        return progress.step


class MemoryRecord:
    """A `loop.TrainedStepsFile` that keeps `(step, version, feed indices)`."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, list[int]]] = []

    async def append(self, step: int, version: int, sample_ids: Sequence[SampleId]) -> None:
        self.steps.append((step, version, [sample_id.index for sample_id in sample_ids]))


class CopyingPublisher:
    """A publisher that keeps copies of the published tensors."""

    bucket_bytes = 4096

    def __init__(self) -> None:
        self.published: dict[int, dict[str, NDArray[Any]]] = {}
        self.offers: list[int] = []

    def begin(self, version: int) -> CopyingUpload:
        return CopyingUpload(self, version)

    async def republish(self) -> None:
        self.offers += self.offers[-1:]


class CopyingUpload:
    """The upload of a `CopyingPublisher`."""

    def __init__(self, publisher: CopyingPublisher, version: int) -> None:
        self.publisher = publisher
        self.version = version
        self.buckets: list[dict[str, NDArray[Any]]] = []

    async def put(self, bucket: WeightBucket) -> int:
        self.buckets.append({name: array.copy() for name, array in bucket.items()})
        return sum(array.nbytes for array in bucket.values())

    async def publish(self, step: int, *, validate: bool, probe: WeightsProbe | None = None) -> Publication:
        if self.version in self.publisher.published:
            raise BugError("twice")
        self.publisher.published[self.version] = {
            name: array for bucket in self.buckets for name, array in bucket.items()
        }
        self.publisher.offers.append(self.version)
        return Publication(self.version, step, 0, {}, probe, validate=validate)


class TrainerRecords(list[StepRecord]):
    """A `RecordSink` that keeps the records."""

    async def put(self, record: Any) -> None:
        self.append(record)


def make_sample(
    sample_id: SampleId,
    rewards: Sequence[float] = (0.0, 1.0),
    *,
    spans: Sequence[Span] = (Span(0, 0),),
    length: int = 4,
) -> Sample:
    """Return a sample with one trajectory per reward. Each is one row of `length` response tokens, whose first token is
    the feed index.
    """
    rows = tuple(
        Row(
            prompt_ids=np.array([1, 2], dtype=np.int32),
            response_ids=np.arange(length, dtype=np.int32) + sample_id.index,
            response_mask=np.ones(length, dtype=np.bool_),
            rollout_log_probs=np.full(length, -1.0, dtype=np.float32),
            spans=tuple(spans),
            finish_reason=FinishReason.STOP,
            reward=reward,
            trajectory=number,
        )
        for number, reward in enumerate(rewards)
    )
    return Sample(sample_id, rows)


def forked(sample: Sample, number: int, *masks: Sequence[int], turn_rewards: Sequence[Any] = ()) -> Sample:
    """Return `sample` with its one-row trajectory `number` split into one row for each of `masks`, the response masks.

    Args:
        turn_rewards: The turn rewards of each of these rows; empty if no row has any.
    """
    rows: list[Row] = []
    for row in sample.rows:
        if row.trajectory != number:
            rows.append(row)
            continue
        for place, mask in enumerate(masks):
            length = len(mask)
            rows.append(
                replace(
                    row,
                    prompt_ids=np.arange(1, 3 + place, dtype=np.int32),
                    response_ids=np.arange(length, dtype=np.int32) + sample.sample_id.index,
                    response_mask=np.array(mask, dtype=np.bool_),
                    rollout_log_probs=np.where(mask, -1.0, 0.0).astype(np.float32),
                    turn_rewards=tuple(turn_rewards[place]) if turn_rewards else (),
                )
            )
    return replace(sample, rows=tuple(rows))


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
