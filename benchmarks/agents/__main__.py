"""Conversations with tools and over-sampling, on a real engine behind Ray Serve: rates, lag, time saved, and Python.

    tools           conversations of 4 turns with a tool of 0.5 s between them, 64 in flight: each on its own way
                    (`streaming`), against all of them in step, as synchronous systems do it (`barrier`): 64 turns in
                    one call to the engine, then 64 calls of the tool, then the next turns
    lag             how late an event loop is on which 64 conversations are held: alone, and beside tools of 0.1 s that
                    are async, or sync in threads; what came due during one halt is late as well
    over_sampling   time to as many finished samples, when a version's worth has to be there before the next one is
                    begun: 16 samples of 8 responses with a long tail of lengths, against 20 % more samples, and
                    against 2 more trajectories a prompt
    cost            Python per turn of a conversation, on engines that answer at once: CPU time of the loop's thread

Pump, queue, groups, agent loop, tool sessions, chat template and vLLM's tool parser are the real ones. Nothing is
scored, and the next version counts as applied as soon as the samples of one are there. The shipped model of 0.9M
parameters samples on: how long each turn is, is drawn with a seed from a log-normal distribution. Nor does it say what
was meant: a parser reads each turn as ever, and then calls it a call. `cost` recites calls that need no such help.

What is compared takes turns within one run, under the same seeds. Rates and times are medians over rounds, ratios are
medians of the ratios of the same round, lateness is a percentile over all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine, report

ASPECTS = ("tools", "lag", "over_sampling", "cost")
AIMS = {
    "tools": "streaming faster than a barrier: a ratio above 1",
    "lag": "p99 below 20 ms",
    "over_sampling": "less time to as many samples: above 1",
    "cost": "none: so that a change shows",
}
COST_ROUNDS = 3
"""For each round that is asked for: they are short."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    to_stdout = options.json == Path("-")
    if options.json is not None and not to_stdout:
        _writable(options.json)
    # vLLM's parsers are read in this process, and it logs to where its results go.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    load_before = os.getloadavg()[0]
    with contextlib.redirect_stdout(sys.stderr), _without_warnings():
        tables = measure(options.only, options.rounds, options.jitter)
    facts = {"rounds": options.rounds, "jitter": options.jitter, "load_before": load_before}
    result = {"name": "agents", **facts, "aims": AIMS, **tables, "machine": machine()}
    text = json.dumps(result, indent=2) + "\n"
    if to_stdout:
        sys.stdout.write(text)
        return
    for name, rows in tables.items():
        report(f"agents, {name}", rows, aim=f"aim: {AIMS[name]}")
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Scripted calls are no tokens of their conversation, and its loop says so."""
    logger = logging.getLogger("rollouter.agent.loop")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def measure(only: Collection[str], rounds: int, jitter: float) -> dict[str, list[dict[str, Any]]]:
    """The tables that are asked for; Ray and an engine are started if one of them needs them, and stopped."""
    found: dict[str, list[dict[str, Any]]] = {}
    if "cost" in only:
        from benchmarks.agents.cost import measure_cost

        found["cost"] = measure_cost(COST_ROUNDS * rounds)
    if set(only) - {"cost"}:
        from benchmarks.agents.engines import measure_on_engine

        found |= measure_on_engine(only, rounds, jitter)
    return {name: found[name] for name in ASPECTS if name in found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="also write the result as JSON; without FILE, JSON on standard output in place of the tables",
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="of everything (default 3)")
    parser.add_argument("--only", type=_names, default=ASPECTS, metavar="NAME,…", help=f"of {', '.join(ASPECTS)}")
    parser.add_argument(
        "--jitter", type=_share, default=0.0, metavar="SHARE", help="of a tool's latency, up and down (default 0)"
    )
    return parser


def _writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        _parser().error(f"argument --json: {path} cannot be written: {error.strerror}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return share


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in ASPECTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ASPECTS)}")
    return names


if __name__ == "__main__":
    main()
