"""Which rows go together: mini-batches of whole samples, micro-batches within a token budget, shares of equal cost.

Pure numpy: it sees row numbers and lengths, never tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

QUADRATIC_COST = 1 / 12288
"""What L² costs against L in a row of L tokens. Of a layer of hidden size h, dense parts take 24h² operations a token
and causal attention 2hL: L / 12h of them; this is h = 1024."""


def mini_batches(groups: Sequence[int], *, size: int, epochs: int = 1, seed: int = 0) -> list[list[int]]:
    """Row numbers of each optimizer step: `size` whole samples each, the last one of an epoch perhaps fewer.

    The first epoch takes samples in their order, later ones in an order drawn from `seed`; every epoch gives the same
    number of mini-batches.

    Args:
        groups: each row's sample (`groups` of `trainer.tensors`).
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(int(group), []).append(row)
    order, rng = np.array(list(rows_of), dtype=np.int64), np.random.default_rng(seed)
    batches = []
    for epoch in range(epochs):
        if epoch:
            order = rng.permutation(order)
        for first in range(0, len(order), size):
            batches.append([row for group in order[first : first + size] for row in rows_of[int(group)]])
    return batches


def split(
    lengths: Sequence[int], *, max_tokens: int, overhead_tokens: int, num_parts: int | None = None, packed: bool
) -> list[list[int]]:
    """Group row numbers into micro-batches of at most `max_tokens` tokens; a longer row is one of its own.

    Args:
        lengths: positions to compute for each row, at least 1.
        overhead_tokens: what one pass costs beyond its tokens, in tokens. It decides how finely padded rows are cut.
        num_parts: at least so many, as far as there are rows, because other ranks have as many; None: as few as is
            best.
        packed: sequences lie one after another, so that parts are balanced by cost; else rows are padded to the
            longest of their micro-batch, so that rows of like length go together.
    """
    if packed:
        parts = _balanced_within(lengths, max_tokens, num_parts or 1)
    else:
        parts = _cheapest_cuts(lengths, max_tokens, overhead_tokens)
    return _at_least(parts, num_parts or 1, lengths)


def balance(lengths: Sequence[int], num_parts: int, *, quadratic: float = QUADRATIC_COST) -> list[list[int]]:
    """Share rows out into `num_parts` parts of like cost; with at least as many rows as parts none is empty.

    A row of `L` tokens costs `L + quadratic * L²`. Largest differencing method (Karmarkar and Karp 1982): the two most
    uneven partial partitions are joined, heavy parts of one with light parts of the other. Deterministic; rows of a
    part are in ascending order, parts in the order of their first row.
    """
    costs = np.asarray(lengths, dtype=np.float64)
    costs = costs + quadratic * costs**2
    # A heap entry is one partition: (-spread, first row, parts as (cost, rows), heaviest first).
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for row, cost in enumerate(costs.tolist()):
        heap.append((-cost, row, [(cost, [row])] + [(0.0, [])] * (num_parts - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, left = heapq.heappop(heap)
        _, second, right = heapq.heappop(heap)
        joined = [(a + b, rows + more) for (a, rows), (b, more) in zip(left, reversed(right), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    parts = [sorted(rows) for _, rows in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted(parts, key=lambda rows: rows or [len(costs)])


def _cheapest_cuts(lengths: Sequence[int], max_tokens: int, overhead_tokens: int) -> list[list[int]]:
    """Rows by length, the longest first, cut where padding and overhead are least: shortest path over the cuts."""
    order = np.argsort(np.asarray(lengths), kind="stable")
    ordered = np.asarray(lengths)[order]
    best = np.zeros(len(order) + 1)
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    for end in range(1, len(order) + 1):
        width = int(ordered[end - 1])
        first = min(end - 1, max(0, end - max_tokens // width))
        starts = np.arange(first, end)
        costs = best[starts] + (end - starts) * width + overhead_tokens
        choice = int(np.argmin(costs))
        best[end], cut[end] = costs[choice], starts[choice]
    groups = []
    end = len(order)
    while end > 0:
        groups.append([int(number) for number in order[cut[end] : end]])
        end = int(cut[end])
    return groups


def _balanced_within(lengths: Sequence[int], max_tokens: int, num_parts: int) -> list[list[int]]:
    """The fewest balanced parts, at least `num_parts`, of which none is over the budget; the largest first."""
    tokens = np.asarray(lengths, dtype=np.int64)
    over = [int(row) for row in np.flatnonzero(tokens >= max_tokens)]
    rest = [int(row) for row in np.flatnonzero(tokens < max_tokens)]
    parts = [[row] for row in over]
    if rest:
        kept = tokens[rest]
        count = min(len(rest), max(num_parts - len(over), -(-int(kept.sum()) // max_tokens), 1))
        shares = balance(kept.tolist(), count)
        while max(int(kept[share].sum()) for share in shares) > max_tokens:
            count += 1
            shares = balance(kept.tolist(), count)
        parts += [[rest[index] for index in share] for share in shares]
    return sorted(parts, key=lambda part: -int(tokens[part].sum()))


def _at_least(parts: list[list[int]], num_parts: int, lengths: Sequence[int]) -> list[list[int]]:
    """Halve the largest part that has two rows until there are `num_parts`, or no part has two."""
    parts = list(parts)
    while len(parts) < num_parts:
        sizes = [_width(part, lengths) * (len(part) > 1) for part in parts]
        largest = int(np.argmax(sizes)) if sizes else 0
        if not sizes or sizes[largest] == 0:
            break
        rows = parts[largest]
        edges = [0, len(rows) // 2, len(rows)]
        parts[largest : largest + 1] = [rows[start:end] for start, end in pairwise(edges)]
    return parts


def _width(part: Sequence[int], lengths: Sequence[int]) -> int:
    chosen: NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)[list(part)]
    return int(chosen.max()) * len(part)
