"""What is known of a run's health at one moment. Pure values; what could not be found out is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """One process, as it tells of itself. Of a replica's engine: all of its processes together."""

    rss_bytes: int
    """Resident memory, with pages that it shares: what it has mapped from the object store counts here too."""
    cpu: float = 0.0
    """CPUs that it kept busy since it was looked at last."""
    lag_s: float | None = None
    """Longest standstill of its event loop in the last 10 s; None: it has none, or none that is watched."""
    dropped_events: int = 0
    """Profiling events that it could not keep itself, since it started; not what others dropped that send it theirs."""
    unsent_events: int = 0
    """Profiling events that the OTLP endpoint did not take from it, since it started."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine was doing at its last step, as vLLM says."""

    running: int = 0
    """Requests that are being decoded."""
    waiting: int = 0
    """Requests that its scheduler holds back."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache that is taken."""
    preemptions: int = 0
    """How often it threw out a running request to make room, since it started; what that had computed is computed
    again."""


@dataclass(frozen=True, slots=True)
class MachineHealth:
    """The driver's machine, and the disk of the run directory."""

    memory_bytes: int
    memory_available_bytes: int
    cpu: float = 0.0
    """Share of all its CPUs that was busy since it was looked at last."""
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that has been told, and is not well again."""

    key: str
    """Kind and subject: `lag/rollouter`."""
    since: float
    """When it began, wall clock."""
    text: str
    """What is wrong and what helps."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """Of a whole run. `replica-<id>`, `rank-<group>-<number>`: the names that files of events have."""

    processes: Mapping[str, ProcessHealth] = field(default_factory=dict)
    """`driver`, `queue`, `store`, `rollouter`, `trainer`, `rank-<group>-<number>`, `replica-<id>`, `engine-<id>`."""
    engines: Mapping[str, EngineLoad] = field(default_factory=dict)
    """By replica."""
    machine: MachineHealth | None = None
    object_store_share: float | None = None
    """Of the node whose object store is fullest: bytes that must stay in memory or be spilled, of its capacity."""
    problems: tuple[Problem, ...] = ()
