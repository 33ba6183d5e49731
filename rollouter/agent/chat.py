"""Messages to tokens, over all turns of a conversation. What the model sampled is never tokenized again.

    chat = Chat(tokenizer, tools=schemas, template_kwargs=model.chat_template_kwargs, end_ids=end_ids)
    parser = CallParser("hermes", tokenizer, schemas, end_ids=chat.end_ids)
    ids = chat.prompt(messages)                          # the row's prompt
    turn = …generate(ids)…
    parsed = parser.parse(turn.response_ids)
    before = [*messages, assistant_message(parsed, turn=0)]
    answer = tool_message(call_id(turn=0, number=0), "add", chat.cut("3", 256, "middle"))
    more = chat.extend(before, [answer], turn.response_ids)
    if more.rewritten:                                   # the template changed what was there: a new row
        ids = more.ids
    else:                                                # the same row: these go behind what was sampled, unmasked
        ids = [*ids, *turn.response_ids, *more.ids]
    problem = chat.difference(row_ids, messages)         # at the end; None: the template would give the same tokens

Messages before the first of the assistant are the data set's, and special tokens in them are special. What is said
later is not: a tool's `<|im_end|>` stays text (`rollouter.agent.quoting`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asyncrl.failures import DataError
from rollouter.agent.cutting import Side, cut_text
from rollouter.agent.quoting import Quoter, TextEncoder, special_tokens
from rollouter.template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class Extension:
    """What new messages make of a row's tokens."""

    ids: list[int]
    """To put behind what was sampled: the end of the assistant's turn if that is missing, the messages, and the header
    of the assistant's next turn. With `rewritten`: the whole conversation, the prompt of a new row."""
    rewritten: bool
    """The template writes the conversation so far in another way than the model has seen it."""


class Chat:
    """One chat template with its tools, and the tokenizer behind it. Holds no conversation; may be shared."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        end_ids: Collection[int] = (),
    ) -> None:
        """`end_ids`: tokens that end a turn besides the tokenizer's own: `rollouter.template.end_token_ids`."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._template_kwargs = template_kwargs
        template = tokenizer.get_chat_template(None, tools=[dict(tool) for tool in tools] or None)
        self._takes_reasoning = "reasoning_content" in template
        self._special = special_tokens(tokenizer, template)
        eos = tokenizer.eos_token_id
        self._end_ids = frozenset(end_ids) | ({eos} if eos is not None else set())
        self._end_ids |= self._template_end()
        ends = [text for text, number in self._special.items() if number in self._end_ids]
        self._by_others = Quoter(self._special)
        self._by_assistant = Quoter(ends)
        self._encode = TextEncoder(tokenizer, anchor=next(iter([*ends, *self._special]), ""))
        self._max_calls = self._calls_taken() if "tool_calls" in template else 0

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's own, those it was told of, and the one that the template writes."""
        return self._end_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation up to where the assistant begins.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._encode.start(self._render(messages, go_on=True))

    def ends(self, ids: Sequence[int]) -> bool:
        """The model ended its turn itself: the last token says so."""
        return len(ids) > 0 and int(ids[-1]) in self._end_ids

    def extend(self, before: Sequence[Message], new: Sequence[Message], sampled: Sequence[int]) -> Extension:
        """Tokens for `new` messages behind an assistant's turn.

        The row is kept if the template goes on to write all that the model has seen, its turn included. What it does
        behind the end of that turn is its own affair: the turn was the last one, and is not any more.

        Args:
            before: The conversation, up to and with the assistant's turn as it was parsed.
            new: What tools and users say to it.
            sampled: The turn's tokens.

        Raises:
            DataError: the template refuses the messages.
        """
        turn = self._last_turn(before)
        whole = self._render([*before, *new], go_on=True)
        if not (turn.complete and whole.startswith(turn.context) and whole.startswith(turn.text)):
            return Extension(self._encode.start(whole), rewritten=True)
        delta, mark = whole[len(turn.text) :], turn.end
        if not self.ends(sampled):
            return Extension(self._encode.behind(mark + delta), rewritten=False)
        if not mark and (name := self._name(sampled[-1])) and delta.startswith(name):
            # Some turns end with the token that begins the next one, and that is there already.
            delta, mark = delta.removeprefix(name), name
        return Extension(self._encode.behind(delta, mark), rewritten=False)

    def retokenized(self, messages: Sequence[Message]) -> list[int]:
        """The template's own tokens of a finished conversation.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._encode.start(self._render(messages, go_on=False))

    def difference(self, row_ids: Sequence[int], messages: Sequence[Message]) -> str | None:
        """Where the tokens of a row are not the template's own of the same messages, in words; None: nowhere.

        A last turn that the template does not write as it was said is not compared.

        Args:
            row_ids: Prompt and response.
            messages: The conversation up to the end of that row.

        Raises:
            DataError: the template refuses the messages.
        """
        if messages[-1].get("role") == "assistant" and not self._last_turn(messages).complete:
            expected = self.prompt(messages[:-1])
            return self.first_difference(row_ids[: len(expected)], expected)
        return self.first_difference(row_ids, self.retokenized(messages))

    def first_difference(self, row_ids: Sequence[int], expected: Sequence[int]) -> str | None:
        """Position and surroundings of the first token that differs; None: there is none.

        One end-of-turn token is as good as another. `expected` may go on with one and what the template writes behind
        it: generation stops before.
        """
        row, expected = [int(token) for token in row_ids], [int(token) for token in expected]
        pairs = enumerate(zip(row, expected, strict=False))
        differs = (at for at, (one, two) in pairs if one != two and not {one, two} <= self._end_ids)
        position = next(differs, min(len(row), len(expected)))
        if position == len(row) and self._is_tail(expected[position:]):
            return None
        begin, end = max(0, position - 4), position + 5
        return (
            f"token {position} of {len(row)}: the row has {self._shown(row[begin:end])}, the chat template gives "
            f"{self._shown(expected[begin:end])}"
        )

    def cut(self, text: str, max_tokens: int, side: Side) -> str:
        """`text` in at most `max_tokens` as it will stand in a message; see `rollouter.agent.cutting`."""
        return cut_text(
            text,
            max_tokens,
            side,
            encode=lambda part: self._encode.behind(self._by_others.text(part)),
            decode=self._tokenizer.decode,
        )

    def _name(self, token: int) -> str:
        return next((name for name, number in self._special.items() if number == token), "")

    def _is_tail(self, ids: Sequence[int]) -> bool:
        others = [token for token in ids if token not in self._end_ids]
        return not others or not self._tokenizer.decode(others, skip_special_tokens=False).strip()

    def _shown(self, ids: Sequence[int]) -> str:
        return f"{self._tokenizer.decode(ids, skip_special_tokens=False)!r} {list(ids)}"

    def _render(self, messages: Sequence[Message], *, go_on: bool) -> str:
        return self._template([self._fitting(message) for message in self._quoted(messages)], go_on=go_on)

    def _template(self, messages: Sequence[Message], *, go_on: bool) -> str:
        return render(
            self._tokenizer,
            messages,
            add_generation_prompt=go_on,
            tools=self._tools,
            template_kwargs=self._template_kwargs,
        )

    def _quoted(self, messages: Sequence[Message]) -> list[Message]:
        roles = [message.get("role") for message in messages]
        given = roles.index("assistant") if "assistant" in roles else len(roles)
        said = [
            (self._by_assistant if message.get("role") == "assistant" else self._by_others).message(message)
            for message in messages[given:]
        ]
        return [*messages[:given], *said]

    def _fitting(self, message: Message) -> Message:
        """A turn whose reasoning or calls the template has no place for becomes content, as the model wrote it."""
        if "text" not in message:
            return message
        fitting = {key: value for key, value in message.items() if key != "text"}
        text: str = message["text"]
        if len(message.get("tool_calls", ())) > self._max_calls:
            del fitting["tool_calls"]
            fitting.pop("reasoning_content", None)
            fitting["content"] = text
        elif "reasoning_content" in message and not self._takes_reasoning:
            head, close, _ = text.partition("</think>")
            del fitting["reasoning_content"]
            fitting["content"] = f"{head}{close}{message['content']}"
        return fitting

    def _last_turn(self, messages: Sequence[Message]) -> _LastTurn:
        context = self._render(messages[:-1], go_on=True)
        said = self._render(messages, go_on=False)
        begin = _shared(context, said)
        text, end = self._up_to_end(said, begin)
        # A header's last blanks are not worth a new row.
        seen = context.rstrip()
        complete = begin >= len(seen) and _holds(said[begin:], self._fitting(self._by_assistant.message(messages[-1])))
        return _LastTurn(seen, text, end, complete)

    def _up_to_end(self, said: str, begin: int) -> tuple[str, str]:
        """`said` up to the token that ends the turn which starts at `begin`, and that token's text; empty: the template
        writes none."""
        stop, found, ended = len(said), (said.rstrip(), ""), False
        while True:
            stop = len(said[:stop].rstrip())
            name = max((name for name in self._special if said.endswith(name, begin, stop)), key=len, default=None)
            if name is None:
                return found
            is_end = self._special[name] in self._end_ids
            if is_end or not ended:
                found, ended = (said[:stop], name), is_end
            stop -= len(name)

    def _template_end(self) -> set[int]:
        """The token that the template writes behind a turn, whether or not the tokenizer knows it to end one."""
        answer = "bbbb"
        try:
            said = self._template([_USER, {"role": "assistant", "content": answer}, _USER], go_on=False)
        except DataError:
            return set()
        behind = said.rpartition(answer)[2].lstrip()
        name = max((name for name in self._special if behind.startswith(name)), key=len, default=None)
        return {self._special[name]} if name else set()

    def _calls_taken(self) -> int:
        """How many calls the template takes in one turn: 0, 1 or any number."""
        taken = 0
        for number in (1, 16):
            try:
                self._template([_USER, _calls(number)], go_on=False)
            except DataError:
                return taken
            taken = number
        return 1_000_000


@dataclass(frozen=True, slots=True)
class _LastTurn:
    """Of a conversation that the assistant has ended."""

    context: str
    """What the model had seen when it began."""
    text: str
    """The conversation, up to the end of the turn."""
    end: str
    """The token that ends it."""
    complete: bool
    """Context and turn are in the conversation as they were."""


def _shared(one: str, two: str) -> int:
    """Characters that both begin with."""
    if two.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(two)))


def _holds(written: str, message: Message) -> bool:
    """The template wrote all of an assistant's message."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    texts = [message.get("content"), message.get("reasoning_content"), *names]
    return all(text.strip() in written for text in texts if isinstance(text, str))


def _calls(number: int) -> Message:
    calls = [
        {"type": "function", "id": f"{index:09}", "function": {"name": "f", "arguments": {"a": "b"}}}
        for index in range(number)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
