"""The extension of vLLM's worker processes: maps a published version, loads it in place, and computes checksums of the
served weights.

Most layers compute with the tensors that `load_weights` fills. vLLM rearranges those of other layers after it has
loaded them (`_is_rearranged`). These layers are updated in vLLM's own way: create the tensors of the model's files
again, fill them, rearrange them, and copy the result to where the engine reads it.

vLLM imports this module for its `worker_extension_cls`, before it loads the model. On CPU, the module switches oneDNN
off. Otherwise vLLM would prepack linear layers for oneDNN and empty their weights, and an update in place would fail
or, through `reload_weights`, leave stale layers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
import vllm._custom_ops
from numpy.typing import NDArray
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from asyncrl.core.ports import WeightsVersion
from asyncrl.weights.checksums import MODULUS, add, layer_group
from asyncrl.weights.transport import OwnChunk

if current_platform.is_cpu():
    vllm._custom_ops._supports_onednn = False

_PR_SET_PDEATHSIG = 1
_CONNECTING = threading.Lock()
"""Held while a thread joins the cluster. At a replica's start, two threads may try to join at the same time."""
WeightChunk = Mapping[str, NDArray[Any]]
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent process ends.

    A replica that is killed cannot end its engine, and an engine that is stopped, or still loading, does not notice.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not parent.is_alive():
        os._exit(1)


die_with_parent()


def _fetch(weights_version: WeightsVersion, source: tuple[str, str, str], limit_s: float) -> list[WeightChunk]:
    """Return the version's chunks, mapped from the object store without a copy, or read by the user's class. The calls
    to Ray end within `limit_s`, so that the threads of repeated attempts do not accumulate; the user's class has to end
    in time by itself."""
    address, namespace, store_name = source
    until = time.monotonic() + limit_s

    def left_s() -> float:
        return max(0.0, until - time.monotonic())

    connect(address, namespace, limit_s=left_s())
    store = ray.get_actor(store_name, namespace=namespace)
    refs = ray.get(store.tensors.remote(weights_version), timeout=left_s())
    return [ref.get() if isinstance(ref, OwnChunk) else ray.get(ref, timeout=left_s()) for ref in refs]


def _in_background(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run the function on a new daemon thread, while the engine decodes."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  raised again by `result`, in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return future


def connect(address: str, namespace: str, *, limit_s: float = -1) -> None:
    """Join the Ray cluster, unless this process is already part of it, as with vLLM's Ray executor.

    Raises:
        TimeoutError: another thread has been connecting for `limit_s`. A negative limit waits without end.
    """
    if not _CONNECTING.acquire(timeout=limit_s):
        raise TimeoutError(f"this worker did not join the Ray cluster at {address} within {limit_s:g} s")
    try:
        if not ray.is_initialized():
            with _random_from_system():
                ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    finally:
        _CONNECTING.release()


@contextmanager
def _random_from_system() -> Iterator[None]:
    """Seed `random` differently in each process, and restore its state at the end.

    vLLM seeds every engine alike, and Ray draws the id under which a process subscribes to messages from `random`. The
    engines of several replicas would share an id, and each poll of one would end that of another: this loop takes a
    third of a core in Ray's GCS.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


class WeightLoader:
    """A mixin of vLLM's worker. Every method is called through `collective_rpc` and blocks decoding while it runs."""

    model_runner: Any

    def connect_store(self, address: str, namespace: str, store_name: str) -> None:
        """Set the store that provides versions, and join its cluster in the background before the first update."""
        self._source = (address, namespace, store_name)
        _in_background(connect, address, namespace)

    def fetch_version(self, lineage: int, version: int, limit_s: float) -> None:
        """Begin to map this weights version into this process, with a deadline of `limit_s`. Return at once."""
        self._fetched_version = WeightsVersion(lineage, version)
        self._chunks = _in_background(_fetch, self._fetched_version, self._source, limit_s)

    def await_fetch(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the version to be mapped, and return whether it is.

        Raises:
            Exception: the error with which the fetch failed.
        """
        if not wait([self._chunks], timeout_s).done:
            return False
        self._chunks.result()
        return True

    def load_version(self, lineage: int, version: int) -> float:
        """Load the fetched version in place, during the pause. Return the duration in seconds.

        Raises:
            RuntimeError: the version was not fetched.
        """
        if self._fetched_version != (lineage, version) or not self.await_fetch(0.0):
            raise RuntimeError(
                f"asked to load {WeightsVersion(lineage, version)}, but {self._fetched_version} was fetched"
            )
        chunks: list[WeightChunk] = self._chunks.result()
        started = time.perf_counter()
        runner = self.model_runner
        with torch.no_grad(), _rearranged_anew(runner.model, runner.model_config):
            runner.model.load_weights((name, tensor) for chunk in chunks for name, tensor in _tensors(chunk))
        # Drop the views into the object store, or the store could never free the version.
        del self._chunks
        return time.perf_counter() - started

    def group_sizes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters by layer group."""
        sizes: dict[str, int] = {}
        for name, parameter in self.model_runner.model.named_parameters():
            group = layer_group(name)
            sizes[group] = sizes.get(group, 0) + parameter.nbytes
        return sizes

    def group_checksums(self, groups: Sequence[str]) -> dict[str, int]:
        """Return this rank's share of the groups' checksums; the shares of all ranks add up to the published ones.

        Replicated parameters are counted by one rank only.
        """
        sums: dict[str, int] = {}
        wanted = set(groups)
        for name, tensor in _counted(self.model_runner.model):
            if (group := layer_group(name)) in wanted:
                add(sums, group, _bit_sum(tensor))
        return sums


@contextmanager
def _rearranged_anew(model: torch.nn.Module, config: ModelConfig) -> Iterator[None]:
    """Within the context, `load_weights` also reaches the layers that vLLM has rearranged."""
    layers = [layer for layer in model.modules() if _is_rearranged(layer)]
    for layer in layers:
        initialize_layerwise_reload(layer)
        if isinstance(layer, RoutedExperts) and current_platform.is_cpu():
            # On CPU, vLLM packs experts only when it creates their kernel, so a new kernel is created. On GPU, the
            # kernel has to stay, because CUDA graphs refer to it.
            layer.quant_method.moe_kernel = None
    yield
    for layer in layers:
        finalize_layerwise_reload(layer, config)


def _is_rearranged(layer: torch.nn.Module) -> bool:
    """Return whether the engine computes with other tensors than those in the model's files: experts are packed for
    their kernel, latent attention derives matrices from its weights, and quantization rounds."""
    method = getattr(layer, "quant_method", None)
    plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return isinstance(layer, MLAAttention) or (isinstance(method, QuantizeMethodBase) and not plain)


def _tensors(chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the arrays as tensors that share their read-only memory. Arrays of uint16 contain bfloat16 values."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, array in chunk.items():
            tensor = torch.from_numpy(array)
            yield name, tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _bit_sum(tensor: torch.Tensor) -> int:
    return int(tensor.detach().reshape(-1).view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)) % MODULUS


def _counted(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, or parts of them, that this rank counts. Tied parameters appear once.

    Each rank counts its shard of a sharded layer. If there are fewer key and value heads than ranks, several ranks hold
    the same head, and the first of them counts it. Rank 0 counts everything unsharded, including the biases of
    row-parallel layers.
    """
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            derived = isinstance(module, MLAAttention)  # its matrices come from the weights of its `kv_b_proj`
            if derived or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if size == 1:
                yield name, parameter
            elif isinstance(module, QKVParallelLinear) and rank % module.num_kv_head_replicas:
                yield name, parameter[: module.num_heads * module.head_size]
            elif _sharded(module, name) or rank == 0:
                yield name, parameter


def _sharded(module: torch.nn.Module, name: str) -> bool:
    if isinstance(module, RowParallelLinear):
        return not name.endswith("bias")
    return isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)
