"""The options of a round of chaos, and its observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.faults import InjectedFault
from benchmarks.chaos.promises import BrokenCall, Violation


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    seed: int
    limit_s: float
    """After this time no further fault is injected."""
    num_faults: int | None
    """Number of faults; None: as many as fit into `limit_s`."""
    targets: tuple[str, ...] | None
    """See `faults.kinds`."""
    work_dir: Path
    """A short path, because Ray's sockets are in it."""
    replicas: int = 2
    ranks: int = 1
    two_nodes: bool = True
    small_disk: bool = True
    """Give the run a small disk of its own, if this user may mount one, so that faults can fill it."""
    calm_s: tuple[float, float] = (1.0, 12.0)
    """Minimum and maximum time between a recovery and the next fault."""
    recover_limit_s: float = 240.0
    """After this time without recovery, a run counts as hung."""
    start_limit_s: float = 300.0
    finish: bool = True
    """Launch once more at the end, to a planned last step."""
    aim: bool = False
    """Compare the medians with `summary.AIM_S`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Configuration overrides by key."""


@dataclass(slots=True)
class ChaosOutcome:
    """The observations of the harness."""

    faults: list[InjectedFault] = field(default_factory=list)
    not_injected: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts to inject a fault, by `kind: reason`."""
    violations: list[Violation] = field(default_factory=list)
    ended_launches: list[str] = field(default_factory=list)
    """Launches that ended unexpectedly, with the end of their output."""
    launches: int = 0
    gave_up: bool = False
    """The run could not be restarted, so no further fault was injected."""
    wall_s: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    lineages: int = 0
    num_turns: int = 0
    """Complete turns whose versions and uniqueness were checked."""
    broken_calls: Sequence[BrokenCall] = ()
    last_launch: str = ""
    """How the last launch ended."""
