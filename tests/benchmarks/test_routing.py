"""The routing benchmark: the simulated replicas, and Serve's routers without a cluster."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from ray.serve.request_router import PendingRequest

from benchmarks.routing import ROUTERS, PrefixCache, ReplicaSpeed, SimulatedReplica, TraceOptions, draw_trace, measure
from rollouter.serving.ray_internals import RequestMetadata


def call(name: str) -> PendingRequest:
    return PendingRequest([], {}, RequestMetadata(name, name))


async def test_a_replica_decodes_its_batch_at_the_speed_of_the_batch() -> None:
    now = 0.0
    speed = ReplicaSpeed(step_ms=10, request_ms=1, prefill_us=1000, max_batch=2)
    replica = SimulatedReplica("a", speed, lambda: now)
    replica.submit(call("long"), 100, 50)
    now = replica.next_end() - 25 * 0.011
    replica.submit(call("short"), 0, 10)
    replica.submit(call("waiting"), 200, 5)
    assert replica.ongoing == 3
    assert replica.next_end() == pytest.approx(now + 10 * 0.012), "two requests in the batch"
    now = replica.next_end()
    request, first_token = replica.end_next()
    assert request.metadata.request_id == "short" and first_token == pytest.approx(now - 9 * 0.012, abs=0.002)
    assert replica.next_end() == pytest.approx(now + 0.2 + 5 * 0.012), "decoding waits for the prefill"
    assert replica.computed == 100 + 50 + 10 + 200 + 5


def test_the_prefix_cache_keeps_the_latest_contexts() -> None:
    cache = PrefixCache(1000)
    assert cache.hit("s/0", 100, 100) == 0
    cache.put("s/0", 400)
    assert cache.hit("s/0", 500, 100) == 400, "the earlier turn"
    assert cache.hit("s/1", 500, 100) == 100, "the prompt of the sample"
    cache.put("t/0", 900)
    assert cache.hit("s/0", 500, 100) == 0 and cache.hit("t/0", 900, 100) == 900


def test_every_router_answers_every_turn_and_ours_finds_the_most_in_the_cache() -> None:
    options: dict[str, Any] = {"replicas": 3, "samples": 9, "in_flight": 6, "conversations": 4, "turns": 3, "rounds": 1}
    namespace = argparse.Namespace(**options, cache_tokens=400_000, routers=ROUTERS)
    rows = {row["router"]: row for row in measure(namespace)}
    best = rows["sessions"]["hit rate"]
    assert best > rows["power-of-two"]["hit rate"] + 0.2 and best > rows["consistent-hash"]["hit rate"]
    assert rows["sessions"]["balance"] < rows["prefix-aware"]["balance"]


def test_a_trace_depends_on_its_seed_alone() -> None:
    options = TraceOptions(samples=3)
    assert draw_trace(options, 1) == draw_trace(options, 1) != draw_trace(options, 2)
    for conversations in draw_trace(options, 1):
        assert len({turns[0].prompt for turns in conversations}) == 1
        assert all(one.response <= options.max_tokens for turns in conversations for one in turns)
