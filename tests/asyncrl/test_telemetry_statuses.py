"""What the parts tell of themselves, as metrics of a step's line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.health.facts import ProcessHealth
from asyncrl.ports import ApplyReport, Books, QueueStatus
from asyncrl.records import ApplyRecord
from asyncrl.telemetry import registry
from asyncrl.telemetry.rows import apply_row
from asyncrl.telemetry.statuses import Statuses
from asyncrl.waits import Wait


def rollouter(incarnation: int = 1, **changes: Any) -> dict[str, Any]:
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


def trainer(**changes: Any) -> dict[str, Any]:
    status = {"pid": 7, "version": 4, "waits": [], "skip": {}, "profiler": {"events": 0, "dropped": 0}}
    return status | changes


def test_all_names_are_registered() -> None:
    seen = Statuses(0)
    for second in (0.0, 1.0):
        seen.see_queue(QueueStatus(Books(), 1, False, {}))
        agent = {"tool_calls": 4, "tool_s": 2.0, "tool_calls/ok": 4, "trajectories/stop": 1}
        seen.see_rollouter(second, rollouter(agent=agent, skip={"reward": {"replayed": 1}}))
        seen.see_trainer(second, trainer(), 0.0)
        seen.see_trained(second, 10)
    registry.check(seen.known)
    expected = {"active/rollouter", "active/trainer", "throughput/trained_tokens_per_s", "skip/reward/replayed"}
    assert expected <= set(seen.known)


def test_both_sides_tell_version_and_active_share() -> None:
    seen = Statuses(0)
    for second in (0.0, 4.0):
        seen.see_rollouter(second, rollouter(idle_s=second / 4))
        seen.see_trainer(second, trainer(), second / 2)
    assert (seen.known["rollouter/version"], seen.known["trainer/version"]) == (3, 4)
    assert (seen.known["idle/rollouter"], seen.known["active/rollouter"]) == (0.25, 0.75)
    assert (seen.known["idle/trainer"], seen.known["active/trainer"]) == (0.5, 0.5)


def test_waits_of_both_sides_are_added_up_and_never_fall() -> None:
    seen = Statuses(0)
    seen.see_rollouter(0.0, rollouter(waited_s={"permit": 2.0}, waits=[Wait("permit", 1, 0.5), Wait("engine", 4, 9.0)]))
    assert seen.known["queue/wait_permit_s"] == 2.5
    seen.see_rollouter(1.0, rollouter(incarnation=2, waited_s={"permit": 0.25}))
    assert seen.known["queue/wait_permit_s"] == 2.75
    seen.see_trainer(0.0, trainer(waits=[Wait("samples", 1, 3.0)]), 1.0)
    assert seen.known["queue/wait_samples_s"] == 4.0
    seen.see_trainer(1.0, trainer(), 1.0)  # it ended, and its step is not recorded yet
    assert seen.known["queue/wait_samples_s"] == 4.0


def test_the_mean_time_of_a_tool_call() -> None:
    seen = Statuses(0)
    seen.see_rollouter(0.0, rollouter(agent={"tool_calls": 0, "tool_s": 0.0}))
    assert "rollouter/tool_mean_s" not in seen.known
    seen.see_rollouter(1.0, rollouter(agent={"tool_calls": 4, "tool_s": 2.0}))
    seen.see_rollouter(2.0, rollouter(incarnation=2, agent={"tool_calls": 4, "tool_s": 1.0}))
    assert seen.known["rollouter/tool_mean_s"] == 3.0 / 8


def test_events_are_counted_over_both_parts_and_their_restarts() -> None:
    seen = Statuses(0)
    seen.see_rollouter(0.0, rollouter(profiler={"events": 100, "dropped": 2}))
    seen.see_trainer(0.0, trainer(profiler={"events": 10, "dropped": 0}), 0.0)
    seen.see_rollouter(1.0, rollouter(incarnation=2, profiler={"events": 5, "dropped": 1}))
    seen.see_trainer(1.0, trainer(pid=8, profiler={"events": 1, "dropped": 0}), 0.0)
    assert (seen.known["profiler/events"], seen.known["profiler/dropped"]) == (116, 3)


def test_dropped_events_are_those_of_all_processes_each_counted_once() -> None:
    """What replicas and ranks dropped is in what Rollouter and Trainer tell; queue and driver send theirs to nobody."""
    seen = Statuses(0)
    seen.see_rollouter(0.0, rollouter(profiler={"events": 100, "dropped": 5, "own_dropped": 2}))
    seen.see_trainer(0.0, trainer(profiler={"events": 10, "dropped": 4, "own_dropped": 0}), 0.0)
    for dropped in (1, 8):
        seen.see_queue(QueueStatus(Books(), 1, False, {}, pid=3, health=ProcessHealth(1, dropped_events=dropped)))
        seen.see_driver(16)
    assert (seen.known["profiler/events"], seen.known["profiler/dropped"]) == (110, 33)
    seen.see_queue(QueueStatus(Books(), 1, False, {}, pid=4, health=ProcessHealth(1, dropped_events=1)))
    assert seen.known["profiler/dropped"] == 34
    assert "profiler/own_dropped" not in seen.known
    registry.check(seen.known)


@pytest.mark.parametrize("missing", ["version", "waited_s", "profiler", "skip"])
def test_a_status_without_a_key_is_no_status(missing: str) -> None:
    status = rollouter()
    del status[missing]
    with pytest.raises(KeyError, match=missing):
        Statuses(0).see_rollouter(0.0, status)


def test_a_line_of_a_weight_sync_has_all_of_its_phases() -> None:
    first = ApplyReport("r0", 2, 0.25, 0.5, 0.125, 4, True, drain_s=0.0625, verify_s=1.0)
    second = replace(first, replica="r1", fetch_s=0.5, drain_s=0.03125, in_flight=1, verified=False)
    row = apply_row(ApplyRecord(2, (first, second), 2.0), step=1, time_s=0.0, unix_s=0.0)
    assert row.metrics == {
        "weight_sync/publish_to_applied_s": 2.0,
        "weight_sync/fetch_s": 0.5,
        "weight_sync/drain_s": 0.0625,
        "weight_sync/pause_s": 0.5,
        "weight_sync/load_s": 0.125,
        "weight_sync/verify_s": 1.0,
        "weight_sync/in_flight": 5.0,
        "weight_sync/verified": 0.5,
    }
