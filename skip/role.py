"""The base class of roles, which define how a call becomes a record and how a record becomes the result of a call.

docs/skip.md has an example. The methods of a role block or compute; for an async function they run in a thread.
"""

from __future__ import annotations

import functools
import inspect
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import anyio

import asyncrl
from asyncrl.config.schema import Config
from asyncrl.config.sections.skip import SkipRoleConfig, StepSet
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.profiling import profile
from asyncrl.storage.array_bytes import DamageError
from skip.file_thread import Result, file_thread
from skip.fingerprint import Fingerprint, differing
from skip.record import Content, Origin, Record
from skip.store import RecordFiles, record_name, step_of

logger = logging.getLogger(__name__)

MAX_NOTES = 4096
MAX_DAMAGE_WARNINGS = 10
FILES_LIMIT_S = 60.0
"""Maximum time that an async stage waits for the files of its record."""
Outcome = Literal["replayed", "substituted", "recorded", "mismatched", "damaged", "unrecorded", "late"]
"""What became of a call; each is the metric `skip/<role>/<outcome>`."""


class Waiting(Protocol):
    """The type of `WaitBoard.waiting`."""

    def __call__(self, edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]: ...


class Action(StrEnum):
    CACHE = "cache"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an annotated function."""

    arguments: Mapping[str, Any]
    """Arguments by name, including defaults and `self`."""
    options: Mapping[str, Any]
    """Arguments of `annotate` besides the role."""

    def __getitem__(self, name: str) -> Any:
        """Return an argument. Raises `BugError` if the annotated function has none of this name."""
        if name not in self.arguments:
            raise BugError(f"the annotated function has no argument {name}; it has {', '.join(self.arguments)}")
        return self.arguments[name]


class RecordRequest(NamedTuple):
    """A call at a step that is recorded and replayed."""

    call: Call
    step: int
    name: str
    """Name of its record."""
    fingerprint: Fingerprint


class Served(NamedTuple):
    """A record whose result a call may return."""

    record: Record
    step: int
    """Step of the call."""
    differs: tuple[str, ...]
    """Fields in which the fingerprints differ; only `repeat` serves such a record."""
    result: Any = None
    """Result of `prepare_data` for the record."""

    @property
    def substituted(self) -> bool:
        """Whether the record is of another step than the call, or of another request."""
        return bool(self.differs) or self.record.step != self.step


class BaseSkip(ABC):
    """One role of one run in one process."""

    support_actions: ClassVar[frozenset[Action]] = frozenset(Action)
    support_online_step: ClassVar[bool] = False
    """Whether the step is in the call's arguments (`extract_step`); if not, it is that of `SkipManager.set_step`."""

    def __init__(self, role: str, config: SkipRoleConfig, run: Config) -> None:
        """
        Args:
            role: name of the role.
            config: settings of the role.
            run: configuration of the run, whose project and experiment names determine the directory of the records.

        Raises:
            ConfigError: the role does not support the action. The configuration's rules have checked the steps.
        """
        self.steps = StepSet.parse(config.steps)
        self.action = Action(config.action)
        if self.action not in self.support_actions:
            able, key = " or ".join(sorted(self.support_actions)), f"skip.{role}.action"
            raise ConfigError(f"{key}={self.action}: this role can only {able}; set {key}={able}")
        self.role = role
        self.config = config
        self.run = run
        root = Path(config.dump_dir).expanduser() / run.project_name / run.experiment_name / role
        self.files = RecordFiles(root, mode=run.directory_mode)
        self.counts: Counter[Outcome] = Counter()
        self.waiting: Waiting = lambda edge, *, limit_s=0.0: nullcontext()
        """Reports what an async stage waits for."""
        self.current_step: Callable[[], int | None] = lambda: None
        """The step of `SkipManager.set_step`."""
        self.messages: list[str] = []
        """Warnings so far."""
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._files_lock = threading.Lock()
        """Held during file access, so it is never acquired on an event loop, unlike `_lock`."""
        self._used_bytes: int | None = None
        self._notes: dict[int, dict[str, Any]] = {}
        """Notes on the newest records of this process, by step."""

    # ------------------------------------------------------------------------------------------------ of a role

    def is_enabled(self) -> bool:
        return self.config.enable

    def extract_step(self, call: Call) -> int:
        """Return the step of `call`, if `support_online_step` is true.

        Raises:
            DataError, BugError: the call has no step; the message shows what is expected.
        """
        raise BugError(f"skip.{self.role}: {type(self).__name__} has support_online_step and no extract_step")

    def call_name(self, call: Call) -> str:
        """Return a hexadecimal name that distinguishes the calls of one step; empty if a step has one call."""
        return ""

    @abstractmethod
    def fingerprint(self, call: Call) -> Fingerprint:
        """Return every value that the result of `call` depends on, except chance and the policy's version."""

    @abstractmethod
    def to_content(self, call: Call, result: Any) -> Content:
        """Return the content to record for `result`."""

    @abstractmethod
    def prepare_data(self, call: Call, served: Served) -> Any:
        """Return the result from a record.

        Raises:
            Exception: the record is not one of this role, or does not fit the call; it counts as absent.
        """

    def versions(self, result: Any) -> tuple[int, int] | None:
        """Return the oldest and newest version of the policy that produced `result`; None: no policy did."""
        return None

    # ------------------------------------------------------------------------------------------------ the flow

    def warp_function(self, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return `function`, plain or async, with this role around it. The name is verl's.

            which step?  extract_step(call), or the one of set_step
               not among `steps` ───────▶ run
               a record that may be served ──▶ its result
               else ────────────────────▶ run, then record

        An async function never waits for the disk on its event loop. A read or write that takes longer than
        `FILES_LIMIT_S` is given up: the stage runs as if there were no record, or its result is not recorded. The
        returned function raises the errors of the function and of the role.

        Args:
            options: the value of `Call.options`.
        """
        signature = inspect.signature(function)

        def make_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return Call(bound.arguments, options)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                call, step = make_call(args, kwargs), self.current_step()
                with profile.span("skip.read", role=self.role) as span:
                    found = await self.in_file_thread("read", lambda: self.look_up(call, step))
                    span.add(found=int(found is not None and found[1] is not None))
                if found is None:
                    self.count("late")
                    return await function(*args, **kwargs)
                request, served = found
                if served is not None:
                    return self._counted(served)
                result = await function(*args, **kwargs)
                if request is not None:
                    with profile.span("skip.write", role=self.role):
                        written = await self.in_file_thread("write", lambda: self.write_record(request, result))
                    self.count("late" if written is None else "recorded" if written else "unrecorded")
                return result

            return run_async

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with profile.span("skip.read", role=self.role) as span:
                request, served = self.look_up(make_call(args, kwargs), self.current_step())
                span.add(found=int(served is not None))
            if served is not None:
                return self._counted(served)
            result = function(*args, **kwargs)
            if request is not None:
                with profile.span("skip.write", role=self.role):
                    written = self.write_record(request, result)
                self.count("recorded" if written else "unrecorded")
            return result

        return run

    async def in_file_thread(self, name: str, function: Callable[[], Result]) -> Result | None:
        """Run `function` in the thread for `read` or `write`, and return its result; None: it took too long."""
        with self.waiting("records", limit_s=FILES_LIMIT_S), anyio.move_on_after(FILES_LIMIT_S):
            return await file_thread(name).run(function)
        message = f"{self.files.root}: a record takes longer than {FILES_LIMIT_S:g} s to {name}, and is given up"
        self.warn_once(f"late {name}", message)
        return None

    def look_up(self, call: Call, current_step: int | None) -> tuple[RecordRequest | None, Served | None]:
        """Return the request for `call`, and the record for it. Raises as `request` and `meet_precondition` do."""
        request = self.request(call, current_step)
        return request, None if request is None else self.meet_precondition(request)

    def request(self, call: Call, current_step: int | None) -> RecordRequest | None:
        """Return the request for `call`; None: its step is not recorded, or it has no fingerprint.

        Raises:
            BugError: the step is not known.
            Exception: `extract_step` raised it.
        """
        step = self.extract_step(call) if self.support_online_step else current_step
        if step is None:
            raise BugError(f"skip.{self.role}: the step is unknown; call SkipManager.set_step(step) before this stage")
        if step not in self.steps:
            return None
        try:
            return RecordRequest(call, step, record_name(step, self.call_name(call)), self.fingerprint(call))
        except Exception as error:  # noqa: BLE001  a role may raise anything; only the record is lost
            self.count("unrecorded")
            message = f"step {step} of {self.role} has no fingerprint, so it is not recorded: {_describe(error)}"
            self.warn_once("fingerprint", message)
            return None

    def may_serve(self, served: Served) -> bool:
        """Return whether the record may be served: with `repeat` any, with `cache` one with the same fingerprint."""
        return not served.differs or self.action is Action.REPEAT

    def meet_precondition(self, request: RecordRequest) -> Served | None:
        """Return the record to serve, checked and prepared; None: the stage has to run.

        Raises:
            ConfigError: the record has another fingerprint, and `on_mismatch` is `error`.
        """
        for name in self._candidates(request):
            if (record := self._read(name)) is None:
                continue
            served = Served(record, request.step, differing(record.fingerprint, request.fingerprint))
            if not self.may_serve(served):
                if self.action is Action.CACHE:
                    self._mismatch(name, served, request.fingerprint)
                continue
            try:
                return served._replace(result=self.prepare_data(request.call, served))
            except Exception as error:  # noqa: BLE001  as in `request`
                # An intact record of another call may not fit this one.
                if not served.substituted:
                    self._damaged(name, error)
        return None

    def write_record(self, request: RecordRequest, result: Any) -> bool:
        """Record `result` and return whether it was written. Failures are logged, once for each kind, not raised."""
        try:
            oldest, newest = self.versions(result) or (None, None)
            origin = Origin(time.time(), socket.gethostname(), oldest, newest, asyncrl.__version__)
            content = self.to_content(request.call, result)
            record = Record(self.role, request.step, request.fingerprint, origin, content)
            written = self._write(request.name, record)
        except Exception as error:  # noqa: BLE001  as in `request`
            reason = error.strerror if isinstance(error, OSError) and error.strerror else _describe(error)
            # Messages may differ for each sample, so the kind does not contain the message.
            kind = f"unrecorded {type(error).__name__} {getattr(error, 'errno', '')}"
            self.warn_once(kind, f"step {request.step} of {self.role} is not recorded in {self.files.root}: {reason}")
            return False
        if written:
            with self._files_lock:
                self._notes[request.step] = {}
                if len(self._notes) > MAX_NOTES:
                    del self._notes[next(iter(self._notes))]
        return written

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        """Write `values` (JSON types) beside the record of `step`, for users, if this process wrote it recently.

        Mappings are merged with those of earlier notes. Failures are logged, not raised.
        """
        try:
            with self._files_lock:
                if (before := self._notes.get(step)) is None:
                    return
                for key, value in values.items():
                    merge = isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
                    before[key] = {**before[key], **value} if merge else value
                self.files.note(record_name(step), before)
        except Exception as error:  # noqa: BLE001  as in `request`
            self.warn_once("note", f"the note on step {step} of {self.role} is not written: {_describe(error)}")

    def count(self, outcome: Outcome) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def warn_once(self, kind: str, message: str) -> None:
        """Log a warning, once for each kind, and add it to `messages`."""
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
            self.messages.append(message)
        logger.warning("%s", message)

    # ------------------------------------------------------------------------------------------------ inside

    def _counted(self, served: Served) -> Any:
        self.count("substituted" if served.substituted else "replayed")
        return served.result

    def _candidates(self, request: RecordRequest) -> Iterator[str]:
        yield request.name
        if self.action is Action.CACHE:
            return
        suffix = request.name.removeprefix(str(request.step))
        try:
            names = self.files.names()
        except OSError as error:
            self.warn_once("list", f"{self.files.root} cannot be listed to find another record: {error.strerror}")
            return
        others = {step for name in names if (step := step_of(name)) is not None and name == f"{step}{suffix}"}
        # The nearest step below, then the nearest above.
        for step in sorted(others - {request.step}, key=lambda step: (step > request.step, abs(step - request.step))):
            yield f"{step}{suffix}"

    def _read(self, name: str) -> Record | None:
        try:
            record = self.files.read(name)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  DamageError, OSError, or anything that a damaged file causes
            self._damaged(name, error)
            return None
        if record.role != self.role:
            self._damaged(name, DamageError(f"it is a record of role {record.role}"))
            return None
        return record

    def _mismatch(self, name: str, served: Served, requested: Fingerprint) -> None:
        recorded = served.record.fingerprint
        fields = ", ".join(
            f"{field} (recorded {recorded.get(field, 'nothing')}, now {requested.get(field, 'nothing')})"
            for field in served.differs
        )
        place = self.files.root / name
        if self.config.on_mismatch == "error":
            raise ConfigError(
                f"skip.{self.role}.on_mismatch=error: the record {place} was made from another call: it differs in "
                f"{fields}. Restore those values, choose another dump_dir or experiment_name, or set "
                f"skip.{self.role}.on_mismatch=regenerate, which replaces it"
            )
        self.count("mismatched")
        self.warn_once(
            "mismatch " + ",".join(served.differs),
            f"the record {place} was made from another call: it differs in {fields}. It is recorded again, as are "
            f"others with this difference",
        )

    def _damaged(self, name: str, error: BaseException) -> None:
        self.count("damaged")
        if len(self._warned) < MAX_DAMAGE_WARNINGS:
            self.warn_once(
                f"damage {name}", f"the record {self.files.root / name} counts as absent: {_describe(error)}"
            )
        else:
            more = f"asyncrl skip verify {self.files.root} lists all of them"
            self.warn_once("more damage", f"further damaged records are only counted; {more}")

    def _write(self, name: str, record: Record) -> bool:
        """Write the record, unless it would exceed `max_bytes`; return whether it was written."""
        limit = self.config.max_bytes
        if limit is None:
            self.files.write(name, record)
            return True
        with self._files_lock:
            # This process counts the bytes that existed at first and those that it wrote since, not those of others.
            if self._used_bytes is None:
                self._used_bytes = sum(entry.num_bytes for entry in self.files.entries())
            others = self._used_bytes - self.files.size(name)
            num_bytes = self.files.write(name, record, lambda num_bytes: others + num_bytes <= limit)
            if num_bytes is not None:
                self._used_bytes = others + num_bytes
        if num_bytes is None:
            message = f"skip.{self.role}.max_bytes={limit}: {self.files.root} is full, and nothing more is recorded"
            self.warn_once("max_bytes", message)
        return num_bytes is not None


def _describe(error: BaseException) -> str:
    """Return the message, with the type unless the message alone is clear (that of a `KeyError` is only the key)."""
    is_clear = isinstance(error, TypeError | ValueError | OSError | DamageError)
    return str(error) if is_clear else f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------- registry

_Kind = TypeVar("_Kind", bound=type[BaseSkip])
_registry: dict[str, type[BaseSkip]] = {}


def register_skip(role: str) -> Callable[[_Kind], _Kind]:
    """Return a class decorator: `SkipManager.init` instantiates the class if the configuration enables `role`.

    A file that is imported under two names registers its class twice, and the later one counts.

    Raises:
        ConfigError: another class has this role.
    """

    def register(kind: _Kind) -> _Kind:
        known = _registry.get(role)
        if known is not None and _origin(known) != _origin(kind):
            names = [f"{each.__module__}.{each.__qualname__}" for each in (known, kind)]
            raise ConfigError(
                f"the skip role {role} is registered by {names[0]} and by {names[1]}: give one of them another name, "
                "or leave its module out of skip.modules"
            )
        _registry[role] = kind
        return kind

    return register


def registered_roles() -> Mapping[str, type[BaseSkip]]:
    return dict(_registry)


def _origin(kind: type[BaseSkip]) -> tuple[str, str]:
    try:
        file = inspect.getsourcefile(kind) or kind.__module__
    except (OSError, TypeError):  # the class is not from a file
        file = kind.__module__
    return file, kind.__qualname__
