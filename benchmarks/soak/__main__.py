"""Run for hours with real engines and rare faults, and check that no process grows and no promise breaks.

The run of `python -m benchmarks.chaos` (real processes, vLLM engines under Ray Serve) trains for --hours, with a fault
every few minutes. Memory, descriptors and threads of each of its processes are sampled every few seconds.

  python -m benchmarks.soak --hours 1 --json soak.json
  python -m benchmarks.soak --hours 8 --faults-every 10 --samples night.jsonl
  python -m benchmarks.soak --plot night.jsonl

What counts as growth: a replaced process begins anew, with its own warm-up, and a slope in percent per hour over the
minutes between two faults is noise. So the faults of the first half of the time hit only Rollouter, queue, store and
the reward function, and those of the second half only Trainer, ranks, engines, replicas and (with SIGSTOP) the driver.
Each of them has a half in which its processes are left alone, and driver, raylet and Serve live throughout.
Faults that end the launch are left to the chaos benchmark, because they replace all processes at once.

Each process is judged by itself, if it lived for 10 minutes after --warm-up, which begins with the first step or later:

  memory       the process's own data (anonymous pages), without libraries, files and shared memory
  descriptors  open files, sockets and pipes
  ok           at most 2 % an hour, or less than 1 MB or 2 descriptors an hour
  grows        more, and the interval of about 95 % is above zero
  unclear      more, but the interval includes zero: repeat with more --hours
  too short    no process of the role lived long enough

The table has the worst process of each role. The run directory is drawn, but not judged: docs/reliability.md has its
bounds. At the end the run is stopped, launched once more to a planned last step, and the promises are checked.

The exit code is 1 if something grows, a promise was broken (a hang is one), no fault was injected, or a part of the run
could not be judged. Ctrl-C ends the run, skips the last launch and the check, and prints the table (exit code 130). The
samples are on disk at any time, so --plot also works for a soak that was killed or still runs.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.chaos import faults
from benchmarks.chaos.__main__ import add_run_options, interrupt, work_directory
from benchmarks.chaos.faults import FaultKind, Target
from benchmarks.chaos.harness import ChaosHarness
from benchmarks.chaos.outcome import ChaosOptions, ChaosOutcome
from benchmarks.report import arguments, report_tables
from benchmarks.soak.plot import draw
from benchmarks.soak.processes import Recording, RunSample, read_recording, sampling
from benchmarks.soak.summary import AIMS, reasons, role_growths, tables

FIRST_HALF: tuple[Target, ...] = ("rollouter", "queue", "store", "reward")
SECOND_HALF: tuple[Target, ...] = ("trainer", "rank", "engine", "replica", "driver")
KINDS = tuple(kind for kind in faults.KINDS if kind.target in FIRST_HALF + SECOND_HALF and not kind.ends_launch)
SETTINGS = {"trainer.optim.lr": 1e-5}
"""With the quickstart's learning rate, responses and their memory would change while the model learns."""
PROGRESS_LINES = 30
START_LIMIT_S = 900.0


def main() -> int:
    args = _parser().parse_args()
    if args.plot is not None:
        return _report(args, args.plot, None)
    signal.signal(signal.SIGTERM, interrupt)
    args.samples.write_text("", encoding="utf-8")
    began, seconds, pause_s = time.monotonic(), 3600.0 * args.hours, 60.0 * args.faults_every

    def log(line: str) -> None:
        print(f"[{(time.monotonic() - began) / 60:6.1f} min] {line}", flush=True)  # noqa: T201

    def next_is_in_first_half() -> bool:
        return time.monotonic() - began + pause_s < seconds / 2

    with work_directory("soak-", args.keep) as work_dir:
        options = ChaosOptions(
            seed=args.seed,
            limit_s=seconds,
            num_faults=None,
            targets=tuple(kind.name for kind in KINDS),
            work_dir=work_dir,
            replicas=args.replicas,
            ranks=args.ranks,
            two_nodes=False,
            small_disk=False,
            calm_s=(pause_s or seconds, pause_s or seconds),
            start_limit_s=START_LIMIT_S,
            settings=SETTINGS | dict(setting.split("=", 1) for setting in args.set),
        )
        harness = ChaosHarness(
            options,
            log,
            draw=lambda available, rng: by_halves(available, rng, next_is_in_first_half),
            observe=lambda harness: sampling(harness, args.samples, args.every, _Progress(log, seconds)),
        )
        try:
            harness.run()
        except KeyboardInterrupt:
            log("interrupted: the promises are not checked")
            _report(args, args.samples, harness.outcome)
            return 130
        return _report(args, args.samples, harness.outcome)


def by_halves(
    available: Sequence[FaultKind], rng: random.Random, in_first_half: Callable[[], bool]
) -> Iterator[FaultKind]:
    """Yield kinds endlessly: those of `FIRST_HALF` as long as the next fault is in the first half of the time, and then
    the others."""
    first = faults.draw_kinds([kind for kind in available if kind.target in FIRST_HALF], rng)
    second = faults.draw_kinds([kind for kind in available if kind.target in SECOND_HALF], rng)
    while True:
        yield next(first if in_first_half() else second)


class _Progress:
    """Logs some of the samples."""

    def __init__(self, log: Callable[[str], None], seconds: float) -> None:
        self._log = log
        self._every_s = seconds / PROGRESS_LINES
        self._next_at = 0.0

    def __call__(self, sample: RunSample) -> None:
        if sample.at < self._next_at:
            return
        self._next_at = sample.at + self._every_s
        memory_mb = sum(process.anonymous for process in sample.processes) / 1e6
        descriptors = sum(process.descriptors for process in sample.processes)
        self._log(
            f"step {sample.step}: {len(sample.processes)} processes with {memory_mb:,.0f} MB and {descriptors} "
            f"descriptors, shared memory {sample.shared_mb:,.0f} MB, run directory {sample.run_dir_mb:,.0f} MB"
        )


def _report(args: argparse.Namespace, samples: Path, outcome: ChaosOutcome | None) -> int:
    """Print the table, write plot and JSON, and return the exit code."""
    recording = read_recording(samples)
    if not recording.samples:
        raise SystemExit(f"{samples} has no samples, so there is nothing to judge: the run ended before it was sampled")
    roles = role_growths(recording, 60.0 * args.warm_up)
    failed = reasons(roles, outcome, wants_faults=args.faults_every > 0)
    plot = samples.with_suffix(".png")
    draw(recording, roles, plot)
    facts = _facts(recording, outcome) | {"plot": str(plot), "failed": failed}
    report_tables("soak", tables(roles), args.json, aims=AIMS, **facts)
    return 1 if failed else 0


def _facts(recording: Recording, outcome: ChaosOutcome | None) -> dict[str, object]:
    first, last = recording.samples[0], recording.samples[-1]
    facts: dict[str, object] = {
        "sampled_min": (last.at - first.at) / 60,
        "steps": last.step,
        "run_dir_mb": last.run_dir_mb,
        "faults": [f"{(at - first.at) / 60:.1f} min: {name}" for at, name in recording.faults],
    }
    if outcome is not None:
        recovered = [fault.recovered_s for fault in outcome.faults]
        facts |= {"recovered_s": recovered, "samples": outcome.samples, "launches": outcome.launches}
        facts |= {"turns_checked": outcome.num_turns, "last_launch": outcome.last_launch or "none"}
    return facts


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "soak")
    parser.epilog = "faults: " + ", ".join(kind.name for kind in KINDS)
    parser.add_argument("--hours", type=_more_than_zero, default=1.0, metavar="H", help="how long (default 1)")
    parser.add_argument(
        "--faults-every",
        type=float,
        default=4.0,
        metavar="MIN",
        help="minutes from a recovery to the next fault (default 4; 0: no faults)",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=10.0,
        metavar="MIN",
        help="minutes of a process that are not judged (default 10)",
    )
    parser.add_argument(
        "--every", type=_more_than_zero, default=10.0, metavar="S", help="seconds between two samples (default 10)"
    )
    parser.add_argument(
        "--samples",
        type=Path,
        default=Path("soak.jsonl"),
        metavar="FILE",
        help="where the samples go (default soak.jsonl, which is overwritten); the plot goes beside it, as .png",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="run nothing: judge and plot the samples in FILE")
    add_run_options(parser)
    return parser


def _more_than_zero(text: str) -> float:
    if not (text.replace(".", "", 1).isdecimal() and float(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
