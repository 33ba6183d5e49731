"""Measure what a run saves by attaching to deployed rollout servers instead of starting engines of its own.

    python -m benchmarks.attach [--rounds N] [--json FILE]

The quickstart is launched on one Ray cluster, in turns with engines of its own and with `rollout.attach`, and ends
after one step. Each launch is a process of its own. A round also kills an attached run after its first step (SIGKILL)
and continues it (`resume=auto`). `first sample_s` is the time from the start of the command until the run admits its
first sample: data, tokenizer and Trainer are loaded and the engines serve the run's weights.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.compose import check_config
from asyncrl.observe.report.load import load
from asyncrl.observe.status.run_status import read_readable_state
from benchmarks.report import arguments, positive, report
from benchmarks.running import alternating, local_ray, print_progress

APP = "rollout"
LIMIT_S = 400.0
OWN, ATTACHED, CONTINUED = "own engines", "attached", "attached, killed and continued"


class Launches:
    """Launches the quickstart on a cluster, and measures when it admits its first sample."""

    def __init__(self, address: str, runs: Path) -> None:
        self._address = address
        self._runs = runs
        self._number = 0

    def first_sample_s(self, variant: str) -> float:
        """Raises `RuntimeError` if a launch fails."""
        print_progress(variant)
        self._number += 1
        run_dir = self._runs / f"run-{self._number}"
        attach = [] if variant == OWN else [f"rollout.attach={APP}"]
        if variant == CONTINUED:
            self._killed(run_dir, attach)
        steps = self._step(run_dir) + 5 if variant == CONTINUED else 1  # the file is a few steps late
        began = time.time()
        process = self._start(run_dir, steps, [*attach, "resume=auto"] if variant == CONTINUED else attach)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # has no effect on a process that has ended
        if process.returncode:
            raise RuntimeError(f"the launch with {variant} exited with {process.returncode}:\n{output[-4000:]}")
        admitted = load(run_dir)["sample.admitted"]["timestamp"]
        return float(admitted[admitted >= began].min()) - began

    def _killed(self, run_dir: Path, attach: Sequence[str]) -> None:
        process = self._start(run_dir, 1000, [*attach, "trainer.save_freq=1"])
        until = time.monotonic() + LIMIT_S
        while self._step(run_dir) < 1:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise RuntimeError(f"the attached launch did not train:\n{process.communicate()[0][-4000:]}")
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()

    @staticmethod
    def _step(run_dir: Path) -> int:
        state = read_readable_state(run_dir)
        return state.step if state is not None else 0

    def _start(self, run_dir: Path, steps: int, overrides: Sequence[str]) -> subprocess.Popen[str]:
        own = ("logging.console=plain", "trainer.val_before_train=false", f"trainer.total_training_steps={steps}")
        command = [sys.executable, "-m", "asyncrl", "launch", "fully_async", f"ray.address={self._address}"]
        command += [f"run_dir={run_dir}", *own, *overrides]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each variant; times are medians over rounds."""
    import ray
    from ray import serve

    from rollouter.serving.app import build_rollout_app

    found: dict[str, list[float]] = {OWN: [], ATTACHED: [], CONTINUED: []}
    with tempfile.TemporaryDirectory(prefix="asyncrl-attach-") as runs, local_ray("bench-attach", num_cpus=8):
        config = check_config(None, (), scope="app").require()
        serve.run(build_rollout_app(config, namespace=None, http=True), name=APP, route_prefix=f"/{APP}")
        launches = Launches(ray.get_runtime_context().gcs_address, Path(runs))
        for counts, variant in alternating(list(found), rounds):
            took_s = launches.first_sample_s(variant)
            if counts:
                found[variant].append(took_s)
    return table(found)


def table(found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row for each variant, with the time that it saves against engines of its own."""
    own_s = statistics.median(found[OWN])
    return [
        {
            "engines": variant,
            "first sample_s": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "saved_s": own_s - statistics.median(times),
        }
        for variant, times in found.items()
    ]


def main() -> None:
    options = _options()
    report("attach", measure(options.rounds), options.json)


def _options() -> Any:
    parser = arguments(__doc__, "attach")
    parser.add_argument("--rounds", type=positive, default=3, help="measured launches of each kind (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
