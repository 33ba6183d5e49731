"""What replicas report of themselves, on one clock. Pure.

Nodes' clocks differ. A report is stamped as it arrives, so that its times are the weight store's; whoever asks the
store shifts them once more (`on_clock`), by the moment of the answer.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.ports import ReplicaReport, StoreStatus

FORGET_REPLICA_S = 600.0
"""A replica that has not reported for so long is not told of any more."""


class ReplicaReports:
    """The last report of each replica. Times are wall clock, the caller's."""

    def __init__(self) -> None:
        self._last: dict[str, ReplicaReport] = {}

    def arrived(self, report: ReplicaReport, now: float) -> None:
        """Keep it in the place of the one before, its times as this clock would have told them."""
        self._last[report.replica] = _shifted(report, now - report.reported_at)

    def told(self, now: float) -> tuple[ReplicaReport, ...]:
        """Those of the last minutes, the longest unheard of first."""
        self._last = {
            name: report for name, report in self._last.items() if now - report.reported_at <= FORGET_REPLICA_S
        }
        return tuple(sorted(self._last.values(), key=lambda report: report.reported_at))


def on_clock(status: StoreStatus, now: float) -> StoreStatus:
    """A status that has just come, its times by the clock that says `now`."""
    shift_s = now - status.at
    return replace(status, at=now, replicas=tuple(_shifted(report, shift_s) for report in status.replicas))


def _shifted(report: ReplicaReport, seconds: float) -> ReplicaReport:
    return replace(report, reported_at=report.reported_at + seconds, phase_since=report.phase_since + seconds)
