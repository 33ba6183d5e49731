"""A role in this process: for tests, benchmarks and scripts under `python` or `torchrun`."""

from __future__ import annotations

from typing import Any, Self

import anyio

from asyncrl.config.schema import Dtype
from asyncrl.ports import WeightPublisher
from trainer.engine.base import EngineSpec, Layout
from trainer.outcomes import Answer
from trainer.placement import Role
from trainer.rank import Rank
from trainer.roles import Published, RoleCalls
from trainer.tracing import NO_PROFILING, RankProfiling


class InlineGroup(RoleCalls):
    """`RoleGroup` of one worker on a thread of this process. `await InlineGroup.start(spec)` makes one.

    One call at a time; others wait. Under torchrun every process has one, and gives it its own rows.
    """

    def __init__(self, rank: Rank, role: Role, layout: Layout, weights_dtype: Dtype) -> None:
        self._rank = rank
        self._role: Role = role
        self._weights_dtype = weights_dtype
        self.layout = layout
        # Published weights may be the live ones: no step until the publisher has copied them.
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
            publisher: where `publish` puts weights, in `weights_dtype`.
            profiling: what to trace. Events go where those of this process go, whatever it says.

        Raises:
            ConfigError: see `EngineRegistry.new`.
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

    async def publish(self, version: int, step: int, *, validate: bool) -> Published:
        async with self._lock:
            return _value(await self._rank.publish(self._role, self._weights_dtype, version, step, validate))

    async def republish(self) -> None:
        _value(await self._rank.republish())

    async def end_traces(self, step: int) -> str:
        """`step` is over: see `Tracer.end`."""
        async with self._lock:
            return _value(await self._rank.end_trace(step))

    async def written(self) -> None:
        await self._rank.written(self._role)

    async def close(self) -> None:
        """Give up the engine and its thread, once what runs has ended.

        Raises:
            InfraError: a checkpoint begun could not be written. All is given up nevertheless.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                _value(await self._rank.close())


def _value(answer: Answer) -> Any:
    if answer.error is not None:
        raise answer.error
    return answer.value
