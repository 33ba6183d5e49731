"""When a replica reports the tokens of its running requests. The engine is a stand-in that samples one every 10 ms."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.core.failures import DataError
from asyncrl.core.ports import Accepted, GenerateRequest
from asyncrl.core.types import FinishReason, Span
from rollouter.serving.replica.generation import REPORT_EVERY_S, STREAM_EVERY_S, TokenGeneration, stream_interval
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.request_phases import EnginePauses

NUM_TOKENS = 30


class SlowEngine:
    """The parts of `AsyncLLM` that generation uses. Token `n` has the id and the log-prob `-n`, and the first half of
    the tokens is of version 1."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=100)
        self.states: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 1, request_states=self.states)
        self.aborted: list[str] = []

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> Any:
        ids: list[int] = []
        log_probs: list[float] = []
        starts = [("1", 0)]
        self.states[request_id] = SimpleNamespace(
            stats=None,
            detokenizer=SimpleNamespace(output_token_ids=ids),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=log_probs)),
            weight_version_starts=starts,
        )

        async def get() -> Any:
            for number in range(NUM_TOKENS):
                await asyncio.sleep(0.01)
                ids.append(number)
                log_probs.append(-float(number))
                if number == NUM_TOKENS // 2:
                    starts.append(("2", number))
            ends = [*(start for _, start in starts[1:]), NUM_TOKENS]
            spans = [
                SimpleNamespace(version=one, start=start, end=end)
                for (one, start), end in zip(starts, ends, strict=True)
            ]
            logged = SimpleNamespace(logprobs=log_probs)
            end = SimpleNamespace(token_ids=ids, logprobs=logged, finish_reason="length", weight_versions=spans)
            return SimpleNamespace(finished=True, outputs=[end], metrics=None)

        return SimpleNamespace(request_id=request_id, output=None, get=get)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        self.aborted.append(request_id)


def generation() -> tuple[TokenGeneration, SlowEngine]:
    engine, gate = SlowEngine(), asyncio.Event()
    gate.set()
    health = ReplicaHealth(replica="one", node_id="node", engine_s=30.0)
    return TokenGeneration(engine, health, gate, EnginePauses()), engine  # type: ignore[arg-type]


def request(*, stream: bool) -> GenerateRequest:
    return GenerateRequest("r", np.array([5], dtype=np.int32), {"max_tokens": NUM_TOKENS}, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_only_streams_are_reported_while_they_run(stream: bool) -> None:
    items = [item async for item in generation()[0].run([request(stream=stream)])]
    assert isinstance(items[0], Accepted)
    deltas = [delta for item in items[1:] if isinstance(item, list) for delta in item]
    assert (len(deltas) > 2) is stream
    assert [delta.done for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert {delta.turn.finish_reason for delta in deltas[:-1]} <= {FinishReason.ABORTED}
    assert np.concatenate([delta.turn.response_ids for delta in deltas]).tolist() == list(range(NUM_TOKENS))
    assert np.concatenate([delta.turn.rollout_log_probs for delta in deltas])[-1] == 1 - NUM_TOKENS
    assert deltas[0].turn.spans[0] == Span(0, 1) and deltas[-1].turn.spans[-1].version == 2


@pytest.mark.parametrize(
    "own",
    [
        {"ignore_eos": 1}, {"ignore_eos": "yes"}, {"stop_token_ids": [True]}, {"bad_words": [3]},
        {"logit_bias": {"3": "x"}}, {"temperature": True}, {"top_k": 2.5}, {"no_such_name": 1},
    ],
)  # fmt: skip
async def test_sampling_parameters_of_wrong_types_do_not_reach_the_engine(own: dict[str, Any]) -> None:
    """They may come from a data row. The process of an engine that decodes them answers no request any more."""
    made, engine = generation()
    wrong = GenerateRequest("r", np.array([5], dtype=np.int32), {"max_tokens": NUM_TOKENS, **own})
    with pytest.raises(DataError, match="request r: invalid sampling parameters"):
        async for _ in made.run([wrong]):
            pass
    assert engine.states == {}


async def test_a_stream_that_is_closed_is_aborted_in_the_engine() -> None:
    made, engine = generation()
    async with aclosing(made.run([request(stream=True)])) as items:
        async for item in items:
            if isinstance(item, list):
                break
    assert engine.aborted == ["r"] and made._num_streams == 0


def test_many_streams_are_reported_less_often() -> None:
    assert stream_interval(1) == stream_interval(4) == STREAM_EVERY_S
    assert stream_interval(64) == pytest.approx(0.32)
    assert stream_interval(100_000) == REPORT_EVERY_S
