"""From chat messages to token ids, once. From here on the system speaks token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from asyncrl.assets import resolve
from asyncrl.config.schema import ModelConfig
from asyncrl.failures import ConfigError, DataError
from asyncrl.types import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[TokenIds], str]
Overlong = Literal["filter", "left", "right", "middle", "error"]


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer with the chat template of the configuration.

    Raises:
        ConfigError: no tokenizer there, the template file is missing, or there is no template at all.
    """
    from transformers import AutoTokenizer

    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    name = model.tokenizer_path or model.path
    try:
        path = resolve(name)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError.wrap(f"{key}: no tokenizer can be loaded from {name!r}: {error}", error) from error
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(resolve(model.chat_template)).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"model.chat_template: {model.chat_template!r} cannot be read: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"model.chat_template: null, and the tokenizer of {name!r} has no chat template; prompts cannot become "
            "tokens. Name a file with a Jinja template"
        )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], where: str) -> list[int]:
    """The token ids of a conversation, up to where the assistant's turn begins.

    Raises:
        DataError: the chat template refuses the messages.
    """
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise DataError(f"{where}: the chat template refuses field 'prompt': {error}") from error
    if not ids:
        raise DataError(f"{where}: field 'prompt' has no tokens after the chat template")
    return ids


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Text of response tokens, special tokens left out."""

    def decode(ids: TokenIds) -> str:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    return decode


def fit(ids: list[int], max_tokens: int, overlong: Overlong, where: str) -> list[int] | None:
    """`ids` in at most `max_tokens`; None: filtered out. `left` cuts on the left and so keeps the end.

    Raises:
        DataError: it is too long and `overlong` is `error`.
    """
    if len(ids) <= max_tokens:
        return ids
    match overlong:
        case "filter":
            return None
        case "left":
            return ids[len(ids) - max_tokens :]
        case "right":
            return ids[:max_tokens]
        case "middle":
            head = max_tokens // 2
            return ids[:head] + ids[len(ids) - (max_tokens - head) :]
        case "error":
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = {max_tokens}; raise "
                "it, or set data.overlong_prompts to filter, left, right or middle"
            )
