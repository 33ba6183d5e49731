"""Replicas and rank 0 of a run with `weight_sync.backend: nccl` in one process.

Everything is real, including vLLM's engines for NCCL on both sides, its packed buckets and the methods of its client
and worker, except the communicator, CUDA streams and the loop of vLLM's engine: a worker is a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer import nccl_common, packed_tensor
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker import gpu_worker

from asyncrl.config.schema import Config
from asyncrl.core.failures import ReplicaLeftError
from asyncrl.weights import nccl as nccl_module
from asyncrl.weights.object_store import ServedRun
from rollouter.serving import fleet as fleet_module
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.replica import worker as worker_module
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.weights import WeightUpdates
from rollouter.serving.replica.worker import StoreAddress, StoreTransfer, WorkerExtension

_tensor_parallel = threading.local()


class Communicator:
    """A `PyNcclCommunicator` of one rank. Its broadcasts go through queues instead of NVLink, and like kernels, they
    wait for other ranks until they are aborted. The deadline of a worker passes when its broadcast cannot end."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        self.disabled = group.net.is_disabled(rank)
        self.received: queue.Queue[Tensor | None] = queue.Queue()
        self.expire: Callable[[], None]

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(PyNcclCommunicator.broadcast).bind(self, *args, **kwargs).arguments
        tensor, src = given["tensor"], given["src"]
        assert tensor.dtype is torch.uint8, "packed"
        if self.disabled:
            return
        self.group.net.sizes.append(tensor.numel()) if self.rank == src else None
        if self.rank == src:
            for other in self.group.joined.values():
                other.received.put(tensor.clone())
        elif self.rank in self.group.net.deaf:
            self.expire()
        elif (found := self.received.get()) is not None:
            tensor.copy_(found)

    def destroy(self) -> None:
        self.disabled = True
        self.received.put(None)


class Group:
    """A process group, by its port."""

    def __init__(self, net: FakeNccl, world_size: int) -> None:
        self.net, self.world_size = net, world_size
        self.joined: dict[int, Communicator] = {}


class FakeNccl:
    """Replaces the one function with which both sides of vLLM's weight transfer form a process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: dict[int, Group] = {}
        self.sizes: list[int] = []
        """Bytes of each bucket that rank 0 has sent."""
        self.deaf: set[int] = set()
        """Ranks whose broadcasts do not end by themselves."""
        self.absent: set[int] = set()
        """Ranks that never join, so that the others wait until `release`."""
        self.is_disabled: Callable[[int], bool] = lambda rank: False
        self._changed = threading.Condition()
        self._is_released = False
        self._signature = inspect.signature(nccl_common.stateless_init_process_group)
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(nccl_common, "stateless_init_process_group", self._form)
        monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: (stream,) * number)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(worker_module, "deadline", self._deadline)
        for module in (worker_module, nccl_module):
            monkeypatch.setattr(module, "wait", self._wait)

    def release(self) -> None:
        """Let the ranks return that wait for absent ones."""
        with self._changed:
            self._is_released = True
            self._changed.notify_all()

    @contextmanager
    def _deadline(self, limit_s: float, abort: Any) -> Iterator[threading.Event]:
        is_late = threading.Event()

        def expire() -> None:
            is_late.set()
            abort()

        abort.__self__.model_update_group.expire = expire
        yield is_late

    def _wait(self, futures: Sequence[Future[Any]], limit_s: float) -> Any:
        return wait(futures, min(limit_s, 0.1) if self.absent else limit_s)

    def _form(self, *args: Any, **kwargs: Any) -> Communicator:
        given = self._signature.bind(*args, **kwargs).arguments
        rank, world_size = given["rank"], given["world_size"]
        assert given["master_address"] and given["device"] == 0
        with self._changed:
            group = self.groups.setdefault(given["master_port"], Group(self, world_size))
            assert group.world_size == world_size and rank not in group.joined and rank < world_size
            if rank not in self.absent:
                group.joined[rank] = Communicator(group, rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(group.joined) == world_size or self._is_released)
            return group.joined[rank]


class OneWorker(WorkerExtension):
    """A worker of an engine: vLLM's methods for weight transfer on a small model."""

    init_weight_transfer_engine = gpu_worker.Worker.init_weight_transfer_engine
    start_weight_update = gpu_worker.Worker.start_weight_update
    _start_weight_update = gpu_worker.Worker._start_weight_update
    update_weights = gpu_worker.Worker.update_weights
    finish_weight_update = gpu_worker.Worker.finish_weight_update
    _check_weight_transfer_engine = gpu_worker.Worker._check_weight_transfer_engine

    def __init__(self, model: torch.nn.Module, rank: int, size: int) -> None:
        parallel = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
        model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"), dtype=torch.float32)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model_config, quant_config=None)
        self._weight_update_active = self._weight_update_is_draft = False
        self.rank = rank
        self.model_runner = SimpleNamespace(model=model, model_config=model_config, reset_lora_state=lambda: None)
        device = torch.device("cpu")
        self.weight_transfer_engine = StoreTransfer(WeightTransferConfig(), self.vllm_config, device, model)
        self.thread = ThreadPoolExecutor(1, initializer=lambda: vars(_tensor_parallel).update(rank=rank, size=size))


class OneEngine:
    """vLLM's `AsyncLLM`: its own methods, and a `collective_rpc` that runs on the workers' threads."""

    init_weight_transfer_engine = AsyncLLM.init_weight_transfer_engine
    start_weight_update = AsyncLLM.start_weight_update
    update_weights = AsyncLLM.update_weights
    finish_weight_update = AsyncLLM.finish_weight_update
    update_weight_version = AsyncLLM.update_weight_version

    def __init__(self, name: str, models: Sequence[torch.nn.Module], calls: list[tuple[str, str]]) -> None:
        self._name, self._calls = name, calls
        self.workers = [OneWorker(model, rank, len(models)) for rank, model in enumerate(models)]
        self.vllm_config = self.workers[0].vllm_config
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=self._pause, set_weight_version_async=self._set_version
        )
        self.version = "0"
        self.infos: list[dict[str, Any]] = []
        """The arguments of `init_weight_transfer_engine` and `update_weights`."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._calls.append((self._name, method))
        self.infos += [dict(info) for info in (kwargs or {}).values()]
        loop, given = asyncio.get_running_loop(), dict(kwargs or {})
        calls = [
            loop.run_in_executor(worker.thread, lambda worker=worker: getattr(worker, method)(*args, **given))
            for worker in self.workers
        ]
        return list(await asyncio.gather(*calls))

    async def _pause(self, *, mode: str, clear_cache: bool) -> None:
        self._calls.append((self._name, "pause"))

    async def resume_generation(self) -> None:
        self._calls.append((self._name, "resume"))

    async def _set_version(self, version: str) -> None:
        self.version = version


class OneReplica:
    """A replica without Serve and requests."""

    def __init__(self, name: str, engine: OneEngine, store: Any, config: Config, namespace: str) -> None:
        started: Any = SimpleNamespace(client=engine, gauges=SimpleNamespace(clear=lambda held: None))
        self.engine = engine
        self.weights = WeightUpdates(
            started, ReplicaHealth(replica=name, node_id="", engine_s=60.0), namespace, config.timeouts
        )
        self.weights._store, self.weights.run = store, ServedRun.of(config, name="run", namespace=namespace)
        self.weights._health._exit = lambda: None  # type: ignore[method-assign]  # it would end this process
        for worker in engine.workers:
            worker.weight_transfer_engine._store = StoreAddress("", namespace, "weight_store")


class BroadcastRig:
    """The fleet of a run with some replicas, whose engines' calls are recorded."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        store: Any,
        namespace: str,
        new_model: Callable[[], torch.nn.Module],
        **timeouts: float,
    ) -> None:
        self.nccl = FakeNccl(monkeypatch)
        self.config = Config.model_validate({"weight_sync": {"backend": "nccl"}, "timeouts": timeouts})
        self.calls: list[tuple[str, str]] = []
        self.replicas: dict[str, OneReplica] = {}
        self.dead: set[str] = set()
        """Replicas whose calls fail, after they have answered that they take part."""
        self.leaving: set[str] = set()
        self._store, self._namespace, self._new_model = store, namespace, new_model
        monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda config: nullcontext())
        monkeypatch.setattr(worker_module, "get_tensor_model_parallel_rank", lambda: _tensor_parallel.rank)
        monkeypatch.setattr(worker_module, "get_tensor_model_parallel_world_size", lambda: _tensor_parallel.size)
        monkeypatch.setattr(fleet_module.serve, "get_deployment_handle", lambda *name: self)
        monkeypatch.setattr(fleet_module, "replicas_up", self._replaced)
        self.fleet = ServeFleet(self.config, namespace=namespace)

    def add(self, name: str, num_workers: int = 1) -> None:
        engine = OneEngine(name, [self._new_model() for _ in range(num_workers)], self.calls)
        self.replicas[name] = OneReplica(name, engine, self._store, self.config, self._namespace)

    async def _replaced(self, app: str, limit_s: float) -> None:
        for name in self.dead:
            del self.replicas[name]
        self.dead.clear()

    def broadcast(self, method: str, *args: Any) -> Any:
        """Call every replica, as Serve does."""

        async def call(name: str, replica: OneReplica) -> Any:
            if name in self.leaving:
                if method == "apply_version":
                    del self.replicas[name]
                raise ReplicaLeftError(f"replica {name} is leaving")
            if method == "broadcast_member":
                return replica.weights.member()
            assert method == "apply_version"
            if name in self.dead:
                raise ray.exceptions.ActorDiedError()
            return await replica.weights.apply(*args)

        async def results_async(*, return_exceptions: bool) -> list[Any]:
            calls = [call(name, replica) for name, replica in self.replicas.items()]
            return await asyncio.gather(*calls, return_exceptions=return_exceptions)

        return SimpleNamespace(results_async=results_async)

    @contextmanager
    def watched(self) -> Iterator[list[tuple[str, str]]]:
        """Record the engines' calls of the block in a list of their own."""
        del self.calls[:]
        yield self.calls
