"""One run under fire, from its first launch to the last check.

    launch ─▶ at work ─▶ strike ─▶ recovered? ─▶ strike ─▶ … ─▶ Ctrl-C ─▶ launch to its end ─▶ accounts
                 ▲                    │ the launch has ended
                 └── resume=auto ◀────┘

The harness looks at the run as anybody could: through `state.json`, exit codes and process ids.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.failures import AsyncRLError
from asyncrl.run_state import RunState
from asyncrl.telemetry.state_file import read_state
from benchmarks.chaos import disk, faults, launches, task
from benchmarks.chaos.accounts import Violation, violations
from benchmarks.chaos.faults import DRIVER_DOWN, Kind, Strike
from benchmarks.chaos.launches import Launch
from benchmarks.chaos.nodes import Nodes, nodes
from benchmarks.chaos.records import TurnKeeper, read_accounts

POLL_S = 0.25
MAX_DEATHS = 5
"""Launches in a row that end unasked before they are at work: the run is given up."""
STOP_LIMIT_S = 90.0
FINAL_STEPS = 4
"""Steps of the last launch, which is to end by itself."""
GONE_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    limit_s: float
    """No new fault after this."""
    num_faults: int | None
    targets: tuple[str, ...] | None
    """See `faults.kinds`."""
    work_dir: Path
    """Short: Ray's sockets lie in it."""
    replicas: int = 2
    ranks: int = 1
    two_nodes: bool = True
    calm_s: tuple[float, float] = (1.0, 12.0)
    """From one recovery to the next fault, at least and at most."""
    recover_limit_s: float = 240.0
    """A fault that has not been got over by then is `hung`."""
    start_limit_s: float = 300.0
    finish: bool = True
    """One more launch at the end, to a planned last step."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Overrides of the configuration, by key."""


@dataclass(slots=True)
class Outcome:
    """What the harness has seen."""

    strikes: list[Strike] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    """Launches that ended unasked, with what they said last."""
    launches: int = 0
    wall_s: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    lineages: int = 0


class Harness:
    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._mark = f"chaos-{options.seed}-{os.getpid()}"
        self._began = time.monotonic()
        self._disk = options.work_dir / "disk"
        self._run_dir = self._disk / "run"
        self._reward_file = options.work_dir / "reward.py"
        self._config_file = options.work_dir / "config.yaml"
        self._environment = {
            launches.MARK: self._mark,
            # A place of its own for Ray: nobody else's cluster is found there, and nobody finds this one.
            "RAY_TMPDIR": str(options.work_dir / "r"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self._turns = TurnKeeper(self._run_dir, self._disk / "turns")
        self._nodes: Nodes | None = None
        self._launch: Launch | None = None
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """All of it. Nothing is left running, whatever happens."""
        work = self._options.work_dir
        (work / "r").mkdir(parents=True, exist_ok=True)
        os.environ.update(self._environment)
        try:
            with ExitStack() as stack:
                # Last of all, when nothing runs: the records outlive the disk they were on.
                can_fill = stack.enter_context(disk.small_disk(self._disk))
                stack.callback(self._keep_records)
                stack.callback(launches.end_marked, self._mark)
                self._prepare(stack)
                self._strike_until_done(self._draw(can_fill))
                self._end()
                self._check()
        finally:
            self.outcome.wall_s = time.monotonic() - self._began
        return self.outcome

    # ------------------------------------------------------------------------------------------------ the run

    def _prepare(self, stack: ExitStack) -> None:
        options = self._options
        task.write_reward(self._reward_file)
        content = task.configuration(
            self._reward_file, replicas=options.replicas, ranks=options.ranks, seed=options.seed
        )
        task.write_configuration(self._config_file, content)
        if options.two_nodes:
            self._say("starting a Ray cluster of two nodes")
            self._nodes = stack.enter_context(nodes(cpus=2))

    def _draw(self, can_fill: bool) -> Callable[[], Kind]:
        without = set() if can_fill else {"disk"}
        if self._nodes is None:
            without.add("node")
        available = faults.kinds(self._options.targets, without=without)
        for target in sorted(without):
            self._say(f"no faults of the {target} here")
        kinds = faults.deck(available, self._rng)
        return lambda: next(kinds)

    def _start(self, *overrides: str) -> None:
        number = self.outcome.launches = self.outcome.launches + 1
        settings = [f"{key}={value}" for key, value in self._options.settings.items()]
        address = [f"ray.address={self._nodes.address}"] if self._nodes is not None else []
        arguments = [str(self._config_file), f"run_dir={self._run_dir}", "resume=auto", *address, *settings, *overrides]
        self._launch = launches.start(arguments, self._options.work_dir / f"launch-{number}.txt", {})

    @property
    def _running(self) -> Launch:
        assert self._launch is not None
        return self._launch

    def _state(self) -> RunState | None:
        """What the launch that runs now has told last."""
        with suppress(AsyncRLError):
            state = read_state(self._run_dir)
            if state is not None and state.pid == self._running.pid:
                return state
        return None

    def _at_work(self) -> RunState | None:
        """Start a launch and wait until it trains. None: it could not be brought to it."""
        for _ in range(MAX_DEATHS):
            self._start()
            if (state := self._until_at_work()) is not None:
                return state
        self._break("no hang", f"{MAX_DEATHS} launches in a row did not get to work")
        return None

    def _until_at_work(self) -> RunState | None:
        limit = time.monotonic() + self._options.start_limit_s
        first_step: int | None = None
        while time.monotonic() < limit:
            if self._running.ended() is not None:
                self._died()
                return None
            state = self._state()
            if state is not None and state.phase == "running":
                first_step = state.step if first_step is None else first_step
                if state.step > first_step:
                    return state
            self._turns.look()
            time.sleep(POLL_S)
        self._hung(f"the launch was not at work {self._options.start_limit_s:g} s after its start")
        return None

    # ------------------------------------------------------------------------------------------------ faults

    def _strike_until_done(self, draw: Callable[[], Kind]) -> None:
        options = self._options
        self._say("launching the run")
        state = self._at_work()
        self._say(f"at work {self._now():.0f} s after the start")
        while state is not None and not self._enough():
            if not self._calm(self._rng.uniform(*options.calm_s)):
                state = self._at_work()
                continue
            kind = draw()
            strike = self._deal(kind)
            if strike is None:
                continue
            self.outcome.strikes.append(strike)
            self._say(f"#{strike.number} {kind.told}{strike.note and ': ' + strike.note}")
            if kind.target in DRIVER_DOWN:
                state = self._at_work()
                if state is not None:
                    self._recovered(strike, time.time())
            else:
                state = self._follow(strike)

    def _enough(self) -> bool:
        options = self._options
        dealt = options.num_faults is not None and len(self.outcome.strikes) >= options.num_faults
        return dealt or self._now() > options.limit_s

    def _calm(self, seconds: float) -> bool:
        """Let the run be for so long. False: the launch has ended."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self._running.ended() is not None:
                self._died()
                return False
            self._turns.look()
            time.sleep(POLL_S)
        return True

    def _deal(self, kind: Kind) -> Strike | None:
        """None: there is nothing of that kind to strike now."""
        before = self._state()
        if before is None:
            return None
        strike = Strike(len(self.outcome.strikes) + 1, kind, time.time(), before=before)
        if kind.target == "reward":
            task.go_wrong(self._reward_file, kind.how)
        elif kind.target in DRIVER_DOWN:
            self._end_launch(strike)
        elif kind.target == "node":
            return self._strike_node(strike, before)
        else:
            return self._strike_process(strike, before)
        return strike

    def _strike_process(self, strike: Strike, before: RunState) -> Strike | None:
        candidates = sorted(faults.victims(before.processes, strike.kind.target))
        if not candidates:
            return None
        struck = self._rng.choice(candidates)
        together = faults.with_its_own(before.processes, struck, before)
        strike.pids = frozenset(process.pid for process in together)
        strike.parts = frozenset((process.part, process.name) for process in together)
        try:
            os.kill(struck.pid, _signal(strike.kind))
        except ProcessLookupError:
            return None
        strike.note = f"pid {struck.pid} ({struck.name})"
        return strike

    def _strike_node(self, strike: Strike, before: RunState) -> Strike:
        assert self._nodes is not None
        struck = faults.victims(before.processes, "node", self._nodes.second_id)
        strike.pids = frozenset(process.pid for process in struck)
        strike.parts = frozenset((process.part, process.name) for process in struck)
        strike.note = "with " + (", ".join(sorted(process.name for process in struck)) or "nothing of the run on it")
        self._nodes.lose(_signal(strike.kind))
        return strike

    def _end_launch(self, strike: Strike) -> None:
        strike.lived = False
        if strike.kind.target == "disk":
            self._fill_disk(strike)
            return
        strike.pids = frozenset({self._running.pid})
        self._running.kill()
        if strike.kind.target == "journal":
            strike.note = disk.tear_journal(self._run_dir, self._rng)
        elif strike.kind.target == "payload":
            strike.note = disk.flip_payload(self._run_dir, self._rng)

    def _fill_disk(self, strike: Strike) -> None:
        """Until the launch has ended, which it has to by itself, and say why."""
        disk.fill(self._disk)
        limit = time.monotonic() + self._options.recover_limit_s
        try:
            while (code := self._running.ended()) is None and time.monotonic() < limit:
                disk.fill(self._disk)  # what the run itself has freed meanwhile
                time.sleep(POLL_S)
        finally:
            disk.unfill(self._disk)
        said = self._running.tail(60)
        if code is None:
            self._hung("the run went on with a full disk")
        elif not any(word in said for word in ("No space", "full", "space left")):
            self._break("failures named", f"a full disk ended the launch, which said:\n{said}")
        strike.note = f"the launch ended with {code}"

    def _follow(self, strike: Strike) -> RunState | None:
        """Until it has recovered. Returns the state then, or that of the launch that had to be started instead."""
        limit = time.monotonic() + self._options.recover_limit_s
        while time.monotonic() < limit:
            if self._running.ended() is not None:
                strike.lived = False
                self._died()
                return self._at_work()
            state = self._state()
            if state is not None and (at := self._over(strike, state)) is not None:
                self._recovered(strike, at)
                return state
            self._turns.look()
            time.sleep(POLL_S)
        self._hung(f"#{strike.number} {strike.kind.name} was not got over in {self._options.recover_limit_s:g} s")
        return self._at_work()

    def _over(self, strike: Strike, state: RunState) -> float | None:
        """Wall clock of the recovery; None: not yet."""
        assert strike.before is not None
        if strike.kind.target == "reward":
            # A sample has met it, and another step has been taken since it is well again.
            well = strike.at + task.WRONG_S
            moved = state.step > strike.before.step and state.last_progress_at > well
            return state.written_at if state.written_at > well and moved else None
        at = faults.recovered_at(strike, state)
        if at is None or (state.step <= strike.before.step and state.lineage == strike.before.lineage):
            return None
        return at

    def _recovered(self, strike: Strike, at: float) -> None:
        strike.recovered_s = max(0.0, at - strike.at)
        if self._nodes is not None:
            self._nodes.sweep()
        self._say(f"   over after {strike.recovered_s:.1f} s")

    def _died(self) -> None:
        """A launch has ended unasked, which a fault of one part must not bring about."""
        told = f"launch {self.outcome.launches} ended with {self._running.ended()}:\n{self._running.tail()}"
        self.outcome.deaths.append(told)
        self._break("the rest lives on", f"launch {self.outcome.launches} ended unasked")
        self._say(f"   {told}")

    def _hung(self, told: str) -> None:
        """Nothing moves: say why, and end it."""
        target = self._options.work_dir / f"why-{self.outcome.launches}.txt"
        with suppress(OSError, ValueError):
            launches.explain(self._run_dir, target)
        self._break("no hang", f"{told}; see {target.name}")
        if self._running.ended() is None:
            self._running.kill()

    def _break(self, promise: str, told: str) -> None:
        self.outcome.violations.append(Violation(promise, told))
        self._say(f"   BROKEN: {promise}: {told}")

    # ------------------------------------------------------------------------------------------------ the end

    def _end(self) -> None:
        """Ctrl-C, and one more launch that ends by itself."""
        if self._launch is None:
            return
        state = self._state()
        if self._running.ended() is None:
            self._say("stopping")
            self._running.interrupt()
            if (code := self._running.wait(STOP_LIMIT_S)) is None:
                self._hung(f"it did not stop within {STOP_LIMIT_S:g} s of Ctrl-C")
            elif code not in (0, 130):
                self._died()
                self._break("an orderly end", f"after Ctrl-C the launch ended with {code}")
        if self._options.finish and state is not None:
            last = state.step + FINAL_STEPS
            self._say(f"launching once more, to step {last} and its end")
            self._start(f"trainer.total_training_steps={last}")
            limit = self._options.start_limit_s
            if (code := self._running.wait(limit)) is None:
                self._hung(f"the last launch did not end within {limit:g} s")
            elif code != 0:
                self._died()
                self._break("an orderly end", f"the last launch ended with {code}")
        self._turns.look()

    def _check(self) -> None:
        self._say("checking the accounts")
        self._nothing_left()
        accounts, figures = read_accounts(self._run_dir, self._turns.turns())
        self.outcome.violations += violations(accounts)
        self.outcome.samples = figures.samples
        self.outcome.steps, self.outcome.lineages = figures.steps, figures.lineages

    def _nothing_left(self) -> None:
        """What the run started is gone; of a shared cluster, its own processes stay."""
        own = ("::RolloutActor", "::TrainerActor", "::Rank", "::QueueActor", "EngineCore", "::ServeReplica", "asyncrl")

        def left() -> list[launches.psutil.Process]:
            found = launches.marked(self._mark)
            if self._nodes is None:
                return found
            return [process for process in found if any(word in launches.title(process) for word in own)]

        if names := launches.gone(left, GONE_LIMIT_S):
            self._break("nothing left running", "; ".join(sorted(set(names))[:5]))

    def _keep_records(self) -> None:
        """Off the disk that goes away, without checkpoints."""
        target = self._options.work_dir / "run"
        if self._run_dir.exists():
            shutil.copytree(
                self._run_dir, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "ray")
            )

    def _now(self) -> float:
        return time.monotonic() - self._began


def _signal(kind: Kind) -> signal.Signals:
    return signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP
