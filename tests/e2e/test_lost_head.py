"""The machine of a run is lost with all processes and the run directory: the run continues on another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.storage.run_dir import RunDir
from tests.e2e.launches import SHORT, balanced, start

pytestmark = pytest.mark.timeout(600)
STEPS = 16


def trained_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps of a run that never went back, with their samples, from the Trainer's own record."""
    lines = (run_dir / "trained.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "samples" in record]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_whose_machine_is_lost_continues_elsewhere_from_its_checkpoints(tmp_path: Path, scheme: str) -> None:
    checkpoints = tmp_path / "network" / "run"
    given = f"{scheme}{checkpoints}"
    keys = (
        *SHORT, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=3", f"trainer.checkpoint_dir={given}",
    )  # fmt: skip
    first = start(tmp_path, *keys)
    first.wait_until((checkpoints / "step_000003" / "manifest.json").exists, "checkpoint")
    first.kill_all()
    assert first.survivors() == []
    before = trained_in(first.run_dir)
    shutil.rmtree(first.run_dir)
    newest = max(int(path.parent.name[-6:]) for path in checkpoints.glob("step_*/manifest.json"))
    if scheme:
        shutil.rmtree(RunDir.of(first.run_dir, given).checkpoints)

    second = start(tmp_path, *keys, "resume=auto", run_dir=tmp_path / "elsewhere")
    assert second.wait() == 0, second.output()
    summary = second.summary()
    assert (summary["status"], summary["step"], summary["lineage"]) == ("completed", STEPS, 1)
    assert summary["resumed"]["step"] == newest
    notice = summary["resumed"]["lost"]
    assert f"{first.run_dir} on " in notice and f"which is step {newest} " in notice
    assert "".join(notice.split()) in "".join(second.output().split())
    samples = summary["samples"]
    assert (samples["trained"], balanced(samples)) == (16 * STEPS, True)
    assert samples["fed"] == samples["trained"] + sum(samples["dropped"].values()), "nothing is fed twice"
    surviving = [record for record in before if record["step"] <= newest] + trained_in(second.run_dir)
    assert [record["step"] for record in surviving] == list(range(1, STEPS + 1))
    trained = [sample for record in surviving for sample in record["samples"]]
    assert len(trained) == len(set(trained)) == 16 * STEPS
    assert [step["step"] for step in second.steps()] == list(range(newest + 1, STEPS + 1))
    assert (checkpoints / f"step_{STEPS:06d}").is_dir() and not (second.run_dir / "checkpoints").exists()
    assert second.survivors() == []
    if scheme:
        shutil.rmtree(RunDir.of(second.run_dir, given).checkpoints)
