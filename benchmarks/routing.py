"""Compare request routers on multi-turn conversations: ours, and Serve's power-of-two, prefix-aware and consistent-hash
routers.

    trace ─▶ router (its own class, with Serve's queue of pending calls) ─▶ simulated replicas: prefix cache, prefill,
             continuous batching with a decode speed that depends on the batch

The routers are the classes that Serve runs, on a simulated clock and without a cluster: the prefix-aware router calls
its tree directly instead of an actor. The replicas are a discrete-event model. A sample is a group of conversations
with one prompt; each turn adds the response and a tool's answer to the context. When a sample ends, the next one
starts. All routers get the same traces. The figures are medians over the rounds:

    hit rate      share of prompt tokens that the replica has in its prefix cache
    first token   from the call of a turn to the end of its prefill and one decoding step
    turn          from the call of a turn to its last token, which depends mostly on the length
    balance       tokens computed (prefill and decode) by the busiest replica, over the mean of all replicas
    seconds       simulated time of the whole trace
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter

from asyncrl.core.failures import BugError
from asyncrl.core.ports import GenerateRequest
from benchmarks.report import Table, arguments, positive, report
from rollouter.serving import ray_internals
from rollouter.serving.balancing import affinity_key
from rollouter.serving.ray_internals import DeploymentHandleSource, DeploymentID, RequestMetadata
from rollouter.serving.routing import SessionRouter

DEPLOYMENT = DeploymentID("rollout", "benchmark")
ROUTERS = ("sessions", "power-of-two", "consistent-hash", "prefix-aware", "prefix-aware, threshold 5")


# --------------------------------------------------------------------------------------------------------- trace


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How conversations are drawn. Lengths are in tokens, and their logarithms are normally distributed."""

    samples: int = 96
    conversations: int = 8
    prompt: float = 400.0
    """Median length of a sample's prompt."""
    response: float = 250.0
    """Median length of the response of one turn."""
    max_tokens: int = 2048
    turns: int = 6
    """Most turns of a conversation; the numbers from 1 on are equally frequent."""
    tool_tokens: float = 80.0
    tool_s: float = 1.0
    """Median time that a tool takes between two turns, in seconds."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn: the call's context is all earlier turns with their tool answers."""

    prompt: int
    response: int
    tool_s: float
    """Seconds from the end of this turn to the next one."""


Conversation = tuple[TraceTurn, ...]


def draw_trace(options: TraceOptions, seed: int) -> list[list[Conversation]]:
    """Return the conversations of each sample."""
    rng = np.random.default_rng(seed)

    def length(median: float, spread: float, limit: float = float("inf")) -> int:
        return max(1, round(min(limit, median * float(np.exp(spread * rng.standard_normal())))))

    trace = []
    for _ in range(options.samples):
        prompt = length(options.prompt, 0.6)
        conversations = []
        for _ in range(options.conversations):
            context, turns = prompt, []
            for _ in range(int(rng.integers(1, options.turns + 1))):
                response = length(options.response, 0.9, options.max_tokens)
                turns.append(TraceTurn(context, response, options.tool_s * float(np.exp(rng.standard_normal()))))
                context += response + length(options.tool_tokens, 0.5)
            conversations.append(tuple(turns))
        trace.append(conversations)
    return trace


# ------------------------------------------------------------------------------------------------------- replicas


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """The speed of one replica. The defaults are of the order of a 7B model on one H100."""

    step_ms: float = 11.0
    """A decoding step with an empty batch."""
    request_ms: float = 0.07
    """What each request of the batch adds to a step."""
    prefill_us: float = 50.0
    """Time per prompt token that is not in the prefix cache. Decoding waits meanwhile."""
    max_batch: int = 256
    cache_tokens: int = 400_000


class PrefixCache:
    """The contexts that a replica has computed, the least recently used of which are forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._contexts: OrderedDict[str, int] = OrderedDict()
        self._shared: dict[str, int] = {}
        self._size = 0

    def hit(self, session: str, prompt: int, shared: int) -> int:
        """Return how many of the prompt's tokens are cached: an earlier turn's, or the prompt of the sample.

        Args:
            shared: Length of the prompt that all conversations of the sample share.
        """
        if session in self._contexts:
            self._contexts.move_to_end(session)
            return min(prompt, self._contexts[session])
        return min(prompt, shared) if self._shared.get(affinity_key(session)) else 0

    def put(self, session: str, context: int) -> None:
        """Remember a context. Contexts of a sample count with their whole length, although they share the prompt."""
        key = affinity_key(session)
        if session not in self._contexts:
            self._shared[key] = self._shared.get(key, 0) + 1
        self._size += context - self._contexts.pop(session, 0)
        self._contexts[session] = context
        while self._size > self._capacity and len(self._contexts) > 1:
            old, size = self._contexts.popitem(last=False)
            self._size -= size
            key = affinity_key(old)
            self._shared[key] -= 1
            if not self._shared[key]:
                del self._shared[key]


@dataclass(eq=False)
class SimulatedReplica:
    """A replica with continuous batching. It is also the `RunningReplica` that a router sees.

    All requests of a batch decode at the same rate, so the replica counts tokens per request (`_decoded`) and ends a
    request when the count reaches the request's last token.
    """

    name: str
    speed: ReplicaSpeed
    now: Callable[[], float]
    cache: PrefixCache = field(init=False)
    computed: int = 0
    """Tokens of prefill and decoding."""

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.speed.cache_tokens)
        # A heap by the count at the last token: number, request, time of the first token.
        self._batch: list[tuple[float, int, PendingRequest, float]] = []
        self._waiting: deque[tuple[int, int, PendingRequest]] = deque()
        self._numbers = itertools.count()
        self._decoded = self._prefill_s = self._since = 0.0

    # What a router asks of a replica.
    is_cross_language = False
    max_ongoing_requests = 1_000_000
    multiplexed_model_ids = frozenset[str]()
    node_id = ""
    availability_zone = None

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.ongoing

    @property
    def ongoing(self) -> int:
        return len(self._batch) + len(self._waiting)

    def submit(self, request: PendingRequest, prefill: int, response: int) -> None:
        """Take a request with this many tokens to compute, at the present time."""
        self._advance()
        self.computed += prefill + response
        self._waiting.append((prefill, response, request))
        self._admit()

    def next_end(self) -> float:
        """Return the time at which the next request ends if none arrives before; infinity without requests."""
        if not self._batch:
            return float("inf")
        return self._since + self._prefill_s + max(0.0, self._batch[0][0] - self._decoded) * self._step_s

    def end_next(self) -> tuple[PendingRequest, float]:
        """Return the request that ends now, and the time of its first token."""
        self._advance()
        last, _, request, first_token = heapq.heappop(self._batch)
        self._decoded = max(self._decoded, last)
        self._admit()
        return request, first_token

    @property
    def _step_s(self) -> float:
        return (self.speed.step_ms + self.speed.request_ms * len(self._batch)) / 1e3

    def _advance(self) -> None:
        elapsed = self.now() - self._since
        self._since = self.now()
        prefill_s = min(elapsed, self._prefill_s)
        self._prefill_s -= prefill_s
        if self._batch:
            self._decoded += (elapsed - prefill_s) / self._step_s

    def _admit(self) -> None:
        while self._waiting and len(self._batch) < self.speed.max_batch:
            prefill, response, request = self._waiting.popleft()
            self._prefill_s += prefill * self.speed.prefill_us / 1e6
            first_token = self._since + self._prefill_s + self._step_s
            heapq.heappush(self._batch, (self._decoded + response, next(self._numbers), request, first_token))


# ----------------------------------------------------------------------------------------------------- simulation


class TextCall(list[GenerateRequest]):
    """The argument of a `generate_tokens` call, with the text that the prefix-aware router reads."""

    prompt: str


@dataclass
class RoutingFigures:
    """What one router did on one trace."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each turn, like those to the first token."""
    computed: list[int] = field(default_factory=list)
    """Tokens by replica."""
    seconds: float = 0.0

    def row(self) -> dict[str, float]:
        """Return the figures of the table."""
        return {
            "hit rate": self.cached_tokens / self.prompt_tokens,
            "first token p50 ms": 1e3 * float(np.percentile(self.first_tokens, 50)),
            "p99 ms": 1e3 * float(np.percentile(self.first_tokens, 99)),
            "turn p50 s": float(np.percentile(self.latencies, 50)),
            "p99 s": float(np.percentile(self.latencies, 99)),
            "balance": max(self.computed) / statistics.fmean(self.computed),
            "seconds": self.seconds,
        }


class Simulation:
    """One router on one trace."""

    def __init__(self, trace: Sequence[Sequence[Conversation]], options: TraceOptions, in_flight: int) -> None:
        """`in_flight` is the number of samples that run at the same time."""
        self._trace = trace
        self._options = options
        self._in_flight = in_flight
        self._clock = 0.0
        self._numbers = itertools.count()
        self._calls: list[tuple[float, int, int, int, int]] = []  # a heap by time: number, sample, conversation, turn
        self._texts: dict[int, str] = {}
        self._running: dict[str, tuple[int, int, int, float]] = {}
        self._left = [len(conversations) for conversations in trace]
        self._started = 0
        self.figures = RoutingFigures()

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._clock

    async def run(self, router: RequestRouter, replicas: Sequence[SimulatedReplica]) -> RoutingFigures:
        """Run the trace to its end. The replicas must have this simulation's clock."""
        by_id = {replica.replica_id: replica for replica in replicas}
        router.update_replicas(list(replicas))
        for _ in range(min(self._in_flight, len(self._trace))):
            self._start_sample()
        while self._calls or self._running:
            ending = min(replicas, key=SimulatedReplica.next_end)
            if self._calls and self._calls[0][0] <= ending.next_end():
                self._clock = self._calls[0][0]
                due = []
                while self._calls and self._calls[0][0] <= self._clock:
                    due.append(heapq.heappop(self._calls)[2:])
                await asyncio.gather(*(self._call(router, by_id, *turn) for turn in due))
                continue
            self._clock = ending.next_end()
            request, first_token = ending.end_next()
            name = request.metadata.internal_request_id
            router.on_request_completed(ending.replica_id, name)
            router.decrement_queue_len_cache(ending.replica_id)
            sample, number, turn, called = self._running.pop(name)
            self.figures.first_tokens.append(first_token - called)
            self.figures.latencies.append(self._clock - called)
            self._end(sample, number, turn)
        self.figures.computed = [replica.computed for replica in replicas]
        self.figures.seconds = self._clock
        return self.figures

    async def _call(
        self, router: RequestRouter, replicas: dict[ReplicaID, SimulatedReplica], sample: int, number: int, turn: int
    ) -> None:
        """Route one turn. The hooks are called in the order in which Serve calls them."""
        session = f"sample_0_{sample}/{number}"
        one = self._trace[sample][number][turn]
        shared = self._trace[sample][0][0].prompt
        name = f"{session}-{turn}"
        metadata = RequestMetadata(name, name, session_id=session, is_streaming=True)
        sampling = {"max_tokens": self._options.max_tokens}
        call = TextCall([GenerateRequest(name, np.zeros(one.prompt, np.int32), sampling)])
        call.prompt = self._text(sample, shared) + self._text(1_000_000 + sample * 1000 + number, one.prompt - shared)
        request = PendingRequest([call], {}, metadata)
        self._running[name] = sample, number, turn, self._clock
        replica = replicas[(await ray_internals.choose_replica(router, request)).replica_id]
        router.on_send_request(replica.replica_id)
        cached = replica.cache.hit(session, one.prompt, shared)
        replica.cache.put(session, one.prompt + one.response)
        replica.submit(request, one.prompt - cached, one.response)
        router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
        router.on_request_routed(request, replica.replica_id, None)
        self.figures.prompt_tokens += one.prompt
        self.figures.cached_tokens += cached

    def _end(self, sample: int, number: int, turn: int) -> None:
        turns = self._trace[sample][number]
        if turn + 1 < len(turns):
            self._schedule(self._clock + turns[turn].tool_s, sample, number, turn + 1)
            return
        self._left[sample] -= 1
        if not self._left[sample] and self._started < len(self._trace):
            self._start_sample()

    def _start_sample(self) -> None:
        for number in range(len(self._trace[self._started])):
            self._schedule(self._clock, self._started, number, 0)
        self._started += 1

    def _schedule(self, at: float, sample: int, number: int, turn: int) -> None:
        heapq.heappush(self._calls, (at, next(self._numbers), sample, number, turn))

    def _text(self, key: int, length: int) -> str:
        """Return the beginning of a text, one character per token."""
        text = self._texts.get(key, "")
        if len(text) < length:
            text = self._texts[key] = "".join(random.Random(key).choices("abcdefghijklmnopqrstuvwxyz", k=2 * length))
        return text[:length]


class LocalTree:
    """The tree of Serve's prefix-aware router in this process, with the interface of its actor."""

    def __init__(self) -> None:
        self._tree = ray_internals.PrefixTree()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self._tree, method))


def calls_without_actors() -> AbstractContextManager[Any]:
    """Let the prefix-aware router take the answers of `LocalTree` as they are, in the block."""
    module = sys.modules[ray_internals.PrefixCacheAffinityRouter.__module__]
    return patch.object(module, "ray", SimpleNamespace(get=lambda answer: answer))


def make_router(name: str, now: Callable[[], float], max_model_len: int) -> RequestRouter:
    """Return a router of `ROUTERS` as Serve creates it for a handle."""
    kwargs: dict[str, Any] = {}
    kind: type[RequestRouter]
    if name == "sessions":
        kind, kwargs = SessionRouter, {"max_model_len": max_model_len}
    elif name == "power-of-two":
        kind = ray_internals.PowerOfTwoChoicesRequestRouter
    elif name == "consistent-hash":
        kind = ConsistentHashRouter
    else:
        kind, kwargs = ray_internals.PrefixCacheAffinityRouter, {"tree_actor": LocalTree()}
        if name.endswith("threshold 5"):
            kwargs["imbalanced_threshold"] = 5
    router = kind(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.UNKNOWN,
        use_replica_queue_len_cache=True,
        get_curr_time_s=now,
    )
    router.initialize_state(**kwargs)
    return router


async def simulate(name: str, options: argparse.Namespace, seed: int) -> RoutingFigures:
    """Run one router on the trace of a seed."""
    random.seed(seed)  # the routers draw from it
    drawn = TraceOptions(options.samples, options.conversations, turns=options.turns)
    simulation = Simulation(draw_trace(drawn, seed), drawn, options.in_flight)
    speed = ReplicaSpeed(cache_tokens=options.cache_tokens)
    replicas = [SimulatedReplica(f"replica-{number}", speed, simulation.now) for number in range(options.replicas)]
    router = make_router(name, simulation.now, max_model_len=32_768)
    figures = await simulation.run(router, replicas)
    if isinstance(router, SessionRouter) and (left := router.outstanding.total()):
        raise BugError(f"the router counts {left} outstanding tokens after the last call")
    return figures


def measure(options: argparse.Namespace) -> Table:
    """Return one line per router: medians over the rounds."""
    rows: Table = []
    with calls_without_actors():
        for name in options.routers:
            rounds = [asyncio.run(simulate(name, options, seed)).row() for seed in range(options.rounds)]
            rows.append({"router": name} | {key: statistics.median(one[key] for one in rounds) for key in rounds[0]})
    return rows


def main() -> None:
    """Run the command."""
    parser = arguments(__doc__, "routing")
    option = partial(parser.add_argument, type=positive)
    option("--replicas", default=8)
    option("--samples", default=96, help="samples of a trace")
    option("--in-flight", default=24, help="samples that run at the same time")
    option("--conversations", default=8, help="conversations of a sample")
    option("--turns", default=6, help="most turns of a conversation")
    option("--cache-tokens", default=400_000, help="capacity of a replica's prefix cache")
    option("--rounds", default=3)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    options = parser.parse_args()
    report("routing", measure(options), options.json, options=vars(options) | {"json": None})


if __name__ == "__main__":
    main()
