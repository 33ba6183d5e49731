"""Measurements of a run's health at one moment. Pure values; unknown ones are None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Health of one process, measured by that process; for an engine, of all its processes together."""

    rss_bytes: int
    """Resident memory, including shared pages such as those mapped from the object store."""
    cpu: float = 0.0
    """Number of CPUs that it kept busy since the last measurement."""
    lag_s: float | None = None
    """Longest time in the last 10 s that its event loop was blocked; None: it has no monitored loop."""
    dropped_events: int = 0
    """Profiling events that this process dropped since it started; events dropped by the processes that send to it
    are not counted."""
    unsent_events: int = 0
    """Profiling events of this process that the OTLP endpoint refused, since it started."""
    cpu_wait: float | None = None
    """Number of its threads that were ready to run and had no CPU, on average since the last measurement; None: the
    kernel does not tell."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine's load at its last step, as vLLM reports it."""

    running: int = 0
    """Requests that are being decoded."""
    waiting: int = 0
    """Requests waiting in its scheduler."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache in use."""
    preemptions: int = 0
    """Running requests evicted (and later recomputed) for lack of KV cache, since the engine started."""


@dataclass(frozen=True, slots=True)
class MachineHealth:
    """The driver's machine, and the disk of the run directory."""

    memory_bytes: int
    memory_available_bytes: int
    cpu: float = 0.0
    """Share of all its CPUs that was busy since the last measurement."""
    disk_free_bytes: int | None = None
    cpus: int = 0
    """Number of CPUs that processes of this machine or container may use; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that was reported and persists."""

    key: str
    """Kind and subject: `lag/rollouter`."""
    since: float
    """When it began, wall clock."""
    text: str
    """The problem and its remedy."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """The health of a whole run. Processes have the names of their event files, such as `replica-<id>`."""

    processes: Mapping[str, ProcessHealth] = field(default_factory=dict)
    """`driver`, `queue`, `store`, `rollouter`, `trainer`, `rank-<group>-<number>`, `replica-<id>`, `engine-<id>`."""
    engines: Mapping[str, EngineLoad] = field(default_factory=dict)
    """By replica."""
    machine: MachineHealth | None = None
    object_store_share: float | None = None
    """Used share of the fullest node's object store; only objects that cannot be evicted without spilling count."""
    problems: tuple[Problem, ...] = ()
