"""Scatter a call on a group over its ranks, and collect the results. Each method declares how:

    scatter   all           the same arguments on every rank
              rows          the first argument is a batch, whose rows are split over the data ranks
              mini_batches  as `rows`; the second argument has the rows of each mini-batch, which are split separately
              rank_zero     only rank 0 is called
    collect   first         rank 0's result, which all ranks have
              rows          results of the ranks that report, back in the order of the batch's rows

Ranks of one data group (`Layout.data_rank`: they share sequences or tensors) get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from asyncrl.core.failures import BugError, DataError
from trainer.engines.base import Layout
from trainer.engines.compute.packing import balance, input_lengths

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(NamedTuple):
    scatter: Literal["all", "rows", "mini_batches", "rank_zero"]
    collect: Literal["first", "rows"]


class Share(NamedTuple):
    """The rows that one data rank computes."""

    rows: list[int]
    """Row numbers within the whole batch, ascending."""
    padding: list[int]
    """Rows without a trained token that follow `rows`, so that every mini-batch has a row on this rank."""
    mini_batches: list[list[int]]
    """Positions of each mini-batch in `rows + padding`."""


class RankCall(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def dispatched(
    scatter: Literal["all", "rows", "mini_batches", "rank_zero"], collect: Literal["first", "rows"] = "first"
) -> Callable[[Method], Method]:
    """Declare how a worker's method is called on a group."""

    def declare(method: Method) -> Method:
        method.dispatch = Dispatch(scatter, collect)  # type: ignore[attr-defined]
        return method

    return declare


def dispatch_of(worker: type, method: str) -> Dispatch:
    """Return the declared dispatch of `method`.

    Raises:
        BugError: there is no such method, or it has no dispatch; the nearest one is named.
    """
    declared = getattr(getattr(worker, method, None), "dispatch", None)
    if declared is None:
        known = [name for name in dir(worker) if hasattr(getattr(worker, name), "dispatch")]
        near = get_close_matches(method, known, n=1, cutoff=0.0)
        raise BugError(f"{worker.__name__}.{method} cannot be called on a group; did you mean {', '.join(near)}?")
    return declared


def share_rows(lengths: Sequence[int], num_ranks: int) -> list[Share]:
    """Assign every row to one data rank, at similar cost for each; a rank without rows gets the shortest row as
    padding."""
    return share_mini_batches(lengths, [range(len(lengths))], num_ranks)


def share_mini_batches(lengths: Sequence[int], mini_batches: Sequence[Sequence[int]], num_ranks: int) -> list[Share]:
    """Split each mini-batch at similar cost for each data rank, so that a step takes equally long on all of them.

    A row may be in several mini-batches (epochs), on a different rank each time; a rank receives it once. If a
    mini-batch has fewer rows than there are ranks, the ranks without a row compute a padding row.
    """
    members: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for rows in mini_batches:
        for rank, share in enumerate(balance([lengths[row] for row in rows], num_ranks)):
            members[rank].append([rows[position] for position in share])
    shortest = min(range(len(lengths)), key=lambda row: (lengths[row], row))
    return [_share(parts, shortest) for parts in members]


def _share(parts: Sequence[Sequence[int]], shortest: int) -> Share:
    rows = sorted({row for part in parts for row in part})
    place = {row: position for position, row in enumerate(rows)}
    padding = [shortest] if not all(parts) else []
    return Share(rows, padding, [[place[row] for row in part] or [len(rows)] for part in parts])


def scatter(mode: Dispatch, layouts: Sequence[Layout], call: RankCall) -> tuple[dict[int, RankCall], list[Share]]:
    """Return each rank's arguments (ranks of a data group share the object), and for `rows` each data rank's share.

    Raises:
        DataError: the batch or a mini-batch has no rows, or a row number is not in the batch.
    """
    if mode.scatter == "rank_zero":
        return {0: call}, []
    if mode.scatter == "all":
        return {layout.rank: call for layout in layouts}, []
    batch, rest = call.args[0], call.args[1:]
    num_ranks = layouts[0].data_size
    lengths = input_lengths(batch)
    if not lengths:
        raise DataError("the batch has no rows, so there is nothing to compute; find out why its samples were dropped")
    if mode.scatter == "rows":
        shares = share_rows(lengths, num_ranks)
        calls = [RankCall((_take(batch, share), *rest), call.kwargs) for share in shares]
    else:
        _check_mini_batches(rest[0], len(lengths))
        shares = share_mini_batches(lengths, rest[0], num_ranks)
        calls = [RankCall((_take(batch, share), share.mini_batches, *rest[1:]), call.kwargs) for share in shares]
    return {layout.rank: calls[layout.data_rank] for layout in layouts}, shares


def collect(mode: Dispatch, layouts: Sequence[Layout], shares: Sequence[Share], results: Mapping[int, Any]) -> Any:
    """Combine the ranks' results into one, without padding rows."""
    if mode.collect == "first":
        return results[0]
    reporting = [layout for layout in layouts if layout.reports and shares[layout.data_rank].rows]
    parts = [results[layout.rank][: len(shares[layout.data_rank].rows)] for layout in reporting]
    order = torch.tensor([row for layout in reporting for row in shares[layout.data_rank].rows])
    return torch.cat(parts)[torch.argsort(order)]


def _check_mini_batches(mini_batches: Sequence[Sequence[int]], num_rows: int) -> None:
    for number, rows in enumerate(mini_batches):
        if len(rows) == 0:
            raise DataError(f"mini-batch {number} has no rows; no step was taken")
        outside = [row for row in rows if not 0 <= row < num_rows]
        if outside:
            raise DataError(f"mini-batch {number} names row {outside[0]} of a batch of {num_rows}; no step was taken")


def _take(batch: TensorDict, share: Share) -> TensorDict:
    part = batch[torch.tensor(share.rows + share.padding)]
    if share.padding and "loss_mask" in part:
        part["loss_mask"][len(share.rows) :] = False
    return part


class Arrays(NamedTuple):
    """A TensorDict for Ray: arrays go through shared memory, where tensors would be pickled."""

    values: dict[str, NDArray[Any]]
    num_rows: int


def to_wire(value: Any) -> Any:
    """Convert a TensorDict to `Arrays`; return anything else unchanged."""
    if not isinstance(value, TensorDict):
        return value
    return Arrays({key: tensor.cpu().numpy() for key, tensor in value.items()}, len(value))


def from_wire(value: Any) -> Any:
    """Convert back. The arrays received are read-only, so they are copied."""
    if not isinstance(value, Arrays):
        return value
    tensors = {key: torch.from_numpy(np.array(array)) for key, array in value.values.items()}
    return TensorDict(tensors, batch_size=[value.num_rows])
