"""Converts messages to tokens over all turns of a conversation. Sampled tokens are never tokenized again.

    chat = ChatTokenizer(tokenizer, tools=schemas, template_kwargs=model.chat_template_kwargs, end_ids=end_ids)
    parser = ToolCallParser("hermes", tokenizer, schemas, end_ids=chat.end_ids)
    ids = chat.prompt(messages)                          # the row's prompt
    turn = …generate(ids)…
    parsed = parser.parse(turn.response_ids)
    before = [*messages, assistant_message(parsed, turn=0)]
    answer = tool_message(call_id(turn=0, number=0), "add", chat.cut("3", 256, "middle"))
    more = chat.extend(before, [answer], turn.response_ids)
    if more.rewritten:                                   # the template rewrote history: a new row
        ids = more.ids
    else:                                                # the same row continues
        ids = [*ids, *turn.response_ids, *more.ids]
    problem = chat.difference(row_ids, messages)         # at the end; None if the template gives the same tokens

Messages before the assistant's first one come from the data set, and the special tokens in them keep their meaning. In
later messages they are escaped (in the assistant's, only those that end a turn): a tool's `<|im_end|>` stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.core.failures import DataError
from rollouter.prompts.chat_template import encode_text, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Side = Literal["left", "middle", "right"]

_CHARACTERS_PER_TOKEN = 128
"""Upper bound on the characters per token of useful text. Longer texts are cut before they are tokenized."""
_CUT_MARKS = ("…", "...", "")
"""Marks of a cut; the first one that the tokenizer can represent is used."""


def cut_text(
    text: str,
    max_tokens: int,
    side: Side,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], Any],
) -> str:
    """Shorten `text` to at most `max_tokens` tokens, including a mark at the cut. No character is split.

    `side` is where the text is cut: `left` keeps the end. The work is bounded: beyond some kilobytes, longer texts
    take no more time.
    """
    window = _CHARACTERS_PER_TOKEN * max_tokens
    if len(text) <= window and len(encode(text)) <= max_tokens:
        return text
    marks = ((mark, encode(mark)) for mark in _CUT_MARKS)
    mark = next(mark for mark, ids in marks if len(ids) <= max_tokens and decode(list(ids)) == mark)

    def keep(number: int) -> str:
        head = {"left": 0, "middle": (number + 1) // 2, "right": number}[side]
        return text[:head] + mark + text[len(text) - (number - head) :]

    # Fewer characters may take more tokens, so every candidate is counted.
    fits, most = 0, min(window, len(text) - 1)
    while fits < most:
        number = (fits + most + 1) // 2
        if len(encode(keep(number))) <= max_tokens:
            fits = number
        else:
            most = number - 1
    return keep(fits)


def exceeds(messages: Sequence[Mapping[str, Any]], max_tokens: int) -> bool:
    """Return whether messages are far too long for `max_tokens` tokens, without tokenizing them."""
    return sum(len(repr(message)) for message in messages) > _CHARACTERS_PER_TOKEN * max_tokens


MARK = "\ufdd0"
"""The mark that `SpecialTokenEscaper` inserts: a noncharacter of Unicode, which it first removes from messages."""
_PLAIN_KEYS = frozenset({"role", "type", "id", "tool_call_id"})
"""Keys of a message that the template uses for decisions, and whose values the model does not write."""


def special_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, int]:
    """Map texts to ids for all special tokens, and for those added tokens that the template itself writes."""
    added = tokenizer.added_tokens_decoder.items()
    return {
        token.content: number
        for number, token in added
        if token.content.strip() and (token.special or token.content in template)
    }


class SpecialTokenEscaper:
    """Escapes the names of special tokens in messages, so that they stay plain text.

    A tool's answer may contain `<|im_end|>`. Templates paste it unchanged, and a tokenizer would turn it into the very
    token that ends a turn. To prevent this, the escaper inserts a mark that no tokenizer knows after the first
    character of every lookalike, before the template renders the message. `TemplateTextEncoder` encodes the pieces of
    text between the marks separately; no piece contains a lookalike.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        names = sorted(tokens, key=len, reverse=True)
        # The first character of every occurrence, overlapping ones included.
        self._lookalike = re.compile(f"(?={'|'.join(map(re.escape, names))})(.)", re.DOTALL) if names else None

    def text(self, text: str) -> str:
        clean = text.replace(MARK, "")
        return self._lookalike.sub(rf"\1{MARK}", clean) if self._lookalike else clean

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if key in _PLAIN_KEYS else self._value(value) for key, value in message.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(key) if isinstance(key, str) else key: item if key in _PLAIN_KEYS else self._value(item)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._value(item) for item in value]
        return value


class TemplateTextEncoder:
    """Encodes text that a template has rendered from escaped messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, anchor: str) -> None:
        """`anchor` is the name of the special token that is assumed before text whose predecessor is unknown; it may
        be empty."""
        self._tokenizer = tokenizer
        self._anchor = anchor

    def start(self, text: str) -> list[int]:
        """Return the tokens of `text` at the beginning of a conversation."""
        head, *rest = text.split(MARK)
        return [*encode_text(self._tokenizer, head), *self._pieces(rest, self._anchor)]

    def after(self, text: str, token: str = "") -> list[int]:
        """Return the tokens of `text` after the special token named `token`, or after the anchor if `token` is empty.

        The tokens depend on the special token: some tokenizers put a space before the first text of a sequence only,
        and some special tokens absorb the blanks after them.
        """
        return self._pieces(text.split(MARK), token or self._anchor)

    def _pieces(self, pieces: Sequence[str], token: str) -> list[int]:
        skipped = len(encode_text(self._tokenizer, token)) if token else 0
        return [id_ for piece in pieces if piece for id_ in encode_text(self._tokenizer, token + piece)[skipped:]]


Message = Mapping[str, Any]

_USER = {"role": "user", "content": "a"}


@dataclass(frozen=True, slots=True)
class ChatExtension:
    """The tokens by which new messages extend a row."""

    ids: list[int]
    """Tokens that follow the sampled turn: its end-of-turn token if that is missing, the messages, and the header of
    the assistant's next turn. With `rewritten`, the tokens of the whole conversation, as the prompt of a new row."""
    rewritten: bool
    """Whether the template now renders the earlier conversation differently from what the model has seen."""


class ChatTokenizer:
    """One chat template with its tools and its tokenizer. It has no state and may be shared by conversations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        end_ids: Collection[int] = (),
    ) -> None:
        """`end_ids` are end-of-turn tokens in addition to the tokenizer's, see `chat_template.end_token_ids`."""
        self._tokenizer = tokenizer
        self._tools = tools
        self._template_kwargs = template_kwargs
        template = tokenizer.get_chat_template(None, tools=[dict(tool) for tool in tools] or None)
        self._takes_reasoning = "reasoning_content" in template
        self._special = special_tokens(tokenizer, template)
        eos = tokenizer.eos_token_id
        self._end_ids = frozenset(end_ids) | ({eos} if eos is not None else set())
        self._end_ids |= self._probe_end_token()
        ends = [text for text, number in self._special.items() if number in self._end_ids]
        self._escape_all = SpecialTokenEscaper(self._special)
        self._escape_ends = SpecialTokenEscaper(ends)
        self._encode = TemplateTextEncoder(tokenizer, anchor=next(iter([*ends, *self._special]), ""))
        self._max_calls = self._probe_max_calls() if "tool_calls" in template else 0

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTokenizer:
        """Return the same chat template with other tools."""
        other = copy(self)
        other._tools = tools
        return other

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's, those of the constructor, and the one that the template writes."""
        return self._end_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to where the assistant begins.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._encode.start(self._render(messages, generation_prompt=True))

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether the last token ends a turn, which means that the model ended it itself."""
        return len(ids) > 0 and int(ids[-1]) in self._end_ids

    def extend(self, before: Sequence[Message], new: Sequence[Message], sampled: Sequence[int]) -> ChatExtension:
        """Return the tokens of `new` messages after an assistant's turn.

        The row continues if the template still renders everything that the model has seen, including its last turn.
        The text that the template writes after the end of that turn may change, since it is no longer the last turn.

        Args:
            before: The conversation up to and including the assistant's parsed turn.
            new: The answers of tools and users.
            sampled: The turn's tokens.

        Raises:
            DataError: the template refuses the messages.
        """
        turn = self._last_turn(before)
        whole = self._render([*before, *new], generation_prompt=True)
        if not (turn.complete and whole.startswith(turn.context) and whole.startswith(turn.text)):
            return ChatExtension(self._encode.start(whole), rewritten=True)
        delta, mark = whole[len(turn.text) :], turn.end
        if not self.ends(sampled):
            return ChatExtension(self._encode.after(mark + delta), rewritten=False)
        if not mark and (name := self._name(sampled[-1])) and delta.startswith(name):
            # Some turns end with the token that begins the next one, which has been sampled already.
            delta, mark = delta.removeprefix(name), name
        return ChatExtension(self._encode.after(delta, mark), rewritten=False)

    def retokenized(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template gives a finished conversation.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._encode.start(self._render(messages, generation_prompt=False))

    def difference(self, row_ids: Sequence[int], messages: Sequence[Message]) -> str | None:
        """Describe where a row's tokens differ from those that the template gives the same messages, or return None.

        A last turn that the template renders differently from what was sampled is not compared.

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
        """Describe position and surroundings of the first token that differs, or return None.

        All end-of-turn tokens count as equal. `expected` may continue with an end-of-turn token and the template's
        text after it, because generation stops before them.
        """
        row, expected = [int(token) for token in row_ids], [int(token) for token in expected]
        pairs = enumerate(zip(row, expected, strict=False))
        differs = (at for at, (one, two) in pairs if one != two and not {one, two} <= self._end_ids)
        position = next(differs, min(len(row), len(expected)))
        if position == len(row) and self._is_tail(expected[position:]):
            return None
        begin, end = max(0, position - 4), position + 5
        return (
            f"token {position} of {len(row)}: the row has {self._describe(row[begin:end])}, the chat template gives "
            f"{self._describe(expected[begin:end])}"
        )

    def cut(self, text: str, max_tokens: int, side: Side) -> str:
        """Return `text` in at most `max_tokens`, counted as part of a message; see `cut_text`."""
        return cut_text(
            text,
            max_tokens,
            side,
            encode=lambda part: self._encode.after(self._escape_all.text(part)),
            decode=self._tokenizer.decode,
        )

    def _name(self, token: int) -> str:
        return next((name for name, number in self._special.items() if number == token), "")

    def _is_tail(self, ids: Sequence[int]) -> bool:
        others = [token for token in ids if token not in self._end_ids]
        return not others or not self._tokenizer.decode(others, skip_special_tokens=False).strip()

    def _describe(self, ids: Sequence[int]) -> str:
        return f"{self._tokenizer.decode(ids, skip_special_tokens=False)!r} {list(ids)}"

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._template(
            [self._fit_template(message) for message in self._escaped(messages)], generation_prompt=generation_prompt
        )

    def _template(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return render(
            self._tokenizer,
            messages,
            add_generation_prompt=generation_prompt,
            tools=self._tools,
            template_kwargs=self._template_kwargs,
        )

    def _escaped(self, messages: Sequence[Message]) -> list[Message]:
        roles = [message.get("role") for message in messages]
        given = roles.index("assistant") if "assistant" in roles else len(roles)
        rendered = [
            (self._escape_ends if message.get("role") == "assistant" else self._escape_all).message(message)
            for message in messages[given:]
        ]
        return [*messages[:given], *rendered]

    def _fit_template(self, message: Message) -> Message:
        """Move reasoning or calls that the template cannot render into the content, as the model wrote them."""
        text, calls = message.get("text"), message.get("tool_calls")
        if not isinstance(text, str):
            return message
        fitted = {key: value for key, value in message.items() if key != "text"}
        if isinstance(calls, Sequence) and len(calls) > self._max_calls:
            del fitted["tool_calls"]
            fitted.pop("reasoning_content", None)
            fitted["content"] = text
        elif "reasoning_content" in message and not self._takes_reasoning:
            head, close, _ = text.partition("</think>")
            del fitted["reasoning_content"]
            fitted["content"] = f"{head}{close}{message['content']}"
        return fitted

    def _last_turn(self, messages: Sequence[Message]) -> _LastTurn:
        context = self._render(messages[:-1], generation_prompt=True)
        rendered = self._render(messages, generation_prompt=False)
        begin = _shared(context, rendered)
        text, end = self._up_to_end(rendered, begin)
        # A difference in the trailing blanks of the header needs no new row.
        seen = context.rstrip()
        complete = begin >= len(seen) and _holds(
            rendered[begin:], self._fit_template(self._escape_ends.message(messages[-1]))
        )
        return _LastTurn(seen, text, end, complete)

    def _up_to_end(self, rendered: str, begin: int) -> tuple[str, str]:
        """Return `rendered` up to the token that ends the turn starting at `begin`, and that token's text or ""."""
        stop, found, ended = len(rendered), (rendered.rstrip(), ""), False
        while True:
            stop = len(rendered[:stop].rstrip())
            name = max((name for name in self._special if rendered.endswith(name, begin, stop)), key=len, default=None)
            if name is None:
                return found
            is_end = self._special[name] in self._end_ids
            if is_end or not ended:
                found, ended = (rendered[:stop], name), is_end
            stop -= len(name)

    def _probe_end_token(self) -> set[int]:
        """Return the token that the template writes after a turn, even if the tokenizer does not list it as an end."""
        answer = "bbbb"
        try:
            rendered = self._template([_USER, {"role": "assistant", "content": answer}, _USER], generation_prompt=False)
        except DataError:
            return set()
        behind = rendered.rpartition(answer)[2].lstrip()
        name = max((name for name in self._special if behind.startswith(name)), key=len, default=None)
        return {self._special[name]} if name else set()

    def probe_call(self) -> str:
        """Return a turn with one call, of the function `f` with the argument `a`, as the template writes it.

        Raises:
            DataError: the template refuses calls.
        """
        before = self._template([_USER], generation_prompt=True)
        rendered = self._template([_USER, _calls(1)], generation_prompt=False)
        return rendered[_shared(before, rendered) :]

    def _probe_max_calls(self) -> int:
        """Return how many calls the template renders in one turn: 0, 1 or any number."""
        taken = 0
        for number in (1, 16):
            try:
                self._template([_USER, _calls(number)], generation_prompt=False)
            except DataError:
                return taken
            taken = number
        return 1_000_000


@dataclass(frozen=True, slots=True)
class _LastTurn:
    """The last turn of a conversation as the template renders it."""

    context: str
    """The text before the turn."""
    text: str
    """The conversation up to the end of the turn."""
    end: str
    """The token that ends the turn."""
    complete: bool
    """Whether the rendered conversation contains context and turn unchanged."""


def _shared(one: str, two: str) -> int:
    """Return the length of the common prefix."""
    if two.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(two)))


def _holds(written: str, message: Message) -> bool:
    """Return whether `written` contains all parts of an assistant's message."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    texts = [message.get("content"), message.get("reasoning_content"), *names]
    return all(text.strip() in written for text in texts if isinstance(text, str))


def _calls(number: int) -> Message:
    calls = [
        {"type": "function", "id": f"{index:09}", "function": {"name": "f", "arguments": {"a": "b"}}}
        for index in range(number)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
