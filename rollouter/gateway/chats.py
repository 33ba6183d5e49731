"""Chat templates and parsers by what requests give them: tools, and arguments of the template."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio import to_thread

from asyncrl.failures import ConfigError
from rollouter.agent.chat import Chat
from rollouter.agent.parsing import NO_TOOLS, CallParser
from rollouter.gateway.requests import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

MAX_CHATS = 256
"""Sets of tools that are kept ready; others are made again when they come."""


class Reading(NamedTuple):
    """How one kind of request becomes tokens, and its turns messages."""

    chat: Chat
    parser: CallParser


class ChatBook:
    """All that the run's agents use. One for all trajectories."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        format: str,
        template_kwargs: Mapping[str, object],
        end_ids: Collection[int],
    ) -> None:
        """Load the parser of `format`, so that the first request need not wait for vLLM. Blocking, some seconds.

        A parser that does not fit the tokenizer is an error of the first request with tools: a run may have none.
        """
        self._tokenizer = tokenizer
        self._format = format
        self._template_kwargs = template_kwargs
        self._end_ids = end_ids
        self._known: OrderedDict[str, Reading] = OrderedDict()
        self._making = anyio.Lock()
        self._unfit: ConfigError | None = None
        try:
            CallParser(format, tokenizer, end_ids=end_ids)
        except ConfigError as error:
            self._unfit = error

    async def reading(self, request: ChatRequest) -> Reading:
        """
        Raises:
            ConfigError: the request has tools, and `rollout.multi_turn.format` does not fit the model.
        """
        key = json.dumps([request.scheme, request.parse_calls])
        if key not in self._known:
            async with self._making:
                if key not in self._known:
                    self._known[key] = await to_thread.run_sync(self._make, request)
            while len(self._known) > MAX_CHATS:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return self._known[key]

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """What the tokens say; `special`: with the names of special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        assert isinstance(text, str)
        return text

    def tokens(self, text: str) -> list[int]:
        """Of a prompt that is no conversation, with whatever the tokenizer puts before it."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token by itself."""
        return [self.text([token], special=True) for token in ids]

    def _make(self, request: ChatRequest) -> Reading:
        if request.parse_calls and self._unfit is not None:
            raise self._unfit
        chat = Chat(
            self._tokenizer,
            tools=request.tools,
            template_kwargs={**self._template_kwargs, **request.template_kwargs},
            end_ids=self._end_ids,
        )
        format = self._format if request.parse_calls else NO_TOOLS
        return Reading(chat, CallParser(format, self._tokenizer, request.tools, end_ids=chat.end_ids))
