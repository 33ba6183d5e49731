"""A planted fault is the first finding, and a healthy run has no alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.synthetic_run import PlantedFaults, RunPlan, write_run
from tests.fakes.events import EventTuple, report_of

SMALL = RunPlan(steps=6, samples=5, n=2)
few = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run_report(path: Path, plan: RunPlan = SMALL, *lines: EventTuple) -> dict[str, Any]:
    """Return the report of a synthetic run to which these events of step 2 are added."""
    write_run(path, plan)
    return report_of(path, *((name, at, took, {"step": 2, **fields}) for name, at, took, fields in lines))


def alarms(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["kind"], row["name"]) for row in report["findings"] if row["severity"] == "alarm"]


def finding(report: dict[str, Any], kind: str) -> dict[str, Any]:
    (row,) = [row for row in report["findings"] if row["kind"] == kind]
    return row


@pytest.mark.parametrize(("seed", "level"), [(0, "summary"), (1, "full")])
def test_a_healthy_run_has_no_alarm(tmp_path: Path, seed: int, level: Any) -> None:
    assert alarms(run_report(tmp_path, replace(SMALL, seed=seed, level=level))) == []


@pytest.mark.parametrize(("seed", "replicas"), [(0, 2), (1, 6)])
def test_a_slow_replica_is_the_first_finding(tmp_path: Path, seed: int, replicas: int) -> None:
    report = run_report(tmp_path, replace(SMALL, seed=seed, replicas=replicas, faults=PlantedFaults(replica_factor=4)))
    first, name = report["findings"][0], f"r{replicas - 1}"
    assert (first["kind"], first["what"], first["name"]) == ("replica_slow", "replica", name)
    assert (first["severity"], first["evidence"]["replica"]) == ("alarm", name)
    # The replica loses three quarters of its busy time, which is most of the run.
    busy = next(row["busy_s"] for row in report["requests"]["by_replica"] if row["replica"] == name)
    assert first["seconds_lost"] == pytest.approx(0.75 * busy, rel=0.1)
    assert "times as slow" in first["text"]


@pytest.mark.parametrize(
    ("faults", "kind", "name", "lost", "text"),
    [
        (PlantedFaults(tool_hang_s=30, tool_hangs=3), "tool_hang", "search", (29, 95), "A tool was slow: 3 of "),
        (PlantedFaults(reward_hang_s=20, reward_hangs=1), "reward_hang", "reward.score", (19.5, 20.5), ": 1 of "),
        (PlantedFaults(reward_always_s=10), "reward_slow", "sample.reward", (3, 1000), "always slow"),
        (PlantedFaults(tool_always_s=9), "tool_slow", "search", (3, 1000), "always slow"),
    ],
)
def test_a_hanging_or_always_slow_call_is_the_first_finding(
    tmp_path: Path, faults: PlantedFaults, kind: str, name: str, lost: tuple[float, float], text: str
) -> None:
    report = run_report(tmp_path, replace(SMALL, faults=faults))
    first = report["findings"][0]
    assert (first["kind"], first["what"], first["name"]) == (kind, kind.partition("_")[0], name)
    assert first["severity"] == "alarm" and text in first["text"]
    assert lost[0] <= first["seconds_lost"] <= lost[1]
    assert first["evidence"]["sample"].startswith("sample_0_")
    if kind == "tool_hang":
        assert first["evidence"]["duration_s"] > 30 and first["evidence"]["turn"] == 0
    if kind == "tool_slow":
        assert 0.3 * report["idle"]["trainer"]["idle_s"] < first["seconds_lost"] < report["idle"]["trainer"]["idle_s"]


@pytest.mark.slow
@given(st.floats(2.0, 10.0), st.floats(12.0, 120.0), st.integers(1, 4), st.integers(0, 1000))
@few
def test_faults_of_any_size_are_the_first_finding(
    tmp_path_factory: Any, factor: float, hang: float, hangs: int, seed: int
) -> None:
    for faults, expected in (
        (PlantedFaults(replica_factor=factor), ("replica_slow", "r2")),
        (PlantedFaults(tool_hang_s=hang, tool_hangs=hangs), ("tool_hang", "search")),
    ):
        first = run_report(tmp_path_factory.mktemp("run"), replace(SMALL, seed=seed, faults=faults))["findings"][0]
        assert (first["kind"], first["name"]) == expected


def test_a_slow_reward_off_the_critical_path_costs_little(tmp_path: Path) -> None:
    """A slot is free as soon as generation ends, so slow scoring delays only the end of the run."""
    faults = PlantedFaults(reward_always_s=4.5, replica_factor=1.7)
    plan = RunPlan(steps=12, samples=8, n=1, turns=1, tokens=300, slots=16, faults=faults)
    report = run_report(tmp_path, plan)
    assert report["idle"]["trainer"]["idle_s"] > 20
    assert alarms(report)[0] == ("replica_slow", "r2")
    assert sum(row["seconds_lost"] for row in report["findings"] if row["kind"] == "reward_slow") < 5


def test_an_always_slow_tool_is_found_from_the_waits_for_slots(tmp_path: Path) -> None:
    report = run_report(tmp_path, replace(SMALL, steps=12, slots=4, faults=PlantedFaults(tool_always_s=9)))
    assert alarms(report)[0] == ("tool_slow", "search")
    assert report["findings"][0]["seconds_lost"] > 0.3 * report["idle"]["trainer"]["idle_s"]


def test_faults_are_ranked_by_their_cost_and_have_evidence_and_remedies(tmp_path: Path) -> None:
    faults = PlantedFaults(tool_hang_s=15, tool_hangs=1, reward_hang_s=40, reward_hangs=1)
    report = run_report(tmp_path, replace(SMALL, faults=faults, back_from=5))
    found = alarms(report)
    assert found.index(("reward_hang", "reward.score")) < found.index(("tool_hang", "search"))
    lost = [row["seconds_lost"] for row in report["findings"] if row["severity"] == "alarm"]
    assert lost == sorted(lost, reverse=True)
    assert {row["what"] for row in report["findings"]} >= {"tool", "reward", "part"}
    for row in report["findings"]:
        assert row["text"].endswith(".") and row["remedy"].endswith(".") and row["evidence"]
        assert 0 < row["share_of_run"] <= 1


def test_a_hanging_weight_sync_is_reported_once_by_its_innermost_phase(tmp_path: Path) -> None:
    where = {"replica": "r1"}
    lines = [("sync.load", 10.0, 15.0, where), ("sync.pause", 9.9, 15.2, where), ("sync.apply", 9.5, 16.0, {})]
    report = run_report(tmp_path, SMALL, *lines)
    assert alarms(report) == [("weight_sync_hang", "sync.load")]
    assert report["findings"][0]["evidence"]["replica"] == "r1"
    assert report["findings"][0]["seconds_lost"] == pytest.approx(15, abs=0.5)


def test_a_request_much_longer_than_its_tokens_take_is_reported_as_stuck(tmp_path: Path) -> None:
    stuck = {"sample": "sample_0_9999", "trajectory": 0, "turn": 0, "replica": "r0", "request": "sample_0_9999/0-1"}
    times = {"queued_s": 39.0, "decode_s": 1.0, "response_tokens": 50, "finish_reason": "stop"}
    report = run_report(tmp_path, SMALL, ("request", 12.0, 40.0, {**stuck, **times}))
    assert alarms(report) == [("request_stuck", "sample_0_9999/0")]
    assert report["findings"][0]["seconds_lost"] == pytest.approx(37, abs=2)


def test_a_slow_rank_is_an_alarm(tmp_path: Path) -> None:
    passes = [
        ("rank.forward", 4.0 * k, 3.0 if rank == 2 else 1.0, {"role": "actor", "rank": rank})
        for k in range(5)
        for rank in range(3)
    ]
    slow = finding(run_report(tmp_path, SMALL, *passes), "rank_slow")
    assert (slow["name"], slow["severity"], slow["seconds_lost"]) == ("actor 2", "alarm", pytest.approx(10))


@pytest.mark.parametrize(("stalls", "severity"), [([0.5] * 40, "hint"), ([12.0], "alarm")])
def test_long_stalls_are_alarms_and_short_ones_are_hints(tmp_path: Path, stalls: list[float], severity: str) -> None:
    lines = [("loop.stall", 5.0 + place, took, {"part": "rollouter"}) for place, took in enumerate(stalls)]
    lines.append(("loop.stall", -30.0, 25.0, {"part": "rollouter"}))  # the stall was caused by imports
    stall = finding(run_report(tmp_path, SMALL, *lines), "loop_stall")
    assert (stall["severity"], stall["name"], stall["seconds_lost"]) == (severity, "rollouter", sum(stalls))


def test_short_stalls_of_several_parts_are_one_finding(tmp_path: Path) -> None:
    lines = [("loop.stall", 5.0 + at, 0.5, {"part": part}) for at in range(20) for part in ("trainer", "rollouter")]
    lines.append(("loop.stall", 40.0, 12.0, {"part": "queue"}))
    found = [row for row in run_report(tmp_path, SMALL, *lines)["findings"] if row["kind"] == "loop_stall"]
    assert [(row["name"], row["severity"]) for row in found] == [("queue", "alarm"), ("rollouter, trainer", "hint")]
    assert "40 times" in found[1]["text"]


def test_frequent_checkpoints_and_pauses_are_reported(tmp_path: Path) -> None:
    lines = [("trainer.checkpoint", 5.0 * k, 2.0, {}) for k in range(4)]
    lines += [("sync.pause", 4.0 * k, 3.0, {"replica": "r0"}) for k in range(10)]
    assert {"checkpoints", "weight_sync"} <= {row["kind"] for row in run_report(tmp_path, SMALL, *lines)["findings"]}


def test_a_slow_first_call_is_not_an_alarm(tmp_path: Path) -> None:
    report = run_report(tmp_path, SMALL, ("trainer.update", -1.0, 40.0, {}))
    assert alarms(report) == []
    assert finding(report, "trainer_hang")["severity"] == "hint"


def test_a_replica_that_is_slow_because_it_has_more_work_is_not_an_alarm(tmp_path: Path) -> None:
    """One replica runs eight requests at a time for 2 s each, the other runs one at a time for 1 s."""
    lines: list[EventTuple] = []
    for k in range(20):
        for place, (replica, took) in enumerate([("a", 1.0), *[("b", 2.0)] * 8]):
            fields = {"sample": f"sample_0_{20 * place + k + 1}", "trajectory": 0, "turn": 0, "replica": replica}
            fields |= {"response_tokens": 50, "decode_s": took, "finish_reason": "stop", "step": 2}
            lines.append(("request", took * k, took, fields))
    loaded = finding(report_of(tmp_path, *lines), "replica_loaded")
    assert (loaded["name"], loaded["severity"]) == ("b", "hint")
    assert "more work" in loaded["text"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_long_tail_costs_the_time_that_the_trainer_waits_for_it(tmp_path: Path, waits: bool) -> None:
    lines: list[EventTuple] = [("sample.admitted", 0.0, 0.0, {"step": 1, "sample": "sample_0_1"})]
    for number in range(20):
        place = {"sample": "sample_0_1", "trajectory": number, "turn": 0, "replica": "a", "step": 1}
        took = 40.0 if number == 19 else 1.0
        lines.append(("request", 0.0, took, {**place, "response_tokens": 10, "finish_reason": "stop"}))
    if waits:
        lines.append(("trainer.wait_samples", 30.0, 10.0, {"step": 1}))
    tails = [row["seconds_lost"] for row in report_of(tmp_path, *lines)["findings"] if row["kind"] == "long_tail"]
    assert tails == ([pytest.approx(10)] if waits else [])


@pytest.mark.parametrize(
    ("generate_s", "train_s", "kind", "text"),
    [
        (9.0, 1.0, "trainer_waits", ", 39 s of that for the first samples: generation is the slower side"),
        (1.0, 9.0, "rollouter_idle", "training is the slower side"),
        (6.0, 4.0, "sides_alternate", "wait for each other alternately"),
    ],
)
def test_at_most_one_side_is_the_slower_one(
    tmp_path: Path, generate_s: float, train_s: float, kind: str, text: str
) -> None:
    lines: list[EventTuple] = []
    first_s = 30.0 if kind == "trainer_waits" else 0.0
    for k in range(10):
        begin, end = 10.0 * k - (first_s if k == 0 else 0.0), 10.0 * k + generate_s
        lines.append(("sample.generate", begin, end - begin, {"sample": f"sample_0_{k + 1}", "trajectories": 1}))
        lines.append(("trainer.wait_samples", begin, end - begin, {"samples": 1}))
        lines.append(("trainer.update", end, train_s, {}))
    findings = report_of(tmp_path, *lines, status="completed")["findings"]
    (row,) = [row for row in findings if row["kind"] in ("trainer_waits", "rollouter_idle", "sides_alternate")]
    assert row["kind"] == kind and text in row["text"]
