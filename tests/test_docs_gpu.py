"""The README's commands for GPUs use as many as they say, and docs/gpu.md names files that exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from asyncrl.cli import launch
from asyncrl.cli.main import main
from asyncrl.config.resources import threads
from asyncrl.config.resources.plan import GIB, MachineResources
from asyncrl.config.sections import run, trainer_rules
from benchmarks import gpu_smoke

ROOT = Path(__file__).parents[1]
README, PAGE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/gpu.md"))
COMMANDS = re.findall(r"^    asyncrl (launch .+?) +# (\d) GPUs?\b", README, flags=re.MULTILINE)
MINE = """
model: {path: asyncrl://quickstart}
data: {train_files: [asyncrl://quickstart/train.jsonl], max_prompt_length: 64}
reward: {function: exact_match}
trainer: {total_training_steps: 10}
"""


def dry_run(command: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of `--dry-run` on a machine with GPUs."""
    Path("my.yaml").write_text(MINE)
    monkeypatch.setattr(launch, "detect_machine", lambda: MachineResources(64, gpus, 1000 * GIB))
    for module in (trainer_rules, threads, run):
        monkeypatch.setattr(module, "visible_gpus", lambda: gpus)
    return main([*shlex.split(command), "--dry-run", "--json"])


def test_there_is_a_command_for_1_8_and_64_gpus() -> None:
    assert [gpus for _, gpus in COMMANDS] == ["1", "8"]
    slurm = "sbatch --nodes=8 examples/deploy/slurm.sh"  # tests/examples/test_deploy.py
    assert all(page.index("export ASYNCRL_SHARED=") < page.index(slurm) for page in (README, PAGE))


@pytest.mark.parametrize(("command", "gpus"), [(command, int(gpus)) for command, gpus in COMMANDS])
def test_a_command_uses_all_gpus_of_the_machine(
    command: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run(command, gpus, monkeypatch) == 0, capsys.readouterr()
    document = json.loads(capsys.readouterr().out)
    assert sum(part["count"] * part["gpus"] for part in document["plan"]["parts"]) == gpus
    assert document["config"]["rollout"]["dtype"] == "bfloat16"
    assert not [one for one in document["warnings"] if "float32" in one["consequence"]]
    assert dry_run(command, gpus - 1, monkeypatch) == 2


def test_one_gpu_is_the_engines_unless_both_use_it_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dry_run("launch fully_async", 1, monkeypatch) == 0, capsys.readouterr()
    document = json.loads(capsys.readouterr().out)
    assert document["sources"]["trainer.device"] == "the engine has the only GPU"
    assert [one["key"] for one in document["warnings"]] == ["trainer.device", "rollout.dtype"]
    assert "placement=colocated" in document["warnings"][0]["fix"]
    assert dry_run("launch sync placement=colocated", 1, monkeypatch) == 0, "the good way is valid"
    assert json.loads(capsys.readouterr().out)["config"]["trainer"]["device"] == "auto"
    parts = document["plan"]["parts"]
    assert {part["name"]: part["gpus"] for part in parts if part["computes"]} == {"engine (vLLM)": 1, "policy rank": 0}


def test_the_page_lends_gpus_also_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^    asyncrl (launch .+ \\\n.+lend_after_s.+)$", PAGE, flags=re.MULTILINE)
    assert dry_run(command.replace("\\\n", ""), 8, monkeypatch) == 0, capsys.readouterr()
    document = json.loads(capsys.readouterr().out)
    assert sum(part["count"] * part["gpus"] for part in document["plan"]["parts"]) == 8
    assert not [one for one in document["warnings"] if one["key"] == "trainer.lend_after_s"]


def test_the_page_has_the_commands_of_the_readme_and_names_files_that_exist() -> None:
    for command, _ in COMMANDS:
        assert f"`{command.partition('my.yaml ')[2]}`" in PAGE
    folder = ""
    for name in re.findall(r"`((?:tests/)?[\w/]+\.py)`", PAGE):
        folder = name.rpartition("/")[0] or folder  # a name without a folder is in that of the name before it
        assert (ROOT / folder / name.rpartition("/")[2]).is_file(), name


def test_the_page_runs_the_check_in_the_environment_and_names_the_torch_of_the_project() -> None:
    assert re.search(r"^    \.venv/bin/python -m benchmarks\.gpu_smoke", PAGE, flags=re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = [one.partition("==")[2] for one in project["dependencies"] if one.startswith("torch==")]
    assert f"torch {torch} on Linux" in PAGE


def test_nothing_is_claimed_as_proven_while_the_page_says_that_nothing_is() -> None:
    assert "**This project has not run on a GPU yet.**" in PAGE
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.count("|") >= 5 and "GPU |" not in line]
    proven = [row[0] for row in rows if "---" not in row[0] and row[1] not in ("–", "not built", "on GPUs")]
    assert proven == ["| predictions for 64 GPUs (`asyncrl simulate`)"]  # figures of others
    missing = [row.name for row in gpu_smoke.ROWS if row.missing]
    assert missing == ["weights: ipc"] and PAGE.count("| not built |") == 1
