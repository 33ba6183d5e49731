"""What a role is: how a call of its stage becomes a record, and a record the call's result.

    class MyStage(BaseSkip):
        support_online_step = True

        def extract_step(self, call): return call["sample_id"].index
        def fingerprint(self, call): return {"question": field(call["question"])}
        def to_content(self, call, result): return Content(data={"answer": result})
        def prepare_data(self, call, served): return served.record.content.data["answer"]

    register_skip("my_stage")(MyStage)

Everything here blocks or computes; for an async function the manager runs it in a thread.
"""

from __future__ import annotations

import inspect
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import asyncrl
from asyncrl.blobs import DamageError
from asyncrl.config.schema import Config, SkipRoleConfig
from asyncrl.failures import BugError, ConfigError
from asyncrl.steps import StepSet
from skip.files import RecordFiles, record_name, step_of
from skip.fingerprint import Fingerprint, differing
from skip.flow import Waiting, around, nobody_told
from skip.record import Content, Origin, Record

logger = logging.getLogger(__name__)

MAX_NOTABLE = 4096
MAX_TOLD = 10


class Action(StrEnum):
    CACHE = "cache"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an annotated function."""

    arguments: Mapping[str, Any]
    """By name, defaults and `self` included."""
    options: Mapping[str, Any]
    """What `annotate` was given besides the role."""

    def __getitem__(self, name: str) -> Any:
        """An argument. Raises `BugError` if the annotated function has none of this name."""
        if name not in self.arguments:
            raise BugError(f"the annotated function has no argument {name}; it has {', '.join(self.arguments)}")
        return self.arguments[name]


class Ask(NamedTuple):
    """A call at a step that is recorded and replayed."""

    call: Call
    step: int
    name: str
    """Of its record."""
    fingerprint: Fingerprint


class Served(NamedTuple):
    """A record in place of a call."""

    record: Record
    step: int
    """Which step asked."""
    differs: tuple[str, ...]
    """The fields of the fingerprint in which the record is of something else; only `repeat` serves such."""
    result: Any = None
    """What `prepare_data` made of it."""

    @property
    def substituted(self) -> bool:
        """It is not what this call would have recorded."""
        return bool(self.differs) or self.record.step != self.step


class Look(NamedTuple):
    """What there is for a call."""

    ask: Ask | None
    """None: it is neither replayed nor recorded."""
    found: Served | None = None


class BaseSkip(ABC):
    """One role of one run in one process."""

    support_actions: ClassVar[frozenset[Action]] = frozenset(Action)
    support_online_step: ClassVar[bool] = False
    """The step is in the call's arguments (`extract_step`). Else it is the one of `SkipManager.set_step`."""

    def __init__(self, role: str, config: SkipRoleConfig, run: Config) -> None:
        """
        Args:
            config: of this role.
            run: of the whole run; its names say where the records are.

        Raises:
            ConfigError: the configuration of this role cannot work.
        """
        key = f"skip.{role}"
        try:
            self.steps = StepSet.parse(config.steps)
        except ValueError as error:
            raise ConfigError(f"{key}.steps={config.steps!r}: {error}") from None
        self.action = Action(config.action)
        if config.enable and not self.steps:
            raise ConfigError(
                f"{key}.steps={config.steps!r}: {key}.enable=true with no steps would record and replay nothing; give "
                f"steps, e.g. {key}.steps=all, or set {key}.enable=false"
            )
        if self.action not in self.support_actions:
            able = " or ".join(sorted(self.support_actions))
            raise ConfigError(f"{key}.action={self.action}: this role can only {able}; set {key}.action={able}")
        self.role = role
        self.config = config
        self.run = run
        self.files = RecordFiles(Path(config.dump_dir).expanduser() / run.project_name / run.experiment_name / role)
        self.counts: Counter[str] = Counter()
        """replayed, substituted, recorded, mismatched, damaged, unrecorded, late; calls."""
        self.waiting: Waiting = nobody_told
        """Told what an async stage waits on."""
        self.slot: Callable[[], int | None] = lambda: None
        """The step of `SkipManager.set_step`."""
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self.messages: list[str] = []
        """What was told, for whoever shows it to people."""
        self._used_bytes: int | None = None
        self._files_lock = threading.Lock()
        """Held over files, so never on an event loop, unlike the other one."""
        self._notable: dict[int, dict[str, Any]] = {}
        """The newest records of this process, by step, and what was noted of them."""

    # ------------------------------------------------------------------------------------------------ of a role

    def is_enabled(self) -> bool:
        return self.config.enable

    def extract_step(self, call: Call) -> int:
        """The step that `call` is of, where `support_online_step`.

        Raises:
            DataError, BugError: it has none; the message shows what is expected.
        """
        raise BugError(f"skip.{self.role}: {type(self).__name__} has support_online_step and no extract_step")

    def call_name(self, call: Call) -> str:
        """Tells apart the calls of one step, in hexadecimal; empty where there is one call a step."""
        return ""

    @abstractmethod
    def fingerprint(self, call: Call) -> Fingerprint:
        """What `call` asks for: whatever changes its result, but for chance and the policy's version."""

    @abstractmethod
    def to_content(self, call: Call, result: Any) -> Content:
        """What is kept of `result`."""

    @abstractmethod
    def prepare_data(self, call: Call, served: Served) -> Any:
        """The result, of a record.

        Raises:
            Anything: it is none of this role, or does not fit what is asked; it counts as absent.
        """

    def versions(self, result: Any) -> tuple[int, int] | None:
        """Oldest and newest version of the policy that made `result`; None: it had no part in it."""
        return None

    # ------------------------------------------------------------------------------------------------ the flow

    def warp_function(self, function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        """`function`, a plain or an async one, with this role around it; see `skip.flow`. The name is verl's.

        Args:
            options: for `Call.options`.
        """
        signature = inspect.signature(function)

        def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return Call(bound.arguments, options)

        return around(self, function, call_of)

    def look(self, call: Call, slot: int | None) -> Look:
        """What `call` asks for, and the record that answers it. Raises as `ask` and `meet_precondition`."""
        ask = self.ask(call, slot)
        return Look(ask, None if ask is None else self.meet_precondition(ask))

    def ask(self, call: Call, slot: int | None) -> Ask | None:
        """What `call` asks for; None: its step is none of those that are recorded, or it has no fingerprint.

        Args:
            slot: the step of `SkipManager.set_step`.

        Raises:
            BugError: nobody has said which step it is.
            What `extract_step` raises.
        """
        step = self.extract_step(call) if self.support_online_step else slot
        if step is None:
            raise BugError(f"skip.{self.role}: which step is it? Call SkipManager.set_step(step) before this stage")
        if step not in self.steps:
            return None
        try:
            return Ask(call, step, record_name(step, self.call_name(call)), self.fingerprint(call))
        except Exception as error:  # noqa: BLE001  a role may raise anything, and costs a record, not the sample
            self.count("unrecorded")
            self.tell(
                "fingerprint", f"step {step} of {self.role} has no fingerprint, so it is not recorded: {_said(error)}"
            )
            return None

    def may_serve(self, served: Served) -> bool:
        """By default, with `cache` the record of what is asked for, and with `repeat` any."""
        return not served.differs or self.action is Action.REPEAT

    def meet_precondition(self, ask: Ask) -> Served | None:
        """The record that is served, whole, checked and prepared; None: the stage has to run.

        Raises:
            ConfigError: what is there was made by something else, and `on_mismatch` is `error`.
        """
        for name in self._candidates(ask):
            if (record := self._read(name)) is None:
                continue
            served = Served(record, ask.step, differing(record.fingerprint, ask.fingerprint))
            if not self.may_serve(served):
                if self.action is Action.CACHE:
                    self._mismatch(name, served, ask.fingerprint)
                continue
            try:
                return served._replace(result=self.prepare_data(ask.call, served))
            except Exception as error:  # noqa: BLE001  as in `ask`
                # What belongs to another question may be of no use here, and sound all the same.
                if not served.substituted:
                    self._damaged(name, error)
        return None

    def served(self, found: Served) -> None:
        """It was."""
        self.count("substituted" if found.substituted else "replayed")

    def keep(self, ask: Ask, result: Any) -> bool:
        """Record `result`. What goes wrong is told, once for each kind, and nothing is raised: then it is False."""
        try:
            oldest, newest = self.versions(result) or (None, None)
            origin = Origin(time.time(), socket.gethostname(), oldest, newest, asyncrl.__version__)
            content = self.to_content(ask.call, result)
            record = Record(self.role, ask.step, ask.fingerprint, origin, content)
            written = self._write(ask.name, record)
        except Exception as error:  # noqa: BLE001  as in `ask`
            reason = error.strerror if isinstance(error, OSError) and error.strerror else _said(error)
            # By what it is and not by its words, which may be others for each sample.
            kind = f"unrecorded {type(error).__name__} {getattr(error, 'errno', '')}"
            self.tell(kind, f"step {ask.step} of {self.role} is not recorded in {self.files.root}: {reason}")
            return False
        if written:
            with self._files_lock:
                self._notable[ask.step] = {}
                if len(self._notable) > MAX_NOTABLE:
                    del self._notable[next(iter(self._notable))]
        return written

    def note(self, step: int, told: Mapping[str, Any]) -> None:
        """Put `told` beside the record of `step`, for people to read, if this process has made it lately. Mappings in
        it join those noted before. Nothing is raised.

        Args:
            told: JSON types.
        """
        try:
            with self._files_lock:
                if (before := self._notable.get(step)) is None:
                    return
                for key, value in told.items():
                    joins = isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
                    before[key] = {**before[key], **value} if joins else value
                self.files.note(record_name(step), before)
        except Exception as error:  # noqa: BLE001  as in `ask`
            self.tell("note", f"the note on step {step} of {self.role} is not written: {_said(error)}")

    def count(self, what: str) -> None:
        """See `counts`."""
        with self._lock:
            self.counts[what] += 1

    def tell(self, kind: str, message: str) -> None:
        """A warning, once for each kind."""
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
            self.messages.append(message)
        logger.warning("%s", message)

    # ------------------------------------------------------------------------------------------------ inside

    def _candidates(self, ask: Ask) -> Iterator[str]:
        yield ask.name
        if self.action is Action.REPEAT:
            suffix = ask.name.removeprefix(str(ask.step))
            try:
                names = self.files.names()
            except OSError as error:
                self.tell("list", f"{self.files.root} cannot be listed, so no other record is found: {error.strerror}")
                return
            steps = sorted(
                step
                for name in names
                if (step := step_of(name)) is not None and step != ask.step and name == f"{step}{suffix}"
            )
            below = [step for step in reversed(steps) if step < ask.step]
            above = [step for step in steps if step > ask.step]
            yield from (f"{step}{suffix}" for step in (*below, *above))

    def _read(self, name: str) -> Record | None:
        try:
            record = self.files.read(name)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  DamageError, OSError, or what nobody has thought of
            self._damaged(name, error)
            return None
        if record.role != self.role:
            self._damaged(name, DamageError(f"it is a record of role {record.role}"))
            return None
        return record

    def _mismatch(self, name: str, served: Served, wanted: Fingerprint) -> None:
        recorded = served.record.fingerprint
        fields = ", ".join(
            f"{field} (recorded {recorded.get(field, 'nothing')}, now {wanted.get(field, 'nothing')})"
            for field in served.differs
        )
        place = self.files.root / name
        if self.config.on_mismatch == "error":
            raise ConfigError(
                f"skip.{self.role}.on_mismatch=error: the record {place} was made by something else: it differs in "
                f"{fields}. Go back to what made it, choose another dump_dir or experiment_name, or set "
                f"skip.{self.role}.on_mismatch=regenerate, which replaces it"
            )
        self.count("mismatched")
        self.tell(
            "mismatch " + ",".join(served.differs),
            f"the record {place} was made by something else: it differs in {fields}. It is made again, and so are "
            "others like it",
        )

    def _damaged(self, name: str, error: BaseException) -> None:
        self.count("damaged")
        if len(self._told) < MAX_TOLD:
            self.tell(f"damage {name}", f"the record {self.files.root / name} counts as absent: {_said(error)}")
        else:
            more = f"asyncrl skip verify {self.files.root} names all of them"
            self.tell("more damage", f"further damaged records are counted and not told; {more}")

    def _write(self, name: str, record: Record) -> bool:
        """False: there is no room for it."""
        limit = self.config.max_bytes
        if limit is None:
            self.files.write(name, record)
            return True
        with self._files_lock:
            # What other processes write meanwhile is not counted.
            if self._used_bytes is None:
                self._used_bytes = sum(entry.num_bytes for entry in self.files.entries())
            others = self._used_bytes - self.files.size(name)
            num_bytes = self.files.write(name, record, lambda num_bytes: others + num_bytes <= limit)
            if num_bytes is not None:
                self._used_bytes = others + num_bytes
        if num_bytes is None:
            told = f"skip.{self.role}.max_bytes={limit}: {self.files.root} is full, and nothing more is recorded"
            self.tell("max_bytes", told)
        return num_bytes is not None


def _said(error: BaseException) -> str:
    """`str(KeyError)` is the key alone."""
    plain = isinstance(error, TypeError | ValueError | OSError | DamageError)
    return str(error) if plain else f"{type(error).__name__}: {error}"
