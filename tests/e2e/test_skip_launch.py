"""A recorded run is replayed without engines, with the same samples and bit-identical losses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.core.types import Provenance, Sample
from asyncrl.storage.array_bytes import decode
from asyncrl.storage.sample_bytes import PackedBlob
from asyncrl.storage.segments import read_segment
from skip.store import find
from tests.e2e.launches import (
    MARK,
    LaunchedRun,
    balanced,
    completed_in_order,
    interrupted_in_order,
    start,
    trained_once,
)
from tests.fakes.reward_model import make_classifier

pytestmark = pytest.mark.timeout(900)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 20
FOUR_STEPS = ("trainer.total_training_steps=4", "data.val_files=[]", "algorithm=grpo_kl")


def launch(
    where: Path,
    dump_dir: Path,
    *more: str,
    role: str = "async_rollout",
    mode: str = "fully_async",
    run_dir: Path | None = None,
) -> LaunchedRun:
    where.mkdir(exist_ok=True)
    settings = {"enable": "true", "steps": "all", "dump_dir": dump_dir}
    return start(
        where,
        *(f"skip.{role}.{key}={value}" for key, value in settings.items()),
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_last=false",  # a checkpoint would let the run delete the sample files, which the tests compare
        "async_training.deterministic=true",
        "logging.console=plain",
        *more,
        mode=mode,
        run_dir=run_dir,
    )


def trained_on(run: LaunchedRun) -> dict[str, Sample]:
    """Return every sample that the run stored, by id."""
    blobs = [PackedBlob(decode(read_segment(path))) for path in sorted((run.run_dir / "samples").iterdir())]
    samples = [blob.unpack(position) for blob in blobs for position in range(len(blob))]
    return {str(sample.sample_id): sample for sample in samples}


def assert_identical(one: dict[str, Sample], other: dict[str, Sample]) -> None:
    assert one.keys() == other.keys()
    for name, first in one.items():
        for mine, yours in zip(first.rows, other[name].rows, strict=True):
            np.testing.assert_array_equal(mine.prompt_ids, yours.prompt_ids)
            np.testing.assert_array_equal(mine.response_ids, yours.response_ids)
            np.testing.assert_array_equal(mine.rollout_log_probs, yours.rollout_log_probs)
            assert (mine.spans, mine.reward) == (yours.spans, yours.reward)


def names_of_engines(run: LaunchedRun) -> Iterator[str]:
    """Yield the names of the launch's running vLLM processes."""
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == run.mark
                and "vllm" in " ".join([process.name(), *process.cmdline()]).lower()
            ):
                yield process.name()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def diff(one: LaunchedRun, other: LaunchedRun) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON output of `asyncrl skip diff`."""
    command = [sys.executable, "-m", "asyncrl", "skip", "diff", "--json", str(one.run_dir), str(other.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def dump_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, dump_dir: Path) -> LaunchedRun:
    run = launch(tmp_path_factory.mktemp("recorded"), dump_dir, "data.max_val_samples=16")
    assert run.wait() == 0, run.output()
    return run


def test_a_recorded_run_completes(recorded: LaunchedRun, dump_dir: Path) -> None:
    summary = recorded.summary()
    assert (summary["status"], summary["step"], summary["version"]) == ("completed", STEPS, STEPS)
    assert summary["error"] is None
    assert (summary["samples"]["trained"], summary["samples"]["replayed"]) == (16 * STEPS, 0)
    assert balanced(summary["samples"]) and trained_once(recorded)
    assert summary["weight_sync"]["count"] == STEPS
    assert [point["version"] for point in summary["validation"]["points"]] == [0, STEPS]
    assert recorded.survivors() == []
    assert {one.step for one in find(dump_dir)} >= set(range(1, 16 * STEPS + 1))


def test_a_recorded_run_is_replayed_bit_for_bit_without_engines(
    recorded: LaunchedRun, dump_dir: Path, tmp_path: Path
) -> None:
    replayed = launch(tmp_path / "replayed", dump_dir, "skip.async_rollout.engines=auto", "data.val_files=[]")
    replayed.wait_for(f"no engines: all {16 * STEPS} samples are recorded")
    replayed.wait_for("step 10/")
    assert list(names_of_engines(replayed)) == []
    assert replayed.wait() == 0, replayed.output()
    summary = replayed.summary()
    assert (summary["status"], summary["step"]) == ("completed", STEPS)
    assert (summary["samples"]["trained"], summary["tokens"]["generated"]) == (16 * STEPS, 0)
    assert (summary["samples"]["replayed"], summary["samples"]["substituted"]) == (16 * STEPS, 0)
    assert balanced(summary["samples"]) and trained_once(replayed)
    first, second = trained_on(recorded), trained_on(replayed)
    assert_identical({name: first[name] for name in second}, second)
    assert {sample.provenance for sample in second.values()} == {Provenance.REPLAYED}
    code, result = diff(recorded, replayed)
    assert (code, result) == (0, {"steps": STEPS, "difference": None})
    assert [step["actor/loss"] for step in recorded.steps()] == [step["actor/loss"] for step in replayed.steps()]
    assert replayed.survivors() == []


@pytest.mark.slow
def test_a_synchronous_run_is_recorded_and_replayed_batch_by_batch(tmp_path: Path) -> None:
    dump_dir = tmp_path / "dump"
    short = ("trainer.total_training_steps=4", "data.val_files=[]")
    recorded = launch(tmp_path / "recorded", dump_dir, *short, role="rollout", mode="sync")
    assert recorded.wait() == 0, recorded.output()
    assert [one.step for one in find(dump_dir)] == [1, 2, 3, 4]
    assert recorded.summary()["status"] == "completed" and recorded.survivors() == []
    staleness = recorded.summary()["staleness"]
    assert (staleness["mean"], staleness["max"]) == (0.0, 0), "a barrier separates generation from training"
    replayed = launch(tmp_path / "replayed", dump_dir, *short, role="rollout", mode="sync")
    assert replayed.wait() == 0, replayed.output()
    assert (replayed.summary()["samples"]["replayed"], replayed.summary()["tokens"]["generated"]) == (64, 0)
    assert_identical(trained_on(recorded), trained_on(replayed))
    assert diff(recorded, replayed) == (0, {"steps": 4, "difference": None})


@pytest.mark.slow
def test_a_missing_record_starts_the_engines(recorded: LaunchedRun, dump_dir: Path, tmp_path: Path) -> None:
    records = tmp_path / "dump"
    shutil.copytree(dump_dir, records)
    (lost,) = [one for one in find(records) if one.step == 7]
    (lost.path / "tensors.safetensors").unlink()
    keys = ("trainer.total_training_steps=2", "data.val_files=[]", "skip.async_rollout.engines=auto")
    again = launch(tmp_path / "again", records, *keys)
    assert again.wait() == 0, again.output()
    assert "engines are started: sample_0_7 has no record that can be used" in again.output()
    assert (again.summary()["samples"]["replayed"], again.summary()["samples"]["trained"]) == (31, 32)
    assert lost.read().step == 7


OWN = ("skip.modules=[own_files]", "reward.function=own_files:score")
"""The reward function calls a function with a role, `grade`, whose class for verl's interface keeps its own files."""


def enabled(role: str, where: Path) -> list[str]:
    return [f"skip.{role}.enable=true", f"skip.{role}.steps=1-100000", f"skip.{role}.dump_dir={where}"]


@pytest.fixture(scope="module")
def every_role(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    """Record reference log-probs, rewards and the role of a plain function, beside the samples."""
    where = tmp_path_factory.mktemp("every-role")
    roles = [key for role in ("ref_log_prob", "reward", "roles.grade") for key in enabled(role, where / role)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES / "skip"), os.environ.get("PYTHONPATH", "")]))
        run = launch(where, where / "samples", *FOUR_STEPS, *OWN, *roles)
        assert run.wait() == 0, run.output()
        yield run


def replay(every_role: LaunchedRun, where: Path, *keys: str, roles: Sequence[str]) -> LaunchedRun:
    """Replay the samples and these roles without engines, and with further `keys`."""
    records = every_role.run_dir.parent
    keys += tuple(key for role in roles for key in enabled(role, records / role))
    run = launch(where, records / "samples", *FOUR_STEPS, *OWN, *keys, "skip.async_rollout.engines=auto")
    assert run.wait() == 0, run.output()
    return run


@pytest.mark.slow
def test_rewards_are_replayed_and_skip_diff_finds_the_step_at_which_another_learning_rate_matters(
    every_role: LaunchedRun, tmp_path: Path
) -> None:
    other = replay(every_role, tmp_path, "trainer.optim.lr=1e-6", roles=["reward"])
    assert other.summary()["skip"]["reward"]["replayed"] >= 64
    code, result = diff(every_role, other)
    # The first loss is computed with the initial weights; the second one with the weights after the first step.
    assert (code, result["difference"]["step"]) == (1, 2)


@pytest.mark.slow
def test_repeated_records_train_long_without_engines_through_kills_a_ctrl_c_and_a_resume(
    recorded: LaunchedRun, dump_dir: Path, tmp_path: Path
) -> None:
    keys = ("skip.async_rollout.action=repeat", "skip.async_rollout.engines=auto", "data.val_files=[]")
    keys = (*keys, "trainer.save_freq=5", "trainer.save_last=true")
    run = launch(tmp_path, dump_dir, *keys, "trainer.total_training_steps=500")
    run.wait_for("step 8/")
    for part in ("rollouter", "trainer", "queue"):
        run.kill(part)
        run.wait_until(lambda part=part: run.recovered(part) == 1, f"recovery of the {part}")
    run.wait_until(lambda: run.state()["step"] >= 4 * STEPS, "steps for which nothing is recorded")
    summary = interrupted_in_order(run)
    assert summary["samples"]["substituted"] >= 16 * (summary["step"] - 2 * STEPS)
    assert {part: count for part, count in summary["restarts"].items() if count} == dict.fromkeys(
        ("rollouter", "trainer", "queue"), 1
    )
    assert summary["tokens"]["generated"] == 0
    total = summary["step"] + 3
    more = (f"trainer.total_training_steps={total}", "resume=auto")
    completed_in_order(launch(tmp_path, dump_dir, *keys, *more, run_dir=run.run_dir), total)


@pytest.mark.slow
def test_a_reward_model_is_served_in_a_run_without_engines(
    recorded: LaunchedRun, dump_dir: Path, tmp_path: Path
) -> None:
    """The replayed responses get other rewards, which is a typical use of recorded samples."""
    run = launch(
        tmp_path,
        dump_dir,
        "skip.async_rollout.engines=auto",
        "data.val_files=[]",
        "trainer.total_training_steps=2",
        "reward_model.placement=serve",
        f"reward_model.path={make_classifier(tmp_path / 'classifier')}",
    )
    assert run.wait() == 0, run.output()
    assert "no engines: all 32 samples are recorded" in run.output()
    before, after = recorded.steps()[:2], run.steps()
    assert [step["actor/loss"] for step in after] != [step["actor/loss"] for step in before]
    assert run.summary()["samples"]["replayed"] == 32
    code, result = diff(recorded, run)
    assert (code, result["difference"]["step"]) == (1, 1)
    assert "rewards" in result["difference"]["names"]
    assert run.survivors() == []


@pytest.mark.slow
def test_reference_log_probs_and_a_class_for_verls_interface_are_replayed(
    every_role: LaunchedRun, tmp_path: Path
) -> None:
    grades = every_role.run_dir.parent / "roles.grade" / "grades"
    files = {path: path.stat().st_mtime_ns for path in grades.iterdir()}
    assert len({path.name.partition("-")[0] for path in files}) >= len(trained_on(every_role)) == 64
    replayed = replay(every_role, tmp_path, roles=["ref_log_prob", "roles.grade"])
    assert diff(every_role, replayed) == (0, {"steps": 4, "difference": None})
    assert {path: path.stat().st_mtime_ns for path in grades.iterdir()} == files, "no grade was written again"
    assert every_role.summary()["skip"]["grade"]["recorded"] >= 64
    counts = replayed.summary()["skip"]
    assert (counts["ref_log_prob"], counts["grade"]["replayed"] >= 64) == ({"replayed": 4}, True)
