"""The ranks' turns on the GPUs that they share with engines.

With `placement: colocated`, the engines have them during every wait for samples:

    lease ─▶ begin: the engines sleep ─▶ experience, steps, publish, checkpoint ─▶ end: the ranks are offloaded ─▶ lease

With `trainer.lend_after_s`, they have them only during a long wait:

    the wait is long ─▶ the ranks are offloaded ─▶ the samples are leased ─▶ begin: the engines sleep ─▶ experience, …
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from asyncrl.core.ports import GpuTurns, QueueStatus
from asyncrl.core.tasks import task_group
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from trainer.lending import LendingPolicy, SampleWait
from trainer.workers.worker import RoleGroup

POLL_S = 1.0
"""Interval at which a long wait is compared with the policy."""


class RanksTurn:
    """Takes the GPUs for the ranks and gives them back. Without `turns`, ranks have GPUs of their own, and nothing
    happens."""

    def __init__(
        self, turns: GpuTurns | None, waits: WaitBoard, *, offload_s: float, lending: LendingPolicy | None = None
    ) -> None:
        """
        Args:
            offload_s: deadline of the calls that offload the ranks.
            lending: when to lend the GPUs during a wait; None: from its beginning.
        """
        self.roles: Sequence[RoleGroup] = ()
        """All models on the ranks, once these have started."""
        self._turns = turns
        self._waits = waits
        self._offload_s = offload_s
        self._lending = lending
        self._has_gpus = False
        self._wants_gpus = False
        self._last_offload_s = self._last_begin_s = 0.0

    async def begin(self) -> None:
        """Return once the engines sleep. What the ranks need moves to the GPUs with their next calls.

        It has no deadline of its own: the engines may be answering a validation first. The calls of the Rollouter to
        them have deadlines, and a Rollouter that fails is replaced.
        """
        if self._turns is None or self._has_gpus:
            return
        self._wants_gpus, started = True, anyio.current_time()
        with self._waits.waiting("gpus"), profile.span("trainer.wait_gpus"):
            await self._turns.take()
        self._has_gpus, self._wants_gpus = True, False
        self._last_begin_s = anyio.current_time() - started

    async def end(self) -> None:
        """Move weights, gradients and optimizer state of all models into the memory of the machine, and let the engines
        wake up.

        Raises:
            InfraError, DeadlineError: the ranks failed, so they may still have GPU memory, and the turn goes on.
        """
        if self._turns is None or not self._has_gpus:
            return
        await self._offload()
        await self._give_back(self._turns)

    async def end_run(self) -> None:
        """End the last turn. Engines on lent GPUs are not needed any more, because nothing is generated."""
        if self._lending is None:
            await self.end()

    @asynccontextmanager
    async def released(
        self, queue_status: Callable[[], Awaitable[QueueStatus]], num_wanted: Callable[[], int]
    ) -> AsyncIterator[None]:
        """Let the engines have the GPUs while the block waits for samples, from its beginning or once the policy lends
        them.

        Args:
            num_wanted: returns how many samples the block still waits for.

        Raises:
            InfraError, DeadlineError: as `end`, or the queue did not answer.
        """
        if self._lending is None or not self._has_gpus:
            await self.end()
            yield
            return
        async with task_group() as tasks:
            waiting = anyio.CancelScope()
            tasks.start_soon(self._lend_when_long, self._lending, waiting, queue_status, num_wanted)
            yield
            waiting.cancel()

    async def restore(self) -> None:
        """Inform a weight store that was restarted and has lost whose turn it is."""
        if self._turns is None or self._wants_gpus:  # `begin` repeats its call
            return
        if self._has_gpus:
            await self._turns.take()
        else:
            await self._turns.give_back()

    async def _lend_when_long(
        self,
        policy: LendingPolicy,
        waiting: anyio.CancelScope,
        queue_status: Callable[[], Awaitable[QueueStatus]],
        num_wanted: Callable[[], int],
    ) -> None:
        """Lend the GPUs once the policy allows it. The end of `waiting` ends the wait for that, but not an offload that
        has begun."""
        assert self._turns is not None
        with waiting:
            started, first = anyio.current_time(), await queue_status()
            await anyio.sleep(policy.after_s)
            switch_s = self._last_offload_s + self._last_begin_s
            while True:
                now = await queue_status()
                wait = SampleWait.of(anyio.current_time() - started, first, now, num_wanted())
                if policy.lends(wait, switch_s=switch_s):
                    break
                await anyio.sleep(POLL_S)
        if not waiting.cancel_called:
            await self._offload()
        if not waiting.cancel_called:  # otherwise the samples have arrived meanwhile, and the turn goes on
            await self._give_back(self._turns)

    async def _offload(self) -> None:
        started = anyio.current_time()
        with self._waits.waiting("offload", limit_s=len(self.roles) * self._offload_s), profile.span("trainer.offload"):
            for role in self.roles:
                await role.offload()
        self._last_offload_s = anyio.current_time() - started

    async def _give_back(self, turns: GpuTurns) -> None:
        self._has_gpus = False
        await turns.give_back()
