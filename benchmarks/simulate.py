"""Measure how well `asyncrl simulate` predicts a run of one configuration from a run of another.

    python -m benchmarks.simulate [--steps N] [--runs DIR] [--json FILE] [KEY=VALUE ...]

The quickstart is launched, and the trace is calibrated from its events. Then it is launched again with the overrides
(`async_training=mode_b` without any), and both launches are compared with their simulations. That of the first shows
the error of the model alone, that of the second also the error of carrying speeds over to another configuration.

Wall time runs from the first admitted sample to the end of the last step. The shares of it are: the Trainer waits for
samples; no sample is in generation; an engine decodes nothing. Their differences are in percentage points.

Other work on the machine spoils the comparison, because both launches and their speeds change with it. `--runs DIR`
keeps the run directories there, and reuses those that exist.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.observe.report.load import Events, load
from asyncrl.observe.report.statistics import Intervals, clip, complement, intersection, spans, total, union
from asyncrl.simulate.calibration import calibrate, decoding_times
from asyncrl.simulate.sweep import simulate_settings
from asyncrl.simulate.trace import Trace
from benchmarks.report import arguments, positive, report
from benchmarks.running import print_progress, run_asyncrl

AIM = "aim: wall time within 10 %, shares within 10 points"
CALIBRATION, OTHER = "calibration", "other"
SHARES = ("trainer_waits", "rollouter_idle", "engines_idle")


class Figures(NamedTuple):
    """What happened in a run, or would happen. Shares refer to `wall_s`."""

    wall_s: float
    trainer_waits: float
    rollouter_idle: float
    engines_idle: float


def launch(run_dir: Path, steps: int, overrides: Sequence[str]) -> None:
    """Run the quickstart in its own process, unless the run exists. Raises `RuntimeError` if it fails."""
    if (run_dir / "summary.json").exists():
        print_progress(f"{run_dir} is reused")
        return
    run_asyncrl("launch", "fully_async", f"run_dir={run_dir}", "logging.console=plain", *_overrides(steps, overrides))


def _overrides(steps: int, overrides: Sequence[str]) -> list[str]:
    # Checkpoints and validations at the end come after the last step.
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
    [done] = simulate_settings(None, _overrides(steps, overrides), [{}], trace, steps=steps)
    result = done.result
    return Figures(result.wall_s, result.trainer_waits, result.rollouter_idle, result.engines_idle)


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
    options.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the second launch (default: mode_b)")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    overrides = options.overrides or ["async_training=mode_b"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-simulate-") as scratch:
        runs = options.runs or Path(scratch)
        rows: list[dict[str, Any]] = []
        trace: Trace | None = None
        for name, changes in ((CALIBRATION, []), (OTHER, overrides)):
            launch(runs / name, options.steps, changes)
            trace = trace or calibrate(runs / name)
            label = "quickstart" if name == CALIBRATION else " ".join(overrides)
            rows += compare(label, measure(runs / name), predict(trace, options.steps, changes))
    report("simulate", rows, options.json, aim=AIM, steps=options.steps)


if __name__ == "__main__":
    main()
