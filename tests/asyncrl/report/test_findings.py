"""A fault that was planted is the first finding; a healthy run alarms nobody."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.profiling.files import DIRECTORY, EventFiles, Line
from asyncrl.report.analysis import analyse
from asyncrl.report.excess import excess
from asyncrl.report.load import load
from benchmarks.profiling.synthetic import START, Faults, Plan, write_run

SMALL = Plan(steps=6, samples=5, n=2)
few = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def report(path: Path, plan: Plan) -> dict[str, Any]:
    write_run(path, plan)
    return analyse(load(path), {"name": "run"}, {})


def alarms(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["kind"], each["name"]) for each in found["findings"] if each["severity"] == "alarm"]


@pytest.mark.parametrize(("seed", "level"), [(0, "summary"), (1, "full")])
def test_a_healthy_run_has_no_alarm(tmp_path: Path, seed: int, level: Any) -> None:
    assert alarms(report(tmp_path, replace(SMALL, seed=seed, level=level))) == []


@pytest.mark.parametrize(("seed", "replicas"), [(0, 2), (1, 6)])
def test_a_replica_that_is_slower_than_its_peers_comes_first(tmp_path: Path, seed: int, replicas: int) -> None:
    plan = replace(SMALL, seed=seed, replicas=replicas, faults=Faults(replica_factor=4))
    found = report(tmp_path, plan)
    first = found["findings"][0]
    assert (first["kind"], first["what"], first["name"]) == ("replica_slow", "replica", f"r{replicas - 1}")
    assert first["severity"] == "alarm"
    assert first["evidence"]["replica"] == f"r{replicas - 1}"
    # Three quarters of the time in which it was busy, which is most of the run.
    busy = next(row["busy_s"] for row in found["requests"]["by_replica"] if row["replica"] == first["name"])
    assert first["seconds_lost"] == pytest.approx(0.75 * busy, rel=0.1)
    assert "times as slow" in first["text"]


@pytest.mark.slow
@given(st.floats(2.0, 10.0), st.integers(0, 1000))
@few
def test_however_slow_it_is(tmp_path_factory: pytest.TempPathFactory, factor: float, seed: int) -> None:
    plan = replace(SMALL, seed=seed, faults=Faults(replica_factor=factor))
    first = report(tmp_path_factory.mktemp("run"), plan)["findings"][0]
    assert (first["kind"], first["name"]) == ("replica_slow", "r2")


@pytest.mark.parametrize("seed", range(2))
def test_a_tool_that_hangs_in_a_few_calls_comes_first(tmp_path: Path, seed: int) -> None:
    found = report(tmp_path, replace(SMALL, seed=seed, faults=Faults(tool_hang_s=30, tool_hangs=3)))
    first = found["findings"][0]
    assert (first["kind"], first["what"], first["name"], first["severity"]) == ("tool_hang", "tool", "search", "alarm")
    assert 29 <= first["seconds_lost"] <= 95
    assert first["evidence"]["duration_s"] > 30
    assert first["evidence"]["sample"].startswith("sample_0_")
    assert first["evidence"]["turn"] == 0
    assert "3 calls" in first["text"]


@pytest.mark.slow
@given(st.floats(12.0, 120.0), st.integers(1, 4), st.integers(0, 1000))
@few
def test_however_long_it_hangs(tmp_path_factory: Any, hang_s: float, hangs: int, seed: int) -> None:
    plan = replace(SMALL, seed=seed, faults=Faults(tool_hang_s=hang_s, tool_hangs=hangs))
    first = report(tmp_path_factory.mktemp("run"), plan)["findings"][0]
    assert (first["kind"], first["name"]) == ("tool_hang", "search")


@pytest.mark.parametrize("seed", range(1))
def test_one_slow_call_of_the_reward_comes_first(tmp_path: Path, seed: int) -> None:
    found = report(tmp_path, replace(SMALL, seed=seed, faults=Faults(reward_hang_s=20, reward_hangs=1)))
    first = found["findings"][0]
    assert (first["kind"], first["what"], first["severity"]) == ("reward_hang", "reward", "alarm")
    assert first["seconds_lost"] == pytest.approx(20, abs=0.5)


@pytest.mark.parametrize("seed", range(2))
def test_a_reward_that_is_always_slow_comes_first(tmp_path: Path, seed: int) -> None:
    first = report(tmp_path, replace(SMALL, seed=seed, faults=Faults(reward_always_s=10)))["findings"][0]
    assert (first["kind"], first["what"], first["severity"]) == ("reward_slow", "reward", "alarm")


def test_a_slow_reward_that_holds_nothing_up_is_not_what_the_trainer_waits_for(tmp_path: Path) -> None:
    """Places are filled again as soon as generation ends: what scoring takes comes once, at the end of the run."""
    faults = Faults(reward_always_s=4.5, replica_factor=1.7)
    plan = Plan(steps=12, samples=8, n=1, turns=1, tokens=300, lanes=16, faults=faults)
    found = report(tmp_path, plan)
    assert found["idle"]["trainer"]["idle_s"] > 20
    assert alarms(found)[0] == ("replica_slow", "r2")
    rewards = [each["seconds_lost"] for each in found["findings"] if each["kind"] == "reward_slow"]
    assert sum(rewards) < 5


def test_two_faults_are_ranked_by_what_they_cost(tmp_path: Path) -> None:
    faults = Faults(tool_hang_s=15, tool_hangs=1, reward_hang_s=40, reward_hangs=1)
    found = report(tmp_path, replace(SMALL, faults=faults))
    assert alarms(found) == [("reward_hang", "reward.score"), ("tool_hang", "search")]
    lost = [each["seconds_lost"] for each in found["findings"] if each["severity"] == "alarm"]
    assert lost == sorted(lost, reverse=True)


def test_every_finding_says_where_to_look_and_what_to_do(tmp_path: Path) -> None:
    faults = Faults(replica_factor=4, tool_hang_s=30, tool_hangs=2, reward_hang_s=30, reward_hangs=1)
    found = report(tmp_path, replace(SMALL, faults=faults, back_from=5))
    assert {each["what"] for each in found["findings"]} >= {"replica", "tool", "reward", "part"}
    for each in found["findings"]:
        assert each["text"].endswith(".")
        assert each["remedy"].endswith(".")
        assert 0 < each["share_of_run"] <= 1


def put(run_dir: Path, *lines: tuple[str, float, float, dict[str, Any]]) -> None:
    """Add events: name, seconds since the start, duration, fields."""
    files = EventFiles(run_dir / DIRECTORY)
    files.write(
        [
            Line("more", {"timestamp": START + at, "event": name, "duration_s": took, "step": 2, **fields})
            for name, at, took, fields in lines
        ]
    )
    files.close()


def with_events(path: Path, *lines: tuple[str, float, float, dict[str, Any]]) -> dict[str, Any]:
    write_run(path, SMALL)
    put(path, *lines)
    return analyse(load(path), {"name": "run"}, {})


def test_a_weight_sync_that_hung_is_told_once_by_its_innermost_phase(tmp_path: Path) -> None:
    where = {"replica": "r1"}
    found = with_events(
        tmp_path,
        ("sync.load", 10.0, 15.0, where),
        ("sync.pause", 9.9, 15.2, where),
        ("sync.apply", 9.5, 16.0, {}),
    )
    assert alarms(found) == [("weight_sync_hang", "sync.load")]
    assert found["findings"][0]["evidence"]["replica"] == "r1"
    assert found["findings"][0]["seconds_lost"] == pytest.approx(15, abs=0.5)


def test_a_request_that_its_tokens_do_not_explain(tmp_path: Path) -> None:
    stuck = {"sample": "sample_0_9999", "trajectory": 0, "turn": 0, "replica": "r0", "request": "sample_0_9999/0-1"}
    spent = {"queued_s": 39.0, "decode_s": 1.0, "response_tokens": 50, "finish_reason": "stop"}
    found = with_events(tmp_path, ("request", 12.0, 40.0, {**stuck, **spent}))
    assert alarms(found) == [("request_stuck", "sample_0_9999/0")]
    assert found["findings"][0]["seconds_lost"] == pytest.approx(37, abs=2)


@pytest.mark.parametrize("plan", [SMALL, replace(SMALL, steps=12, lanes=4)], ids=["permits", "places"])
def test_a_tool_that_is_always_slow_comes_first(tmp_path: Path, plan: Plan) -> None:
    found = report(tmp_path, replace(plan, faults=Faults(tool_always_s=9)))
    assert alarms(found)[0] == ("tool_slow", "search")
    waited = found["idle"]["trainer"]["idle_s"]
    assert 0.3 * waited < found["findings"][0]["seconds_lost"] < waited


def test_a_rank_that_is_slower_than_its_peers(tmp_path: Path) -> None:
    passes = [
        ("rank.forward", 4.0 * k, 3.0 if rank == 2 else 1.0, {"role": "actor", "rank": rank})
        for k in range(5)
        for rank in range(3)
    ]
    found = with_events(tmp_path, *passes)
    assert ("rank_slow", "actor 2") in alarms(found)
    slow = next(each for each in found["findings"] if each["kind"] == "rank_slow")
    assert slow["seconds_lost"] == pytest.approx(10)


@pytest.mark.parametrize(("stalls", "severity"), [([0.5] * 40, "hint"), ([12.0], "alarm")])
def test_a_long_stall_is_an_alarm_and_many_short_ones_are_not(
    tmp_path: Path, stalls: list[float], severity: str
) -> None:
    lines = [("loop.stall", 5.0 + place, took, {"part": "rollouter"}) for place, took in enumerate(stalls)]
    lines.append(("loop.stall", -30.0, 25.0, {"part": "rollouter"}))  # it was importing
    (told,) = [each for each in with_events(tmp_path, *lines)["findings"] if each["kind"] == "loop_stall"]
    assert (told["severity"], told["name"], told["seconds_lost"]) == (severity, "rollouter", sum(stalls))


def test_checkpoints_and_pauses_that_take_much_are_told(tmp_path: Path) -> None:
    lines = [("trainer.checkpoint", 5.0 * k, 2.0, {}) for k in range(4)]
    lines += [("sync.pause", 4.0 * k, 3.0, {"replica": "r0"}) for k in range(10)]
    kinds = {each["kind"] for each in with_events(tmp_path, *lines)["findings"]}
    assert {"checkpoints", "weight_sync"} <= kinds


def test_what_warms_a_process_up_is_no_alarm(tmp_path: Path) -> None:
    found = with_events(tmp_path, ("trainer.update", -1.0, 40.0, {}))
    assert alarms(found) == []
    assert "trainer_hang" in {each["kind"] for each in found["findings"]}


def test_a_replica_that_is_slow_for_it_has_more_to_do_is_no_alarm(tmp_path: Path) -> None:
    """Eight requests at a time at 2 s each, against one at a time at 1 s."""
    lines = []
    for k in range(20):
        for place, (replica, took) in enumerate([("a", 1.0), *[("b", 2.0)] * 8]):
            at = took * k
            sample = {"sample": f"sample_0_{20 * place + k + 1}", "trajectory": 0, "turn": 0, "replica": replica}
            lines.append(
                ("request", at, took, {**sample, "response_tokens": 50, "decode_s": took, "finish_reason": "stop"})
            )
    put(tmp_path, *lines)
    found = analyse(load(tmp_path), {"name": "run"}, {})
    (told,) = [each for each in found["findings"] if each["kind"] == "replica_slow"]
    assert (told["name"], told["severity"]) == ("b", "hint")
    assert "more to do" in told["text"]


@pytest.mark.parametrize(
    ("generate_s", "train_s", "kind", "says"),
    [
        (9.0, 1.0, "trainer_waits", "(the first samples took 39 s of it): generation is the slower side"),
        (1.0, 9.0, "rollouter_idle", "training is the slower side"),
        (6.0, 4.0, "in_turns", "wait for each other in turns"),
    ],
)
def test_one_side_at_most_is_the_slower_one(
    tmp_path: Path, generate_s: float, train_s: float, kind: str, says: str
) -> None:
    lines, first = [], 30.0 if kind == "trainer_waits" else 0.0
    for k in range(10):
        began, until = 10.0 * k - (first if k == 0 else 0.0), 10.0 * k + generate_s
        lines.append(("sample.generate", began, until - began, {"sample": f"sample_0_{k + 1}", "trajectories": 1}))
        lines.append(("trainer.wait_samples", began, until - began, {"samples": 1}))
        lines.append(("trainer.update", until, train_s, {}))
    put(tmp_path, *lines)
    found = analyse(load(tmp_path), {"name": "run", "status": "completed"}, {})["findings"]
    (told,) = [each for each in found if each["kind"] in ("trainer_waits", "rollouter_idle", "in_turns")]
    assert told["kind"] == kind and says in told["text"]


def calls(*durations: float) -> pd.DataFrame:
    starts = 1000.0 * np.arange(len(durations))
    return pd.DataFrame({"timestamp": starts, "duration_s": durations, "end": starts + np.array(durations)})


def test_excess_is_what_a_call_took_beyond_the_median() -> None:
    found = excess(calls(1.0, 1.0, 1.1, 0.9, 31.0))
    assert found is not None
    assert (len(found.calls), found.num_calls, found.median_s) == (1, 5, 1.0)
    assert found.lost.tolist() == [[4001.0, 4031.0]]
    assert found.worst["duration_s"] == 31.0


@pytest.mark.parametrize(
    "durations", [(1.0, 1.0, 4.0), (0.001, 0.001, 0.001, 0.5), (1.0, 30.0), tuple(math.exp(k) for k in range(-3, 4))]
)
def test_what_varies_anyhow_or_takes_little_or_is_alone_does_not_stand_out(durations: tuple[float, ...]) -> None:
    assert excess(calls(*durations)) is None
