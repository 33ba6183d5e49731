"""Scatter a call on a group over its ranks, and collect the results. Each method declares how:

    scatter   all           the same arguments on every rank
              rows          the first argument is a batch, whose rows are split over the data ranks
              rank_zero     only rank 0 is called
    collect   first         rank 0's result, which all ranks have
              rows          results of the ranks that report, back in the order of the batch's rows

Ranks of one data group (`Layout.data_rank`), which share sequences or tensors, get the same rows.
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
    scatter: Literal["all", "rows", "rank_zero"]
    collect: Literal["first", "rows"]


class RankShare(NamedTuple):
    """The rows that one data rank computes."""

    rows: list[int]
    """Row numbers within the whole batch, ascending."""
    padding: list[int]
    """For a rank without rows: one row that it computes without a trained token, to join collective operations."""


class RankCall(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def dispatched(
    scatter: Literal["all", "rows", "rank_zero"], collect: Literal["first", "rows"] = "first"
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


def share_rows(lengths: Sequence[int], num_ranks: int) -> list[RankShare]:
    """Assign every row to one data rank, at similar cost for each; a rank without rows gets the shortest row as
    padding."""
    shortest = min(range(len(lengths)), key=lambda row: (lengths[row], row))
    return [RankShare(rows, [] if rows else [shortest]) for rows in balance(lengths, num_ranks)]


def scatter(mode: Dispatch, layouts: Sequence[Layout], call: RankCall) -> tuple[dict[int, RankCall], list[RankShare]]:
    """Return each rank's arguments (ranks of a data group share the object), and for `rows` each data rank's share.

    Raises:
        DataError: the batch has no rows.
    """
    if mode.scatter == "rank_zero":
        return {0: call}, []
    if mode.scatter == "all":
        return {layout.rank: call for layout in layouts}, []
    batch, rest = call.args[0], call.args[1:]
    lengths = input_lengths(batch)
    if not lengths:
        raise DataError("the batch has no rows, so there is nothing to compute; find out why its samples were dropped")
    shares = share_rows(lengths, layouts[0].data_size)
    calls = [RankCall((_take(batch, share), *rest), call.kwargs) for share in shares]
    return {layout.rank: calls[layout.data_rank] for layout in layouts}, shares


def collect(mode: Dispatch, layouts: Sequence[Layout], shares: Sequence[RankShare], results: Mapping[int, Any]) -> Any:
    """Combine the ranks' results into one, without padding rows."""
    if mode.collect == "first":
        return results[0]
    reporting = [layout for layout in layouts if layout.reports and shares[layout.data_rank].rows]
    parts = [results[layout.rank][: len(shares[layout.data_rank].rows)] for layout in reporting]
    order = torch.tensor([row for layout in reporting for row in shares[layout.data_rank].rows])
    return torch.cat(parts)[torch.argsort(order)]


def _take(batch: TensorDict, share: RankShare) -> TensorDict:
    part = batch[torch.tensor(share.rows + share.padding)]
    if share.padding and "loss_mask" in part:
        part["loss_mask"][len(share.rows) :] = False
    return part


class Arrays(NamedTuple):
    """A TensorDict for Ray: arrays go through shared memory, whereas tensors would be pickled."""

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
