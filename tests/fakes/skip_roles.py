"""Roles of `skip` that record into a directory of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from skip import SkipManager


def recording(directory: Path, role: str, *, settings: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """Return a configuration that records all steps of a built-in role; `settings` are those of the role."""
    section = {"enable": True, "dump_dir": str(directory / "dump"), "steps": "all", **(settings or {})}
    return Config.model_validate({"skip": {role: section}, **sections})


def role_of(directory: Path, role: str, **sections: Any) -> Any:
    """Return the role as `SkipManager.init` makes it."""
    with SkipManager.session(recording(directory, role, **sections)):
        return SkipManager.get(role)


def records_of(directory: Path, role: str) -> Path:
    """Return the directory of the role's records."""
    return directory / "dump" / "asyncrl" / "quickstart" / role
