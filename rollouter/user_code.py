"""What the Rollouter passes to the user's code, and conversions of the values that it returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic

from asyncrl.config.import_path import nearest
from asyncrl.config.sections.base import ConfigSection
from asyncrl.core.failures import AsyncRLError, ConfigError, conceal
from asyncrl.core.text import encodable, safe_repr
from asyncrl.core.types import SampleId

Section = TypeVar("Section", bound=ConfigSection)
MAX_EXTRAS = 100
"""Maximum number of extras that the scores of a trajectory have, and likewise of its metrics."""
MAX_EXTRA_NAME = 200
"""Maximum number of characters of such a name. MLflow accepts 250, with the prefix `reward/extra/`."""


@dataclass(frozen=True, slots=True)
class TrajectoryContext:
    """The trajectory that a tool or an environment is called for."""

    sample_id: SampleId | str
    """The sample's id; in validation the name of its prompt."""
    trajectory: int
    """The trajectory's number within the sample, from 0."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt."""
    data_source: str = "default"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def parse_settings(kind: type[Section], config: Mapping[str, Any]) -> Section:
    """Validate the `config` of a built-in tool or environment.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type.
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


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function or a callable object is `async`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def describe(error: BaseException) -> str:
    """Describe an exception inside another message: an `AsyncRLError` by its message, others with their class."""
    return error.message if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"


LARGEST = 1e15
"""Largest size of a reward or metric. Its square, and sums of such squares, still fit into float32."""


def finite(value: Any) -> float | None:
    """Convert a number of Python or numpy, or a tensor of one element, to float; return None for others, and for those
    that are not finite or larger than `LARGEST`."""
    try:
        number = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(number, str | bytes) else float(number)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def name_of(key: Any) -> str:
    """Return the key of a number that user code gives, as text that can be encoded."""
    return encodable(key if isinstance(key, str) else safe_repr(key))


def check_extras(names: Collection[Any]) -> None:
    """Check the names of extras and metrics of one trajectory, which are reported as `reward/extra/<name>`.

    Raises:
        ValueError: there are too many, or one is not a valid name. The message is a clause.
    """
    if len(names) > MAX_EXTRAS:
        raise ValueError(f"a trajectory has {len(names)} named numbers; at most {MAX_EXTRAS} are allowed")
    for name in names:
        if not (isinstance(name, str) and len(name) <= MAX_EXTRA_NAME and name.isprintable() and _is_path(name)):
            raise ValueError(
                f"a number has the name {shown(name)}; expected at most {MAX_EXTRA_NAME} printable characters, and no "
                "empty part, '.' or '..' between slashes"
            )


def _is_path(name: str) -> bool:
    return not {"", ".", ".."} & set(name.split("/"))


def shown(value: Any, most: int = 120) -> str:
    """Return the `repr` of a value for a message, in at most `most` characters."""
    return shorten(safe_repr(value), most)


def shorten(text: str, most: int = 200) -> str:
    """Return the text in at most `most` characters, and without the beginning of a secret at the cut."""
    text = conceal(text)
    return text if len(text) <= most else text[: most - 3] + "..."
