"""The command line: what it says, what it exits with, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl import __version__
from asyncrl.cli.main import main
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError

HEAVY = ("torch", "ray", "vllm", "transformers", "datasets", "numpy")


def in_subprocess(*arguments: str) -> tuple[int, list[str], float]:
    """Exit code, heavy modules loaded, and CPU seconds of a whole process."""
    code = (
        "import sys; from asyncrl.cli.main import main; rc = main(sys.argv[1:]);"
        f"print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules]); sys.exit(rc)"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    loaded = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done.returncode, loaded.split()[1:], seconds


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("launch", "fully_async", "--dry-run"), 0),
        (("launch", "sync", "mode_b_stream_off_policy", "--dry-run", "--json"), 0),
        (("launch", "fully_async", "rollout.m=1"), 2),
        (("launch", "fully_async", "data.train_files=[nope.jsonl]"), 2),
        (("--help",), 0),
    ],
)
def test_dry_runs_and_bad_configs_are_quick_and_load_nothing_heavy(arguments: tuple[str, ...], code: int) -> None:
    returned, loaded, seconds = in_subprocess(*arguments)
    assert (returned, loaded) == (code, [])
    # CPU time, because a busy machine stretches the other; on an idle one the two are the same.
    assert seconds < 2.0


def test_dry_run_prints_the_config_and_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "fully_async", "--dry-run", "rollout.n=4"]) == 0
    out = capsys.readouterr().out
    assert "\n  n: 4\n" in out
    assert "optimizer steps" in out


def test_dry_run_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "sync", "--dry-run", "--json", "rollout.sampling.top_p=0.9"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert Config.model_validate_json(json.dumps(answer["config"]), strict=True).mode == "sync"
    assert answer["plan"]["samples_per_version"] == answer["plan"]["samples_per_lease"]
    assert [warning["key"] for warning in answer["warnings"]] == ["rollout.sampling.top_p"]


def test_dry_run_json_of_a_bad_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "fully_async", "--dry-run", "--json", "rollout.m=1"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == "rollout.m"


def test_a_bad_config_says_key_value_consequence_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "fully_async", "rollout.n=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "rollout.n = 1  (command line)\n    grpo compares" in captured.err
    assert "fix: set rollout.n to 2 or more" in captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["launch"], "Missing argument"),
        (["launch", "fully_asinc"], "fully_async"),
        (["launch", "fully_async", "--multirun", "rollout.n=4,8"], "once for each value"),
        (["launch", "fully_async", "--json"], "--dry-run"),
        (["launch", "fully_async", "--nope"], "--nope"),
        (["nope"], "nope"),
    ],
)
def test_bad_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["serve", "--help"]])
def test_help_of_every_command_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "asyncrl serve" in capsys.readouterr().out or arguments == ["launch", "--help"]


def test_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def stand_in(outcome: int | BaseException) -> SimpleNamespace:
        def launch(config: Config) -> int:
            seen.append(config)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return SimpleNamespace(launch=launch)

    for outcome, code in (
        (0, 0),
        (1, 1),
        (130, 130),
        (InfraError("no engine"), 1),
        (ConfigError("no"), 2),
        (KeyboardInterrupt(), 130),
    ):
        monkeypatch.setitem(sys.modules, "asyncrl.driver.launch", stand_in(outcome))
        assert main(["launch", "sync", f"run_dir={tmp_path}/x"]) == code
    assert all(config.mode == "sync" and config.run_dir == f"{tmp_path}/x" for config in seen)
