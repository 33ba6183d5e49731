"""The shipped recipes as a user runs them: roles, numbers of ranks, resume, and a reward that rises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launches import LaunchedRun, balanced, start

BATCH = 16
"""Number of samples in a step of the quickstart."""
STEPS = 24


def finished(run: LaunchedRun, *, timeout_s: float = 240.0) -> None:
    assert run.wait(timeout_s) == 0, run.output()
    assert run.summary()["status"] == "completed"
    assert run.summary()["error"] is None
    assert run.survivors() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_policy_and_critic_learn_on_two_ranks_and_then_on_one(tmp_path: Path) -> None:
    keys = ("logging.console=plain", "critic.warmup_steps=1")
    first = start(
        tmp_path, *keys, "trainer.total_training_steps=4", "trainer.strategy=fsdp2", "trainer.num_workers=2",
        "trainer.optim.warmup_steps=0", recipe="ppo_critic",
    )  # fmt: skip
    finished(first)
    (checkpoint,) = (first.run_dir / "checkpoints").iterdir()
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    for role in ("actor", "critic"):
        assert [name for name in files if name.startswith(f"{role}/dcp/rank_")] == [
            f"{role}/dcp/rank_{rank:05}.safetensors" for rank in range(2)
        ]

    second = start(
        tmp_path, *keys, f"trainer.total_training_steps={STEPS}", "trainer.strategy=fsdp2", "trainer.num_workers=1",
        "resume=auto", recipe="ppo_critic", run_dir=first.run_dir,
    )  # fmt: skip
    finished(second, timeout_s=600.0)
    summary = second.summary()
    assert (summary["step"], summary["version"], summary["resumed"]["step"]) == (STEPS, STEPS, 4)
    assert summary["samples"]["trained"] == summary["samples"]["fed"] == STEPS * BATCH
    assert balanced(summary["samples"])
    # The second launch does not repeat validations of the first one.
    assert [point["step"] for point in summary["validation"]["points"]] == [0, 4, STEPS]
    before, after = (summary["validation"][when]["reward"] for when in ("before", "after"))
    assert before < 0.2 and after > before + 0.3
    steps = second.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    # Only the critic trains in the first step; the policy trains in all others, on two ranks and on one.
    assert ["actor/grad_norm" in step for step in steps] == [False] + (STEPS - 1) * [True]
    assert all(step["actor/grad_norm"] > 0 for step in steps[1:])
    # One rank continues with the critic that two ranks trained: an untrained head would give 0 for every token.
    assert abs(steps[4]["critic/value_mean"]) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("recipe", "num_steps"), [("grpo_lora_kl", STEPS), ("dapo", 20)])
def test_a_recipe_learns(tmp_path: Path, recipe: str, num_steps: int) -> None:
    run = start(tmp_path, f"trainer.total_training_steps={num_steps}", "logging.console=plain", recipe=recipe)
    finished(run, timeout_s=840.0)
    summary = run.summary()
    assert (summary["step"], summary["version"]) == (num_steps, num_steps)
    assert summary["samples"]["trained"] == num_steps * BATCH
    assert balanced(summary["samples"])
    dropped = {reason for reason, count in summary["samples"]["dropped"].items() if count}
    assert dropped == ({"filtered"} if recipe == "dapo" else set())
    before, after = (summary["validation"][when]["reward"] for when in ("before", "after"))
    assert before < 0.2
    assert after > 0.8
