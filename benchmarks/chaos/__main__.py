"""Kill, stop, tear and fill whatever a run has, at random, and see that it keeps its promises.

A small run is launched like a user's (real processes, real vLLM, the quickstart's model), on a Ray cluster of two
nodes, and faults of every kind are dealt to it: one at a time, a few seconds after it has got over the last. It ends
with Ctrl-C and one more launch, to a planned last step. Then its journal, the Trainer's own record, the turn log and
what was seen of the calls to replicas are held against each other:

  - every sample that was fed was trained exactly once in the surviving model, or dropped with a reason
  - the sample counts are consistent, and the records agree
  - no turn that was complete was generated again
  - tokens that a replica had told of when it or its engine failed are in the response, and were not asked for again
  - what was trained was made by versions that there were then, none older than async_training.max_staleness
  - the launch outlived every fault that is not its own end, nothing hung, and nothing is left running

The exit code is 1 if a promise was broken, if no fault was dealt, and if fewer were than --faults asks for, because
--minutes were over or the run could not go on. With --aim it is 1 as well if the median recovery of actors was not
under 20 s, or that of engines not under 60 s; a group with fewer than five faults is not judged, and one has to be.
These aims are for two cores that nobody else uses, so without --aim they are only told.

A fault that ends the launch (driver kill, journal, payload, disk) is followed by the same launch with resume=auto; the
launch has to live through all others. A fault that finds nothing to strike (no payload file, no engine that runs dry)
does not count: it is tried some times, and then another comes in its place.

  python -m benchmarks.chaos --seed 1 --minutes 30 --json chaos.json
  python -m benchmarks.chaos --seed 1 --minutes 75 --faults 100 --aim --json chaos.json --keep records
  python -m benchmarks.chaos --seed 1 --faults 4 --parts queue trainer "engine stop" --one-node --replicas 1

The seed decides which faults, whom and after what pause. What they meet depends on the machine, so two rounds of one
seed are alike, not equal. With --faults the pauses are the least while the round is behind its plan. On two cores that
nobody else uses a fault takes some 40 s: a few for an actor, up to a minute for an engine or a launch.

The table has a line for each kind; below it is how long recovery took, by group. In the JSON `each` has every fault:
kind, when, whom, recovered after how many seconds (null: never), and what had to be done again (`lost`); `failed` says
why the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.chaos import faults
from benchmarks.chaos.harness import ChaosHarness
from benchmarks.chaos.outcome import ChaosOptions
from benchmarks.chaos.summary import report_outcome


def main() -> int:
    args = _parser().parse_args()
    known = {name for kind in faults.KINDS for name in (kind.target, kind.name)}
    if unknown := sorted(set(args.parts or ()) - known):
        raise SystemExit(f"--parts {unknown[0]}: there is no such fault; see --help")
    signal.signal(signal.SIGTERM, _interrupted)
    # Ray's sockets have paths of at most some 100 characters.
    work_dir = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
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
    try:
        outcome = harness.run()
        kept = report_outcome(outcome, options, args.json)
    finally:
        if args.keep is not None:
            shutil.copytree(work_dir, args.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("r", "disk"))
        shutil.rmtree(work_dir, ignore_errors=True)
    return 0 if kept else 1


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind.name:<16} {kind.told}" for kind in faults.KINDS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        epilog=f"faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the faults (default 0)")
    parser.add_argument("--minutes", type=float, default=30.0, help="no new fault after so many (default 30)")
    parser.add_argument(
        "--faults", type=int, metavar="K", help="so many faults, or exit code 1 (default: what there is time for)"
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="FAULT", help="only these: a part (queue) or one fault (queue stop)"
    )
    parser.add_argument("--replicas", type=int, default=2, help="vLLM engines (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="training processes (default 1)")
    parser.add_argument("--one-node", action="store_true", help="a private cluster of the launch, without node faults")
    parser.add_argument(
        "--calm",
        nargs=2,
        type=float,
        default=(1.0, 12.0),
        metavar=("LEAST", "MOST"),
        help="seconds from one recovery to the next fault (default 1 12)",
    )
    parser.add_argument(
        "--aim", action="store_true", help="exit code 1 also if the median recoveries are over the aims"
    )
    parser.add_argument("--no-finish", action="store_true", help="without the last launch to a planned end")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of the run's configuration"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run's records and what the launches said")
    return parser


def _interrupted(number: int, frame: FrameType | None) -> Any:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
