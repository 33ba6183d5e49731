"""Runs that were cut short, replayed, restarted or generated twice: what has to hold for the report of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.profiling.files import DIRECTORY, EventFiles, Line, event_files
from asyncrl.report.analysis import analyse
from asyncrl.report.intervals import total, union
from asyncrl.report.load import Events, load
from asyncrl.report.numbers import plain
from asyncrl.report.words import figures
from benchmarks.profiling.synthetic import START, Faults, Plan, write_run

BASE = Plan(steps=5, samples=4, n=2, validation_every=2)
PLANS = {
    "whole": BASE,
    "truncated": replace(BASE, until_s=15.0),
    "validated alone": replace(BASE, validation_alone=True, ahead=0),
    "validation truncated": replace(BASE, validation_alone=True, ahead=0, until_s=18.0),
    "replayed": replace(BASE, replayed=0.5, dropped=0.2),
    "replica replaced": replace(BASE, replica_replaced_after=2),
    "went back": replace(BASE, back_from=4, first_update_s=30.0),
    "a tool hangs": replace(BASE, faults=Faults(tool_hang_s=60, tool_hangs=2)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, dict[str, Any]]]:
    """Directory and report of each."""
    made = {}
    for name, plan in PLANS.items():
        path = tmp_path_factory.mktemp("run")
        write_run(path, plan)
        made[name] = path, analyse(load(path), {"name": "run"}, {})
    return made


def finding(found: dict[str, Any], kind: str) -> dict[str, Any]:
    (one,) = [each for each in found["findings"] if each["kind"] == kind]
    return one


def shares(value: Any, key: str = "") -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [one for name, item in value.items() for one in shares(item, name)]
    if isinstance(value, list):
        return [one for item in value for one in shares(item, key)]
    is_share = key == "share" or key.endswith(("_share", "done_early", "strip", "share_of_run", "share_of_attempts"))
    return [(key, value)] if is_share and value is not None else []


@pytest.mark.parametrize("name", PLANS)
def test_what_holds_for_any_run(runs: Mapping[str, tuple[Path, dict[str, Any]]], name: str) -> None:
    path, found = runs[name]
    told = shares(found)
    assert len(told) > 20
    assert [each for each in told if not 0 <= each[1] <= 1] == []
    wall_s = found["run"]["wall_s"]
    assert all(0 < each["seconds_lost"] <= wall_s for each in found["findings"])
    times = {
        json.loads(line)["timestamp"] for file in event_files(path) for line in file.read_text("utf-8").splitlines()
    }
    assert min(abs(each - found["run"]["first_event"]) for each in times) < 1e-3
    assert found["run"]["last_event"] - found["run"]["first_event"] == pytest.approx(wall_s, abs=2e-3)
    assert found["run"]["requests"] == found["requests"]["count"]
    assert sum(row["requests"] for row in found["steps"]["by_step"]) <= found["requests"]["count"]
    assert sum(row["requests"] for row in found["requests"]["by_replica"]) == found["requests"]["count"]
    figures(found)


@pytest.mark.parametrize(("cut", "whole"), [("truncated", "whole"), ("validation truncated", "validated alone")])
def test_what_was_under_way_when_a_run_was_killed_is_no_idle_time(
    runs: Mapping[str, tuple[Path, dict[str, Any]]], cut: str, whole: str
) -> None:
    short, long = runs[cut][1], runs[whole][1]
    assert short["run"]["wall_s"] < long["run"]["wall_s"]
    for side in ("trainer", "rollouter"):
        assert short["idle"][side]["idle_s"] <= long["idle"][side]["idle_s"]
        assert short["idle"][side]["known_s"] <= short["run"]["wall_s"]
    assert any("did not end in good order" in note for note in short["notes"])


def test_a_sample_that_came_to_no_end_is_in_generation(tmp_path: Path) -> None:
    def one(index: int) -> dict[str, Any]:
        return {"step": 1, "sample": f"sample_0_{index}"}

    put(
        tmp_path,
        ("sample.admitted", 0.0, 0.0, one(1)),
        ("sample.generate", 0.0, 2.0, one(1)),
        ("sample.admitted", 3.0, 0.0, one(2)),  # lost with its Rollouter at 5, and fed again at 8
        ("part.restarted", 5.0, 2.0, {"part": "rollouter", "cause": "killed"}),
        ("sample.admitted", 8.0, 0.0, one(2)),
        ("trainer.wait_samples", 1.0, 5.0, {"step": 1}),
        ("loop.stall", 10.0, 2.0, {"part": "rollouter"}),
    )
    idle = analyse(load(tmp_path), {"name": "run"}, {})["idle"]
    assert (idle["wall_s"], idle["under_way"]) == (12, 1)
    assert (idle["rollouter"]["idle_s"], idle["rollouter"]["known_s"]) == (1 + 3, 12)
    assert (idle["trainer"]["idle_s"], idle["trainer"]["known_s"]) == (5, 6)
    assert idle["trainer"]["strip"][-1] is None


def test_the_validation_set_is_generation_too(runs: Mapping[str, tuple[Path, dict[str, Any]]]) -> None:
    path, found = runs["validated alone"]
    validations = load(path).of("validation")
    assert len(validations) == 2
    # Each lasts 2 s in which nothing else is generated.
    assert found["idle"]["rollouter"]["longest_s"] < 2.0
    assert found["idle"]["rollouter"]["idle_s"] < found["run"]["wall_s"] - 2.0 * len(validations)


def test_what_is_replayed_costs_nothing(runs: Mapping[str, tuple[Path, dict[str, Any]]]) -> None:
    path, found = runs["replayed"]
    events = load(path)
    dropped = events.of("sample.dropped")
    replayed = events.of("sample.generate").query("replayed == 1")["index"]
    assert dropped["index"].isin(replayed).any()
    requests = events.of("request")
    expected = requests[requests["index"].isin(dropped["index"])]["response_tokens"].sum()
    assert found["thrown_away"]["thrown_away_tokens"] == expected < dropped["tokens"].sum()


def test_the_first_call_of_every_process_is_a_hint(runs: Mapping[str, tuple[Path, dict[str, Any]]]) -> None:
    went_back = finding(runs["went back"][1], "trainer_hang")
    assert (went_back["name"], went_back["severity"]) == ("trainer.update", "hint")
    assert "first of its process" in went_back["text"]
    replaced = finding(runs["replica replaced"][1], "weight_sync_hang")
    assert (replaced["severity"], replaced["evidence"]["replica"]) == ("hint", "new")


def test_pauses_are_of_the_time_that_replicas_lived(runs: Mapping[str, tuple[Path, dict[str, Any]]]) -> None:
    path, found = runs["replica replaced"]
    events = load(path)
    lived, names = 0.0, ("request", "sync.fetch", "sync.pause", "sync.verify")
    for replica in ("r0", "r1", "r2", "new"):
        own = [frame[frame["replica"] == replica] for frame in map(events.of, names)]
        lived += max(frame["end"].max() for frame in own) - min(frame["timestamp"].min() for frame in own)
    pauses = events.of("sync.pause").groupby("replica", observed=True)
    paused = sum(total(union(own["timestamp"].to_numpy(), own["end"].to_numpy())) for _, own in pauses)
    assert found["weight_sync"]["paused_share"] == pytest.approx(paused / lived, rel=1e-4)


def test_a_tail_for_which_nobody_waits_costs_nothing(tmp_path: Path) -> None:
    lines = []
    for number in range(20):
        place = {"sample": "sample_0_1", "trajectory": number, "turn": 0, "replica": "a", "step": 1}
        took = 40.0 if number == 19 else 1.0
        lines.append(("request", 0.0, took, {**place, "response_tokens": 10, "finish_reason": "stop"}))
    waiting = ("trainer.wait_samples", 30.0, 10.0, {"step": 1})
    put(tmp_path / "a", ("sample.admitted", 0.0, 0.0, {"step": 1, "sample": "sample_0_1"}), *lines)
    put(tmp_path / "b", ("sample.admitted", 0.0, 0.0, {"step": 1, "sample": "sample_0_1"}), *lines, waiting)
    free, waits = (analyse(load(tmp_path / each), {"name": "run"}, {}) for each in ("a", "b"))
    assert "long_tail" not in {each["kind"] for each in free["findings"]}
    assert finding(waits, "long_tail")["seconds_lost"] == pytest.approx(10)


def test_of_a_sample_that_was_made_twice_the_second_time_counts(tmp_path: Path) -> None:
    """Its first request was aborted by the end of its Rollouter; the second begins anew, by its prompt."""
    place = {"step": 1, "sample": "sample_0_1", "trajectory": 0}
    turn = {**place, "turn": 0, "replica": "a", "prompt_tokens": 10, "response_tokens": 8}
    put(
        tmp_path,
        ("sample.admitted", 0.0, 0.0, place),
        ("request", 0.0, 8.0, {**turn, "finish_reason": "aborted", "decode_s": 8.0}),
        ("sample.admitted", 20.0, 0.0, place),
        ("request", 20.0, 1.0, {**turn, "finish_reason": "aborted", "decode_s": 1.0}),
        ("request", 21.0, 2.0, {**turn, "prompt_tokens": 18, "finish_reason": "stop", "decode_s": 2.0}),
        ("trajectory", 20.0, 3.0, {**place, "turns": 1, "tokens": 16, "finish_reason": "stop", "tool_s": 0.0}),
        ("sample.generate", 20.0, 3.0, place),
        ("sample.trained", 25.0, 0.0, place),
    )
    found = analyse(load(tmp_path), {"name": "run"}, {})
    assert (found["requests"]["count"], found["requests"]["unfinished"]) == (1, 1)
    assert (found["requests"]["slowest"][0]["attempts"], found["requests"]["slowest"][0]["duration_s"]) == (2, 3)
    assert found["thrown_away"]["aborted"]["resumed"] == 1
    assert {row["kind"]: row["mean_s"] for row in found["shares"]["table"]}["decode"] == 3


def test_rewards_that_tell_nothing_recommend_nothing(tmp_path: Path) -> None:
    for name, reward in (("zero", 0.0), ("unknown", None)):
        lines = []
        for number in range(4):
            place = {"step": 1, "sample": "sample_0_1", "trajectory": number}
            lines.append(("trajectory", 0.0, 1.0, {**place, "tokens": 10 * (number + 1), "finish_reason": "stop"}))
            if reward is not None:
                lines.append(("reward.score", 1.0, 0.1, {**place, "reward": reward}))
        put(tmp_path / name, *lines)
        found = analyse(load(tmp_path / name), {"name": "run"}, {})
        assert {row["reward_lost_share"] for row in found["lower_limits"]["limits"]} == {None}
        (text,) = [each["text"] for each in figures(found) if each["id"] == "lower_limits"]
        assert "would cut" in text
        assert "cannot be told" in text
        assert "of the reward" not in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1795314480.7353, 1795314480.735), (12_345_678.0, 12_345_678), (123_456.7891, 123_456.789),
        (0.12345678, 0.123457), (float("nan"), None), (7, 7), (True, True),
    ],
)  # fmt: skip
def test_numbers_keep_what_they_are(value: Any, expected: Any) -> None:
    assert plain(value) == expected


def put(run_dir: Path, *lines: tuple[str, float, float, dict[str, Any]]) -> None:
    files = EventFiles(run_dir / DIRECTORY)
    files.write(
        [
            Line("all", {"timestamp": START + at, "event": name, "duration_s": took, **fields})
            for name, at, took, fields in lines
        ]
    )
    files.close()


# ---------------------------------------------------------------------------------------------- events that are missing


@pytest.fixture(scope="module")
def held_up(tmp_path_factory: pytest.TempPathFactory) -> Events:
    """A run with a step that stands out."""
    path = tmp_path_factory.mktemp("run")
    write_run(path, Plan(steps=4, samples=2, n=1, ahead=0, faults=Faults(tool_hang_s=60, tool_hangs=1)))
    events = load(path)
    assert report_of(events)["steps"]["outliers"]
    return events


def report_of(events: Events) -> dict[str, Any]:
    found = analyse(events, {"name": "run", "status": "running"}, {})
    json.dumps(found, allow_nan=False)
    figures(found)
    return found


def without(events: Events, kinds: Set[str], begin: float = 0.0, end: float = 0.0) -> Events:
    """Less these kinds, and less what ended between these shares of its time."""
    first, last = events.window()
    low, high = (first + share * (last - first) for share in (begin, end))
    kept = {name: frame[~frame["end"].between(low, high)] for name, frame in events.frames.items() if name not in kinds}
    return Events({name: frame.reset_index(drop=True) for name, frame in kept.items() if len(frame)}, events.num_events)


def test_samples_of_a_step_that_stands_out_may_lack_their_ends(held_up: Events) -> None:
    found = report_of(without(held_up, {"sample.generate", "sample.ready"}))
    assert {row["last_sample"] for row in found["steps"]["outliers"]} == {None}


@given(st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_whatever_events_are_missing(held_up: Events, data: st.DataObject) -> None:
    share = st.floats(0, 1)
    kinds = data.draw(st.sets(st.sampled_from(sorted(held_up.frames))))
    rest = without(held_up, kinds, data.draw(share), data.draw(share))
    if rest.frames:
        report_of(rest)


# ---------------------------------------------------------------------------------------------- down, or under way

STARTED = [("sample.admitted", 0.0, 0.0, {"step": 1, "sample": f"sample_0_{index}"}) for index in range(1, 9)]
STALL = ("loop.stall", 600.0, 0.5, {"part": "rollouter"})


def idle_of(run_dir: Path, *lines: tuple[str, float, float, dict[str, Any]], **about: Any) -> dict[str, Any]:
    put(run_dir, *lines)
    found = analyse(load(run_dir), {"name": "run", "status": "running", **about}, {})
    assert any("was down" in note for note in found["notes"]) == (found["idle"]["down_s"] > 0)
    return found["idle"]


def test_a_run_that_lives_is_not_down_while_its_samples_are_made(tmp_path: Path) -> None:
    idle = idle_of(tmp_path, *STARTED, STALL, started_at=START - 100)
    assert (idle["down_s"], idle["wall_s"], idle["under_way"]) == (0, 600.5, 8)
    assert idle["rollouter"]["idle_s"] == 0


def test_a_run_that_lives_is_not_down_while_a_step_takes_long(tmp_path: Path) -> None:
    """Its last whole event is the wait for the step's samples."""
    made = [("sample.generate", 0.0, 2.0, fields) for _, _, _, fields in STARTED]
    idle = idle_of(tmp_path, *STARTED, *made, ("trainer.wait_samples", 0.0, 2.0, {"step": 1}), STALL)
    assert (idle["down_s"], idle["wall_s"], idle["under_way"]) == (0, 600.5, 0)


def test_samples_of_a_rollouter_that_was_replaced_were_under_way_until_then(tmp_path: Path) -> None:
    again = [(name, 610.0, took, fields) for name, _, took, fields in STARTED]
    replaced = ("part.restarted", 600.0, 10.0, {"part": "rollouter", "cause": "hung"})
    idle = idle_of(tmp_path, *STARTED, replaced, *again)
    assert (idle["down_s"], idle["under_way"], idle["rollouter"]["idle_s"]) == (0, 8, 10)


@pytest.mark.parametrize("sign", ["admitted again", "trained", "launched"])
def test_a_run_that_was_killed_and_resumed_was_down(tmp_path: Path, sign: str) -> None:
    later = {
        "admitted again": [("sample.admitted", 600.0, 0.0, STARTED[3][3])],
        "trained": [("trainer.wait_samples", 600.0, 1.0, {"step": 2})],
        "launched": [STALL],
    }
    about = {"started_at": START + 590} if sign == "launched" else {}
    first = ("trainer.wait_samples", 0.0, 2.0, {"step": 1})
    idle = idle_of(tmp_path, *STARTED, first, *later[sign], **about)
    assert idle["down_s"] == pytest.approx(598, abs=1e-3)
    # Those that were not admitted again died with the first life.
    assert idle["under_way"] == (1 if sign == "admitted again" else 0)


# ---------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_counts_for_the_step_that_it_is_behind(tmp_path: Path) -> None:
    """As the loop makes them: between a step's end and the next one's begin."""
    lines, at = [], 0.0
    for step in range(1, 7):
        fields = {"step": step, "wait_samples_s": 1.0, "samples": 1, "lineage": 0}
        lines += [("trainer.update", at + 1, 1.0, {"step": step}), ("step", at, 2.0, fields)]
        at += 2.0
        if step in (2, 4):
            took = 0.25 if step == 2 else 10.0
            lines.append(("trainer.checkpoint", at, took, {"step": step}))
            at += took
    put(tmp_path, *lines)
    steps = analyse(load(tmp_path), {"name": "run"}, {})["steps"]
    assert [row["duration_s"] for row in steps["by_step"]] == [2, 2.25, 2, 12, 2, 2]
    assert [row["parts"]["a checkpoint behind it"] for row in steps["by_step"]] == [0, 0.25, 0, 10, 0, 0]
    assert all(sum(row["parts"].values()) == row["duration_s"] for row in steps["by_step"])
    (outlier,) = steps["outliers"]
    assert (outlier["step"], outlier["cause"]) == (4, "a checkpoint behind it took 10.0 s, usually 0.0 s")
    assert outlier["event"]["event"] == "trainer.checkpoint"


def test_a_checkpoint_behind_an_abandoned_step_is_of_no_other_one(tmp_path: Path) -> None:
    lines = [("step", 2.0 * place, 2.0, {"step": step, "lineage": lineage, "samples": 1})
             for place, (step, lineage) in enumerate([(1, 0), (2, 0), (2, 1)], start=1)]  # fmt: skip
    put(tmp_path, ("trainer.checkpoint", 1.0, 0.5, {}), *lines, ("trainer.checkpoint", 6.0, 1.0, {"step": 2}))
    steps = analyse(load(tmp_path), {"name": "run"}, {})["steps"]
    assert [(row["step"], row["duration_s"]) for row in steps["by_step"]] == [(1, 2), (2, 2)]
