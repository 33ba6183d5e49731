"""Reports a replica's status to the weight store, watches its engine, and ends the replica if the engine fails.

A replica ends when its engine is dead, samples no token for `timeouts.engine_s` although it has requests, or, without
requests, leaves a ping unanswered for as long. Serve then replaces it. During a pause of the engine, the deadlines of
`weights` apply instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import psutil
import ray
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from asyncrl.core.ports import ReplicaPhase, ReplicaReport, WantedReplicas, WeightsVersion
from asyncrl.profiling.process_usage import ProcessMeter, ProcessMonitor
from rollouter.serving.replica.engine import OpenAIEngine
from rollouter.serving.replica.liveness import EngineLiveness

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0
EXIT_DELAY_S = 0.5
"""Time between giving up and the end of the process, in which the last answers are sent."""
FINAL_PHASES: dict[ReplicaPhase, int] = {"leaving": 1, "broken": 2}
"""Phases that only those of a higher rank can follow."""
REPORT_EVERY_S = 1.0
REPORT_ANSWER_S = 10.0
"""Time for which a report waits for the store's answer. After that, a newer report is sent."""


class StatusReporter:
    """Sends a replica's reports to the weight store until the process ends, from a separate thread.

    The event loop is blocked while vLLM starts its engine, and a slow store must not affect generation. Only one report
    is in flight; the next one contains all changes since then.
    """

    store: Any = None
    """Handle of the weight store that receives the reports, or None if there is no run."""

    def __init__(self, describe: Callable[[], ReplicaReport]) -> None:
        """`describe` is called in the reporter's thread."""
        self.wanted_replicas: WantedReplicas | None = None
        """The driver's decision about the number of replicas, as the store last answered."""
        self._describe = describe
        self._changed = threading.Event()
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def report_soon(self) -> None:
        """Send the next report now instead of after `REPORT_EVERY_S`."""
        self._changed.set()

    def _run(self) -> None:
        while True:
            if self.store is not None:
                try:
                    answer = self.store.report.remote(self._describe())
                    self.wanted_replicas = ray.get(answer, timeout=REPORT_ANSWER_S)
                except Exception as error:  # noqa: BLE001  the next report replaces a lost one
                    logger.debug("the weight store did not accept a report: %r", error)
            self._changed.wait(REPORT_EVERY_S)
            self._changed.clear()


class ReplicaHealth:
    """Health of one replica. Use it on the server's event loop."""

    def __init__(self, *, replica: str, node_id: str, engine_s: float) -> None:
        self.replica = replica
        self.weights_version = WeightsVersion(0, 0)
        """The version that the engine serves; (0, 0) is the weights in the model's files."""
        self.broken = ""
        """The reason why the replica must be replaced; empty while it works."""
        self.crashed = False
        """Whether the requests in the engine may be the cause of the failure."""
        self.num_uncompared = 0
        """See `ReplicaReport`."""
        self.paused = False
        self.up = False
        """Whether the start is complete. Weight updates end in the phase `serving` if it is, else in `starting`."""
        self.engine_s = engine_s
        """`timeouts.engine_s`."""
        self._node_id = node_id
        self._engine: OpenAIEngine | None = None
        self._engine_pids: tuple[int, ...] = ()
        self._phase: tuple[ReplicaPhase, float] = ("starting", time.time())
        self._ping: asyncio.Task[None] | None = None
        """The ping that is not answered yet. It was sent while the engine had no requests."""
        self._tasks: list[asyncio.Task[None]] = []
        self._process = ProcessMonitor(f"replica-{replica}")
        self._engine_meter = ProcessMeter()
        self._reporter = StatusReporter(self._describe)

    def report_to(self, store: Any) -> None:
        """Send the reports to this weight store, or nowhere if it is None."""
        self._reporter.store = store
        self._reporter.report_soon()

    async def attach(self, engine: OpenAIEngine) -> None:
        """Begin to watch a started engine."""
        self._engine_pids = await asyncio.to_thread(_engine_pids, engine.client)
        self._engine = engine
        self._process.start()  # not earlier: the event loop is blocked while vLLM starts
        self.in_background(self._watch(engine))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until the process ends. The replica gives up if it fails."""

        def on_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.give_up(f"a background task failed: {error!r}")

        task = asyncio.create_task(work)
        task.add_done_callback(on_done)
        self._tasks.append(task)

    def enter(self, phase: ReplicaPhase) -> None:
        """Enter a phase and report it, unless the current one is final."""
        current = self._phase[0]
        if phase != current and FINAL_PHASES.get(phase, 0) >= FINAL_PHASES.get(current, 0):
            self._phase = (phase, time.time())
            self._reporter.report_soon()

    @property
    def wanted_replicas(self) -> WantedReplicas | None:
        """The driver's decision about the number of replicas, or None if it does not decide about it."""
        return self._reporter.wanted_replicas

    @property
    def leaving(self) -> bool:
        """Whether Serve has asked this replica to end."""
        return self._phase[0] == "leaving"

    def end_update(self) -> None:
        """Leave the phases of a weight update."""
        self.enter("serving" if self.up else "starting")

    def describe_state(self) -> str:
        """Return the replica's state, for error messages."""
        return self.broken or f"replica {self.replica} still serves version {self.weights_version.version}"

    def give_up(self, why: str, *, crash: bool = False) -> None:
        """Refuse all calls from now on, and end this process soon, so that Serve replaces the replica.

        With `crash`, the requests in the engine may be the cause; they fail with `EngineCrashError`.
        """
        if self.broken:
            return
        self.broken = f"replica {self.replica} must be replaced: {why}"
        self.crashed = crash
        logger.error(self.broken)
        self.enter("broken")
        if self._engine is not None:
            # Without this, requests that hang in the engine would never end.
            self._engine.client.output_processor.propagate_error(EngineDeadError())
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, self._exit)

    def give_up_hung_engine(self, symptom: str) -> None:
        """Give up an engine that does not answer. If an older ping is still unanswered, requests are not the cause."""
        self.give_up(f"{symptom} for {self.engine_s:g} s (timeouts.engine_s)", crash=self._ping is None)

    def _exit(self) -> None:
        """Kill the engine's processes, even stopped ones, and end this process even if the engine resists shutdown."""
        threading.Timer(EXIT_DELAY_S, os._exit, (1,)).start()
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
        liveness = EngineLiveness(self.engine_s, 2 * WATCH_EVERY_S)
        while not self.broken:
            observed_at = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            if llm.errored:
                self.give_up("its engine is dead", crash=True)
                return
            if ping_answered := self._ping is not None and self._ping.done():
                self._ping = None
            requests = llm.output_processor.get_num_unfinished_requests()
            liveness.limit_s = self.engine_s
            if liveness.observe(
                time.monotonic() - observed_at,
                tokens=engine.gauges.generated_tokens,
                busy=requests > 0,
                paused=self.paused,
                ping_answered=ping_answered,
                ping_open=self._ping is not None,
            ):
                self.give_up_hung_engine(
                    f"its engine has {requests} requests and made no token" if requests else "its engine did not answer"
                )
            elif not requests and not self.paused and self._ping is None:
                self._ping = asyncio.create_task(_ping(llm))

    def _describe(self) -> ReplicaReport:
        """Return a report. Called in the reporter's thread, also while the engine starts."""
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
            lineage=self.weights_version.lineage,
            version=self.weights_version.version,
            in_flight=in_flight,
            generated_tokens=0 if engine is None else engine.gauges.generated_tokens,
            reported_at=time.time(),
            error=self.broken,
            health=self._process.measure(),
            engine_health=self._engine_meter.measure(self._engine_pids),
            load=None if engine is None else engine.gauges.load_with(in_flight),
            num_uncompared=self.num_uncompared,
        )


async def _ping(llm: AsyncLLM) -> None:
    """Wait for an answer of every worker through the engine core. An error also counts as an answer."""
    try:
        await llm.collective_rpc("check_health")
    except Exception as error:  # noqa: BLE001  `errored` reports an engine's death
        logger.debug("a ping ended with %r", error)


def _engine_pids(llm: AsyncLLM) -> tuple[int, ...]:
    """Return the ids of vLLM's child processes: the engine core and its children."""
    manager = llm.engine_core.resources.engine_manager
    cores = [process.pid for process in getattr(manager, "processes", ()) if process.pid is not None]
    below = [child.pid for core in cores for child in psutil.Process(core).children(recursive=True)]
    return (*cores, *below)
