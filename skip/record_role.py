"""Roles whose results are records with fingerprints: `RecordSkip` implements the verbs of `BaseSkip` with them."""

from __future__ import annotations

import functools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import asyncrl
from asyncrl.config.schema import Config
from asyncrl.config.sections.skip import SkipRoleConfig
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.storage.array_bytes import DamageError
from skip.fingerprint import Fingerprint, differing
from skip.record import Content, Origin, Record
from skip.role import AnnotatedFunction, BaseSkip, SkipAction, describe_error
from skip.store import RecordFiles, record_name, step_of

MAX_NOTES = 4096
MAX_DAMAGE_WARNINGS = 10


class Served(NamedTuple):
    """A record whose result a call may return."""

    record: Record
    step: int
    """Step of the call."""
    differs: tuple[str, ...]
    """Fields in which the fingerprints differ; only `repeat` serves such a record."""
    result: Any = None
    """Result of `to_result` for the record."""

    @property
    def substituted(self) -> bool:
        """Whether the record is of another step than the call, or of another request."""
        return bool(self.differs) or self.record.step != self.step


@dataclass(slots=True, eq=False)
class Call:
    """One call of an annotated function."""

    arguments: Mapping[str, Any]
    """Arguments by name, including defaults and `self`."""
    options: Mapping[str, Any]
    """Arguments of `annotate` besides the role."""
    name: str = ""
    """Name of its record. `RecordSkip.identify` sets this and the fingerprint."""
    fingerprint: Fingerprint = field(default_factory=dict)
    served: Served | None = None
    """The record that stands in for the call; set by `RecordSkip.meet_precondition`."""

    def __getitem__(self, name: str) -> Any:
        """Return an argument. Raises `BugError` if the annotated function has none of this name."""
        if name not in self.arguments:
            raise BugError(f"the annotated function has no argument {name}; it has {', '.join(self.arguments)}")
        return self.arguments[name]


class RecordSkip(BaseSkip, ABC):
    """A role that serves a record only for the request that it was made from, and knows where a record comes from.

    Its verbs get one argument besides the step, the `Call`. A subclass says what identifies a call, and converts
    results to `Content` and back.
    """

    thread_safe: ClassVar[bool] = True

    def __init__(self, local_config: SkipRoleConfig, global_config: Config) -> None:
        """The project and experiment names of `global_config` determine the directory of the records."""
        super().__init__(local_config, global_config)
        self.config = local_config
        self.run = global_config
        self._files_lock = threading.Lock()
        """Held during file access, so it is never acquired on an event loop."""
        self._used_bytes: int | None = None
        self._notes: dict[int, dict[str, Any]] = {}
        """Notes on the newest records of this process, by step."""

    @functools.cached_property
    def files(self) -> RecordFiles:
        root = Path(self.dump_dir) / self.run.project_name / self.run.experiment_name / self.active.role
        return RecordFiles(root, mode=self.run.directory_mode)

    # ------------------------------------------------------------------------------------------------ of a role

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
    def to_result(self, call: Call, served: Served) -> Any:
        """Return the result from a record.

        Raises:
            Exception: the record is not one of this role, or does not fit the call; it counts as absent.
        """

    def versions(self, result: Any) -> tuple[int, int] | None:
        """Return the oldest and newest version of the policy that produced `result`; None: no policy did."""
        return None

    def may_serve(self, served: Served) -> bool:
        """Return whether the record may be served: with `repeat` any, with `cache` one with the same fingerprint."""
        return not served.differs or self.action is SkipAction.REPEAT

    # ------------------------------------------------------------------------------------------------ the verbs

    def bind_call(
        self, stage: AnnotatedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Call], Mapping[str, Any]]:
        bound = stage.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (Call(bound.arguments, stage.options),), {}

    def meet_precondition(self, step: int, func: Callable[..., Any], call: Call) -> bool:
        """Find a record to serve; it is read, checked and converted here.

        Raises:
            ConfigError: the record has another fingerprint, and `on_mismatch` is `error`.
        """
        self.identify(step, call)
        for name in self._candidates(step, call.name):
            if (record := self._read(name)) is None:
                continue
            served = Served(record, step, differing(record.fingerprint, call.fingerprint))
            if not self.may_serve(served):
                if self.action is SkipAction.CACHE:
                    self._mismatch(name, served, call.fingerprint)
                continue
            try:
                call.served = served._replace(result=self.to_result(call, served))
            except Exception as error:  # noqa: BLE001  a role may raise anything; only the record is lost
                # An intact record of another call may not fit this one.
                if not served.substituted:
                    self._damaged(name, error)
            else:
                return True
        return False

    def warp_function(self, step: int, func: Callable[..., Any], call: Call) -> Any:
        """Return the result of the record that `meet_precondition` has found."""
        assert call.served is not None
        return call.served.result

    def is_substitute(self, step: int, call: Call) -> bool:
        return call.served is not None and call.served.substituted

    def prepare_data(self, step: int, result: Any, call: Call) -> None:
        """Record `result`.

        Raises:
            Exception: the role raised it, or the record cannot be written (`OSError`: also because of `max_bytes`).
        """
        self.identify(step, call)
        oldest, newest = self.versions(result) or (None, None)
        origin = Origin(time.time(), socket.gethostname(), oldest, newest, asyncrl.__version__)
        content = self.to_content(call, result)
        self._write(call.name, Record(self.active.role, step, call.fingerprint, origin, content))
        with self._files_lock:
            self._notes[step] = {}
            if len(self._notes) > MAX_NOTES:
                del self._notes[next(iter(self._notes))]

    # ------------------------------------------------------------------------------------------------ inside

    def identify(self, step: int, call: Call) -> None:
        """Set the name and fingerprint of `call`, once, because a function may change its arguments. Raises whatever
        the role raises."""
        if not call.name:
            call.fingerprint = self.fingerprint(call)
            call.name = record_name(step, self.call_name(call))

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
        except Exception as error:  # noqa: BLE001  as in `meet_precondition`
            message = f"the note on step {step} of {self.active.role} is not written: {describe_error(error)}"
            self.active.warn_once("note", message)

    def _candidates(self, step: int, name: str) -> Iterator[str]:
        yield name
        if self.action is SkipAction.CACHE:
            return
        suffix = name.removeprefix(str(step))
        try:
            names = self.files.names()
        except OSError as error:
            message = f"{self.files.root} cannot be listed to find another record: {error.strerror}"
            self.active.warn_once("list", message)
            return
        others = {other for each in names if (other := step_of(each)) is not None and each == f"{other}{suffix}"}
        # The nearest step below, then the nearest above.
        for other in sorted(others - {step}, key=lambda other: (other > step, abs(other - step))):
            yield f"{other}{suffix}"

    def _read(self, name: str) -> Record | None:
        try:
            record = self.files.read(name)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  DamageError, OSError, or anything that a damaged file causes
            self._damaged(name, error)
            return None
        if record.role != self.active.role:
            self._damaged(name, DamageError(f"it is a record of role {record.role}"))
            return None
        return record

    def _mismatch(self, name: str, served: Served, requested: Fingerprint) -> None:
        recorded, key = served.record.fingerprint, f"{self.active.key}.on_mismatch"
        fields = ", ".join(
            f"{field} (recorded {recorded.get(field, 'nothing')}, now {requested.get(field, 'nothing')})"
            for field in served.differs
        )
        place = self.files.root / name
        if self.config.on_mismatch == "error":
            raise ConfigError(
                f"{key}=error: the record {place} was made from another call: it differs in {fields}. Restore those "
                f"values, choose another dump_dir or experiment_name, or set {key}=regenerate, which replaces it"
            )
        self.active.count("mismatched")
        self.active.warn_once(
            "mismatch " + ",".join(served.differs),
            f"the record {place} was made from another call: it differs in {fields}. It is recorded again, as are "
            f"others with this difference",
        )

    def _damaged(self, name: str, error: BaseException) -> None:
        self.active.count("damaged")
        if len(self.active.messages) < MAX_DAMAGE_WARNINGS:
            message = f"the record {self.files.root / name} counts as absent: {describe_error(error)}"
            self.active.warn_once(f"damage {name}", message)
        else:
            more = f"asyncrl skip verify {self.files.root} lists all of them"
            self.active.warn_once("more damage", f"further damaged records are only counted; {more}")

    def _write(self, name: str, record: Record) -> None:
        """Write the record. Raises `OSError`, also if it would exceed `max_bytes`."""
        limit = self.config.max_bytes
        if limit is None:
            self.files.write(name, record)
            return
        with self._files_lock:
            # This process counts the bytes that existed at first and those that it wrote since, not those of others.
            if self._used_bytes is None:
                self._used_bytes = sum(entry.num_bytes for entry in self.files.entries())
            others = self._used_bytes - self.files.size(name)
            num_bytes = self.files.write(name, record, lambda num_bytes: others + num_bytes <= limit)
            if num_bytes is None:
                key = f"{self.active.key}.max_bytes={limit}"
                raise OSError(f"{key}: {self.files.root} is full, and nothing more is recorded")
            self._used_bytes = others + num_bytes
