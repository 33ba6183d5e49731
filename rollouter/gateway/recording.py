"""What one trajectory's agent has asked for: a tree of turns, and the rows of tokens that it makes. Pure.

    request ─▶ find: which turn do these messages go on from? ─▶ Place: the tokens to ask with ─▶ turn ─▶ add

    messages that go on from a row's end         the same row: told tokens behind it, masked, and the turn
    … from a turn in the middle of a row         a new row; its prompt is what was before, token by token
    … from nothing that was said here            a new row; its prompt is the template's

So a turn is in one row only, under the very context that it was sampled in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.trajectory import TokenRow, ToolCall, TurnInfo
from asyncrl.types import TokenIds, Turn
from rollouter.agent.tokens import ConversationTokens
from rollouter.gateway.messages import Message, fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A turn, and the conversation up to it."""

    number: int
    """Of the turn, in the order in which turns were complete."""
    scheme: str | None
    """What the template was given besides messages; None: there was no template, and nothing goes on from here."""
    messages: tuple[Message, ...]
    """Up to and with the turn, as the template gets them."""
    prints: tuple[str, ...]
    """Of `messages`, see `fingerprint`."""
    context: TokenIds
    """int32: what it was sampled behind."""
    ids: TokenIds
    """int32: the turn itself."""
    parent: Said | None
    whole: bool
    """The messages say all that was sampled."""

    @property
    def tokens(self) -> TokenIds:
        """int32: everything up to the end of the turn."""
        return np.concatenate([self.context, self.ids], dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a turn that is asked for will stand."""

    scheme: str | None
    messages: tuple[Message, ...]
    """What the turn answers."""
    parent: Said | None
    told: tuple[int, ...] | None
    """What stands between the parent's tokens and the turn; None: the turn begins a row."""
    context: TokenIds
    """int32: all of what it is asked with."""


@dataclass(slots=True)
class _Row:
    tokens: ConversationTokens
    prompt_tokens: int
    end: int
    """Tokens in it, the prompt's too."""
    last: Said


@dataclass(slots=True)
class Recording:
    """Of one trajectory. Turns are added when they are complete; places found before may be taken by then."""

    said: list[Said] = field(default_factory=list)
    _rows: list[_Row] = field(default_factory=list)
    _infos: list[TurnInfo] = field(default_factory=list)
    forks: int = 0
    """Rows that were begun because the template rewrote history."""

    def find(self, scheme: str, messages: Sequence[Message]) -> Said | None:
        """The turn that `messages` go on from: the longest conversation that they begin with, of these the last."""
        prints = tuple(fingerprint(message) for message in messages)
        found: Said | None = None
        for one in self.said:
            length = len(one.prints)
            if one.scheme != scheme or length >= len(prints) or (found and length < len(found.prints)):
                continue
            if one.prints == prints[:length]:
                found = one
        return found

    def room_in_row(self, place: Place, response_length: int) -> int:
        """Most tokens of the turn at `place` within a row's `response_length`."""
        row = self._row_of(place)
        taken = 0 if row is None else row.end - row.prompt_tokens + len(place.told or ())
        return response_length - taken

    def add(
        self,
        place: Place,
        turn: Turn,
        info: TurnInfo,
        message: Message,
        *,
        whole: bool = True,
    ) -> Said:
        """The turn at `place` is complete. `info`: its row and place are filled in here.

        Args:
            message: What the agent was told of it.
            whole: It says all that was sampled.
        """
        said = self._said(place, turn, message, whole=whole)
        row = self._row_of(place)
        if row is None:
            prompt_tokens = len(place.context)
            row = _Row(ConversationTokens(place.context), prompt_tokens, prompt_tokens, said)
            self._rows.append(row)
        elif place.told:
            row.tokens.add_told(place.told)
            row.end += len(place.told)
        _, first = row.tokens.add_turn(turn)
        row.end += len(turn.response_ids)
        row.last = said
        if place.parent is not None:
            self._answer_calls(place.parent, place.messages[len(place.parent.messages) :])
        number = next(at for at, one in enumerate(self._rows) if one is row)
        self._infos.append(replace(info, row=number, first_token=first, num_tokens=len(turn.response_ids)))
        self.said.append(said)
        return said

    def rows(self) -> tuple[TokenRow, ...]:
        return tuple(row for one in self._rows for row in one.tokens.rows())

    def ends(self) -> tuple[Said, ...]:
        """The last turn of each row."""
        return tuple(row.last for row in self._rows)

    def main(self) -> tuple[Said, ...]:
        """The conversation whose turn was complete last, from its first turn on."""
        chain: list[Said] = []
        one = self.said[-1] if self.said else None
        while one is not None:
            chain.append(one)
            one = one.parent
        return tuple(reversed(chain))

    def turns(self) -> tuple[TurnInfo, ...]:
        """All turns, those of the main conversation at the end: the last one is what was said last."""
        main = {one.number for one in self.main()}
        aside = [info for number, info in enumerate(self._infos) if number not in main]
        return (*aside, *(self._infos[number] for number in sorted(main)))

    def _said(self, place: Place, turn: Turn, message: Message, *, whole: bool) -> Said:
        messages, parent = (*place.messages, message), place.parent
        known = parent.prints if parent is not None else ()
        return Said(
            number=len(self.said),
            scheme=place.scheme,
            messages=messages,
            prints=(*known, *(fingerprint(one) for one in messages[len(known) :])),
            context=place.context,
            ids=turn.response_ids,
            parent=parent,
            whole=whole and (parent is None or place.told is None or parent.whole),
        )

    def _row_of(self, place: Place) -> _Row | None:
        """The row that goes on at `place`; None: it begins one."""
        if place.parent is None or place.told is None:
            return None
        return next((row for row in self._rows if row.last is place.parent), None)

    def _answer_calls(self, said: Said, new: Sequence[Message]) -> None:
        """What tools said to a turn's calls, for people who look at it."""
        info = self._infos[said.number]
        ids = [call["id"] for call in said.messages[-1].get("tool_calls", ())]
        told = {message.get("tool_call_id"): message["content"] for message in new if message["role"] == "tool"}
        calls = tuple(
            replace(call, result=told[id_]) if id_ in told and not call.result else call
            for call, id_ in zip(info.calls, ids, strict=True)
        )
        self._infos[said.number] = replace(info, calls=calls)


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """The calls in a turn's message; what became of them is the agent's affair."""
    return tuple(
        ToolCall(call["function"]["name"], _written(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )


def _written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
