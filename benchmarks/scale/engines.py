"""Replicas behind Ray Serve whose engines answer at once, so that only the system around an engine costs time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray import serve

from asyncrl.config.schema import Config
from asyncrl.core.ports import Accepted, ApplyReport, GenerateRequest, Publication
from rollouter.serving.client import Delta, EventBatch
from rollouter.serving.options import DEPLOYMENT_NAME, app_name, deployment_options, serving_options

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class InstantEngine:
    """The methods of vLLM's `AsyncLLM` that generation calls. Every request is answered with `max_tokens` tokens."""

    def __init__(self, *, max_model_len: int) -> None:
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0, request_states={})

    async def abort(self, request_id: str, internal: bool = False) -> None: ...

    async def add_request(
        self, request_id: str, prompt: Mapping[str, Any], params: SamplingParams, *, lora_request: None
    ) -> Any:
        """Return a collector that has the request's only output already."""
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
        from vllm.v1.engine.output_processor import RequestOutputCollector

        tokens = params.max_tokens or 1
        completion = CompletionOutput(
            index=0,
            text="",
            token_ids=[5 + number % 8 for number in range(tokens)],
            cumulative_logprob=None,
            logprobs=SimpleNamespace(logprobs=[-0.5] * tokens),
            finish_reason="length",
            weight_versions=[WeightVersionSpan("0", 0, tokens)],
        )
        collector = RequestOutputCollector(params.output_kind, request_id)
        collector.put(RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [completion], finished=True))
        return collector


class InstantReplica:
    """A replica of `rollouter.serving` with an `InstantEngine`."""

    def __init__(self, max_model_len: int) -> None:
        from rollouter.serving.replica.event_forwarding import EventForwarder
        from rollouter.serving.replica.generation import TokenGeneration
        from rollouter.serving.replica.health import ReplicaHealth
        from rollouter.serving.replica.request_phases import EnginePauses

        name = serve.get_replica_context().replica_id.unique_id
        gate, engine = asyncio.Event(), InstantEngine(max_model_len=max_model_len)
        gate.set()
        health = ReplicaHealth(replica=name, node_id="", engine_s=60.0)
        self._forwarder = EventForwarder(name)
        self._generation = TokenGeneration(engine, health, gate, EnginePauses())

    async def pid(self) -> int:
        return os.getpid()

    async def generate_tokens(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Accepted | EventBatch | list[Delta], None]:
        """See `RolloutServer.generate_tokens`."""
        async with aclosing(self._forwarder.attach(self._generation.run(requests))) as items:
            async for item in items:
                yield item

    async def apply_version(self, publication: Publication, *options: Any) -> ApplyReport:
        raise RuntimeError("no version is published in this benchmark")


async def start_instant_app(config: Config, namespace: str) -> list[int]:
    """Deploy `rollout.num_replicas` replicas under the run's name, and return the ids of their processes."""
    options = serving_options(config, namespace=namespace, gpus=False)
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(InstantReplica)
    serve.start(proxy_location="Disabled")
    handle = serve.run(deployment.bind(config.max_model_len), name=app_name(namespace), route_prefix=None)
    return list(await handle.broadcast("pid").results_async())
