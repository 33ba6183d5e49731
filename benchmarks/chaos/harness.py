"""Run one round: a run with faults, from its first launch to the last check.

launch ─▶ training ─▶ fault ─▶ recovered? ─▶ fault ─▶ … ─▶ Ctrl-C ─▶ launch to its end ─▶ records
             ▲                     │ the launch has ended
             └── resume=auto ◀─────┘
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path

from asyncrl.observe.status.run_status import RunState
from benchmarks.chaos import disk, faults, launches
from benchmarks.chaos.faults import FaultKind, InjectedFault
from benchmarks.chaos.injector import FaultInjector, NotInjectedError
from benchmarks.chaos.nodes import RayNodes
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import violations
from benchmarks.chaos.records import last_surviving_step, read_records, steps_discarded
from benchmarks.chaos.run_under_test import RunUnderTest
from benchmarks.chaos.watch import read_broken_calls

STOP_LIMIT_S = 90.0
FINAL_STEPS = 4
"""Steps of the last launch."""
GONE_LIMIT_S = 20.0
RETRY_S = 2.0
"""Seconds until a fault that could not be injected is tried again."""
MAX_TRIES = 5
RUN_NAMES = (
    "::RolloutActor", "::TrainerActor", "::Rank", "::QueueActor", "::WeightStoreActor", "EngineCore", "::ServeReplica",
    "asyncrl",
)  # fmt: skip
"""Parts of the command lines of the run's own processes on a shared cluster."""


class ChaosHarness:
    def __init__(
        self,
        options: ChaosOptions,
        log: Callable[[str], None],
        *,
        draw: Callable[[Sequence[FaultKind], random.Random], Iterator[FaultKind]] = faults.draw_kinds,
        observe: Callable[[ChaosHarness], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`draw` yields the kinds of the faults, in order. `observe` returns a context that is open from the first
        launch to the last fault, and in which an observer can read `outcome` and the files in `run_dir`."""
        self._options = options
        self._log = log
        self._draw = draw
        self._observe = observe
        self._rng = random.Random(options.seed)
        self._mark = f"chaos-{options.seed}-{os.getpid()}"
        self._began = time.monotonic()
        self._cluster: RayNodes | None = None
        self._injector: FaultInjector
        self.outcome = ChaosOutcome()
        self._run = RunUnderTest(options, self.outcome, log)

    @property
    def run_dir(self) -> Path:
        return self._run.run_dir

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
                can_fill = self._options.small_disk and stack.enter_context(disk.small_disk(self._run.disk))
                stack.callback(self._run.keep_records)
                stack.callback(launches.kill_marked, self._mark)
                self._prepare(stack)
                with self._observe(self):
                    self._inject_until_done(self._kinds(can_fill))
                self._stop()
                self._check()
        finally:
            self.outcome.wall_s = time.monotonic() - self._began
        return self.outcome

    def _prepare(self, stack: ExitStack) -> None:
        self._run.prepare()
        if self._options.two_nodes:
            self._log("starting a Ray cluster of two nodes")
            self._cluster = stack.enter_context(closing(RayNodes(cpus=2)))
            self._run.address = self._cluster.address
        self._injector = FaultInjector(self._run, self._options, self._rng, self._cluster)

    def _kinds(self, can_fill: bool) -> Iterator[FaultKind]:
        without = set() if can_fill else {"disk"}
        if self._cluster is None:
            without.add("node")
        available = faults.kinds(self._options.targets, without=without)
        requested = {kind.target for kind in faults.kinds(self._options.targets)}
        for target in sorted(without & requested):
            self._log(f"faults of the {target} are not available")
        if not available:
            raise SystemExit("--parts: none of these faults is available on this machine")
        return self._draw(available, self._rng)

    # ------------------------------------------------------------------------------------------------ faults

    def _inject_until_done(self, kinds: Iterator[FaultKind]) -> None:
        self._log("launching the run")
        state = self._run.launch_until_training()
        self._log(f"training {self._elapsed_s():.0f} s after the start")
        while state is not None and not self._is_done():
            state = self._inject_one(next(kinds))
        self.outcome.gave_up = state is None

    def _inject_one(self, kind: FaultKind) -> RunState | None:
        """Inject one fault after a pause, and wait until the run trains again. Return None if it does not."""
        for _ in range(MAX_TRIES):
            if not self._run.pause(self._gap_s()):
                return self._run.launch_until_training()
            if self._is_done():
                break
            try:
                fault = self._injector.inject(kind, len(self.outcome.faults) + 1)
            except NotInjectedError as reason:
                self._log(f"{kind.name} could not be injected: {reason}")
                self.outcome.not_injected[f"{kind.name}: {reason}"] += 1
                if not self._run.pause(RETRY_S):
                    return self._run.launch_until_training()
                continue
            self.outcome.faults.append(fault)
            of = f"/{self._options.num_faults}" if self._options.num_faults is not None else ""
            self._log(f"#{fault.number}{of} {kind.description}{fault.note and ': ' + fault.note}")
            return self._follow_recovery(fault)
        return self._run.state() or self._run.launch_until_training()

    def _gap_s(self) -> float:
        options = self._options
        gap_s = faults.gap_s(
            self._rng,
            options.calm_s,
            done=len(self.outcome.faults),
            planned=options.num_faults,
            elapsed_s=self._elapsed_s(),
            limit_s=options.limit_s,
        )
        return min(gap_s, max(0.0, options.limit_s - self._elapsed_s()))

    def _is_done(self) -> bool:
        options = self._options
        all_injected = options.num_faults is not None and len(self.outcome.faults) >= options.num_faults
        return all_injected or self._elapsed_s() > options.limit_s

    def _follow_recovery(self, fault: InjectedFault) -> RunState | None:
        """Wait for recovery. Return the state of the recovered launch, or of the one that had to be started instead."""
        discarded = steps_discarded(self._run.run_dir)
        state = self._wait_for_recovery(fault)
        fault.steps_lost = steps_discarded(self._run.run_dir) - discarded
        if state is not None and fault.recovered_s is not None:
            fault.restart_details = faults.restart_details(fault, state)
            self._injector.remove_lost_nodes()
            self._log(f"   recovered after {fault.recovered_s:.1f} s{fault.note and '; ' + fault.note}")
            if fault.number % 10 == 0:
                self._log_progress()
        return state

    def _wait_for_recovery(self, fault: InjectedFault) -> RunState | None:
        run, limit_s = self._run, self._options.recover_limit_s
        if fault.kind.ends_launch:
            state = run.launch_until_training()
            if state is not None:
                fault.recovered_s = time.time() - fault.at
            return state
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            if run.launch.ended() is not None:
                fault.launch_survived = False
                run.record_unexpected_end()
                return run.launch_until_training()
            state = run.state()
            if state is not None and (at := self._injector.recovered_at(fault, state)) is not None:
                fault.recovered_s = max(0.0, at - fault.at)
                return state
            run.poll()
        fault.launch_survived = False
        run.record_hang(f"#{fault.number} {fault.kind.name} did not recover within {limit_s:g} s")
        return run.launch_until_training()

    def _log_progress(self) -> None:
        times = [fault.recovered_s for fault in self.outcome.faults if fault.recovered_s is not None]
        self._log(
            f"== {len(self.outcome.faults)} faults in {self._elapsed_s() / 60:.0f} min, {len(times)} recoveries, "
            f"median {statistics.median(times):.1f} s, {len(self.outcome.violations)} promises broken, "
            f"step {self._run.last_step}"
        )

    # ------------------------------------------------------------------------------------------------ the end

    def _stop(self) -> None:
        """Interrupt the launch as Ctrl-C does, and launch once more to a planned end."""
        run = self._run
        if not run.was_launched:
            return
        if run.launch.ended() is None:
            self._log("stopping")
            run.state()
            run.launch.interrupt()
            if (code := run.launch.wait(STOP_LIMIT_S)) is None:
                run.record_hang(f"the launch did not stop within {STOP_LIMIT_S:g} s of Ctrl-C")
            elif code not in (0, 130):
                run.record_unexpected_end()
                run.record_violation("an orderly end", f"after Ctrl-C the launch ended with {code}")
        if self._options.finish:
            self._launch_to_end()
        run.turns.link()

    def _launch_to_end(self) -> None:
        run, limit_s = self._run, self._options.start_limit_s
        last = max(run.last_step, last_surviving_step(run.run_dir)) + FINAL_STEPS
        self._log(f"launching once more, to step {last} and its end")
        run.start(f"trainer.total_training_steps={last}")
        if (code := run.launch.wait(limit_s)) is None:
            run.record_hang(f"the last launch did not end within {limit_s:g} s")
            self.outcome.last_launch = "hung"
            return
        self.outcome.last_launch = f"exit code {code}"
        if code != 0:
            run.record_unexpected_end()
            run.record_violation("an orderly end", f"the last launch ended with {code}")
        elif (step := last_surviving_step(run.run_dir)) != last:
            run.record_violation("an orderly end", f"the last launch ended at step {step} of {last}")

    def _check(self) -> None:
        run, outcome = self._run, self.outcome
        self._log("checking the records")
        self._check_processes()
        turns = run.turns.turns()
        outcome.broken_calls = read_broken_calls(run.watched)
        records, figures = read_records(run.run_dir, turns, outcome.broken_calls)
        outcome.violations += violations(records)
        outcome.samples, outcome.num_turns = figures.samples, len(turns)
        outcome.steps, outcome.lineages = figures.steps, figures.lineages
        if records.counts.trained and not turns:
            run.record_violation("turns once", "there is no turn log, so turns cannot be checked")
        if records.counts.trained and not list(run.watched.iterdir()):
            run.record_violation("tokens outlive their engine", "no Rollouter loaded the module that watches its calls")

    def _check_processes(self) -> None:
        """Check that the run's processes have ended, except those of a shared cluster."""

        def left() -> list[launches.psutil.Process]:
            marked = launches.marked_processes(self._mark)
            if self._cluster is None:
                return marked
            return [process for process in marked if any(word in launches.command_line(process) for word in RUN_NAMES)]

        if names := launches.wait_until_gone(left, GONE_LIMIT_S):
            self._run.record_violation("nothing left running", "; ".join(sorted(set(names))[:5]))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began
