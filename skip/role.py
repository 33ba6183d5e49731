"""Roles and the flow of a call: `BaseSkip`, whose verbs are verl's, and `ActiveRole`, which calls them.

docs/skip.md has examples. `skip.record_role` adds records with fingerprints on top.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import anyio

from asyncrl.config.sections.skip import StepSet
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.profiling import profile
from asyncrl.storage.array_bytes import DamageError
from skip.file_thread import Result, file_thread

logger = logging.getLogger(__name__)

FILES_LIMIT_S = 60.0
"""Maximum time that an async stage waits for the files of a role."""
Outcome = Literal["replayed", "substituted", "recorded", "mismatched", "damaged", "unrecorded", "late"]
"""What became of a call; each is the metric `skip/<role>/<outcome>`."""


class Waiting(Protocol):
    """The type of `WaitBoard.waiting`."""

    def __call__(self, edge: str, *, limit_s: float = 0.0) -> AbstractContextManager[None]: ...


class SkipAction(StrEnum):
    """What a role does with a call. The built-in roles support `cache` and `repeat`."""

    CACHE = "cache"
    REPEAT = "repeat"
    RANDOM = "random"
    EMPTY = "empty"


@dataclass(frozen=True)
class AnnotatedFunction:
    """A stage, plain or async."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    """Arguments of `annotate` besides the role."""

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)


class BaseSkip:
    """One role in one process: it decides, call by call, whether the function runs or something stands in for it.

    A class written for verl works here unchanged. `*args` and `**kwargs` are those of the call, with `self`. For an
    async function, all verbs but `is_enabled` run in a thread. An error in a verb costs the record and not the sample,
    except one of `extract_step`, and a `ConfigError` of `meet_precondition`.
    """

    support_actions: ClassVar[Sequence[SkipAction]] = [SkipAction.CACHE, SkipAction.REPEAT]
    support_online_step: ClassVar[bool] = False
    """Whether the step is in the call's arguments (`extract_step`); if not, it is that of `SkipManager.set_step`."""
    thread_safe: ClassVar[bool] = False
    """Whether several threads may run the verbs at once. If not, one thread at a time runs them."""
    active: ActiveRole
    """The role's name, key, counts and warnings; set once the instance is made."""

    def __init__(self, local_config: Any, global_config: Any) -> None:
        """
        Args:
            local_config: settings of the role.
            global_config: the whole configuration.
        """
        self.action = SkipAction(local_config.action)
        self.enable: bool = local_config.enable
        self.dump_dir = str(Path(local_config.dump_dir).expanduser())
        self.steps = StepSet.parse(local_config.steps)
        self.global_config = global_config

    def is_enabled(self) -> bool:
        return self.enable

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        """Return the step of the call, if `support_online_step` is true."""
        raise NotImplementedError(f"{type(self).__qualname__} has no extract_step")

    def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Return whether `warp_function` has something that stands in for the call."""
        raise NotImplementedError(f"{type(self).__qualname__} has no meet_precondition")

    def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load what stands in for the call. Called directly after `meet_precondition` has returned true."""
        raise NotImplementedError(f"{type(self).__qualname__} has no warp_function")

    def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> Any:
        """Dump what the call returned."""
        raise NotImplementedError(f"{type(self).__qualname__} has no prepare_data")

    # ------------------------------------------------------------------------------------- not in verl; all optional

    def bind_call(
        self, stage: AnnotatedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the `*args` and `**kwargs` that the other verbs get for a call of `stage`."""
        return args, kwargs

    def is_substitute(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Return whether what `warp_function` has just loaded is of another step or request; it is counted apart."""
        return False


class Lookup(NamedTuple):
    """What a role says about a call."""

    step: int | None = None
    """The step to record the result for; None: it is not recorded."""
    outcome: Outcome | None = None
    """How `result` stands in for the call; None: the function has to run."""
    result: Any = None


class ActiveRole:
    """A role in this process: the flow of its calls, its counts and its warnings.

    which step?  extract_step, or the one of set_step
       not among `steps` ──────▶ run the function
       meet_precondition ──────▶ warp_function
       else ───────────────────▶ run the function ──▶ prepare_data
    """

    def __init__(self, role: str, key: str, instance: BaseSkip) -> None:
        """`key`: the configuration key of the role's section, for messages."""
        self.role, self.key, self.instance = role, key, instance
        self.counts: Counter[Outcome] = Counter()
        self.messages: list[str] = []
        """Warnings so far."""
        self.waiting: Waiting = lambda edge, *, limit_s=0.0: nullcontext()
        """Reports what an async stage waits for."""
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._verbs: AbstractContextManager[Any] = nullcontext() if instance.thread_safe else threading.RLock()
        instance.active = self

    def run(self, stage: AnnotatedFunction, step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call of a plain function. `step` is that of `SkipManager.set_step`."""
        mine, named = self.instance.bind_call(stage, args, kwargs)
        with profile.span("skip.read", role=self.role) as span:
            found = self.look_up(stage.function, step, mine, named)
            span.add(found=int(found.outcome is not None))
        if found.outcome is not None:
            self.count(found.outcome)
            return found.result
        result = stage.function(*args, **kwargs)
        if found.step is not None:
            with profile.span("skip.write", role=self.role):
                self.count("recorded" if self.write(found.step, result, mine, named) else "unrecorded")
        return result

    async def run_async(
        self, stage: AnnotatedFunction, step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the result of a call of an async function, as `run` does, but never wait for files on the event loop.

        A read or write that takes longer than `FILES_LIMIT_S` is given up: the function runs as if there were no
        record, or its result is not recorded.
        """
        mine, named = self.instance.bind_call(stage, args, kwargs)
        with profile.span("skip.read", role=self.role) as span:
            found = await self.in_file_thread("read", partial(self.look_up, stage.function, step, mine, named))
            span.add(found=int(found is not None and found.outcome is not None))
        if found is None:
            self.count("late")
            return await stage.function(*args, **kwargs)
        if found.outcome is not None:
            self.count(found.outcome)
            return found.result
        result = await stage.function(*args, **kwargs)
        if found.step is not None:
            with profile.span("skip.write", role=self.role):
                written = await self.in_file_thread("write", partial(self.write, found.step, result, mine, named))
            self.count("late" if written is None else "recorded" if written else "unrecorded")
        return result

    async def in_file_thread(self, name: str, function: Callable[[], Result]) -> Result | None:
        """Run `function` in the thread for `read` or `write`, and return its result; None: it took too long."""
        thread = file_thread(name if self.instance.thread_safe else f"role {self.role}")
        with self.waiting("records", limit_s=FILES_LIMIT_S), anyio.move_on_after(FILES_LIMIT_S):
            return await thread.run(function)
        message = f"{self.key}: a record takes longer than {FILES_LIMIT_S:g} s to {name}, and is given up"
        self.warn_once(f"late {name}", message)
        return None

    def look_up(
        self, function: Callable[..., Any], step: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Lookup:
        """Find what stands in for a call, and load it. Blocking.

        Raises:
            BugError: the step is unknown.
            ConfigError: `meet_precondition` raised it.
            Exception: `extract_step` raised it.
        """
        role = self.instance
        with self._verbs:
            if role.support_online_step:
                step = role.extract_step(*args, **kwargs)
            elif step < 0:
                raise BugError(f"{self.key}: the step is unknown; call SkipManager.set_step(step) before this stage")
            if step not in role.steps:
                return Lookup()
            try:
                if not role.meet_precondition(step, function, *args, **kwargs):
                    return Lookup(step)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  a role may raise anything; only the record is lost
                self._lose("unrecorded", f"step {step} of {self.role} is neither looked up nor recorded", error)
                return Lookup()
            try:
                result = role.warp_function(step, function, *args, **kwargs)
                outcome: Outcome = "substituted" if role.is_substitute(step, *args, **kwargs) else "replayed"
            except Exception as error:  # noqa: BLE001  as above
                self._lose("damaged", f"what is recorded for step {step} of {self.role} counts as absent", error)
                return Lookup(step)
            return Lookup(step, outcome, result)

    def write(self, step: int, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Record a result, and return whether it is recorded. Failures are logged, once for each kind. Blocking."""
        try:
            with self._verbs:
                self.instance.prepare_data(step, result, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  as in `look_up`
            reason = error.strerror if isinstance(error, OSError) and error.strerror else describe_error(error)
            # Messages may differ for each sample, so the kind does not contain the message.
            kind = f"unrecorded {type(error).__name__} {getattr(error, 'errno', '')}"
            place = f"{self.key}.dump_dir={self.instance.dump_dir}"
            self.warn_once(kind, f"step {step} of {self.role} is not recorded in {place}: {reason}")
            return False
        return True

    def _lose(self, outcome: Outcome, what: str, error: Exception) -> None:
        self.count(outcome)
        self.warn_once(f"{outcome} {type(error).__name__}", f"{what}: {describe_error(error)}")

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


def describe_error(error: BaseException) -> str:
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
