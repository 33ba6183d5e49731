"""Compare asyncrl with what people would pick instead: the same work on the same cores, in interleaved rounds.

    asyncrl     `asyncrl launch fully_async`
    trl-hf      TRL's GRPOTrainer with transformers' generation
    trl-vllm    TRL's GRPOTrainer with vLLM in the same process
    trl-async   TRL's experimental AsyncGRPOTrainer with a vLLM server
    verl        verl's main_ppo with vLLM

`make bench-setup` installs the peers at pinned versions into environments of their own. Every system gets the same
files of a random model and of prompts, the same group size, token limits, micro-batches, learning rate and cores. Where
generation and training alternate in one process, it has as many threads as there are cores; where they run side by
side, each side has half of them, and asyncrl's rank tries whether more are faster. `equal` responses all reach the
limit; `long` ones have geometric lengths with the same mean, cut at four times of it. The reward is the share of digits
in the response. Step times, rates and CPU seconds leave out the first two steps. A system that fails is listed with its
own error and not tried again on that workload.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.compare.measure import PeerFailedError, run_measured
from benchmarks.compare.peers import PEERS, Peer
from benchmarks.compare.results import OURS, WARM_UP, Comparison, Figures, figures
from benchmarks.compare.workloads import LENGTHS, SIZES, Job, Workload
from benchmarks.report import arguments, machine, output_file, positive, report_tables, write_json
from benchmarks.running import print_progress

SAME_WORK = 0.02
"""Share by which the tokens of a step may differ from those of the workload."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running peer, too, which has its own session
    workloads = [
        Workload(size, lengths, options.steps or SIZES[size].steps)
        for size in options.sizes
        for lengths in options.lengths
    ]
    for comparison in compare(workloads, {name: PEERS[name] for name in (OURS, *options.peers)}, options.rounds):
        if options.json is not None:  # after each run, so that an interrupted comparison is not lost
            steps = {workload.name: workload.steps for workload in workloads}
            write_json(options.json, {"name": "compare", "steps": steps, **comparison.as_json(), "machine": machine()})
    tables = {"systems": comparison.rows(), "failures": comparison.failures()}
    aims = {"systems": "asyncrl at least as fast at 0.9M and 1.5 times as fast at 8M and 135M", "failures": "none"}
    report_tables("compare", {name: rows for name, rows in tables.items() if rows}, None, aims=aims)
    if options.plot is not None:
        from benchmarks.compare.plot import draw

        draw(comparison, options.plot)


def compare(workloads: Sequence[Workload], peers: Mapping[str, Peer], rounds: int) -> Iterator[Comparison]:
    """Run every peer on every workload in each round; yield the runs so far after each one."""
    runs: dict[str, dict[str, list[Figures]]] = {workload.name: {peer: [] for peer in peers} for workload in workloads}
    errors: dict[tuple[str, str], str] = {}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="asyncrl-compare-") as scratch:
        for workload in workloads:
            workload.prepare(Path(scratch) / workload.name.replace(" ", "-"))
        for number in range(rounds):
            for workload in workloads:
                prepared = Path(scratch) / workload.name.replace(" ", "-")
                for name, peer in peers.items():
                    if (workload.name, name) in errors:
                        continue
                    try:
                        job = workload.job(name, prepared, prepared / f"{name}-{number}", cores)
                        run = run_peer(peer, job)
                        check_work(workload, job, run)
                    except PeerFailedError as error:
                        errors[workload.name, name] = str(error)
                        runs[workload.name][name].clear()
                        print_progress(f"round {number + 1}: {workload.name}: {name} {error}")
                    else:
                        runs[workload.name][name].append(run)
                        print_progress(f"round {number + 1}: {workload.name}: {name} {run.step_s:.2f} s/step")
                    yield Comparison(runs, errors)


def run_peer(peer: Peer, job: Job) -> Figures:
    """Let a peer do a job and measure it. Raises `PeerFailedError`."""
    job.write()
    usage = run_measured(peer.command(job), peer.environment(job), Path(job.directory))
    try:
        progress = peer.read(job)
    except (OSError, ValueError, KeyError) as error:
        raise PeerFailedError(f"its result cannot be read: {error!r}") from error
    if len(progress.steps) != job.steps:
        raise PeerFailedError(f"reported {len(progress.steps)} of {job.steps} steps")
    return figures(progress, usage)


def check_work(workload: Workload, job: Job, run: Figures) -> None:
    """Raise `PeerFailedError` if a step of `equal` responses did not have all their tokens."""
    wanted, found = job.samples * job.group * job.max_tokens, run.step_tokens
    if workload.lengths == "equal" and abs(found / wanted - 1) > SAME_WORK:
        raise PeerFailedError(f"trained {found:.0f} tokens a step instead of {wanted}, which is other work")


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "compare")
    peers = tuple(name for name in PEERS if name != OURS)
    for option, known, what in (
        ("--peers", peers, "systems besides asyncrl"),
        ("--sizes", tuple(SIZES), "models"),
        ("--lengths", LENGTHS, "distributions of response lengths"),
    ):
        text = f"{what} (default {','.join(known)})"
        parser.add_argument(option, type=_names(known), default=known, metavar="NAME,…", help=text)
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each system and workload (default 3)")
    steps = ", ".join(f"{size.steps} for {name}" for name, size in SIZES.items())
    parser.add_argument("--steps", type=_steps, help=f"optimizer steps of each run (default {steps})")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="also draw a plot as PNG")
    return parser


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def _steps(text: str) -> int:
    if positive(text) <= WARM_UP:
        raise argparse.ArgumentTypeError(f"{text} steps leave none to measure: the first {WARM_UP} are a warm-up")
    return int(text)


if __name__ == "__main__":
    main()
