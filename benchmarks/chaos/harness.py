"""Run one round: a run with faults, from its first launch to the last check.

launch ─▶ at work ─▶ strike ─▶ recovered? ─▶ strike ─▶ … ─▶ Ctrl-C ─▶ launch to its end ─▶ accounts
             ▲                    │ the launch has ended
             └── resume=auto ◀────┘
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from asyncrl.observe.status.run_status import RunState
from benchmarks.chaos import disk, faults, launches
from benchmarks.chaos.faults import Kind, Strike
from benchmarks.chaos.injector import Dealer, NotDealtError
from benchmarks.chaos.nodes import Nodes, nodes
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import violations
from benchmarks.chaos.records import read_accounts, steps_given_up, steps_taken
from benchmarks.chaos.run_under_test import Subject
from benchmarks.chaos.watch import read_broken_calls

STOP_LIMIT_S = 90.0
FINAL_STEPS = 4
"""Steps of the last launch."""
GONE_LIMIT_S = 20.0
RETRY_S = 2.0
"""Seconds until a fault that could not be injected is tried again."""
MAX_TRIES = 5
OURS = (
    "::RolloutActor", "::TrainerActor", "::Rank", "::QueueActor", "::WeightStoreActor", "EngineCore", "::ServeReplica",
    "asyncrl",
)  # fmt: skip
"""Parts of the titles of the run's own processes on a shared cluster."""


class ChaosHarness:
    def __init__(self, options: ChaosOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._mark = f"chaos-{options.seed}-{os.getpid()}"
        self._began = time.monotonic()
        self._nodes: Nodes | None = None
        self._dealer: Dealer
        self.outcome = ChaosOutcome()
        self._subject = Subject(options, self.outcome, say)

    def run(self) -> ChaosOutcome:
        """Run the whole round. No process is left, even after an error."""
        work = self._options.work_dir
        (work / "r").mkdir(parents=True, exist_ok=True)
        os.environ.update(
            {
                launches.MARK: self._mark,
                # A separate directory for Ray, so that this cluster and others do not find each other.
                "RAY_TMPDIR": str(work / "r"),
                "RAY_USAGE_STATS_ENABLED": "0",
                "HF_HUB_OFFLINE": "1",
            }
        )
        try:
            with ExitStack() as stack:
                # These callbacks run in reverse: processes end, records are copied, the disk is unmounted.
                can_fill = stack.enter_context(disk.small_disk(self._subject.disk))
                stack.callback(self._subject.keep_records)
                stack.callback(launches.end_marked, self._mark)
                self._prepare(stack)
                self._strike_until_done(self._kinds(can_fill))
                self._end()
                self._check()
        finally:
            self.outcome.wall_s = time.monotonic() - self._began
        return self.outcome

    def _prepare(self, stack: ExitStack) -> None:
        self._subject.prepare()
        if self._options.two_nodes:
            self._say("starting a Ray cluster of two nodes")
            self._nodes = stack.enter_context(nodes(cpus=2))
            self._subject.address = self._nodes.address
        self._dealer = Dealer(self._subject, self._options, self._rng, self._nodes)

    def _kinds(self, can_fill: bool) -> Iterator[Kind]:
        without = set() if can_fill else {"disk"}
        if self._nodes is None:
            without.add("node")
        available = faults.kinds(self._options.targets, without=without)
        for target in sorted(without):
            self._say(f"faults of the {target} are not available")
        if not available:
            raise SystemExit("--parts: none of these faults is available on this machine")
        return faults.deck(available, self._rng)

    # ------------------------------------------------------------------------------------------------ faults

    def _strike_until_done(self, kinds: Iterator[Kind]) -> None:
        self._say("launching the run")
        state = self._subject.at_work()
        self._say(f"training {self._now():.0f} s after the start")
        while state is not None and not self._enough():
            state = self._next(next(kinds))
        self.outcome.gave_up = state is None

    def _next(self, kind: Kind) -> RunState | None:
        """Inject one fault after a pause, and wait until the run trains again. Return None if it does not."""
        for _ in range(MAX_TRIES):
            if not self._subject.calm(self._gap_s()):
                return self._subject.at_work()
            try:
                strike = self._dealer.deal(kind, len(self.outcome.strikes) + 1)
            except NotDealtError as reason:
                self._say(f"{kind.name} could not be injected: {reason}")
                self.outcome.not_dealt[f"{kind.name}: {reason}"] += 1
                if not self._subject.calm(RETRY_S):
                    return self._subject.at_work()
                continue
            self.outcome.strikes.append(strike)
            of = f"/{self._options.num_faults}" if self._options.num_faults is not None else ""
            self._say(f"#{strike.number}{of} {kind.description}{strike.note and ': ' + strike.note}")
            return self._follow(strike)
        return self._subject.state() or self._subject.at_work()

    def _gap_s(self) -> float:
        options = self._options
        return faults.gap_s(
            self._rng,
            options.calm_s,
            dealt=len(self.outcome.strikes),
            wanted=options.num_faults,
            elapsed_s=self._now(),
            limit_s=options.limit_s,
        )

    def _enough(self) -> bool:
        options = self._options
        dealt = options.num_faults is not None and len(self.outcome.strikes) >= options.num_faults
        return dealt or self._now() > options.limit_s

    def _follow(self, strike: Strike) -> RunState | None:
        """Wait for recovery. Return the state of the recovered launch, or of the one that had to be started instead."""
        given_up = steps_given_up(self._subject.run_dir)
        state = self._until_over(strike)
        strike.steps_lost = steps_given_up(self._subject.run_dir) - given_up
        if state is not None and strike.recovered_s is not None:
            strike.lost = faults.reported_losses(strike, state)
            self._dealer.sweep()
            self._say(f"   recovered after {strike.recovered_s:.1f} s{strike.note and '; ' + strike.note}")
            if strike.number % 10 == 0:
                self._say_progress()
        return state

    def _until_over(self, strike: Strike) -> RunState | None:
        subject, limit_s = self._subject, self._options.recover_limit_s
        if strike.kind.ends_launch:
            state = subject.at_work()
            if state is not None:
                strike.recovered_s = time.time() - strike.at
            return state
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            if subject.launch.ended() is not None:
                strike.lived = False
                subject.died()
                return subject.at_work()
            state = subject.state()
            if state is not None and (at := self._dealer.over(strike, state)) is not None:
                strike.recovered_s = max(0.0, at - strike.at)
                return state
            subject.look()
        strike.lived = False
        subject.hung(f"#{strike.number} {strike.kind.name} did not recover within {limit_s:g} s")
        return subject.at_work()

    def _say_progress(self) -> None:
        times = [strike.recovered_s for strike in self.outcome.strikes if strike.recovered_s is not None]
        self._say(
            f"== {len(self.outcome.strikes)} faults in {self._now() / 60:.0f} min, {len(times)} recoveries, median "
            f"{statistics.median(times):.1f} s, {len(self.outcome.violations)} promises broken, "
            f"step {self._subject.last_step}"
        )

    # ------------------------------------------------------------------------------------------------ the end

    def _end(self) -> None:
        """Interrupt the launch as Ctrl-C does, and launch once more to a planned end."""
        subject = self._subject
        if not subject.was_launched:
            return
        if subject.launch.ended() is None:
            self._say("stopping")
            subject.state()
            subject.launch.interrupt()
            if (code := subject.launch.wait(STOP_LIMIT_S)) is None:
                subject.hung(f"the launch did not stop within {STOP_LIMIT_S:g} s of Ctrl-C")
            elif code not in (0, 130):
                subject.died()
                subject.broke("an orderly end", f"after Ctrl-C the launch ended with {code}")
        if self._options.finish:
            self._finish()
        subject.turns.look()

    def _finish(self) -> None:
        subject, limit_s = self._subject, self._options.start_limit_s
        last = max(subject.last_step, steps_taken(subject.run_dir)) + FINAL_STEPS
        self._say(f"launching once more, to step {last} and its end")
        subject.start(f"trainer.total_training_steps={last}")
        if (code := subject.launch.wait(limit_s)) is None:
            subject.hung(f"the last launch did not end within {limit_s:g} s")
            self.outcome.finished = "hung"
            return
        self.outcome.finished = f"exit code {code}"
        if code != 0:
            subject.died()
            subject.broke("an orderly end", f"the last launch ended with {code}")
        elif (step := steps_taken(subject.run_dir)) != last:
            subject.broke("an orderly end", f"the last launch ended at step {step} of {last}")

    def _check(self) -> None:
        subject, outcome = self._subject, self.outcome
        self._say("checking the records")
        self._nothing_left()
        turns = subject.turns.turns()
        outcome.broken_calls = read_broken_calls(subject.watched)
        accounts, figures = read_accounts(subject.run_dir, turns, outcome.broken_calls)
        outcome.violations += violations(accounts)
        outcome.samples, outcome.num_turns = figures.samples, len(turns)
        outcome.steps, outcome.lineages = figures.steps, figures.lineages
        if accounts.counts.trained and not turns:
            subject.broke("turns once", "there is no turn log, so turns cannot be checked")
        if accounts.counts.trained and not list(subject.watched.iterdir()):
            subject.broke("tokens outlive their engine", "no Rollouter has loaded the module that watches its calls")

    def _nothing_left(self) -> None:
        """Check that the run's processes have ended, except those of a shared cluster."""

        def left() -> list[launches.psutil.Process]:
            found = launches.marked(self._mark)
            if self._nodes is None:
                return found
            return [process for process in found if any(word in launches.title(process) for word in OURS)]

        if names := launches.gone(left, GONE_LIMIT_S):
            self._subject.broke("nothing left running", "; ".join(sorted(set(names))[:5]))

    def _now(self) -> float:
        return time.monotonic() - self._began
