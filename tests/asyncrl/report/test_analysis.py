"""Figures: numbers worked out by hand for a run of a dozen events, and what holds for any run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.profiling.files import DIRECTORY, EventFiles, Line
from asyncrl.report.analysis import analyse
from asyncrl.report.lives import KINDS
from asyncrl.report.load import load
from asyncrl.report.words import figures
from benchmarks.profiling.synthetic import START, Faults, Plan, write_run

SAMPLE = {"step": 1, "sample": "sample_0_1"}
FIRST = {**SAMPLE, "trajectory": 0}
ON_A = {**FIRST, "replica": "a", "gate_s": 0.0}
TINY: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
    ("sample.admitted", 100.0, 0.0, {**SAMPLE, "permit_wait_s": 1.0}),
    (
        *("request", 100.5, 2.0),
        {**ON_A, "turn": 0, "request": "sample_0_1/0-1", "response_tokens": 4, "finish_reason": "aborted"}
        | {"queued_s": 0.2, "prefill_s": 0.3, "decode_s": 1.0, "paused_s": 0.5},
    ),
    (
        *("request", 102.5, 3.0),
        {**ON_A, "turn": 0, "request": "sample_0_1/0-2", "response_tokens": 6, "finish_reason": "tool_call"}
        | {"queued_s": 0.1, "prefill_s": 0.4, "decode_s": 2.5, "paused_s": 0.0},
    ),
    ("tool.execute", 105.5, 1.0, {**FIRST, "turn": 0, "tool": "search", "status": "ok", "wait_s": 0.0}),
    (
        *("request", 106.5, 1.0),
        {**ON_A, "turn": 1, "request": "sample_0_1/0.1-1", "response_tokens": 5, "finish_reason": "stop"}
        | {"queued_s": 0.0, "prefill_s": 0.0, "decode_s": 1.0, "paused_s": 0.0},
    ),
    (
        *("trajectory", 100.5, 7.0),
        {**FIRST, "turns": 2, "calls": 1, "tokens": 20, "sampled_tokens": 15, "finish_reason": "stop"}
        | {"generate_s": 6.0, "tool_s": 1.0, "user_s": 0.0},
    ),
    ("sample.generate", 100.5, 7.0, {**SAMPLE, "trajectories": 1, "tokens": 15}),
    ("sample.reward", 107.5, 0.5, SAMPLE),
    ("sample.ready", 108.0, 0.0, {**SAMPLE, "reward": 1.0, "tokens": 20, "versions": 1}),
    ("trainer.wait_samples", 100.0, 9.0, {"step": 1, "samples": 1}),
    ("sample.leased", 109.0, 0.0, {**SAMPLE, "staleness": 1}),
    ("trainer.update", 109.5, 1.5, {"step": 1}),
    ("sample.trained", 111.0, 0.0, {**SAMPLE, "staleness": 1, "versions": 1, "reward": 1.0, "tokens": 20}),
    (
        *("step", 100.0, 11.0),
        {"step": 1, "wait_samples_s": 9.0, "samples": 1, "tokens": 15, "reward": 1.0, "lineage": 0},
    ),
)


def write(run_dir: Path, events: Any) -> None:
    files = EventFiles(run_dir / DIRECTORY)
    files.write(
        [
            Line("all", {"timestamp": START + at, "event": name, "duration_s": took, **fields})
            for name, at, took, fields in events
        ]
    )
    files.close()


def analysed(run_dir: Path, **summary: Any) -> dict[str, Any]:
    found = analyse(load(run_dir), {"name": "run", "response_length": 32, "status": "completed"}, summary)
    json.dumps(found, allow_nan=False)
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    write(tmp_path, TINY)
    return analysed(tmp_path)


def test_attempts_of_a_request_add_up(tiny: dict[str, Any]) -> None:
    requests = tiny["requests"]
    assert requests["count"] == 2
    assert requests["time"]["all"]["max"] == 5.0
    assert requests["time"]["all"]["min"] == 1.0
    assert requests["length"]["all"]["max"] == 10
    assert requests["time"]["by_step"][0]["done_early"] == 0.5  # one of two within 40 % of 5 s
    assert requests["slowest"][0] == {
        **{"request": "sample_0_1/0", "sample": "sample_0_1", "trajectory": 0, "turn": 0, "replica": "a", "step": 1},
        **{"attempts": 2, "duration_s": 5.0, "response_tokens": 10, "gate_s": 0, "queued_s": 0.3, "prefill_s": 0.7},
        **{"decode_s": 3.5, "paused_s": 0.5},
    }
    (replica,) = requests["by_replica"]
    assert (replica["tokens"], replica["decode_s"], replica["busy_s"]) == (15, 4.5, 6.0)
    assert replica["decode_s_per_token"] == pytest.approx(0.3)


def test_every_second_of_a_life_is_of_one_kind(tiny: dict[str, Any]) -> None:
    shares = tiny["shares"]
    expected = dict.fromkeys(KINDS, 0.0) | {
        **{"permit": 1.0, "queued": 0.3, "prefill": 0.7, "decode": 4.5, "paused": 0.5, "tool": 1.0, "reward": 0.5},
        **{"ready": 1.0, "leased": 0.5, "training": 1.5, "other": 0.5},
    }
    assert shares["whole_s_mean"] == 12.0
    assert {row["kind"]: row["mean_s"] for row in shares["table"]} == pytest.approx(expected, abs=1e-5)
    assert {row["kind"]: row["percent"] for row in shares["table"]} == pytest.approx(
        {kind: 100 * seconds / 12 for kind, seconds in expected.items()}, abs=1e-3
    )
    assert [bar["whole_s"] for bar in shares["life"]] == [12.0, 12.0]


def test_turns_idle_time_versions_and_waste(tiny: dict[str, Any]) -> None:
    assert [(row["turn"], row["generation_s"], row["tool_s"]) for row in tiny["turns"]["by_turn"]] == [
        (0, 5.0, 1.0),
        (1, 1.0, 0.0),
    ]
    assert tiny["turns"]["percent"] == {"2": 100.0}
    idle = tiny["idle"]
    assert idle["wall_s"] == 11.0
    assert (idle["trainer"]["idle_s"], idle["rollouter"]["idle_s"], idle["both_s"]) == (9.0, 4.0, 2.0)
    assert idle["trainer"]["share"] == pytest.approx(9 / 11, abs=1e-5)
    assert sum(idle["trainer"]["strip"]) * idle["bin_s"] == pytest.approx(9.0, abs=1e-3)
    assert tiny["staleness"]["staleness"]["histogram"] == {"1": 1}
    assert tiny["thrown_away"]["aborted"] == {
        **{"attempts": 1, "share_of_attempts": pytest.approx(1 / 3, abs=1e-5), "tokens": 4, "resumed": 1},
        "prefill_again_s": 0.4,
    }
    half = next(row for row in tiny["lower_limits"]["limits"] if row["limit"] == 10)
    assert half == {
        **{"limit": 10, "cut_share": 1.0, "reward_lost_share": 1.0, "decode_saved_share": 0.5},
        "longest_trajectory_saved_share": 0.375,  # half of 4.5 s of decoding, of 6 s in requests
    }
    (step,) = tiny["steps"]["by_step"]
    assert step["parts"]["waiting for samples"] == 9.0
    assert step["parts"]["the update of the policy"] == 1.5
    assert step["parts"]["the rest"] == 0.5


def test_reward_that_a_lower_limit_loses(tmp_path: Path) -> None:
    """Four responses of 10, 20, 30 and 40 tokens; those above 20 have half of the reward above the least."""
    events = []
    for number, (tokens, reward) in enumerate([(10, -1.0), (20, 1.0), (30, 0.0), (40, 0.0)]):
        place = {"sample": "sample_0_1", "trajectory": number, "step": 1}
        length = {"turns": 1, "tokens": tokens, "finish_reason": "stop"}
        events += [
            ("trajectory", 10.0, 4.0, {**place, **length}),
            ("reward.score", 14.0, 0.1, {**place, "reward": reward, "trajectories": 1}),
        ]
    write(tmp_path, events)
    limits = {row["limit"]: row for row in analysed(tmp_path)["lower_limits"]["limits"]}
    assert (limits[20]["cut_share"], limits[20]["reward_lost_share"]) == (0.5, 0.5)
    assert limits[40]["cut_share"] == 0


def test_tokens_of_surplus_that_was_cut_are_counted_once(tmp_path: Path) -> None:
    events = [
        ("request", 1.0, 1.0, {"request": f"sample_0_{index}/0-1", "response_tokens": tokens})
        for index, tokens in ((1, 77), (2, 7), (3, 5), (4, 11))
    ]
    events += [
        ("sample.cut", 2.0, 0.0, {"sample": "sample_0_2", "tokens": 7, "kept": 0}),
        ("sample.dropped", 2.0, 0.0, {"sample": "sample_0_2", "tokens": 7, "reason": "surplus"}),
        ("sample.cut", 2.0, 0.0, {"sample": "sample_0_3", "tokens": 5, "kept": 1}),
        ("sample.dropped", 3.0, 0.0, {"sample": "sample_0_4", "tokens": 11, "reason": "stale"}),
    ]
    write(tmp_path, events)
    waste = analysed(tmp_path)["thrown_away"]
    assert (waste["thrown_away_tokens"], waste["share"], waste["cut"]["kept_tokens"]) == (18, 0.18, 5)


def test_a_step_that_stands_out_is_linked_to_what_held_it_up(tmp_path: Path) -> None:
    """Nothing is generated ahead, so the step waits for the sample whose tool hangs."""
    write_run(tmp_path, Plan(steps=16, ahead=0, faults=Faults(tool_hang_s=60, tool_hangs=1)))
    outliers = analysed(tmp_path)["steps"]["outliers"]
    (worst,) = [row for row in outliers if row["event"]["name"] == "search"]
    assert worst["event"]["event"] == "tool.execute"
    assert worst["event"]["duration_s"] > 60
    assert worst["turn"]["seconds"]["tool"] > 60
    assert "in tools" in worst["cause"]
    assert worst["replica"]["replica"] in {"r0", "r1", "r2"}
    assert worst["request"]["request"].startswith("sample_0_")


def test_a_run_that_went_back_is_told_by_the_steps_that_survived(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(steps=8, back_from=5))  # the Trainer is away for 5 s
    found = analysed(tmp_path)
    assert [row["step"] for row in found["steps"]["by_step"]] == list(range(1, 9))
    assert [(row["step"], row["lineage"]) for row in found["steps"]["abandoned"]] == [(4, 0), (5, 0)]
    assert found["run"]["samples_trained"] == 8 * 8
    assert any("went back" in note for note in found["notes"])
    (restarts,) = [each for each in found["findings"] if each["kind"] == "restarts"]
    again = sum(row["duration_s"] for row in found["steps"]["abandoned"])
    assert restarts["seconds_lost"] == pytest.approx(5 + again, rel=1e-4)
    assert restarts["name"] == "trainer"


def test_time_in_which_the_run_was_down_is_no_idle_time(tmp_path: Path) -> None:
    later = [(name, at + 10_000, took, fields) for name, at, took, fields in TINY]
    write(tmp_path, [*TINY, *later])
    idle = analysed(tmp_path)["idle"]
    assert idle["down_s"] == pytest.approx(10_000 - 11)
    assert idle["wall_s"] == pytest.approx(22)
    assert idle["trainer"]["idle_s"] == pytest.approx(18)
    assert idle["rollouter"]["idle_s"] == pytest.approx(8)


@pytest.mark.parametrize(
    "only",
    [
        {"step"}, {"sample.admitted"}, {"request"}, {"trajectory"}, {"sample.trained"}, {"trainer.wait_samples"},
        {"part.restarted"}, {"request", "trajectory", "sample.generate"}, {"sample.trained", "sample.admitted"},
    ],
)  # fmt: skip
def test_any_part_of_a_run_makes_a_report(tmp_path: Path, only: set[str]) -> None:
    events = [*TINY, ("part.restarted", 99.0, 0.0, {"part": "trainer", "cause": "killed"})]
    write(tmp_path, [event for event in events if event[0] in only])
    found = analysed(tmp_path)
    assert found["run"]["events"] >= 1
    figures(found)


def test_how_long_the_run_took_to_start_and_to_end(tmp_path: Path) -> None:
    """Its events are from 100 s to 111 s."""
    write(tmp_path, TINY)
    events = load(tmp_path)
    found = analyse(events, {"status": "completed", "started_at": START + 40}, {"wall_s": 80.0})
    assert (found["run"]["starting_s"], found["run"]["wall_s"], found["run"]["ending_s"]) == (60, 11, 9)
    assert "Starting the run took 60 s, until its first sample, and ending it 9 s" in found["notes"][0]
    resumed = analyse(events, {"status": "completed", "started_at": START + 105}, {"wall_s": 8.0})
    assert (resumed["run"]["starting_s"], resumed["run"]["ending_s"]) == (None, None)
    assert not any("Starting" in note for note in resumed["notes"])


def test_validation_is_left_out(tmp_path: Path) -> None:
    own = [(name, at, took, {**fields, "sample": "val_0_1"}) for name, at, took, fields in TINY if "sample" in fields]
    write(tmp_path, own)
    found = analysed(tmp_path)
    assert found["run"]["validation_requests"] == 3
    assert found["run"]["requests"] == found["requests"]["count"] == found["turns"]["trajectories"] == 0
    assert any("No request" in note for note in found["notes"])


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["summary", "full"]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_percentages_sum_up(tmp_path_factory: Any, seed: int, n: int, turns: int, level: Any) -> None:
    path = tmp_path_factory.mktemp("run")
    write_run(path, replace(Plan(steps=3, samples=3), seed=seed, n=n, turns=turns, level=level))
    found = analysed(path)
    assert sum(row["percent"] for row in found["shares"]["table"]) == pytest.approx(100, abs=1e-2)
    for row in found["shares"]["course"]:
        assert sum(row["percent"].values()) == pytest.approx(100, abs=1e-2)
    assert sum(found["turns"]["percent"].values()) == pytest.approx(100, abs=1e-2)
    for bar in found["shares"]["life"]:
        assert sum(bar["seconds"].values()) == pytest.approx(bar["whole_s"], rel=1e-4)
    for row in found["steps"]["by_step"]:
        assert sum(row["parts"].values()) == pytest.approx(row["duration_s"], rel=0.02)
    assert sum(row["requests"] for row in found["steps"]["by_step"]) <= found["run"]["requests"]


def test_a_sample_whose_generation_nobody_wrote_down_is_told(tmp_path: Path) -> None:
    """Its Rollouter was killed right after it had delivered it."""
    delivered = [(name, *rest) for name, *rest in TINY if name in ("sample.leased", "sample.trained", "step")]
    write(tmp_path / "lost", delivered)
    found = analysed(tmp_path / "lost")
    assert (found["run"]["samples_trained"], found["run"]["samples_unrecorded"]) == (1, 1)
    assert any(note.startswith("How 1 trained sample was generated is not among the events") for note in found["notes"])
    admitted = [row for row in TINY if row[0] not in ("request", "trajectory", "sample.generate", "sample.reward")]
    write(tmp_path / "admitted", admitted)
    assert analysed(tmp_path / "admitted")["run"]["samples_unrecorded"] == 1
    write(tmp_path / "whole", TINY)
    found = analysed(tmp_path / "whole")
    assert found["run"]["samples_unrecorded"] == 0 and not any("not among" in note for note in found["notes"])
