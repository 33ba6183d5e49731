"""Stream responses from one or more servers under load, and measure their latencies.

  python -m benchmarks.stream --serve asyncrl vllm llm --json stream.json --plot stream.png
  python -m benchmarks.stream --serve asyncrl --sync-every 2
  python -m benchmarks.stream --url http://host:8000/v1 --model NAME --rate 4 --ttft-ms 500 --itl-ms 50
  python -m benchmarks.stream --app rollout --model DIR --sync-every 5 --trace trace.jsonl

--serve starts servers one after another, with the same model (random, about 1M parameters, or --model DIR) and the same
engine arguments: `asyncrl` over HTTP and through its token API, vLLM's own server, and `ray.serve.llm`. --url measures
any OpenAI-compatible server. --app measures the token API of deployed rollout servers (docs/deploy.md) on the Ray
cluster of RAY_ADDRESS or of this machine.

Sessions have --turns requests one after another, each with the conversation so far as its context. They arrive as a
Poisson process (--rate sessions a second), or as a closed loop (--concurrency sessions at a time). Their lengths are
log-normal, or those of --trace.

  first token    time to the first token
  per token      a response's time after its first chunk, divided by the tokens in it
  gap            time between two chunks of a response
  good           complete responses within --ttft-ms (first token) and --itl-ms (per token)

Servers send tokens in chunks, so the gaps are longer than the time per token. Chunks without token ids (other servers
than vLLM's) count as one token.

--sync-every publishes the model's own weights to asyncrl's servers as new versions. The cost of a sync to a response in
flight is its longest gap at the time of the sync, less its median gap at other times.

The exit code is 1 if a server answered no request.

--trace FILE has JSON lines, one for each session:

  {"at_s": 0.25, "turns": [{"new_tokens": 310, "output_tokens": 82, "wait_s": 0}]}
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any

import anyio
import httpx

from asyncrl.config.schema import Config
from asyncrl.core.tasks import task_group
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import Table, arguments, positive, report_tables
from benchmarks.running import print_progress
from benchmarks.stream.clients import OpenAIClient, TokenClient
from benchmarks.stream.load import LoadGenerator, StreamClient
from benchmarks.stream.plot import draw
from benchmarks.stream.servers import SERVERS, server_config
from benchmarks.stream.statistics import (
    LatencyBound,
    StreamedResponse,
    SyncWindow,
    milliseconds,
    summary,
    sync_cost,
)
from benchmarks.stream.workload import TracedSession, WorkloadShape, draw_sessions, read_trace, write_trace

WARM_UP = WorkloadShape(sessions=4, turns=1, prompt=16, output=8, longest=64)
AIMS = {
    "latency": "none yet: compare servers of one run",
    "weight syncs": "none yet: compare with the gaps of the same server without syncs",
}


class StreamBenchmark:
    """One workload, sent to one server after another."""

    def __init__(self, options: argparse.Namespace, sessions: Sequence[TracedSession]) -> None:
        self._options = options
        self._sessions = sessions
        self.measured: dict[str, tuple[list[StreamedResponse], list[SyncWindow]]] = {}

    async def measure(self, name: str, client: StreamClient, sync: tuple[Config, Path] | None = None) -> None:
        """Measure one server. `sync` are the application and the model directory of versions to publish meanwhile."""
        options = self._options
        concurrency = None if options.rate else options.concurrency
        limits: dict[str, Any] = {"vocabulary": options.vocabulary, "timeout_s": options.timeout}
        print_progress(f"{name}: {len(self._sessions)} sessions")
        await LoadGenerator(client, seed=options.seed + 1, **limits).run(draw_sessions(WARM_UP, None, 0), concurrency=4)
        load = LoadGenerator(client, seed=options.seed, **limits)
        windows: list[SyncWindow] = []
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(task_group())
            if sync is not None:
                from benchmarks.stream.syncs import attached

                publisher = await stack.enter_async_context(attached(*sync))
                group.start_soon(publisher.publish_every, options.sync_every, load.now, windows)
            await load.run(self._sessions, concurrency=concurrency)
            group.cancel_scope.cancel()
        self.measured[name] = load.responses, windows
        if failed := [response.error for response in load.responses if response.error]:
            print_progress(f"{name}: {len(failed)} requests failed, the first one with {failed[0]}")

    async def measure_url(
        self, name: str, url: str, model: str | None, sync: tuple[Config, Path] | None = None
    ) -> None:
        """Measure a server over HTTP; without `model`, the first one that it lists."""
        key = os.environ.get(self._options.api_key_env or "", "none")
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=None) as http:
            if model is None:
                with anyio.fail_after(self._options.timeout):
                    answer = (await http.get("/models")).raise_for_status()
                model = str(answer.json()["data"][0]["id"])
            await self.measure(name, OpenAIClient(http, model, self._options.api), sync)

    async def measure_app(self, name: str, config: Config, sync: tuple[Config, Path] | None) -> None:
        """Measure the token API of the application `rollout.attach`."""
        from rollouter.serving.fleet import ServeFleet

        await self.measure(name, TokenClient(ServeFleet(config, namespace=name)), sync)

    def tables(self) -> dict[str, Table]:
        options = self._options
        bound = LatencyBound(_seconds(options.ttft_ms), _seconds(options.itl_ms))
        tables = {
            "latency": [{"server": name, **summary(responses, bound)} for name, (responses, _) in self.measured.items()]
        }
        syncs = [_sync_row(name, *measured) for name, measured in self.measured.items() if measured[1]]
        return tables | ({"weight syncs": syncs} if syncs else {})


def _sync_row(name: str, responses: Sequence[StreamedResponse], syncs: Sequence[SyncWindow]) -> dict[str, Any]:
    costs = sync_cost(responses, syncs)
    applied = [sync.end - sync.begin for sync in syncs]
    return {
        "server": name,
        "syncs": len(syncs),
        **milliseconds("publish to applied", applied, (50,)),
        "responses in flight": len(costs),
        **milliseconds("cost", costs, (50, 99, 100)),
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def main() -> int:
    options = _options()
    sessions = _sessions(options)
    benchmark = StreamBenchmark(options, sessions)
    longest = max(session.num_tokens for session in sessions)
    if options.url is not None:
        anyio.run(benchmark.measure_url, options.url, options.url, options.model)
    if options.app is not None:
        _measure_app(benchmark, options, longest)
    if options.serve:
        _measure_servers(benchmark, options, longest)
    if options.plot is not None:
        draw(benchmark.measured, options.plot)
    tables = benchmark.tables()
    facts: dict[str, Any] = {
        "sessions": len(sessions),
        "requests": sum(len(one.turns) for one in sessions),
        "longest": longest,
    }
    facts |= {"arrivals": f"{options.rate:g} sessions/s" if options.rate else f"{options.concurrency} at a time"}
    report_tables("stream", tables, options.json, aims=AIMS, **facts)
    return 0 if all(row["tokens/s"] for row in tables["latency"]) else 1


def _measure_app(benchmark: StreamBenchmark, options: argparse.Namespace, longest: int) -> None:
    import ray

    ray.init(address="auto", namespace=f"bench-stream-{os.getpid()}", log_to_driver=False)
    try:
        config = server_config(options.model, longest, options.app)
        sync = (config, Path(options.model)) if options.sync_every else None
        anyio.run(benchmark.measure_app, options.app, config, sync)
    finally:
        ray.shutdown()


def _measure_servers(benchmark: StreamBenchmark, options: argparse.Namespace, longest: int) -> None:
    with tempfile.TemporaryDirectory() if options.model is None else nullcontext(options.model) as directory:
        model = Path(directory) if options.model else make_llama(Path(directory) / "1M", SHAPES["1M"])
        config = server_config(model, max(longest, WARM_UP.longest) + 1)
        for kind in options.serve:
            print_progress(f"starting {kind}")
            with SERVERS[kind](config) as server:
                sync = None
                if server.app is not None:
                    attachable = server_config(model, config.max_model_len, server.app)
                    sync = (attachable, model) if options.sync_every else None
                anyio.run(benchmark.measure_url, kind, server.url, server.model, sync)
                if server.app is not None:
                    anyio.run(benchmark.measure_app, f"{kind}, token API", attachable, sync)


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
    target.add_argument("--app", metavar="NAME", help="a Serve application of deployed rollout servers; needs --model")
    target.add_argument("--serve", nargs="+", choices=sorted(SERVERS), default=[], help="servers to start")
    target.add_argument("--model", help="with --url the model's name (default: the first), otherwise its directory")
    target.add_argument("--api", choices=("completions", "chat"), default="completions", help="of HTTP servers")
    target.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of --url")
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=_above_zero, metavar="R", help="sessions per second, as a Poisson process")
    arrivals.add_argument(
        "--concurrency", type=positive, default=16, metavar="N", help="sessions at a time (default 16)"
    )
    load.add_argument("--trace", type=Path, metavar="FILE", help="the sessions, instead of random ones")
    load.add_argument("--write-trace", type=Path, metavar="FILE", help="where to write the random sessions")
    load.add_argument("--sessions", type=positive, default=100, metavar="N", help="number of sessions (default 100)")
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
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--timeout", type=_above_zero, default=300.0, metavar="S", help="of a request (default 300)")
    parser.add_argument("--ttft-ms", type=_above_zero, metavar="MS", help="limit of the first token, for goodput")
    parser.add_argument("--itl-ms", type=_above_zero, metavar="MS", help="limit of the time per token, for goodput")
    parser.add_argument("--sync-every", type=_above_zero, metavar="S", help="publish a version every S seconds")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the latencies as PNG")
    options = parser.parse_args()
    if options.url is None and options.app is None and not options.serve:
        parser.error("name a server: --url, --app or --serve")
    if options.app is not None and options.model is None:
        parser.error("--app needs --model DIR, the directory of the model that the application serves")
    if options.sync_every and options.app is None and "asyncrl" not in options.serve:
        parser.error("--sync-every needs --app or --serve asyncrl: other servers take no versions")
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
