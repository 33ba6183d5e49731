"""Measure the host memory that two ranks of `fsdp2` need to publish a version, by the size of its buckets.

Both ranks are processes of this machine, on CPU. Every rank takes part in gathering each tensor, and rank 0 sends them:
as files (`weight_sync.backend=disk`), because those are written by the process itself and are not part of its memory.
`buckets` is `weight_sync.bucket_bytes`, and `whole` is one bucket for the whole model. `rank0_mb` and `rank1_mb` are
the peaks of a rank's own memory (`RssAnon`, sampled) above what it had before it published. `aim_mb` is the size of two
buckets and the largest tensor, which is gathered in float32; gloo gathers it into a second copy, on every rank. After
each publication the files are compared with its checksums. Memory that the C library keeps after it was freed counts,
too; with MALLOC_MMAP_THRESHOLD_=65536 it keeps none of a tensor.

    python -m benchmarks.publishing --json publishing.json    # the shape of SmolLM2-135M
    python -m benchmarks.publishing --models 1M
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncrl.config.sections.base import Dtype
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig
from asyncrl.core.ports import Publication
from asyncrl.weights.checksums import WeightChecksums
from asyncrl.weights.disk import DiskChunk
from asyncrl.weights.object_store import ObjectStorePublisher
from benchmarks.loading import JOIN_S, MB, RANKS
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, report
from benchmarks.running import resident_bytes, sampled_peak
from trainer.engines.base import EngineSpec
from trainer.workers.rank import Rank

WHOLE = 1 << 40
BUCKETS = {"whole": WHOLE, "256 MiB": 256 << 20, "64 MiB": 64 << 20, "16 MiB": 16 << 20}
FLOAT32_BYTES = 4
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


class VersionFiles:
    """Stands for the handle of the weight store, and keeps the chunks of the last version."""

    def __init__(self) -> None:
        self.chunks: list[DiskChunk] = []
        self.publish = SimpleNamespace(remote=self._publish)

    async def _publish(self, publication: Any, chunks: list[DiskChunk], again: bool) -> None:
        self.chunks = list(chunks)


def main() -> None:
    parser = arguments(__doc__, "publishing")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["135M"], help="default: 135M")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for model in options.models:
            path = make_llama(Path(directory) / model, SHAPES[model])
            rows += [{"model": model, **row} for row in measure(path, BUCKETS)]
    report("publishing", rows, options.json, aim="aim: rank0_mb and rank1_mb at most aim_mb")


def measure(model: Path, buckets: Mapping[str, int]) -> list[dict[str, Any]]:
    """Publish a version in each dtype with buckets of each of these sizes, and return the figures."""
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(_run_rank, (model, dict(buckets), Path(directory)), nprocs=RANKS, start_method="spawn")
        first, second = (json.loads((Path(directory) / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS))
    return [
        {
            "dtype": row["dtype"],
            "buckets": row["buckets"],
            "model_mb": row["model_mb"],
            "rank0_mb": row["anon_mb"],
            "rank1_mb": other["anon_mb"],
            "aim_mb": row["aim_mb"],
            "chunks": row["chunks"],
            "seconds": row["seconds"],
        }
        for row, other in zip(first, second, strict=True)
    ]


def _run_rank(rank: int, model: Path, buckets: dict[str, int], directory: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=JOIN_S),
    )
    rows = anyio.run(_publish_all, model, buckets, directory / "weights")
    (directory / f"{rank}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


async def _publish_all(model: Path, buckets: dict[str, int], directory: Path) -> list[dict[str, Any]]:
    """Return the figures of this rank for each dtype and each size of buckets."""
    files: Any = VersionFiles()
    publisher = ObjectStorePublisher(files, call_s=JOIN_S, backend="disk", directory=str(directory))
    settings = EngineConfig(device="cpu", num_workers=RANKS, strategy="fsdp2", use_remove_padding=False)
    rank = Rank(publisher)
    loaded = await rank.load({"actor": EngineSpec("language_model", ModelConfig(path=str(model)), settings)})
    if loaded.error is not None:
        raise loaded.error
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for name, size in buckets.items():
            publisher.bucket_bytes = size
            ctypes.CDLL(None).malloc_trim(0)  # freed memory that is used again would hide the peak
            before, started = resident_bytes("RssAnon"), time.perf_counter()
            with sampled_peak() as peaks:
                answer = await rank.publish("actor", dtype, len(rows) + 1, 0, validate=False, probe=False)
            if answer.error is not None:
                raise answer.error
            row = {"dtype": dtype, "buckets": name, "seconds": time.perf_counter() - started}
            row |= {"anon_mb": (max(peaks) - before) / MB, "chunks": len(files.chunks)}
            rows.append(row | (_checked(answer.value.publication, files.chunks, size) if answer.value else {}))
            for chunk in files.chunks:
                chunk.drop()
    await rank.close()
    return rows


def _checked(publication: Publication, chunks: list[DiskChunk], size: int) -> dict[str, float]:
    """Return the size of the version and the aim for its publication, if the files are what was published."""
    checksums, largest = WeightChecksums(), 0
    for chunk in chunks:
        tensors = chunk.get()
        checksums.add(tensors)
        largest = max(largest, *(array.size for array in tensors.values()))
    if checksums.by_group() != publication.checksums:
        raise RuntimeError(f"the files of version {publication.version} are not what was published")
    aim = min(2 * size, publication.num_bytes) + largest * FLOAT32_BYTES
    return {"model_mb": publication.num_bytes / MB, "aim_mb": aim / MB}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
