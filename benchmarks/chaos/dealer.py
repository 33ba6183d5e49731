"""Deals faults to the run, one at a time, and knows when it has got over one that no process id tells of."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from asyncrl.run_state import ProcessInfo, RunState
from benchmarks.chaos import disk, faults, task
from benchmarks.chaos.faults import DRIVER_DOWN, Kind, Strike
from benchmarks.chaos.nodes import Nodes
from benchmarks.chaos.outcome import Options
from benchmarks.chaos.subject import POLL_S, Subject

IDLE_LIMIT_S = 0.7 * task.PROBE_S
"""A stopped Trainer that goes on by then has missed no probe."""


class NotDealtError(Exception):
    """There is nothing to strike just now. The message says why."""


class Dealer:
    def __init__(self, subject: Subject, options: Options, rng: random.Random, nodes: Nodes | None) -> None:
        self._subject = subject
        self._options = options
        self._rng = rng
        self._nodes = nodes
        self._well_at = 0.0
        """Wall clock at which the reward function is well again."""
        self._met_before = 0

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
        elif kind.target in DRIVER_DOWN:
            self._end_launch(strike)
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
        at = faults.recovered_at(strike, state)
        if at is None or (state.step <= strike.before.step and state.lineage == strike.before.lineage):
            return None
        return at

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
        try:
            os.kill(struck.pid, _signal(strike.kind))
        except ProcessLookupError:
            raise NotDealtError(f"{struck.name} (pid {struck.pid}) has ended by itself") from None
        strike.note = f"pid {struck.pid} ({struck.name})"

    def _strike_idle_engine(self, strike: Strike, before: RunState) -> None:
        """While the Trainer is stopped for some seconds no version is published: the gate shuts, engines run dry."""
        struck = self._choose(strike.kind, before)
        with _stopped(faults.victims(before.processes, "trainer")):
            since, limit = time.time(), time.monotonic() + IDLE_LIMIT_S
            while (state := self._subject.state()) is None or not faults.is_idle(struck, state, since):
                if time.monotonic() > limit:
                    raise NotDealtError(f"{struck.name} had work for {IDLE_LIMIT_S:g} s")
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

    def _end_launch(self, strike: Strike) -> None:
        subject = self._subject
        strike.lived = False
        if strike.kind.target == "disk":
            self._fill_disk(strike)
            return
        strike.pids = frozenset({subject.launch.pid})
        subject.launch.kill()
        if strike.kind.target == "journal":
            strike.note = disk.tear_journal(subject.run_dir, self._rng)
        elif strike.kind.target == "payload":
            strike.note = disk.flip_payload(subject.run_dir, self._rng)

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
def _stopped(processes: list[ProcessInfo]) -> Iterator[None]:
    """SIGSTOP to these processes, for the time of the block."""
    with suppress(ProcessLookupError):
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)


def _signal(kind: Kind) -> signal.Signals:
    return signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP
