"""Renders and tokenizes chat messages: each prompt once, when it is loaded, and conversations after each turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.imports import collection_paused
from asyncrl.core.types import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[TokenIds], str]
Overlong = Literal["filter", "left", "right", "middle", "error"]


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with the configured chat template.

    Raises:
        ConfigError: there is no tokenizer, the template file is missing, or there is no template.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    name = model.tokenizer_path or model.path
    try:
        path = resolve(name)
        tokenizer = _tokenizer_class(Path(path)).from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError.wrap(f"{key}: no tokenizer can be loaded from {name!r}: {error}", error) from error
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(resolve(model.chat_template)).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"model.chat_template: {model.chat_template!r} cannot be read: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"model.chat_template: null, and the tokenizer of {name!r} has no chat template, so prompts cannot be "
            "rendered. Name a file with a Jinja template"
        )
    return tokenizer


def _tokenizer_class(path: Path) -> Any:
    """Return the class of transformers that loads the tokenizer in `path`.

    Importing `AutoTokenizer` takes 4 s of CPU time, mostly for torch, and a Rollouter needs torch for nothing else. It
    would choose the same class for a Llama whose tokenizer transformers 5 has saved.
    """
    with collection_paused():
        try:
            model, tokenizer = (
                json.loads((path / name).read_bytes()) for name in ("config.json", "tokenizer_config.json")
            )
            plain = tokenizer["tokenizer_class"] == "TokenizersBackend" and "auto_map" not in tokenizer
            if plain and model["model_type"] == "llama":
                from transformers import TokenizersBackend

                return TokenizersBackend
        except (OSError, ValueError, LookupError, TypeError):  # `AutoTokenizer` has the messages
            pass
        from transformers import AutoTokenizer

        return AutoTokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Render a conversation; with `add_generation_prompt`, up to where the assistant's turn begins.

    Raises:
        DataError: the chat template refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **template_kwargs,
        )
    except Exception as error:  # a template may raise anything for messages that it does not expect
        raise DataError(f"the chat template refuses the messages: {error}") from error
    assert isinstance(text, str)
    return text


def chosen_tools(extra_info: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the tools of a row: of the run's tools, those that its `tools_kwargs` names, or all if it names none.

    Null counts as not named, because Parquet stores it for the tools of other rows.
    """
    of_row = extra_info.get("tools_kwargs")
    named = [name for name in names if isinstance(of_row, Mapping) and of_row.get(name) is not None]
    return tuple(named or names)


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the text of a prompt, up to where the assistant's turn begins.

    Raises:
        DataError: the chat template refuses the messages.
    """
    try:
        return render(tokenizer, messages, add_generation_prompt=True, tools=tools, template_kwargs=template_kwargs)
    except DataError as error:
        raise DataError(f"{where}: the chat template refuses field 'prompt': {error.__cause__}") from error


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Tokenize rendered texts as `encode_text` does."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return ids


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize rendered text: special tokens in it are recognized, and none are added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def end_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens at which the engine ends a turn: the tokenizer's and those of `generation_config.json`."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(resolve(model.path)).eos_token_id
    except OSError:
        ids = None  # the model has no such file
    named = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys([*own, *named]))


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return a function that decodes response tokens without special tokens."""

    def decode(ids: TokenIds) -> str:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    return decode


def cut(ids: TokenIds, max_tokens: int, overlong: Overlong) -> TokenIds:
    """Return a prompt in at most `max_tokens` tokens, without its beginning (`left`), end or middle."""
    if len(ids) <= max_tokens:
        return ids
    match overlong:
        case "left":
            return ids[len(ids) - max_tokens :]
        case "right":
            return ids[:max_tokens]
        case "middle":
            head = max_tokens // 2
            return np.concatenate([ids[:head], ids[len(ids) - (max_tokens - head) :]])
    raise AssertionError(f"data.overlong_prompts={overlong} cuts no prompt")
