"""What happened in a simulated run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One optimizer step."""

    end_s: float
    """Seconds since the start of the run."""
    wait_s: float
    """Wait for the samples of its lease; 0 in later steps of a lease."""
    tokens: int


@dataclass(slots=True)
class SimulationResult:
    """Figures of a simulated run. Shares refer to `wall_s`."""

    wall_s: float = 0.0
    """From the first permit to the end of the last step."""
    steps: list[SimulatedStep] = field(default_factory=list)
    trainer_waits: float = 0.0
    """Share of time in which the Trainer waited for samples."""
    rollouter_idle: float = 0.0
    """Share of time in which no sample was in generation."""
    engines_idle: float = 0.0
    """Share of time in which a replica decoded nothing, over the time of all replicas."""
    replicas: float = 0.0
    """Mean number of replicas."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained samples by their staleness in versions at the lease."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped samples by reason."""
    fed: int = 0
    trained: int = 0
    in_flight: int = 0
    """Samples that were fed and neither trained nor dropped at the end."""
    versions: int = 0
    trained_tokens: int = 0
    """Tokens of all steps."""
    generated_tokens: float = 0.0
    """Sampled tokens, without those of validations."""
    wasted_tokens: float = 0.0
    """Sampled tokens of samples and trajectories that were dropped."""
    busy: list[tuple[float, int]] = field(default_factory=list)
    """Number of replicas that decode, from each of these times on."""
    replicas_from: list[tuple[float, int]] = field(default_factory=list)
    """Number of replicas, from each of these times on."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each wait of the Trainer."""

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / max(1, len(self.steps))

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.trained_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def wasted(self) -> float:
        """Share of the generated tokens that were dropped."""
        return max(0.0, self.wasted_tokens / self.generated_tokens) if self.generated_tokens else 0.0

    def as_numbers(self) -> Mapping[str, float | int | dict[str, int]]:
        """Return the figures that appear in JSON. Shares are in [0, 1]."""
        return {
            "wall_s": round(self.wall_s, 3),
            "steps": len(self.steps),
            "step_s": round(self.step_s, 4),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "trainer_waits": round(self.trainer_waits, 4),
            "rollouter_idle": round(self.rollouter_idle, 4),
            "engines_idle": round(self.engines_idle, 4),
            "replicas": round(self.replicas, 2),
            "mean_staleness": round(self.mean_staleness, 3),
            "max_staleness": self.max_staleness,
            "dropped": dict(sorted(self.dropped.items())),
            "wasted": round(self.wasted, 4),
            "versions": self.versions,
        }
