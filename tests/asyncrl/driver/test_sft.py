"""`asyncrl sft` from its arguments to its files, with the ranks in this process instead of Ray's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.driver import launch as launch_module
from asyncrl.driver.resume import find_resume
from asyncrl.observe.status.summary import read_summary
from tests.fakes.command_line import CommandLine
from tests.fakes.inline_group import InlineGroup
from trainer.workers import group as group_module
from trainer.workers.placement import plan_groups

ROWS = [f'{{"prompt": "{left}+{right}=", "response": "#{left + right}"}}\n' for left in range(6) for right in range(4)]


class InlineGroups:
    """`TrainerGroups` in this process. `before_step` is called before each step."""

    before_step: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(self, actor: InlineGroup) -> None:
        self.roles = {"actor": actor}

    @classmethod
    async def start(cls, config: Config, *, run_dir: Path) -> InlineGroups:
        (plan,) = plan_groups(config)
        assert [role.role for role in plan.roles] == ["actor"]
        spec = plan.roles[0].spec_on("cpu")
        assert spec.temperature == 1.0
        actor = await InlineGroup.start(spec)
        call, steps = actor.call, 0

        async def counted(method: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            if method == "train_batch":
                steps += 1
                cls.before_step(steps)
            return await call(method, *args, **kwargs)

        actor.call = counted  # type: ignore[method-assign]
        return cls(actor)

    async def end_traces(self, step: int) -> None:
        await self.roles["actor"].end_traces(step)

    async def watch(self, probe_s: float) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        await self.roles["actor"].close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def run(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run `asyncrl sft` on a small configuration with these overrides; returns what it printed."""

    @asynccontextmanager
    async def cluster(config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
        yield name

    monkeypatch.setattr(launch_module, "cluster", cluster)
    monkeypatch.setattr(launch_module, "link_logs", lambda logs: None)
    monkeypatch.setattr(group_module, "TrainerGroups", InlineGroups)
    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(lambda step: None))
    (tmp_path / "train.jsonl").write_text("".join(ROWS[:20]))
    (tmp_path / "val.jsonl").write_text("".join(ROWS[20:]))
    config = {
        "experiment_name": "warm",
        "run_dir": str(tmp_path / "run"),
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "val_files": [str(tmp_path / "val.jsonl")]},
        "sft": {"max_length": 64},
        "trainer": {"strategy": "local", "ppo_mini_batch_size": 5, "total_epochs": 2, "optim": {"lr": 1e-3}},
        # Sections of the launch that follows have no effect here.
        "rollout": {"n": 1, "sampling": {"temperature": 0.7}},
        "algorithm": {"use_kl_loss": True},
    }
    file = tmp_path / "warm.yaml"
    file.write_text(json.dumps(config))
    return lambda *overrides, code=0: cli("sft", str(file), *overrides, code=code).out


def lines(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def test_a_run_leaves_a_model_metrics_and_a_summary(run: Callable[..., str], cli: CommandLine, tmp_path: Path) -> None:
    out = run("trainer.test_freq=4")
    assert "20 rows with " in out and "step 8/8  loss " in out and "validation at step 0: loss" in out
    assert f"model.path={tmp_path}/run/checkpoints/step_000008/hf" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["step"]) == ("completed", None, 8)
    assert summary["rows"] == {"train": 20, "left_out": 0, "validation": 4, "trained": 40}
    steps = lines(tmp_path, "step")
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert summary["tokens"]["trained"] == sum(row["tokens/trained"] for row in steps)
    assert summary["loss"]["last"] == steps[-1]["sft/loss"] < summary["loss"]["first"] == steps[0]["sft/loss"]
    points = [(row["step"], row["validation/loss"]) for row in lines(tmp_path, "validation")]
    assert [step for step, _ in points] == [0, 4, 8]
    assert (summary["validation"]["before"], summary["validation"]["after"]) == (points[0][1], points[-1][1])
    assert points[-1][1] < points[0][1]
    saved = read_summary(tmp_path / "run")
    assert saved is not None and saved.step == 8
    state = cli("status", tmp_path / "run", "--json").json
    assert (state["phase"], state["step"], state["total_steps"]) == ("completed", 8, 8)
    assert state["losses"] == {"train": steps[-1]["sft/loss"], "validation": points[-1][1]}
    assert f"asyncrl eval my_rl.yaml checkpoint={tmp_path}/run" in cli("eval", f"checkpoint={tmp_path}/run", code=2).err
    # The same command again says that it is done; a longer one continues.
    assert "nothing is left to train" in run("resume=auto")
    assert "step 9/12" in run("resume=auto", "trainer.total_epochs=3")
    assert [row["step"] for row in lines(tmp_path, "step")] == list(range(1, 13))
    # A launch does not take it for a run of its own.
    launched = load_config(tmp_path / "warm.yaml", ["resume=auto", "rollout.n=2"])
    with pytest.raises(ConfigError, match=r"was written with sft=.*model\.path=.*/hf starts from its weights"):
        find_resume(launched)


def test_status_why_report_and_show_know_what_kind_of_run_it_is(
    run: Callable[..., str], cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def look(step: int) -> None:
        if step == 3:
            written = json.loads((tmp_path / "run" / "state.json").read_text())
            (tmp_path / "run" / "state.json").write_text(json.dumps(written | {"phase": "running", "step": 2}))
            seen.append(cli("why", tmp_path / "run").out.splitlines()[-1])

    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(look))
    run("trainer.test_freq=4", "profiler.level=off")
    assert seen[0].startswith("ranks are training step 3 for ")
    page = cli("status", tmp_path / "run").out
    assert "step 8/8" in page and "version" not in page and "samples" not in page
    steps, points = lines(tmp_path, "step"), lines(tmp_path, "validation")
    assert f"{steps[-1]['sft/loss']:.4g} train" in page or f"train {steps[-1]['sft/loss']:.4g}" in page
    out = cli("report", tmp_path / "run").out
    assert "a supervised run, completed: 8 of 8 steps" in out and "validation loss" in out
    made = tmp_path / "run" / "report"
    assert {one.name for one in made.iterdir()} == {"index.html", "report.json", "loss.png", "speed.png"}
    found = cli("report", tmp_path / "run", "--json").json
    assert [row["step"] for row in found["steps"]] == list(range(1, 9))
    assert found["steps"][-1]["loss"] == pytest.approx(steps[-1]["sft/loss"], rel=1e-5)
    assert [row["step"] for row in found["validations"]] == [row["step"] for row in points] == [0, 4, 8]
    assert found["run"]["tokens"] == sum(row["tokens/trained"] for row in steps)
    assert f"{found['validations'][-1]['loss']:.4g}" in (made / "index.html").read_text()
    assert "is a supervised run, which samples nothing" in cli("show", tmp_path / "run", code=2).err
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "has no steps to report" in cli("report", tmp_path / "run", code=2).err


def test_ctrl_c_stops_with_a_checkpoint_from_which_the_run_continues(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    async def close(groups: InlineGroups) -> None:
        early.append(json.loads((tmp_path / "run" / "summary.json").read_text()))
        await end(groups)

    early: list[dict[str, Any]] = []
    end = InlineGroups.close
    monkeypatch.setattr(InlineGroups, "close", close)
    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(interrupt))
    out = run(code=130)
    assert (early[0]["status"], early[0]["early_of"]) == ("interrupted", os.getpid()), "in case Ray ends the driver"
    assert "resume=auto continues the run" in early[0]["error"]["message"]
    assert "interrupted after" in out and f"continue it with run_dir={tmp_path}/run resume=auto" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted" and 3 <= summary["step"] < 8
    monkeypatch.setattr(InlineGroups, "close", end)
    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(lambda step: None))
    assert f"steps from step {summary['step']}" in run("resume=auto")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["resumed"]["step"] == summary["step"]
    assert [row["step"] for row in lines(tmp_path, "step")] == list(range(1, 9))


def test_a_failure_is_in_the_summary_and_the_exit_code(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise InfraError("rank 0 died")

    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(fail))
    out = run("trainer.save_freq=2", code=1)
    assert "rank 0 died" in out and "failed after" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["type"], summary["step"]) == ("failed", "InfraError", 3)
    monkeypatch.setattr(InlineGroups, "before_step", staticmethod(lambda step: None))
    assert "steps from step 2" in run("resume=auto")


def test_mistakes_are_named_before_anything_starts(run: Callable[..., str], cli: CommandLine, tmp_path: Path) -> None:
    file = str(tmp_path / "warm.yaml")
    (tmp_path / "train.jsonl").write_text('{"question": "1+2="}\n')
    err = cli("sft", file, code=2).err
    assert "data.train_files = " in err and "line 1: there is neither a field 'messages'" in err
    (tmp_path / "train.jsonl").write_text(ROWS[0])
    err = cli("sft", file, "sft.max_length=3000", code=2).err
    assert "sft.max_length = 3000" in err and "fix: set sft.max_length=1024" in err and "rollout." not in err
    assert "sft.max_lenght" in cli("sft", file, "sft.max_lenght=3", code=2).err
    assert "rollout.m" in cli("sft", file, "rollout.m=3", code=2).err
    assert "comes first" in cli("sft", "trainer.total_epochs=2", code=2).err
    assert not (tmp_path / "run").exists()


def test_help_and_dry_run_teach(cli: CommandLine, run: Callable[..., str], tmp_path: Path) -> None:
    text = cli("sft", "--help").out
    for part in (
        "asyncrl sft my.yaml run_dir=runs/warm resume=auto",
        '{"prompt": "1+2=", "response": "#3"}',
        "sft.turns",
    ):
        assert part in text
    out = cli("sft", str(tmp_path / "warm.yaml"), "--dry-run", "trainer.optim.lr=1e-4").out
    assert "max_length: 64  # warm.yaml" in out and "lr: 0.0001  # command line" in out and "rollout" not in out
