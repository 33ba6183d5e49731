"""The quickstart's configuration with changed keys, and its problems."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from asyncrl.config.compose import load_config
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.rules import Scope, check_environment, check_rules
from asyncrl.config.schema import Config


@cache
def _quickstart() -> str:
    return load_config().model_dump_json()


def config_with(changes: Mapping[str, Any]) -> Config:
    """Return the quickstart's configuration with dotted keys changed; only its types are checked."""
    tree = json.loads(_quickstart())
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    return Config.model_validate_json(json.dumps(tree))


def rule_problems(changes: Mapping[str, Any], prefix: str = "") -> list[ConfigProblem]:
    """Return the problems that rules between keys report for keys with a prefix."""
    return [one for one in check_rules(config_with(changes), set(changes)) if one.key.startswith(prefix)]


def machine_problems(changes: Mapping[str, Any], *, scope: Scope = "run") -> list[ConfigProblem]:
    """Return the problems that checks of this machine report."""
    return check_environment(config_with(changes), scope=scope)


def single(problems: Iterable[ConfigProblem]) -> ConfigProblem:
    (problem,) = problems
    return problem
