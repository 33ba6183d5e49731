"""Reports of replicas on nodes whose clocks differ."""

from __future__ import annotations

from asyncrl.core.ports import ReplicaReport, StoreStatus
from asyncrl.weights.object_store import FORGET_REPLICA_S, ReplicaReports, on_clock


def reported(name: str, at: float, phase_since: float = 0.0) -> ReplicaReport:
    return ReplicaReport(name, "node", 1, (2, 3), "serving", phase_since, 0, 1, 4, 100, at)


def test_reports_are_converted_to_the_readers_clock_and_dropped_after_a_while() -> None:
    reports = ReplicaReports()
    reports.add(reported("old", 7.0), 1000.0)
    reports.add(reported("a", 50.0, phase_since=40.0), 1100.0)
    reports.add(reported("b", 9000.0), 1090.0)
    assert [report.replica for report in reports.recent(1000.0 + FORGET_REPLICA_S)] == ["old", "b", "a"]
    left = reports.recent(1001.0 + FORGET_REPLICA_S)
    assert [report.replica for report in left] == ["b", "a"]
    status = on_clock(StoreStatus(1, None, left, at=1001.0 + FORGET_REPLICA_S), 5000.0)
    assert status.at == 5000.0
    b, a = status.replicas
    # Unheard of for as long as on the store's clock, in their phases as long as on their own.
    assert 5000.0 - a.reported_at == 1001.0 + FORGET_REPLICA_S - 1100.0
    assert a.reported_at - a.phase_since == 10.0
    assert a.reported_at - b.reported_at == 10.0
