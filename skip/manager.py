"""The skips of this process, and the decorator that puts them around stages; `skip.flow` says what it does there.

@SkipManager.annotate(role="async_rollout")
async def generate(asked): ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, UserCodeError
from skip.base import BaseSkip
from skip.flow import Waiting, in_lane
from skip.registry import registered

Function = TypeVar("Function", bound=Callable[..., Any])

_suspended: ContextVar[bool] = ContextVar("skip_suspended", default=False)


class SkipManager:
    """State of this process: the roles that are enabled, and the step of its sequential loop. `reset` forgets both."""

    _skips: ClassVar[dict[str, BaseSkip]] = {}
    _step: ClassVar[int | None] = None

    @classmethod
    def init(cls, config: Config) -> None:
        """Make one skip for each role that `config.skip` enables; whatever was there is forgotten.

        Raises:
            ConfigError: a role that nobody has registered, or settings that cannot work.
            UserCodeError: a module of `skip.modules` raised when it was imported.
        """
        cls.reset()
        import skip.roles  # noqa: F401  registers those that come with the package

        settings = config.skip
        for module in settings.modules:
            _import(module)
        known = registered()
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
            made = known[role](role, section, config)
            if made.is_enabled():
                made.slot = lambda: cls._step
                skips[role] = made
        cls._skips = skips

    @classmethod
    def reset(cls) -> None:
        """As before `init`: every annotated function runs as if it were not."""
        cls._skips = {}
        cls._step = None

    @classmethod
    @contextmanager
    def session(cls, config: Config) -> Iterator[None]:
        """`init`, and `reset` at the end."""
        cls.init(config)
        try:
            yield
        finally:
            cls.reset()

    @classmethod
    @contextmanager
    def suspended(cls) -> Iterator[None]:
        """Inside, in this task and those that it starts, every annotated function runs as if it were not. Validation is
        neither recorded nor replayed."""
        token = _suspended.set(True)
        try:
            yield
        finally:
            _suspended.reset(token)

    @classmethod
    def set_step(cls, step: int) -> None:
        """The step of a loop that takes one after another; roles that find the step in their call do not look at it."""
        cls._step = step

    @classmethod
    def watch(cls, waiting: Waiting) -> None:
        """Tell `waiting` (`WaitBoard.waiting`) of async stages that wait for files, as `records`."""
        for made in cls._skips.values():
            made.waiting = waiting

    @classmethod
    def get(cls, role: str) -> BaseSkip | None:
        """The skip of an enabled role."""
        return cls._skips.get(role)

    @classmethod
    async def note(cls, role: str, step: int, told: Mapping[str, Any]) -> None:
        """Put `told` (JSON types) beside the record of `step`, for `asyncrl skip show`; a failure is only logged."""
        made = cls._skips.get(role)
        if made is None or step not in made.steps:
            return
        await in_lane("write", made, lambda: made.note(step, told))

    @classmethod
    def status(cls) -> dict[str, dict[str, int]]:
        """Cumulative counts of this process for each enabled role; see `BaseSkip.counts`."""
        return {role: dict(made.counts) for role, made in cls._skips.items()}

    @classmethod
    def messages(cls) -> list[str]:
        """What the roles of this process had to tell so far, each thing once."""
        return [message for made in cls._skips.values() for message in tuple(made.messages)]

    @classmethod
    def annotate(cls, role: str, **options: Any) -> Callable[[Function], Function]:
        """Decorate a stage, a function or an async one. `options` are the role's own (`Call.options`).

        Raises:
            TypeError: it is a generator, whose result is not one value.
        """

        def decorate(function: Function) -> Function:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"{function.__qualname__} yields its results one by one and cannot be skipped")
            wrapped: tuple[BaseSkip, Callable[..., Any]] | None = None

            def present() -> Callable[..., Any]:
                nonlocal wrapped
                made = cls._skips.get(role)
                if made is None or _suspended.get():
                    return function
                if wrapped is None or wrapped[0] is not made:
                    wrapped = made, made.warp_function(function, options)
                return wrapped[1]

            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def run_async(*args: Any, **kwargs: Any) -> Any:
                    return await present()(*args, **kwargs)

                return run_async  # type: ignore[return-value]

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return present()(*args, **kwargs)

            return run  # type: ignore[return-value]

        return decorate


def _import(module: str) -> None:
    # A console script does not look into the directory it is started in; `python` does.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"skip.modules: there is no module {module}; give its dotted name, and put it on the Python path"
            ) from error
        raise UserCodeError.wrap(f"skip.modules: {module} cannot be imported: {error}", error) from error
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise UserCodeError.wrap(f"skip.modules: {module} cannot be imported: {error}", error) from error
