"""Inject random faults into a run (kill, stop, tear, fill) and check that it keeps its promises.

A small run is launched as a user would launch it (real processes, real vLLM, the quickstart's model) on a Ray cluster
of two nodes. Faults of every kind are injected one at a time, each a few seconds after the run has recovered from the
last one. The run ends with Ctrl-C and one more launch to a planned last step. Then its journal, the Trainer's own
record, the turn log and the observed calls to replicas are compared:

  - every fed sample was trained exactly once in the surviving model, or dropped with a reason
  - the sample counts are consistent, and the records agree
  - no completed turn was generated again
  - tokens that were received before a replica or its engine failed are in the response and were not generated again
  - trained samples come from versions that existed then, none older than async_training.max_staleness
  - the launch survived every fault that does not end it by design, nothing hung, and no process is left

The exit code is 1 if a promise was broken, if no fault was injected, or if there were fewer faults than --faults asks
for, because --minutes were over or the run could not continue. With --aim it is also 1 if the median recovery of actors
took 20 s or longer, or that of engines 60 s or longer. Groups with fewer than five faults are not judged, and the exit
code is 1 if no group is judged. The aims are for two otherwise idle cores, so without --aim they are only reported.

A fault that ends the launch (driver kill, journal, payload, disk) is followed by the same launch with resume=auto; the
launch has to survive all others. A fault without a target (no payload file, no idle engine) does not count: it is tried
several times, then another fault takes its place.

  python -m benchmarks.chaos --seed 1 --minutes 30 --json chaos.json
  python -m benchmarks.chaos --seed 1 --minutes 75 --faults 100 --aim --json chaos.json --keep records
  python -m benchmarks.chaos --seed 1 --faults 4 --parts queue trainer "engine stop" --one-node --replicas 1

The seed determines the faults, their targets and the pauses. The state of the run at each fault depends on the
machine, so two rounds with the same seed are similar, not equal. With --faults, pauses are as short as possible while
the round is behind its plan. On two otherwise idle cores a fault takes about 40 s: a few seconds for an actor, up to a
minute for an engine or a launch.

The table has a row for each kind of fault; below it are the recovery times by group. In the JSON, `injected_faults`
lists every fault: kind, time, targets, seconds until recovery (null: none), and the work that had to be repeated
(`lost`); `failed` gives the reasons of exit code 1.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.chaos import faults
from benchmarks.chaos.harness import ChaosHarness
from benchmarks.chaos.outcome import ChaosOptions
from benchmarks.chaos.summary import report_outcome
from benchmarks.report import arguments


def main() -> int:
    args = _parser().parse_args()
    known = {name for kind in faults.KINDS for name in (kind.target, kind.name)}
    if unknown := sorted(set(args.parts or ()) - known):
        raise SystemExit(f"--parts {unknown[0]}: there is no such fault; --help lists them")
    signal.signal(signal.SIGTERM, interrupt)
    with work_directory("chaos-", args.keep) as work_dir:
        return 0 if _run(args, work_dir) else 1


def _run(args: argparse.Namespace, work_dir: Path) -> bool:
    """Run a round, report it, and return whether it passed."""
    options = ChaosOptions(
        seed=args.seed,
        limit_s=args.minutes * 60.0,
        num_faults=args.faults,
        targets=tuple(args.parts) if args.parts else None,
        work_dir=work_dir,
        replicas=args.replicas,
        ranks=args.ranks,
        two_nodes=not args.one_node,
        calm_s=tuple(args.calm),
        finish=not args.no_finish,
        aim=args.aim,
        settings=dict(setting.split("=", 1) for setting in args.set),
    )
    began = time.monotonic()
    harness = ChaosHarness(options, lambda line: print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True))  # noqa: T201
    return report_outcome(harness.run(), options, args.json)


@contextmanager
def work_directory(prefix: str, keep: Path | None) -> Iterator[Path]:
    """Yield a directory that is deleted after the block. `keep`: where a copy goes, without the disk of the run."""
    # The path of a Ray socket may have about 100 characters.
    work_dir = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    try:
        yield work_dir
    finally:
        if keep is not None:
            shutil.copytree(work_dir, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("r", "disk"))
        shutil.rmtree(work_dir, ignore_errors=True)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the run under test."""
    parser.add_argument("--seed", type=int, default=0, help="determines the faults (default 0)")
    parser.add_argument("--replicas", type=int, default=2, help="number of vLLM engines (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="number of training processes (default 1)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run's configuration"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run's records and the launches' output")


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind.name:<16} {kind.description}" for kind in faults.KINDS)
    parser = arguments(__doc__, "chaos")
    parser.epilog = f"faults:\n{kinds}"
    add_run_options(parser)
    parser.add_argument("--minutes", type=float, default=30.0, help="inject no fault after this time (default 30)")
    parser.add_argument(
        "--faults",
        type=int,
        metavar="K",
        help="number of faults; with fewer, the exit code is 1 (default: as many as fit into --minutes)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="FAULT",
        help="inject only faults of these parts (queue), or only these faults (queue stop)",
    )
    parser.add_argument(
        "--one-node", action="store_true", help="let the launch start its own cluster, without node faults"
    )
    parser.add_argument(
        "--calm",
        nargs=2,
        type=float,
        default=(1.0, 12.0),
        metavar=("LEAST", "MOST"),
        help="range of the seconds between a recovery and the next fault (default 1 12)",
    )
    parser.add_argument("--aim", action="store_true", help="exit code 1 also if a median recovery time misses its aim")
    parser.add_argument("--no-finish", action="store_true", help="omit the last launch to a planned end")
    return parser


def interrupt(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
