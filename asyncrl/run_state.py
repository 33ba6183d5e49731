"""What is going on in a run, as one value: the driver writes it into `state.json` of the run directory every second or
two, and `asyncrl status` and `asyncrl why` read it there, of live runs and of dead ones. Pure.

All times are wall clock (`time.time`), so that processes and machines can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from asyncrl.failures import ConfigError
from asyncrl.health.facts import RunHealth
from asyncrl.ports import Books, Edition, PartName, QueueStatus, ReplicaReport
from asyncrl.waits import Wait

SCHEMA_VERSION = 1
FILE_NAME = "state.json"

Phase = Literal["starting", "running", "stopping", "completed", "failed", "interrupted"]
ENDED: tuple[Phase, ...] = ("completed", "failed", "interrupted")
"""Phases that nothing follows."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A part that was replaced while the rest of the run lived on."""

    part: PartName
    incarnation: int
    """Of the new one; the first of all is 1."""
    failed_at: float
    cause: str
    """In one line."""
    recovered_at: float | None = None
    """When the new one was at work: the Rollouter pumps, the Trainer leases, the queue or the store answers, the
    replica serves. None: not yet."""
    detail: str = ""
    """What it went back to or gave back, for people: `back to step 40 (version 5)`, `12 samples fed again`."""


class ProcessInfo(NamedTuple):
    """One process of the run."""

    part: Literal["driver", "queue", "store", "rollouter", "trainer", "rank", "replica", "engine"]
    name: str
    """`queue`, `rank actor/0`, `replica abc123`, …"""
    pid: int
    node_id: str
    """Ray's, empty for the driver."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything at one moment. What is not known yet has its default."""

    written_at: float
    started_at: float
    pid: int
    """The driver's."""
    phase: Phase
    experiment: str
    mode: str
    namespace: str = ""
    """Ray's."""
    host: str = ""
    """The driver's machine, as it calls itself (`socket.gethostname`)."""
    ray_address: str | None = None
    """None: a private cluster, which ended with the driver."""
    error: str = ""
    total_steps: int | None = None
    samples_per_lease: int = 0
    """What the Trainer waits for, at most; 0: not known."""
    step: int = 0
    version: int = 0
    """The Trainer's newest."""
    lineage: int = 0
    published: Edition | None = None
    """The weight store's newest."""
    books: Books = field(default_factory=Books)
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Trained samples by their staleness in versions, over the whole run."""
    generated_tokens: int = 0
    """For training, since the run began."""
    generated_per_s: float | None = None
    """Tokens, over the last 20 s."""
    trained_per_s: float | None = None
    """Likewise."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """What the Rollouter dropped, by kind, in words."""
    queue: QueueStatus | None = None
    replicas: tuple[ReplicaReport, ...] = ()
    num_replicas: int = 1
    """As configured."""
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)
    """`trainer`, `rollouter` → what it waits on, the longest first."""
    unheard_s: Mapping[str, float] = field(default_factory=dict)
    """`queue`, `store`, `rollouter`, `trainer` → seconds since it last answered; parts that answer are not in it."""
    restarting: Mapping[str, float] = field(default_factory=dict)
    """`rollouter`, `trainer`, where the driver replaces it → since when."""
    restarts: tuple[Restart, ...] = ()
    """The newest."""
    earlier_restarts: Mapping[PartName, int] = field(default_factory=dict)
    """How many there were before those, by part."""
    processes: tuple[ProcessInfo, ...] = ()
    last_progress_at: float = 0.0
    health: RunHealth = field(default_factory=RunHealth)


def dump(state: RunState) -> dict[str, Any]:
    """`state` as plain JSON values, with the schema's version; dataclasses and named tuples become objects."""
    return {"schema_version": SCHEMA_VERSION, **_plain(state)}


def load(raw: Any, where: str = FILE_NAME) -> RunState:
    """What `dump` gave, back; `where` it was, for the message.

    Raises:
        ConfigError: it is of another schema, or is no such thing.
    """
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise ConfigError(f"{where} is damaged: it is no state of a run. What the run was doing cannot be told.")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where} has schema version {version}, this asyncrl reads {SCHEMA_VERSION}: it cannot know what it "
            "means. Look at the run with the asyncrl that wrote it."
        )
    try:
        return _adapter().validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{where} is damaged: {key}: {first['msg']}. What the run was doing cannot be told."
        ) from None


@cache
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
