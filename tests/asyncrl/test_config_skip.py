"""Rules for `skip`: what would record nothing, or something else than is meant, is told before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import checks, rules
from asyncrl.config.problems import errors
from tests.fakes.configurations import changed

ON = {"skip.async_rollout.enable": True, "skip.async_rollout.steps": "all"}
SYNC = {"skip.rollout.enable": True, "skip.rollout.steps": "all", "mode": "sync"}
SUMS = {"skip.modules": ["sums"], "skip.roles": {"sums": {"enable": True, "steps": "all"}}}

TOOL = {"skip.tool.enable": True, "skip.tool.steps": "all"}
CALCULATOR = [{"class_name": "calculator"}]


def told(changes: dict[str, Any]) -> dict[str, str]:
    """Key and fix of every error and warning about skip."""
    found = rules.problems(changed(changes), set(changes))
    return {problem.key: problem.fix for problem in found if "skip" in problem.key}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        ON,
        SYNC,
        SUMS,
        ON | {"skip.reward.enable": True, "skip.reward.steps": [1, "2-4"]},
        TOOL | {"rollout.multi_turn.enable": True, "rollout.multi_turn.tools": CALCULATOR},
    ],
)
def test_what_works_is_not_complained_about(changes: dict[str, Any]) -> None:
    assert told(changes) == {}


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("skip.async_rollout.steps", {"skip.async_rollout.enable": True}, "all"),
    ("skip.async_rollout.steps", ON | {"skip.async_rollout.steps": []}, "enable=false"),
    ("skip.async_rollout.steps", ON | {"skip.async_rollout.steps": "1-"}, "1-128,200"),
    ("skip.async_rollout.steps", ON | {"skip.async_rollout.steps": [1.5]}, "1-128,200"),
    ("skip.async_rollout.steps", {"skip.async_rollout.steps": "all"}, "enable=true"),
    ("skip.roles.sums.steps", SUMS | {"skip.roles": {"sums": {"enable": True}}}, "all"),
    ("skip.roles.sums", {"skip.roles": SUMS["skip.roles"]}, "skip.modules"),
    ("skip.roles.reward", SUMS | {"skip.roles": {"reward": {}}}, "write skip.reward"),
    ("skip.rollout.enable", {"skip.rollout.enable": True, "skip.rollout.steps": "all"}, "skip.async_rollout.enable"),
    ("skip.async_rollout.enable", ON | SYNC, "one of the two"),
    ("skip.async_rollout.steps", ON | {"skip.async_rollout.steps": 0}, "1-128"),
    ("skip.async_rollout.dump_dir", ON | {"skip.async_rollout.dump_dir": ""}, "name a directory"),
    ("project_name", ON | {"project_name": "../elsewhere"}, "letters"),
    ("skip.tool.enable", TOOL, "rollout.multi_turn.enable=true"),
    ("skip.tool.enable", TOOL | {"rollout.multi_turn.enable": True}, "rollout.multi_turn.tools"),
    ("skip.tool.enable", TOOL | {"rollout.multi_turn.tools": CALCULATOR}, "skip.tool.enable=false"),
    ("skip.ref_log_prob.enable", {"skip.ref_log_prob.enable": True, "skip.ref_log_prob.steps": "all"}, "use_kl_loss"),
    (
        "skip.async_rollout.on_mismatch",
        ON | {"skip.async_rollout.action": "repeat", "skip.async_rollout.on_mismatch": "error"},
        "action=cache",
    ),
]


@pytest.mark.parametrize(("key", "changes", "fix"), BROKEN, ids=[f"{key}-{n}" for n, (key, _, _) in enumerate(BROKEN)])
def test_what_cannot_work_is_an_error(key: str, changes: dict[str, Any], fix: str) -> None:
    found = {problem.key: problem for problem in errors(rules.problems(changed(changes), set(changes)))}
    assert fix in found[key].fix


def test_what_will_surprise_is_a_warning() -> None:
    assert "absolute" in told(ON | {"skip.async_rollout.dump_dir": "records"})["skip.async_rollout.dump_dir"]
    validated = ON | {"skip.async_rollout.serve_when_covered": False, "data.val_files": ["val.jsonl"]}
    assert "data.val_files=[]" in told(validated)["skip.async_rollout.serve_when_covered"]
    ageing = ON | {"skip.async_rollout.action": "repeat", "async_training.max_staleness": 2}
    assert "current" in told(ageing)["skip.async_rollout.replay_versions"]


def test_what_is_not_there_or_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    changes = SUMS | ON | {"skip.async_rollout.dump_dir": str(file / "below")}
    found = {problem.key: problem for problem in checks.problems(changed(changes)) if problem.key.startswith("skip")}
    assert "is no directory" in found["skip.async_rollout.dump_dir"].consequence
    assert found["skip.modules"].value == "sums"
    fine = ON | {"skip.async_rollout.dump_dir": str(tmp_path / "new"), "skip.modules": ["json"]}
    assert not [problem for problem in checks.problems(changed(fine)) if problem.key.startswith("skip")]
