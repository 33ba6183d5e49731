"""Check before a release that nothing has become slower: compare ratios with those in `benchmarks/baseline.json`.

    make bench-check                             # all of them, in about 10 minutes on two idle cores
    python -m benchmarks.check --only rollout,overlap
    python -m benchmarks.check --update          # write the measured ratios as the new baseline

Each ratio is taken within one short run of the benchmark that the row names, which alternates between asyncrl and what
it is compared with, so it does not depend on the speed of the machine. It does depend on its number of cores and on
other work: leave the machine alone. A ratio that is worse than its baseline by more than the tolerance is measured once
more, and the better one counts. The exit code is 1 if a ratio is still worse, or if a benchmark fails. `peers` needs
`make bench-setup` and is left out without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare.measure import PeerFailedError, run_measured
from benchmarks.compare.peers import ENVIRONMENTS
from benchmarks.report import Table, arguments, report
from benchmarks.running import print_progress

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.15
"""Share by which a ratio may be worse than its baseline; machines are noisy."""
Result = Mapping[str, Any]
"""The JSON of a benchmark."""


@dataclass(frozen=True)
class Guard:
    """A ratio of a benchmark that is compared with its baseline."""

    what: str
    command: tuple[str, ...]
    """Arguments of `python -m`, without `--json`."""
    read: Callable[[Result], float]
    lower_is_better: bool = False

    def worse_by(self, measured: float, baseline: float) -> float:
        """Return the share by which a ratio is worse than its baseline; negative if it is better."""
        return (measured / baseline if self.lower_is_better else baseline / measured) - 1

    def better(self, one: float, other: float) -> float:
        return min(one, other) if self.lower_is_better else max(one, other)


def _layout(lengths: str, layout: str) -> Callable[[Result], float]:
    def read(result: Result) -> float:
        (row,) = [row for row in result["rows"] if (row["lengths"], row["layout"]) == (lengths, layout)]
        return float(row["ratio"])

    return read


def _against_trl(result: Result) -> float:
    if failures := result["failures"]:
        raise PeerFailedError("; ".join(f"{one['system']}: {one['error']}" for one in failures))
    (runs,) = result["runs"].values()
    ours, theirs = (median(run["trained_tokens_s"] for run in runs[system]) for system in ("asyncrl", "trl-hf"))
    return float(ours / theirs)


def _glue(result: Result) -> float:
    (row,) = result["glue"]
    return float((row["Rollouter ms"] + row["queue ms"]) / row["replicas ms"])


_TRAINER = ("benchmarks.trainer", "--device", "cpu", "--models", "1M", "--ranks", "1", "--rounds", "3")
GUARDS = {
    "rollout": Guard(
        "tokens/s of fleet and Serve against a bare AsyncLLM",
        ("benchmarks.rollout", "--rounds", "3", "--groups", "16"),
        lambda result: result["ratio"],
    ),
    "weight_sync": Guard(
        "pause of a weight update of 135M parameters against a copy of the bytes",
        ("benchmarks.weight_sync", "--rounds", "5", "--models", "135M"),
        lambda result: result["rows"][0]["ratio"],
        lower_is_better=True,
    ),
    "queue": Guard(
        "samples/s of 100 KB through the queue with its journal against a deque in an actor",
        ("benchmarks.queue", "--rounds", "2", "--sizes", "100 KB"),
        lambda result: (
            result["ratio"]["journal on / journal off"]["100 KB"] * result["ratio"]["journal off / deque"]["100 KB"]
        ),
    ),
    "glue": Guard(
        "CPU time of a response in Rollouter and queue against that in a replica whose engine answers at once",
        ("benchmarks.scale", "--only", "glue", "--samples", "800"),
        _glue,
        lower_is_better=True,
    ),
    "padded": Guard(
        "tokens/s of an update on equal lengths against a plain loop",
        (*_TRAINER, "--lengths", "equal"),
        _layout("equal", "padded"),
    ),
    "packed": Guard(
        "tokens/s of an update on long-tailed lengths without padding against a plain loop",
        (*_TRAINER, "--lengths", "long-tailed"),
        _layout("long-tailed", "packed"),
    ),
    "overlap": Guard(
        "wall time of `launch sync` against `launch fully_async`",
        ("benchmarks.overlap", "--rounds", "1", "--steps", "40"),
        lambda result: result["speedup"],
    ),
    "peers": Guard(
        "trained tokens/s against TRL with transformers' generation, 0.9M parameters",
        ("benchmarks.compare", "--peers", "trl-hf", "--sizes", "0.9M", "--lengths", "equal", "--rounds", "1"),
        _against_trl,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(argv)
    names = [name for name in options.only if _is_set_up(name)]
    if not names:
        parser.error("nothing is left to measure")
    baseline: dict[str, float] = json.loads(BASELINE.read_text(encoding="utf-8"))
    rows: Table = []
    for name in names:
        rows.append(check(name, GUARDS[name], None if options.update else baseline.get(name), _measure))
        if options.update and (measured := rows[-1]["measured"]) is not None:  # each at once, in case of Ctrl-C
            baseline[name] = round(measured, 3)
            BASELINE.write_text(json.dumps(baseline, indent=2) + "\n", encoding="utf-8")
    report("check", rows, options.json, aim=f"no ratio worse than its baseline by more than {TOLERANCE:.0%}")
    if any(row["verdict"] in ("WORSE", "FAILED") for row in rows):
        sys.exit(1)


def check(name: str, guard: Guard, baseline: float | None, measure: Callable[[Guard], float]) -> dict[str, Any]:
    """Measure a ratio, a second time if it is worse, and return its table row.

    Args:
        baseline: None: there is nothing to compare with.
        measure: Runs the benchmark and returns the ratio, or raises `PeerFailedError`.
    """
    started = time.monotonic()
    measured: float | None = None
    try:
        measured = measure(guard)
        if baseline is not None and guard.worse_by(measured, baseline) > TOLERANCE:
            print_progress(f"{name}: {measured:.3g} is worse than {baseline:.3g}; measuring again")
            measured = guard.better(measured, measure(guard))
    except PeerFailedError as error:
        print_progress(f"{name}: {error}")
    if measured is None:
        verdict = "FAILED"
    elif baseline is None:
        verdict = "new"
    else:
        worse_by = guard.worse_by(measured, baseline)
        verdict = "WORSE" if worse_by > TOLERANCE else "better" if worse_by < -TOLERANCE else "ok"
    ratio = "no ratio" if measured is None else f"{measured:.3g}"
    print_progress(f"{name}: {ratio}, {verdict}, {time.monotonic() - started:.0f} s")
    return {"ratio": name, "what": guard.what, "baseline": baseline, "measured": measured, "verdict": verdict}


def _measure(guard: Guard) -> float:
    """Run the benchmark and return its ratio. Raises `PeerFailedError`."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as directory:
        file = Path(directory) / "result.json"
        run_measured([sys.executable, "-m", *guard.command, "--json", str(file)], {}, Path(directory))
        text = file.read_text(encoding="utf-8")
    try:
        return float(guard.read(json.loads(text)))
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PeerFailedError(f"the result of {' '.join(guard.command)} has no ratio: {error!r}") from error


def _is_set_up(name: str) -> bool:
    if name != "peers" or (ENVIRONMENTS / "trl").exists():
        return True
    print_progress("peers: left out, because TRL is not installed: make bench-setup")
    return False


def _parser() -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in GUARDS:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(GUARDS)}")
        return text.split(",")

    parser = arguments(__doc__, "check")
    text = f"ratios to measure (default {','.join(GUARDS)})"
    parser.add_argument("--only", type=names, default=list(GUARDS), metavar="NAME,…", help=text)
    parser.add_argument("--update", action="store_true", help="write the measured ratios to benchmarks/baseline.json")
    return parser


if __name__ == "__main__":
    main()
