"""A role of the Trainer without Ray: its calls run in the process of the test."""

from __future__ import annotations

from typing import Any, Self

import anyio

from asyncrl.config.sections.base import Dtype
from asyncrl.core.ports import WeightPublisher
from trainer.engines.base import EngineSpec, Layout
from trainer.workers.outcomes import CallResult
from trainer.workers.placement import Role
from trainer.workers.rank import Rank
from trainer.workers.tracing import NO_PROFILING, RankProfiling
from trainer.workers.worker import PublishedVersion, RoleGroup


class InlineGroup(RoleGroup):
    """A `RoleGroup` of one worker, on a thread of this process. Created by `await InlineGroup.start(spec)`.

    One call runs at a time and others wait.
    """

    def __init__(self, rank: Rank, role: Role, layout: Layout, weights_dtype: Dtype) -> None:
        self._rank = rank
        self._role: Role = role
        self._weights_dtype = weights_dtype
        self.layout = layout
        # Published weights may be the live ones, so no step may run until the publisher has copied them.
        self._lock = anyio.Lock()

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        role: Role = "actor",
        publisher: WeightPublisher | None = None,
        weights_dtype: Dtype = "float32",
        profiling: RankProfiling = NO_PROFILING,
    ) -> Self:
        """Load the model.

        Args:
            publisher: receives the weights in `publish`, in `weights_dtype`.
            profiling: the steps to trace. Events are always recorded by this process.

        Raises:
            ConfigError: see `new_engine`.
        """
        rank = Rank(publisher, profiling, role)
        try:
            layouts = _value(await rank.load({role: spec}))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await rank.close()
            raise
        return cls(rank, role, layouts[role], weights_dtype)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        async with self._lock:
            return _value(await self._rank.call(self._role, method, args, kwargs))

    async def publish(self, version: int, step: int, *, validate: bool, probe: bool = False) -> PublishedVersion:
        async with self._lock:
            return _value(await self._rank.publish(self._role, self._weights_dtype, version, step, validate, probe))

    async def republish(self) -> None:
        _value(await self._rank.republish())

    async def end_traces(self, step: int) -> str:
        """See `Tracer.end`."""
        async with self._lock:
            return _value(await self._rank.end_trace(step))

    async def wait_for_files(self) -> None:
        await self._rank.wait_for_files(self._role)

    async def close(self) -> None:
        """Close the engine and its thread, after running calls.

        Raises:
            InfraError: an unfinished checkpoint could not be written. Everything is closed nevertheless.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                _value(await self._rank.close())


def _value(answer: CallResult) -> Any:
    if answer.error is not None:
        raise answer.error
    return answer.value
