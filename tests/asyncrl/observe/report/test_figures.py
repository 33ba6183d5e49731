"""Figures of the report: numbers calculated by hand for small runs, and invariants of any run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observe.report.analysis import analyse
from asyncrl.observe.report.load import Events, load
from asyncrl.observe.report.plots import figures
from asyncrl.observe.report.samples import KINDS
from asyncrl.observe.report.statistics import spans, total
from asyncrl.profiling.files import event_files
from benchmarks.synthetic_run import START, PlantedFaults, RunPlan, write_run
from tests.fakes.events import EventTuple, report_of

SAMPLE: dict[str, Any] = {"step": 1, "sample": "sample_0_1"}
FIRST = {**SAMPLE, "trajectory": 0}
ON_A = {**FIRST, "replica": "a", "gate_s": 0.0}
TINY: tuple[EventTuple, ...] = (
    ("sample.admitted", 100.0, 0.0, {**SAMPLE, "permit_wait_s": 1.0}),
    ("request", 100.5, 2.0,
     {**ON_A, "turn": 0, "request": "sample_0_1/0-1", "response_tokens": 4, "finish_reason": "aborted",
      "queued_s": 0.2, "prefill_s": 0.3, "decode_s": 1.0, "paused_s": 0.5}),
    ("request", 102.5, 3.0,
     {**ON_A, "turn": 0, "request": "sample_0_1/0-2", "response_tokens": 6, "finish_reason": "tool_call",
      "queued_s": 0.1, "prefill_s": 0.4, "decode_s": 2.5, "paused_s": 0.0}),
    ("tool.execute", 105.5, 1.0, {**FIRST, "turn": 0, "tool": "search", "status": "ok", "wait_s": 0.0}),
    ("request", 106.5, 1.0,
     {**ON_A, "turn": 1, "request": "sample_0_1/0.1-1", "response_tokens": 5, "finish_reason": "stop",
      "queued_s": 0.0, "prefill_s": 0.0, "decode_s": 1.0, "paused_s": 0.0}),
    ("trajectory", 100.5, 7.0,
     {**FIRST, "turns": 2, "calls": 1, "tokens": 20, "sampled_tokens": 15, "finish_reason": "stop",
      "generate_s": 6.0, "tool_s": 1.0, "user_s": 0.0}),
    ("sample.generate", 100.5, 7.0, {**SAMPLE, "trajectories": 1, "tokens": 15}),
    ("sample.reward", 107.5, 0.5, SAMPLE),
    ("sample.ready", 108.0, 0.0, {**SAMPLE, "reward": 1.0, "tokens": 20, "versions": 1}),
    ("trainer.wait_samples", 100.0, 9.0, {"step": 1, "samples": 1}),
    ("sample.leased", 109.0, 0.0, {**SAMPLE, "staleness": 1}),
    ("trainer.update", 109.5, 1.5, {"step": 1}),
    ("sample.trained", 111.0, 0.0, {**SAMPLE, "staleness": 1, "versions": 1, "reward": 1.0, "tokens": 20}),
    ("step", 100.0, 11.0, {"step": 1, "wait_samples_s": 9.0, "samples": 1, "tokens": 15, "reward": 1.0, "lineage": 0}),
)  # fmt: skip


def completed(run_dir: Path, *lines: EventTuple, **about: Any) -> dict[str, Any]:
    report = report_of(run_dir, *lines, status="completed", response_length=32, **about)
    json.dumps(report, allow_nan=False)
    return report


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    return completed(tmp_path, *TINY)


def test_attempts_of_a_request_add_up(tiny: dict[str, Any]) -> None:
    requests = tiny["requests"]
    assert requests["count"] == 2
    assert (requests["time"]["all"]["max"], requests["time"]["all"]["min"]) == (5.0, 1.0)
    assert requests["length"]["all"]["max"] == 10
    assert requests["time"]["by_step"][0]["done_early"] == 0.5  # one of two requests took at most 40 % of 5 s
    assert requests["slowest"][0] == {
        **{"request": "sample_0_1/0", "sample": "sample_0_1", "trajectory": 0, "turn": 0, "replica": "a", "step": 1},
        **{"attempts": 2, "duration_s": 5.0, "response_tokens": 10, "gate_s": 0, "queued_s": 0.3, "prefill_s": 0.7},
        **{"decode_s": 3.5, "paused_s": 0.5},
    }
    (replica,) = requests["by_replica"]
    assert (replica["tokens"], replica["decode_s"], replica["busy_s"]) == (15, 4.5, 6.0)
    assert replica["decode_s_per_token"] == pytest.approx(0.3)


def test_every_second_of_a_lifetime_has_one_kind(tiny: dict[str, Any]) -> None:
    shares = tiny["shares"]
    expected = dict.fromkeys(KINDS, 0.0) | {
        **{"permit": 1.0, "queued": 0.3, "prefill": 0.7, "decode": 4.5, "paused": 0.5, "tool": 1.0, "reward": 0.5},
        **{"ready": 1.0, "leased": 0.5, "training": 1.5, "other": 0.5},
    }
    assert shares["lifetime_s_mean"] == 12.0
    assert {row["kind"]: row["mean_s"] for row in shares["table"]} == pytest.approx(expected, abs=1e-5)
    assert [bar["lifetime_s"] for bar in shares["lifetimes"]] == [12.0, 12.0]


def test_turns_idle_time_staleness_waste_and_steps_equal_numbers_calculated_by_hand(tiny: dict[str, Any]) -> None:
    turns = [(row["turn"], row["generation_s"], row["tool_s"]) for row in tiny["turns"]["by_turn"]]
    assert turns == [(0, 5.0, 1.0), (1, 1.0, 0.0)]
    assert tiny["turns"]["percent"] == {"2": 100.0}
    assert tiny["turns"]["by_number"] == [
        {"turns": 2, "trajectories": 1, "duration_s": 7.0, "duration_s_p95": 7.0, "tool_s": 1.0, "user_s": 0.0,
         "generation_s": 6.0}
    ]  # fmt: skip
    (period,) = tiny["turns"]["by_step"]
    assert (period["first_step"], period["last_step"], period["percent"]) == (1, 1, {"2": 100.0})
    assert [(row["turn"], row["generation_s"], row["tool_s"]) for row in period["turns"]] == turns
    idle = tiny["idle"]
    assert (idle["wall_s"], idle["trainer"]["idle_s"], idle["rollouter"]["idle_s"], idle["both_s"]) == (11, 9, 4, 2)
    assert idle["trainer"]["share"] == pytest.approx(9 / 11, abs=1e-5)
    assert sum(idle["trainer"]["strip"]) * idle["bin_s"] == pytest.approx(9.0, abs=1e-3)
    assert tiny["staleness"]["staleness"]["histogram"] == {"1": 1}
    assert tiny["waste"]["aborted"] == {
        **{"attempts": 1, "share_of_attempts": pytest.approx(1 / 3, abs=1e-5), "tokens": 4, "resumed": 1},
        "prefill_again_s": 0.4,
    }
    half = next(row for row in tiny["lower_limits"]["limits"] if row["limit"] == 10)
    assert half == {
        **{"limit": 10, "cut_share": 1.0, "reward_lost_share": 1.0, "decode_saved_share": 0.5},
        "longest_trajectory_saved_share": 0.375,  # 2.25 s of 6 s in requests: half of the 4.5 s of decoding
    }
    (step,) = tiny["steps"]["by_step"]
    parts = {name: value for name, value in step["parts"].items() if value}
    assert parts == {"waiting for samples": 9.0, "the update of the policy": 1.5, "the rest": 0.5}


def test_starting_and_ending_times_are_known_unless_the_run_was_resumed(tmp_path: Path) -> None:
    """The events of the run lie between 100 s and 111 s."""
    about = {"status": "completed", "started_at": START + 40}
    report = report_of(tmp_path, *TINY, summary={"wall_s": 80.0}, **about)
    assert (report["run"]["starting_s"], report["run"]["wall_s"], report["run"]["ending_s"]) == (60, 11, 9)
    assert "Starting the run took 60 s, until its first sample, and ending it 9 s" in report["notes"][0]
    resumed = report_of(tmp_path, summary={"wall_s": 8.0}, **{**about, "started_at": START + 105})
    assert (resumed["run"]["starting_s"], resumed["run"]["ending_s"]) == (None, None)
    assert not any("Starting" in note for note in resumed["notes"])


def test_the_memory_of_gpus_is_shown_over_time(tmp_path: Path) -> None:
    def measured(at: float, used: int, rank: int) -> EventTuple:
        return "gpu.memory", at, 0.0, {"role": "actor", "rank": rank, "used_bytes": used, "total_bytes": 80}

    lines = (*TINY, measured(101.0, 20, 0), measured(102.0, 60, 0), measured(101.0, 30, 1))
    report = report_of(tmp_path, *lines)
    assert report["gpu_memory"] == [
        {"rank": "actor 0", "total_bytes": 80, "at_s": [1.0, 2.0], "used_bytes": [20, 60]},
        {"rank": "actor 1", "total_bytes": 80, "at_s": [1.0], "used_bytes": [30]},
    ]
    (figure,) = (one for one in figures(report) if one["id"] == "gpu_memory")
    assert "at most 60 B of 80 B at once, on the GPU of rank actor 0" in figure["text"]
    assert "gpu_memory" not in {one["id"] for one in figures(report_of(tmp_path / "cpu", *TINY))}


def test_validation_requests_are_left_out(tmp_path: Path) -> None:
    own = [(name, at, took, {**fields, "sample": "val_0_1"}) for name, at, took, fields in TINY if "sample" in fields]
    report = completed(tmp_path, *own)
    assert report["run"]["validation_requests"] == 3
    assert report["run"]["requests"] == report["requests"]["count"] == report["turns"]["trajectories"] == 0
    assert any("No request" in note for note in report["notes"])


@pytest.mark.parametrize("missing", [("request", "trajectory", "sample.generate", "sample.reward"), ()])
def test_trained_samples_without_events_of_their_generation_are_noted(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """The Rollouter was killed right after it had delivered the samples."""
    report = completed(tmp_path, *(line for line in TINY if line[0] not in missing))
    assert (report["run"]["samples_trained"], report["run"]["samples_unrecorded"]) == (1, 1 if missing else 0)
    notes = [note for note in report["notes"] if "No event shows how" in note]
    assert len(notes) == (1 if missing else 0)


# ---------------------------------------------------------------------------------------------- outlying steps


def test_an_outlying_step_names_the_call_that_held_it_up(tmp_path: Path) -> None:
    """The Rollouter generates nothing in advance, so the step waits for the sample whose tool hangs."""
    write_run(tmp_path, RunPlan(steps=16, ahead=0, faults=PlantedFaults(tool_hang_s=60, tool_hangs=1)))
    (worst,) = [row for row in completed(tmp_path)["steps"]["outliers"] if row["event"]["name"] == "search"]
    assert worst["event"]["event"] == "tool.execute"
    assert worst["event"]["duration_s"] > 60
    assert worst["turn"]["seconds"]["tool"] > 60
    assert "in tools" in worst["cause"]
    assert worst["replica"]["replica"] in {"r0", "r1", "r2"}
    assert worst["request"]["request"].startswith("sample_0_")


def test_figures_of_a_rewound_run_show_the_surviving_steps(tmp_path: Path) -> None:
    write_run(tmp_path, RunPlan(steps=8, back_from=5))  # the Trainer is down for 5 s
    report = completed(tmp_path)
    assert [row["step"] for row in report["steps"]["by_step"]] == list(range(1, 9))
    assert [(row["step"], row["lineage"]) for row in report["steps"]["abandoned"]] == [(4, 0), (5, 0)]
    assert report["run"]["samples_trained"] == 8 * 8
    assert any("went back" in note for note in report["notes"])
    (restarts,) = [row for row in report["findings"] if row["kind"] == "restarts"]
    repeated = sum(row["duration_s"] for row in report["steps"]["abandoned"])
    assert restarts["seconds_lost"] == pytest.approx(5 + repeated, rel=1e-4)
    assert restarts["name"] == "trainer"


def test_a_checkpoint_counts_for_the_step_before_it(tmp_path: Path) -> None:
    lines: list[EventTuple] = []
    at = 0.0
    for step in range(1, 7):
        fields = {"step": step, "wait_samples_s": 1.0, "samples": 1, "lineage": 0}
        lines += [("trainer.update", at + 1, 1.0, {"step": step}), ("step", at, 2.0, fields)]
        at += 2.0
        if step in (2, 4):
            took = 0.25 if step == 2 else 10.0
            lines.append(("trainer.checkpoint", at, took, {"step": step}))
            at += took
    steps = report_of(tmp_path, *lines)["steps"]
    assert [row["duration_s"] for row in steps["by_step"]] == [2, 2.25, 2, 12, 2, 2]
    assert [row["parts"]["a checkpoint after it"] for row in steps["by_step"]] == [0, 0.25, 0, 10, 0, 0]
    assert all(sum(row["parts"].values()) == row["duration_s"] for row in steps["by_step"])
    (outlier,) = steps["outliers"]
    assert (outlier["step"], outlier["cause"]) == (4, "a checkpoint after it took 10.0 s, usually 0.0 s")
    assert outlier["event"]["event"] == "trainer.checkpoint"


def test_a_checkpoint_after_an_abandoned_step_counts_for_no_step(tmp_path: Path) -> None:
    steps: list[EventTuple] = [("step", 2.0 * place, 2.0, {"step": step, "lineage": lineage, "samples": 1})
                               for place, (step, lineage) in enumerate([(1, 0), (2, 0), (2, 1)], start=1)]  # fmt: skip
    checkpoints = [("trainer.checkpoint", 1.0, 0.5, {}), ("trainer.checkpoint", 6.0, 1.0, {"step": 2})]
    rows = report_of(tmp_path, *steps, *checkpoints)["steps"]["by_step"]
    assert [(row["step"], row["duration_s"]) for row in rows] == [(1, 2), (2, 2)]


# ---------------------------------------------------------------------------------------------- waste and limits


def request(number: int, at: float, tokens: int, reason: str, **fields: Any) -> EventTuple:
    """Return a request that takes a tenth of a second per token."""
    base = {**SAMPLE, "trajectory": number, "turn": 0, "replica": "a", "prompt_tokens": 10, "decode_s": tokens / 10}
    return "request", at, tokens / 10, {**base, "response_tokens": tokens, "finish_reason": reason, **fields}


def trajectory(number: int, at: float, took: float, tokens: int | None, reason: str) -> EventTuple:
    """Return a trajectory, which was cut if `tokens` is None."""
    ended = {"tokens": tokens, "sampled_tokens": tokens, "turns": 1, "tool_s": 0.0}
    fields = {"error": "CancelledError"} if tokens is None else ended
    return "trajectory", at, took, {**SAMPLE, "trajectory": number, "finish_reason": reason, **fields}


ADMITTED: EventTuple = ("sample.admitted", 0.0, 0.0, SAMPLE)
TRAINED: list[EventTuple] = [("sample.ready", 30.0, 0.0, SAMPLE), ("sample.trained", 40.0, 0.0, SAMPLE)]
CUT: EventTuple = ("sample.cut", 10.0, 0.0, {**SAMPLE, "tokens": 100, "kept": 1})


def test_surplus_trajectories_are_waste(tmp_path: Path) -> None:
    """Two of four trajectories count. One of the others was complete, and one was cut with half of its tokens."""
    lines = [ADMITTED, ("sample.generate", 0.0, 10.0, SAMPLE), request(3, 0.0, 50, "aborted")]
    for number, reason in ((0, "stop"), (1, "length"), (2, "surplus")):
        lines += [request(number, 0.0, 100, "stop"), trajectory(number, 0.0, 10.0, 100, reason)]
    lines.append(trajectory(3, 0.0, 5.0, None, "aborted"))
    report = completed(tmp_path, *lines, *TRAINED)
    assert report["waste"]["surplus_trajectories"] == {"trajectories": 2, "tokens": 150}
    assert (report["waste"]["sampled_tokens"], report["waste"]["wasted_tokens"]) == (350, 150)
    (finding,) = [row for row in report["findings"] if row["kind"] == "waste"]
    assert "150 surplus trajectories" in finding["text"]
    (text,) = [row["text"] for row in figures(report) if row["id"] == "waste"]
    assert "43 %) were wasted (150 surplus trajectories)" in text


def test_trajectories_in_generation_are_not_waste(tmp_path: Path) -> None:
    """Generation was cut and will be resumed, so it is not yet known which of its trajectories count."""
    lines = [ADMITTED, request(0, 0.0, 100, "aborted"), trajectory(0, 0.0, 10.0, None, "aborted"), CUT]
    waste = completed(tmp_path, *lines)["waste"]
    assert (waste["sampled_tokens"], waste["wasted_tokens"], waste["cut"]["kept_tokens"]) == (100, 0, 100)


@pytest.mark.parametrize(
    ("first", "wasted"),
    [
        (request(0, 0.0, 40, "aborted"), 40),  # its tokens are sampled again
        (request(0, 0.0, 40, "stop", turn=0, request="sample_0_1/0-1"), 0),  # the turn is replayed from the turn log
    ],
)
def test_tokens_sampled_before_a_crash_are_waste_unless_they_are_in_the_trajectory(
    tmp_path: Path, first: EventTuple, wasted: int
) -> None:
    replayed = 40 - wasted
    lines = [
        ADMITTED, first, ("part.restarted", 5.0, 2.0, {"part": "rollouter", "cause": "killed"}),
        ("sample.admitted", 10.0, 0.0, SAMPLE), request(0, 10.0, 60, "stop", turn=1 if replayed else 0),
        trajectory(0, 10.0, 6.0, 60 + replayed, "stop"),
    ]  # fmt: skip
    waste = completed(tmp_path, *lines, *TRAINED)["waste"]
    assert (waste["sampled_tokens"], waste["wasted_tokens"]) == (100, wasted)
    assert waste["sampled_again"]["tokens"] == wasted


def test_tokens_of_a_dropped_sample_count_once(tmp_path: Path) -> None:
    lines = [
        ADMITTED, request(0, 0.0, 100, "stop"), request(1, 0.0, 50, "aborted"),
        trajectory(0, 0.0, 10.0, 100, "stop"), trajectory(1, 0.0, 10.0, None, "aborted"), TRAINED[0],
        ("sample.dropped", 20.0, 0.0, {**SAMPLE, "reason": "stale", "tokens": 100}),
    ]  # fmt: skip
    waste = completed(tmp_path, *lines)["waste"]
    assert (waste["wasted_tokens"], waste["share"]) == (150, 1.0)
    assert waste["dropped"] == [{"reason": "stale", "samples": 1, "tokens": 150}]
    assert waste["surplus_trajectories"]["tokens"] == 0


def test_tokens_of_cut_surplus_count_once(tmp_path: Path) -> None:
    lines: list[EventTuple] = [
        ("request", 1.0, 1.0, {"request": f"sample_0_{index}/0-1", "response_tokens": tokens})
        for index, tokens in ((1, 77), (2, 7), (3, 5), (4, 11))
    ]
    lines += [
        ("sample.cut", 2.0, 0.0, {"sample": "sample_0_2", "tokens": 7, "kept": 0}),
        ("sample.dropped", 2.0, 0.0, {"sample": "sample_0_2", "tokens": 7, "reason": "surplus"}),
        ("sample.cut", 2.0, 0.0, {"sample": "sample_0_3", "tokens": 5, "kept": 1}),
        ("sample.dropped", 3.0, 0.0, {"sample": "sample_0_4", "tokens": 11, "reason": "stale"}),
    ]
    waste = completed(tmp_path, *lines)["waste"]
    assert (waste["wasted_tokens"], waste["share"], waste["cut"]["kept_tokens"]) == (18, 0.18, 5)


def test_a_resumed_trajectory_includes_the_time_before_its_cut(tmp_path: Path) -> None:
    lines = [
        ADMITTED, request(0, 0.0, 30, "aborted"), trajectory(0, 0.0, 4.0, None, "aborted"), CUT,
        request(0, 20.0, 50, "stop", prompt_tokens=40), trajectory(0, 20.0, 5.0, 80, "stop"),
        ("sample.generate", 20.0, 5.0, SAMPLE),
    ]  # fmt: skip
    report = completed(tmp_path, *lines, *TRAINED)
    seconds = {row["kind"]: row["mean_s"] for row in report["shares"]["table"]}
    assert (seconds["decode"], seconds["handling"]) == (8, 1)
    assert report["waste"]["wasted_tokens"] == 0


def test_turns_are_those_of_the_step_that_trained_them(tmp_path: Path) -> None:
    """A sample that step 3 trains, although step 1 was current when it was generated, is one of step 3."""
    lines: list[EventTuple] = []
    for step, number in ((1, 1), (3, 2)):
        of = {"step": 1, "sample": f"sample_0_{number}", "trajectory": 0}
        for turn in range(number):
            lines.append(
                ("request", 10.0 + turn, 0.5 * number, {**of, "turn": turn, "replica": "a", "finish_reason": "stop"})
            )
            lines.append(("tool.execute", 10.6 + turn, 0.25, {**of, "turn": turn, "tool": "search", "status": "ok"}))
        ended = {"turns": number, "tokens": 3, "finish_reason": "stop", "tool_s": 0.25 * number}
        lines += [
            ("trajectory", 10.0, 2.0 * number, {**of, **ended}),
            ("sample.generate", 10.0, 2.0 * number, of),
            ("sample.trained", 20.0, 0.0, {**of, "step": step}),
        ]
    found = completed(tmp_path, *lines)["turns"]
    assert [(row["first_step"], row["percent"]) for row in found["by_step"]] == [(1, {"1": 100.0}), (3, {"2": 100.0})]
    times = [[(row["turn"], row["generation_s"], row["tool_s"]) for row in one["turns"]] for one in found["by_step"]]
    assert times == [[(0, 0.5, 0.25)], [(0, 1.0, 0.25), (1, 1.0, 0.25)]]
    assert [(row["turns"], row["duration_s"], row["tool_s"]) for row in found["by_number"]] == [
        (1, 2.0, 0.25),
        (2, 4.0, 0.5),
    ]


def test_only_the_last_generation_of_a_sample_counts(tmp_path: Path) -> None:
    """The first request was aborted when its Rollouter died; the second one starts from the prompt again."""
    turn = {**FIRST, "turn": 0, "replica": "a", "prompt_tokens": 10, "response_tokens": 8}
    report = report_of(
        tmp_path,
        ("sample.admitted", 0.0, 0.0, FIRST),
        ("request", 0.0, 8.0, {**turn, "finish_reason": "aborted", "decode_s": 8.0}),
        ("sample.admitted", 20.0, 0.0, FIRST),
        ("request", 20.0, 1.0, {**turn, "finish_reason": "aborted", "decode_s": 1.0}),
        ("request", 21.0, 2.0, {**turn, "prompt_tokens": 18, "finish_reason": "stop", "decode_s": 2.0}),
        ("trajectory", 20.0, 3.0, {**FIRST, "turns": 1, "tokens": 16, "finish_reason": "stop", "tool_s": 0.0}),
        ("sample.generate", 20.0, 3.0, FIRST),
        ("sample.trained", 25.0, 0.0, FIRST),
    )
    assert (report["requests"]["count"], report["requests"]["unfinished"]) == (1, 1)
    assert (report["requests"]["slowest"][0]["attempts"], report["requests"]["slowest"][0]["duration_s"]) == (2, 3)
    assert report["waste"]["aborted"]["resumed"] == 1
    assert {row["kind"]: row["mean_s"] for row in report["shares"]["table"]}["decode"] == 3


def test_tool_names_invented_by_models_share_a_row(tmp_path: Path) -> None:
    calls = [
        ("search", 2.0, "ok"), ("search", 0.0, "too_many"), ("recorded", 0.0, "ok"), ("misused", 0.0, "bad_arguments"),
        ("", 0.0, "bad_json"), *((f"magic_{k}", 0.0, "unknown_tool") for k in range(5)),
    ]  # fmt: skip
    place = {**FIRST, "turn": 0, "wait_s": 0.0}
    lines = [("tool.execute", 1.0, took, {**place, "tool": tool, "status": status}) for tool, took, status in calls]
    rows = completed(tmp_path, *lines)["turns"]["tools"]
    expected = {"search": 2, "recorded": 1, "misused": 1, "(unknown tools)": 6}
    assert {row["tool"]: row["count"] for row in rows} == expected


def responses(*rewards: float | None) -> list[EventTuple]:
    """Return trajectories of 10, 20, … tokens with these rewards."""
    lines: list[EventTuple] = []
    for number, reward in enumerate(rewards):
        place = {**SAMPLE, "trajectory": number}
        ended = {"turns": 1, "tokens": 10 * (number + 1), "finish_reason": "stop"}
        lines.append(("trajectory", 10.0, 4.0, {**place, **ended}))
        if reward is not None:
            lines.append(("reward.score", 14.0, 0.1, {**place, "reward": reward, "trajectories": 1}))
    return lines


def test_a_lower_limit_loses_the_rewards_of_longer_responses(tmp_path: Path) -> None:
    """With rewards shifted so that the lowest is 0, the responses longer than 20 tokens have half of the total."""
    rows = completed(tmp_path, *responses(-1.0, 1.0, 0.0, 0.0))["lower_limits"]["limits"]
    limits = {row["limit"]: row for row in rows}
    assert (limits[20]["cut_share"], limits[20]["reward_lost_share"]) == (0.5, 0.5)
    assert limits[40]["cut_share"] == 0


@pytest.mark.parametrize("reward", [0.0, None])
def test_the_cost_of_a_lower_limit_is_unknown_if_rewards_are_equal_or_unknown(
    tmp_path: Path, reward: float | None
) -> None:
    report = report_of(tmp_path, *responses(*[reward] * 4))
    assert {row["reward_lost_share"] for row in report["lower_limits"]["limits"]} == {None}
    (text,) = [row["text"] for row in figures(report) if row["id"] == "lower_limits"]
    assert "would cut" in text and "cost is unknown" in text and "of the reward" not in text


# ---------------------------------------------------------------------------------------------- any run

BASE = RunPlan(steps=5, samples=4, n=2, validation_every=2)
PLANS = {
    "complete": BASE,
    "all events": replace(BASE, level="full", n=3, turns=4),
    "truncated": replace(BASE, until_s=15.0),
    "validated alone": replace(BASE, validation_alone=True, ahead=0),
    "validation truncated": replace(BASE, validation_alone=True, ahead=0, until_s=18.0),
    "replayed": replace(BASE, replayed=0.5, dropped=0.2),
    "replica replaced": replace(BASE, replica_replaced_after=2),
    "rewound": replace(BASE, back_from=4, first_update_s=30.0),
    "a tool hangs": replace(BASE, faults=PlantedFaults(tool_hang_s=60, tool_hangs=2)),
}
Runs = Mapping[str, tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the directory and the report of a run for each plan."""
    paths = {name: tmp_path_factory.mktemp("run") for name in PLANS}
    for name, plan in PLANS.items():
        write_run(paths[name], plan)
    return {name: (path, report_of(path)) for name, path in paths.items()}


def shares(value: Any, key: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [one for name, item in value.items() for one in shares(item, name)]
    if isinstance(value, list):
        return [one for item in value for one in shares(item, key)]
    is_share = key == "share" or key.endswith(("_share", "done_early", "strip", "share_of_run", "share_of_attempts"))
    return [(key, value)] if is_share and value is not None else []


@pytest.mark.parametrize("name", PLANS)
def test_invariants_hold_for_any_run(runs: Runs, name: str) -> None:
    path, report = runs[name]
    assert [each for each in shares(report) if not 0 <= each[1] <= 1] == []
    assert len(shares(report)) > 20
    run, wall_s = report["run"], report["run"]["wall_s"]
    assert all(0 < row["seconds_lost"] <= wall_s for row in report["findings"])
    times = {json.loads(line)["timestamp"] for file in event_files(path) for line in file.read_text().splitlines()}
    assert min(abs(each - run["first_event"]) for each in times) < 1e-3
    assert run["last_event"] - run["first_event"] == pytest.approx(wall_s, abs=2e-3)
    assert run["requests"] == report["requests"]["count"] >= sum(row["requests"] for row in report["steps"]["by_step"])
    assert sum(row["requests"] for row in report["requests"]["by_replica"]) == report["requests"]["count"]
    percentages = [report["turns"]["percent"], {row["kind"]: row["percent"] for row in report["shares"]["table"]}]
    for each in percentages + [row["percent"] for row in report["shares"]["by_step"]]:
        assert sum(each.values()) == pytest.approx(100, abs=1e-2)
    turns = report["turns"]
    assert sum(row["trajectories"] for row in turns["by_step"]) == turns["trajectories"]
    assert {str(row["turns"]): row["trajectories"] for row in turns["by_number"]} == turns["histogram"]
    for period in turns["by_step"]:
        assert sum(period["percent"].values()) == pytest.approx(100, abs=1e-2)
    for whole in turns["by_turn"]:
        own = [row for period in turns["by_step"] for row in period["turns"] if row["turn"] == whole["turn"]]
        for name in ("generation_s", "tool_s"):
            in_all = sum(row["requests"] * row[name] for row in own)
            assert in_all == pytest.approx(whole["requests"] * whole[name], rel=1e-3, abs=1e-3)
    for bar in report["shares"]["lifetimes"]:
        assert sum(bar["seconds"].values()) == pytest.approx(bar["lifetime_s"], rel=1e-4)
    for row in report["steps"]["by_step"]:
        assert sum(row["parts"].values()) == pytest.approx(row["duration_s"], rel=0.02)
    figures(report)


@pytest.mark.parametrize(("cut", "complete"), [("truncated", "complete"), ("validation truncated", "validated alone")])
def test_work_in_progress_when_a_run_was_killed_is_not_idle_time(runs: Runs, cut: str, complete: str) -> None:
    short, long = runs[cut][1], runs[complete][1]
    assert short["run"]["wall_s"] < long["run"]["wall_s"]
    for side in ("trainer", "rollouter"):
        assert short["idle"][side]["idle_s"] <= long["idle"][side]["idle_s"]
        assert short["idle"][side]["known_s"] <= short["run"]["wall_s"]
    assert any("did not shut down cleanly" in note for note in short["notes"])


def test_answering_the_validation_set_is_not_idle_time(runs: Runs) -> None:
    path, report = runs["validated alone"]
    num_validations = len(load(path)["validation"])
    assert num_validations == 2
    # Each validation lasts 2 s, in which the engines generate nothing else.
    assert report["idle"]["rollouter"]["longest_s"] < 2.0
    assert report["idle"]["rollouter"]["idle_s"] < report["run"]["wall_s"] - 2.0 * num_validations


def test_replayed_samples_are_not_waste(runs: Runs) -> None:
    path, report = runs["replayed"]
    events = load(path)
    dropped, requests = events["sample.dropped"], events["request"]
    assert dropped["index"].isin(events["sample.generate"].query("replayed == 1")["index"]).any()
    sampled = requests[requests["index"].isin(dropped["index"])]["response_tokens"].sum()
    assert report["waste"]["wasted_tokens"] == sampled < dropped["tokens"].sum()


def test_a_slow_first_call_of_a_process_is_only_a_hint(runs: Runs) -> None:
    findings = {name: {row["kind"]: row for row in runs[name][1]["findings"]} for name in runs}
    update = findings["rewound"]["trainer_hang"]
    assert (update["name"], update["severity"]) == ("trainer.update", "hint")
    assert "first of its process" in update["text"]
    sync = findings["replica replaced"]["weight_sync_hang"]
    assert (sync["severity"], sync["evidence"]["replica"]) == ("hint", "new")


def test_the_paused_share_is_relative_to_the_lifetimes_of_replicas(runs: Runs) -> None:
    path, report = runs["replica replaced"]
    events = load(path)
    lifetimes, names = 0.0, ("request", "sync.fetch", "sync.pause", "sync.verify")
    for replica in ("r0", "r1", "r2", "new"):
        own = [frame[frame["replica"] == replica] for frame in map(events.__getitem__, names)]
        lifetimes += max(frame["end"].max() for frame in own) - min(frame["timestamp"].min() for frame in own)
    paused = sum(total(spans(own)) for _, own in events["sync.pause"].groupby("replica", observed=True))
    assert report["weight_sync"]["paused_share"] == pytest.approx(paused / lifetimes, rel=1e-4)
    assert report["weight_sync"]["sent_bytes"] == events["sync.put"]["bytes"].sum() > 0


# ---------------------------------------------------------------------------------------------- missing events


@pytest.mark.parametrize(
    "only",
    [
        {"step"}, {"sample.admitted"}, {"request"}, {"trajectory"}, {"sample.trained"}, {"trainer.wait_samples"},
        {"part.restarted"}, {"request", "trajectory", "sample.generate"}, {"sample.trained", "sample.admitted"},
    ],
)  # fmt: skip
def test_a_report_needs_no_particular_kind_of_event(tmp_path: Path, only: set[str]) -> None:
    lines = [*TINY, ("part.restarted", 99.0, 0.0, {"part": "trainer", "cause": "killed"})]
    report = completed(tmp_path, *(line for line in lines if line[0] in only))
    assert report["run"]["events"] >= 1
    figures(report)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Events:
    """A run with an outlying step."""
    path = tmp_path_factory.mktemp("run")
    write_run(path, RunPlan(steps=4, samples=2, n=1, ahead=0, faults=PlantedFaults(tool_hang_s=60, tool_hangs=1)))
    return load(path)


def live_report(events: Events) -> dict[str, Any]:
    report = analyse(events, {"name": "run", "status": "running"}, None)
    json.dumps(report, allow_nan=False)
    figures(report)
    return report


def without(events: Events, kinds: Set[str], begin: float = 0.0, end: float = 0.0) -> Events:
    """Return the events without these kinds and without those that ended between two fractions of the run's time."""
    first, last = events.window()
    low, high = (first + share * (last - first) for share in (begin, end))
    rest = {name: frame[~frame["end"].between(low, high)] for name, frame in events.frames.items() if name not in kinds}
    return Events({name: frame.reset_index(drop=True) for name, frame in rest.items() if len(frame)}, events.num_events)


def test_samples_of_an_outlying_step_may_lack_their_end_events(delayed: Events) -> None:
    assert live_report(delayed)["steps"]["outliers"]
    outliers = live_report(without(delayed, {"sample.generate", "sample.ready"}))["steps"]["outliers"]
    assert {row["last_sample"] for row in outliers} == {None}


@given(st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_any_events_may_be_missing(delayed: Events, data: st.DataObject) -> None:
    share = st.floats(0, 1)
    rest = without(
        delayed, data.draw(st.sets(st.sampled_from(sorted(delayed.frames)))), data.draw(share), data.draw(share)
    )
    if rest.frames:
        live_report(rest)
