"""The YAML file of tools that `rollout.multi_turn.tool_config_path` names, in asyncrl's form or in verl's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.foreign_keys import of_verl
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.yaml_files import load_yaml

_TURNS = "rollout.multi_turn"
TOOLS, TOOL_FILE = f"{_TURNS}.tools", f"{_TURNS}.tool_config_path"


def add_tool_file(composed: Any) -> ConfigProblem | None:
    """Add the entries of the file to the tools of a composed configuration (a `DictConfig`), and return what is wrong.

    The configuration is complete then: other nodes do not need the file, and its classes travel to them like all code
    of the user's.
    """
    from omegaconf import OmegaConf, open_dict

    turns = OmegaConf.select(composed, _TURNS)
    path = turns.get("tool_config_path") if OmegaConf.is_dict(turns) and turns.get("enable") is True else None
    if not isinstance(path, str):
        return None
    try:
        entries = tool_entries(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        fix = f"give a YAML file with a list `tools`, whose entries are like those of {TOOLS}"
        return ConfigProblem(TOOL_FILE, path, f"it cannot be used: {error}", fix)
    with open_dict(composed):
        turns.tools = [*(turns.get("tools") or ()), *entries]
        turns.tool_config_path = None
    return None


def tool_entries(file: str) -> list[dict[str, Any]]:
    """Return the entries of the file as entries of `rollout.multi_turn.tools`. Blocking.

    A class of verl that asyncrl has too gets its name here. It keeps its `tool_schema`, whose name rows use in their
    `tools_kwargs`, and loses its `config`, which is that of verl's class. `config.type: native` has no counterpart,
    because a server is `mcp` here.

    Raises:
        OSError, ValueError, yaml.YAMLError: the file cannot be read, or is of another form.
    """
    content = load_yaml(Path(file).expanduser())
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("it has no list `tools`")
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("config") or {}, Mapping):
            raise ValueError(f"tools.{number} is {entry!r}; an entry has `class_name`, `function` or `mcp`")
    return [_entry(entry) for entry in entries]


def _entry(given: Mapping[str, Any]) -> dict[str, Any]:
    table = of_verl(f"actor_rollout_ref.{TOOL_FILE}")
    ours = table.values.get(str(given.get("class_name"))) if table is not None else None
    if ours is not None:
        # verl's search takes a list of queries, so its schema does not fit.
        schema = given.get("tool_schema") if ours != "search" else None
        return {"class_name": ours, **({} if schema is None else {"tool_schema": schema})}
    settings = {key: value for key, value in (given.get("config") or {}).items() if (key, value) != ("type", "native")}
    return {
        **{key: value for key, value in given.items() if key != "config"},
        **({"config": settings} if settings else {}),
    }
