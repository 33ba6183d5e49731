"""Measure the cost of the system around the engines, and how it scales.

    glue        CPU milliseconds per response by process, and responses per second: the real Rollouter, queue, journal
                and Ray Serve, with replicas whose engines answer at once. vLLM's engine and its client are left out
    queue       samples per second through queue and journal, at the same size of samples
    dispatch    samples per second that one event loop dispatches to 16 and to 1,024 simulated replicas, without Ray

In `glue`, CPU time includes all threads of a process and Ray's own work in them. It depends less on other load of the
machine than the rates do.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Collection, Sequence

from benchmarks.report import Table, arguments, positive, report_tables

ASPECTS = ("glue", "queue", "dispatch")
AIMS = {
    "glue": "below 0.7 ms per response in the Rollouter and 1.5 ms in a replica",
    "queue": "2,000 samples/s with the journal",
    "dispatch": "none: the figures are for comparison between versions",
}


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):
        tables = measure(options)
    facts = {"group": options.group, "tokens": options.tokens, "concurrent": options.concurrent}
    report_tables("scale", tables, options.json, aims=AIMS, **facts)


def measure(options: argparse.Namespace) -> dict[str, Table]:
    """Measure the tables named in `options.only`; Ray runs only if one of them needs it."""
    only: Collection[str] = options.only
    found: dict[str, Table] = {}
    if "glue" in only:
        from benchmarks.scale.glue import GlueWork, measure_glue

        works = [
            GlueWork(
                options.samples,
                options.group,
                options.tokens,
                options.concurrent,
                replicas,
                workers,
                options.worker_share,
            )
            for replicas in options.replicas
            for workers in options.workers
        ]
        found["glue"] = measure_glue(works)
    if "queue" in only:
        from benchmarks.scale.queue import measure_queue

        found["queue"] = measure_queue(4 * options.samples, options.rounds)
    if "dispatch" in only:
        from benchmarks.scale.dispatch import measure_dispatch

        found["dispatch"] = measure_dispatch(options.simulated, options.group)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "scale", json_to_stdout=True)
    parser.add_argument(
        "--only", type=_names, default=ASPECTS, metavar="NAME,…", help=f"measure only these of {', '.join(ASPECTS)}"
    )
    parser.add_argument("--samples", type=positive, default=1000, help="measured samples of `glue` (default 1000)")
    parser.add_argument("--group", type=positive, default=8, help="responses of a sample (default 8)")
    parser.add_argument("--tokens", type=positive, default=60, help="tokens of a response (default 60)")
    parser.add_argument("--concurrent", type=positive, default=64, help="samples in flight at once (default 64)")
    parser.add_argument(
        "--replicas", type=_numbers, default=(1,), metavar="N,…", help="numbers of replicas of `glue` (default 1)"
    )
    parser.add_argument(
        "--workers", type=_counts, default=(0,), metavar="N,…", help="values of rollout.num_workers (default 0)"
    )
    parser.add_argument(
        "--worker-share",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="share of a core that each worker may use: with 0.1 a machine with two cores shows how 4 workers "
        "scale, because they are the limit, not the cores (default 1)",
    )
    parser.add_argument(
        "--simulated", type=_numbers, default=(16, 1024), metavar="N,…", help="those of `dispatch` (default 16,1024)"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of `queue` (default 3)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in ASPECTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ASPECTS)}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(0 if number == "0" else positive(number) for number in text.split(","))


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return share


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


if __name__ == "__main__":
    main()
