"""A whole run in one process: all parts are real, and Ray and vLLM's engine are replaced where the project calls
them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import anyio
import ray
import torch
from transformers import AutoModelForCausalLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.core.ports import SharedGpus
from asyncrl.core.staleness import Pacing
from asyncrl.core.waits import WaitBoard
from asyncrl.queue.actor import QueueActor, QueueClient
from asyncrl.queue.payloads import make_payloads
from asyncrl.queue.sample_queue import QueueOptions
from asyncrl.queue.turn_log import FileTurns
from asyncrl.storage.checkpoint_manifest import NO_REWINDS
from asyncrl.storage.run_dir import RunDir
from asyncrl.weights.object_store import (
    ObjectStoreFeed,
    ObjectStorePublisher,
    ServedRun,
    StoreGpuTurns,
    WeightStoreActor,
)
from rollouter.loading import load_task
from rollouter.rewards.scorer import CombinedScorer
from rollouter.rollouter import Rollouter
from rollouter.serving import fleet as fleet_module
from rollouter.serving.lending import lent_gpus, run_fleet
from rollouter.serving.options import app_name, lent_app
from rollouter.serving.replica import worker as worker_module
from rollouter.serving.replica.event_forwarding import EventForwarder
from rollouter.serving.replica.generation import TokenGeneration
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.server import RolloutServer
from rollouter.serving.replica.weights import WeightUpdates
from rollouter.serving.replica.worker import StoreAddress, StoreTransfer, WorkerExtension
from rollouter.weight_updates import RolloutStart
from trainer.engines import dist
from trainer.trainer import Trainer
from trainer.workers import group as group_module
from trainer.workers.processes import Processes, RankActor

NAMESPACE = "one-run"


class LocalActor:
    """A Ray actor's handle whose methods run on the event loop that made it; callers may be on other threads."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._actor, name), self._loop)


class _Method:
    def __init__(self, method: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._method = method
        self._loop = loop

    def options(self, **options: Any) -> _Method:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        call: Coroutine[Any, Any, Any] = self._method(*args, **kwargs)
        if threading.get_ident() == self._loop._thread_id:  # type: ignore[attr-defined]
            # The actor's method continues if its caller is cancelled.
            return asyncio.shield(self._loop.create_task(call))
        return asyncio.run_coroutine_threadsafe(call, self._loop)


def _get(refs: Any, timeout: float | None = None) -> Any:
    if isinstance(refs, list):
        return [_get(ref, timeout) for ref in refs]
    return refs.result(timeout) if isinstance(refs, concurrent.futures.Future) else refs


@contextmanager
def without_ray(actors: Mapping[str, Any]) -> Iterator[None]:
    """Replace Ray's calls: an object is its own reference, and named actors are looked up in `actors`."""
    context = SimpleNamespace(
        namespace=NAMESPACE,
        gcs_address="",
        was_current_actor_reconstructed=False,
        get_node_id=lambda: "node",
        # Ray's filter of log records needs these.
        get_job_id=lambda: "job",
        get_worker_id=lambda: "worker",
        worker=SimpleNamespace(mode=ray.SCRIPT_MODE),
        get_accelerator_ids=lambda: {"GPU": []},
    )
    replaced = {
        "put": lambda value: value,
        "get": _get,
        "is_initialized": lambda: True,
        "cluster_resources": dict,
        "get_runtime_context": lambda: context,
        "get_actor": lambda name, namespace=None: next(iter(actors.values())),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(ray, name, value))
        stack.enter_context(patch.object(ray.util, "get_node_ip_address", lambda: "127.0.0.1"))
        yield


class OneEngine:
    """A stand-in for vLLM's `AsyncLLM` with the methods that a replica calls: it repeats one token and loads
    weights."""

    def __init__(self, path: str, *, max_model_len: int) -> None:
        self.calls: list[str] = []
        """Calls that stop the engine, change its weights or move its memory, in order."""
        self.is_awake = True
        self.model_config = SimpleNamespace(max_model_len=max_model_len)
        self.output_processor = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0, request_states={}, propagate_error=lambda error: None
        )
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._pause)
        self.weight_version = "0"
        self.worker = WorkerExtension()
        model = AutoModelForCausalLM.from_pretrained(path)
        model.load_weights = lambda items: model.load_state_dict(dict(items), strict=False)
        self.worker.model_runner = SimpleNamespace(model=model, model_config=SimpleNamespace(dtype=model.dtype))
        config: Any = SimpleNamespace(
            parallel_config=None, model_config=SimpleNamespace(hf_config=model.config), quant_config=None
        )
        self.transfer = StoreTransfer(WeightTransferConfig(), config, model.device, model)
        self.worker.weight_transfer_engine = self.transfer

    async def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    abort = _nothing

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        self.is_awake = False

    async def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        self.is_awake = tags == ["kv_cache"]
        return self.is_awake

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return [await anyio.to_thread.run_sync(lambda: getattr(self.worker, method)(*args))]

    async def start_weight_update(self) -> None:
        self.transfer.start_weight_update()

    async def update_weights(self, request: WeightTransferUpdateRequest) -> None:
        self.calls.append(f"load {request.update_info['version']}")
        await anyio.to_thread.run_sync(self.transfer.update_weights, request.update_info)

    async def finish_weight_update(self, version: str) -> None:
        self.transfer.finish_weight_update()
        self.weight_version = version

    async def generate(self, prompt: Any, params: Any, request_id: str, *, lora_request: Any) -> AsyncIterator[Any]:
        log_probs = [{token: SimpleNamespace(logprob=-1.0)} for token in prompt["prompt_token_ids"]]
        yield SimpleNamespace(prompt_logprobs=[None, *log_probs[1:]])

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> Any:
        assert self.is_awake, "a request reached an engine that sleeps"
        tokens = [5] * min(4, params.max_tokens)
        output = SimpleNamespace(
            token_ids=tokens,
            logprobs=SimpleNamespace(logprobs=[-1.0] * len(tokens)),
            finish_reason="length",
            weight_versions=[SimpleNamespace(version=self.weight_version, start=0, end=len(tokens))],
        )

        async def get() -> Any:
            return SimpleNamespace(finished=True, outputs=[output], metrics=None)

        return SimpleNamespace(request_id=request_id, output=None, get=get)


class OneServer(RolloutServer):
    """A replica's server without an engine of its own."""

    def __del__(self) -> None:  # that of `LLMServer` is a coroutine, which asks its engine
        pass


class OneReplica:
    """A replica's parts without Serve, and the deployment handle through which the fleet calls it."""

    def __init__(self, config: Config, store: Any, name: str = "one") -> None:
        """`name`: `lent` for a replica on GPUs that the Trainer lends."""
        self.engine = OneEngine(resolve(config.model.path), max_model_len=config.max_model_len)
        started: Any = SimpleNamespace(client=self.engine, gauges=SimpleNamespace(clear=lambda held: None))
        health = ReplicaHealth(replica=name, node_id="node", engine_s=30.0)
        self.weights = WeightUpdates(started, health, NAMESPACE, config.timeouts)
        self.weights._store, self.weights.run = store, ServedRun.of(config, name="run", namespace=NAMESPACE)
        self.generation = TokenGeneration(self.engine, health, self.weights.gate, self.weights.pauses)  # type: ignore[arg-type]
        health.up = True
        self.engine.transfer._store = StoreAddress("", NAMESPACE, "store")
        self._server: OneServer | None = None
        if name == "lent":
            self._server = server = OneServer.__new__(OneServer)
            server._health, server._weights, server._generation = health, self.weights, self.generation
            server._forwarder, server._knows_run, server._lent = EventForwarder(name), True, True
        self.generate_tokens = SimpleNamespace(remote=self._stream)

    def options(self, **options: Any) -> OneReplica:
        return self

    def _stream(self, requests: Sequence[Any]) -> Any:
        return _Stream(self.generation.run(requests))

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async(*, return_exceptions: bool) -> list[Any]:
            if self._server is not None:
                return [await getattr(self._server, method)(*args)]
            methods = {"apply_version": self.weights.apply, "sleep_engine": self.weights.sleep}
            return [await {**methods, "wake_engine": self.weights.wake}[method](*args)]

        return SimpleNamespace(results_async=results_async)


class _Stream:
    """The response of a streaming call through a deployment handle."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None: ...


class OneRank(Processes):
    """A group with one rank, in this process."""

    async def reserve(self, **limits: Any) -> None: ...

    async def start(self, publisher: Any, *, profiling: Any, **options: Any) -> None:
        self.actors = [LocalActor(RankActor(publisher, profiling, self.plan.name))]

    async def kill(self, places: Sequence[Any]) -> None:
        self.actors = []


class CollectedRecords(list[Any]):
    """A `RecordSink` that keeps the records."""

    async def put(self, record: Any) -> None:
        self.append(record)


async def run(
    config: Config,
    directory: Path,
    *,
    calls: list[str] | None = None,
    prepare: Callable[[OneEngine], None] = lambda own: None,
) -> tuple[CollectedRecords, CollectedRecords]:
    """Train with `config` until the run ends.

    Args:
        calls: receives `OneEngine.calls`, with `trainer.lend_after_s` those of the engine on lent GPUs.
        prepare: called with the run's own engine.

    Returns:
        The Rollouter's and the Trainer's records.
    """
    torch.set_num_threads(1)
    handles: dict[str, Any] = {}
    with ExitStack() as stack:
        stack.callback(dist.leave)  # this process is the rank, so it has to leave the process group
        stack.enter_context(without_ray(handles))
        stack.enter_context(patch.object(group_module, "Processes", OneRank))
        stack.enter_context(patch.object(worker_module, "get_tensor_model_parallel_rank", lambda: 0))
        stack.enter_context(patch.object(worker_module, "get_tensor_model_parallel_world_size", lambda: 1))
        store = handles["store"] = LocalActor(WeightStoreActor())
        own = lent = OneReplica(config, store)
        if config.lends_gpus:
            lent = OneReplica(config, store, "lent")
        lent.engine.calls = calls if calls is not None else []
        prepare(own.engine)
        stack.enter_context(patch.object(fleet_module, "replicas_up", AsyncMock()))
        replicas = {app_name(NAMESPACE): own, lent_app(NAMESPACE).name: lent}
        stack.enter_context(patch.object(fleet_module.serve, "get_deployment_handle", lambda _, app: replicas[app]))
        task = load_task(config, directory / "cache", lambda _: None)  # no logs, whose filters ask the real Ray
        steps = config.trainer.total_training_steps or 1
        pacing = Pacing(
            config.samples_per_version, config.async_training.staleness_threshold, steps * config.samples_per_version
        )
        queue = LocalActor(QueueActor(QueueOptions(len(task.prompts), pacing), run_dir=directory))
        turns = StoreGpuTurns(store, call_s=10.0)
        trainer = await Trainer.start(
            config,
            RunDir(directory),
            None,
            history=NO_REWINDS,
            validated_step=None,
            publisher=ObjectStorePublisher(store, call_s=10.0),
            waits=WaitBoard(),
            turns=turns if config.shares_gpus else None,
        )
        fleet = run_fleet(config, namespace=NAMESPACE)
        sinks = CollectedRecords(), CollectedRecords()
        rollouter = Rollouter(
            config,
            task._replace(scorer=CombinedScorer(task.scorer, config, task.decode, None)),
            queue=QueueClient(queue, 10.0, part="rollouter", incarnation=1),
            payloads=make_payloads(config, directory, 1),
            turns=FileTurns(directory, 1),
            feed=ObjectStoreFeed(store, call_s=10.0),
            fleet=fleet,
            sink=sinks[0],
            start=RolloutStart(validate_first=False),
            gpus=SharedGpus(turns, fleet) if config.takes_turns else None,
            lent=lent_gpus(turns, fleet) if config.lends_gpus else None,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(rollouter.run)
            client = QueueClient(queue, 10.0, part="trainer", incarnation=1)
            await trainer.run(client, make_payloads(config, directory, 1), steps, sinks[1])
        return sinks
