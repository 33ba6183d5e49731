"""The base class of all sections of the configuration, and the number types of their keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
ImportPath = Annotated[str, Field(pattern=r"^.+:[^:]+$")]
"""A user's own part: `module:name` or `path/file.py:name` (`asyncrl.config.import_path`)."""
# YAML reads a bare `off` as false.
Switch = Annotated[
    Literal["on", "off"],
    BeforeValidator(lambda value: {True: "on", False: "off"}[value] if value in (True, False) else value),
]


class ConfigSection(BaseModel):
    """A group of keys. Unknown keys and non-finite numbers are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )
