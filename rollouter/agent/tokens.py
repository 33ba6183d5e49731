"""The tokens of a conversation as it grows: what the policy sampled, what it was told, in one or more rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.trajectory import TokenRow
from asyncrl.types import Span, TokenIds, Turn, merge_spans


class _OpenRow:
    def __init__(self, prompt_ids: TokenIds) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[NDArray[np.int32]] = []
        self.log_probs: list[NDArray[np.float32]] = []
        self.sampled: list[bool] = []
        self.spans: tuple[Span, ...] = ()
        self.num_tokens = 0

    def add(self, ids: NDArray[np.int32], log_probs: NDArray[np.float32], *, sampled: bool) -> None:
        self.ids.append(ids)
        self.log_probs.append(log_probs)
        self.sampled.append(sampled)
        self.num_tokens += len(ids)

    def trim(self) -> None:
        """What was said behind the last turn is of no use to anybody."""
        while self.sampled and not self.sampled[-1]:
            self.num_tokens -= len(self.ids.pop())
            self.log_probs.pop()
            self.sampled.pop()

    def closed(self) -> TokenRow:
        return TokenRow(
            prompt_ids=self.prompt_ids,
            response_ids=np.concatenate(self.ids),
            response_mask=np.concatenate(
                [np.full(len(ids), sampled) for ids, sampled in zip(self.ids, self.sampled, strict=True)]
            ),
            rollout_log_probs=np.concatenate(self.log_probs),
            spans=self.spans,
        )


class ConversationTokens:
    """Rows of one trajectory, the last of them open. Arrays are never changed once given."""

    def __init__(self, prompt_ids: TokenIds) -> None:
        self._rows = [_OpenRow(prompt_ids)]

    @property
    def context(self) -> TokenIds:
        """int32: what the next turn is sampled behind."""
        row = self._rows[-1]
        return np.concatenate([row.prompt_ids, *row.ids], dtype=np.int32)

    def add_turn(self, turn: Turn) -> tuple[int, int]:
        """What the policy sampled. Returns where it is: its row, and its first token in that row's response."""
        row = self._rows[-1]
        first = row.num_tokens
        row.spans = merge_spans(row.spans, first, turn.spans)
        row.add(turn.response_ids, turn.rollout_log_probs, sampled=True)
        return len(self._rows) - 1, first

    def add_told(self, ids: Sequence[int]) -> None:
        """What the policy is told: masked, with log-probs of 0, and of the version of what came before."""
        self._rows[-1].add(np.asarray(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.float32), sampled=False)

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """The template has rewritten history: the conversation goes on behind another prompt."""
        self._rows[-1].trim()
        self._rows.append(_OpenRow(np.asarray(prompt_ids, dtype=np.int32)))

    def rows(self) -> tuple[TokenRow, ...]:
        """All rows in which the policy has sampled something; a row ends with its last turn."""
        for row in self._rows:
            row.trim()
        return tuple(row.closed() for row in self._rows if row.num_tokens)
