"""vLLM's worker processes: the weight transfer from the run's weight store, and checksums of the served weights.

    fetch (while decoding) ▸ start_weight_update ▸ update_weights ▸ finish_weight_update ▸ checksums (while decoding)

The transfer is an engine of vLLM's `WeightTransferEngineFactory`. On GPU, it loads all layers with vLLM's layer-wise
reload. On CPU, most layers compute with the tensors that `load_weights` fills, and are loaded in place. Only layers
that vLLM rearranges after it has loaded them (`_is_rearranged`) take part in the reload there: create the tensors of
the model's files again, fill them, rearrange them, and copy the result to where the engine reads it.

vLLM imports this module for its `worker_extension_cls`, before it loads the model. On CPU, the module switches oneDNN
off, and the kernels for small layers of 16 bits on CPUs with AMX. Otherwise vLLM would prepack linear layers for them
and empty their weights, and an update in place would fail or, through a reload, leave stale layers and report success.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from numpy.typing import NDArray
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, row_parallel_weight_loader
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.model_executor.parameter import BasevLLMParameter
from vllm.platforms import current_platform

from asyncrl.core.ports import WeightsVersion
from asyncrl.core.tasks import in_background
from asyncrl.weights.checksums import MODULUS, WeightChecksums, add, layer_group
from asyncrl.weights.deltas import DeltaChunk
from asyncrl.weights.nccl import NO_NCCL, deadline
from asyncrl.weights.tensors import as_tensors
from asyncrl.weights.transport import StoredChunk
from rollouter.serving.options import WEIGHT_TRANSFER
from rollouter.serving.replica.adapters import held_tensors

if current_platform.is_cpu():
    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = 0
    # vLLM's override (0.32) only calls torch's own function, which costs Python in each operator on a parameter: 7 % of
    # the time of decoding with a model of 1M parameters. Without it, parameters load and compute as before.
    del BasevLLMParameter.__torch_function__

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SINKS = (".sinks", ".sink", ".attention_sink_bias")
"""Ends of names of attention sinks. Each rank has those of its heads."""
_COPIED_SINKS = ("gpt_oss", "mimo_v2_flash")
"""Models whose loaders in vLLM copy attention sinks past their weight loaders."""
_PER_RANK = {"get_tensor_model_parallel_rank", "sharded_weight_loader"}
"""Functions that only those weight loaders of vLLM call which load a rank's part."""
_CONNECTING = threading.Lock()
"""Held while a thread joins the cluster. At a replica's start, two threads may try to join at the same time."""
WeightChunk = Mapping[str, NDArray[Any]]


@dataclass
class StoreAddress(WeightTransferInitInfo):
    """The Ray cluster, and the namespace and name of the run's weight store."""

    address: str
    namespace: str
    store_name: str


@dataclass
class FetchedVersion(WeightTransferUpdateInfo):
    """The weights version to load, which `fetch` has mapped before."""

    lineage: int
    version: int


@dataclass
class BroadcastInfo(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """What vLLM's engine for NCCL needs to join a process group, or to receive a version in it."""

    broadcast: dict[str, Any]
    limit_s: float
    """Deadline, in seconds from now."""


class StoreTransfer(WeightTransferEngine[StoreAddress, FetchedVersion]):
    """Loads versions of the run's weight store into one of vLLM's workers. Every method blocks decoding.

    The bytes come from the store, or by broadcast from rank 0 of the Trainer, which vLLM's engine for NCCL receives. If
    a broadcast fails, the same update loads the version from the store.
    """

    init_info_cls = StoreAddress
    update_info_cls = FetchedVersion

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._nccl = NCCLWeightTransferEngine(config, vllm_config, device, self)
        self._is_partly_loaded = False
        """Whether a broadcast of this update may have filled some layers."""
        self.failure = ""
        """Why the last broadcast failed; empty if it did not."""
        self.loaded_checksums: Mapping[str, int] = {}
        """Checksums of the loaded version by layer group, before the engine rounded it; empty if this worker did not
        count them."""
        self._kept: list[WeightChunk] = []
        """The chunks of the loaded version whose files stay on this node, because the next version may have changes to
        them."""

    @property
    def quantizes(self) -> bool:
        """Whether the engine rounds weights as it loads them, so that its parameters have other checksums than the
        version."""
        return isinstance(self.vllm_config.quant_config, OnlineQuantizationConfig)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Return the store's address, or how to join a process group for broadcasts."""
        return BroadcastInfo(**init_dict) if "broadcast" in init_dict else super().parse_init_info(init_dict)

    def init_transfer_engine(self, init_info: StoreAddress | BroadcastInfo) -> None:
        """Set the store that provides versions, and join its cluster in the background before the first update. Or join
        a process group for broadcasts, in place of the earlier one.

        Raises:
            TimeoutError: the other processes did not join within the deadline.
            RuntimeError: vLLM cannot use NCCL here.
        """
        if isinstance(init_info, BroadcastInfo):
            self._join(init_info)
            return
        self._store = init_info
        in_background(connect, init_info.address, init_info.namespace)

    def fetch(self, weights_version: WeightsVersion, limit_s: float, compares: bool) -> None:
        """Begin to map this version into this process, with a deadline of `limit_s`. Return at once. `compares`:
        whether its checksums will be compared."""
        self._version = weights_version
        counts = compares and self.quantizes and get_tensor_model_parallel_rank() == 0 and get_pp_group().is_first_rank
        self._chunks = in_background(_fetch, weights_version, self._store, limit_s, counts)

    def await_fetch(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the version to be mapped, and return whether it is.

        Raises:
            Exception: the error with which the fetch failed.
        """
        if not wait([self._chunks], timeout_s).done:
            return False
        self._chunks.result()
        return True

    def start_weight_update(self) -> None:
        """Prepare the layers whose tensors are not those of the model's files."""
        self.failure, self._is_partly_loaded = "", False
        with torch.no_grad():
            if current_platform.is_cpu():
                for layer in self._rearranged():
                    initialize_layerwise_reload(layer)
                    if isinstance(layer, RoutedExperts):
                        # vLLM packs experts only when it creates their kernel, so a new kernel is created.
                        layer.quant_method.moe_kernel = None
            else:
                for parameter in self.model.parameters():
                    # vLLM's reload (0.32) reads the names of weight loaders, and those of MiniMax-M2 have none.
                    if isinstance(load := getattr(parameter, "weight_loader", None), partial):
                        vars(load).setdefault("__name__", "weight_loader")
                initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the fetched version, or receive it by broadcast, which does not raise: `failure` says why it failed.
        Without the `torch.accelerator.synchronize` of vLLM's method where there is none.

        Raises:
            RuntimeError: the version was not fetched.
        """
        if "broadcast" in update_info:
            self._is_partly_loaded = True
            self.failure = self._receive_broadcast(BroadcastInfo(**update_info))
            return
        if self._is_partly_loaded:
            # vLLM counts what each layer has received, and rearranges those that are complete, so all layers begin
            # anew. Also in a worker whose own broadcast succeeded: another one's failed.
            self.finish_weight_update()
            self.start_weight_update()
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FetchedVersion) -> None:
        """See `update_weights`."""
        wanted = WeightsVersion(update_info.lineage, update_info.version)
        if self._version != wanted or not self.await_fetch(0.0):
            raise RuntimeError(f"asked to load {wanted}, but {self._version} was fetched")
        fetched = self._chunks.result()
        with torch.no_grad():
            self.load_weights(item for _, chunk in fetched.chunks for item in as_tensors(chunk))
        self.loaded_checksums = fetched.checksums
        self._kept = [chunk for handle, chunk in fetched.chunks if isinstance(handle, DeltaChunk)]
        # Drop the views into the object store, or the store could never free the version.
        del self._chunks, fetched

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by the names of the model's files. vLLM's engine for NCCL calls this in place of the model's."""
        kind = self.model_config.hf_config.model_type
        if kind in _COPIED_SINKS:
            tensors = self._without_sinks(tensors)
        self.model.load_weights(_by_expert(tensors) if kind == "gpt_oss" else tensors)

    def finish_weight_update(self) -> None:
        """Rearrange the layers that vLLM has to rearrange."""
        with torch.no_grad():
            if current_platform.is_cpu():
                for layer in self._rearranged():
                    finalize_layerwise_reload(layer, self.model_config)
            else:
                finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the process group for broadcasts. Ray ends with the process."""
        self._nccl.shutdown()

    def _join(self, info: BroadcastInfo) -> None:
        self._nccl.shutdown()
        nccl = NCCLWeightTransferEngine(self.config, self.vllm_config, self.device, self)

        def join() -> None:
            if self.device.index is not None:
                torch.accelerator.set_device_index(self.device.index)  # threads begin with the first GPU
            nccl.init_transfer_engine(nccl.parse_init_info(info.broadcast))

        # On a thread, because neither vLLM nor NCCL has a deadline for it. Late, it joins an engine of no further use.
        joined = in_background(join)
        if not wait([joined], info.limit_s).done:
            raise TimeoutError(f"the process group for broadcasts was not complete within {info.limit_s:.0f} s")
        joined.result()
        group = nccl.model_update_group
        if group is None or group.disabled:  # its broadcasts would do nothing
            raise RuntimeError(NO_NCCL)
        self._nccl = nccl

    def _receive_broadcast(self, info: BroadcastInfo) -> str:
        """Return why it failed, or an empty string."""
        try:
            # At the deadline, leaving the group ends the kernels that wait in it, as if they had received something.
            with deadline(info.limit_s, self._nccl.shutdown) as is_late, torch.no_grad():
                self._nccl.update_weights(info.broadcast)
        except Exception as error:  # noqa: BLE001  returned, so that all workers of an engine end the call alike
            return f"{type(error).__name__}: {error}"
        return f"it was not received within {info.limit_s:.0f} s" if is_late.is_set() else ""

    def _without_sinks(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Load this rank's part of the attention sinks, and yield the other tensors.

        vLLM copies sinks into the parameters without their weight loaders, so that the layer-wise reload does not
        notice them and keeps the old ones.
        """
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        for name, tensor in tensors:
            if not name.endswith(_SINKS):
                yield name, tensor
                continue
            own_name = name if mapper is None else mapper.map_name(name)
            if is_pp_missing_parameter(own_name, self.model):  # another stage has this layer
                continue
            parameter = self.model.get_parameter(own_name)
            heads = len(parameter)
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))

    def _rearranged(self) -> list[torch.nn.Module]:
        return [layer for layer in self.model.modules() if _is_rearranged(layer)]


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, StoreTransfer)


class WorkerExtension:
    """A mixin of vLLM's worker. Every method is called through `collective_rpc` and blocks decoding while it runs."""

    model_runner: Any
    weight_transfer_engine: StoreTransfer

    def fetch_version(self, lineage: int, version: int, limit_s: float, compares: bool) -> None:
        """See `StoreTransfer.fetch`."""
        self.weight_transfer_engine.fetch(WeightsVersion(lineage, version), limit_s, compares)

    def await_fetch(self, timeout_s: float) -> bool:
        """See `StoreTransfer.await_fetch`."""
        return self.weight_transfer_engine.await_fetch(timeout_s)

    def broadcast_failure(self) -> str:
        """See `StoreTransfer.failure`."""
        return self.weight_transfer_engine.failure

    def group_sizes(self) -> dict[str, int]:
        """Return the bytes of this rank's parameters by layer group."""
        sizes: dict[str, int] = {}
        for name, parameter in self.model_runner.model.named_parameters():
            group = layer_group(name)
            sizes[group] = sizes.get(group, 0) + parameter.nbytes
        return sizes

    def group_checksums(self, groups: Sequence[str]) -> dict[str, int]:
        """Return this rank's share of the groups' checksums; the shares of all ranks add up to the published ones.

        Replicated parameters are counted by one rank only. An engine that rounds its weights returns the checksums of
        the loaded version before that, which the first rank has counted.

        vLLM keeps some parameters in float32 whatever the engine's dtype. What was published has that dtype
        (`rollout.dtype`), so casting them back to it is exact.
        """
        sums: dict[str, int] = {}
        published = self.model_runner.model_config.dtype
        wanted = set(groups)
        if self.weight_transfer_engine.quantizes:
            loaded = self.weight_transfer_engine.loaded_checksums
            return {group: value for group, value in loaded.items() if group in wanted}
        for name, tensor in _counted(self.model_runner.model):
            if (group := layer_group(name)) in wanted:
                add(sums, group, _bit_sum(tensor.to(published) if tensor.is_floating_point() else tensor))
        return sums

    def adapter_checksums(self) -> dict[str, int]:
        """Return this rank's share of the checksums of the LoRA adapter, like `group_checksums`."""
        sums: dict[str, int] = {}
        for name, tensor in held_tensors(self.model_runner.model, get_tensor_model_parallel_rank()):
            add(sums, layer_group(name), _bit_sum(tensor))
        return sums


class FetchedChunks(NamedTuple):
    """A version in this process."""

    chunks: Sequence[tuple[Any, WeightChunk]]
    """Each with its handle."""
    checksums: Mapping[str, int]
    """By layer group; empty if they were not counted."""


def _fetch(weights_version: WeightsVersion, store: StoreAddress, limit_s: float, counts: bool) -> FetchedChunks:
    """Return the version's chunks, mapped from the object store or from files without a copy, or read by the user's
    class. The calls to Ray end within `limit_s`, so that the threads of repeated attempts do not accumulate; the user's
    class and a filesystem have to end in time by themselves. `counts`: also compute their checksums."""
    until = time.monotonic() + limit_s

    def left_s() -> float:
        return max(0.0, until - time.monotonic())

    connect(store.address, store.namespace, limit_s=left_s())
    actor = ray.get_actor(store.store_name, namespace=store.namespace)
    refs = ray.get(actor.tensors.remote(weights_version), timeout=left_s())
    chunks = [(ref, ref.get() if isinstance(ref, StoredChunk) else ray.get(ref, timeout=left_s())) for ref in refs]
    checksums = WeightChecksums()
    for _, chunk in chunks if counts else ():
        checksums.add(chunk)
    return FetchedChunks(chunks, checksums.by_group())


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


def _is_rearranged(layer: torch.nn.Module) -> bool:
    """Return whether the engine computes with other tensors than those in the model's files: experts are packed for
    their kernel, latent attention derives matrices from its weights, and quantization rounds."""
    method = getattr(layer, "quant_method", None)
    plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    return isinstance(layer, MLAAttention) or (isinstance(method, QuantizeMethodBase) and not plain)


def _by_expert(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of GPT-OSS, with one tensor for each expert in place of one for all experts of a layer.

    vLLM copies the latter into the parameters without their weight loaders, so that the layer-wise reload does not
    notice them and keeps the old experts.
    """
    for name, tensor in tensors:
        prefix, stacked, parameter = name.partition(".mlp.experts.")
        if not stacked:
            yield name, tensor
            continue
        for expert, part in enumerate(tensor):
            yield f"{prefix}.mlp.experts.{expert}.{parameter}", part


def _bit_sum(tensor: torch.Tensor) -> int:
    return int(tensor.detach().reshape(-1).view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)) % MODULUS


def _counted(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, or parts of them, that this rank counts. Tied parameters appear once.

    Each rank counts its shard of a sharded layer. If there are fewer key and value heads than ranks, several ranks hold
    the same head, and the first of them counts it. Rank 0 counts everything unsharded, including the biases of
    row-parallel layers. Each pipeline stage counts its own layers. If the last one has a copy of the input embedding
    for tied weights, only the first one counts it.
    """
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=prefix, recurse=False):
            derived = isinstance(module, MLAAttention)  # its matrices come from the weights of its `kv_b_proj`
            if derived or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_input = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
            if is_input and not get_pp_group().is_first_rank:
                continue
            if size == 1:
                yield name, parameter
            elif isinstance(module, QKVParallelLinear) and rank % module.num_kv_head_replicas:
                yield name, parameter[: module.num_heads * module.head_size]
            elif _sharded(module, name, parameter) or rank == 0:
                yield name, parameter


def _sharded(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> bool:
    if isinstance(module, RowParallelLinear):
        return not name.endswith("bias")
    # Ranks have parts of every expert, or with expert parallelism other experts.
    parallel = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding | RoutedExperts)
    return parallel or name.endswith(_SINKS) or _loads_part(parameter)


def _loads_part(parameter: torch.Tensor) -> bool:
    """Return whether the weight loader that the model has given to the parameter loads this rank's part of a tensor,
    which no earlier rank has. With fewer key heads than ranks, several have the same part of MiniMax-M2's norm of
    keys."""
    load = getattr(parameter, "weight_loader", default_weight_loader)
    if load is row_parallel_weight_loader:  # it loads vectors as a whole
        return parameter.dim() > 1
    code = getattr(getattr(load, "func", load), "__code__", None)  # `func`: of a partial
    size = get_tensor_model_parallel_world_size()
    num_copies = size // getattr(load, "keywords", {}).get("shard_world_size", size)
    is_part = code is not None and not _PER_RANK.isdisjoint(code.co_names)
    return is_part and get_tensor_model_parallel_rank() % num_copies == 0
