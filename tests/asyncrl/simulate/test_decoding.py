"""Decoding speeds that are measured in requests are those with which a simulated engine answered them."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from asyncrl.observe.report.load import Events
from asyncrl.observe.report.statistics import Intervals
from asyncrl.simulate.clock import SimulatedClock
from asyncrl.simulate.decoding import decoding_speeds
from asyncrl.simulate.engine import SimulatedEngine, SimulatedRequest
from asyncrl.simulate.trace import EngineTrace, interpolated

STEP_S = {1: 0.005, 8: 0.008, 64: 0.03}
BATCH, BATCHES, SLOWDOWN = 64, 30, 2.0


def answered(*, computes_every: float | None = None) -> tuple[Events, Intervals]:
    """Answer batches of requests, each after the other. The Trainer computes for the first half of each of these
    periods, and makes the engine slower meanwhile."""
    clock, rng = SimulatedClock(), np.random.default_rng(0)
    engine = SimulatedEngine(clock, EngineTrace(step_s=STEP_S), max_num_seqs=2 * BATCH, name="replica 1")
    rows: list[dict[str, float | str]] = []
    computing: list[tuple[float, float]] = []

    def toggle(busy: bool) -> None:
        assert computes_every is not None
        engine.set_factor(SLOWDOWN if busy else 1.0)
        if busy:
            computing.append((clock.now, clock.now + computes_every / 2))
        clock.after(computes_every / 2, lambda: toggle(not busy))

    if computes_every is not None:
        toggle(True)
    for _ in range(BATCHES):
        began, left = clock.now, [BATCH]

        def on_end(request: SimulatedRequest, began: float = began, left: list[int] = left) -> None:
            left[0] -= 1
            tokens = request.tokens + 1  # the first one is part of the prefill
            rows.append(
                {"replica": "a", "timestamp": began, "end": clock.now, "decode_s": clock.now - began, "paused_s": 0.0,
                 "response_tokens": tokens}
            )  # fmt: skip

        tokens = np.ceil(rng.lognormal(3.5, 0.8, BATCH)).tolist()
        engine.submit([SimulatedRequest(one, on_end, limit=4096) for one in tokens])
        assert clock.run(lambda left=left: not left[0])  # type: ignore[misc]
    return Events({"request": pd.DataFrame(rows)}), np.array(computing).reshape(-1, 2)


def test_long_responses_that_end_alone_do_not_blur_the_speeds() -> None:
    table = decoding_speeds(*answered())
    assert len(table) >= 8
    for size, step_s in table.items():
        assert step_s == pytest.approx(interpolated(STEP_S, size), rel=0.2), size
    assert list(table.values()) == sorted(table.values())


def test_the_slowdown_by_the_trainer_is_separated_from_the_speed() -> None:
    table = decoding_speeds(*answered(computes_every=1.0), slowdown=SLOWDOWN)
    for size, step_s in table.items():
        assert step_s == pytest.approx(interpolated(STEP_S, size), rel=0.25), size


def test_a_stall_of_a_few_large_batches_does_not_make_them_slower_than_smaller_ones_in_turn() -> None:
    events, computing = answered()
    requests = events["request"]
    stalled = {
        "replica": "a",
        "timestamp": 1e3,
        "end": 1e3 + 5.0,
        "decode_s": 5.0,
        "paused_s": 0.0,
        "response_tokens": 3,
    }
    more = pd.DataFrame([stalled] * 4 * BATCH)
    table = decoding_speeds(Events({"request": pd.concat([requests, more], ignore_index=True)}), computing)
    assert max(table) > 3 * BATCH
    at_once = [size / step_s for size, step_s in sorted(table.items())]
    assert all(more >= 0.95 * fewer for fewer, more in itertools.pairwise(at_once))


def test_without_a_request_of_two_tokens_there_is_a_speed() -> None:
    row = {"replica": "a", "timestamp": 0.0, "end": 1.0, "decode_s": 0.0, "paused_s": 0.0, "response_tokens": 1}
    events = Events({"request": pd.DataFrame([row])})
    assert decoding_speeds(events, np.empty((0, 2))) == {1: 1e-3}
