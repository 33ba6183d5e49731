"""Measure what replicas that join and leave cost the requests in flight, against a constant fleet.

Callers request one turn after another, without a pause. The replicas are changed as a run with `rollout.autoscaling`
changes them: at first there is one, then `--replicas`, and then the two numbers alternate `--changes` times, each for
`--hold` seconds after it is reached. A request that was in flight on a leaving replica goes on elsewhere with its
tokens (`moved`). `gap` is the longest time in which a request got no token; running requests report about once a
second, so an undisturbed one has gaps of about a second. Latencies are those of whole requests.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.ports import Accepted, EngineCrashed, GenerateRequest, TurnFinished, TurnProgress, WantedReplicas
from asyncrl.weights.object_store import ServedRun, start_store
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, positive, report
from benchmarks.running import local_ray, print_progress, serving

if TYPE_CHECKING:
    from rollouter.serving.fleet import ServeFleet

NAMESPACE = "bench-elastic"
PROMPT = np.arange(5, 25, dtype=np.int32)
FRESH_S = 5.0
"""A replica that has not reported for longer is gone."""


def main() -> None:
    parser = arguments(__doc__, "elastic")
    parser.add_argument("--model", choices=sorted(SHAPES), default=next(iter(SHAPES)), help="default: the smallest")
    parser.add_argument("--replicas", type=positive, default=2, help="the larger number of replicas (default 2)")
    parser.add_argument("--changes", type=positive, default=6, help="changes of the number (default 6)")
    parser.add_argument("--hold", type=float, default=20.0, metavar="S", help="seconds for each number (default 20)")
    parser.add_argument("--callers", type=positive, default=8, help="concurrent requests (default 8)")
    parser.add_argument("--tokens", type=positive, default=400, help="tokens of a request (default 400)")
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error("--replicas must be 2 or more, as one replica always stays")
    with tempfile.TemporaryDirectory() as directory:
        path = make_llama(Path(directory) / options.model, SHAPES[options.model])
        with local_ray(NAMESPACE, object_store_memory=1 << 30):
            rows = anyio.run(_measure, path, options)
    report("elastic", rows, options.json)


@dataclass
class TimedRequest:
    """One request, with the times at which it got tokens (`time.monotonic`)."""

    started: float
    fleet: str
    """The fleet when it started."""
    replicas: list[str] = field(default_factory=list)
    tokens_at: list[float] = field(default_factory=list)

    @property
    def latency_s(self) -> float:
        return self.tokens_at[-1] - self.started

    @property
    def gap_s(self) -> float:
        return float(np.diff([self.started, *self.tokens_at]).max())

    @property
    def moved(self) -> bool:
        return len(set(self.replicas)) > 1


class ClosedLoop:
    """Callers that send one request after another."""

    def __init__(self, fleet: ServeFleet, max_tokens: int) -> None:
        self.done: list[TimedRequest] = []
        self.now = ""
        """The fleet at the moment; requests that end under another one than they started with are left out unless
        replicas are changed on purpose."""
        self._fleet = fleet
        self._sampling = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True}
        self._numbers = count()

    async def call(self) -> None:
        while True:
            name = f"request-{next(self._numbers)}"
            request = GenerateRequest(name, PROMPT, self._sampling)
            timed = TimedRequest(time.monotonic(), self.now)
            async for event in self._fleet.generate([request], session=name):
                match event:
                    case Accepted(replica):
                        timed.replicas.append(replica)
                    case TurnProgress() | TurnFinished():
                        timed.tokens_at.append(time.monotonic())
                    case EngineCrashed(error):
                        raise error
            if timed.fleet == self.now:
                self.done.append(timed)


async def _measure(path: Path, options: Any) -> list[dict[str, Any]]:
    config = Config.model_validate(
        {
            "model": {"path": str(path)},
            "rollout": {
                "max_model_len": len(PROMPT) + options.tokens,
                "autoscaling": {"enable": True, "max_replicas": options.replicas},
            },
        }
    )
    store: Any = start_store(NAMESPACE, ServedRun.of(config, name="the benchmark", namespace=NAMESPACE))
    changing = f"changing, 1 and {options.replicas}"
    async with serving(config, NAMESPACE) as fleet:
        load = ClosedLoop(fleet, options.tokens)
        async with anyio.create_task_group() as group:
            for _ in range(options.callers):
                group.start_soon(load.call)
            for decision, wanted in enumerate((1, options.replicas)):
                load.now = ""
                await _reach(store, decision, wanted)
                load.now = f"constant, {wanted}"
                await anyio.sleep(options.hold)
            load.now = changing
            for number in range(options.changes):
                await _reach(store, 2 + number, options.replicas if number % 2 else 1)
                await anyio.sleep(options.hold)
            group.cancel_scope.cancel()
    return table(load.done, ("constant, 1", f"constant, {options.replicas}", changing))


async def _reach(store: Any, decision: int, wanted: int) -> None:
    """Change the number of replicas with a numbered decision, and wait until exactly so many serve."""
    print_progress(f"{wanted} replicas are wanted")
    await store.want_replicas.remote(WantedReplicas(decision, wanted))
    while True:
        status = await store.status.remote()
        fresh = [one for one in status.replicas if status.at - one.reported_at < FRESH_S]
        if len(fresh) == wanted and all(one.phase == "serving" for one in fresh):
            return
        await anyio.sleep(0.1)


def table(requests: Sequence[TimedRequest], fleets: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for the requests of each fleet, and one for those of the last fleet that moved."""
    of_fleets = {name: [one for one in requests if one.fleet == name] for name in fleets}
    moved = [one for one in of_fleets[fleets[-1]] if one.moved]
    return [_row(name, found) for name, found in (*of_fleets.items(), ("of these, moved", moved))]


def _row(name: str, requests: Sequence[TimedRequest]) -> dict[str, Any]:
    latencies = [one.latency_s for one in requests]
    return {
        "fleet": name,
        "requests": len(requests),
        "moved": sum(one.moved for one in requests),
        "p50_s": float(np.percentile(latencies, 50)) if latencies else None,
        "p99_s": float(np.percentile(latencies, 99)) if latencies else None,
        "worst_s": max(latencies, default=None),
        "worst_gap_s": max((one.gap_s for one in requests), default=None),
    }


if __name__ == "__main__":
    main()
