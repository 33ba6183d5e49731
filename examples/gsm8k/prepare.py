"""Turn a GSM8K-style file into rows for multi-turn training with the calc_gsm8k_reward tool.

Reads local Parquet or JSONL files whose rows have a `question`, and an `answer` that ends in `#### <number>`; downloads
nothing. Writes `train` and optionally `val` in verl's layout: a system message that describes the tool, the question,
the number as ground truth, and the keyword arguments of the tool for this row.

    python examples/gsm8k/prepare.py examples/gsm8k/sample.jsonl --out data/gsm8k --val-share 0.25
    python examples/gsm8k/prepare.py gsm8k/train.parquet --val gsm8k/test.parquet --out data/gsm8k
    asyncrl launch fully_async examples/gsm8k/config.yaml model.path=PATH

Files of any size are read and written in batches. An output file appears when it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rollouter.tools.gsm8k import parse_answer

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You are a math expert. Solve the problem step by step. Before you give the final answer, check it with the tool "
    f"`{TOOL}` at least once, and go over your solution again if it is wrong. End with the final answer in the form "
    "`#### <number>`, without units and without commas."
)
ASK = "Let's think step by step, and give the final answer after `####`."
BATCH_ROWS = 1000
PROGRESS_S = 2.0


class RowError(Exception):
    """A row is invalid; the message names its file and number."""


class Problem(NamedTuple):
    """One row of an input file."""

    number: int
    """Index in the file, from 0."""
    question: str
    answer: str
    """The complete solution."""
    ground_truth: str
    """The number, without commas and units."""


# ------------------------------------------------------------------------------------------------ reading


def raw_rows(path: Path) -> Iterator[tuple[str, Any, float]]:
    """Yield the location of each row, the row, and the share of the file that has been read.

    Raises:
        RowError: The file or a row cannot be read.
    """
    if path.suffix.lower() == ".parquet":
        yield from _parquet_rows(path)
        return
    size = max(path.stat().st_size, 1)
    done = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            where = f"{path}, line {number}"
            try:
                text = line.decode().strip()
                if text:
                    yield where, json.loads(text), done / size
            except ValueError as error:  # includes UnicodeDecodeError
                raise RowError(f"{where}: not JSON in UTF-8: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any, float]]:
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        total, number = max(file.metadata.num_rows, 1), 0
        columns = [name for name in ("question", "answer") if name in names]
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row, number / total
    except (pa.ArrowException, OSError) as error:
        raise RowError(f"{path}: cannot be read as Parquet: {error}") from error


def problems(path: Path, limit: int | None) -> Iterator[tuple[Problem, float]]:
    """Yield the first `limit` problems of a file, and the share of it that has been read.

    Raises:
        RowError: A row is not a problem.
    """
    for number, (where, row, share) in enumerate(raw_rows(path)):
        if number == limit:
            return
        if not isinstance(row, Mapping):
            raise RowError(f"{where}: {shown(row)} is no object with a question and an answer")
        for field in ("question", "answer"):
            value = row.get(field)
            if not isinstance(value, str) or not value.strip():
                actual = "missing" if value is None else shown(value)
                there = f"; the row has {', '.join(map(str, row))}" if value is None and row else ""
                raise RowError(f"{where}: field {field!r} is {actual}; expected a text{there}")
        yield Problem(number, row["question"], row["answer"], ground_truth(row["answer"], where)), share


def ground_truth(answer: str, where: str) -> str:
    """Return the number after the last `####`, as digits.

    Raises:
        RowError: There is no number after the last `####`.
    """
    _, marker, last = answer.rpartition("####")
    number = parse_answer(last) if marker else None
    if number is None:
        raise RowError(f"{where}: field 'answer' is {shown(answer[-60:])}; expected it to end in '#### <number>'")
    return f"{number:f}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------------------------------------ writing


def row_of(problem: Problem, split: str, *, data_source: str, interaction: str | None) -> dict[str, Any]:
    """Return the problem in verl's layout."""
    extra_info: dict[str, Any] = {
        "split": split,
        "index": problem.number,
        "question": problem.question,
        "answer": problem.answer,
        "need_tools_kwargs": True,
        "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": problem.ground_truth}}},
    }
    if interaction is not None:
        extra_info["interaction_kwargs"] = {"name": interaction}
    return {
        "data_source": data_source,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{problem.question} {ASK}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": extra_info,
    }


class RowFile:
    """A file of rows that is written under a temporary name and renamed when complete; removed if writing fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows = 0
        self._partial = path.with_name(f".{path.name}.partial")
        self._rows: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        self._partial.write_bytes(b"")
        return self

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self.num_rows += 1
        if len(self._rows) == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        if self.path.suffix == ".parquet":
            table = pa.Table.from_pylist(self._rows, schema=self._writer.schema if self._writer else None)
            self._writer = self._writer or pq.ParquetWriter(self._partial, table.schema)
            self._writer.write_table(table)
        else:
            with self._partial.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self._rows)
        self._rows.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
            if self._writer is not None:
                self._writer.close()
            if error is None and self.num_rows:
                os.replace(self._partial, self.path)
        finally:
            self._partial.unlink(missing_ok=True)


class Progress:
    """Reports progress on standard error every two seconds."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()
        self._count = 0

    def of(self, rows: Iterable[tuple[Problem, float]], path: Path) -> Iterator[Problem]:
        for problem, share in rows:
            yield problem
            self._count += 1
            if time.monotonic() - self._shown_at >= PROGRESS_S:
                self._shown_at = time.monotonic()
                say(f"{path}: {100 * share:.0f} %, {self._count} rows so far")


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def is_val(question: str, share: float, seed: int) -> bool:
    """Return whether a question belongs to the validation set.

    This depends only on its words, so a repeated question is never in both sets, and adding rows does not move others.
    """
    digest = hashlib.sha256(f"{seed}/{' '.join(question.split())}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prepare(options: argparse.Namespace) -> dict[Path, int]:
    """Write the files and return the number of rows of each.

    Raises:
        RowError: A row is invalid, or a file would have no rows.
    """
    # The index of a row is its index in the input file, even if --val-share splits the rows into two files.
    train, val = (options.out / f"{split}.{options.format}" for split in ("train", "val"))
    wanted = [train, val] if options.val or options.val_share else [train]
    options.out.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    with ExitStack() as stack:
        files = {path: stack.enter_context(RowFile(path)) for path in wanted}
        inputs = [(path, "train") for path in options.inputs] + [(path, "val") for path in options.val]
        for path, split in inputs:
            for problem in progress.of(problems(path, options.limit), path):
                of_split = (
                    "val" if split == "train" and is_val(problem.question, options.val_share, options.seed) else split
                )
                row = row_of(problem, of_split, data_source=options.data_source, interaction=options.interaction)
                files[train if of_split == "train" else val].add(row)
        for path, file in files.items():
            if not file.num_rows:
                raise RowError(f"{path} would have no rows; give more input, or another --val-share")
    return {path: file.num_rows for path, file in files.items()}


# ------------------------------------------------------------------------------------------------ command line


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE", help="a .parquet or .jsonl file for training")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write train and val to")
    parser.add_argument("--val", nargs="+", type=Path, default=[], metavar="FILE", help="files of the validation set")
    parser.add_argument(
        "--val-share", type=float, default=0.0, metavar="X", help="use this share of the training set for validation"
    )
    parser.add_argument("--seed", type=int, default=0, help="selects the questions of --val-share (default: 0)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N rows of each file")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet", help="default: parquet")
    parser.add_argument(
        "--data-source", default="openai/gsm8k", help="name of the data in metrics (default: openai/gsm8k)"
    )
    parser.add_argument(
        "--interaction",
        metavar="NAME",
        help="entry of rollout.multi_turn.interactions that answers the model, such as a `retry` user (default: none)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")
    options = parser.parse_args(arguments)
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check combinations of options; end the program with exit code 2 if they are invalid."""
    if not 0 <= options.val_share < 1:
        parser.error(f"--val-share {options.val_share:g}: a share is at least 0 and less than 1")
    if options.val and options.val_share:
        parser.error("--val and --val-share: the validation set comes from one of them; leave one out")
    if options.limit is not None and options.limit < 1:
        parser.error(f"--limit {options.limit}: at least one row is needed")
    for path in (*options.inputs, *options.val):
        if not path.is_file():
            parser.error(f"{path}: there is no such file")
        if path.suffix.lower() not in (".parquet", ".jsonl", ".ndjson"):
            parser.error(f"{path}: the suffix is {path.suffix!r}; expected .parquet or .jsonl")
    outputs = [options.out / f"{split}.{options.format}" for split in ("train", "val")]
    for path in outputs:
        if path.resolve() in {source.resolve() for source in (*options.inputs, *options.val)}:
            parser.error(f"--out {options.out}: {path} is read as well; write to another directory")
        if path.exists() and not options.force:
            parser.error(f"{path} already exists; --force overwrites it")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    try:
        written = prepare(options)
    except (RowError, OSError) as error:
        say(f"prepare: {error}")
        return 1
    for path, num_rows in written.items():
        say(f"wrote {path}: {num_rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
