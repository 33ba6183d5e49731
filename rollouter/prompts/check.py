"""Checks the rows of the data files before a run starts: without Ray, a tokenizer and a cache.

The Rollouter checks all rows again when it tokenizes them. This check reports a wrong row at once, and in `--dry-run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.environment import local_path
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError
from rollouter.prompts.dataset import json_row, parse_row
from rollouter.requests import refuse_own_distribution

CHECK_S = 5.0
"""Time after which the remaining rows are left to the Rollouter."""
_BATCH_ROWS = 100


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
                if not path.stat().st_size:
                    raise DataError(f"{name} is empty")
                for raw, where in _rows(name, path):
                    if left == 0 or clock() > until:
                        break
                    left = None if left is None else left - 1
                    row = parse_row(raw, where, directory=path.parent)
                    if key == "data.train_files":
                        refuse_own_distribution(row.extra_info, where, config.rollout.sampling)
            except DataError as error:
                problem = ConfigProblem(key, name, error.message, "correct the row, or remove it")
                # The cluster may have another file under this name.
                yield problem if config.ray.address is None else replace(problem, severity="warning")


def _rows(name: str, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
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
