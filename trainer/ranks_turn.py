"""The ranks' turns on the GPUs that they share with the engines (`placement: colocated`).

lease ─▶ begin: the engines sleep ─▶ experience, steps, publish, checkpoint ─▶ end: the ranks are offloaded ─▶ lease
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.ports import GpuTurns
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from trainer.workers.worker import RoleGroup


class RanksTurn:
    """Takes the GPUs for the ranks and gives them back. Without `turns`, ranks have GPUs of their own, and nothing
    happens."""

    def __init__(self, turns: GpuTurns | None, waits: WaitBoard, *, offload_s: float) -> None:
        """`offload_s`: deadline of the calls that offload the ranks."""
        self.roles: Sequence[RoleGroup] = ()
        """All models on the ranks, once these have started."""
        self._turns = turns
        self._waits = waits
        self._offload_s = offload_s
        self._has_gpus = False
        self._wants_gpus = False

    async def begin(self) -> None:
        """Return once the engines sleep. What the ranks need moves to the GPUs with their next calls.

        It has no deadline of its own: the engines may be answering a validation first. The calls of the Rollouter to
        them have deadlines, and a Rollouter that fails is replaced.
        """
        if self._turns is None or self._has_gpus:
            return
        self._wants_gpus = True
        with self._waits.waiting("gpus"), profile.span("trainer.wait_gpus"):
            await self._turns.take()
        self._has_gpus, self._wants_gpus = True, False

    async def end(self) -> None:
        """Move weights, gradients and optimizer state of all models into the memory of the machine, and let the engines
        wake up.

        Raises:
            InfraError, DeadlineError: the ranks failed, so they may still have GPU memory, and the turn goes on.
        """
        if self._turns is None or not self._has_gpus:
            return
        with self._waits.waiting("offload", limit_s=len(self.roles) * self._offload_s), profile.span("trainer.offload"):
            for role in self.roles:
                await role.offload()
        self._has_gpus = False
        await self._turns.give_back()

    async def restore(self) -> None:
        """Inform a weight store that was restarted and has lost whose turn it is."""
        if self._turns is None or self._wants_gpus:  # `begin` repeats its call
            return
        if self._has_gpus:
            await self._turns.take()
        else:
            await self._turns.give_back()
