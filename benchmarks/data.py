"""Measure how fast a large data set is checked and tokenized, and the memory that this takes.

    files ─▶ index or conversion ─▶ check, chat template, tokenizer ─▶ cache, which the next launch only opens

Rows resemble those of GSM8K: a question of some 300 characters, and an answer. Each line is measured in a process of
its own: `rows_per_s` with an empty cache, `cpu_us` of CPU time that a row then takes in all processes, `cached_s` with
the tokens in the cache, and `read_us`, the time of reading a prompt at a random place afterwards. `base_mb` is the
memory of the process with its tokenizer before it opens the files, `peak_mb` the most that it takes until the end,
`worker_peak_mb` that of its largest process for tokenizing. Memory is resident memory.
"""

from __future__ import annotations

import json
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, ModelConfig
from asyncrl.core.types import SampleId
from benchmarks.report import arguments, positive, report_tables
from benchmarks.running import print_progress
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.prompts.source import load_prompts

WORDS = tuple(
    "apples boxes each gives friends hours how left many more pages sells than time weeks costs twice".split()  # noqa: SIM905
)
QUESTION_WORDS = 55
READS = 2_000
_BATCH = 10_000
AIM = "peak_mb at most 300 above base_mb, for a million rows"
FORMATS = ("jsonl", "json", "parquet")


def make_rows(number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield rows with questions of about 300 characters."""
    draw = random.Random(seed)
    for index in range(number):
        a, b = draw.randint(2, 999), draw.randint(2, 999)
        text = " ".join(draw.choices(WORDS, k=QUESTION_WORDS))
        yield {
            "prompt": [{"role": "user", "content": f"{text} {a} {b}?"}],
            "data_source": "words",
            "reward_model": {"style": "rule", "ground_truth": str(a * b)},
            "extra_info": {"index": index},
        }


def write_rows(path: Path, number: int) -> None:
    """Write a data file in the format of its suffix, in bounded memory."""
    rows = make_rows(number)
    if path.suffix == ".parquet":
        writer = None
        while batch := list(islice(rows, _BATCH)):
            table = pa.Table.from_pylist(batch)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()
        return
    start, between, end = ("[", ",\n", "]\n") if path.suffix == ".json" else ("", "\n", "\n")
    with path.open("w", encoding="utf-8") as file:
        file.write(start)
        for index, row in enumerate(rows):
            file.write(between * (index > 0) + json.dumps(row))
        file.write(end)


def measure(path: str, cache_dir: str, processes: int) -> dict[str, Any]:
    """Load a data file twice in this process."""
    tokenizer = load_tokenizer(ModelConfig())
    config = Config(data=DataConfig(train_files=(path,), num_workers=processes, max_prompt_length=1024))
    base, cpu_s = _peak_mb(resource.RUSAGE_SELF), _cpu_s()
    first_s, loaded = _timed(lambda: load_prompts(config, tokenizer, Path(cache_dir), report=print_progress))
    cpu_s = _cpu_s() - cpu_s
    cached_s, loaded = _timed(lambda: load_prompts(config, tokenizer, Path(cache_dir)))
    prompts, draw = loaded.train, random.Random(1)
    places = [draw.randrange(len(prompts)) + 1 for _ in range(READS)]
    read_s, found = _timed(lambda: [len(prompts.at(SampleId(0, place)).prompt_ids) for place in places])
    return {
        "format": Path(path).suffix.removeprefix("."),
        "processes": processes or 1,
        "rows": len(prompts),
        "tokens_per_row": round(sum(found) / len(found), 1),
        "rows_per_s": round(len(prompts) / first_s),
        "cpu_us": round(cpu_s / len(prompts) * 1e6),
        "cached_s": round(cached_s, 2),
        "read_us": round(read_s / READS * 1e6),
        "base_mb": round(base),
        "peak_mb": round(_peak_mb(resource.RUSAGE_SELF)),
        "worker_peak_mb": round(_peak_mb(resource.RUSAGE_CHILDREN)),
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def _cpu_s() -> float:
    usage = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def _peak_mb(whose: int) -> float:
    return resource.getrusage(whose).ru_maxrss / 1024


def measured(path: Path, processes: int) -> dict[str, Any]:
    """Measure in a process of its own, with an empty cache."""
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-data-", dir=path.parent) as cache,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(measure, str(path), cache, processes).result()


def main() -> None:
    parser = arguments(__doc__, "data", json_to_stdout=True)
    parser.add_argument("--rows", type=positive, default=100_000)
    parser.add_argument("--processes", default="0,2", help="values of data.num_workers; 0: none but the own")
    parser.add_argument("--formats", default="jsonl,parquet", help=f"of {', '.join(FORMATS)}")
    options = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-data-") as directory:
        for suffix in options.formats.split(","):
            path = Path(directory) / f"rows.{suffix}"
            write_rows(path, options.rows)
            print_progress(f"{path.name}: {path.stat().st_size / 1e6:.0f} MB")
            for processes in map(int, options.processes.split(",")):
                table.append(measured(path, processes))
                print_progress(str(table[-1]))
            path.unlink()
    report_tables("data", {"loading": table}, options.json, aims={"loading": AIM})


if __name__ == "__main__":
    main()
