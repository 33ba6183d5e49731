"""The base class of all sections of the configuration, and the number types of their keys."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Threads = Annotated[int, Field(gt=0), "auto"]
"""A number of threads; `auto` is replaced by a number before validation (`asyncrl.config.resources.threads`)."""
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Every generator of random numbers takes such a seed."""
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
ImportPath = Annotated[str, Field(pattern=r"^.+:[^:]+$")]
"""A user's own part: `module:name` or `path/file.py:name` (`asyncrl.config.import_path`)."""
FileNames = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else tuple(value) if type(value) is list else value
    ),
]
"""Names of files; a single one may be given without a list."""
# YAML reads a bare `off` as false.
Switch = Annotated[
    Literal["on", "off"],
    BeforeValidator(lambda value: {True: "on", False: "off"}[value] if value in (True, False) else value),
]


_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_LABEL = re.compile(rf"({_NAME}/)?{_NAME}")
_SELECTED = re.compile(rf"!?({_NAME}|in\({_NAME}(,{_NAME})*\))")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for name, selected in labels.items():
        if not _LABEL.fullmatch(name) or not _SELECTED.fullmatch(selected):
            raise ValueError(
                f"{name}: {selected!r} is no label selector of Ray; give the name of a label and a value, !value, "
                "in(value,value) or !in(value,value)"
            )
    return labels


NodeLabels = Annotated[dict[str, str], AfterValidator(_check_labels)]
"""A label selector of Ray: names of labels, and what their values have to be."""


class ConfigSection(BaseModel):
    """A group of keys. Unknown keys and non-finite numbers are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )


class NodePool(ConfigSection):
    """The nodes of a cluster on which a part of the run is placed."""

    nnodes: Positive | None = None
    """Number of nodes of the part; null: as many as its processes need. Give it together with `n_gpus_per_node`."""
    n_gpus_per_node: Positive | None = None
    """Number of GPUs (on CPU: of processes) of the part on each of these nodes. The two keys set the number of
    processes (with `rollout.autoscaling` the maximum), and with `ray.autoscaling` also `device=cuda`, unless these are
    given, too."""
    node_labels: NodeLabels = Field(default_factory=dict)
    """Labels of the nodes that may be used, as a label selector of Ray: `{pool: rollout}`, `{zone: in(a,b)}`,
    `{spot: "!true"}`. `ray start --labels` gives a node its labels."""

    @property
    def num_processes(self) -> int | None:
        """The number of processes that `nnodes` and `n_gpus_per_node` ask for; None if they do not give it."""
        return self.nnodes * self.n_gpus_per_node if self.nnodes and self.n_gpus_per_node else None


def on_gpus(device: Device, present: bool) -> bool:
    """Return whether a part with this `device` runs on GPUs; `present`: the machine or the cluster has GPUs now."""
    return device == "cuda" or (device == "auto" and present)
