"""The run under test: its launches, observed from outside through `state.json`, exit codes and process ids."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncrl.core.failures import AsyncRLError
from asyncrl.observe.status.run_status import RunState, read_state
from benchmarks.chaos import launches, task
from benchmarks.chaos.launches import ChaosLaunch
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.chaos.promises import Violation
from benchmarks.chaos.records import TurnLogKeeper

POLL_S = 0.25
MAX_FAILED_LAUNCHES = 5
"""The run is abandoned after this many consecutive launches that end before they train."""


class RunUnderTest:
    """The run under test; broken promises are added to the outcome."""

    def __init__(self, options: ChaosOptions, outcome: ChaosOutcome, log: Callable[[str], None]) -> None:
        self._options = options
        self._outcome = outcome
        self._log = log
        self.disk = options.work_dir / "disk"
        """A file system that only the run uses."""
        self.run_dir = self.disk / "run"
        self.reward_file = options.work_dir / "reward.py"
        self.watched = options.work_dir / "watched"
        """Directory of the records of `watch`."""
        self.address: str | None = None
        """Address of the Ray cluster; None: the launch starts its own."""
        self.turns = TurnLogKeeper(self.run_dir, self.disk / "turns")
        self.last_step = 0
        """The highest step of any launch."""
        self._config_file = options.work_dir / "config.yaml"
        self._launch: ChaosLaunch | None = None

    def prepare(self) -> None:
        """Write the files that a launch needs."""
        options = self._options
        self.watched.mkdir(parents=True, exist_ok=True)
        task.write_reward(self.reward_file, self.watched)
        content = task.configuration(
            self.reward_file, replicas=options.replicas, ranks=options.ranks, seed=options.seed
        )
        task.write_configuration(self._config_file, content)

    def start(self, *overrides: str) -> None:
        """Launch the run with resume=auto."""
        number = self._outcome.launches = self._outcome.launches + 1
        settings = [f"{key}={value}" for key, value in self._options.settings.items()]
        address = [f"ray.address={self.address}"] if self.address is not None else []
        arguments = [str(self._config_file), f"run_dir={self.run_dir}", "resume=auto", *address, *settings, *overrides]
        self._launch = launches.start(arguments, self._options.work_dir / f"launch-{number}.txt", {})

    @property
    def launch(self) -> ChaosLaunch:
        """The current launch, or the last one."""
        assert self._launch is not None
        return self._launch

    @property
    def was_launched(self) -> bool:
        return self._launch is not None

    def state(self) -> RunState | None:
        """Return the last state of the current launch; None if it has not written any."""
        with suppress(AsyncRLError):
            state = read_state(self.run_dir)
            if state is not None and state.pid == self.launch.pid:
                self.last_step = max(self.last_step, state.step)
                return state
        return None

    def poll(self) -> None:
        """Wait for a moment, and keep files that the run deletes later."""
        self.turns.link()
        time.sleep(POLL_S)

    def launch_until_training(self) -> RunState | None:
        """Launch the run, wait until it trains and return its state; None if it does not train."""
        for _ in range(MAX_FAILED_LAUNCHES):
            self.start()
            if (state := self._wait_until_training()) is not None:
                return state
        self.record_violation("no hang", f"{MAX_FAILED_LAUNCHES} consecutive launches did not start to train")
        return None

    def pause(self, seconds: float) -> bool:
        """Wait without injecting a fault. Return False if the launch has ended."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.launch.ended() is not None:
                self.record_unexpected_end()
                return False
            self.poll()
        return True

    def _wait_until_training(self) -> RunState | None:
        limit = time.monotonic() + self._options.start_limit_s
        first_step: int | None = None
        while time.monotonic() < limit:
            if self.launch.ended() is not None:
                self.record_unexpected_end()
                return None
            state = self.state()
            if state is not None and state.phase == "running":
                first_step = state.step if first_step is None else first_step
                if state.step > first_step:
                    return state
            self.poll()
        self.record_hang(f"the launch did not train within {self._options.start_limit_s:g} s of its start")
        return None

    # ------------------------------------------------------------------------------------------------ broken promises

    def record_unexpected_end(self) -> None:
        """Record that a launch has ended unexpectedly, which a fault of one part must not cause."""
        details = f"launch {self._outcome.launches} ended with {self.launch.ended()}:\n{self.launch.tail()}"
        self._outcome.ended_launches.append(details)
        self.record_violation("other parts survive", f"launch {self._outcome.launches} ended unexpectedly")
        self._log(f"   {details}")

    def record_hang(self, details: str) -> None:
        """Record a hang with the output of `asyncrl why`, and kill the launch."""
        target = self._options.work_dir / f"why-{self._outcome.launches}.txt"
        with suppress(OSError, ValueError):
            launches.write_why(self.run_dir, target)
        self.record_violation("no hang", f"{details}; see {target.name}")
        if self.launch.ended() is None:
            self.launch.kill()

    def record_violation(self, promise: str, details: str) -> None:
        self._outcome.violations.append(Violation(promise, details))
        self._log(f"   BROKEN: {promise}: {details}")

    def keep_records(self) -> Path:
        """Copy the records, without checkpoints, from the disk that will be unmounted."""
        target = self._options.work_dir / "run"
        if self.run_dir.exists():
            shutil.copytree(
                self.run_dir, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "ray")
            )
        return target
