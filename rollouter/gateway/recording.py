"""Records one trajectory of an external agent as a tree of turns, and as rows of tokens to train on. Pure.

    request ─▶ find: which turn do these messages continue? ─▶ TurnPosition: the tokens to ask with ─▶ turn ─▶ add

    messages that continue the end of a row      the same row: masked tokens after it, and the turn
    … a turn in the middle of a row              a new row; its prompt repeats the earlier tokens
    … no recorded turn                           a new row; its prompt is the template's

So each turn is in exactly one row, and follows the context with which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.core.trajectory import TokenRow, ToolCall, TurnInfo
from asyncrl.core.types import FinishReason, TokenIds, Turn
from rollouter.agent.conversation import ConversationTokens
from rollouter.gateway.protocol import Message, arguments_text, fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class ConversationTurn:
    """A recorded turn, and the conversation up to it."""

    number: int
    """Position in the order in which turns were completed."""
    scheme: str | None
    """The template's inputs besides messages. None if no template was used: no request can continue such a turn."""
    messages: tuple[Message, ...]
    """The conversation up to and including the turn, in the template's form."""
    prints: tuple[str, ...]
    """The `fingerprint` of each message."""
    context: TokenIds
    """int32: the tokens before the turn."""
    ids: TokenIds
    """int32: the tokens of the turn."""
    parent: ConversationTurn | None
    faithful: bool
    """Whether the messages contain everything that was sampled."""

    @property
    def tokens(self) -> TokenIds:
        """int32: everything up to the end of the turn."""
        return np.concatenate([self.context, self.ids], dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TurnPosition:
    """The position of a requested turn in the tree."""

    scheme: str | None
    messages: tuple[Message, ...]
    """The messages that the turn answers."""
    parent: ConversationTurn | None
    delta: tuple[int, ...] | None
    """The tokens between the parent's tokens and the turn, or None if the turn begins a row."""
    context: TokenIds
    """int32: all tokens before the turn."""


@dataclass(slots=True)
class _RecordedRow:
    tokens: ConversationTokens
    prompt_tokens: int
    end: int
    """Number of tokens, including the prompt's."""
    last: ConversationTurn


@dataclass(slots=True)
class TrajectoryRecording:
    """The completed turns of one trajectory. If concurrent turns continue the same turn, the first to complete stays in
    its row, and the others begin new rows."""

    completed: list[ConversationTurn] = field(default_factory=list)
    _rows: list[_RecordedRow] = field(default_factory=list)
    _infos: list[TurnInfo] = field(default_factory=list)
    forks: int = 0
    """Number of rows that were begun because the template rewrote history."""

    def find(self, scheme: str, messages: Sequence[Message]) -> ConversationTurn | None:
        """Return the turn that `messages` continue: the end of the longest recorded prefix, the latest if several."""
        prints = tuple(fingerprint(message) for message in messages)
        found: ConversationTurn | None = None
        for one in self.completed:
            length = len(one.prints)
            if one.scheme != scheme or length >= len(prints) or (found and length < len(found.prints)):
                continue
            if one.prints == prints[:length]:
                found = one
        return found

    def tokens_left(self, position: TurnPosition, response_length: int) -> int:
        """Return how many tokens a turn at `position` may have if a row's response is limited to `response_length`."""
        row = self._row_at(position)
        taken = 0 if row is None else row.end - row.prompt_tokens + len(position.delta or ())
        return response_length - taken

    def add(
        self, position: TurnPosition, turn: Turn, info: TurnInfo, message: Message, *, faithful: bool = True
    ) -> ConversationTurn:
        """Record the completed turn at `position`.

        Args:
            info: Facts about the turn; this method fills in its row and its position in the row.
            message: The message that the agent received.
            faithful: Whether the message contains everything that was sampled.
        """
        messages, parent = (*position.messages, message), position.parent
        known = parent.prints if parent is not None else ()
        recorded = ConversationTurn(
            number=len(self.completed),
            scheme=position.scheme,
            messages=messages,
            prints=(*known, *(fingerprint(one) for one in messages[len(known) :])),
            context=position.context,
            ids=turn.response_ids,
            parent=parent,
            faithful=faithful and (parent is None or position.delta is None or parent.faithful),
        )
        row = self._row_at(position)
        if row is None:
            prompt_tokens = len(position.context)
            row = _RecordedRow(ConversationTokens(position.context), prompt_tokens, prompt_tokens, recorded)
            self._rows.append(row)
        elif position.delta:
            row.tokens.add_unsampled(position.delta)
            row.end += len(position.delta)
        _, first = row.tokens.add_turn(turn)
        row.end += len(turn.response_ids)
        row.last = recorded
        if parent is not None:
            self._add_call_results(parent, position.messages[len(parent.messages) :])
        number = next(at for at, one in enumerate(self._rows) if one is row)
        self._infos.append(replace(info, row=number, first_token=first, num_tokens=len(turn.response_ids)))
        self.completed.append(recorded)
        return recorded

    def rows(self) -> tuple[TokenRow, ...]:
        return tuple(row for one in self._rows for row in one.tokens.rows())

    def ends(self) -> tuple[ConversationTurn, ...]:
        """Return the last turn of each row."""
        return tuple(row.last for row in self._rows)

    def main(self) -> tuple[ConversationTurn, ...]:
        """Return the turns of the conversation that ends with the turn completed last, in order."""
        chain: list[ConversationTurn] = []
        one = self.completed[-1] if self.completed else None
        while one is not None:
            chain.append(one)
            one = one.parent
        return tuple(reversed(chain))

    def turns(self) -> tuple[TurnInfo, ...]:
        """Return all turns; the turns of the main conversation come last."""
        main = {one.number for one in self.main()}
        others = [info for number, info in enumerate(self._infos) if number not in main]
        return (*others, *(self._infos[number] for number in sorted(main)))

    def ended_by_length(self) -> bool:
        """Return whether the last turn of the main conversation was truncated at its token limit."""
        turns = self.turns()
        return bool(turns) and turns[-1].finish_reason is FinishReason.LENGTH

    def _row_at(self, position: TurnPosition) -> _RecordedRow | None:
        """Return the row that a turn at `position` continues, or None if the turn begins one."""
        if position.parent is None or position.delta is None:
            return None
        return next((row for row in self._rows if row.last is position.parent), None)

    def _add_call_results(self, turn: ConversationTurn, new: Sequence[Message]) -> None:
        """Add the results of a turn's calls. They are only for display."""
        info = self._infos[turn.number]
        ids = [call["id"] for call in turn.messages[-1].get("tool_calls", ())]
        results = {message.get("tool_call_id"): message["content"] for message in new if message["role"] == "tool"}
        calls = tuple(
            replace(call, result=results[id_]) if id_ in results and not call.result else call
            for call, id_ in zip(info.calls, ids, strict=True)
        )
        self._infos[turn.number] = replace(info, calls=calls)


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """Return the calls in a turn's message, without their results."""
    return tuple(
        ToolCall(call["function"]["name"], arguments_text(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
