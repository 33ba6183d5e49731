"""Checks the rows of the data files before a run starts: without Ray, a tokenizer and a cache.

The Rollouter checks all rows again when it tokenizes them. This check reports a wrong row at once, and in `--dry-run`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.environment import local_path
from asyncrl.config.problems import ConfigProblem, warning
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import data_suffix, is_remote
from asyncrl.core.failures import AsyncRLError, ConfigError, DataError, InfraError
from asyncrl.core.types import Prompt
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.columns import ColumnCheck
from rollouter.prompts.dataset import OwnRows, RowKeys, parse_row
from rollouter.prompts.files import DataFile, first_url, has_copy, open_url, remote_errors
from rollouter.prompts.row_files import is_list, is_list_file, json_row, list_spans, read_spans, table_batches
from rollouter.prompts.source import own_order
from rollouter.requests import refuse_own_distribution

CHECK_S = 5.0
"""Time after which the remaining rows are left to the Rollouter."""
_BATCH_ROWS = 100
_HEAD_BYTES = 2**17
"""Bytes of a JSON file elsewhere that are checked."""
_ROW = re.compile(r", (row|line|entry) \d+: ")
"""Names a row in the message of a `DataError`; other messages are of a whole file."""
_FIX = "correct the function; docs/extending.md has an example of each"


def check_data(
    config: Config, *, limit_s: float = CHECK_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[ConfigProblem]:
    """Yield a problem for the first row of each data file that cannot be used, among the rows that the run uses and
    that can be read within `limit_s`. Of files elsewhere, the first rows are checked. Local files that are not on this
    machine are skipped."""
    until = clock() + limit_s
    data, columns = config.data, ColumnCheck(config)
    remote = [
        _RemoteCheck(config, key, name, columns)
        for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files))
        for name in files
        if is_remote(name)
    ]
    for key, files, left in (
        ("data.train_files", data.train_files, data.max_train_samples),
        ("data.val_files", data.val_files, data.max_val_samples),
    ):
        for name in files:
            path = None if is_remote(name) else local_path(name)
            if path is None or not path.is_file():
                continue
            try:
                empty = True
                for raw, where in rows_of(name, path):
                    if left == 0 or clock() > until:
                        break
                    empty, left = False, None if left is None else left - 1
                    _check_row(config, key, columns, raw, where, path.parent)
                if empty and left != 0 and clock() <= until:
                    yield _problem(config, key, name, "the file is empty: it has no rows", "give a file with prompts")
            except DataError as error:
                yield _problem(config, key, name, *consequence_and_fix(error))
    for check in remote:
        yield from check.problems(until - clock(), limit_s)
    yield from columns.problems()


def consequence_and_fix(error: DataError) -> tuple[str, str]:
    """Return the consequence and the fix of a row or a file that cannot be used. The fix is the last sentence of the
    message if that names the keys to set."""
    message, _, last = error.message.rpartition(". ")
    if message and last.startswith("Set "):
        return message, f"s{last[1:]}"
    fix = "correct the row, or remove it" if _ROW.search(error.message) else "give another file, or write it again"
    return error.message, fix


def _check_row(
    config: Config, key: str, columns: ColumnCheck, raw: Mapping[str, Any], where: str, directory: Path | None
) -> None:
    row = parse_row(raw, where, keys=RowKeys.of(config.data), directory=directory)
    columns.add(raw, row, where)
    if key == "data.train_files":
        refuse_own_distribution(row.extra_info, where, config.rollout.sampling)


class _RemoteCheck:
    """Checks the first rows of a file elsewhere in a thread, which is left behind if the server does not answer."""

    def __init__(self, config: Config, key: str, name: str, columns: ColumnCheck) -> None:
        self._config, self._key, self._name, self._columns = config, key, name, columns
        self._error: AsyncRLError | None = None
        self._thread = threading.Thread(target=self._check, daemon=True, name=f"check of {name}")
        self._thread.start()

    def _check(self) -> None:
        try:
            empty = True
            for raw, where in _first_rows(self._name, self._key):
                empty = False
                _check_row(self._config, self._key, self._columns, raw, where, None)
            if empty:
                raise DataError("the file is empty: it has no rows")
        except AsyncRLError as error:
            self._error = error

    def problems(self, left_s: float, limit_s: float) -> Iterator[ConfigProblem]:
        """Yield what was found within `left_s`."""
        self._thread.join(max(left_s, 0.0))
        if self._thread.is_alive():
            consequence = f"its first rows did not arrive within {limit_s:g} s, so they were not checked"
            yield warning(self._key, self._name, consequence, "nothing, if the Rollouter can read it later")
            return
        cache = DataCache(Path(self._config.data.cache_dir).expanduser())
        if self._error is None or (isinstance(self._error, InfraError) and has_copy(self._name, cache)):
            return
        if isinstance(self._error, DataError):
            yield ConfigProblem(self._key, self._name, *consequence_and_fix(self._error))
            return
        message = self._error.message
        for prefix in (f"{self._key}: ", f"{self._name} "):
            message = message.removeprefix(prefix)
        message, _, fix = message.rpartition(". ")  # the last sentence of the message
        yield ConfigProblem(self._key, self._name, message or fix, fix)


def _first_rows(name: str, key: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the first rows of a file elsewhere, without a download of the rest.

    Raises:
        ConfigError, InfraError, DataError: see `find_files` and `rows_of`.
    """
    url = first_url(name, key)
    suffix = data_suffix(url)
    with remote_errors(url, key):
        files, path = open_url(url)
        with files.open(path, "rb") as stream:
            if suffix == ".parquet":
                if getattr(stream, "size", None) is None:
                    return  # the server can only send the whole file
                batch = next(table_batches(stream, url), None)
                rows = [] if batch is None else batch.to_pylist()
                yield from ((row, f"{url}, row {number}") for number, row in enumerate(rows, 1))
                return
            head = stream.read(_HEAD_BYTES)
    if is_list(head) and suffix == ".json":
        try:
            for span in list_spans(head, url):
                where = f"{url}, entry {span.number}"
                yield json_row(head[span.start : span.start + span.length], where), where
        except DataError:
            if len(head) < _HEAD_BYTES:
                raise
        return
    lines = head.splitlines()
    for number, line in enumerate(lines if len(head) < _HEAD_BYTES else lines[:-1], 1):
        if line.strip():
            where = f"{url}, line {number}"
            yield json_row(line, where), where


def _problem(config: Config, key: str, name: str, consequence: str, fix: str) -> ConfigProblem:
    problem = ConfigProblem(key, name, consequence, fix)
    # The cluster may have another file under this name.
    return problem if config.ray.address is None else replace(problem, severity="warning")


def check_own_data(config: Config) -> Iterator[ConfigProblem]:
    """Call the user's `data.dataset`, and check its first rows; call `data.sampler` for a few prompts."""
    data, columns = config.data, ColumnCheck(config)
    if data.dataset is not None:
        try:
            for split in ("val",) if config.validates_only else ("train", "val"):
                rows = OwnRows.load(data, split)
                if rows is None:
                    continue
                if not len(rows):
                    raise DataError(f"{data.dataset} returned no rows for {split!r}")
                for index in range(min(len(rows), _BATCH_ROWS)):
                    raw, where = rows.row(index), rows.where(index)
                    columns.add(raw, parse_row(raw, where, keys=RowKeys.of(data)), where)
            yield from columns.problems()
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
    """Yield each row of a local file with its location. Raises `DataError` if the file, or a row, cannot be read."""
    file = DataFile(name, path, data_suffix(name))
    try:
        if path.stat().st_size == 0:
            return
        if file.suffix == ".parquet":
            number = 0
            for batch in table_batches(path, name):
                for number, row in enumerate(batch.to_pylist(), number + 1):  # noqa: B020  counts on over batches
                    yield row, f"{name}, row {number}"
            return
        unit = "entry" if is_list_file(file) else "line"
        for raw, span in read_spans(file):
            where = f"{name}, {unit} {span.number}"
            yield json_row(raw, where), where
    except OSError as error:
        raise DataError(f"{name}: cannot be read as {file.suffix}: {error}") from error
