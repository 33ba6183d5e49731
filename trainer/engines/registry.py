"""Engine backends by name: built-in ones, and those that other packages register by an entry point."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal, TypeVar, get_args

from asyncrl.core.failures import AsyncRLError, ConfigError
from trainer.engines.base import BaseEngine, EngineSpec, ModelType, missing_methods
from trainer.engines.dist import pick_device

DeviceType = Literal["cpu", "cuda"]
Engine = TypeVar("Engine", bound=type[BaseEngine])

ENTRY_POINTS = "asyncrl.engines"
"""Group of the entry points. Each is named after its backend and refers to the module that registers it."""
BUILT_IN = {
    "local": "trainer.engines.replicated",
    "ddp": "trainer.engines.replicated",
    "fsdp": "trainer.engines.sharded",
    "fsdp2": "trainer.engines.sharded",
}


class EngineRegistry:
    """The engine class for each backend, model type and device. A backend's module is imported on its first use."""

    _engines: ClassVar[dict[tuple[str, ModelType, DeviceType], type[BaseEngine]]] = {}

    @classmethod
    def register(
        cls,
        model_type: ModelType | Sequence[ModelType],
        backend: str,
        device: DeviceType | Sequence[DeviceType],
    ) -> Callable[[Engine], Engine]:
        """Return a class decorator that registers an engine as `trainer.strategy=<backend>` for these model types on
        these devices.

        Raises:
            TypeError: the class is not an engine or has abstract methods, or a model type or device is unknown.
        """
        model_types = [model_type] if isinstance(model_type, str) else list(model_type)
        devices = [device] if isinstance(device, str) else list(device)
        for value, known in [*((name, ModelType) for name in model_types), *((name, DeviceType) for name in devices)]:
            if value not in get_args(known):
                raise TypeError(f"engine {backend}: {value!r} is none of {', '.join(get_args(known))}")

        def add(engine: Engine) -> Engine:
            if not issubclass(engine, BaseEngine):
                raise TypeError(f"engine {backend}: {engine.__name__} is no BaseEngine")
            if missing := missing_methods(engine):
                raise TypeError(f"engine {backend}: {engine.__name__} is abstract: it lacks {', '.join(missing)}")
            cls._engines.update({(backend, name, kind): engine for name in model_types for kind in devices})
            return engine

        return add

    @classmethod
    def new(cls, spec: EngineSpec) -> BaseEngine:
        """Create the engine that `spec` describes, on `spec.engine.device`.

        Raises:
            ConfigError: there is no such backend (the message names the nearest), its package is missing or broken, it
                does not run this model type on this device, or the engine itself refuses the configuration.
        """
        return cls.find(spec.engine.strategy, spec.model_type, pick_device(spec.engine.device).type)(spec)

    @classmethod
    def find(cls, backend: str, model_type: ModelType, device: str) -> type[BaseEngine]:
        """Return the engine class. Imports its module if needed. Raises as `new` does."""
        _load(backend)
        combinations = {key[1:]: engine for key, engine in cls._engines.items() if key[0] == backend}
        for key, engine in combinations.items():
            if key == (model_type, device):
                return engine
        able = ", ".join(f"{name} on {kind}" for name, kind in sorted(combinations)) or "nothing"
        raise ConfigError(
            f"trainer.strategy={backend}: does not run a {model_type} on {device}, only {able}; choose another strategy"
        )

    @classmethod
    def model_types(cls, backend: str, device: str) -> set[ModelType]:
        """Return the model types of a backend on a device. Imports its module if needed. Raises as `new` does."""
        _load(backend)
        return {key[1] for key in cls._engines if key[0] == backend and key[2] == device}

    @classmethod
    def backends(cls) -> list[str]:
        """Return the valid values of `trainer.strategy`."""
        return sorted(BUILT_IN | _entry_points() | {key[0]: "" for key in cls._engines})


def _load(backend: str) -> None:
    if any(key[0] == backend for key in EngineRegistry._engines):
        return
    if backend in BUILT_IN:
        importlib.import_module(BUILT_IN[backend])
        return
    point = _entry_points().get(backend)
    if point is None:
        known = EngineRegistry.backends()
        word = backend.lower()
        near = get_close_matches(word, known, n=2) or get_close_matches(word, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"trainer.strategy={backend}: no such engine; did you mean {' or '.join(near)}? Known: {', '.join(known)}"
        )
    try:
        point.load()
    except AsyncRLError:
        raise
    except Exception as error:  # noqa: BLE001 - importing the module may fail in any way
        raise ConfigError.wrap(
            f"trainer.strategy={backend}: its entry point {point.value} cannot be loaded "
            f"({type(error).__name__}: {error}); install what it needs",
            error,
        ) from None


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
