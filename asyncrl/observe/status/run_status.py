"""The status of a run as one value, which the driver writes to `state.json` every second or two.

`asyncrl status` and `asyncrl why` read it there, for live runs and for dead ones. All times are wall clock
(`time.time`), so that processes and machines can be compared.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from anyio import to_thread
from pydantic import TypeAdapter, ValidationError

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import PartName, QueueStatus, ReplicaReport, SampleCounts, WeightsVersion
from asyncrl.core.process_health import RunHealth
from asyncrl.core.waits import Wait
from asyncrl.observe.metrics.rows import finite
from asyncrl.storage.run_dir import read_json, replace_file

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

SCHEMA_VERSION = 6
STATE_FILE = "state.json"

RunPhase = Literal["starting", "running", "stopping", "completed", "failed", "interrupted"]
ENDED: tuple[RunPhase, ...] = ("completed", "failed", "interrupted")
"""The final phases."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The replacement of a part while the rest of the run continues."""

    part: PartName
    incarnation: int
    """Number of the new process; the first of the run is 1."""
    failed_at: float
    cause: str
    """The cause in one line."""
    recovered_at: float | None = None
    """When the new process first did its work: the Rollouter generated, the Trainer leased, queue or store answered, or
    the replica served. None until then."""
    detail: str = ""
    """The effect in words: `back to step 40 (version 5)`, `12 samples fed again`."""


class ProcessInfo(NamedTuple):
    """One process of the run."""

    part: Literal["driver", "queue", "store", "rollouter", "worker", "trainer", "rank", "replica", "engine"]
    name: str
    """`queue`, `rank actor/0`, `replica abc123`, …"""
    pid: int
    node_id: str
    """Ray's node id, empty for the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The values of a run that `state.json`, the live view and the summary share; the recorder updates them."""

    total_steps: int | None = None
    counts: SampleCounts = field(default_factory=SampleCounts)
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Trained samples by their staleness in versions, over the whole run."""
    generated_tokens: int = 0
    """Tokens of complete turns for training since the run began, as the Rollouter counts them."""
    trained_tokens: int = 0
    """Tokens that the steps of the surviving model have trained, counted once per pass, as the queue records them."""
    generated_per_s: float | None = None
    """Generated tokens over the last 20 s."""
    trained_per_s: float | None = None
    """Trained tokens over the last 20 s."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Samples that the Rollouter dropped, by reason, in words."""
    restarts: tuple[Restart, ...] = ()
    """The newest restarts."""
    earlier_restarts: Mapping[PartName, int] = field(default_factory=dict)
    """Number of restarts before the newest ones, by part."""
    health: RunHealth = field(default_factory=RunHealth)

    @property
    def replays(self) -> bool:
        """Return whether the Rollouter has only replayed records, so that its idle share means nothing."""
        return self.counts.replayed > 0 and not self.generated_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(RunProgress):
    """The whole run at one moment. Unknown facts have their defaults."""

    written_at: float
    started_at: float
    pid: int
    """Process id of the driver."""
    phase: RunPhase
    experiment: str
    mode: str
    namespace: str = ""
    """The namespace in Ray."""
    host: str = ""
    """Host name of the driver's machine."""
    error: str = ""
    samples_per_lease: int = 0
    """The most samples that a lease of the Trainer has; 0 if it is unknown."""
    step: int = 0
    version: int = 0
    """The Trainer's newest version."""
    lineage: int = 0
    attention: str = ""
    """How the policy's ranks compute attention; empty until they have loaded it."""
    published: WeightsVersion | None = None
    """The weight store's newest version."""
    queue: QueueStatus | None = None
    replicas: tuple[ReplicaReport, ...] = ()
    num_replicas: int = 1
    """The number that the run wants now; of an application to which it has attached, the number that reports."""
    pending_demands: tuple[str, ...] = ()
    """What the run waits for on a shared cluster that has no room."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Newest losses of a supervised run in nats per token: `train` and `validation`."""
    answers: Mapping[str, int] = field(default_factory=dict)
    """Numbers of an evaluation's prompts: `prompts`, `known` from earlier processes, `answered`, `failed`."""
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)
    """Open waits of `trainer` and `rollouter`, the longest first."""
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the last answer of `queue`, `store`, `rollouter` or `trainer`; parts that answer are left out."""
    restarting: Mapping[str, float] = field(default_factory=dict)
    """When the driver began to replace `rollouter` or `trainer`."""
    processes: tuple[ProcessInfo, ...] = ()
    last_progress_at: float = 0.0


class StateFile:
    """Replaces the file atomically at every write, so that a reader sees the old state or the new one.

    A failed write is logged once and never ends a run: the records that must be complete are in other files.
    """

    def __init__(self, path: Path) -> None:
        """`path`: `run_dir / STATE_FILE`."""
        self._path = path
        self._lock = threading.Lock()
        self._warned = False

    async def write(self, state: RunState) -> None:
        """Write in a thread."""
        await to_thread.run_sync(self.write_now, state)

    def write_now(self, state: RunState) -> None:
        """Write. Blocking."""
        with self._lock:
            try:
                replace_file(self._path, as_text(dump(state)))
            except OSError as error:
                if not self._warned:
                    logger.warning("cannot write %s (%s): asyncrl status and why show an old state", self._path, error)
                self._warned = True
            else:
                self._warned = False


def read_state(run_dir: Path) -> RunState | None:
    """Return the newest state of the run, or None if there is none. Blocking.

    Raises:
        ConfigError: the file is torn, damaged or of another schema; the message names it.
    """
    path = run_dir / STATE_FILE
    raw = read_values(path)
    return None if raw is None else load(raw, str(path))


def read_readable_state(run_dir: Path) -> RunState | None:
    """Return the newest state of the run, or None if no file of it can be read. Blocking."""
    try:
        return read_state(run_dir)
    except ConfigError:
        return None


def dump(state: RunState) -> dict[str, Any]:
    """Return `state` as plain JSON values, with the schema's version."""
    return {"schema_version": SCHEMA_VERSION, **finite(state)}


def load(raw: Any, where: str = STATE_FILE) -> RunState:
    """Return the state that `dump` converted to `raw`. `where`: the file, for error messages.

    Raises:
        ConfigError: `raw` has another schema version, or is not the dump of a state.
    """
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise ConfigError(f"{where} is damaged: it is not the state of a run")
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where} has schema version {version}, this asyncrl reads {SCHEMA_VERSION}: inspect the run with the "
            "asyncrl that wrote it"
        )
    return load_values(_adapter(), raw, where)


def read_values(path: Path) -> Any:
    """Return the JSON values of a file of a run; None: there is no such file. Blocking.

    Raises:
        ConfigError: it cannot be read, or is not JSON.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is torn or damaged: {error}") from None


def load_values(adapter: TypeAdapter[Loaded], raw: Any, where: str) -> Loaded:
    """Return the dataclass that is written as the JSON values `raw`. `where`: the file, for error messages.

    Raises:
        ConfigError: a value is missing or of another type.
    """
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where} is damaged: {key}: {first['msg']}") from None


@cache
def _adapter() -> TypeAdapter[RunState]:
    return TypeAdapter(RunState)


def as_text(content: Mapping[str, Any]) -> str:
    """Return `content` as JSON, as it is written to the files of a run."""
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
