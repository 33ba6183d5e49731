"""A turn as server-sent events, sent while it is sampled. Pure.

unfinished turn ──▶ SettledText ──▶ TurnEvents.progress: role, reasoning, content
complete response ────────────────▶ TurnEvents.end: the rest, tool calls, finish reason, usage

Text is held back while it may still become something else: the first bytes of a character, the beginning of a stop
text, of a tool call or of `<think>`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from asyncrl.core.types import Turn
from rollouter.agent.parsing import before_any
from rollouter.gateway.protocol import (
    Body,
    Message,
    RequestError,
    ResponseHeader,
    TurnOptions,
    chat_log_probs,
    completion_log_probs,
)

DONE = b"data: [DONE]\n\n"
_CUT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, such as the first bytes of one."""


class IncrementalDecoder:
    """Decodes tokens as they arrive. Decodes only the latest ones each time, because a response may be long."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._begin = 0
        """The first token that is decoded again. It is not the newest one, because the text of a token may depend on
        the one before it."""
        self._boundary = 0
        """A later position between two tokens at which a character ends."""
        self._known = 0
        """Characters of the text from `_begin` on that `text` contains."""
        self.text = ""
        """The text of all tokens, without an incomplete character at its end."""

    def add(self, ids: Sequence[int]) -> None:
        self._ids += ids
        decoded = self._decode(self._ids[self._begin :])
        whole = decoded.rstrip(_CUT)
        self.text += whole[self._known :]
        self._known = max(self._known, len(whole))
        if whole == decoded and len(self._ids) > self._boundary:
            self._begin, self._boundary = self._boundary, len(self._ids)
            self._known = len(self._decode(self._ids[self._begin :]))


class SettledText:
    """The reasoning and the content of an unfinished turn that more tokens do not change."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        split: Callable[[str], tuple[str, str]] = lambda text: ("", text),
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """`split` returns the settled reasoning and content of a text. `end_ids` are tokens that the end of a turn
        omits. Content ends before the first text of `stop`."""
        self._decoder = IncrementalDecoder(decode)
        self._split = split
        self._end_ids = frozenset(end_ids)
        self._stop = stop
        self._ends: list[int] = []
        """Tokens of `end_ids` that may be the last ones."""
        self.reasoning = ""
        self.content = ""
        self.stopped = False
        """Whether a stop text has been sampled."""

    def add(self, ids: Sequence[int]) -> None:
        """Add the next tokens of the turn."""
        tokens = [*self._ends, *ids]
        kept = len(tokens)
        while kept and tokens[kept - 1] in self._end_ids:
            kept -= 1
        self._ends = tokens[kept:]
        if not kept or self.stopped:
            return
        self._decoder.add(tokens[:kept])
        self.reasoning, content = self._split(self._decoder.text)
        self.stopped = any(stop in content for stop in self._stop)
        self.content = before_any(content, self._stop)


class TurnEvents:
    """Encodes one turn: `progress` while it is sampled, then `end`. Joined, the deltas are the complete response."""

    def __init__(
        self,
        header: ResponseHeader,
        text: SettledText,
        options: TurnOptions,
        pieces: Callable[[Sequence[int]], list[str]],
        *,
        chat: bool,
    ) -> None:
        """`pieces` decodes each token by itself. `chat` distinguishes chat completions from completions."""
        self._text = text
        self._options = options
        self._pieces = pieces
        self._chat = chat
        self._head: Body = {
            "id": header.id, "created": header.created, "model": header.model,
            "object": "chat.completion.chunk" if chat else "text_completion",
        }  # fmt: skip
        if options.include_usage:
            self._head["usage"] = None
        self._begun = False
        self._read = 0
        """Tokens of the turn in `_text`."""
        self._logged = 0
        """Tokens whose log-probs have been sent."""
        self._piece_chars = 0
        """Characters of the pieces of these tokens."""
        self._reasoning = ""
        self._content = ""

    def progress(self, turn: Turn) -> bytes:
        """Return the events for an unfinished turn; empty if it has no new settled text."""
        ids = turn.response_ids[self._read :].tolist()
        self._read += len(ids)
        self._text.add(ids)
        reasoning = self._text.reasoning[len(self._reasoning) :]
        content = self._text.content[len(self._content) :]
        if not reasoning and not content:
            return b""
        log_probs = None
        if self._options.log_probs and not self._text.stopped:
            new = slice(self._logged, self._read)
            pieces, values = self._pieces(turn.response_ids[new].tolist()), turn.rollout_log_probs[new]
            if self._chat:
                log_probs = chat_log_probs(pieces, values)
            else:
                log_probs = completion_log_probs(pieces, values, first_offset=self._piece_chars)
            self._logged = self._read
            self._piece_chars += sum(map(len, pieces))
        return self._begin() + self._texts(reasoning, content, log_probs)

    def settle(self, message: Message) -> bool:
        """Make the complete message begin with the content that was sent, which the client will send back.

        Returns:
            Whether the message was so already. If not, its content is now what the client has.
        """
        if message["content"].startswith(self._content):
            return True
        message["content"] = self._content
        return False

    def end(self, response: Body) -> bytes:
        """Return the last events, which complete the turn to `response`."""
        (choice,) = response["choices"]
        log_probs = _from_token(choice["logprobs"], self._logged)
        if self._chat:
            answer = choice["message"]
            reasoning: str = answer.get("reasoning_content", "")
            reasoning = reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else ""
            content = (answer["content"] or "")[len(self._content) :]
            calls = "".join(
                self._chunk({"tool_calls": [{"index": index, **call}]})
                for index, call in enumerate(answer.get("tool_calls", ()))
            )
        else:
            reasoning, content, calls = "", choice["text"][len(self._content) :], ""
        events = self._begin() + self._texts(reasoning, content, log_probs if content else None) + calls.encode()
        events += self._chunk({}, choice["finish_reason"], None if content else log_probs).encode()
        if self._options.include_usage:
            events += _event({**self._head, "choices": [], "usage": response["usage"]}).encode()
        return events + DONE

    def _begin(self) -> bytes:
        if self._begun or not self._chat:
            return b""
        self._begun = True
        return self._chunk({"role": "assistant", "content": ""}).encode()

    def _texts(self, reasoning: str, content: str, log_probs: Body | None) -> bytes:
        self._reasoning += reasoning
        self._content += content
        parts = [("reasoning_content", reasoning, None if content else log_probs), ("content", content, log_probs)]
        return "".join(self._chunk({name: text}, None, logged) for name, text, logged in parts if text).encode()

    def _chunk(self, delta: Body, reason: str | None = None, log_probs: Body | None = None) -> str:
        change = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **change, "logprobs": log_probs, "finish_reason": reason}
        return _event({**self._head, "choices": [choice]})


def error_event(error: RequestError) -> bytes:
    """Return the event for a failure after the stream has begun. No `[DONE]` follows it."""
    return _event(error.body).encode()


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _from_token(log_probs: Body | None, first: int) -> Body | None:
    """Return the log-probs of a response from token `first` on."""
    if log_probs is None:
        return None
    return {name: value[first:] if isinstance(value, list) else value for name, value in log_probs.items()}
