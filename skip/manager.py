"""The enabled roles of this process, and the decorator that puts them around stages (see `BaseSkip.warp_function`).

@SkipManager.annotate(role="async_rollout")
async def generate(request): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from asyncrl.config.import_path import import_module
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from skip.role import BaseSkip, Outcome, Waiting, registered_roles

Function = TypeVar("Function", bound=Callable[..., Any])

_suspended: ContextVar[bool] = ContextVar("skip_suspended", default=False)


class SkipManager:
    """State of this process: the enabled roles, and the step of its sequential loop. `reset` clears both."""

    _skips: ClassVar[dict[str, BaseSkip]] = {}
    _step: ClassVar[int | None] = None

    @classmethod
    def init(cls, config: Config) -> None:
        """Instantiate each role that `config.skip` enables, after `reset`.

        Raises:
            ConfigError: a role is not registered, or its settings cannot work.
            UserCodeError: a module of `skip.modules` raised when it was imported.
        """
        cls.reset()
        import skip.generation
        import skip.stages  # noqa: F401  both register the built-in roles

        settings = config.skip
        for module in settings.modules:
            import_module(module, "skip.modules")
        known = registered_roles()
        skips: dict[str, BaseSkip] = {}
        for role, section in settings.by_role().items():
            if not section.enable:
                continue
            if role not in known:
                near = get_close_matches(role, known, 1)
                fix = f"did you mean {near[0]}?" if near else "name the module that registers it in skip.modules"
                raise ConfigError(
                    f"skip.roles.{role}: no module has registered this role, so nothing would be recorded; {fix}"
                )
            instance = known[role](role, section, config)
            if instance.is_enabled():
                instance.current_step = lambda: cls._step
                skips[role] = instance
        cls._skips = skips

    @classmethod
    def reset(cls) -> None:
        """Return to the state before `init`: annotated functions run as if they were not annotated."""
        cls._skips = {}
        cls._step = None

    @classmethod
    @contextmanager
    def session(cls, config: Config) -> Iterator[None]:
        """Call `init`, and `reset` at the end."""
        cls.init(config)
        try:
            yield
        finally:
            cls.reset()

    @classmethod
    @contextmanager
    def suspended(cls) -> Iterator[None]:
        """Run annotated functions as if they were not annotated, in this task and those that it starts.

        Validation is neither recorded nor replayed.
        """
        token = _suspended.set(True)
        try:
            yield
        finally:
            _suspended.reset(token)

    @classmethod
    def set_step(cls, step: int) -> None:
        """Set the step of a sequential loop, for roles whose calls do not contain it."""
        cls._step = step

    @classmethod
    def watch(cls, waiting: Waiting) -> None:
        """Make async stages report their waits for files to `waiting` (`WaitBoard.waiting`), on the edge `records`."""
        for role in cls._skips.values():
            role.waiting = waiting

    @classmethod
    def get(cls, role: str) -> BaseSkip | None:
        """Return the instance of an enabled role."""
        return cls._skips.get(role)

    @classmethod
    async def note(cls, role: str, step: int, values: Mapping[str, Any]) -> None:
        """Write `values` (JSON types) as the note of the record of `step`, for `asyncrl skip show`. Failures are
        logged."""
        instance = cls._skips.get(role)
        if instance is not None and step in instance.steps:
            await instance.in_file_thread("write", lambda: instance.note(step, values))

    @classmethod
    def status(cls) -> dict[str, dict[Outcome, int]]:
        """Return the cumulative counts of this process for each enabled role."""
        return {role: dict(instance.counts) for role, instance in cls._skips.items()}

    @classmethod
    def messages(cls) -> list[str]:
        """Return the warnings of the roles of this process so far, each once."""
        return [message for instance in cls._skips.values() for message in tuple(instance.messages)]

    @classmethod
    def annotate(cls, role: str, **options: Any) -> Callable[[Function], Function]:
        """Decorate a stage, a plain or an async function. The role reads `options` as `Call.options`.

        Raises:
            TypeError: it is a generator, which yields more than one value.
        """

        def decorate(function: Function) -> Function:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"{function.__qualname__} yields its results one by one and cannot be skipped")
            wrapped: tuple[BaseSkip, Callable[..., Any]] | None = None

            def current() -> Callable[..., Any]:
                nonlocal wrapped
                instance = cls._skips.get(role)
                if instance is None or _suspended.get():
                    return function
                if wrapped is None or wrapped[0] is not instance:
                    wrapped = instance, instance.warp_function(function, options)
                return wrapped[1]

            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def run_async(*args: Any, **kwargs: Any) -> Any:
                    return await current()(*args, **kwargs)

                return run_async  # type: ignore[return-value]

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return current()(*args, **kwargs)

            return run  # type: ignore[return-value]

        return decorate
