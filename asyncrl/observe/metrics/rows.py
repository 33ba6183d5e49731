"""Convert the records of a run to flat rows of metrics, which all sinks accept. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import index as integer
from typing import Any

from asyncrl.core.failures import BugError
from asyncrl.core.ports import QueueStatus, SampleCounts
from asyncrl.core.process_health import RunHealth
from asyncrl.core.records import ApplyRecord, Metrics, StepRecord, ValidationRecord
from asyncrl.core.types import DropReason
from asyncrl.observe.metrics import registry

REQUIRED = ("reward/mean", "tokens/trained", "timing/wait_samples_s", "time/monotonic_s")
"""Metrics that every step must have."""
_EXAMPLE = {"prompt", "response", "ground_truth", "reward"}
_HEAD = ("kind", "step", "version", "lineage", "time_s")


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of metrics.jsonl. `metrics` holds registered names only."""

    kind: str
    """`step`, `apply` or `validation`."""
    step: int
    version: int
    time_s: float
    """Seconds since the run started."""
    unix_s: float
    """Wall clock; 0 for a row read from metrics.jsonl, which does not contain it."""
    metrics: Metrics
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other values of a line: `rewards`, `staleness`, `examples`."""
    lineage: int = 0
    """How often training had gone back to a checkpoint."""

    def __post_init__(self) -> None:
        registry.check(self.metrics)

    def as_json(self) -> dict[str, Any]:
        """Return the line as plain JSON values without NaN and infinity."""
        head = {name: getattr(self, name) for name in _HEAD}
        return finite({**head, "time_s": round(self.time_s, 3), **self.metrics, **self.extra})

    def is_within(self, step: int, version: int) -> bool:
        """Return whether the row remains when training goes back to a checkpoint of this step and version."""
        return self.step <= step and self.version <= version

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MetricsRow:
        """Parse a line. Values that were not finite, and metrics that this version of asyncrl does not know, are left
        out.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is not a line of metrics.jsonl.
        """
        extra: dict[str, Any] = {}
        match kind := line["kind"]:
            case "step":
                extra["rewards"] = [float(reward) for reward in line["rewards"] if reward is not None]
                extra["staleness"] = [integer(versions) for versions in line["staleness"]]
            case "validation":
                complete = [each for each in line["examples"] if each.keys() >= _EXAMPLE and each["reward"] is not None]
                extra["examples"] = [{**each, "reward": float(each["reward"])} for each in complete]
            case "apply":
                pass
            case _:
                raise ValueError(f"{kind!r} is no kind of row")
        metrics = {key: float(value) for key, value in line.items() if value is not None and registry.is_known(key)}
        step, version, lineage = (integer(line[key]) for key in ("step", "version", "lineage"))
        return cls(kind, step, version, float(line["time_s"]), 0.0, metrics, extra, lineage)


def finite(value: Any) -> Any:
    """Return `value` as plain JSON values, at any depth.

    Dataclasses and named tuples become objects, other tuples lists, and floats that are not finite None.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: finite(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: finite(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def step_row(record: StepRecord, driver: Metrics, *, time_s: float, unix_s: float) -> MetricsRow:
    """Return the row of an optimizer step.

    `driver`: the current metrics of the other parts (`queue/*`, `rollouter/*`, …).

    Raises:
        BugError: a metric is not registered, or a required one is missing.
    """
    missing = [name for name in REQUIRED if name not in record.metrics]
    if missing:
        raise BugError(f"step {record.step} was recorded without {', '.join(missing)}, which the summary needs.")
    metrics = {name: float(value) for name, value in {**record.metrics, **driver}.items()}
    extra = {
        "rewards": [float(reward) for reward in record.rewards],
        "staleness": [int(versions) for versions in record.staleness],
    }
    return MetricsRow("step", record.step, record.version, time_s, unix_s, metrics, extra, record.lineage)


def apply_row(record: ApplyRecord, *, step: int, time_s: float, unix_s: float) -> MetricsRow:
    """Return the row of an applied version. `step`: the newest step.

    If every replica had the version already, there are no reports, and the row has only the delay and the size.
    """
    reports = record.reports
    metrics = {"weight_sync/publish_to_applied_s": record.publish_to_applied_s}
    if record.num_bytes:
        metrics |= {
            "weight_sync/sent_bytes": float(record.sent_bytes),
            "weight_sync/sent_share": record.sent_bytes / record.num_bytes,
        }
    if reports:
        phases = ("drain_s", "pause_s", "load_s", "fetch_s", "verify_s")
        metrics |= {f"weight_sync/{phase}": max(getattr(report, phase) for report in reports) for phase in phases}
        metrics |= {
            "weight_sync/in_flight": float(sum(report.in_flight for report in reports)),
            "weight_sync/verified": sum(report.verified for report in reports) / len(reports),
        }
        if mismatches := [report.mismatch_kl for report in reports if report.mismatch_kl is not None]:
            metrics["weight_sync/mismatch_kl"] = max(mismatches)
        if came := [not report.fallback for report in reports if report.fallback is not None]:
            metrics["weight_sync/broadcast"] = sum(came) / len(came)
    return MetricsRow("apply", step, record.version, time_s, unix_s, metrics, {}, record.lineage)


def validation_row(record: ValidationRecord, *, time_s: float, unix_s: float) -> MetricsRow:
    metrics = {f"validation/{name}": float(value) for name, value in record.metrics.items()}
    extra = {"examples": [dict(example) for example in record.examples]}
    return MetricsRow("validation", record.step, record.version, time_s, unix_s, metrics, extra, record.lineage)


def counts_metrics(counts: SampleCounts) -> Metrics:
    """Return the sample counts as `queue/*`, with every drop reason."""
    return {
        **{f"queue/{name}": float(count) for name, count in asdict(counts).items() if name != "dropped"},
        "queue/dropped": float(counts.num_dropped),
        **{f"queue/dropped/{reason}": float(counts.dropped.get(reason, 0)) for reason in DropReason},
    }


def queue_metrics(status: QueueStatus) -> Metrics:
    return {
        **counts_metrics(status.counts),
        "queue/applied_version": float(status.version),
        "queue/payload_bytes": float(status.payload_bytes),
    }


def health_metrics(health: RunHealth) -> dict[str, float]:
    """Return the known values of a run's health as metrics."""
    metrics: dict[str, float] = {}
    for name, process in health.processes.items():
        metrics[f"health/rss_bytes/{name}"] = float(process.rss_bytes)
        metrics[f"health/cpu/{name}"] = process.cpu
        if process.cpu_wait is not None:
            metrics[f"health/cpu_wait/{name}"] = process.cpu_wait
        if process.lag_s is not None:
            metrics[f"health/loop_lag_s/{name}"] = process.lag_s
    for replica, load in health.engines.items():
        metrics[f"health/kv_cache_usage/{replica}"] = load.kv_cache_usage
    if loads := list(health.engines.values()):
        metrics["health/kv_cache_usage"] = max(load.kv_cache_usage for load in loads)
        metrics["health/requests_running"] = float(sum(load.running for load in loads))
        metrics["health/requests_waiting"] = float(sum(load.waiting for load in loads))
        metrics["health/preemptions"] = float(sum(load.preemptions for load in loads))
    if health.object_store_share is not None:
        metrics["health/object_store_share"] = health.object_store_share
    if (machine := health.machine) is not None:
        metrics["health/machine_cpu"] = machine.cpu
        metrics["health/machine_cpus"] = float(machine.cpus)
        metrics["health/memory_available_bytes"] = float(machine.memory_available_bytes)
        if machine.disk_free_bytes is not None:
            metrics["health/disk_free_bytes"] = float(machine.disk_free_bytes)
    metrics["health/problems"] = float(len(health.problems))
    return metrics
