"""The roles of this process, and the decorator that puts them around stages (see `ActiveRole`).

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
from asyncrl.config.sections.skip import SkipRoleConfig, skip_settings
from asyncrl.core.failures import ConfigError, UserCodeError
from skip.record_role import RecordSkip
from skip.role import ActiveRole, AnnotatedFunction, BaseSkip, Outcome, Waiting, registered_roles

Function = TypeVar("Function", bound=Callable[..., Any])

VERBS = ("is_enabled", "extract_step", "meet_precondition", "warp_function", "prepare_data")
_DEFAULT = SkipRoleConfig()
_suspended: ContextVar[bool] = ContextVar("skip_suspended", default=False)


class SkipManager:
    """State of this process: its roles, and the step of its sequential loop. `reset` clears both."""

    skip_instances: ClassVar[dict[str, BaseSkip]] = {}
    """The instance of each role that has settings, enabled or not."""
    step: ClassVar[int] = -1
    """Step of `set_step`; before it, -1 as in verl."""

    @classmethod
    def init(cls, config: Config | Mapping[str, Any]) -> None:
        """Make an instance of each role, after `reset`.

        Args:
            config: a `Config`, or any mapping whose section `skip` has settings by the name of the role.

        Raises:
            ConfigError: an enabled role is not registered, or its settings cannot work.
            UserCodeError: a module of `skip.modules` or the class of a role raised an error.
        """
        cls.reset()
        import skip.generation
        import skip.stages  # noqa: F401  both register the built-in roles

        modules, sections = skip_settings(config)
        for module in modules:
            import_module(module, "skip.modules")
        known = registered_roles()
        instances: dict[str, BaseSkip] = {}
        for role, (key, section) in sections.items():
            if role in known:
                instances[role] = _make(known[role], key, section, config)
                ActiveRole(role, key, instances[role])
            elif section.enable:
                near = get_close_matches(role, known, 1)
                fix = f"did you mean {near[0]}?" if near else "name the module that registers it in skip.modules"
                raise ConfigError(f"{key}: no module has registered this role, so nothing would be recorded; {fix}")
        cls.skip_instances = instances

    @classmethod
    def reset(cls) -> None:
        """Return to the state before `init`: annotated functions run as if they were not annotated."""
        cls.skip_instances = {}
        cls.step = -1

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
        cls.step = step

    @classmethod
    def watch(cls, waiting: Waiting) -> None:
        """Make async stages report their waits for files to `waiting` (`WaitBoard.waiting`), on the edge `records`."""
        for instance in cls.skip_instances.values():
            instance.active.waiting = waiting

    @classmethod
    def get(cls, role: str) -> BaseSkip | None:
        """Return the instance of a role if it is enabled."""
        instance = cls.skip_instances.get(role)
        return instance if instance is not None and instance.is_enabled() else None

    @classmethod
    async def note(cls, role: str, step: int, values: Mapping[str, Any]) -> None:
        """Write `values` (JSON types) as the note of the record of `step`, for `asyncrl skip show`. Failures are
        logged."""
        instance = cls.get(role)
        if isinstance(instance, RecordSkip) and step in instance.steps:
            await instance.active.in_file_thread("write", functools.partial(instance.note, step, values))

    @classmethod
    def status(cls) -> dict[str, dict[Outcome, int]]:
        """Return the cumulative counts of this process for each enabled role."""
        return {role: dict(one.active.counts) for role, one in cls.skip_instances.items() if one.is_enabled()}

    @classmethod
    def messages(cls) -> list[str]:
        """Return the warnings of the roles of this process so far, each once."""
        return [message for one in cls.skip_instances.values() for message in tuple(one.active.messages)]

    @classmethod
    def annotate(cls, role: str, **options: Any) -> Callable[[Function], Function]:
        """Decorate a stage, a plain or an async function. The role reads `options` as `Call.options`.

        Raises:
            TypeError: it is a generator, which yields more than one value.
        """

        def decorate(function: Function) -> Function:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError(f"{function.__qualname__} yields its results one by one and cannot be skipped")
            stage = AnnotatedFunction(function, options)

            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def run_async(*args: Any, **kwargs: Any) -> Any:
                    active = cls._active(role, args, kwargs)
                    call = (
                        function(*args, **kwargs) if active is None else active.run_async(stage, cls.step, args, kwargs)
                    )
                    return await call

                return run_async  # type: ignore[return-value]

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                active = cls._active(role, args, kwargs)
                return function(*args, **kwargs) if active is None else active.run(stage, cls.step, args, kwargs)

            return run  # type: ignore[return-value]

        return decorate

    @classmethod
    def _active(cls, role: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActiveRole | None:
        """Return the role if it is enabled and the call does not belong to validation."""
        instance = cls.skip_instances.get(role)
        if instance is None or _suspended.get() or not instance.is_enabled():
            return None
        # verl's batches mark validation like this, a DataProto in the first and a TensorDict in the second.
        names = ("meta_info", "non_tensor_data")
        marks = (getattr(value, name, None) for value in (*args, *kwargs.values()) for name in names)
        is_validation = any(isinstance(mark, Mapping) and mark.get("validate") for mark in marks)
        return None if is_validation else instance.active


def _make(kind: type[BaseSkip], key: str, section: SkipRoleConfig, config: Config | Mapping[str, Any]) -> BaseSkip:
    """Return an instance of the class of a role. Raises `ConfigError` if it cannot do what its settings say."""
    name, problem = kind.__qualname__, ""
    if not section.enable:
        pass
    elif section.action not in kind.support_actions:
        able = " or ".join(sorted(kind.support_actions))
        problem = f".action={section.action}: this role can only {able}; set {key}.action={able}"
    elif kind.support_online_step and kind.extract_step is BaseSkip.extract_step:
        problem = f": {name} has support_online_step and no extract_step; define it"
    elif any(inspect.iscoroutinefunction(getattr(kind, verb)) for verb in VERBS):
        problem = f": {name} has an async verb; verbs are plain functions, which run in a thread"
    elif issubclass(kind, RecordSkip):
        if not isinstance(config, Config):
            problem = f": the records of {name} need an asyncrl Config; give one, or derive the class from BaseSkip"
    elif given := [each for each in ("on_mismatch", "max_bytes") if getattr(section, each) != getattr(_DEFAULT, each)]:
        problem = f".{given[0]}: {name} keeps its own files, so this has no effect; leave it out, or derive the class "
        problem += "from RecordSkip"
    if problem:
        raise ConfigError(key + problem)
    try:
        return kind(section, config)
    except ConfigError:
        raise
    except Exception as error:
        raise UserCodeError.wrap(f"{key}: {name} cannot be made: {error!r}", error) from error
