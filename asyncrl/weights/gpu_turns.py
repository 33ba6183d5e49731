"""The turns on GPUs that engines and ranks share (`placement: colocated`), as the weight store keeps them.

    engines ── the Trainer has a lease ──▶ wanted ── the engines sleep ──▶ ranks ── the ranks are offloaded ──▶ engines

A run begins with the turn of the ranks, which load their models before the engines start. A replica that starts waits
for the turn of the engines, because vLLM takes its share of the GPU at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from asyncrl.core.failures import FencedError
from asyncrl.core.ports import GpuTurn


class GpuTurnRelay:
    """Keeps the turn. The weight store inherits it, so that its methods can be called through Ray. Everything runs on
    one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._turn: GpuTurn | None = "ranks"
        """None: the store was restarted, and has not been informed since."""
        self._taker = -1
        """Lineage of the Trainer that wanted the GPUs last."""
        self._turned = asyncio.Condition()

    async def want_gpus(self, lineage: int, timeout_s: float) -> bool:
        """Return whether it is the ranks' turn, if necessary after a wait for the engines to sleep.

        Raises:
            FencedError: a Trainer of a newer lineage wants the GPUs.
        """
        if lineage < self._taker:
            raise FencedError(
                f"the GPUs belong to a Trainer of lineage {self._taker}, which has replaced that of lineage {lineage}"
            )
        self._taker = lineage
        if self._turn != "ranks":
            await self._set("wanted")
        return await self.wait_gpu_turn(("ranks",), timeout_s) is not None

    async def return_gpus(self, lineage: int) -> None:
        """Begin the engines' turn. The call of a Trainer that has been replaced has no effect."""
        if lineage >= self._taker:
            await self._set("engines")

    async def grant_gpus(self) -> None:
        """Begin the ranks' turn."""
        await self._set("ranks")

    async def wait_gpu_turn(self, turns: Collection[str], timeout_s: float) -> GpuTurn | None:
        """Return the turn once it is one of `turns`; None: it was not in time."""
        try:
            async with asyncio.timeout(timeout_s), self._turned:
                await self._turned.wait_for(lambda: self._turn in turns)
                return self._turn
        except TimeoutError:
            return None

    async def _set(self, turn: GpuTurn) -> None:
        async with self._turned:
            self._turn = turn
            self._turned.notify_all()
