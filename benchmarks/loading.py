"""Measure the host memory that two ranks of `fsdp2` need to load a model, against ranks that load it whole first.

    whole          each rank loads the whole model in float32, and then drops the parts of the others
    shards         each rank reads its parts of the weights (trainer.engines.sharded_loading)
    shards, probe  the same, and then the test whether the model takes packed rows, which gathers layer after layer

Both ranks are processes of this machine, on CPU, where gathered layers are in host memory, too. `anon_mb` is the peak
of a rank's own memory (`RssAnon`, sampled), and `rss_mb` that of all its resident memory (`VmHWM`, by the kernel),
which includes pages of mapped files that the kernel can drop. Both are what is added from the moment before the engine
is created until it is ready. `shard_mb` is the size of the rank's parameters in float32, `largest_mb` that of the
largest tensor.

    python -m benchmarks.loading --json loading.json    # the shape of SmolLM2-135M, in bfloat16 and float32
    python -m benchmarks.loading --models 1M
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, report
from benchmarks.running import resident_bytes, sampled_peak
from trainer.engines.base import EngineSpec
from trainer.engines.compute.optim import local_part
from trainer.engines.models import load_model
from trainer.engines.sharded import Fsdp2Engine

RANKS = 2
WAYS = ("whole", "shards", "shards, probe")
JOIN_S = 300
MB = 1e6


class _WholeFirst(Fsdp2Engine):
    """Loads the whole model on every rank."""

    def _load(self) -> PreTrainedModel:
        return load_model(**self._source)


def main() -> None:
    parser = arguments(__doc__, "loading")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["135M"], help="default: 135M")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for model in options.models:
            plain = make_llama(Path(directory) / f"{model}_float32", SHAPES[model])
            half = Path(directory) / f"{model}_bfloat16"
            AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).save_pretrained(half)
            for path in (half, plain):
                for way in WAYS:
                    name = path.name.partition("_")[2]
                    rows.append({"model": model, "files": name, "way": way, **_measure(path, way)})
    report("loading", rows, options.json, aim="aim: shards: anon_mb at most shard_mb + largest_mb")


def _measure(path: Path, way: str) -> dict[str, Any]:
    """Return the figures of the rank that needs more memory."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_run_rank, (path, way, Path(directory)), nprocs=RANKS, start_method="spawn")
        found = [json.loads((Path(directory) / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    return max(found, key=lambda figures: figures["anon_mb"])


def _run_rank(rank: int, path: Path, way: str, directory: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=JOIN_S),
    )
    settings = EngineConfig(
        device="cpu", num_workers=RANKS, strategy="fsdp2", use_remove_padding=way == "shards, probe"
    )
    spec = EngineSpec("language_model", ModelConfig(path=str(path)), settings)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    anon_before, before = resident_bytes("RssAnon"), resident_bytes("VmRSS")
    started = time.perf_counter()
    with sampled_peak() as peaks:
        engine = (_WholeFirst if way == "whole" else Fsdp2Engine)(spec)
    seconds, peak = time.perf_counter() - started, resident_bytes("VmHWM")
    parameters = list(engine.model.parameters())
    figures = {
        "anon_mb": (max(peaks) - anon_before) / MB,
        "rss_mb": (peak - before) / MB,
        "shard_mb": sum(local_part(one).nbytes for one in parameters) / MB,
        "largest_mb": max(one.numel() * one.element_size() for one in parameters) / MB,
        "seconds": seconds,
    }
    (directory / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
