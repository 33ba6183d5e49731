"""How the bytes of a version are kept: in Ray's object store, in files, or by a class of the user's
(`weight_sync.backend`).

Tensors are collected in buckets (`in_buckets`), and the weight store keeps one handle, a chunk, for each of them. A
handle of Ray is an object reference, one of files is a `DiskChunk` or a `DeltaChunk`;
one of a user's class is an `OwnChunk`, which names the class, so that replicas need no configuration to read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.import_path import call_problem, defined_at, load_function, raised_at, source_of
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError, UserCodeError
from asyncrl.core.ports import WeightBucket
from asyncrl.weights.deltas import DeltaChunk
from asyncrl.weights.disk import DiskChunk

KEY = "weight_sync.backend"
IN_RAY = ("object_store", "nccl")
"""Backends that keep versions in Ray's object store."""


def in_buckets(tensors: Iterable[tuple[str, NDArray[Any]]], num_bytes: int) -> Iterator[WeightBucket]:
    """Yield consecutive tensors in buckets of at most `num_bytes`, or of one larger tensor. A bucket that was yielded
    is not held any longer when the next tensor is asked for."""
    bucket: dict[str, NDArray[Any]] = {}
    size = 0
    for name, array in tensors:
        if bucket and size + array.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = array
        size += array.nbytes
        del array
        if size >= num_bytes:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket


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


StoredChunk: TypeAlias = OwnChunk | DiskChunk | DeltaChunk
"""A chunk outside of Ray's object store."""


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


@cache
def check_importable(backend: str) -> None:
    """Import the user's class in this process, which is one of those that read versions. Blocking.

    Raises:
        ConfigError: this is not possible. A repetition would fail alike.
    """
    try:
        load_function(backend, KEY, {})
    except AsyncRLError as error:
        raise ConfigError(
            f"{error.message}, so a replica cannot load {backend}. Replicas that were deployed separately "
            "(rollout.attach) have only the code of their deployment: add this file or module to the runtime_env of "
            "the application in the Serve file, or install it on its nodes",
            error.cause,
        ) from error


def _call(backend: str, method: str, argument: Any) -> Any:
    transport = _transport(backend)
    try:
        return getattr(transport, method)(argument)
    except Exception as error:
        place = raised_at(error, source_of(type(transport))) or backend
        raise UserCodeError.wrap(f"{KEY}: {place}: {method}: {type(error).__name__}: {error}", error) from error


def check_transport(config: Config) -> Iterator[ConfigProblem]:
    """Store, read and free a small chunk in the directory of weights, or with the user's class."""
    backend, directory = config.weight_sync.backend, config.weight_sync.dir
    if backend in IN_RAY or (backend == "disk" and directory is None):
        return
    floats, integers = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.uint16)
    chunk: dict[str, NDArray[Any]] = {"a": floats, "b": integers}
    try:
        stored: OwnChunk | DiskChunk
        if backend == "disk":
            assert directory is not None
            stored = DiskChunk.put(directory, chunk)
        else:
            stored = OwnChunk.put(backend, chunk)
        read = stored.get()
        stored.drop()
        for name, array in chunk.items():
            found = read.get(name) if isinstance(read, Mapping) else None
            if found is None or found.dtype != array.dtype or not np.array_equal(found, array):
                place = backend if backend == "disk" else defined_at(type(_transport(backend)))
                raise UserCodeError(f"{place}: get returned another tensor {name!r} than put had stored")
    except (OSError, ValueError) as error:
        fix = "give a directory or URL that this machine and all nodes with engines can read and write"
        yield ConfigProblem("weight_sync.dir", directory, f"weights cannot be stored there: {error}", fix)
    except AsyncRLError as error:
        yield ConfigProblem(KEY, backend, error.message.removeprefix(f"{KEY}: "), "correct it; see docs/extending.md")
