"""Measure how much of the possible overlap `launch fully_async` achieves over `launch sync` on the same work.

    python -m benchmarks.overlap [--rounds N] [--steps N] [--json FILE]

Both modes run the same prompts with the same response lengths (drawn from a long-tailed distribution by a seed and
forced with `ignore_eos`), on the same cores, alternating: sync, async, sync, async, ... Each is a real launch in its
own process. Wall time runs from the first wait of the Trainer to the end of its last step and excludes start-up. Each
side has the same threads in both modes, so that `sync` leaves the CPUs of one side idle: the ratio shows what overlap
brings, not what `sync` could do with the threads of all CPUs for each side.

The limit is what perfect overlap of the sync run's own parts would give, `(gen + train) / max(gen, train)`, where `gen`
is the time its Trainer waited for samples and `train` is the rest of its wall time.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.report import arguments, report
from benchmarks.running import print_progress, run_asyncrl

MINI_BATCH = 16
AIM = 0.92
MODES = ("sync", "fully_async")


class LaunchTimes(NamedTuple):
    """Times of one launch in seconds, and the idle share of each part."""

    wall_s: float
    wait_s: float
    idle_trainer: float
    idle_rollouter: float
    staleness: float
    tokens: int


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Return a reward that differs within a group, so that every row has a gradient."""
    return float(sum(map(ord, solution_str)) % 2)


def write_prompts(path: Path, num_prompts: int, *, longest: int, seed: int) -> int:
    """Write prompts with log-normal response lengths of at most `longest`; return the sum of the lengths."""
    draw = random.Random(seed)
    total = 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_prompts):
            length = max(4, min(longest, round(draw.lognormvariate(3.2, 0.6))))
            total += length
            row = {
                "prompt": [{"role": "user", "content": f"{draw.randrange(100)}+{draw.randrange(100)}="}],
                "data_source": "overlap",
                "reward_model": {"ground_truth": ""},
                "extra_info": {"sampling_params": {"max_tokens": length, "ignore_eos": True}},
            }
            file.write(json.dumps(row) + "\n")
    return total


def launch(mode: str, prompts: Path, run_dir: Path, steps: int, overrides: Sequence[str]) -> LaunchTimes:
    """Run a launch in its own process. Raises `RuntimeError` if it fails."""
    run_asyncrl(
        *("launch", mode, f"run_dir={run_dir}"),
        *(f"data.train_files=[{prompts}]", "data.val_files=[]", "data.shuffle=false"),
        *("reward.function=benchmarks.overlap:reward", "logging.console=plain"),
        *(f"trainer.total_training_steps={steps}", f"trainer.ppo_mini_batch_size={MINI_BATCH}"),
        *("trainer.save_last=false", "trainer.val_before_train=false", "trainer.optim.lr=1e-6"),
        *("logging.sinks=[jsonl]", *overrides),
    )
    return measure(run_dir)


def measure(run_dir: Path) -> LaunchTimes:
    """Read the metrics and the summary of a finished run."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    wall_s = steps[-1]["time/monotonic_s"] - (steps[0]["time/monotonic_s"] - steps[0]["timing/step_s"])
    return LaunchTimes(
        wall_s=wall_s,
        wait_s=sum(step["timing/wait_samples_s"] for step in steps),
        idle_trainer=summary["idle"]["trainer"],
        idle_rollouter=summary["idle"]["rollouter"],
        staleness=summary["staleness"]["mean"],
        tokens=summary["tokens"]["trained"],
    )


def overlap_limit(sync: LaunchTimes) -> float:
    """Return `(gen + train) / max(gen, train)`."""
    return sync.wall_s / max(sync.wait_s, sync.wall_s - sync.wait_s)


def main() -> None:
    parser = arguments(__doc__, "overlap")
    parser.add_argument("--rounds", type=int, default=2, help="number of launches of each mode (default 2)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each launch (default 40)")
    parser.add_argument("--longest", type=int, default=128, help="maximum response length in tokens (default 128)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="configuration overrides for both modes")
    options = parser.parse_args()
    runs: dict[str, list[LaunchTimes]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="asyncrl-overlap-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        write_prompts(prompts, options.steps * MINI_BATCH, longest=options.longest, seed=0)
        for number in range(options.rounds):
            for mode in MODES:
                run_dir = Path(scratch) / f"{mode}-{number}"
                runs[mode].append(launch(mode, prompts, run_dir, options.steps, options.overrides))
                print_progress(f"round {number + 1}: {mode} {runs[mode][-1].wall_s:.1f} s")
    rows = [
        {
            "mode": mode,
            "wall_s": fmean(run.wall_s for run in runs[mode]),
            "wall_s_each": ", ".join(f"{run.wall_s:.1f}" for run in runs[mode]),
            "idle_trainer": fmean(run.idle_trainer for run in runs[mode]),
            "idle_rollouter": fmean(run.idle_rollouter for run in runs[mode]),
            "staleness_mean": fmean(run.staleness for run in runs[mode]),
            "trained_tokens": runs[mode][0].tokens,
        }
        for mode in MODES
    ]
    ratio = fmean(run.wall_s for run in runs["sync"]) / fmean(run.wall_s for run in runs["fully_async"])
    limit = fmean(overlap_limit(run) for run in runs["sync"])
    report(
        "overlap",
        rows,
        options.json,
        aim=f"aim: {AIM:.0%} of the overlap limit",
        speedup=ratio,
        overlap_limit=limit,
        share_of_limit=ratio / limit,
    )


if __name__ == "__main__":
    main()
