"""The demonstrations of `asyncrl sft`: conversations as tokens, with a mask of the assistant's.

The tokens are those of a launch: the rendered prompt up to where the assistant's turn begins, then the turn up to its
end-of-turn token. Where the chat template rewrites earlier turns (it may leave out their thoughts), the conversation
becomes several demonstrations, each with the context as the model will see it, as trajectories do in a launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncrl.config.environment import local_path
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError, DataError
from asyncrl.core.types import Demonstration
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.chat_template import encode_text, end_token_ids, render
from rollouter.prompts.check import consequence_and_fix, rows_of
from rollouter.prompts.dataset import FileRows, OwnRows, RowSource, chat_messages, check_texts
from rollouter.prompts.media import has_media
from rollouter.user_code import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
_CHECKED_ROWS = 100
"""Rows of the user's function that are checked before a run."""


class LoadedDemonstrations(NamedTuple):
    rows: list[Demonstration]
    num_conversations: int
    num_left_out: int
    """Conversations that are longer than `sft.max_length`."""


class ConversationTokenizer:
    """Converts conversations to demonstrations.

    Args:
        end_ids: tokens that end a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Collection[int],
        template_kwargs: Mapping[str, Any],
        last_turn_only: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._template_kwargs = template_kwargs
        self._last_turn_only = last_turn_only

    def convert(self, messages: Messages, where: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[Demonstration]:
        """Return the demonstrations of a conversation: one, unless the chat template rewrites earlier turns.

        Raises:
            DataError: the chat template refuses the messages, or writes a turn of the assistant otherwise than a launch
                begins it.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        found: list[Demonstration] = []
        text, ids, mask = "", list[int](), list[bool]()
        for number in turns[-1:] if self._last_turn_only else turns:
            before = self._render(messages[:number], where, tools, begins_turn=True)
            after = self._render(messages[: number + 1], where, tools, begins_turn=False)
            if not after.startswith(before):
                raise DataError(
                    f"{where}: the chat template writes message {number} otherwise than it begins a turn of the "
                    f"assistant: {shown(before[-40:])} is not in it, so a launch would prompt the model with a text "
                    "that it has not learned. Put what is missing into the message, or set model.chat_template"
                )
            if not before.startswith(text):
                found.append(_demonstration(ids, mask))
                text, ids, mask = "", [], []
            context = encode_text(self._tokenizer, before[len(text) :])
            turn = encode_text(self._tokenizer, after[len(before) :])
            # An engine ends the turn at the first of these tokens, whatever the template writes behind it.
            ends = (place + 1 for place, token in enumerate(turn) if token in self._end_ids)
            trained = next(ends, len(turn))
            if not trained or not (ids or context):
                raise DataError(f"{where}: message {number}, or the prompt before it, has no tokens; correct the row")
            ids += context + turn
            mask += [False] * len(context) + [place < trained for place in range(len(turn))]
            text = after
        return [*found, _demonstration(ids, mask)]

    def _render(self, messages: Messages, where: str, tools: Sequence[Mapping[str, Any]], *, begins_turn: bool) -> str:
        try:
            return render(
                self._tokenizer,
                messages,
                add_generation_prompt=begins_turn,
                tools=tools,
                template_kwargs=self._template_kwargs,
            )
        except DataError as error:
            raise DataError(f"{where}: {error.message}", error.cause) from error


def conversation(row: Mapping[str, Any], where: str, config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a raw row, the last of which is the assistant's.

    Raises:
        DataError: fields are missing or of the wrong type, nothing is to be learned, or a text cannot be encoded; the
            message names the row and the field.
    """
    sft, prompt_key = config.sft, config.data.prompt_key
    check_texts(row, where)
    if row.get(sft.messages_key) is not None:
        field, messages = sft.messages_key, chat_messages(row[sft.messages_key], sft.messages_key, where)
    elif row.get(prompt_key) is not None and row.get(sft.response_key) is not None:
        response = row[sft.response_key]
        if not isinstance(response, str):
            raise DataError(f"{where}: field '{sft.response_key}' is {shown(response)}; expected a text")
        field, prompt = prompt_key, chat_messages(row[prompt_key], prompt_key, where)
        messages = (*prompt, {"role": "assistant", "content": response})
    else:
        raise DataError(
            f"{where}: there is neither a field '{sft.messages_key}' nor '{prompt_key}' and '{sft.response_key}'; "
            f"the row has {', '.join(map(str, row)) or 'no fields'}. Set sft.messages_key, or data.prompt_key and "
            "sft.response_key, to the names of your columns"
        )
    if has_media(row, messages):
        raise DataError(f"{where}: it has images or videos, which `asyncrl sft` does not train on; remove the row")
    last = max((number for number, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if messages[0]["role"] == "assistant" or last < 0:
        problem = "begins with a message of the assistant" if last >= 0 else "has no message of the assistant"
        raise DataError(f"{where}: field '{field}' {problem}, so there is nothing to answer; correct the row")
    return messages[: last + 1]


def load_demonstrations(config: Config, tokenizer: PreTrainedTokenizerBase, split: str) -> LoadedDemonstrations | None:
    """Open, check and tokenize the rows of a split, `train` or `val`. Blocking. None: there is no validation set.

    Raises:
        ConfigError: a file is missing, a row cannot be used, or all rows are too long.
    """
    data, key = config.data, f"data.{split}_files"
    convert = ConversationTokenizer(
        tokenizer,
        end_ids=end_token_ids(config.model, tokenizer),
        template_kwargs=config.model.chat_template_kwargs,
        last_turn_only=config.sft.turns == "last",
    ).convert
    try:
        rows: RowSource | None
        if data.dataset is not None:
            key, rows = "data.dataset", OwnRows.load(data, split)
        else:
            files = data.train_files if split == "train" else data.val_files
            cache = DataCache(Path(data.cache_dir).expanduser())
            rows = FileRows.open(files, key=key, cache=cache) if files else None
        if rows is None:
            return None
        limit = data.max_train_samples if split == "train" else data.max_val_samples
        loaded = _load(rows, len(rows) if limit is None else min(limit, len(rows)), config, convert)
    except DataError as error:
        raise ConfigError(f"{key}: {error.message}", error.cause) from error
    if loaded.num_left_out:
        logger.warning(
            "%s: %d of %d conversations are longer than sft.max_length = %d tokens and are left out",
            key,
            loaded.num_left_out,
            loaded.num_conversations,
            config.sft.max_length,
        )
    if not loaded.rows:
        raise ConfigError(
            f"{key}: no row is left of {loaded.num_conversations}, so there is nothing to learn. Raise "
            f"sft.max_length = {config.sft.max_length}, or check the files"
        )
    return loaded


def _load(
    rows: RowSource, number: int, config: Config, convert: Callable[..., list[Demonstration]]
) -> LoadedDemonstrations:
    kept: list[Demonstration] = []
    num_left_out = 0
    for index in range(number):
        row, where = rows.row(index), rows.where(index)
        made = convert(conversation(row, where, config), where, row.get("tools") or ())
        if any(len(one.token_ids) > config.sft.max_length for one in made):
            num_left_out += 1
        else:
            kept += made
    return LoadedDemonstrations(kept, number, num_left_out)


def _demonstration(ids: list[int], mask: list[bool]) -> Demonstration:
    """Return the demonstration without the tokens after the last trained one."""
    trained = np.array(mask, dtype=np.bool_)
    end = int(np.flatnonzero(trained)[-1]) + 1
    return Demonstration(np.array(ids[:end], dtype=np.int32), trained[:end])


def check_demonstrations(
    config: Config, *, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[ConfigProblem]:
    """Yield a problem for the first row of each data file that is no demonstration, among the rows that the run uses
    and that can be read within `limit_s`: without a tokenizer and a cache. Files that are not on this machine are
    skipped. Of the user's `data.dataset`, the first rows are checked."""
    until, data = clock() + limit_s, config.data
    if data.dataset is not None:
        yield from _check_own_rows(config, data.dataset)
        return
    for key, files, left in (
        ("data.train_files", data.train_files, data.max_train_samples),
        ("data.val_files", data.val_files, data.max_val_samples),
    ):
        for name in files:
            path = local_path(name)
            if path is None or not path.is_file():
                continue
            try:
                empty = True
                for row, where in rows_of(name, path):
                    if clock() > until:
                        return
                    if left == 0:
                        break
                    empty, left = False, None if left is None else left - 1
                    conversation(row, where, config)
                if empty and left != 0:
                    yield ConfigProblem(key, name, "the file is empty: it has no rows", "give a file with rows")
            except DataError as error:
                consequence, fix = consequence_and_fix(error)
                yield ConfigProblem(key, name, consequence, f"{fix} (docs/sft.md)")


def _check_own_rows(config: Config, name: str) -> Iterator[ConfigProblem]:
    try:
        for split in ("train", "val"):
            if (rows := OwnRows.load(config.data, split)) is not None:
                for index in range(min(len(rows), _CHECKED_ROWS)):
                    conversation(rows.row(index), rows.where(index), config)
    except AsyncRLError as error:
        fix = "correct the function; docs/sft.md says what a row is"
        yield ConfigProblem("data.dataset", name, error.message.removeprefix("data.dataset: "), fix)
