"""What a round of chaos is asked for, and what it has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.accounts import BrokenCall, Violation
from benchmarks.chaos.faults import Strike


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    seed: int
    limit_s: float
    """No new fault after this."""
    num_faults: int | None
    """None: as many as there is time for."""
    targets: tuple[str, ...] | None
    """See `faults.kinds`."""
    work_dir: Path
    """Short: Ray's sockets lie in it."""
    replicas: int = 2
    ranks: int = 1
    two_nodes: bool = True
    calm_s: tuple[float, float] = (1.0, 12.0)
    """From one recovery to the next fault, at least and at most."""
    recover_limit_s: float = 240.0
    """A fault that has not been got over by then is `hung`."""
    start_limit_s: float = 300.0
    finish: bool = True
    """One more launch at the end, to a planned last step."""
    aim: bool = False
    """The medians are held against `summary.AIM_S`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Overrides of the configuration, by key."""


@dataclass(slots=True)
class ChaosOutcome:
    """What the harness has seen."""

    strikes: list[Strike] = field(default_factory=list)
    not_dealt: Counter[str] = field(default_factory=Counter)
    """Why a fault that was due could not be dealt, and how often: `kind: reason`."""
    violations: list[Violation] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    """Launches that ended unasked, with what they said last."""
    launches: int = 0
    gave_up: bool = False
    """The run could not be brought to work any more, so that no further fault was dealt."""
    wall_s: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    lineages: int = 0
    num_turns: int = 0
    """Complete turns whose versions and uniqueness were checked."""
    broken_calls: Sequence[BrokenCall] = ()
    finished: str = ""
    """How the last launch ended."""
