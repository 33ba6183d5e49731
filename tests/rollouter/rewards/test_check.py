"""The user's reward function is called once before a run, and what it raises is reported with its frame."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.problems import ConfigProblem
from rollouter.rewards import check
from rollouter.rewards.check import RewardCheck, check_rewards
from tests.fakes.configurations import config_with, single


def problems(
    folder: Path, body: str, changes: Mapping[str, Any] | None = None, *, apart: bool = False
) -> list[ConfigProblem]:
    """Return the problems of a function; `apart`: called in a process of its own, as a launch does it."""
    file = folder / f"r{abs(hash(body))}.py"
    file.write_text(textwrap.dedent(body), encoding="utf-8")
    config = config_with({"reward.function": f"{file}:score"} | dict(changes or {}))
    return list(RewardCheck(config).problems()) if apart else list(check_rewards(config))


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("def score(solution_str, ground_truth, **row):\n    return float(solution_str == ground_truth)", {}),
        ("async def score(solution_str, **row):\n    return {'score': 1.0, 'turn_scores': [0.5]}", {}),
        ("def score(solution_strs, **rows):\n    return [0.0] * len(solution_strs)", {"reward.batch": True}),
        ("def score(trajectory, **row):\n    return len(trajectory.turns)", {}),
        ("def score(extra_info, bonus, **row):\n    return bonus", {"reward.kwargs": {"bonus": 2}}),
    ],
)
def test_functions_that_work_have_no_problem(tmp_path: Path, body: str, changes: Mapping[str, Any]) -> None:
    assert problems(tmp_path, body, changes) == []


@pytest.mark.parametrize(
    ("body", "changes", "consequence"),
    [
        ("def score(a):\n    return 1.0", {}, ".py:1: it cannot be called with data_source, solution_str"),
        (
            "def score(completions, **kwargs):\n    return [1.0]",
            {},
            "Write def score(data_source, solution_str, ground_truth, extra_info): ... (docs/rewards.md)",
        ),
        ("def score(**row):\n    return 'x'", {}, ".py:1: it returned 'x'; expected a finite number"),
        ("def score(**row):\n    return 1e300", {}, ".py:1: it returned 1e+300; expected a finite number of at most"),
        ("def score(**rows):\n    return [1.0]", {"reward.batch": True}, "expected a list of 8 scores"),
        ("import no_such_package_\ndef score(**row):\n    return 1", {}, "ModuleNotFoundError: No module named"),
        ("def score(**row):\n    return row['nothing']", {}, "line 2, in score: return row['nothing'])"),
        ("def score(**row):\n    return int('x')", {}, "it raises ValueError: invalid literal"),
    ],
)
def test_a_mistake_is_reported_with_its_cause(
    tmp_path: Path, body: str, changes: Mapping[str, Any], consequence: str
) -> None:
    problem = single(problems(tmp_path, body, changes))
    assert (problem.key, problem.severity) == ("reward.function", "error")
    assert consequence in problem.consequence


def test_the_frame_is_the_users_and_not_that_of_a_library(tmp_path: Path) -> None:
    problem = single(problems(tmp_path, "import json\ndef score(**row):\n    return json.loads('x')\n"))
    assert "line 3, in score: return json.loads('x'))" in problem.consequence


def test_what_may_pass_during_the_run_is_a_warning(tmp_path: Path) -> None:
    down = "def score(**row):\n    raise ConnectionError('no answer')"
    assert single(problems(tmp_path, down)).severity == "warning"
    dropped = {"reward.on_error": "drop"}
    assert single(problems(tmp_path, "def score(**row):\n    return int('y')", dropped)).severity == "warning"
    assert single(problems(tmp_path, "def score(**row):\n    return missing", dropped)).severity == "error"


def test_a_secret_in_an_error_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret-value")
    own = {"reward.kwargs": {"key": "${secret:JUDGE_KEY}"}}
    problem = single(problems(tmp_path, "def score(key, **row):\n    raise ValueError(key)", own, apart=True))
    assert "ValueError: ${secret:JUDGE_KEY}" in problem.consequence


def test_further_functions_are_called_as_well(tmp_path: Path) -> None:
    file = tmp_path / "more.py"
    file.write_text("def score(**row):\n    return missing")
    more = [{"name": "more", "function": f"{file}:score"}]
    assert single(check_rewards(config_with({"reward.functions": more}))).key == "reward.functions[0].function"


def test_the_process_of_the_check_may_print_and_end(tmp_path: Path) -> None:
    printing = "print('hello')\ndef score(**row):\n    print('again')\n    return missing"
    assert "NameError" in single(problems(tmp_path, printing, apart=True)).consequence
    ending = "import os\ndef score(**row):\n    os._exit(3)"
    assert "ended with code 3" in single(problems(tmp_path, ending, apart=True)).consequence


def test_a_call_that_hangs_is_given_up(tmp_path: Path) -> None:
    problem = single(problems(tmp_path, "def score(**row):\n    while True:\n        pass", apart=True))
    assert (problem.severity, f"longer than {check.LIMIT_S:g} s" in problem.consequence) == ("warning", True)


def test_the_row_is_that_of_the_users_data_set(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "def rows(split):\n    print(split)\n    return [{'prompt': '1+1=', 'extra_info': {'a': 1}}]"
    )
    own = {"data.dataset": f"{tmp_path}/rows.py:rows", "data.train_files": [], "data.val_files": []}
    problem = single(problems(tmp_path, "def score(extra_info, **row):\n    return extra_info['b']", own, apart=True))
    assert "it raises KeyError: 'b'" in problem.consequence and "rows.py:rows train, row 0" in problem.fix
    assert problems(tmp_path, "def score(extra_info, **row):\n    return extra_info['a']", own, apart=True) == []
    (tmp_path / "rows.py").write_text("def rows(split):\n    raise ValueError('no rows')")
    assert (
        problems(tmp_path, "def score(**row):\n    return missing", own, apart=True) == []
    )  # check_own_data reports it


def test_nothing_is_started_for_built_in_functions_or_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.subprocess, "Popen", None)
    assert list(RewardCheck(config_with({})).problems()) == []
    own = {"reward.function": "mine.py:score", "data.train_files": ["elsewhere.jsonl"], "data.val_files": []}
    assert list(RewardCheck(config_with(own)).problems()) == []
