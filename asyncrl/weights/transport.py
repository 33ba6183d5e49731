"""How the bytes of a version travel: Ray's object store, or a class of the user's (`weight_sync.backend`).

The weight store keeps one handle for each chunk. A handle of Ray is an object reference; one of a user's class is an
`OwnChunk`, which names the class, so that replicas need no configuration to read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.import_path import call_problem, defined_at, load_function, raised_at, source_of
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError, UserCodeError

KEY = "weight_sync.backend"


class WeightTransport(Protocol):
    """A user's class. Each process has one object of it, made without arguments; its calls block, in a thread."""

    def put(self, chunk: Mapping[str, NDArray[Any]]) -> Any:
        """Store tensors by name, and return a handle that can be pickled. Called by the Trainer."""

    def get(self, handle: Any) -> Mapping[str, NDArray[Any]]:
        """Return the tensors. Called by every engine, on any node and at any time until `drop`."""

    def drop(self, handle: Any) -> None:
        """Free the tensors. Called by the Trainer; not called for the last versions of a Trainer that has died."""


class OwnChunk(NamedTuple):
    """A chunk that a user's class has stored."""

    backend: str
    handle: Any

    @classmethod
    def put(cls, backend: str, chunk: Mapping[str, NDArray[Any]]) -> OwnChunk:
        """Store a chunk. Blocking. Raises UserCodeError."""
        return cls(backend, _call(backend, "put", chunk))

    def get(self) -> Mapping[str, NDArray[Any]]:
        """Read the chunk. Blocking. Raises UserCodeError."""
        chunk: Mapping[str, NDArray[Any]] = _call(self.backend, "get", self.handle)
        return chunk

    def drop(self) -> None:
        """Free the chunk. Blocking. Raises UserCodeError."""
        _call(self.backend, "drop", self.handle)


@cache
def _transport(backend: str) -> WeightTransport:
    kind = load_function(backend, KEY, {})
    if problem := call_problem(kind):
        raise ConfigError(f"{KEY}: {defined_at(kind)}: it is made without arguments: {problem}")
    try:
        transport: WeightTransport = kind()
    except Exception as error:
        place = raised_at(error, source_of(kind)) or backend
        raise UserCodeError.wrap(f"{KEY}: {place}: {type(error).__name__}: {error}", error) from error
    for method in ("put", "get", "drop"):
        if not callable(getattr(transport, method, None)):
            raise ConfigError(f"{KEY}: {defined_at(kind)}: it has no method {method}; see docs/extending.md")
    return transport


def _call(backend: str, method: str, argument: Any) -> Any:
    transport = _transport(backend)
    try:
        return getattr(transport, method)(argument)
    except Exception as error:
        place = raised_at(error, source_of(type(transport))) or backend
        raise UserCodeError.wrap(f"{KEY}: {place}: {method}: {type(error).__name__}: {error}", error) from error


def check_own_transport(config: Config) -> Iterator[ConfigProblem]:
    """Store, read and free a small chunk with the user's class."""
    backend = config.weight_sync.backend
    if backend == "object_store":
        return
    floats, integers = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.uint16)
    chunk: dict[str, NDArray[Any]] = {"a": floats, "b": integers}
    try:
        stored = OwnChunk.put(backend, chunk)
        read = stored.get()
        stored.drop()
        for name, array in chunk.items():
            found = read.get(name) if isinstance(read, Mapping) else None
            if found is None or found.dtype != array.dtype or not np.array_equal(found, array):
                raise UserCodeError(f"{backend}: get returned another tensor {name!r} than put had stored")
    except AsyncRLError as error:
        yield ConfigProblem(KEY, backend, error.message.removeprefix(f"{KEY}: "), "correct it; see docs/extending.md")
