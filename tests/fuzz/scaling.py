"""The real decisions about the number of replicas (`rollout.autoscaling`) in a fuzzed run, and checks of each.

real   ReplicaScaling and its policies, the store that passes its decisions on, the policy in Serve's controller
fake   Serve, which calls this policy and starts and ends replicas (`tests.fuzz.fleet`)
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from asyncrl.core.ports import StoreStatus
from asyncrl.driver.replica_scaling import BUSY_PHASES, ReplicaScaling
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.driver.supervision import QUIET_S
from asyncrl.observe.status.run_status import RunState
from asyncrl.storage.run_dir import RunDir
from tests.fuzz.fleet import RECORD_SHARE

if TYPE_CHECKING:
    from tests.fuzz.launch import LaunchOfRun
    from tests.fuzz.watch import DriverWatch

TICK_S = 0.1
DELIVERY_S = 4.0
"""Time for a decision to reach the replicas: the calls, a tick of the driver and the period of their reports."""
SETTLING_S = 20.0
"""Time after a fault within which everything that takes part in the delivery of a decision works again."""
ROUNDING = 1e-6


class _Moment(NamedTuple):
    """What the driver knows at one of its decisions, which is once a second."""

    seconds: float
    """Time since the moment before."""
    trainer_waits: bool
    pacing_shut: bool
    serving: int
    idle: float
    """Share of the serving replicas without requests."""


class ScalingWatch:
    """Runs the driver's `ReplicaScaling`, and checks what `docs/deploy.md` promises of it."""

    def __init__(self, launch: LaunchOfRun, driver: DriverWatch) -> None:
        self._launch = launch
        self._world = launch.world
        self._driver = driver
        self._settings = launch.config.rollout.autoscaling
        recorder: Any = None
        view: Any = SimpleNamespace(message=lambda level, text: self._world.log(text))
        self._status = RunStatus(launch.config, RunDir(Path("/fuzz")), recorder)
        self._scaling = _DriverScaling(self, launch.config, self._status, view, self._expect)
        self.expected = launch.engines.wanted
        self._decisions = [self.expected]
        self._reached = 0
        """The decision that Serve follows."""
        self._decided_at = self._disturbed_at = anyio.current_time()
        self._fleet: Any = None
        self._moments: list[_Moment] = []
        """The moments since the last decision, or since the number of serving replicas changed."""
        self._last_s: float | None = None

    def start(self, group: TaskGroup) -> None:
        group.start_soon(self._scaling.run, self._store())
        group.start_soon(self._watch)

    def _store(self) -> Any:
        """Return the store's handle in a driver that may be stopped."""
        launch = self._launch
        handle, call_s = launch.store_host.handle(launch.gate), launch.config.timeouts.call_s

        def want_replicas(wanted: Any) -> Any:
            return self._driver.asked(lambda: handle.want_replicas.remote(wanted), call_s)

        return SimpleNamespace(want_replicas=SimpleNamespace(remote=want_replicas))

    def follow(self, state: RunState, store: StoreStatus | None) -> None:
        """Take over what the driver knows of its run."""
        status = self._status
        status.phase, status.restarting, status.store = state.phase, state.restarting, store
        status.trainer = {"waits": state.waits.get("trainer", ())}
        status.rollouter = {"waits": state.waits.get("rollouter", ())}

    # ------------------------------------------------------------------------------------------------ decisions

    def decide(self, now_s: float, decide: Any) -> None:
        """Let the driver decide unless it is stopped, and check the decision."""
        if not self._driver.is_awake:
            return
        before = self.expected
        self._remember(now_s)
        decide(now_s)
        if self.expected != before:
            self._check(before, self.expected, now_s)
            self._decisions.append(self.expected)
            self._decided_at = now_s
            self._moments.clear()
            self._world.decisions.append(self.expected - before)

    def _expect(self, num_replicas: int) -> None:
        self.expected = num_replicas

    def _remember(self, now_s: float) -> None:
        status = self._status
        last_s, self._last_s = self._last_s, now_s
        if status.phase != "running" or status.restarting or status.store is None:
            return
        store = status.store
        loads = [
            report.in_flight
            for report in store.replicas
            if report.phase in BUSY_PHASES and store.at - report.reported_at <= QUIET_S
        ]
        changed = self._moments and self._moments[-1].serving != len(loads)
        moment = _Moment(
            0.0 if changed or last_s is None else now_s - last_s,
            any(wait.edge == "samples" for wait in status.trainer["waits"]),
            any(wait.edge == "permit" for wait in status.rollouter["waits"]),
            len(loads),
            loads.count(0) / len(loads) if loads else 0.0,
        )
        if changed:
            self._moments.clear()
        self._moments.append(moment)

    def _check(self, before: int, wanted: int, now_s: float) -> None:
        settings = self._settings
        text = f"{wanted} replicas are wanted instead of {before}"
        if not settings.min_replicas <= wanted <= settings.max_replicas:
            self._fail(f"{text}, outside of the bounds {settings.min_replicas} and {settings.max_replicas}")
        period_s = settings.up_after_s if wanted > before else settings.down_after_s
        if (
            now_s - self._decided_at < period_s - ROUNDING
            or sum(each.seconds for each in self._moments) < period_s - ROUNDING
        ):
            self._fail(f"{text} before {period_s:g} s with a constant number of replicas")
            return
        period = self._last_period(period_s)
        total = sum(moment.seconds for moment in period)
        waited = sum(
            moment.seconds * (1.0 - moment.idle * moment.pacing_shut) for moment in period if moment.trainer_waits
        )
        idle = sum(moment.seconds * moment.idle for moment in period if moment.pacing_shut and not moment.trainer_waits)
        serving = period[-1].serving
        if serving > before:
            self._fail(f"{text} while {serving} serve, so the last decision has not been carried out")
        if wanted > before:
            if waited / total <= settings.target_trainer_wait:
                self._fail(f"{text}, although the Trainer waited {waited:.2f} s of {total:.2f} s for generation")
            if wanted > 2 * before or serving < before:
                self._fail(f"{text} while {serving} serve")
        else:
            if waited / total > settings.target_trainer_wait:
                self._fail(f"{text}, although the Trainer waited {waited:.2f} s of {total:.2f} s for generation")
            if wanted * (1.0 - settings.spare_capacity) < serving * (1.0 - idle / total) - ROUNDING:
                self._fail(f"{text}, although pacing kept {serving} idle for only {idle:.2f} s of {total:.2f} s")

    def _last_period(self, period_s: float) -> list[_Moment]:
        number = 1
        while sum(moment.seconds for moment in self._moments[-number:]) < period_s - ROUNDING:
            number += 1
        return self._moments[-number:]

    # ------------------------------------------------------------------------------------------------ Serve

    async def _watch(self) -> None:
        while True:
            self._watch_serve(anyio.current_time())
            await anyio.sleep(TICK_S)

    def _watch_serve(self, now_s: float) -> None:
        engines = self._launch.engines
        if engines.wanted != self._decisions[self._reached]:
            later = range(self._reached + 1, len(self._decisions))
            reached = next((number for number in later if self._decisions[number] == engines.wanted), None)
            if reached is None:
                self._fail(
                    f"Serve runs {engines.wanted} replicas, which is not one of the decisions {self._decisions} from "
                    f"number {self._reached} on"
                )
            else:
                self._reached = reached
        running = [replica for replica in engines.up() if not replica.hung and not replica.leaving]
        fleet = (self._world.struck, [(replica.name, replica.phase == "starting") for replica in engines.replicas])
        if fleet != self._fleet or not self._driver.is_awake or not running:
            self._fleet, self._disturbed_at = fleet, now_s
        delivery_s = self._launch.setup.push_s * (1.0 + RECORD_SHARE) + DELIVERY_S
        late = now_s - max(self._decided_at, self._disturbed_at + SETTLING_S) - delivery_s
        if late > 0 and engines.wanted != self.expected:
            self._fail(f"the decision for {self.expected} replicas has not reached Serve after {delivery_s:g} s")

    def _fail(self, text: str) -> None:
        self._world.log(f"BROKEN {text}")
        self._world.broken.append(text)


class _DriverScaling(ReplicaScaling):
    """The decisions of a driver that may be stopped."""

    def __init__(self, watch: ScalingWatch, *args: Any) -> None:
        super().__init__(*args)
        self._watch = watch

    def decide(self, now_s: float) -> None:
        self._watch.decide(now_s, super().decide)
