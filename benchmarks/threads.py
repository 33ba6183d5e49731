"""Measure how OpenMP's way to wait changes training where processes share CPUs.

Processes train the same random Llama of 1M parameters at the same time, each with some threads. By default, OpenMP's
threads spin at the end of a parallel region. With OMP_WAIT_POLICY=passive, which a run sets where its processes share
CPUs, they sleep. Both alternate in rounds. `updates/s` is the sum over the processes, `CPU ms` the CPU time of one.

    python -m benchmarks.threads --json threads.json
    python -m benchmarks.threads --layouts 2x1 2x2 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, positive, report

POLICIES: Mapping[str, Mapping[str, str]] = {"default": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
TOKENS = (8, 64)
"""Rows of an update and tokens of a row."""
_WARM_UP = 2


class Layout(NamedTuple):
    threads: int
    processes: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        threads, _, processes = text.partition("x")
        return cls(positive(threads), positive(processes))


class TrainedFor(NamedTuple):
    """What one process did in the measured time."""

    updates: int
    cpu_s: float


def train(path: Path, seconds: float) -> TrainedFor:
    """Train for some seconds. It begins when a line arrives on standard input."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(0, model.config.vocab_size, TOKENS)

    def update() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARM_UP):
        update()
    _say("ready")
    sys.stdin.readline()
    updates, cpu_s, until = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        update()
        updates += 1
    return TrainedFor(updates, time.process_time() - cpu_s)


def train_together(path: Path, layout: Layout, environment: Mapping[str, str], seconds: float) -> list[TrainedFor]:
    """Run the processes of a layout, which begin to train at the same time."""
    threads = str(layout.threads)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.threads", "--child", str(path), "--seconds", str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **environment},
        )
        for _ in range(layout.processes)
    ]
    streams = [(process.stdin, process.stdout) for process in started]
    for _, output in streams:
        assert output is not None and output.readline() == "ready\n"
    for begin, _ in streams:
        assert begin is not None
        begin.write("\n")
        begin.flush()
    trained = [TrainedFor(*json.loads(output.readline())) for _, output in streams if output is not None]
    for process in started:
        process.communicate()
    return trained


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = arguments(__doc__, "threads")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    layouts = [Layout(2, 1), Layout(1, 2), Layout(2, 2)]
    text = "threads x processes (default: 2x1 1x2 2x2)"
    parser.add_argument("--layouts", nargs="+", type=Layout.parse, default=layouts, help=text)
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of each policy (default 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of one measurement (default 5)")
    options = parser.parse_args()
    if options.child is not None:
        _say(json.dumps(train(options.child, options.seconds)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_llama(Path(folder) / "model", SHAPES["1M"])
        for layout in options.layouts:
            found: dict[str, list[list[TrainedFor]]] = {policy: [] for policy in POLICIES}
            for _ in range(options.rounds):
                for policy, environment in POLICIES.items():
                    found[policy].append(train_together(path, layout, environment, options.seconds))
            rows += [_row(layout, policy, rounds, options.seconds) for policy, rounds in found.items()]
    report("threads", rows, options.json, aim="passive is at least as fast wherever threads share CPUs")


def _row(layout: Layout, policy: str, rounds: list[list[TrainedFor]], seconds: float) -> dict[str, Any]:
    updates = [sum(one.updates for one in each) for each in rounds]
    cpu_ms = [1000 * sum(one.cpu_s for one in each) / max(done, 1) for each, done in zip(rounds, updates, strict=True)]
    return {
        "threads": layout.threads,
        "processes": layout.processes,
        "OMP_WAIT_POLICY": policy,
        "updates/s": statistics.median(updates) / seconds,
        "CPU ms": statistics.median(cpu_ms),
        "rounds, updates/s": ", ".join(f"{done / seconds:.2f}" for done in updates),
    }


if __name__ == "__main__":
    main()
