"""What TRL 1.16 and vLLM 0.32 need to train on CPU. Each part replaces something that exists for GPUs only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file

SERVER = "benchmarks.compare.vllm_server"


def use_plain_linear_layers() -> None:
    """Stop vLLM from packing float32 linear layers for oneDNN while it loads a model.

    A packed layer has an empty weight, so loading new weights into it, as TRL does after each step, fails.
    """
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def use_plain_float32() -> None:
    """Let the colocated engine compute in float32 and without compilation, for which TRL has no options.

    vLLM would choose bfloat16. Compiled, a step of the 0.9M model takes twice as long.
    """
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)


def use_plain_attention() -> None:
    """Replace FlashAttention 3, which the async trainer fetches for its packed rows, by torch's attention.

    A row's segments attend to their own path of keys, as `trl.experimental.async_grpo.packing.tree_attention` does.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        queries, keys, values = (
            part.transpose(0, 1).tensor_split(starts[1:-1].long().cpu(), dim=1)
            for part, starts in ((query, starts_q), (key, starts_k), (value, starts_k))
        )
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None],
                attn_mask=torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]),
                scale=softmax_scale, enable_gqa=True,
            )[0]
            for q, k, v in zip(queries, keys, values, strict=True)
        ]  # fmt: skip
        return torch.cat(parts, dim=1).transpose(0, 1)

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA for the name of the device
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


class FileTransfer:
    """Replaces the transfer of weights over NCCL: a file in shared memory, which the engine's worker loads in place."""

    def __init__(self, url: str) -> None:
        self._url = url
        handle, path = tempfile.mkstemp(".safetensors", dir="/dev/shm")
        os.close(handle)
        self._file = Path(path)

    def init_weight_transfer(self) -> None:
        until = time.monotonic() + 300
        while not _healthy(self._url):
            if time.monotonic() > until:
                raise TimeoutError(f"the vLLM server at {self._url} did not answer within 300 s")
            time.sleep(0.2)

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in iterator}, self._file)
        self._post("/collective_rpc", json={"method": "load_file", "args": [str(self._file)]})

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None:
        self._file.unlink(missing_ok=True)

    def _post(self, path: str, **body: Any) -> None:
        requests.post(f"{self._url}{path}", timeout=300, **body).raise_for_status()


class FileLoading:
    """An extension of vLLM's worker; importing this module in the worker keeps its linear layers plain."""

    model_runner: Any

    def load_file(self, path: str) -> None:
        self.model_runner.model.load_weights(load_file(path).items())


@contextmanager
def vllm_server(model: str, max_model_len: int, directory: Path) -> Iterator[str]:
    """Run vLLM's server for the duration of the block; yield its address before it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", SERVER, "--host", "127.0.0.1", "--port", str(port), "--model", model]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)]
    command += ["--worker-extension-cls", f"{SERVER}.FileLoading"]
    with (directory / "server.txt").open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False
