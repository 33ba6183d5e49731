"""What happens in a run, as its parts tell it to whoever keeps the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.ports import ApplyReport

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as the Trainer tells it to whoever keeps the run's records."""

    step: int
    version: int
    """Newest published version after this step."""
    metrics: Metrics
    rewards: tuple[float, ...]
    """Mean reward of each sample trained in this step."""
    staleness: tuple[int, ...]
    """Versions between the trainer and the oldest token of each of those samples."""
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class ApplyRecord:
    """One version reached every replica."""

    version: int
    reports: tuple[ApplyReport, ...]
    publish_to_applied_s: float
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """The validation set, answered by one version."""

    version: int
    step: int
    metrics: Metrics
    """`reward/mean` and `reward/mean/<data_source>`, `response_tokens/mean`, …"""
    examples: tuple[Mapping[str, Any], ...]
    """A few rows for people: `prompt, response, ground_truth, reward`."""
    lineage: int = 0


RunRecord = StepRecord | ApplyRecord | ValidationRecord


class RecordSink(Protocol):
    async def put(self, record: RunRecord) -> None: ...
