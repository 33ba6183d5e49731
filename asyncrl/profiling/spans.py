"""What is put into a profiler's buffer, and the spans and contexts that put it there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from asyncrl.profiling.profiler import Profiler

context: ContextVar[Mapping[str, Any]] = ContextVar("profile_context", default={})  # noqa: B039  never changed


class Raw(NamedTuple):
    """As recorded; encoded later, in another thread."""

    name: str
    start: float
    """`perf_counter`, or Unix seconds if `wall`."""
    duration_s: float
    place: tuple[int | None, int | None]
    """Step and version."""
    context: Mapping[str, Any]
    fields: Mapping[str, Any]
    wall: bool = False


class Span:
    """What is under way; `add` fields that are known only later. Works with `with` and with `async with`."""

    __slots__ = ("_fields", "_name", "_profiler", "_start", "_sync")

    def __init__(self, profiler: Profiler, name: str, fields: dict[str, Any], sync: bool) -> None:
        self._profiler = profiler
        self._name = name
        self._fields = fields
        self._sync = sync
        self._start = 0.0

    def add(self, **fields: Any) -> None:
        self._fields.update(fields)

    def __enter__(self) -> Self:
        if self._sync:
            self._profiler.synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sync and kind is None:
            self._profiler.synchronize()
        end = time.perf_counter()
        if kind is not None:
            self._fields["error"] = kind.__name__
        self._profiler.put(
            Raw(self._name, self._start, end - self._start, self._profiler.place, context.get(), self._fields)
        )

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Nothing(Span):
    """A span that nobody wants."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def add(self, **fields: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NOTHING = Nothing()
NO_CONTEXT = nullcontext()


class Context(AbstractContextManager[None]):
    """A class, as a generator takes three times as long."""

    __slots__ = ("_fields", "_token")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = context.set({**context.get(), **self._fields})

    def __exit__(self, *error: object) -> None:
        context.reset(self._token)
