"""One replica's health: what it says of itself, whether its engine lives, and how it ends so that Serve replaces it.

It ends when its engine is dead, makes no token for `timeouts.engine_s` although it has requests, or has none and leaves
a ping unanswered for so long. In a pause it is not judged: `weights` has deadlines of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import psutil
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.health.processes import OwnHealth, ProcessMeter
from asyncrl.ports import Edition, ReplicaPhase, ReplicaReport
from rollouter.serving.engine import OpenAIEngine
from rollouter.serving.pulse import Pulse
from rollouter.serving.reporter import Reporter

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
LAST_WORDS_S = 0.5
"""Between giving up and the end of the process: answers are on their way."""


class Health:
    """Of one replica. Use it on the server's event loop."""

    def __init__(self, *, replica: str, node_id: str, engine_s: float, store: Any) -> None:
        """
        Args:
            replica: Its name.
            node_id: Ray's.
            engine_s: `timeouts.engine_s`.
            store: The weight store's handle, where it reports to; None: nowhere.
        """
        self.replica = replica
        self.edition = Edition(0, 0)
        """What the engine serves; (0, 0): the model's files."""
        self.broken = ""
        """Why it must be replaced."""
        self.crashed = False
        """The requests that were in the engine may be why."""
        self.paused = False
        self.up = False
        """It takes requests, or will as soon as it has loaded."""
        self._node_id = node_id
        self._engine_s = engine_s
        self._engine: OpenAIEngine | None = None
        self._engine_pids: tuple[int, ...] = ()
        self._phase: tuple[ReplicaPhase, float] = ("starting", time.time())
        self._ping: asyncio.Task[None] | None = None
        """One that is not answered. It was sent while the engine had no requests."""
        self._tasks: list[asyncio.Task[None]] = []
        self._own = OwnHealth(f"replica-{replica}")
        self._engine_meter = ProcessMeter()
        self._reporter = None if store is None else Reporter(store, self._describe)

    @property
    def newest(self) -> Edition | None:
        """What was published last, as the weight store has told."""
        return None if self._reporter is None else self._reporter.newest

    async def attach(self, engine: OpenAIEngine) -> None:
        """The engine has started: watch it from now on."""
        self._engine_pids = await asyncio.to_thread(_engine_pids, engine.client)
        self._engine = engine
        self._own.start()  # not before: the loop stands still while vLLM starts
        self.in_background(self._watch(engine))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """A task of this process's whole life. If it fails, nobody watches this replica any more."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.give_up(f"what watches it failed: {error!r}")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    def enter(self, phase: ReplicaPhase) -> None:
        """Say in which phase this replica is now; `broken` is the last one."""
        if self._phase[0] not in (phase, "broken"):
            self._phase = (phase, time.time())
            if self._reporter is not None:
                self._reporter.changed()

    def rest(self) -> None:
        """No version is being applied any more."""
        self.enter("serving" if self.up else "starting")

    def state(self) -> str:
        """For messages about what failed."""
        return self.broken or f"replica {self.replica} still serves version {self.edition.version}"

    def give_up(self, why: str, *, crash: bool = False) -> None:
        """Refuse everything from now on, and end this process once the answers are out: Serve starts another.

        Args:
            why: What happened.
            crash: The requests that are in the engine may be why, and are told so.
        """
        if self.broken:
            return
        self.broken = f"replica {self.replica} must be replaced: {why}"
        self.crashed = crash
        logger.error(self.broken)
        self.enter("broken")
        if self._engine is not None:
            # Nothing else would end requests that are frozen in the engine, or that it is stuck with.
            self._engine.client.output_processor.propagate_error(EngineDeadError())
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._exit)

    def hangs(self, how: str) -> None:
        """`give_up` an engine that does not answer. It is no request's doing if it did not before it had any."""
        self.give_up(f"{how} for {self._engine_s:g} s (timeouts.engine_s)", crash=self._ping is None)

    def _exit(self) -> None:
        """End the engine's processes for certain, stopped ones too, and this one whatever they do."""
        threading.Timer(LAST_WORDS_S, os._exit, (1,)).start()
        for pid in self._engine_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if self._engine is not None:
                self._engine.client.shutdown()
        finally:
            os._exit(1)

    async def _watch(self, engine: OpenAIEngine) -> None:
        llm = engine.client
        pulse = Pulse(self._engine_s, 2 * WATCH_EVERY_S)
        while not self.broken:
            seen = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            if llm.errored:
                self.give_up("its engine is dead", crash=True)
                return
            if answered := self._ping is not None and self._ping.done():
                self._ping = None
            requests = llm.output_processor.get_num_unfinished_requests()
            if pulse.look(
                time.monotonic() - seen,
                tokens=engine.gauges.generated_tokens,
                busy=requests > 0,
                paused=self.paused,
                answered=answered,
                pinged=self._ping is not None,
            ):
                self.hangs(
                    f"its engine has {requests} requests and made no token" if requests else "its engine did not answer"
                )
            elif not requests and not self.paused and self._ping is None:
                self._ping = asyncio.create_task(_ping(llm))

    def _describe(self) -> ReplicaReport:
        """Called in the reporter's thread, and while the engine starts."""
        engine = self._engine
        phase, since = self._phase
        in_flight = 0 if engine is None else engine.client.output_processor.get_num_unfinished_requests()
        return ReplicaReport(
            replica=self.replica,
            node_id=self._node_id,
            pid=os.getpid(),
            engine_pids=self._engine_pids,
            phase=phase,
            phase_since=since,
            lineage=self.edition.lineage,
            version=self.edition.version,
            in_flight=in_flight,
            generated_tokens=0 if engine is None else engine.gauges.generated_tokens,
            reported_at=time.time(),
            told=self.broken,
            health=self._own.tell(),
            engine_health=self._engine_meter.look(self._engine_pids),
            load=None if engine is None else engine.gauges.load_with(in_flight),
        )


async def _ping(llm: AsyncLLM) -> None:
    """Through the engine core to every worker, and back. An error is an answer, too."""
    try:
        await llm.collective_rpc("check_health")
    except Exception as error:  # noqa: BLE001  `errored` tells of an engine's death
        logger.debug("a ping ended with %r", error)


def _engine_pids(llm: AsyncLLM) -> tuple[int, ...]:
    """vLLM's processes below this one: the engine core, and what it has started."""
    manager = llm.engine_core.resources.engine_manager
    cores = [process.pid for process in getattr(manager, "processes", ()) if process.pid is not None]
    below = [child.pid for core in cores for child in psutil.Process(core).children(recursive=True)]
    return (*cores, *below)
