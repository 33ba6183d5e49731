"""Rules about what rewards are made of: each once broken, and told with key and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import rules
from asyncrl.config.compose import load_config
from asyncrl.config.problems import Problem, errors
from asyncrl.config.reward_rules import part_weights
from asyncrl.failures import ConfigError
from tests.fakes.configurations import changed, looked

TOOLS = {"rollout.multi_turn.enable": True}
JUDGE = {"reward.judge.model": "judge-1", "reward.judge.base_url": "http://127.0.0.1:8000/v1"}
NONE = {"reward.function": "none"}
MODEL = {"reward_model.placement": "serve", "reward_model.path": "rm"}


def more(**fields: Any) -> dict[str, Any]:
    return {"reward.functions": [{"name": "brief", "function": "exact_match", **fields}]}


def ruled(changes: dict[str, Any]) -> list[Problem]:
    return [one for one in rules.problems(changed(changes), set(changes)) if one.key.startswith("reward.")]


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("reward.function", NONE, "nothing else counts"),
    ("reward.function", NONE | TOOLS | {"reward.tool_weight": 0, "reward.turn_weight": 0}, "nothing else counts"),
    ("reward.weight", {"reward.weight": 0}, "no other score counts"),
    ("reward.weight", more(weight=0) | {"reward.weight": 0}, "no other score counts"),
    ("reward.weight", NONE | JUDGE | {"reward.weight": 2.0}, "reward.function is none"),
    ("reward.kwargs", NONE | JUDGE | {"reward.kwargs": {"a": 1}}, "reward.function is none"),
    ("reward.batch", NONE | JUDGE | {"reward.batch": True}, "reward.function is none"),
    ("reward.max_concurrency", NONE | JUDGE | {"reward.max_concurrency": 2}, "no reward function"),
    ("reward.functions.name", more(name="tools"), "a part 'tools' already"),
    ("reward.functions.name", more(name="a b"), "name no metric"),
    ("reward.functions.name", {"reward.functions": more()["reward.functions"] * 2}, "2 functions have this name"),
    ("reward.functions.function", more(function="none"), "would score nothing"),
    ("reward.tool_weight", {"reward.tool_weight": 2.0}, "no tools, users or agents"),
    ("reward.turn_weight", {"reward.turn_weight": 2.0}, "no tools, users or agents"),
    ("reward.judge.weight", {"reward.judge.weight": 2.0}, "reward.judge.model is null"),
    ("reward.judge.base_url", {"reward.judge.model": "judge-1"}, "no endpoint"),
    ("reward.judge.base_url", JUDGE | {"reward.judge.base_url": "localhost:8000"}, "no endpoint"),
    ("reward.judge.min", JUDGE | {"reward.judge.min": 10}, "nothing between them"),
    ("reward.judge.params.model", JUDGE | {"reward.judge.params": {"model": "x"}}, "set for every request"),
    ("reward.judge.prompt", JUDGE | {"reward.judge.prompt": "Is {question} hard?"}, "not see what it judges"),
    ("reward.judge.pattern", JUDGE | {"reward.judge.pattern": "("}, "no regular expression"),
    ("reward.judge.pattern", JUDGE | {"reward.judge.pattern": r"\d"}, "no group"),
]

SURPRISING: list[tuple[str, dict[str, Any]]] = [
    ("reward.judge.weight", JUDGE | {"reward.judge.weight": 0}),
    ("reward.judge.prompt", JUDGE | {"reward.judge.prompt": "{response} {truth}"}),
]

FINE: list[dict[str, Any]] = [
    {},
    NONE | JUDGE,
    NONE | TOOLS,
    NONE | MODEL,
    NONE | more(),
    {"reward.weight": 0} | more(),
    {"reward.weight": 0} | TOOLS,
    TOOLS | {"reward.tool_weight": 0.5, "reward.turn_weight": 0},
    JUDGE | {"reward.judge.prompt": '{conversation} {"json": 1}', "reward.judge.min": -1},
]


@pytest.mark.parametrize(("key", "changes", "told"), BROKEN, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(BROKEN)])
def test_a_reward_that_cannot_work(key: str, changes: dict[str, Any], told: str) -> None:
    found = ruled(changes)
    assert [problem.key for problem in errors(found)] == [key]
    assert told in found[0].consequence
    assert found[0].fix


@pytest.mark.parametrize(("key", "changes"), SURPRISING, ids=[key for key, _ in SURPRISING])
def test_a_reward_that_surprises(key: str, changes: dict[str, Any]) -> None:
    assert [(problem.key, problem.severity) for problem in ruled(changes)] == [(key, "warning")]


@pytest.mark.parametrize("changes", FINE, ids=[str(number) for number in range(len(FINE))])
def test_a_reward_that_is_fine(changes: dict[str, Any]) -> None:
    assert ruled(changes) == []


def test_a_slow_judge_is_watched() -> None:
    found = rules.problems(changed(JUDGE | {"reward.judge.timeout_s": 1e6}), set())
    assert any("reward.judge.timeout_s" in problem.consequence for problem in found)


def test_the_parts_of_a_reward() -> None:
    assert part_weights(changed({"reward.weight": 2.0})) == {"rule": 2.0}
    everything = more(weight=0.5) | TOOLS | JUDGE | MODEL | {"reward.tool_weight": 3.0, "reward_model.weight": 4.0}
    parts = {"rule": 1.0, "brief": 0.5, "tools": 3.0, "turns": 1.0, "judge": 1.0, "model": 4.0}
    assert part_weights(changed(everything)) == parts
    assert part_weights(changed(NONE | {"rollout.agent.program": "agent.py:run"})) == {"tools": 1.0, "turns": 1.0}


def test_further_functions_and_the_judges_key_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def score(**row): return 0.0\n")
    monkeypatch.delenv("JUDGE_KEY", raising=False)

    def found(changes: dict[str, Any]) -> list[tuple[str, str]]:
        return [(one.key, one.fix) for one in looked(changes) if one.key.startswith("reward.")]

    assert found(more(function=f"{tmp_path / 'own.py'}:score") | NONE) == []
    ((key, fix),) = found(more(function=f"{tmp_path / 'own.py'}:scor"))
    assert (key, fix) == ("reward.functions.function", "did you mean score?")
    ((key, fix),) = found(JUDGE | {"reward.judge.api_key_env": "JUDGE_KEY"})
    assert key == "reward.judge.api_key_env"
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert found(JUDGE | {"reward.judge.api_key_env": "JUDGE_KEY"}) == []


def test_they_are_written_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [quickstart]\n"
        "reward:\n"
        "  functions: [{name: brief, function: exact_match, weight: 0.5}]\n"
        "  judge: {model: judge-1, base_url: 'http://127.0.0.1:8000/v1', params: {temperature: 0}}\n"
    )
    reward = load_config(file).reward
    assert (reward.functions[0].name, reward.functions[0].weight) == ("brief", 0.5)
    assert reward.judge.params == {"temperature": 0}
    file.write_text("defaults: [quickstart]\nreward: {functions: [{name: brief, function: exact_match, wait: 0.5}]}\n")
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        load_config(file)
