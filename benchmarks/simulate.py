"""Measure how well `asyncrl simulate` predicts runs of some configurations from a run of another one.

    python -m benchmarks.simulate [--steps N] [--runs DIR] [--json FILE] ["KEY=VALUE [KEY=VALUE ...]" ...]

The quickstart is launched, and the trace is calibrated from its events. Then it is launched once more without a change,
and once with each set of overrides (by default: `mode=sync`, `async_training=mode_b`). All launches are compared with
their simulations. The first shows the error of the model alone, the second how much equal launches differ on this
machine, and the others also the error of carrying speeds over to another configuration.

Wall time runs from the first admitted sample to the end of the last step. The shares of it are: the Trainer waits for
samples; no sample is in generation; an engine decodes nothing. Their differences are in percentage points.

Other work on the machine spoils the comparison, because it changes speeds from launch to launch: `other_cpus` is the
mean number of processors that it kept busy, those of Ray's own processes included. `--runs DIR` keeps the run
directories there, and reuses those that are complete.
"""

from __future__ import annotations

import re
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.observe.report.load import Events, load
from asyncrl.observe.report.statistics import Intervals, clip, complement, intersection, spans, total, union
from asyncrl.observe.status.summary import read_readable_summary
from asyncrl.simulate.calibration import calibrate
from asyncrl.simulate.contention import read_cpu_use
from asyncrl.simulate.decoding import decoding_times
from asyncrl.simulate.sweep import configurations, simulate_settings
from asyncrl.simulate.trace import Trace
from benchmarks.report import arguments, positive, report
from benchmarks.running import print_progress, run_asyncrl

AIM = "aim: wall time within 10 %, shares within 10 points"
QUICKSTART, AGAIN = "quickstart", "quickstart again"
DEFAULT = ("mode=sync", "async_training=mode_b")
SHARES = ("trainer_waits", "rollouter_idle", "engines_idle")


class Figures(NamedTuple):
    """What happened in a run, or would happen. Shares refer to `wall_s`."""

    steps: int
    wall_s: float
    trainer_waits: float
    rollouter_idle: float
    engines_idle: float


def launch(run_dir: Path, steps: int, overrides: Sequence[str]) -> None:
    """Run the quickstart in its own process, unless the run exists. Raises `RuntimeError` if it fails."""
    summary = read_readable_summary(run_dir)
    if summary is not None and summary.status == "completed":
        print_progress(f"{run_dir} is reused")
        return
    print_progress(f"launching {run_dir.name}")
    mode = "sync" if "mode=sync" in overrides else "fully_async"
    others = [text for text in _overrides(steps, overrides) if not text.startswith("mode=")]
    run_asyncrl("launch", mode, f"run_dir={run_dir}", "logging.console=plain", *others)


def _overrides(steps: int, overrides: Sequence[str]) -> list[str]:
    # A checkpoint at the end comes after the last step.
    return [f"trainer.total_training_steps={steps}", "trainer.save_last=false", *overrides]


def measure(run_dir: Path) -> Figures:
    """Return the figures of a finished run from its events."""
    events = load(run_dir)
    start = float(events["sample.admitted"]["timestamp"].min())
    end = float(events["step"]["end"].max())
    generating = union(
        *(
            np.concatenate([events[name][edge] for name in ("sample.generate", "validation")])
            for edge in ("timestamp", "end")
        )
    )
    decoding = [_share(busy, start, end) for busy in _decoding(events)]
    return Figures(
        steps=int(events["step"]["step"].nunique()),
        wall_s=end - start,
        trainer_waits=_share(spans(events["trainer.wait_samples"]), start, end),
        rollouter_idle=1 - _share(generating, start, end),
        engines_idle=1 - sum(decoding) / len(decoding),
    )


def _share(intervals: Intervals, start: float, end: float) -> float:
    return total(clip(intervals, start, end)) / (end - start)


def _decoding(events: Events) -> list[Intervals]:
    """Return when each replica decoded."""
    found = []
    for replica, own in events["request"].groupby("replica", observed=True):
        begins, ends = decoding_times(own)
        pauses = events["sync.pause"]
        paused = spans(pauses[pauses["replica"].astype("str") == str(replica)])
        busy = union(begins, ends)
        found.append(intersection(busy, complement(paused, busy[0, 0], busy[-1, 1])) if len(paused) else busy)
    return found


def predict(trace: Trace, steps: int, overrides: Sequence[str]) -> Figures:
    """Return the figures of the simulated quickstart."""
    configs = configurations(None, _overrides(steps, overrides), [{}])
    [done] = simulate_settings([{}], configs, trace, steps=steps)
    result = done.result
    return Figures(len(result.steps), result.wall_s, result.trainer_waits, result.rollouter_idle, result.engines_idle)


def compare(name: str, measured: Figures, predicted: Figures) -> list[dict[str, Any]]:
    """Return one row for each figure; shares and their differences are in percent and points."""
    error = predicted.wall_s / measured.wall_s - 1
    rows = [_row(name, "wall_s", measured.wall_s, predicted.wall_s, f"{100 * error:+.1f} %")]
    for share in SHARES:
        was, now = (100 * float(getattr(figures, share)) for figures in (measured, predicted))
        rows.append(_row(name, f"{share}_percent", was, now, f"{now - was:+.1f} points"))
    return rows


def _row(run: str, figure: str, measured: float, predicted: float, difference: str) -> dict[str, Any]:
    values = {"measured": round(measured, 1), "predicted": round(predicted, 1)}
    return {"run": run, "figure": figure, **values, "difference": difference}


def parser() -> ArgumentParser:
    options = arguments(__doc__, "simulate")
    options.add_argument("--steps", type=positive, default=80, help="optimizer steps of each launch (default 80)")
    options.add_argument(
        "--runs", type=Path, metavar="DIR", help="keep the run directories here, and reuse those in it"
    )
    options.add_argument("settings", nargs="*", metavar='"KEY=VALUE ..."', help="overrides of one more launch")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="asyncrl-simulate-") as scratch:
        runs = options.runs or Path(scratch)
        rows: list[dict[str, Any]] = []
        trace: Trace | None = None
        for name in (QUICKSTART, AGAIN, *(options.settings or DEFAULT)):
            overrides = [] if name in (QUICKSTART, AGAIN) else name.split()
            run_dir = runs / re.sub(r"[^\w.=-]+", "_", name)
            launch(run_dir, options.steps, overrides)
            trace = trace or calibrate(run_dir)
            measured = measure(run_dir)
            rows += compare(name, measured, predict(trace, measured.steps, overrides))
            if (use := read_cpu_use(run_dir)) is not None:
                rows.append(
                    {**dict.fromkeys(rows[-1]), "run": name, "figure": "other_cpus", "measured": use.other_cpus}
                )
    report("simulate", rows, options.json, aim=AIM, steps=options.steps)


if __name__ == "__main__":
    main()
