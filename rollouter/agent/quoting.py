"""Text that was said and not written by the template: what looks like a special token in it stays plain text.

A tool's answer may contain `<|im_end|>`. Templates paste it as it is, and a tokenizer makes of it the very token that
ends a turn. So a mark that no tokenizer knows is put behind the first character of every lookalike before the template
sees the message, and text is encoded piece by piece between the marks: no piece holds a lookalike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollouter.template import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd0"
"""A noncharacter of Unicode. In what is said it is left out."""
_PLAIN_KEYS = frozenset({"role", "type", "id", "tool_call_id"})
"""Of a message: the template decides by these, and the model does not write them."""


def special_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, int]:
    """By text: the special tokens, and of the other added tokens those that the template itself writes."""
    added = tokenizer.added_tokens_decoder.items()
    return {
        token.content: number
        for number, token in added
        if token.content.strip() and (token.special or token.content in template)
    }


class Quoter:
    """Takes the power of special tokens from their names in messages."""

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


class TextEncoder:
    """Tokens of what a template wrote around quoted messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, anchor: str) -> None:
        """`anchor`: the name of a special token, for text of which nobody says what it stands behind; empty: there is
        none."""
        self._tokenizer = tokenizer
        self._anchor = anchor

    def start(self, text: str) -> list[int]:
        """Tokens of `text` where a conversation begins."""
        head, *rest = text.split(MARK)
        return [*encode_text(self._tokenizer, head), *self._pieces(rest, self._anchor)]

    def behind(self, text: str, token: str = "") -> list[int]:
        """Tokens of `text` behind the special token of that name.

        They depend on it: some tokenizers put a space before the first text of a sequence and no other, and some
        special tokens take the blanks behind them.
        """
        return self._pieces(text.split(MARK), token or self._anchor)

    def _pieces(self, pieces: Sequence[str], token: str) -> list[int]:
        skipped = len(encode_text(self._tokenizer, token)) if token else 0
        return [id_ for piece in pieces if piece for id_ in encode_text(self._tokenizer, token + piece)[skipped:]]
