"""The command line: its output, its exit codes, and the modules that it does not load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from asyncrl import __version__
from asyncrl.cli.main import main
from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, InfraError
from tests.fakes.command_line import CommandLine, in_subprocess

HEAVY = {"torch", "ray", "vllm", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("arguments", "code", "most_modules"),
    [
        (("launch", "fully_async", "--dry-run"), 0, 800),
        (("launch", "sync", "mode_b_stream_off_policy", "--dry-run", "--json"), 0, 800),
        (("launch", "fully_async", "rollout.m=1"), 2, 650),
        (("launch", "fully_async", "data.train_files=[nope.jsonl]"), 2, 650),
        (("--help",), 0, 200),
    ],
)
def test_dry_runs_and_bad_configs_load_few_modules(arguments: tuple[str, ...], code: int, most_modules: int) -> None:
    returned, loaded = in_subprocess(*arguments)
    assert (returned, loaded & HEAVY) == (code, set())
    assert "numpy" not in loaded or "--dry-run" in arguments, "only rows need it"
    assert len(loaded) < most_modules


@pytest.mark.parametrize("module", ["asyncrl", "asyncrl.cli.main"])
def test_the_command_runs_as_a_module(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"asyncrl, version {__version__}")


def test_a_seed_that_no_generator_takes_is_refused_with_its_bound(cli: CommandLine) -> None:
    assert "4294967296" in cli("launch", "fully_async", f"seed={10**28}", "--dry-run", code=2).err
    cli("launch", "fully_async", f"seed={2**32 - 1}", "--dry-run")


def test_dry_run_prints_the_config_and_the_plan(cli: CommandLine) -> None:
    out = cli("launch", "fully_async", "--dry-run", "rollout.n=4").out
    assert "\n  n: 4  # command line\n" in out
    assert "gpu_memory_utilization" not in out, "a default"
    assert "optimizer steps" in out


def test_dry_run_names_the_source_of_each_value(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "own.yaml").write_text("# mine\nentropy_coeff: 0.5\nclip_ratio_low: 0.1\n")
    text = "defaults: [quickstart, {algorithm: own}]\ndata:\n  shuffle: false\nrollout: {n: 6, response_length: 9}\n"
    (tmp_path / "my.yaml").write_text(text)
    arguments = ["my.yaml", "trainer=quickstart", "rollout.n=4", "async_training=mode_c"]
    out = cli("launch", "sync", *arguments, "--dry-run").out.splitlines()
    expected = [
        "  shuffle: false  # my.yaml line 3",
        "  response_length: 9  # my.yaml line 4",
        "  n: 4  # command line",
        "  entropy_coeff: 0.5  # own.yaml line 2",
        "  clip_ratio_low: 0.1  # own.yaml line 3",
        "  strategy: local  # trainer=quickstart",
        "  partial_rollout: false  # async_training=mode_c",
        "  staleness_threshold: 0.0  # asyncrl launch sync",
    ]
    assert [line for line in expected if line not in out] == []
    assert not [line for line in out if line.endswith("# default")]
    full = cli("launch", "fully_async", "dapo", "--dry-run", "--full").out
    assert "experiment_name: dapo  # recipe dapo\n" in full and "\nseed: 0  # default\n" in full
    assert yaml.safe_load(full.partition("\n\n")[0]) == load_config("dapo").public_values()


def test_dry_run_json(cli: CommandLine) -> None:
    answer = cli("launch", "sync", "--dry-run", "--json", "rollout.sampling.top_p=0.9").json
    assert Config.model_validate_json(json.dumps(answer["config"]), strict=True).mode == "sync"
    assert answer["sources"]["rollout.sampling.top_p"] == "command line"
    assert answer["plan"]["samples_per_version"] == answer["plan"]["samples_per_lease"]
    assert [warning["key"] for warning in answer["warnings"]] == ["rollout.sampling.top_p"]


def test_dry_run_json_of_a_bad_config(cli: CommandLine) -> None:
    (problem,) = cli("launch", "fully_async", "--dry-run", "--json", "rollout.m=1", code=2).json["problems"]
    assert problem["key"] == "rollout.m"


@pytest.mark.parametrize("options", [("--dry-run",), ("--dry-run", "--json"), ()])
def test_a_row_that_cannot_be_used_is_refused_before_anything_starts(
    cli: CommandLine, tmp_path: Path, options: tuple[str, ...]
) -> None:
    row = '{"prompt": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}'
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1="}\n' + row)
    out, err = cli("launch", "fully_async", *options, f"data.train_files=[{file}]", code=2)
    text = json.loads(out)["problems"][0]["consequence"] if "--json" in options else err
    assert f"{file}, line 2: field 'prompt[1]' is a message of the assistant" in text
    if "--json" not in options:
        assert re.search(r"data\.train_files = /.*  \(command line\)", err), "long values are shortened"
        assert "fix: correct the row, or remove it" in err


def test_a_bad_config_is_refused_with_key_value_consequence_and_fix(cli: CommandLine) -> None:
    out, err = cli("launch", "fully_async", "rollout.n=1", code=2)
    assert out == ""
    assert "rollout.n = 1  (command line)\n    grpo compares" in err
    assert "fix: set rollout.n to 2 or more" in err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["launch"], "Missing argument"),
        (["launch", "fully_asinc"], "fully_async"),
        (["launch", "fully_async", "--multirun", "rollout.n=4,8"], "once for each value"),
        (["launch", "fully_async", "--json"], "--dry-run"),
        (["launch", "fully_async", "--full"], "--dry-run"),
        (["launch", "fully_async", "--nope"], "--nope"),
        (["nope"], "nope"),
        (["lunch"], "No such command 'lunch'. Did you mean 'launch'?"),
    ],
)
def test_bad_usage(arguments: list[str], error: str, cli: CommandLine) -> None:
    assert error in cli(*arguments, code=2).err


def test_version(cli: CommandLine) -> None:
    assert __version__ in cli("--version").out


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--help"], "asyncrl serve my.yaml"),
        (["launch", "--help"], "asyncrl launch fully_async my.yaml --dry-run"),
        (["serve", "--help"], "asyncrl serve my.yaml serve.port=9000"),
    ],
)
def test_help_has_examples(arguments: list[str], example: str, cli: CommandLine) -> None:
    assert example in cli(*arguments).out


def test_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for outcome, code in (
        ([0], 0),
        ([1], 1),
        ([130], 130),
        (InfraError("no engine"), 1),
        (ConfigError("no"), 2),
        (KeyboardInterrupt(), 130),
    ):
        launch = Mock(side_effect=outcome)
        monkeypatch.setattr("asyncrl.driver.launch.launch", launch)
        assert main(["launch", "sync", f"run_dir={tmp_path}/x"]) == code
        config = launch.call_args.args[0]
        assert (config.mode, config.run_dir) == ("sync", f"{tmp_path}/x")


@pytest.mark.parametrize(
    "override", ["{}=1", "rollout.{}=1", "~{}", "model.path={}", "run_dir={}", "{}", "rollout@{}=1", "seed={{{}"]
)
def test_a_key_or_value_of_any_length_is_shown_in_a_few_lines(cli: CommandLine, override: str) -> None:
    err = cli("launch", "sync", "--dry-run", override.format("x" * 200_000), code=2).err
    assert "xxxxx" in err and len(err) < 6000
