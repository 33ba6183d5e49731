"""Rank 0's side of versions by GPU broadcast (`weight_sync.backend: nccl`), on vLLM's trainer engine for NCCL.

    next_round ─▶ join_round ─▶ members changed? trainer_init ─▶ send_weights ─▶ next_round …
                                      │                               │
                                      ▼                               ▼
                             init_weight_transfer_engine    start_weight_update, update_weights (while rank 0
                             of all engines                 broadcasts), finish_weight_update of all engines

The version is the one in the weight store, so training continues meanwhile: a thread of its own copies it to the GPU
tensor by tensor and broadcasts it in packed buckets, on a CUDA stream of its own. Every call and broadcast, and forming
a group, has the deadline of its round. Then the communicator is aborted, which ends the kernels that wait in it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import ray
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from asyncrl.core.failures import FencedError, InfraError
from asyncrl.core.ports import WeightBucket, WeightsVersion
from asyncrl.core.tasks import in_background
from asyncrl.weights.broadcast import RANK_ZERO, BroadcastRound
from asyncrl.weights.tensors import as_tensors

logger = logging.getLogger(__name__)

NO_NCCL = "vLLM cannot load the NCCL library (VLLM_NCCL_SO_PATH, VLLM_DISABLE_PYNCCL)"

POLL_S = 30.0
"""Time for which rank 0 waits for a round before it asks again."""
ANSWER_S = 10.0
"""Time for which the store may exceed a deadline of its own."""
RETRY_S = 1.0


class BroadcastSender:
    """Sends versions to all engines at once, one after another."""

    def __init__(self, store: Any, *, lineage: int, bucket_bytes: int) -> None:
        self._store = store
        self._lineage = lineage
        self._bucket_bytes = bucket_bytes
        self._source = StoredWeights()
        self._client = EngineCalls(store)
        self._members: Mapping[str, int] = {}
        """The members of the process group; empty without one."""
        self._engine: Any = None

    def run(self) -> None:
        """Take part in rounds until this process ends. Blocking.

        Raises:
            FencedError: a newer Trainer takes over.
            Others: see `send`.
        """
        _use_gpu()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while True:
                    if (found := self._join_round()) is not None:
                        self.send(found)
        finally:
            self._leave_group()

    def send(self, found: BroadcastRound) -> None:
        """Broadcast the version of a round in which everyone is present. Blocking.

        Raises:
            InfraError: it was not sent to all engines within the round's deadline.
            Others: the errors of vLLM, NCCL and Ray.
        """
        self._client.found = found
        until = time.monotonic() + found.limit_s
        try:
            if found.members != self._members:
                self._form_group(found)
            with deadline(until - time.monotonic(), self._leave_group) as is_late:
                self._engine.send_weights()
        finally:
            self._source.chunks = ()
        if is_late.is_set():
            raise InfraError(f"version {found.weights_version.version} was not sent within {found.limit_s:g} s")

    def _join_round(self) -> BroadcastRound | None:
        """Join the next round once its tensors are here. None: there was no round, or it failed before it began."""
        try:
            found: BroadcastRound | None
            found = _answer(self._store.next_round.remote(self._lineage, POLL_S), POLL_S + ANSWER_S)
            if found is not None:
                version, limit_s = found.weights_version, found.limit_s
                refs = _answer(self._store.tensors.remote(version), ANSWER_S)
                self._source.chunks = _answer(refs, limit_s)
                _answer(self._store.join_round.remote(version, RANK_ZERO), limit_s + ANSWER_S)
        except FencedError:
            raise
        except (InfraError, ray.exceptions.RayError) as error:  # also if the store restarts, or the run has ended
            logger.info("no version is broadcast now: %s", error)
            self._source.chunks = ()
            time.sleep(RETRY_S)
            return None
        return found

    def _form_group(self, found: BroadcastRound) -> None:
        """Form the process group of rank 0 and all workers of the members anew.

        Raises:
            InfraError: it was not complete within the round's deadline, or vLLM cannot use NCCL here.
            Others: the errors of vLLM, NCCL and Ray.
        """
        self._leave_group()
        init_info = NCCLTrainerInitInfo(
            master_address=ray.util.get_node_ip_address(),
            master_port=get_open_port(),
            world_size=sum(found.members.values()),
            packed=True,
            packed_buffer_size_bytes=self._bucket_bytes,
            rank=0,
        )

        def form() -> Any:
            _use_gpu()
            return WeightTransferTrainerFactory.trainer_init(init_info, client=self._client, source=self._source)

        # On a thread, because neither vLLM nor NCCL has this deadline. Late, it joins a group of no further use.
        formed = in_background(form)
        if not wait([formed], found.limit_s).done:
            raise InfraError(f"the process group for broadcasts was not complete within {found.limit_s:g} s")
        self._engine = formed.result()
        if self._engine.model_update_group.disabled:  # its broadcasts would do nothing
            raise InfraError(NO_NCCL)
        self._members = found.members

    def _leave_group(self) -> None:
        """Leave the process group. Broadcasts that wait in it return."""
        self._members = {}
        if self._engine is not None:
            self._engine.shutdown()


class StoredWeights(WeightSource):
    """The tensors of a version, which are copied to the GPU one after another."""

    chunks: Sequence[WeightBucket] = ()

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each tensor, in the order of iteration."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors():
            yield name, tensor.to(torch.accelerator.current_accelerator() or "cpu")

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.chunks:
            yield from as_tensors(chunk)


class EngineCalls:
    """vLLM's `VLLMWeightSyncClient`: its calls go to all engines through the weight store, and return once all have
    made them. They raise InfraError if the round has failed."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.found = BroadcastRound(WeightsVersion(-1, -1), {}, 0.0)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Wait until the engines have finished. Each replica does so by itself and sets the version's number."""
        self._call("finish_weight_update", {})

    def _call(self, method: str, info: Mapping[str, Any]) -> None:
        call = self._store.call_engines.remote(self.found.weights_version, method, info)
        _answer(call, self.found.limit_s + ANSWER_S)


def _use_gpu() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # threads begin with the first GPU


@contextmanager
def deadline(limit_s: float, abort: Callable[[], None]) -> Iterator[threading.Event]:
    """Call `abort` on another thread if the block takes longer. Yield an event that is set then.

    The block ends after `abort` has, so that two threads never leave a process group at the same time.
    """
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        abort()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()


def _answer(ref: Any, timeout_s: float) -> Any:
    """Return the store's answer. Raises its own errors without Ray's traceback around them."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InfraError) else error) from None
