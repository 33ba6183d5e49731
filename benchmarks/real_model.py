"""Train a real model for half an hour, once with `launch sync` and once with `launch fully_async`, and compare rewards.

    python -m benchmarks.real_model [--model DIR|HUB_ID] [--minutes 30] [--json FILE] [--plot FILE.png]

SmolLM2-135M-Instruct learns, with LoRA, to add and subtract two numbers of one or two digits (`chain_sum` of
reasoning-gym), which it can do now and then. A response has the reward 1 if its last number is the result. No prompt is
trained twice on purpose, but there are only 200 for numbers of one digit. Both modes have all cores: `sync` generates
and trains in turns with all of them, and `fully_async` gives half of them to each side. The time includes the start.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asyncrl.driver.launch import INTERRUPTED
from benchmarks.report import arguments, machine, output_file, positive, report
from benchmarks.running import print_progress
from benchmarks.soak.plot import COLOURS, STYLE

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODES = ("sync", "fully_async")
PROMPTS, GROUP, RESPONSE_TOKENS = 8, 8, 24
SYSTEM = "You are a calculator. Reply with the result only, for example: 12"
TASK = "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}"
WINDOW_MIN = 5.0
"""Length of the window over which a curve averages steps."""
FEWEST_STEPS = 3
"""Number of steps without which there is no interval."""
STOP_S = 600.0
"""Limit for a launch to end after its time is over."""
_NUMBER = re.compile(r"-?\d+")


class Step(NamedTuple):
    """One optimizer step."""

    minutes: float
    """Since the start of the launch."""
    reward: float
    tokens: int
    staleness: float


class Interval(NamedTuple):
    """Mean reward of the steps around a time, with its interval of 95 % confidence."""

    minutes: float
    mean: float
    low: float
    high: float


def last_number(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return 1 if the last number of the response is the result, else 0."""
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and numbers[-1] == str(ground_truth))


def launch(mode: str, model: str, run_dir: Path, minutes: float, cores: int, overrides: Sequence[str]) -> list[Step]:
    """Train for some minutes and return the steps that ended within them.

    Raises:
        RuntimeError: the launch fails, does not end, or takes fewer than `FEWEST_STEPS` steps.
    """
    threads = cores if mode == "sync" else max(1, cores // 2)
    command = [
        *(sys.executable, "-m", "asyncrl", "launch", mode, f"run_dir={run_dir}"),
        *(f"model.path={model}", "model.lora_rank=16", "model.lora_alpha=32"),
        *("data=chain_sum", "data.train_files=[]", "data.reasoning_gym.train_size=20000"),
        *("data.reasoning_gym.val_size=0", f"data.reasoning_gym.kwargs={TASK}"),
        f"data.reasoning_gym.system_prompt={SYSTEM!r}",
        *("reward.function=benchmarks.real_model:last_number", f"rollout.n={GROUP}"),
        *(f"rollout.response_length={RESPONSE_TOKENS}", f"rollout.cpu_threads={threads}"),
        *(f"trainer.cpu_threads={threads}", f"trainer.ppo_mini_batch_size={PROMPTS}"),
        *("trainer.total_training_steps=2000", "trainer.optim.lr=2e-4", "trainer.optim.warmup_steps=0"),
        *("trainer.save_last=false", "trainer.val_before_train=false"),
        *("logging.sinks=[jsonl]", "logging.console=plain", *overrides),
    ]  # fmt: skip
    output = run_dir.with_suffix(".txt")
    started_s = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            process.kill()
            process.wait()
    metrics = run_dir / "metrics.jsonl"
    steps = read_steps(metrics, started_s) if metrics.is_file() else []
    steps = [step for step in steps if step.minutes <= minutes]  # an interrupted launch finishes its step
    if process.returncode not in (0, INTERRUPTED) or len(steps) < FEWEST_STEPS:
        why = f"exited with {process.returncode} after {len(steps)} steps; at least {FEWEST_STEPS} are needed"
        raise RuntimeError(f"launch {mode} {why}:\n{output.read_text(encoding='utf-8', errors='replace')[-4000:]}")
    return steps


def read_steps(metrics: Path, started_s: float) -> list[Step]:
    """Read the steps of a run that was started at `started_s` of the monotonic clock."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [
        Step(
            (line["time/monotonic_s"] - started_s) / 60,
            line["reward/mean"],
            int(line["tokens/trained"]),
            line["staleness/mean"],
        )
        for line in lines
        if line["kind"] == "step"
    ]


def curve(steps: Sequence[Step]) -> list[Interval]:
    """Return an interval for each step with enough steps around it. The rewards of steps are independent of
    each other given the policy, because each step has prompts of its own, so their spread gives the standard error."""
    intervals = []
    for step in steps:
        near = [other.reward for other in steps if abs(other.minutes - step.minutes) <= WINDOW_MIN / 2]
        if len(near) >= FEWEST_STEPS:
            intervals.append(_interval(step.minutes, near))
    return intervals


def _interval(minutes: float, rewards: Sequence[float]) -> Interval:
    mean, error = statistics.fmean(rewards), 1.96 * statistics.stdev(rewards) / len(rewards) ** 0.5
    return Interval(minutes, mean, mean - error, mean + error)


def row(mode: str, steps: Sequence[Step], minutes: float) -> dict[str, Any]:
    """Return the table line of a run."""
    late = [step for step in steps if step.minutes > minutes - WINDOW_MIN]
    last = _interval(minutes, [step.reward for step in (late if len(late) >= FEWEST_STEPS else steps[-FEWEST_STEPS:])])
    trained_min = steps[-1].minutes - steps[0].minutes
    return {
        "mode": mode,
        "steps": len(steps),
        "first step after min": steps[0].minutes,
        "s/step": 60 * trained_min / (len(steps) - 1),
        "trained tokens/s": sum(step.tokens for step in steps[1:]) / (60 * trained_min),
        "staleness": statistics.fmean(step.staleness for step in steps),
        "reward of the first 3 steps": statistics.fmean(step.reward for step in steps[:3]),
        f"reward of the last {WINDOW_MIN:g} min": f"{last.mean:.2f} ({last.low:.2f} to {last.high:.2f})",
    }


def draw(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Write a PNG with the reward of each mode by time. Raises `OSError`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for colour, (mode, steps) in zip(COLOURS, runs.items(), strict=False):
            axes.plot([step.minutes for step in steps], [step.reward for step in steps], ".", color=colour, alpha=0.4)
            intervals = curve(steps)
            times = [interval.minutes for interval in intervals]
            axes.plot(
                times, [interval.mean for interval in intervals], color=colour, label=f"{mode}, {len(steps)} steps"
            )
            low, high = [interval.low for interval in intervals], [interval.high for interval in intervals]
            axes.fill_between(times, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_title(f"reward; points: steps; lines: mean of {WINDOW_MIN:g} minutes, with its 95 % interval")
        axes.set_xlabel("minutes since the start of the launch")
        axes.set_ylim(0, 1)
        axes.legend()
        figure.savefig(path, dpi=100)


def main() -> None:
    parser = arguments(__doc__, "real_model")
    parser.add_argument("--model", default=MODEL, help=f"directory of the model or its id on the hub (default {MODEL})")
    parser.add_argument("--minutes", type=positive, default=30, help="wall time of each launch (default 30)")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png", help="draw the rewards by time")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides for both modes")
    options = parser.parse_args()
    cores = machine()["cores"]
    runs: dict[str, list[Step]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-real-model-") as scratch:
        for mode in MODES:
            print_progress(f"{mode}: {options.minutes} minutes")
            runs[mode] = launch(mode, options.model, Path(scratch) / mode, options.minutes, cores, options.overrides)
    if options.plot is not None:
        draw(runs, options.plot)
    rows = [row(mode, steps, options.minutes) for mode, steps in runs.items()]
    report("real_model", rows, options.json, runs={mode: [step._asdict() for step in runs[mode]] for mode in runs})


if __name__ == "__main__":
    main()
