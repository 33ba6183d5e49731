"""Inject faults one at a time, and detect recoveries, also those that process ids do not show."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.driver.cluster.processes import is_alive
from asyncrl.observe.status.run_status import ProcessInfo, RunState
from benchmarks.chaos import disk, faults, task
from benchmarks.chaos.faults import FaultKind, InjectedFault
from benchmarks.chaos.nodes import RayNodes
from benchmarks.chaos.outcome import ChaosOptions
from benchmarks.chaos.run_under_test import POLL_S, RunUnderTest

IDLE_PROBES = 0.7
"""A Trainer that is stopped for this multiple of `timeouts.probe_s` misses no probe."""
STOPPED_PROBES = (1.2, 2.5)
"""A driver is stopped for a multiple of `timeouts.probe_s` in this range. Its probes are then overdue; above 2, the
replicas' reports are overdue too, unless the driver discounts its own pause."""
WRITERS = ("queue", "rollouter")
"""Parts that write and delete the damaged files."""


class NotInjectedError(Exception):
    """The fault has no target now; the message gives the reason."""


class FaultInjector:
    def __init__(self, run: RunUnderTest, options: ChaosOptions, rng: random.Random, cluster: RayNodes | None) -> None:
        self._run = run
        self._options = options
        self._rng = rng
        self._cluster = cluster
        self._probe_s = float(str(options.settings.get("timeouts.probe_s", task.PROBE_S)))
        self._reward_works_at = 0.0
        """Wall clock at which the reward function works again."""
        self._failed_calls_before = 0
        self._bystanders: dict[int, str] = {}
        """Pids and names of processes that must survive a stopped driver."""
        self._back_at: float | None = None
        """Wall clock at which that driver had fresh reports of all parts."""

    def inject(self, kind: FaultKind, number: int) -> InjectedFault:
        """Inject a fault of this kind.

        Raises:
            NotInjectedError: there is no target, and the run is unchanged.
        """
        before = self._run.state()
        if before is None:
            raise NotInjectedError("the launch has written no state")
        fault = InjectedFault(number, kind, time.time(), before=before)
        if kind.target == "reward":
            self._failed_calls_before = task.num_failed_calls(self._run.reward_file)
            self._reward_works_at = task.start_failing(self._run.reward_file, kind.how)
        elif kind.ends_launch:
            self._end_launch(fault, before)
        elif kind.target == "driver":
            self._stop_driver(fault, before)
        elif kind.target == "node":
            self._lose_node(fault, before)
        elif kind.how == "stop idle":
            self._stop_idle_engine(fault, before)
        else:
            self._signal_process(fault, self._choose(kind, before), before)
        return fault

    def recovered_at(self, fault: InjectedFault, state: RunState) -> float | None:
        """Return the wall clock at which the run had recovered; None: not yet."""
        assert fault.before is not None
        if fault.kind.target == "reward":
            return self._reward_recovered_at(fault, state)
        if fault.kind.target == "driver":
            return self._driver_recovered_at(fault, state)
        at = faults.recovered_at(fault, state)
        return at if at is not None and _has_progressed(fault.before, state) else None

    def remove_lost_nodes(self) -> None:
        """Remove the processes that lost nodes have left."""
        if self._cluster is not None:
            self._cluster.remove_lost()

    # ------------------------------------------------------------------------------------------------ processes

    def _choose(self, kind: FaultKind, before: RunState) -> ProcessInfo:
        candidates = sorted(faults.target_processes(before.processes, kind.target))
        if not candidates:
            raise NotInjectedError(f"there is no {kind.target} now")
        return self._rng.choice(candidates)

    def _signal_process(self, fault: InjectedFault, target: ProcessInfo, before: RunState) -> None:
        together = faults.replaced_together(before.processes, target, before)
        fault.pids = frozenset(process.pid for process in together)
        fault.parts = frozenset((process.part, process.name) for process in together)
        fault.at = time.time()
        _send(target, _signal(fault.kind))
        fault.note = f"pid {target.pid} ({target.name})"

    def _stop_idle_engine(self, fault: InjectedFault, before: RunState) -> None:
        """Stop the Trainer for some seconds, so that pacing admits no samples and the engines become idle."""
        target, idle_limit_s = self._choose(fault.kind, before), IDLE_PROBES * self._probe_s
        with _stopped(faults.target_processes(before.processes, "trainer")):
            since, limit = time.time(), time.monotonic() + idle_limit_s
            while (state := self._run.state()) is None or not faults.is_idle(target, state, since):
                if time.monotonic() > limit:
                    raise NotInjectedError(f"{target.name} was busy for {idle_limit_s:g} s")
                time.sleep(POLL_S)
            self._signal_process(fault, target, before)

    def _lose_node(self, fault: InjectedFault, before: RunState) -> None:
        assert self._cluster is not None
        hit = faults.target_processes(before.processes, "node", self._cluster.second_id)
        fault.pids = frozenset(process.pid for process in hit)
        fault.parts = frozenset((process.part, process.name) for process in hit)
        fault.note = "with " + (", ".join(sorted(process.name for process in hit)) or "no process of the run")
        self._cluster.lose(_signal(fault.kind))

    # ------------------------------------------------------------------------------------------------ launches

    def _stop_driver(self, fault: InjectedFault, before: RunState) -> None:
        """Stop only the driver, so no part may be replaced. The fault's time is when the driver continues."""
        stopped_s = self._rng.uniform(*STOPPED_PROBES) * self._probe_s
        driver = self._choose(fault.kind, before)
        fault.pids, fault.parts = frozenset({driver.pid}), frozenset({(driver.part, driver.name)})
        self._bystanders = {one.pid: one.name for one in faults.working_processes(before) if is_alive(one.pid)}
        self._back_at = None
        with _stopped([driver]):
            limit = time.monotonic() + stopped_s
            while time.monotonic() < limit:
                self._run.poll()
        fault.at = time.time()
        fault.note = f"for {stopped_s:.1f} s"

    def _driver_recovered_at(self, fault: InjectedFault, state: RunState) -> float | None:
        """Judge after `timeouts.probe_s`: by then the driver's probes have been answered or have timed out."""
        assert fault.before is not None
        at = faults.driver_back_at(fault, state)
        if at is None or not _has_progressed(fault.before, state):
            return None
        self._back_at = self._back_at or at
        if state.written_at < fault.at + self._probe_s:
            return None
        gone = [f"{name} (pid {pid}) is gone" for pid, name in self._bystanders.items() if not is_alive(pid)]
        if harmed := [*faults.replaced(fault.before, state), *gone]:
            details = f"#{fault.number} {fault.kind.name}: {'; '.join(harmed)}"
            self._run.record_violation("nothing is replaced for a driver that was stopped", details)
        return self._back_at

    def _end_launch(self, fault: InjectedFault, before: RunState) -> None:
        launch = self._run.launch
        fault.launch_survived = False
        fault.pids = frozenset({launch.pid})
        if fault.kind.target == "disk":
            self._fill_disk(fault)
        elif fault.kind.target == "journal":
            fault.note = self._crash(before, disk.tear_journal)
        elif fault.kind.target == "payload":
            fault.note = self._crash(before, disk.flip_payload)
        else:
            launch.kill()

    def _crash(self, before: RunState, damage: Callable[[Path, random.Random], str]) -> str:
        """Damage files as a machine crash does, after which their writers do not continue. Return a description of the
        damage. If there is nothing to damage, the run continues."""
        writers = [process for process in before.processes if process.part in WRITERS]
        with _stopped(writers):
            try:
                description = damage(self._run.run_dir, self._rng)
            except disk.NothingToDamageError as error:
                raise NotInjectedError(str(error)) from None
            self._run.launch.kill()
            for process in writers:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return description

    def _fill_disk(self, fault: InjectedFault) -> None:
        """Keep the disk full until the launch has ended by itself with an error that names the cause."""
        run = self._run
        disk.fill(run.disk)
        limit = time.monotonic() + self._options.recover_limit_s
        try:
            while (code := run.launch.ended()) is None and time.monotonic() < limit:
                disk.fill(run.disk)  # also fill the space that the run has freed meanwhile
                time.sleep(POLL_S)
        finally:
            disk.free(run.disk)
        output = run.launch.tail(60)
        if code is None:
            run.record_hang("the run continued with a full disk")
        elif not any(word in output for word in ("No space", "full", "space left")):
            run.record_violation("failures named", f"a full disk ended the launch with this output:\n{output}")
        fault.note = f"the launch ended with {code}"

    # ------------------------------------------------------------------------------------------------ reward

    def _reward_recovered_at(self, fault: InjectedFault, state: RunState) -> float | None:
        """Return the time of recovery: calls have failed, and the run took a step after the failure ended."""
        assert fault.before is not None
        if time.time() < self._reward_works_at:
            return None
        num_failed = task.num_failed_calls(self._run.reward_file) - self._failed_calls_before
        if num_failed == 0:  # no call has failed yet, so prolong the failure
            self._reward_works_at = task.start_failing(self._run.reward_file, fault.kind.how)
            return None
        fault.note = f"{num_failed} calls failed"
        progressed = state.step > fault.before.step and state.last_progress_at > self._reward_works_at
        return state.written_at if state.written_at > self._reward_works_at and progressed else None


@contextmanager
def _stopped(processes: Iterable[ProcessInfo]) -> Iterator[None]:
    """Stop these processes for the duration of the block.

    Raises:
        NotInjectedError: one of them has ended; the others continue.
    """
    stopped: list[int] = []
    try:
        for process in processes:
            _send(process, signal.SIGSTOP)
            stopped.append(process.pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _send(process: ProcessInfo, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise NotInjectedError(f"{process.name} (pid {process.pid}) has ended by itself") from None


def _has_progressed(before: RunState, state: RunState) -> bool:
    """Return whether a new step was taken, or training went back."""
    return state.step > before.step or state.lineage != before.lineage


def _signal(kind: FaultKind) -> signal.Signals:
    return signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP
