"""The Rollouter's side of GPUs that the Trainer lends to generation while it waits (`trainer.lend_after_s`).

    the ranks are offloaded ─▶ wake with the newest version ─▶ open ─▶ … ─▶ the Trainer wants them
        ─▶ close ─▶ sleep: requests in flight continue on other replicas ─▶ grant

No version is published between the ranks' turns, so these engines always serve the newest one. Whose turn it is, is
kept by the weight store (`asyncrl.weights.gpu_turns`): a Rollouter that starts takes over what an earlier one has left.

An engine that dies is started again in the engines' turn, because its start needs the GPU. If the Trainer wants the
GPUs meanwhile, it waits for this start. If an engine neither sleeps nor dies within `timeouts.start_s`, `run` fails.
"""

from __future__ import annotations

import logging

import anyio

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import InfraError
from asyncrl.core.ports import LentGpus, WeightFeed
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from rollouter.group_workers.pool import WorkerPool

logger = logging.getLogger(__name__)


class LentEngines:
    """Wakes the engines on lent GPUs, and lets them sleep once the Trainer wants the GPUs."""

    def __init__(
        self,
        gpus: LentGpus,
        feed: WeightFeed,
        workers: WorkerPool | None,
        *,
        timeouts: TimeoutsConfig,
        waits: WaitBoard,
    ) -> None:
        """`workers` give calls to these engines as well; None: this process makes all calls."""
        self._turns, self._fleet, self._use = gpus
        self._feed = feed
        self._workers = workers
        self._timeouts = timeouts
        self._waits = waits
        self._may_be_awake = True
        """An earlier Rollouter may have left them awake, and so does the start of the run."""

    async def run(self) -> None:
        """Follow the turns until cancelled.

        Raises:
            InfraError: an engine does not sleep, or the weight store is gone.
            BugError: the weights of an engine differ from the published ones.
        """
        while True:
            turn = await self._turns.wait("engines", "wanted", timeout_s=self._timeouts.call_s)
            if turn == "engines":
                await self._generate()
            if turn is not None:
                await self._sleep()
                await self._turns.grant()

    async def leave(self) -> None:
        """Leave the GPUs to the ranks, when the Rollouter ends. A Trainer that is stopped still has to write its last
        checkpoint."""
        with anyio.move_on_after(self._timeouts.stop_s):
            if self._may_be_awake:
                await self._sleep()
            await self._turns.grant()

    async def _generate(self) -> None:
        """Let the engines generate until the Trainer wants the GPUs."""
        self._may_be_awake = True
        while not await self._wake():
            if await self._turns.wait("wanted", "ranks", timeout_s=self._timeouts.probe_s) is not None:
                return
        self._open(True)
        with profile.span("gpus.lent"):
            try:
                # A restarted store knows no turn until the Trainer reports it.
                while await self._turns.wait("wanted", "ranks", timeout_s=self._timeouts.call_s) is None:
                    pass
            finally:
                self._open(False)

    def _open(self, is_open: bool) -> None:
        self._use(is_open)
        if self._workers is not None:
            self._workers.use_lent(is_open)

    async def _wake(self) -> bool:
        """Return whether all engines serve the newest version. Those that are awake already continue."""
        try:
            with self._waits.waiting("apply", limit_s=self._timeouts.apply_call_s):
                if (newest := await self._feed.latest()) is None:
                    await self._fleet.wake()
                else:
                    await self._fleet.apply(newest)
        except InfraError as error:
            logger.warning("engines on the Trainer's GPUs did not wake up, which is tried again: %s", error.brief)
            return False
        return True

    async def _sleep(self) -> None:
        with self._waits.waiting("apply", limit_s=self._timeouts.apply_call_s):
            await self._fleet.sleep()
        self._may_be_awake = False
