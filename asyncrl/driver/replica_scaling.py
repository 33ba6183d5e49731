"""Decides how many replicas the run wants, and sends it to the weight store, from which it reaches Ray Serve.

`rollouter.serving.autoscaling` describes the way to Serve. A restarted store has forgotten the number and
reports none in its next status, so the number is sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.autoscaling import ReplicaAutoscaler, ReplicaLoad
from asyncrl.core.failures import InfraError
from asyncrl.core.ports import WantedReplicas
from asyncrl.driver.actors import call
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.supervision import QUIET_S, TICK_S
from asyncrl.observe.formats import count, percent
from asyncrl.observe.terminal.live import View
from asyncrl.profiling import profile

logger = logging.getLogger(__name__)

BUSY_PHASES = ("serving", "fetching", "pausing", "loading", "verifying")
"""The phases of a replica that has requests or may get some."""


class ReplicaScaling:
    """Changes the number of replicas of a run with `rollout.autoscaling`."""

    def __init__(self, config: Config, status: RunStatus, view: View, expect_replicas: Callable[[int], None]) -> None:
        """`expect_replicas` is called with each new number before it reaches Serve."""
        self._scaler = ReplicaAutoscaler(config.rollout.autoscaling.policy, config.rollout.num_replicas)
        self._wanted = WantedReplicas(0, self._scaler.wanted)
        self._call_s = config.timeouts.call_s
        self._status = status
        self._view = view
        self._expect_replicas = expect_replicas

    async def run(self, store: Any) -> None:
        """Decide once a second, until cancelled. `store`: the handle of the weight store."""
        while True:
            self.decide(anyio.current_time())
            known = self._status.store
            if known is not None and known.wanted_replicas != self._wanted:
                try:
                    answer = store.want_replicas.remote(self._wanted)
                    await call("weight store", answer, self._call_s, doing="taking the wanted number of replicas")
                except InfraError as error:  # its probe deals with the store; the next status says what it knows
                    logger.debug("the wanted number of replicas is sent again: %s", error.brief)
            await anyio.sleep(TICK_S)

    def decide(self, now_s: float) -> None:
        """Take the current statuses into account, at `now_s` (monotonic)."""
        status, scaler = self._status, self._scaler
        if status.phase != "running" or status.restarting or status.store is None:
            scaler.skip(now_s)
            return
        before, store = scaler.wanted, status.store
        serving = [
            report.in_flight
            for report in store.replicas
            if report.phase in BUSY_PHASES and store.at - report.reported_at <= QUIET_S
        ]
        idle = sum(not in_flight for in_flight in serving) / len(serving) if serving else 0.0
        load = ReplicaLoad.now(
            trainer_waits=_waits_on(status.trainer, "samples"),
            pacing_shut=_waits_on(status.rollouter, "permit"),
            idle_replicas=idle,
        )
        if (wanted := scaler.observe(now_s, load, serving=len(serving))) == before:
            return
        self._wanted = WantedReplicas(self._wanted.decision + 1, wanted)
        self._expect_replicas(wanted)
        measured = scaler.load
        profile.note("replicas.wanted", replicas=wanted, before=before, **measured._asdict())
        cause = (
            f"the Trainer waited for samples {percent(measured.trainer_wait)} of the time"
            if wanted > before
            else f"pacing kept replicas idle {percent(measured.idle)} of the time"
        )
        self._view.message("", f"the run wants {count(wanted, 'replica')} instead of {before}: {cause}")


def _waits_on(status: Mapping[str, Any], edge: str) -> bool:
    return any(wait.edge == edge for wait in status.get("waits", ()))
