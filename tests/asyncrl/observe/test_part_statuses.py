"""Metrics that are derived from the statuses of the parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.core.ports import ApplyReport
from asyncrl.core.process_health import ProcessHealth
from asyncrl.core.records import ApplyRecord
from asyncrl.core.waits import Wait
from asyncrl.observe.metrics import registry
from asyncrl.observe.metrics.part_metrics import PartMetrics
from asyncrl.observe.metrics.rows import apply_row
from tests.fakes.metric_records import queue_status, rollouter_status, trainer_status


def test_all_names_are_registered() -> None:
    metrics = PartMetrics()
    for second in (0.0, 1.0):
        metrics.update_queue(queue_status())
        agent = {"tool_calls": 4, "tool_s": 2.0, "tool_calls/ok": 4, "trajectories/stop": 1}
        metrics.update_rollouter(second, rollouter_status(agent=agent, skip={"reward": {"replayed": 1}}))
        metrics.update_trainer(second, trainer_status(), 0.0)
        metrics.update_trained(second, 10)
    registry.check(metrics.known)
    expected = {"active/rollouter", "active/trainer", "throughput/trained_tokens_per_s", "skip/reward/replayed"}
    assert expected <= set(metrics.known)


def test_counts_of_roles_come_from_the_process_that_uses_the_role() -> None:
    """Both sides know all roles, and report no counts for those of the other side."""
    of_rollouter, of_trainer = {"replayed": 64}, {"recorded": 4}
    metrics = PartMetrics()
    metrics.update_rollouter(0.0, rollouter_status(skip={"reward": of_rollouter, "ref_log_prob": {}}))
    metrics.update_trainer(0.0, trainer_status(skip={"reward": {}, "ref_log_prob": of_trainer}), 0.0)
    metrics.update_rollouter(1.0, rollouter_status(skip={"reward": of_rollouter, "ref_log_prob": {}}))
    assert metrics.skips == {"reward": of_rollouter, "ref_log_prob": of_trainer}


def test_both_sides_have_version_and_active_share() -> None:
    metrics = PartMetrics()
    for second in (0.0, 4.0):
        metrics.update_rollouter(second, rollouter_status(idle_s=second / 4))
        metrics.update_trainer(second, trainer_status(), second / 2)
    assert (metrics.known["rollouter/version"], metrics.known["trainer/version"]) == (3, 4)
    assert (metrics.known["idle/rollouter"], metrics.known["active/rollouter"]) == (0.25, 0.75)
    assert (metrics.known["idle/trainer"], metrics.known["active/trainer"]) == (0.5, 0.5)


def test_wait_times_of_both_sides_add_up_and_never_decrease() -> None:
    metrics = PartMetrics()
    metrics.update_rollouter(
        0.0, rollouter_status(waited_s={"permit": 2.0}, waits=[Wait("permit", 1, 0.5), Wait("engine", 4, 9.0)])
    )
    assert metrics.known["queue/wait_permit_s"] == 2.5
    metrics.update_rollouter(1.0, rollouter_status(incarnation=2, waited_s={"permit": 0.25}))
    assert metrics.known["queue/wait_permit_s"] == 2.75
    metrics.update_trainer(0.0, trainer_status(waits=[Wait("samples", 1, 3.0)]), 1.0)
    assert metrics.known["queue/wait_samples_s"] == 4.0
    metrics.update_trainer(1.0, trainer_status(), 1.0)  # the wait has ended, but its step is not recorded yet
    assert metrics.known["queue/wait_samples_s"] == 4.0


def test_the_mean_time_of_tool_calls_continues_over_restarts() -> None:
    metrics = PartMetrics()
    metrics.update_rollouter(0.0, rollouter_status(agent={"tool_calls": 0, "tool_s": 0.0}))
    assert "rollouter/tool_mean_s" not in metrics.known
    metrics.update_rollouter(1.0, rollouter_status(agent={"tool_calls": 4, "tool_s": 2.0}))
    metrics.update_rollouter(2.0, rollouter_status(incarnation=2, agent={"tool_calls": 4, "tool_s": 1.0}))
    assert metrics.known["rollouter/tool_mean_s"] == 3.0 / 8


def test_dropped_events_are_those_of_all_processes_each_counted_once() -> None:
    """The counts of Rollouter and Trainer include replicas and ranks; queue and driver count their own events."""
    metrics = PartMetrics()
    metrics.update_rollouter(0.0, rollouter_status(profiler={"events": 100, "dropped": 5, "own_dropped": 2}))
    metrics.update_trainer(0.0, trainer_status(profiler={"events": 10, "dropped": 4, "own_dropped": 0}), 0.0)
    for dropped in (1, 8):
        metrics.update_queue(queue_status(pid=3, health=ProcessHealth(1, dropped_events=dropped)))
        metrics.update_driver(16)
    assert (metrics.known["profiler/events"], metrics.known["profiler/dropped"]) == (110, 33)
    metrics.update_queue(queue_status(pid=4, health=ProcessHealth(1, dropped_events=1)))
    assert metrics.known["profiler/dropped"] == 34
    assert "profiler/own_dropped" not in metrics.known
    registry.check(metrics.known)


@pytest.mark.parametrize("missing", ["version", "waited_s", "profiler", "skip"])
def test_a_status_without_a_key_is_an_error(missing: str) -> None:
    status = rollouter_status()
    del status[missing]
    with pytest.raises(KeyError, match=missing):
        PartMetrics().update_rollouter(0.0, status)


def test_an_apply_row_has_all_phases_of_a_weight_sync() -> None:
    first = ApplyReport("r0", 2, 0.25, 0.5, 0.125, 4, True, drain_s=0.0625, verify_s=1.0)
    second = replace(first, replica="r1", fetch_s=0.5, drain_s=0.03125, in_flight=1, verified=False)
    record = ApplyRecord(2, (first, second), 2.0, num_bytes=400, sent_bytes=8)
    row = apply_row(record, step=1, time_s=0.0, unix_s=0.0)
    assert row.metrics == {
        "weight_sync/publish_to_applied_s": 2.0,
        "weight_sync/sent_bytes": 8.0,
        "weight_sync/sent_share": 0.02,
        "weight_sync/fetch_s": 0.5,
        "weight_sync/drain_s": 0.0625,
        "weight_sync/pause_s": 0.5,
        "weight_sync/load_s": 0.125,
        "weight_sync/verify_s": 1.0,
        "weight_sync/in_flight": 5.0,
        "weight_sync/verified": 0.5,
    }
