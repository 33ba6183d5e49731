"""The commands of docs/answers.md work as the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.config.compose import check_config
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


def test_every_answer_has_one_command() -> None:
    assert len(ANSWERS) == 5
    assert {len(commands) for commands in ANSWERS.values()} == {1}


@pytest.mark.parametrize("command", [one for (one,) in ANSWERS.values() if one.startswith("launch")])
def test_launches_are_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    assert main([*dict.fromkeys([*words, "--dry-run"])]) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    for word in words[2:]:
        key, _, value = word.partition("=")
        if value and not value.startswith("["):
            assert f"{key.split('.')[-1]}: {value}" in printed.out
    if "cpu_threads" in command:
        assert "rollout.cpu_threads = 4" in printed.err and "fix: set rollout." in printed.err


async def test_show_prints_the_newest_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = ANSWERS["What did the model write?"]
    run = tmp_path / "runs" / "quickstart" / "20260102-030405"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: 'asyncrl://quickstart'}\n")
    for index in (1, 2):
        await SampleKeeper(run, 200).write(sample(index), prompt(), group(), SCORES)
    assert main(shlex.split(command)) == 0
    assert "sample_0_2 · trajectory 0 of 2" in capsys.readouterr().out


def test_the_served_model_is_configured() -> None:
    (command,) = ANSWERS["How do I use the trained model?"]
    overrides = shlex.split(command)[1:]
    checked = check_config(None, [*overrides, "serve.port=18765"], scope="serve")  # port 8000 may be taken here
    assert checked.problems == ()
