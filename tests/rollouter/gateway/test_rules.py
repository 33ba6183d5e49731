"""What configurations of agents may say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import rules
from asyncrl.config.compose import examine
from asyncrl.config.problems import errors
from tests.fakes.configurations import changed

OWN = {"rollout.agent.program": "my:agent"}


def keys(changes: Mapping[str, Any]) -> list[str]:
    return [problem.key for problem in errors(rules.problems(changed(changes), set(changes)))]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (OWN | {"rollout.agent.command": ["python"]}, "rollout.agent.command"),
        (OWN | {"rollout.multi_turn.max_user_turns": 3}, "rollout.multi_turn.max_user_turns"),
        (OWN | {"rollout.multi_turn.timeout_s": 3}, "rollout.multi_turn.timeout_s"),
        (OWN | {"rollout.agent.timeout_s": 7200}, "rollout.agent.timeout_s"),
        (OWN | {"serve.host": "0.0.0.0"}, "serve.host"),
        ({"rollout.multi_turn.format": "mistral"}, "rollout.multi_turn.format"),
        ({"rollout.agent.max_concurrency": 3}, "rollout.agent.max_concurrency"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: Mapping[str, Any], key: str) -> None:
    assert key in keys(changes)


@pytest.mark.parametrize(
    "changes",
    [
        OWN,
        OWN | {"rollout.multi_turn.format": "mistral", "rollout.multi_turn.tokenization_sanity_check_mode": "strict"},
        OWN | {"reward.function": "none", "serve.host": "0.0.0.0", "serve.api_key_env": "MINE"},
        OWN | {"rollout.agent.timeout_s": 60, "rollout.agent.max_concurrency": 2},
    ],
)
def test_what_makes_sense_is_taken(changes: Mapping[str, Any]) -> None:
    assert keys(changes) == []


@pytest.mark.parametrize("example", ["openai_agent", "subprocess_agent"])
def test_the_examples_configurations_are_good(example: str) -> None:
    root = Path(__file__).parents[3]
    examined = examine(str(root / "examples" / example / "config.yaml"), [], mode="fully_async")
    assert errors(examined.problems) == []
