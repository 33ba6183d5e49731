"""Conversion of operations to journal rows and back, and queries over a run's operations. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from operator import index as integer
from typing import Any, NamedTuple

from asyncrl.core.types import DropReason, SampleId
from asyncrl.queue import operations
from asyncrl.queue.core import Operation
from asyncrl.queue.operations import CommitSamples, DropSamples, MarkCheckpoint, RewindTraining
from asyncrl.queue.state import entry_of, indices, sample_of


class JournalRow(NamedTuple):
    """A recorded operation. `body` is a JSON array of its fields; samples are named by their index."""

    kind: str
    body: str


_RECORDED: Mapping[str, type[Operation]] = {
    name: kind
    for name, kind in vars(operations).items()
    if isinstance(kind, type) and issubclass(kind, Operation) and kind.apply is not Operation.apply
}


def to_row(operation: Operation) -> JournalRow:
    """Convert an operation whose payloads are `FileRef`s or None."""
    kind = type(operation).__name__
    body = [_encode(name, getattr(operation, name)) for name in _FIELDS[kind]]
    return JournalRow(kind, json.dumps(body, separators=(",", ":")))


def from_row(row: JournalRow, prompts_per_epoch: int) -> Operation:
    """Convert a row to its operation. Raises `KeyError`, `IndexError`, `TypeError` or `ValueError` for an invalid
    row."""
    names, values = _FIELDS[row.kind], json.loads(row.body)
    return _RECORDED[row.kind](
        *[_decode(name, value, prompts_per_epoch) for name, value in zip(names, values, strict=True)]
    )


_FIELDS: Mapping[str, list[str]] = {name: [one.name for one in fields(kind)] for name, kind in _RECORDED.items()}


def _encode(name: str, value: Any) -> Any:
    match name:
        case "sample_ids" | "trained_since":
            return indices(value)
        case "sample_id":
            return value.index
        case "samples":
            return list(map(entry_of, value))
    return value


def _decode(name: str, value: Any, prompts_per_epoch: int) -> Any:
    match name:
        case "sample_ids" | "trained_since":
            return tuple([SampleId((index - 1) // prompts_per_epoch, index) for index in value])
        case "sample_id":
            return SampleId((value - 1) // prompts_per_epoch, value)
        case "samples":
            return tuple([sample_of(entry, prompts_per_epoch) for entry in value])
        case "reason":
            return DropReason(value)
        case "incarnation" | "lineage" | "step" | "trained_tokens" | "version":  # names of files contain most of them
            return integer(value)
    return value


# ------------------------------------------------------------------------------------------------ a run's operations


def surviving_marks(operations: Iterable[tuple[int, Operation]]) -> dict[int, int]:
    """Return, by step, the number of the operation that marked each checkpoint that no rewind has abandoned.

    Args:
        operations: the operations in order, with their numbers; marks and rewinds are enough.
    """
    marks: dict[int, int] = {}
    for number, operation in operations:
        update_marks(marks, number, operation)
    return marks


def update_marks(marks: dict[int, int], number: int, operation: Operation) -> None:
    """Update the result of `surviving_marks` with the next operation."""
    if isinstance(operation, MarkCheckpoint):
        marks[operation.step] = number
    elif isinstance(operation, RewindTraining):
        for step in [step for step in marks if step > operation.step]:
            del marks[step]


def trained_since(
    step: int, operations: Iterable[Operation], *, from_start: bool = True
) -> tuple[SampleId, ...] | None:
    """Return the samples TRAINED since the surviving mark of `step`, by index; None: there is no such mark, or a
    rewind abandoned it.

    A rewind to a checkpoint before the newest one needs this, because the state has forgotten the ends of these
    samples. The answer may name samples that a later rewind revived; `QueueState.ended_for_good` leaves them out.

    Args:
        operations: the run's operations in order; marks, rewinds, commits and drops are enough.
        from_start: whether they begin with the run's first operation, which counts as the mark of step 0, or at the
            checkpoint that the run resumed from.
    """
    is_marked = from_start and step == 0
    any_commit = False
    trained: dict[SampleId, bool] = {}
    for operation in operations:
        match operation:
            case MarkCheckpoint(step=marked) if marked == step:
                is_marked = True
                trained.clear()
            case RewindTraining(step=back_to) if back_to == step and not any_commit:
                is_marked = True
            case RewindTraining(step=back_to) if back_to < step:
                is_marked = False
            case CommitSamples(sample_ids=sample_ids):
                any_commit = True
                trained |= dict.fromkeys(sample_ids, True)
            case DropSamples(sample_ids=sample_ids):
                trained |= dict.fromkeys(sample_ids, False)
    return tuple(sorted(sample_id for sample_id, last in trained.items() if last)) if is_marked else None
