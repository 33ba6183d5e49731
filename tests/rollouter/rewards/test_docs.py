"""The examples of docs/rewards.md work as described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.rules import check_rules
from asyncrl.config.schema import Config
from rollouter.rewards.functions import load_reward_functions
from rollouter.rewards.scorer import CombinedScorer, function_scorer
from tests.fakes.conversations import answer, decode, dialogue, prompt

DOCS = Path(__file__).parents[3] / "docs" / "rewards.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


def config(text: str, tmp_path: Path) -> Config:
    file = tmp_path / "my.yaml"
    file.write_text(text if "defaults:" in text else f"defaults: [quickstart]\n{text}")
    found = check_config(file).config
    assert found is not None
    assert [str(problem) for problem in check_rules(found) if problem.severity == "error"] == []
    return found


async def test_scores_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (python,) = blocks("python")
    (tmp_path / "steps.py").write_text(python)
    mine = config(blocks("yaml")[0], tmp_path)
    scorer = CombinedScorer(function_scorer(mine, load_reward_functions(mine.reward), decode), mine, decode, None)
    called, single = await scorer.score(prompt(), [dialogue("add", "so #22"), answer("#22")])
    assert (called.reward, called.turn_rewards, called.extra) == (1.2, (0.2, 0.0), {"calls": 1.0})
    assert (single.reward, single.turn_rewards, single.extra) == (1.0, (), {"calls": 0.0})


def test_several_functions_and_a_judge(tmp_path: Path) -> None:
    _, several, judge = blocks("yaml")
    assert [entry.weight for entry in config(several, tmp_path).reward.functions] == [0.1, 0.2]
    found = config(judge, tmp_path).reward.judge
    assert (found.min, found.max, "{conversation}" in found.template) == (1.0, 5.0, True)
