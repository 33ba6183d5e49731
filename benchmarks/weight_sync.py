"""Measure a weight update of a live engine, against a plain copy of the same bytes in memory.

In every round requests are in flight while `publish` puts the weights into the store and `apply` fetches, pauses
(`keep`), loads, resumes and verifies. Between rounds, with nothing in flight, numpy copies all tensors into existing
arrays on one thread. `applied_ms` counts from the start of publish; `ratio` is pause / copy. All are medians over
rounds. `replica_mb` and `engine_mb` are the peaks of the own memory (`RssAnon`, sampled) of the replica's process and
of vLLM's engine core above what they had before, in an update ahead of the rounds without requests in flight; memory
that the C library has kept is used first and does not count. With a GPU, `device_copy_ms` is a copy of as many bytes
from pinned memory to the GPU (`cudaMemcpy`), and the engine of a Qwen-like model (0.5B, 1.5B) runs in bfloat16 with
CUDA graphs. `nccl` needs two GPUs: this process broadcasts from the last one, as rank 0 of the Trainer does.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import numpy as np
import psutil

from asyncrl.config.environment import visible_gpus
from asyncrl.config.schema import Config
from asyncrl.core.ports import GenerateRequest
from asyncrl.weights.object_store import ObjectStorePublisher, ServedRun, start_store
from benchmarks.agents.fleets import finished_turns
from benchmarks.chaos.launches import command_line
from benchmarks.models import QWEN_SHAPES, SHAPES, make_llama, make_qwen
from benchmarks.report import arguments, report
from benchmarks.running import local_ray, publish_tensors, sampled_peak, serving

if TYPE_CHECKING:
    from rollouter.serving.fleet import ServeFleet

NAMESPACE = "bench-weight-sync"
IN_FLIGHT = 8
MAX_MODEL_LEN = 1024
Backend = Literal["object_store", "disk", "nccl"]
TITLES = {"replica": "ray::ServeReplica", "engine": "EngineCore"}
"""The processes whose memory is sampled, by a part of their command line."""


def main() -> None:
    parser = arguments(__doc__, "weight_sync")
    parser.add_argument("--rounds", type=int, default=7, help="weight updates of each model (default 7)")
    models = sorted([*SHAPES, *QWEN_SHAPES])
    parser.add_argument("--models", nargs="+", choices=models, default=list(SHAPES), help="default: 1M 135M")
    backends = ("object_store", "disk", "nccl")
    parser.add_argument("--backend", choices=backends, default="object_store", help="default: object_store")
    options = parser.parse_args()
    rows = [measure(name, options.rounds, options.backend) for name in options.models]
    report("weight sync", rows, options.json, aim="aim: pause at most 3 times the copy for 135M")


def measure(name: str, rounds: int, backend: Backend = "object_store") -> dict[str, Any]:
    """Start an engine for the model, update its weights `rounds` times and return the table row."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        keys: dict[str, Any] = {"model": {"path": str(path)}, "rollout": {"max_model_len": MAX_MODEL_LEN}}
        if name in QWEN_SHAPES:
            make_qwen(path, QWEN_SHAPES[name])
            keys["rollout"] |= {"dtype": "bfloat16", "enforce_eager": False}
        else:
            make_llama(path, SHAPES[name])
        keys["weight_sync"] = {"backend": backend} | ({"dir": f"{directory}/weights"} if backend == "disk" else {})
        # The store keeps four versions.
        room = max(3 << 30, 5 * (path / "model.safetensors").stat().st_size)
        with local_ray(NAMESPACE, object_store_memory=room):
            return anyio.run(_measure, name, Config.model_validate(keys), rounds)


async def _measure(name: str, config: Config, rounds: int) -> dict[str, Any]:
    served = ServedRun.of(config, name="the benchmark", namespace=NAMESPACE)
    store, sync = start_store(NAMESPACE, served), config.weight_sync
    if sync.backend == "nccl":
        os.environ["LOCAL_RANK"] = str(visible_gpus() - 1)  # the engine gets the first GPU
    publisher = ObjectStorePublisher(store, call_s=60, backend=sync.backend, directory=sync.dir or "")
    path = Path(config.model.path)
    weights = _weights(path)
    target = {key: np.empty_like(array) for key, array in weights.items()}
    device_copy_s = _device_copy_s(sum(array.nbytes for array in weights.values()))
    copies, publishes, applies, pauses, loads = [], [], [], [], []
    started = time.perf_counter()
    async with serving(config, NAMESPACE) as fleet:
        start_s = time.perf_counter() - started
        added_mb = await _added_mb(publisher, fleet, weights)
        for version in range(2, rounds + 2):
            copies.append(_copy(weights, target))
            async with anyio.create_task_group() as group:
                group.start_soon(finished_turns, fleet.generate(_requests(), session="s"))
                await anyio.sleep(0.3)
                started = time.perf_counter()
                publication = await publish_tensors(publisher, version, version, weights)
                publishes.append(time.perf_counter() - started)
                (applied,) = await fleet.apply(publication)
                if applied.fallback:
                    raise RuntimeError(f"version {version} was not broadcast: {applied.fallback}")
                applies.append(time.perf_counter() - started)
                pauses.append(applied.pause_s)
                loads.append(applied.load_s)
                group.cancel_scope.cancel()
        if sync.backend == "nccl":
            await store.next_round.remote(1, 0.0)  # a Trainer of a newer lineage ends the broadcasts of this process
    copy_s, pause_s = statistics.median(copies), statistics.median(pauses)
    return {
        "model": name,
        "backend": sync.backend,
        "MB": publication.num_bytes / 1e6,
        "start_s": start_s,
        "publish_ms": 1e3 * statistics.median(publishes),
        "applied_ms": 1e3 * statistics.median(applies),
        "pause_ms": 1e3 * pause_s,
        "load_ms": 1e3 * statistics.median(loads),
        "copy_ms": 1e3 * copy_s,
        "ratio": pause_s / copy_s,
        "device_copy_ms": None if device_copy_s is None else 1e3 * device_copy_s,
        **{f"{name}_mb": mb for name, mb in added_mb.items()},
    }


async def _added_mb(
    publisher: ObjectStorePublisher, fleet: ServeFleet, weights: dict[str, np.ndarray]
) -> dict[str, float]:
    """Update the weights to version 1, and return the own memory that the processes of the engine need for it."""
    with ExitStack() as stack:
        samples = {name: stack.enter_context(sampled_peak(pid)) for name, pid in find_processes().items()}
        await fleet.apply(await publish_tensors(publisher, 1, 1, weights))
    return {name: (max(own) - own[0]) / 1e6 for name, own in samples.items()}


def find_processes() -> dict[str, int]:
    """Return the pids of the replica and its engine core, among the processes that this one has started."""
    commands = [(process.pid, command_line(process)) for process in psutil.Process().children(recursive=True)]
    found = {name: [pid for pid, command in commands if title in command] for name, title in TITLES.items()}
    if any(len(pids) != 1 for pids in found.values()):
        raise RuntimeError(f"there is not one process of each kind, but {found}")
    return {name: pid for name, (pid,) in found.items()}


def _weights(path: Path) -> dict[str, np.ndarray]:
    """Return the weights as the Trainer publishes them, bfloat16 as uint16."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors").items()
    return {key: (one.view(torch.uint16) if one.dtype == torch.bfloat16 else one).numpy() for key, one in tensors}


def _device_copy_s(num_bytes: int) -> float | None:
    """Return the median duration of copies from pinned memory to the GPU; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    del target
    torch.cuda.empty_cache()
    return statistics.median(times)


def _copy(source: dict[str, np.ndarray], target: dict[str, np.ndarray]) -> float:
    started = time.perf_counter()
    for key, array in source.items():
        np.copyto(target[key], array)
    return time.perf_counter() - started


def _requests() -> list[GenerateRequest]:
    prompt = np.arange(5, 25, dtype=np.int32)
    sampling = {"temperature": 1.0, "max_tokens": 1000, "ignore_eos": True}
    return [GenerateRequest(f"r{index}", prompt, sampling) for index in range(IN_FLIGHT)]


if __name__ == "__main__":
    main()
