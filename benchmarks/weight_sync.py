"""Measure a weight update of a live engine, against a plain copy of the same bytes in memory.

In every round requests are in flight while `publish` puts the weights into the store and `apply` fetches, pauses
(`keep`), loads, resumes and verifies. Between rounds, with nothing in flight, numpy copies all tensors into existing
arrays on one thread. `applied_ms` counts from the start of publish; `ratio` is pause / copy. All are medians over
rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from asyncrl.config.schema import Config
from asyncrl.core.ports import GenerateRequest
from asyncrl.weights.object_store import ObjectStorePublisher, ServedRun, start_store
from benchmarks.agents.fleets import finished_turns
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, report
from benchmarks.running import local_ray, publish_tensors, serving

NAMESPACE = "bench-weight-sync"
IN_FLIGHT = 8
MAX_MODEL_LEN = 1024


def main() -> None:
    parser = arguments(__doc__, "weight_sync")
    parser.add_argument("--rounds", type=int, default=7, help="weight updates of each model (default 7)")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=list(SHAPES), help="default: all")
    options = parser.parse_args()
    rows = [measure(name, options.rounds) for name in options.models]
    report("weight sync", rows, options.json, aim="aim: pause at most 3 times the copy for 135M")


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Start an engine for the model, update its weights `rounds` times and return the table row."""
    with tempfile.TemporaryDirectory() as directory:
        path = make_llama(Path(directory) / name, SHAPES[name])
        with local_ray(NAMESPACE, object_store_memory=3 << 30):
            return anyio.run(_measure, name, path, rounds)


async def _measure(name: str, path: Path, rounds: int) -> dict[str, Any]:
    config = Config.model_validate({"model": {"path": str(path)}, "rollout": {"max_model_len": MAX_MODEL_LEN}})
    served = ServedRun.of(config, name="the benchmark", namespace=NAMESPACE)
    publisher = ObjectStorePublisher(start_store(NAMESPACE, served), call_s=60)
    weights = _weights(path)
    target = {key: np.empty_like(array) for key, array in weights.items()}
    copies, publishes, applies, pauses, loads = [], [], [], [], []
    started = time.perf_counter()
    async with serving(config, NAMESPACE) as fleet:
        start_s = time.perf_counter() - started
        for version in range(1, rounds + 1):
            copies.append(_copy(weights, target))
            async with anyio.create_task_group() as group:
                group.start_soon(finished_turns, fleet.generate(_requests(), session="s"))
                await anyio.sleep(0.3)
                started = time.perf_counter()
                publication = await publish_tensors(publisher, version, version, weights)
                publishes.append(time.perf_counter() - started)
                (applied,) = await fleet.apply(publication)
                applies.append(time.perf_counter() - started)
                pauses.append(applied.pause_s)
                loads.append(applied.load_s)
                group.cancel_scope.cancel()
    copy_s, pause_s = statistics.median(copies), statistics.median(pauses)
    return {
        "model": name,
        "MB": publication.num_bytes / 1e6,
        "start_s": start_s,
        "publish_ms": 1e3 * statistics.median(publishes),
        "applied_ms": 1e3 * statistics.median(applies),
        "pause_ms": 1e3 * pause_s,
        "load_ms": 1e3 * statistics.median(loads),
        "copy_ms": 1e3 * copy_s,
        "ratio": pause_s / copy_s,
    }


def _weights(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path / "model.safetensors")


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
