"""A replica that leaves, or whose GPUs the Trainer wants, hands its requests back, each with all tokens that the engine
has sampled for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import Accepted, GenerateRequest, WeightsVersion
from asyncrl.core.types import FinishReason, Span
from rollouter.serving.client import Delta
from rollouter.serving.replica.generation import TokenGeneration
from rollouter.serving.replica.request_phases import EnginePauses

pytestmark = pytest.mark.asyncio


class Collector:
    """Waits for the only output of a request, as vLLM's `RequestOutputCollector` does."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output: RequestOutput | None = None
        self._ended = asyncio.Event()

    async def get(self) -> RequestOutput:
        await self._ended.wait()
        output, self.output = self.output, None
        assert output is not None
        return output

    def put(self, tokens: list[int], reason: str) -> None:
        log_probs: Any = SimpleNamespace(logprobs=[-0.5] * len(tokens))
        spans: Any = [SimpleNamespace(version="3", start=0, end=len(tokens))]
        end = CompletionOutput(0, "", tokens, None, log_probs, finish_reason=reason, weight_versions=spans)
        self.output = RequestOutput(self.request_id, None, [5], None, [end], finished=True)
        self._ended.set()


class Engine:
    """An `AsyncLLM` whose requests sample what a test says."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=100)
        self.states: dict[str, Any] = {}
        self.collectors: dict[str, Collector] = {}
        self.output_processor = SimpleNamespace(
            request_states=self.states, get_num_unfinished_requests=lambda: len(self.states)
        )

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> Collector:
        collector = self.collectors[request_id] = Collector(f"{request_id}-internal")
        self.states[collector.request_id] = SimpleNamespace(
            detokenizer=SimpleNamespace(output_token_ids=[]),
            logprobs_processor=SimpleNamespace(logprobs=SimpleNamespace(logprobs=[])),
            weight_version_starts=[("3", 0)],
            stats=None,
        )
        return collector

    async def abort(self, request_id: str, internal: bool = False) -> None:
        assert internal
        state = self.states.pop(request_id)
        self.collectors[request_id.removesuffix("-internal")].put(state.detokenizer.output_token_ids, "abort")

    def sample(self, request_id: str, *tokens: int) -> None:
        state = self.states[f"{request_id}-internal"]
        state.detokenizer.output_token_ids.extend(tokens)
        state.logprobs_processor.logprobs.logprobs.extend([-0.5] * len(tokens))


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.asarray([5], dtype=np.int32), {"max_tokens": 50})


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("waits_at_gate", [False, True])
async def test_a_replica_hands_back_every_request_with_its_tokens(waits_at_gate: bool, closes: bool) -> None:
    """`closes`: the replica does not leave, but the Trainer wants its GPUs, so that it takes calls again later."""
    engine, gate = Engine(), asyncio.Event()
    health: Any = SimpleNamespace(broken="", crashed=False, leaving=False, replica="one")
    health.weights_version = WeightsVersion(0, 3)
    llm: Any = engine
    generation = TokenGeneration(llm, health, gate, EnginePauses())
    if not waits_at_gate:
        gate.set()
    items: list[Any] = []

    async def call() -> None:
        async for item in generation.run([request("a"), request("b"), request("c")]):
            items.append(item)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            if not waits_at_gate:
                while not items:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                engine.sample("a", 7, 8, 9)
                engine.collectors["b"].put([4], "stop")
                engine.states.pop("b-internal")
            health.leaving, generation.closed = not closes, closes
            generation.hand_back()
    assert engine.states == {}, "nothing is left in the engine"
    deltas = [delta for item in items if not isinstance(item, Accepted) for delta in item]
    ends = {delta.number: delta for delta in deltas}
    assert all(delta.done for delta in ends.values()) and sorted(ends) == [0, 1, 2]
    sampled = {number: delta.turn.response_ids.tolist() for number, delta in ends.items()}
    if waits_at_gate:
        assert sampled == {0: [], 1: [], 2: []}
        return
    assert sampled == {0: [7, 8, 9], 1: [4], 2: []}
    assert [ends[number].turn.finish_reason for number in range(3)] == [
        FinishReason.ABORTED, FinishReason.STOP, FinishReason.ABORTED,
    ]  # fmt: skip
    assert ends[0].turn.spans == (Span(0, 3),)

    # A call that arrives late goes on elsewhere, too, unless the replica is broken by now.
    late = [item async for item in generation.run([request("d")])]
    ((delta,),) = late
    assert isinstance(delta, Delta) and delta.done and delta.turn.finish_reason is FinishReason.ABORTED
    if closes:
        generation.closed = False
        again = generation.run([request("again")])
        assert isinstance(await anext(again), Accepted), "the replica wakes up"
        await again.aclose()
    health.broken = "its engine is dead"
    with pytest.raises(InfraError, match="its engine is dead"):
        await anext(generation.run([request("e")]))
