"""What the built-in environments are told in `InteractionConfig.config`, checked before the first trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pydantic

from asyncrl.config.sections.base import Section
from asyncrl.failures import ConfigError
from rollouter.user_code import nearest

S = TypeVar("S", bound=Section)


def parse(kind: type[S], config: Mapping[str, Any]) -> S:
    """`config` as `kind`.

    Raises:
        ConfigError: an unknown key, one that is missing, or a value of the wrong type.
    """
    if unknown := [name for name in config if name not in kind.model_fields]:
        names = list(kind.model_fields)
        raise ConfigError(f"{unknown[0]}: there is no such key, so it would have no effect{nearest(unknown[0], names)}")
    try:
        return kind.model_validate(dict(config))
    except pydantic.ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "missing":
            raise ConfigError(f"{key}: it is required here and was not given") from error
        raise ConfigError(f"{key}: {detail['input']!r} cannot be used: {detail['msg']}") from error
