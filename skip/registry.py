"""Which class has which role."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

from asyncrl.failures import ConfigError
from skip.base import BaseSkip

_Kind = TypeVar("_Kind", bound=type[BaseSkip])
_registry: dict[str, type[BaseSkip]] = {}


def register_skip(role: str) -> Callable[[_Kind], _Kind]:
    """Class decorator: `SkipManager.init` makes one of it where the configuration enables `role`.

    A file that is imported under two names registers its class twice, and the later one counts.

    Raises:
        ConfigError: another class has this role.
    """

    def register(kind: _Kind) -> _Kind:
        known = _registry.get(role)
        if known is not None and _origin(known) != _origin(kind):
            raise ConfigError(
                f"the skip role {role} is registered by {_told(known)} and by {_told(kind)}: give one of them another "
                "name, or leave its module out of skip.modules"
            )
        _registry[role] = kind
        return kind

    return register


def registered() -> Mapping[str, type[BaseSkip]]:
    """Every role there is, by name."""
    return dict(_registry)


def _origin(kind: type[BaseSkip]) -> tuple[str, str]:
    try:
        file = inspect.getsourcefile(kind) or kind.__module__
    except (OSError, TypeError):  # it was not made in a file
        file = kind.__module__
    return file, kind.__qualname__


def _told(kind: type[BaseSkip]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
