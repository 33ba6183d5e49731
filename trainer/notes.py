"""What the Trainer tells of samples and steps, as events of this process (`asyncrl.profiling.profile`)."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.profiling import profile
from asyncrl.records import Metrics
from asyncrl.types import DropReason, SampleId
from trainer.rows import TrainSample


def note_drop(sample_id: SampleId, reason: DropReason, tokens: int) -> None:
    """The Trainer has dropped it."""
    profile.note("sample.dropped", sample=str(sample_id), reason=str(reason), tokens=tokens)


def note_trained(samples: Iterable[TrainSample]) -> None:
    """Their gradient is in the step that is under way, and the queue knows it."""
    if not profile.records("sample.trained"):
        return
    for sample in samples:
        profile.note(
            "sample.trained",
            sample=str(sample.sample_id),
            staleness=sample.staleness,
            versions=sample.version_span,
            reward=sum(sample.rewards) / len(sample.rewards),
            tokens=sample.response_tokens,
        )


def note_step(took_s: float, metrics: Metrics, *, num_samples: int, lineage: int) -> None:
    """The step that is under way has ended just now."""
    profile.took(
        "step",
        took_s,
        wait_samples_s=metrics["timing/wait_samples_s"],
        samples=num_samples,
        tokens=metrics["tokens/trained"],
        reward=metrics["reward/mean"],
        lineage=lineage,
    )
