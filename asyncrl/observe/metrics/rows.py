"""A run's records as flat rows, the one form every sink takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.failures import BugError
from asyncrl.ports import Books, QueueStatus
from asyncrl.records import ApplyRecord, Metrics, StepRecord, ValidationRecord
from asyncrl.telemetry import registry
from asyncrl.types import DropReason

REQUIRED = ("reward/mean", "tokens/trained", "timing/wait_samples_s", "time/monotonic_s")
"""What every step must tell."""
_HEAD = ("kind", "step", "version", "lineage", "time_s")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of metrics.jsonl. `metrics` holds registered names only."""

    kind: str
    """`step`, `apply` or `validation`."""
    step: int
    version: int
    time_s: float
    """Since the run started."""
    unix_s: float
    """Wall clock; 0 for a line read back, which has none."""
    metrics: Metrics
    more: Mapping[str, Any] = field(default_factory=dict)
    """What a line carries besides numbers: `rewards`, `staleness`, `examples`."""
    lineage: int = 0
    """How often training had gone back to a checkpoint."""

    def __post_init__(self) -> None:
        registry.check(self.metrics)

    def as_json(self) -> dict[str, Any]:
        """The line as plain JSON values, no NaN or infinity among them."""
        head = {name: getattr(self, name) for name in _HEAD}
        return finite({**head, "time_s": round(self.time_s, 3), **self.metrics, **self.more})

    def is_within(self, step: int, version: int) -> bool:
        """It stays when training goes back to a checkpoint of this step and version."""
        return self.step <= step and self.version <= version

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Row:
        """Read a line back; what was not finite stays out.

        Raises:
            KeyError, TypeError: it is not a line of metrics.jsonl.
        """
        head = {key: line[key] for key in _HEAD}
        more = {key: line[key] for key in ("rewards", "staleness", "examples") if key in line}
        metrics = {key: value for key, value in line.items() if "/" in key and value is not None}
        return cls(**head, unix_s=0.0, metrics=metrics, more=more)


def finite(value: Any) -> Any:
    """`value` with every float that is not finite replaced by None, at any depth; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def step_row(record: StepRecord, driver: Metrics, *, time_s: float, unix_s: float) -> Row:
    """`driver`: what is known of the other parts now (`queue/*`, `rollouter/*`, …).

    Raises:
        BugError: a metric is not registered, or a required one is missing.
    """
    missing = [name for name in REQUIRED if name not in record.metrics]
    if missing:
        raise BugError(f"step {record.step} was recorded without {', '.join(missing)}: the summary is made of these.")
    metrics = {name: float(value) for name, value in {**record.metrics, **driver}.items()}
    more = {
        "rewards": [float(reward) for reward in record.rewards],
        "staleness": [int(versions) for versions in record.staleness],
    }
    return Row("step", record.step, record.version, time_s, unix_s, metrics, more, record.lineage)


def apply_row(record: ApplyRecord, *, step: int, time_s: float, unix_s: float) -> Row:
    """`step`: the newest one known; the record has none. No reports (every replica had it already): only the delay."""
    reports = record.reports
    metrics = {"weight_sync/publish_to_applied_s": record.publish_to_applied_s}
    if reports:
        metrics |= {
            "weight_sync/drain_s": max(report.drain_s for report in reports),
            "weight_sync/pause_s": max(report.pause_s for report in reports),
            "weight_sync/load_s": max(report.load_s for report in reports),
            "weight_sync/fetch_s": max(report.fetch_s for report in reports),
            "weight_sync/verify_s": max(report.verify_s for report in reports),
            "weight_sync/in_flight": float(sum(report.in_flight for report in reports)),
            "weight_sync/verified": sum(report.verified for report in reports) / len(reports),
        }
    return Row("apply", step, record.version, time_s, unix_s, metrics, {}, record.lineage)


def validation_row(record: ValidationRecord, *, time_s: float, unix_s: float) -> Row:
    metrics = {f"validation/{name}": float(value) for name, value in record.metrics.items()}
    more = {"examples": [dict(example) for example in record.examples]}
    return Row("validation", record.step, record.version, time_s, unix_s, metrics, more, record.lineage)


def books_metrics(books: Books) -> Metrics:
    """The ledger's counters as `queue/*`; every drop reason is there, 0 if none was dropped for it."""
    return {
        "queue/fed": float(books.fed),
        "queue/running": float(books.running),
        "queue/ready": float(books.ready),
        "queue/leased": float(books.leased),
        "queue/trained": float(books.trained),
        "queue/dropped": float(books.num_dropped),
        "queue/replayed": float(books.replayed),
        "queue/substituted": float(books.substituted),
        **{f"queue/dropped/{reason}": float(books.dropped.get(reason, 0)) for reason in DropReason},
    }


def queue_metrics(status: QueueStatus) -> Metrics:
    return {
        **books_metrics(status.books),
        "queue/applied_version": float(status.version),
        "queue/payload_bytes": float(status.payload_bytes),
    }
