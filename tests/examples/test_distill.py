"""The configuration in which a trained quickstart model teaches the untrained one."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.compose import check_config

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "distill" / "config.yaml"


def test_the_student_needs_a_teacher_and_nothing_else() -> None:
    found = check_config(CONFIG, ["teacher.path=nowhere"])
    assert [problem.key for problem in found.problems] == ["teacher.path"]
    config = check_config(CONFIG, ["teacher.path=asyncrl://quickstart"]).require()
    assert (config.algorithm.adv_estimator, config.rollout.n) == ("on_policy_distill", 2)


def test_the_teacher_can_be_added_to_a_reward() -> None:
    overrides = ["teacher.path=asyncrl://quickstart", "algorithm=grpo", "rollout.n=8", "teacher.coef=0.1"]
    found = check_config(CONFIG, overrides)
    assert found.problems == ()
    assert found.require().algorithm.adv_estimator == "grpo"
