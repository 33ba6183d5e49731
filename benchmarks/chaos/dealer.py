"""Deals faults to the run, one at a time, and knows when it has got over one that no process id tells of."""

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
from benchmarks.chaos.subject import POLL_S, Subject

IDLE_PROBES = 0.7
"""A stopped Trainer that goes on after so many times `timeouts.probe_s` has missed no probe."""
STOPPED_PROBES = (1.2, 2.5)
"""So many times `timeouts.probe_s` a driver is stopped for. What it asked is overdue then; beyond two of them so is
what replicas report, if it counts its own standstill."""
WRITERS = ("queue", "rollouter")
"""Who makes and deletes what is torn and damaged."""


class NotDealtError(Exception):
    """There is nothing to strike just now. The message says why."""


class Dealer:
    def __init__(self, subject: Subject, options: ChaosOptions, rng: random.Random, nodes: Nodes | None) -> None:
        self._subject = subject
        self._options = options
        self._rng = rng
        self._nodes = nodes
        self._probe_s = float(str(options.settings.get("timeouts.probe_s", task.PROBE_S)))
        self._well_at = 0.0
        """Wall clock at which the reward function is well again."""
        self._met_before = 0
        self._untouched: dict[int, str] = {}
        """Pids and names of what must outlive a driver that is stopped."""
        self._back_at: float | None = None
        """Wall clock at which that driver knew again how everything stands."""

    def deal(self, kind: Kind, number: int) -> Strike:
        """
        Raises:
            NotDealtError: nothing has been done to the run.
        """
        before = self._subject.state()
        if before is None:
            raise NotDealtError("the launch tells no state")
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
        """Wall clock at which the run had got over it; None: not yet."""
        assert strike.before is not None
        if strike.kind.target == "reward":
            return self._over_reward(strike, state)
        if strike.kind.target == "driver":
            return self._over_stopped_driver(strike, state)
        at = faults.recovered_at(strike, state)
        return at if at is not None and _has_moved(strike.before, state) else None

    def sweep(self) -> None:
        """Take away what faults have left of nodes."""
        if self._nodes is not None:
            self._nodes.sweep()

    # ------------------------------------------------------------------------------------------------ processes

    def _choose(self, kind: Kind, before: RunState) -> ProcessInfo:
        candidates = sorted(faults.victims(before.processes, kind.target))
        if not candidates:
            raise NotDealtError(f"there is no {kind.target} just now")
        return self._rng.choice(candidates)

    def _strike_process(self, strike: Strike, struck: ProcessInfo, before: RunState) -> None:
        together = faults.with_its_own(before.processes, struck, before)
        strike.pids = frozenset(process.pid for process in together)
        strike.parts = frozenset((process.part, process.name) for process in together)
        strike.at = time.time()
        _send(struck, _signal(strike.kind))
        strike.note = f"pid {struck.pid} ({struck.name})"

    def _strike_idle_engine(self, strike: Strike, before: RunState) -> None:
        """While the Trainer is stopped for some seconds no version is published: the gate shuts, engines run dry."""
        struck, idle_limit_s = self._choose(strike.kind, before), IDLE_PROBES * self._probe_s
        with _stopped(faults.victims(before.processes, "trainer")):
            since, limit = time.time(), time.monotonic() + idle_limit_s
            while (state := self._subject.state()) is None or not faults.is_idle(struck, state, since):
                if time.monotonic() > limit:
                    raise NotDealtError(f"{struck.name} had work for {idle_limit_s:g} s")
                time.sleep(POLL_S)
            self._strike_process(strike, struck, before)

    def _strike_node(self, strike: Strike, before: RunState) -> None:
        assert self._nodes is not None
        struck = faults.victims(before.processes, "node", self._nodes.second_id)
        strike.pids = frozenset(process.pid for process in struck)
        strike.parts = frozenset((process.part, process.name) for process in struck)
        strike.note = "with " + (", ".join(sorted(process.name for process in struck)) or "nothing of the run on it")
        self._nodes.lose(_signal(strike.kind))

    # ------------------------------------------------------------------------------------------------ launches

    def _stop_driver(self, strike: Strike, before: RunState) -> None:
        """Nobody else is stopped, so that nothing may be replaced. The fault counts from where the driver goes on."""
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
        """Seen only after `timeouts.probe_s`: by then whatever the driver had asked is answered or given up."""
        assert strike.before is not None
        at = faults.driver_back_at(strike, state)
        if at is None or not _has_moved(strike.before, state):
            return None
        self._back_at = self._back_at or at
        if state.written_at < strike.at + self._probe_s:
            return None
        gone = [f"{name} (pid {pid}) is gone" for pid, name in self._untouched.items() if not launches.lives(pid)]
        if harmed := [*faults.replaced(strike.before, state), *gone]:
            told = f"#{strike.number} {strike.kind.name}: {'; '.join(harmed)}"
            self._subject.broke("nothing is replaced for a driver that was stopped", told)
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
        """As when the machine crashes: no process that writes to what is damaged goes on after that. Returns what was
        done. Where there is nothing to damage the run goes on."""
        writers = [process for process in before.processes if process.part in WRITERS]
        with _stopped(writers):
            try:
                told = damage(self._subject.run_dir, self._rng)
            except disk.NothingThereError as error:
                raise NotDealtError(str(error)) from None
            self._subject.launch.kill()
            for process in writers:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return told

    def _fill_disk(self, strike: Strike) -> None:
        """Until the launch has ended, which it has to by itself, and say why."""
        subject = self._subject
        disk.fill(subject.disk)
        limit = time.monotonic() + self._options.recover_limit_s
        try:
            while (code := subject.launch.ended()) is None and time.monotonic() < limit:
                disk.fill(subject.disk)  # what the run itself has freed meanwhile
                time.sleep(POLL_S)
        finally:
            disk.unfill(subject.disk)
        said = subject.launch.tail(60)
        if code is None:
            subject.hung("the run went on with a full disk")
        elif not any(word in said for word in ("No space", "full", "space left")):
            subject.broke("failures named", f"a full disk ended the launch, which said:\n{said}")
        strike.note = f"the launch ended with {code}"

    # ------------------------------------------------------------------------------------------------ reward

    def _over_reward(self, strike: Strike, state: RunState) -> float | None:
        """Calls have met it, and the run has moved and taken a step since it is well again."""
        assert strike.before is not None
        if time.time() < self._well_at:
            return None
        met = task.num_met(self._subject.reward_file) - self._met_before
        if met == 0:  # nothing was scored meanwhile: it goes wrong for longer
            self._well_at = task.go_wrong(self._subject.reward_file, strike.kind.how)
            return None
        strike.note = f"{met} calls met it"
        moved = state.step > strike.before.step and state.last_progress_at > self._well_at
        return state.written_at if state.written_at > self._well_at and moved else None


@contextmanager
def _stopped(processes: Iterable[ProcessInfo]) -> Iterator[None]:
    """SIGSTOP to these processes, for the time of the block.

    Raises:
        NotDealtError: one of them has ended; the others go on.
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
    """A step was taken that had not been before; or training has gone back."""
    return state.step > before.step or state.lineage != before.lineage


def _signal(kind: Kind) -> signal.Signals:
    return signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP
