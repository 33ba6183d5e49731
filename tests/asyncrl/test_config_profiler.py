"""Rules about `profiler`: what would have no effect, what is not there, and what Nsight Systems needs."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import engine_checks
from asyncrl.config.keys import leaves
from asyncrl.config.problems import Problem
from asyncrl.config.rules import problems
from asyncrl.config.schema import Config


def found(profiler: dict[str, Any], **sections: Any) -> list[Problem]:
    sections = {"data": {"train_files": ["x.jsonl"]}, "profiler": profiler, **sections}
    given = set(leaves(sections))
    return [
        problem for problem in problems(Config.model_validate(sections), given) if problem.key.startswith("profiler.")
    ]


@pytest.mark.parametrize(
    "profiler",
    [
        {},
        {"level": "off"},
        {"level": "full", "synchronize": True, "buffer_events": 5},
        {"steps": [3], "ranks": [0], "tool": "torch"},
        {"steps": [3], "level": "off"},
        {"steps": [3], "tool": "nsys"},
    ],
)
def test_what_works(profiler: dict[str, Any]) -> None:
    assert found(profiler) == []


@pytest.mark.parametrize(
    ("profiler", "key", "because"),
    [
        ({"level": "off", "buffer_events": 5}, "buffer_events", "profiler.level is off"),
        ({"level": "off", "synchronize": True}, "synchronize", "profiler.level is off"),
        ({"ranks": [1]}, "ranks", "profiler.steps names no step"),
        ({"tool": "nsys"}, "tool", "profiler.steps names no step"),
    ],
)
def test_keys_without_an_effect(profiler: dict[str, Any], key: str, because: str) -> None:
    [problem] = found(profiler)
    assert problem.key == f"profiler.{key}"
    assert problem.value == profiler[key] or problem.value == tuple(profiler[key])
    assert problem.consequence.startswith("it would have no effect: " + because)
    assert "leave this key out" in problem.fix


def test_ranks_that_are_not_there() -> None:
    [problem] = found({"steps": [1], "ranks": [0, 2]}, trainer={"num_workers": 2, "strategy": "ddp"})
    assert (problem.key, problem.value) == ("profiler.ranks", [0, 2])
    assert "from 0 to 1, so there is no rank 2" in problem.consequence
    [problem] = found({"steps": [1], "ranks": []})
    assert problem.key == "profiler.ranks"
    # Of a group of its own a model may have more.
    apart = {"algorithm": {"use_kl_loss": True}, "ref": {"placement": "own", "num_workers": 3, "strategy": "ddp"}}
    assert found({"steps": [1], "ranks": [2]}, **apart) == []


def test_steps_behind_the_end_are_a_warning() -> None:
    [problem] = found({"steps": [4, 9]}, trainer={"total_training_steps": 8})
    assert (problem.key, problem.severity) == ("profiler.steps", "warning")
    assert "before step 9" in problem.consequence


def test_nsys_on_cpu() -> None:
    [problem] = found({"steps": [1], "tool": "nsys"}, trainer={"device": "cpu"})
    assert (problem.key, problem.value) == ("profiler.tool", "nsys")
    assert "no GPU" in problem.consequence
    assert "profiler.tool=torch" in problem.fix


@pytest.mark.parametrize(
    ("gpus", "path", "expected"), [(1, "/bin/nsys", 0), (1, None, 1), (0, "/bin/nsys", 1), (0, None, 2)]
)
def test_nsys_needs_its_command_and_a_gpu_here(
    monkeypatch: pytest.MonkeyPatch, gpus: int, path: str | None, expected: int
) -> None:
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("shutil.which", lambda name: path if name == "nsys" else None)
    config = Config.model_validate({"profiler": {"steps": [1], "tool": "nsys"}})
    here = [problem for problem in engine_checks.machine_problems(config) if problem.key == "profiler.tool"]
    assert len(here) == expected
    for problem in here:
        assert problem.severity == "error"
        assert "profiler.tool=torch" in problem.fix
    if path is None:
        assert "nsys is not on PATH" in here[-1].consequence
    for quiet in ({"tool": "nsys"}, {"steps": [1]}):
        config = Config.model_validate({"profiler": quiet})
        assert not [problem for problem in engine_checks.machine_problems(config) if problem.key == "profiler.tool"]
