"""The replicas of a run whose Trainer lends its GPUs to generation while it waits (`trainer.lend_after_s`).

call ─▶ LentShare ─┬─▶ the run's own replicas
                   └─▶ while they are open: those on the Trainer's GPUs, which hand calls back before they sleep
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from asyncrl.config.schema import Config
from asyncrl.core.ports import GenerateRequest, GpuTurns, LentGpus, SleepingFleet
from rollouter.requests import is_validation
from rollouter.serving.balancing import LentShare
from rollouter.serving.client import ReplicaStream
from rollouter.serving.fleet import ServeFleet


class LendingFleet(ServeFleet):
    """The run's own replicas, and those on lent GPUs (`lent`) while these are open to calls.

    Only the run's own get each version; the others get the newest one when they wake up (`rollouter.lent_engines`).
    """

    def __init__(self, config: Config, *, namespace: str) -> None:
        """`namespace` is the run's Ray namespace."""
        super().__init__(config, namespace=namespace)
        self.lent = ServeFleet(config, namespace=namespace, lent=True)
        self._share = LentShare({"own": config.rollout.num_replicas, "lent": config.num_lent_replicas})

    def use_lent(self, is_open: bool) -> None:
        """Give calls to the lent replicas, or no further ones."""
        self._share.is_open = is_open

    async def _call(self, requests: Sequence[GenerateRequest], *, session: str) -> ReplicaStream:
        # A validation of one version may go on while the lent replicas already serve the next one.
        part = "own" if is_validation(session) else self._share.choose(session)
        call = super()._call if part == "own" else self.lent._call
        with self._share.running(part, len(requests)):
            async with aclosing(call(requests, session=session)) as items:
                async for item in items:
                    yield item


def lent_gpus(turns: GpuTurns, fleet: SleepingFleet) -> LentGpus:
    """Return the Rollouter's side of lent GPUs. `fleet`: that of the run, which may have no engines at all."""
    if isinstance(fleet, LendingFleet):
        return LentGpus(turns, fleet.lent, fleet.use_lent)
    return LentGpus(turns, fleet, lambda is_open: None)


def run_fleet(config: Config, *, namespace: str) -> ServeFleet:
    """Return the replicas of the run in this Ray namespace."""
    return (LendingFleet if config.lends_gpus else ServeFleet)(config, namespace=namespace)
