"""The commands of docs/answers.md work as the page says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from asyncrl.assets import resolve
from asyncrl.cli.main import main
from asyncrl.config.compose import check_config, load_config, to_yaml
from asyncrl.config.problems import errors
from asyncrl.config.sections import observe
from rollouter.trajectory_dump import SampleKeeper
from tests.fakes.dumped import SCORES, group, prompt, sample

PAGE = (Path(__file__).parents[1] / "docs" / "answers.md").read_text(encoding="utf-8")
ANSWERS = {
    heading: re.findall(r"^    asyncrl (.+)$", text, flags=re.MULTILINE)
    for heading, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(observe, "is_installed", lambda module: True)  # the optional packages of sinks


DOCS = Path(__file__).parents[1] / "docs"


def test_every_answer_has_one_command() -> None:
    assert len(ANSWERS) == 12
    assert {len(commands) for commands in ANSWERS.values()} == {1}


@pytest.mark.parametrize(
    "command", [one for (one,) in ANSWERS.values() if one.startswith("launch") and "runs/first" not in one]
)
def test_launches_are_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    Path("mine.py").write_text("\n\n".join(one for one in examples if "def " in one and "class " not in one))
    assert main([*dict.fromkeys([*words, "--dry-run"])]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    for word in words[2:]:
        key, _, value = word.partition("=")
        if value and not value.startswith("["):
            assert f"{key.split('.')[-1]}: {value}" in printed.out
    if "cpu_threads" in command:
        assert "rollout.cpu_threads = 4" in printed.err and "fix: set rollout." in printed.err


def checkpoint(step: int) -> Path:
    """Return a checkpoint of the run runs/first, whose export is the shipped model."""
    run = Path("runs/first")
    hf = run / "checkpoints" / f"step_{step:06d}" / "hf"
    shutil.copytree(resolve("asyncrl://quickstart"), hf)
    (run / "config.yaml").write_text(to_yaml(load_config("quickstart", ["data.max_val_samples=8"])))
    return hf


def test_an_evaluation_finds_the_newest_checkpoint_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(1), checkpoint(2)
    (command,) = ANSWERS["How do I only evaluate?"]
    assert main([*shlex.split(command), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "4 answer(s) per prompt of" in out and "runs/first/checkpoints/step_000002/hf" in out
    assert "temperature: 0.6  # command line" in out and "max_val_samples: 8  # config.yaml" in out


def test_a_run_starts_from_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/e2e/test_checkpoint_commands.py executes it, and the continuation on another number of ranks, for real."""
    (command,) = ANSWERS["How do I start from a checkpoint in Hugging Face format?"]
    (other,) = ANSWERS["How do I continue on another number of ranks?"]
    executed = re.findall(r"```console\nasyncrl (.*?)\n```", (DOCS / "training.md").read_text(encoding="utf-8"))
    assert executed == [command, other]
    assert main([*shlex.split(command), "--dry-run"]) == 2, "there is no such model yet"
    checkpoint(2)
    assert main([*shlex.split(command), "--dry-run"]) == 0
    assert "path: runs/first/checkpoints/step_000002/hf  # command line" in capsys.readouterr().out


def test_a_migrated_configuration_is_one_of_asyncrl(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = ANSWERS["What does migrating from verl take?"]
    arguments, _, target = command.partition(" > ")
    Path("verl.yaml").write_text(
        "data: {train_files: 'asyncrl://quickstart/train.jsonl', train_batch_size: 64, max_response_length: 64}\n"
        "actor_rollout_ref: {model: {path: 'asyncrl://quickstart'}, rollout: {n: 4, tensor_model_parallel_size: 1}}\n"
        "algorithm: {adv_estimator: grpo}\ntrainer: {n_gpus_per_node: 2, total_epochs: 1}\n"
    )
    assert main(shlex.split(arguments)) == 0
    Path(target).write_text(capsys.readouterr().out)
    checked = check_config(target, ["ray.address=auto"])  # what this machine lacks is a warning
    assert checked.config is not None and not errors(checked.problems), checked.problems
    assert checked.config.rollout.n == 4


async def test_show_prints_the_newest_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = ANSWERS["What did the model write?"]
    run = tmp_path / "runs" / "quickstart" / "20260102-030405"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: 'asyncrl://quickstart'}\n")
    for index in (1, 2):
        keeper = SampleKeeper(run, 200)
        async with keeper.running():
            await keeper.write(sample(index), prompt(), group(), SCORES)
    assert main(shlex.split(command)) == 0
    assert "sample_0_2 · trajectory 0 of 2" in capsys.readouterr().out


def test_the_served_model_is_configured() -> None:
    (command,) = ANSWERS["How do I use the trained model?"]
    overrides = shlex.split(command)[1:]
    checked = check_config(None, [*overrides, "serve.port=18765"], scope="serve")  # port 8000 may be taken here
    assert checked.problems == ()
