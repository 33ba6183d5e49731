"""Measure conversations with tools, and over-sampling, on a real engine behind Ray Serve.

    tools           throughput of 64 concurrent conversations of 4 turns, with a tool call of 0.5 s between turns: each
                    conversation independent of the others (`streaming`), against all of them in lockstep as in a
                    synchronous system (`barrier`): 64 turns in one engine call, then 64 tool calls, then the next turns
    lag             how late timers are on an event loop: idle, and with 64 conversations whose tools take 0.1 s and are
                    async or run in threads; every timer that comes due while the loop is blocked counts
    over_sampling   time to a number of finished samples if each version needs all of its samples before the next one
                    starts: 16 samples of 8 responses with long-tailed lengths, against 20 % more samples, and against
                    2 more trajectories for each prompt
    cost            CPU time of the event loop's thread for each turn of a conversation, on engines that answer at once

Dispatcher, queue, groups, agent loop, tool sessions, chat template and vLLM's tool parser are the real ones. Samples
are not scored, and a version counts as applied as soon as the samples of the previous one are complete. The engine
serves the shipped model of 0.9M parameters, which cannot call tools: turn lengths are drawn with a seed from a
log-normal distribution, and a scripted parser reads each turn and then replaces the result by a tool call. In `cost`
the engines answer with tool calls as text.

The variants alternate within one run under the same seeds. Rates and times are medians over rounds, ratios are medians
of the ratios of the same round, lateness is a percentile over all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence

from benchmarks.report import Table, arguments, positive, report_tables

ASPECTS = ("tools", "lag", "over_sampling", "cost")
AIMS = {
    "tools": "streaming faster than a barrier: a ratio above 1",
    "lag": "p99 below 20 ms",
    "over_sampling": "less time to the same number of samples: a ratio above 1",
    "cost": "none: the figures are for comparison between versions",
}
COST_ROUNDS = 3
"""Rounds of `cost` for each round of `--rounds`, because they are short."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    # vLLM's parsers are imported into this process and would log to standard output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    load_before = os.getloadavg()[0]
    with contextlib.redirect_stdout(sys.stderr), _without_warnings():
        tables = measure(options.only, options.rounds, options.jitter)
    facts = {"rounds": options.rounds, "jitter": options.jitter, "load_before": load_before}
    report_tables("agents", tables, options.json, aims=AIMS, **facts)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the agent loop's warnings that tokens differ from the chat template, which scripted calls cause."""
    logger = logging.getLogger("rollouter.agent.loop")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def measure(only: Collection[str], rounds: int, jitter: float) -> dict[str, Table]:
    """Measure the tables named in `only`; Ray and an engine run only if one of them needs them."""
    found: dict[str, Table] = {}
    if "cost" in only:
        from benchmarks.agents.cost import measure_cost

        found["cost"] = measure_cost(COST_ROUNDS * rounds)
    if set(only) - {"cost"}:
        from benchmarks.agents.engines import measure_on_engine

        found |= measure_on_engine(only, rounds, jitter)
    return {name: found[name] for name in ASPECTS if name in found}


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "agents", json_to_stdout=True)
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of each measurement (default 3)")
    parser.add_argument(
        "--only", type=_names, default=ASPECTS, metavar="NAME,…", help=f"measure only these of {', '.join(ASPECTS)}"
    )
    parser.add_argument(
        "--jitter",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="vary a tool's latency by up to this share of it (default 0)",
    )
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return share


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in ASPECTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ASPECTS)}")
    return names


if __name__ == "__main__":
    main()
