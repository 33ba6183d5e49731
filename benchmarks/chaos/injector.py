"""Inject faults one at a time, and detect recoveries, also those that process ids do not show."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.observe.status.run_status import ProcessInfo, RunState
from benchmarks.chaos import disk, faults, launches, task
from benchmarks.chaos.faults import Kind, Strike
from benchmarks.chaos.nodes import Nodes
from benchmarks.chaos.outcome import ChaosOptions
from benchmarks.chaos.run_under_test import POLL_S, Subject

IDLE_PROBES = 0.7
"""A Trainer that is stopped for this multiple of `timeouts.probe_s` misses no probe."""
STOPPED_PROBES = (1.2, 2.5)
"""A driver is stopped for a multiple of `timeouts.probe_s` in this range. Its probes are then overdue; above 2, the
replicas' reports are overdue too, unless the driver discounts its own pause."""
WRITERS = ("queue", "rollouter")
"""Parts that write and delete the damaged files."""


class NotDealtError(Exception):
    """The fault has no target now; the message gives the reason."""


class Dealer:
    def __init__(self, subject: Subject, options: ChaosOptions, rng: random.Random, nodes: Nodes | None) -> None:
        self._subject = subject
        self._options = options
        self._rng = rng
        self._nodes = nodes
        self._probe_s = float(str(options.settings.get("timeouts.probe_s", task.PROBE_S)))
        self._well_at = 0.0
        """Wall clock at which the reward function works again."""
        self._met_before = 0
        self._untouched: dict[int, str] = {}
        """Pids and names of processes that must survive a stopped driver."""
        self._back_at: float | None = None
        """Wall clock at which that driver had fresh reports of all parts."""

    def deal(self, kind: Kind, number: int) -> Strike:
        """Inject a fault of this kind.

        Raises:
            NotDealtError: there is no target, and the run is unchanged.
        """
        before = self._subject.state()
        if before is None:
            raise NotDealtError("the launch has written no state")
        strike = Strike(number, kind, time.time(), before=before)
        if kind.target == "reward":
            self._met_before = task.num_met(self._subject.reward_file)
            self._well_at = task.go_wrong(self._subject.reward_file, kind.how)
        elif kind.ends_launch:
            self._end_launch(strike, before)
        elif kind.target == "driver":
            self._stop_driver(strike, before)
        elif kind.target == "node":
            self._strike_node(strike, before)
        elif kind.how == "stop idle":
            self._strike_idle_engine(strike, before)
        else:
            self._strike_process(strike, self._choose(kind, before), before)
        return strike

    def over(self, strike: Strike, state: RunState) -> float | None:
        """Return the wall clock at which the run had recovered; None: not yet."""
        assert strike.before is not None
        if strike.kind.target == "reward":
            return self._over_reward(strike, state)
        if strike.kind.target == "driver":
            return self._over_stopped_driver(strike, state)
        at = faults.recovered_at(strike, state)
        return at if at is not None and _has_moved(strike.before, state) else None

    def sweep(self) -> None:
        """Remove the processes that lost nodes have left."""
        if self._nodes is not None:
            self._nodes.sweep()

    # ------------------------------------------------------------------------------------------------ processes

    def _choose(self, kind: Kind, before: RunState) -> ProcessInfo:
        candidates = sorted(faults.victims(before.processes, kind.target))
        if not candidates:
            raise NotDealtError(f"there is no {kind.target} now")
        return self._rng.choice(candidates)

    def _strike_process(self, strike: Strike, struck: ProcessInfo, before: RunState) -> None:
        together = faults.with_its_own(before.processes, struck, before)
        strike.pids = frozenset(process.pid for process in together)
        strike.parts = frozenset((process.part, process.name) for process in together)
        strike.at = time.time()
        _send(struck, _signal(strike.kind))
        strike.note = f"pid {struck.pid} ({struck.name})"

    def _strike_idle_engine(self, strike: Strike, before: RunState) -> None:
        """Stop the Trainer for some seconds, so that pacing admits no samples and the engines become idle."""
        struck, idle_limit_s = self._choose(strike.kind, before), IDLE_PROBES * self._probe_s
        with _stopped(faults.victims(before.processes, "trainer")):
            since, limit = time.time(), time.monotonic() + idle_limit_s
            while (state := self._subject.state()) is None or not faults.is_idle(struck, state, since):
                if time.monotonic() > limit:
                    raise NotDealtError(f"{struck.name} was busy for {idle_limit_s:g} s")
                time.sleep(POLL_S)
            self._strike_process(strike, struck, before)

    def _strike_node(self, strike: Strike, before: RunState) -> None:
        assert self._nodes is not None
        struck = faults.victims(before.processes, "node", self._nodes.second_id)
        strike.pids = frozenset(process.pid for process in struck)
        strike.parts = frozenset((process.part, process.name) for process in struck)
        strike.note = "with " + (", ".join(sorted(process.name for process in struck)) or "no process of the run")
        self._nodes.lose(_signal(strike.kind))

    # ------------------------------------------------------------------------------------------------ launches

    def _stop_driver(self, strike: Strike, before: RunState) -> None:
        """Stop only the driver, so no part may be replaced. The fault's time is when the driver continues."""
        stopped_s = self._rng.uniform(*STOPPED_PROBES) * self._probe_s
        driver = self._choose(strike.kind, before)
        strike.pids, strike.parts = frozenset({driver.pid}), frozenset({(driver.part, driver.name)})
        self._untouched = {one.pid: one.name for one in faults.at_work(before) if launches.lives(one.pid)}
        self._back_at = None
        with _stopped([driver]):
            limit = time.monotonic() + stopped_s
            while time.monotonic() < limit:
                self._subject.look()
        strike.at = time.time()
        strike.note = f"for {stopped_s:.1f} s"

    def _over_stopped_driver(self, strike: Strike, state: RunState) -> float | None:
        """Judge after `timeouts.probe_s`: by then the driver's probes have been answered or have timed out."""
        assert strike.before is not None
        at = faults.driver_back_at(strike, state)
        if at is None or not _has_moved(strike.before, state):
            return None
        self._back_at = self._back_at or at
        if state.written_at < strike.at + self._probe_s:
            return None
        gone = [f"{name} (pid {pid}) is gone" for pid, name in self._untouched.items() if not launches.lives(pid)]
        if harmed := [*faults.replaced(strike.before, state), *gone]:
            details = f"#{strike.number} {strike.kind.name}: {'; '.join(harmed)}"
            self._subject.broke("nothing is replaced for a driver that was stopped", details)
        return self._back_at

    def _end_launch(self, strike: Strike, before: RunState) -> None:
        launch = self._subject.launch
        strike.lived = False
        strike.pids = frozenset({launch.pid})
        if strike.kind.target == "disk":
            self._fill_disk(strike)
        elif strike.kind.target == "journal":
            strike.note = self._crash(before, disk.tear_journal)
        elif strike.kind.target == "payload":
            strike.note = self._crash(before, disk.flip_payload)
        else:
            launch.kill()

    def _crash(self, before: RunState, damage: Callable[[Path, random.Random], str]) -> str:
        """Damage files as a machine crash does, after which their writers do not continue. Return a description of the
        damage. If there is nothing to damage, the run continues."""
        writers = [process for process in before.processes if process.part in WRITERS]
        with _stopped(writers):
            try:
                description = damage(self._subject.run_dir, self._rng)
            except disk.NothingThereError as error:
                raise NotDealtError(str(error)) from None
            self._subject.launch.kill()
            for process in writers:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return description

    def _fill_disk(self, strike: Strike) -> None:
        """Keep the disk full until the launch has ended by itself with an error that names the cause."""
        subject = self._subject
        disk.fill(subject.disk)
        limit = time.monotonic() + self._options.recover_limit_s
        try:
            while (code := subject.launch.ended()) is None and time.monotonic() < limit:
                disk.fill(subject.disk)  # also fill the space that the run has freed meanwhile
                time.sleep(POLL_S)
        finally:
            disk.unfill(subject.disk)
        output = subject.launch.tail(60)
        if code is None:
            subject.hung("the run continued with a full disk")
        elif not any(word in output for word in ("No space", "full", "space left")):
            subject.broke("failures named", f"a full disk ended the launch with this output:\n{output}")
        strike.note = f"the launch ended with {code}"

    # ------------------------------------------------------------------------------------------------ reward

    def _over_reward(self, strike: Strike, state: RunState) -> float | None:
        """Return the time of recovery: calls have failed, and the run took a step after the failure ended."""
        assert strike.before is not None
        if time.time() < self._well_at:
            return None
        met = task.num_met(self._subject.reward_file) - self._met_before
        if met == 0:  # no call has failed yet, so prolong the failure
            self._well_at = task.go_wrong(self._subject.reward_file, strike.kind.how)
            return None
        strike.note = f"{met} calls failed"
        moved = state.step > strike.before.step and state.last_progress_at > self._well_at
        return state.written_at if state.written_at > self._well_at and moved else None


@contextmanager
def _stopped(processes: Iterable[ProcessInfo]) -> Iterator[None]:
    """Stop these processes for the duration of the block.

    Raises:
        NotDealtError: one of them has ended; the others continue.
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
        raise NotDealtError(f"{process.name} (pid {process.pid}) has ended by itself") from None


def _has_moved(before: RunState, state: RunState) -> bool:
    """Return whether a new step was taken, or training went back."""
    return state.step > before.step or state.lineage != before.lineage


def _signal(kind: Kind) -> signal.Signals:
    return signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP
