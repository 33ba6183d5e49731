"""Records, statuses of the parts and a view, for tests of metrics."""

from __future__ import annotations

from typing import Any

from asyncrl.core.ports import ApplyReport, QueueStatus, SampleCounts
from asyncrl.core.records import ApplyRecord, StepRecord, ValidationRecord
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.terminal.live import View
from asyncrl.observe.terminal.screen import Dashboard


class RecordingView(View):
    """Remembers the newest dashboard and all messages."""

    def __init__(self) -> None:
        self.board = Dashboard()
        self.messages: list[tuple[str, str]] = []

    def message(self, level: str, text: str) -> None:
        self.messages.append((level, text))

    def row(self, row: MetricsRow, dashboard: Dashboard) -> None:
        self.board = dashboard

    def update(self, dashboard: Dashboard) -> None:
        self.board = dashboard


def step(number: int, reward: float = 0.5, *, lineage: int = 0, **metrics: float) -> StepRecord:
    """Return a step that trains two samples with 100 tokens and publishes version `number`."""
    required = {"tokens/trained": 100.0, "timing/wait_samples_s": 0.5, "time/monotonic_s": 10.0 + number}
    return StepRecord(number, number, {"reward/mean": reward, **required, **metrics}, (reward, reward), (0, 1), lineage)


def apply(version: int, *, lineage: int = 0) -> ApplyRecord:
    reports = (
        ApplyReport("r0", version, 0.01, 0.02, 0.003, 4, True),
        ApplyReport("r1", version, 0.02, 0.03, 0.002, 5, False),
    )
    return ApplyRecord(version, reports, 0.25, lineage)


def validation(version: int, reward: float, *, lineage: int = 0) -> ValidationRecord:
    """Return a validation of step `version` with one example, whose response is the number of the version."""
    example = {"prompt": "1+1=", "response": str(version), "ground_truth": "2", "reward": reward}
    metrics = {"reward/mean": reward, "reward/mean/a/b": reward}
    return ValidationRecord(version, version, metrics, (example,), lineage)


def queue_status(trained: int = 0, dropped: int = 0, **given: Any) -> QueueStatus:
    """Return the status of a queue whose trained samples have 50 tokens each."""
    counts = SampleCounts(fed=trained + dropped, trained=trained, dropped={"stale": dropped})
    return QueueStatus(counts, 1, False, {}, trained_tokens=50 * trained, **given)


def rollouter_status(incarnation: int = 1, **changes: Any) -> dict[str, Any]:
    status: dict[str, Any] = {
        "incarnation": incarnation,
        "pid": 100 + incarnation,
        "version": 3,
        "generated_tokens": 50,
        "samples_done": 4,
        "in_flight": 8,
        "idle_s": 0.0,
        "drops": {},
        "waits": [],
        "waited_s": {"permit": 0.0},
        "agent": {},
        "skip": {},
        "profiler": {"events": 0, "dropped": 0},
    }
    return status | changes


def trainer_status(**changes: Any) -> dict[str, Any]:
    status = {"pid": 7, "version": 4, "waits": [], "skip": {}, "profiler": {"events": 0, "dropped": 0}}
    return status | changes
