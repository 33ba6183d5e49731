"""Stream responses from one or more servers under load, and measure their latencies.

  python -m benchmarks.stream --serve asyncrl vllm llm --rounds 3 --json stream.json --plot stream.png
  python -m benchmarks.stream --serve asyncrl --sync-every 2 --rate 1
  python -m benchmarks.stream --url http://host:8000/v1 --model NAME --rate 4 --ttft-ms 500 --itl-ms 50
  python -m benchmarks.stream --app rollout --model DIR --sync-every 5 --trace trace.jsonl

--serve starts servers side by side, with the same model (the quickstart's, or --model DIR) and engine arguments:
`asyncrl` with its OpenAI API and its token API, vLLM's own server, and `ray.serve.llm`. --url measures any
OpenAI-compatible server. --app measures the token API of deployed rollout servers (docs/deploy.md) on the Ray cluster
of RAY_ADDRESS or of this machine. In each of --rounds all servers get the load, one after another.

Sessions have --turns requests one after another, each with the conversation so far as its context. They arrive as a
Poisson process (--rate sessions a second), or as a closed loop (--concurrency sessions at a time). Their lengths are
log-normal, or those of --trace.

  first token    time to the first token
  per token      a response's time after its first chunk, divided by the tokens in it
  gap            time between two chunks of a response
  good           complete responses within --ttft-ms (first token) and --itl-ms (per token)

Servers send tokens in chunks, so the gaps are longer than the time per token. Chunks without token ids (other servers
than vLLM's) count as one token.

--sync-every measures asyncrl's servers once more in each round, while the model's own weights are published as new
versions. The cost of a sync to a response in flight is its longest gap at the time of the sync, less its median gap at
other times. --in-flight: responses `keep` their place in the engine, are ended and sent again (`abort`), or end before
the version is loaded (`wait`).

The exit code is 1 if a server answered no request; nothing is measured if a server does not answer the first ones.

--trace FILE has JSON lines, one for each session:

  {"at_s": 0.25, "turns": [{"new_tokens": 310, "output_tokens": 82, "wait_s": 0}]}
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.core.tasks import task_group
from benchmarks.report import arguments, positive, report_tables
from benchmarks.running import print_progress
from benchmarks.stream.load import LoadGenerator, OpenAIClient, StreamClient, TokenClient
from benchmarks.stream.results import LatencyBound, Round, SyncWindow, draw, latency, speed, sync_summary
from benchmarks.stream.workload import TracedSession, WorkloadShape, draw_sessions, read_trace, write_trace

SERVERS = ("asyncrl", "vllm", "llm")
WARM_UP = WorkloadShape(sessions=4, turns=1, prompt=16, output=8, longest=64)
AIMS = {
    "speed": "none yet: compare servers of one run",
    "latency": "none yet: compare servers of one run",
    "weight syncs": "none yet: compare with the gaps of the same server without syncs",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to measure."""

    name: str
    connect: Callable[[], AbstractAsyncContextManager[StreamClient]]
    syncs: Config | None = None
    """The configuration of a run that attaches to the servers and publishes versions meanwhile."""


async def measure_all(
    options: argparse.Namespace, targets: Sequence[Target], sessions: Sequence[TracedSession]
) -> dict[str, list[Round]]:
    """Measure the targets one after another in every round, so that a change of the machine's load meets all."""
    measured: dict[str, list[Round]] = {target.name: [] for target in targets}
    for number in range(options.rounds):
        for target in targets:
            print_progress(f"round {number + 1}: {target.name}, {len(sessions)} sessions")
            async with target.connect() as client:
                one = await _measure(options, target, client, sessions, is_first=number == 0)
            measured[target.name].append(one)
            if failed := [response.error for response in one.responses if response.error]:
                print_progress(f"{target.name}: {len(failed)} requests failed, the first one with {failed[0]}")
    return measured


async def _measure(
    options: argparse.Namespace,
    target: Target,
    client: StreamClient,
    sessions: Sequence[TracedSession],
    *,
    is_first: bool,
) -> Round:
    """Measure one round. `is_first`: an error of the server ends the measurement, because no results are lost yet.

    Raises:
        ConfigError: the server answers no request.
    """
    limits: dict[str, Any] = {"vocabulary": options.vocabulary, "timeout_s": options.timeout}
    warm_up = LoadGenerator(client, seed=options.seed + 1, **limits)
    await warm_up.run(draw_sessions(WARM_UP, None, 0), concurrency=4)
    if is_first and all(response.error for response in warm_up.responses):
        raise ConfigError(
            f"{target.name} answers no request, so nothing is measured: {warm_up.responses[0].error}; check "
            "the server, --model, --api and --api-key-env"
        )
    load = LoadGenerator(client, seed=options.seed, **limits)
    windows: list[SyncWindow] = []
    concurrency = None if options.rate else options.concurrency
    if target.syncs is None:
        await load.run(sessions, concurrency=concurrency)
    else:
        from benchmarks.stream.servers import attached

        async with attached(target.syncs) as publisher, task_group() as group:
            group.start_soon(publisher.publish_every, options.sync_every, load.now, windows)
            await load.run(sessions, concurrency=concurrency)
            group.cancel_scope.cancel()
    return Round(load.responses, windows)


@contextmanager
def _targets(options: argparse.Namespace, longest: int) -> Iterator[list[Target]]:
    """Start what has to be started, and return what to measure."""
    targets = []
    with ExitStack() as stack:
        if options.url is not None:
            key = os.environ.get(options.api_key_env or "", "none")
            targets.append(
                Target(options.url, partial(OpenAIClient.connected, options.url, options.model, options.api, key))
            )
        if options.app is not None:
            from asyncrl.driver.cluster.connection import connected

            stack.enter_context(connected("auto", "RAY_ADDRESS", namespace=f"bench-stream-{os.getpid()}"))
            from rollouter.serving.app import count_replicas

            count_replicas(options.app, "--app")  # an error if there are none
            targets += _app_targets(options, options.app, None, longest)
        if options.serve:
            from benchmarks.stream.servers import server_config, started

            longest = max(longest, WARM_UP.longest) + 1
            for server in stack.enter_context(started(options.serve, server_config(options.model, longest))):
                http = partial(OpenAIClient.connected, server.url, server.model, options.api, "none")
                if server.app is None:
                    targets.append(Target(server.name, http))
                else:
                    targets += _app_targets(options, server.app, http, longest)
        yield targets


def _app_targets(options: argparse.Namespace, app: str, http: Any, longest: int) -> list[Target]:
    """Return the targets of asyncrl's servers: the token API and, if they have one, the OpenAI API."""
    from benchmarks.stream.servers import server_config

    config = server_config(options.model, longest, app, options.in_flight)

    @asynccontextmanager
    async def connect() -> AsyncIterator[StreamClient]:
        from rollouter.serving.fleet import ServeFleet

        yield TokenClient(ServeFleet(config, namespace=app))

    apis = {} if http is None else {"asyncrl, OpenAI API": http}
    apis["asyncrl, token API"] = connect
    targets = [Target(name, api) for name, api in apis.items()]
    if options.sync_every:
        targets += [Target(f"{name}, syncs", api, config) for name, api in apis.items()]
    return targets


def main() -> int:
    options = _options()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Ray's LLM package shows a line for each request
    sessions = _sessions(options)
    longest = max(session.num_tokens for session in sessions)
    try:
        with _targets(options, longest) as targets:
            measured = anyio.run(measure_all, options, targets, sessions)
    except ConfigError as error:
        raise SystemExit(error.message) from error
    if options.plot is not None:
        draw(measured, options.plot)
    bound = LatencyBound(_seconds(options.ttft_ms), _seconds(options.itl_ms))
    tables = {
        "speed": [{"server": name, **speed(rounds, bound)} for name, rounds in measured.items()],
        "latency": [{"server": name, **latency(rounds)} for name, rounds in measured.items()],
    }
    if syncs := [
        {"server": name, **sync_summary(rounds)}
        for name, rounds in measured.items()
        if any(one.syncs for one in rounds)
    ]:
        tables["weight syncs"] = syncs
    facts: dict[str, Any] = {"rounds": options.rounds, "sessions": len(sessions), "longest": longest}
    facts |= {"requests": sum(len(session.turns) for session in sessions)}
    facts |= {"arrivals": f"{options.rate:g} sessions/s" if options.rate else f"{options.concurrency} at a time"}
    report_tables("stream", tables, options.json, aims=AIMS, **facts)
    return 0 if all(row["tokens/s"] for row in tables["speed"]) else 1


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _sessions(options: argparse.Namespace) -> list[TracedSession]:
    if options.trace is not None:
        try:
            return read_trace(options.trace)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--trace: {error}") from error
    shape = WorkloadShape(
        options.sessions, options.turns, options.prompt, options.output, options.longest, options.turn_wait
    )
    sessions = draw_sessions(shape, options.rate, options.seed)
    if options.write_trace is not None:
        write_trace(options.write_trace, sessions)
    return sessions


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, "stream")
    target = parser.add_argument_group("servers")
    target.add_argument("--url", help="base URL of an OpenAI API, such as http://host:8000/v1")
    running = target.add_mutually_exclusive_group()
    running.add_argument("--app", metavar="NAME", help="a Serve application of deployed rollout servers; needs --model")
    running.add_argument("--serve", nargs="+", choices=SERVERS, default=[], help="servers to start")
    target.add_argument("--model", help="with --url the model's name (default: the first), otherwise its directory")
    target.add_argument(
        "--api", choices=("completions", "chat"), default="completions",
        help="of HTTP servers; `chat` sends a number as the text of each prompt token, which may be several tokens",
    )  # fmt: skip
    target.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of --url")
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=_above_zero, metavar="R", help="sessions per second, as a Poisson process")
    arrivals.add_argument(
        "--concurrency", type=positive, default=16, metavar="N", help="sessions at a time (default 16)"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="the sessions, instead of random ones")
    load.add_argument("--write-trace", type=Path, metavar="FILE", help="where to write the random sessions")
    load.add_argument("--sessions", type=positive, default=100, metavar="N", help="of a round (default 100)")
    load.add_argument("--turns", type=positive, default=1, metavar="N", help="turns of a session (default 1)")
    load.add_argument("--turn-wait", type=float, default=0.0, metavar="S", help="seconds between turns (default 0)")
    load.add_argument(
        "--prompt", type=positive, default=60, metavar="N", help="median new tokens of a turn (default 60)"
    )
    load.add_argument("--output", type=positive, default=80, metavar="N", help="median output tokens (default 80)")
    load.add_argument("--longest", type=positive, default=1024, metavar="N", help="limit of a session (default 1024)")
    load.add_argument(
        "--vocabulary", type=positive, default=60, metavar="N", help="prompts have ids below (default 60)"
    )
    load.add_argument("--rounds", type=positive, default=1, metavar="N", help="rounds of all servers (default 1)")
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--timeout", type=_above_zero, default=300.0, metavar="S", help="of a request (default 300)")
    parser.add_argument("--ttft-ms", type=_above_zero, metavar="MS", help="limit of the first token, for goodput")
    parser.add_argument("--itl-ms", type=_above_zero, metavar="MS", help="limit of the time per token, for goodput")
    parser.add_argument("--sync-every", type=_above_zero, metavar="S", help="publish a version every S seconds")
    parser.add_argument(
        "--in-flight", choices=("keep", "abort", "wait"), default="keep",
        help="what --sync-every does with requests in flight (default keep)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the latencies as PNG")
    options = parser.parse_args()
    if options.url is None and options.app is None and not options.serve:
        parser.error("name a server: --url, --app or --serve")
    if options.app is not None and options.model is None:
        parser.error("--app needs --model DIR, the directory of the model that the application serves")
    if options.sync_every and options.app is None and "asyncrl" not in options.serve:
        parser.error("--sync-every needs --app or --serve asyncrl: other servers take no versions")
    if options.serve and options.model is None:
        options.model = "asyncrl://quickstart"
    if options.vocabulary < 6:
        parser.error("--vocabulary must be at least 6: ids below 5 are left to special tokens")
    return options


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
