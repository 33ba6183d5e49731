"""A launch whose engines and ranks take turns, with vLLM's real calls. On a CPU they free nothing, and the
turns are the same. A replica is killed meanwhile, and Ctrl-C still gets its checkpoint.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.launches import balanced, start

if TYPE_CHECKING:
    from pathlib import Path

Span = tuple[float, float]


def spans(run_dir: Path, name: str) -> list[Span]:
    """Return when each event of this name began and ended."""
    found: list[dict[str, Any]] = []
    for file in (run_dir / "events").rglob("*.jsonl"):
        found += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted((one["timestamp"], one["timestamp"] + one["duration_s"]) for one in found if one["event"] == name)


def inside(inner: Span, outer: list[Span]) -> bool:
    return any(begin - 0.02 <= inner[0] and inner[1] <= end + 0.02 for begin, end in outer)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_ranks_compute_only_while_the_engines_sleep(tmp_path: Path) -> None:
    run = start(
        tmp_path, "placement=colocated", "trainer.total_training_steps=30", "data.max_val_samples=8",
        "trainer.test_freq=2", "weight_sync.verify=every", "profiler.level=summary", "logging.console=plain",
        "trainer.ppo_mini_batch_size=8", "timeouts.stop_s=90", mode="sync",
    )  # fmt: skip
    run.wait_until(lambda: run.state().get("step", 0) >= 3, "a third step", 400.0)
    run.kill("replica", signal.SIGKILL)
    run.wait_until(
        lambda: run.recovered("replica") == 1 and run.state()["step"] >= 6, "steps of the next replica", 400.0
    )
    run.interrupt()
    assert run.wait(240.0) == 130, run.output()
    summary = run.summary()
    assert balanced(summary["samples"]) and summary["staleness"]["max"] == 0
    assert len(list((run.run_dir / "checkpoints").glob("step_*"))) == 1, "the ranks got the GPUs for it"
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    applied = [line for line in lines if line["kind"] == "apply"]
    assert {line["weight_sync/verified"] for line in applied} == {1.0}
    assert max(line["weight_sync/mismatch_kl"] for line in applied if "weight_sync/mismatch_kl" in line) < 1e-9
    validated = {line["step"] for line in lines if line["kind"] == "validation"}
    assert validated and not any(step % 2 for step in validated - {summary["step"]}), "every other version"
    asleep = spans(run.run_dir, "engine.asleep")
    assert len(asleep) >= 5
    first, last = asleep[0][0], asleep[-1][1]
    updates = [one for one in spans(run.run_dir, "trainer.update") if first <= one[0] and one[1] <= last]
    # The events of the replica that was killed in its sleep, which is at most one, are lost.
    assert sum(not inside(one, asleep) for one in updates) <= 1 and len(updates) >= 4
    assert not any(inside(one, asleep) for one in spans(run.run_dir, "request"))
    assert run.survivors() == []
