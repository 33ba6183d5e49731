"""Checks the rows of the data files before a run starts: without Ray, a tokenizer and a cache.

The Rollouter checks all rows again when it tokenizes them. This check reports a wrong row at once, and in `--dry-run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.environment import local_path
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError, DataError
from asyncrl.core.types import Prompt
from rollouter.prompts.dataset import OwnRows, json_row, parse_row
from rollouter.prompts.source import own_order
from rollouter.requests import refuse_own_distribution

CHECK_S = 5.0
"""Time after which the remaining rows are left to the Rollouter."""
_BATCH_ROWS = 100
_FIX = "correct the function; docs/extending.md has an example of each"


def check_data(
    config: Config, *, limit_s: float = CHECK_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[ConfigProblem]:
    """Yield a problem for the first row of each data file that cannot be used, among the rows that the run uses and
    that can be read within `limit_s`. Files that are not on this machine are skipped."""
    until = clock() + limit_s
    data = config.data
    for key, files, left in (
        ("data.train_files", data.train_files, data.max_train_samples),
        ("data.val_files", data.val_files, data.max_val_samples),
    ):
        for name in files:
            path = local_path(name)
            if path is None or not path.is_file():
                continue
            try:
                empty = True
                for raw, where in rows_of(name, path):
                    if left == 0 or clock() > until:
                        break
                    empty, left = False, None if left is None else left - 1
                    row = parse_row(raw, where, directory=path.parent)
                    if key == "data.train_files":
                        refuse_own_distribution(row.extra_info, where, config.rollout.sampling)
                if empty and left != 0 and clock() <= until:
                    yield _problem(config, key, name, "the file is empty: it has no rows", "give a file with prompts")
            except DataError as error:
                yield _problem(config, key, name, error.message, "correct the row, or remove it")


def _problem(config: Config, key: str, name: str, consequence: str, fix: str) -> ConfigProblem:
    problem = ConfigProblem(key, name, consequence, fix)
    # The cluster may have another file under this name.
    return problem if config.ray.address is None else replace(problem, severity="warning")


def check_own_data(config: Config) -> Iterator[ConfigProblem]:
    """Call the user's `data.dataset`, and check its first rows; call `data.sampler` for a few prompts."""
    data = config.data
    if data.dataset is not None:
        try:
            for split in ("train", "val"):
                rows = OwnRows.load(data, split)
                if rows is None:
                    continue
                if not len(rows):
                    raise DataError(f"{data.dataset} returned no rows for {split!r}")
                for index in range(min(len(rows), _BATCH_ROWS)):
                    parse_row(rows.row(index), rows.where(index))
        except AsyncRLError as error:
            yield ConfigProblem("data.dataset", data.dataset, error.message.removeprefix("data.dataset: "), _FIX)
    if data.sampler is not None:
        toys = [
            Prompt(np.zeros(2, np.int32), ({"role": "user", "content": str(n)},), "default", None, {"index": n})
            for n in range(8)
        ]
        try:
            one, again = (own_order(data.sampler, toys, seed=config.seed, epoch=0) for _ in range(2))
            if (one != again).any():
                raise ConfigError(
                    "two calls for the same epoch returned different orders, so a resumed run would repeat some "
                    "prompts and miss others; draw from np.random.default_rng([seed, epoch])"
                )
        except AsyncRLError as error:
            yield ConfigProblem("data.sampler", data.sampler, error.message.removeprefix("data.sampler: "), _FIX)


def rows_of(name: str, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each row of a file with its location. Raises `DataError` if the file, or a row, cannot be read."""
    if path.suffix.lower() == ".parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            number = 0
            with ParquetFile(path) as file:
                for batch in file.iter_batches(_BATCH_ROWS):
                    for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020  counts on over batches
                        yield row, f"{name}, row {number}"
        except (ArrowException, OSError) as error:
            raise DataError(f"{name}: cannot be read as .parquet: {error}") from error
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{name}, line {number}"
                    yield json_row(line, where), where
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(f"{name}: cannot be read as {path.suffix}: {error}") from error
