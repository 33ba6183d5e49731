"""The quickstart's configuration with keys changed, and what the checks say of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.config import checks
from asyncrl.config.compose import load_config
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config


def changed(changes: Mapping[str, Any]) -> Config:
    """With dotted keys changed, typed but not checked."""
    tree = load_config().model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    return Config.model_validate_json(json.dumps(tree))


def looked(changes: Mapping[str, Any], *, serve_only: bool = False) -> list[Problem]:
    return checks.problems(changed(changes), serve_only=serve_only)


def only(found: list[Problem]) -> Problem:
    (problem,) = found
    return problem
