"""A trace that is measured in a run has the speeds, lengths and costs with which the run's events were written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.core.failures import ConfigError
from asyncrl.observe.status.run_status import SCHEMA_VERSION
from asyncrl.profiling.files import EVENTS_DIRECTORY
from asyncrl.simulate.calibration import calibrate
from asyncrl.simulate.trace import Trace, read_trace, trace_yaml
from benchmarks.synthetic_run import RunPlan, write_run

PLAN = RunPlan(steps=30, replicas=2, samples=8, n=4, tokens=80, token_s=0.02, aborted=0.2, validation_every=5, seed=3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration") / "run"
    write_run(directory, PLAN)
    return directory


@pytest.fixture(scope="module")
def measured(recorded: Path) -> Trace:
    return calibrate(recorded)


def lines_of(run: Path, event: str) -> Iterator[dict[str, Any]]:
    for file in (run / EVENTS_DIRECTORY).rglob("*.jsonl"):
        for line in file.read_text().splitlines():
            if (values := json.loads(line))["event"] == event:
                yield values


def test_the_decoding_speed_is_that_of_the_requests(measured: Trace) -> None:
    """Each sequence needs 20 ms per token (replicas differ by up to 5 %), whatever the batch."""
    assert all(step_s == pytest.approx(PLAN.token_s, rel=0.08) for step_s in measured.engine.step_s.values())
    assert len(measured.engine.step_s) >= 3
    assert 0.01 < measured.engine.request_s < 0.06
    assert measured.contention.engine == 1.0  # the CPU time of this run is unknown


def test_recorded_lengths_are_the_tokens_of_every_turn(recorded: Path, measured: Trace) -> None:
    groups = measured.lengths.recorded
    sampled = [line for line in lines_of(recorded, "trajectory") if line["sample"].startswith("sample_")]
    assert sum(line["sampled_tokens"] for line in sampled) == sum(
        tokens for group in groups for turns in group for tokens, _ in turns
    )
    assert {len(group) for group in groups} == {PLAN.n}
    gaps = [gap_s for group in groups for turns in group for _, gap_s in turns[:-1]]
    assert sum(gaps) == pytest.approx(sum(line["tool_s"] for line in sampled), rel=0.05)
    assert all(turns[-1][1] == 0 for group in groups for turns in group)


def test_costs_of_training_and_of_versions(measured: Trace) -> None:
    trainer, sync = measured.trainer, measured.sync
    tokens = sum(tokens for group in measured.lengths.recorded for turns in group for tokens, _ in turns)
    per_step = tokens / len(measured.lengths.recorded) * PLAN.samples
    update = trainer.step_s + per_step / trainer.update_tokens_per_s[1]
    assert update == pytest.approx(1.2, rel=0.1)
    assert trainer.experience_tokens_per_s is not None
    experience = per_step / trainer.experience_tokens_per_s[1] + trainer.lease_s
    assert experience == pytest.approx(0.4, rel=0.15)
    assert sync.publish_s == pytest.approx(0.1, rel=0.1)
    assert sync.fetch_s + sync.pause_s + sync.verify_s == pytest.approx(0.08 + 0.05 + 0.02, rel=0.3)
    assert measured.validation.requests == 4
    assert measured.dispatch.score_s == pytest.approx(0.07, abs=0.03)


def test_a_saved_trace_can_be_read_again(measured: Trace, tmp_path: Path) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text(trace_yaml(measured, max_groups=10))
    again = read_trace(file)
    assert again.engine == measured.engine and again.trainer == measured.trainer and again.sync == measured.sync
    assert len(again.lengths.recorded) == 10
    for ours, theirs in zip(again.lengths.recorded, measured.lengths.recorded, strict=False):
        assert [[tokens for tokens, _ in turns] for turns in ours] == [[t for t, _ in turns] for turns in theirs]


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"experiment_name": "empty"}))
    with pytest.raises(ConfigError, match="has no `request` events"):
        calibrate(tmp_path)


@pytest.mark.parametrize(("mode", "kind"), [("sft", "supervised training"), ("eval", "an evaluation")])
def test_a_run_of_another_kind_is_refused(tmp_path: Path, mode: str, kind: str) -> None:
    state = {
        "schema_version": SCHEMA_VERSION, "written_at": 0.0, "started_at": 0.0, "pid": 1, "phase": "completed",
        "experiment": "e", "mode": mode,
    }  # fmt: skip
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=f"is {kind} .*Take a run of `asyncrl launch`"):
        calibrate(tmp_path)


def test_a_step_whose_wait_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, RunPlan(steps=5))
    whole = calibrate(tmp_path)
    [first, *_] = sorted((tmp_path / EVENTS_DIRECTORY).glob("*/trainer.jsonl"))
    first.write_text("".join(line for line in first.open() if "trainer.wait_samples" not in line))
    assert calibrate(tmp_path).trainer.lease_s == pytest.approx(whole.trainer.lease_s, abs=1e-3)


def test_a_run_of_two_steps_is_too_short(tmp_path: Path) -> None:
    write_run(tmp_path / "run", RunPlan(steps=2))
    with pytest.raises(ConfigError, match="has trained 2 steps"):
        calibrate(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {step_s: {1: 0.01}}\ntrainer: {update_tokens_per_s: {1: -4}}", r"trainer.update_tokens_per_s.1 = -4"),
        (
            "engine: {step_s: {1: 0.01}, speed: 3}\ntrainer: {update_tokens_per_s: {1: 4}}",
            "engine.speed is no key of a trace",
        ),
        ("trainer: {update_tokens_per_s: {1: 4}}", "engine is missing"),
        ("[1, 2", "cannot be read"),
        ("engine: {step_s: {}}\ntrainer: {update_tokens_per_s: {1: 4}}", "engine.step_s"),
    ],
)
def test_a_wrong_trace_file_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_trace(file)
    assert "speeds.yaml" in refused.value.message
