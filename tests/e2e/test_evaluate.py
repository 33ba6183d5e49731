"""A real evaluation of a checkpoint: killed, interrupted and continued, it ends with the figures of a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.observe.status.run_files import read_run, status_report
from asyncrl.storage.answer_files import read_answers
from tests.e2e.launches import LaunchedRun, start, start_command

NUM_PROMPTS = 192
SAMPLING = ("rollout.val.n=8", "rollout.val.temperature=0.6")


def begin(where: Path, run: LaunchedRun, out: str) -> LaunchedRun:
    """Begin to evaluate the run's checkpoint greedily, one prompt at a time."""
    arguments = (
        f"data.max_val_samples={NUM_PROMPTS}",
        "rollout.max_concurrent_samples=1",
        "logging.console=plain",
        "rollout.val.n=1",
        "rollout.val.temperature=0",
    )
    return start_command(where, "eval", f"checkpoint={run.run_dir}", *arguments, "--out", out, run_dir=where / out)


def num_answered(evaluation: LaunchedRun) -> int:
    return len(read_answers(evaluation.run_dir / "answers.jsonl"))


def found(evaluation: LaunchedRun) -> dict[str, Any]:
    assert evaluation.wait() == 0, evaluation.output()
    assert evaluation.survivors() == []
    return json.loads((evaluation.run_dir / "evaluation.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """Train for a step as `runs/quickstart/first` of the directory in which the evaluations start."""
    where = tmp_path_factory.mktemp("trained")
    more = ("data.max_val_samples=16", "trainer.total_training_steps=1", "trainer.validation_data_dir=answers")
    run = start(where, *SAMPLING, *more, "logging.console=plain", run_dir=where / "runs" / "quickstart" / "first")
    assert run.wait() == 0, run.output()
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_is_evaluated_whatever_ends_the_evaluation_in_between(
    trained: LaunchedRun, tmp_path: Path
) -> None:
    whole = found(begin(tmp_path, trained, "whole"))
    assert whole["model"].endswith("checkpoints/step_000001/hf")
    assert (whole["prompts"], whole["answered"], whole["failed"]) == (NUM_PROMPTS, NUM_PROMPTS, [])
    assert whole["all"]["figures"]["pass@1"] == whole["all"]["figures"]["mean@1"]

    killed = begin(tmp_path, trained, "resumed")
    killed.wait_until(lambda: num_answered(killed) >= 5, "answers")
    killed.kill_all()
    kept = num_answered(killed)
    assert 5 <= kept < NUM_PROMPTS

    stopped = begin(tmp_path, trained, "resumed")
    stopped.wait_until(lambda: num_answered(stopped) >= kept + 3, "more answers")
    stopped.interrupt()
    assert stopped.wait(60.0) == 130, stopped.output()
    assert "the same command continues" in stopped.output() and stopped.survivors() == []
    kept = num_answered(stopped)
    assert kept < NUM_PROMPTS

    resumed = found(begin(tmp_path, trained, "resumed"))
    assert resumed["kept"] == kept
    assert (resumed["all"], resumed["sources"]) == (whole["all"], whole["sources"]), "greedy answers are the same"
    lines = [read_answers(tmp_path / out / "answers.jsonl") for out in ("whole", "resumed")]
    assert lines[0] == lines[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_of_the_documentation(trained: LaunchedRun) -> None:
    """`asyncrl eval checkpoint=quickstart …` (docs/evaluate.md), and the same figures in a run's own validation."""
    where = trained.run_dir.parents[2]
    inside = json.loads((where / "answers" / "step_000001.json").read_text(encoding="utf-8"))
    names = [f"{kind}@{k}" for kind in ("pass", "best", "maj") for k in (1, 2, 4, 8) if k > 1 or kind == "pass"]
    assert list(inside["all"]["figures"]) == ["mean@8", *names]
    assert [len(one.answers) for one in read_answers(where / "answers" / "step_000000.jsonl").values()] == [8] * 16
    last = [
        json.loads(line)
        for line in (trained.run_dir / "metrics.jsonl").read_text().splitlines()
        if '"validation"' in line
    ]
    assert last[-1]["validation/pass@8"] == pytest.approx(inside["all"]["figures"]["pass@8"]["value"])

    evaluation = start_command(where, "eval", "checkpoint=quickstart", *SAMPLING, "--out", "out", run_dir=where / "out")
    outside = found(evaluation)
    assert list(outside["all"]["figures"]) == ["mean@8", *names]
    (row,) = map(json.loads, (where / "out" / "metrics.jsonl").read_text().splitlines())
    assert (row["step"], row["validation/pass@8"]) == (1, outside["all"]["figures"]["pass@8"]["value"])
    state = status_report(read_run(where / "out"))
    assert (state["mode"], state["phase"], state["answers"]["answered"]) == ("eval", "completed", 16)
    assert outside["prompts"] == 16, "the configuration is that of the run"
