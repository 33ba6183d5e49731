"""Reads the rows of the data set, from files, from the user's function or from reasoning-gym, and checks them.

The field names are verl's, so verl's files load unchanged; `RowKeys` has other names of columns.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from asyncrl.config.import_path import call_problem, defined_at, load_function, nearest
from asyncrl.config.sections.data import DataConfig, ReasoningGymConfig
from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from asyncrl.core.text import MAX_DEPTH, TOO_DEEP, TOO_LONG, is_long
from asyncrl.core.types import Media
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.files import Report, find_files
from rollouter.prompts.media import extract, has_media
from rollouter.prompts.row_files import IndexedRows, open_rows
from rollouter.user_code import name_of, shown

logger = logging.getLogger(__name__)

RESERVED_SAMPLING_PARAMS = frozenset({"seed", "n", "logprobs", "prompt_logprobs", "output_kind"})
"""`seed` crashes the CPU engine; the trajectory format depends on the others."""


class RowSource(Protocol):
    """Raw rows in a fixed order."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return one row.

        Raises:
            DataError: the row cannot be read.
        """

    def where(self, index: int) -> str:
        """Return file and row number, for messages."""

    def directory(self, index: int) -> Path | None:
        """Return the base of relative paths in the row, or None for the working directory."""


class OwnRows:
    """The rows that the user's function `data.dataset` returns."""

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._name, self._rows = name, rows

    @classmethod
    def load(cls, data: DataConfig, split: str) -> Self | None:
        """Call `data.dataset`; None if it returns no rows for this split. Blocking.

        Raises:
            ConfigError: the function does not take the arguments, or returns no sequence.
            UserCodeError: the function raised.
        """
        key, name = "data.dataset", str(data.dataset)
        function = load_function(name, key, {})
        if problem := call_problem(function, split, **data.dataset_kwargs):
            raise ConfigError(f"{key}: {defined_at(function)}: it is called with (split, **dataset_kwargs): {problem}")
        rows = function(split, **data.dataset_kwargs)
        if rows is None and split != "train":
            return None
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            place = defined_at(function)
            raise ConfigError(f"{key}: {place}: it returned {shown(rows)} for {split!r}; expected a sequence of rows")
        return cls(f"{name} {split}", rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        try:
            row = self._rows[index]
        except Exception as error:
            raise UserCodeError.wrap(f"{self.where(index)}: {type(error).__name__}: {error}", error) from error
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where(index)}: {shown(row)} is not a row; return mappings with a `prompt`")
        return row

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def directory(self, index: int) -> Path | None:
        return None


class RowKeys(NamedTuple):
    """The columns of a row, by their meaning: `data.prompt_key` and its neighbours."""

    prompt: str = "prompt"
    ground_truth: str = "reward_model.ground_truth"
    data_source: str = "data_source"
    images: str = "images"
    videos: str = "videos"

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        return cls(data.prompt_key, data.ground_truth_key, data.reward_fn_key, data.image_key, data.video_key)

    def truth(self, row: Mapping[str, Any], where: str) -> Any:
        """Return the correct answer; None: the row has none."""
        if self.ground_truth in row:
            return row[self.ground_truth]
        value, path = row, ""
        *parents, last = self.ground_truth.split(".")
        for parent in parents:
            path += parent
            value = _mapping(value.get(parent), path, where)
            path += "."
        return value.get(last)


VERL_KEYS = RowKeys()


class PromptRow(NamedTuple):
    """A checked row."""

    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    media: tuple[Media, ...] = ()


def parse_row(
    row: Mapping[str, Any],
    where: str,
    *,
    keys: RowKeys = VERL_KEYS,
    directory: Path | None = None,
    checked: bool = False,
) -> PromptRow:
    """Check a raw row. Only the prompt is required: chat messages, or a string that becomes one user message.

    Args:
        keys: The names of the columns.
        directory: The base of relative paths of images and videos (`rollouter.prompts.media`).
        checked: Whether the row was parsed before, so that its texts and images need not be checked again.

    Raises:
        DataError: a field is missing, of the wrong type, or has text that cannot be encoded; the message names the row
            and the field.
    """
    if not checked:
        check_texts(row, where)
    source, truth = row.get(keys.data_source), keys.truth(row, where)
    extra_info = dict(_mapping(row.get("extra_info"), "extra_info", where))
    if extra_info.get("sampling_params") is not None:
        extra_info["sampling_params"] = _sampling_params(extra_info["sampling_params"], where)
    if keys.prompt not in row:
        raise DataError(
            f"{where}: there is no field {keys.prompt!r}; the row has {', '.join(map(str, row)) or 'no fields'}. Set "
            "data.prompt_key to the field with the chat messages, or the text, of the prompt"
        )
    messages = _messages(row[keys.prompt], keys.prompt, where)
    media: tuple[Media, ...] = ()
    columns = {"images": row.get(keys.images), "videos": row.get(keys.videos)}
    if has_media(columns, messages):
        messages, media = extract(columns, messages, directory, where, checked=checked)
    return PromptRow(
        messages=messages,
        data_source=("" if source is None else str(source)) or "default",
        ground_truth=truth,
        extra_info=extra_info,
        media=media,
    )


def check_texts(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError if the row has a text that cannot be encoded, or an integer that is too long, or is nested too
    deeply."""
    if found := _unusable(row):
        raise DataError(f"{where}: field '{found.place.removeprefix('.')}': {found.problem}")


class _Unusable(NamedTuple):
    """A value inside a row that cannot be used."""

    place: str
    """Its place below the value that was searched, such as `.content[0]`."""
    problem: str


def _unusable(value: Any, depth: int = 0) -> _Unusable | None:
    """Return the first text that cannot be encoded, integer that is too long, or value that is nested too deeply."""
    if isinstance(value, str):
        return _half_of_a_pair(value)
    if is_long(value):
        return _Unusable("", TOO_LONG)
    if not isinstance(value, Mapping | list | tuple):
        return None
    if depth == MAX_DEPTH:
        return _Unusable("", TOO_DEEP)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if found := _unusable(key) or _unusable(item, depth + 1):
                return _Unusable(f".{name_of(key)}{found.place}", found.problem)
        return None
    for number, item in enumerate(value):
        if found := _unusable(item, depth + 1):
            return _Unusable(f"[{number}]{found.place}", found.problem)
    return None


def _half_of_a_pair(text: str) -> _Unusable | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return _Unusable(
            "",
            f"character {error.start} is {text[error.start]!a}, half of a surrogate pair, which can be neither "
            "tokenized nor written; remove it, or write the whole pair",
        )
    return None


def chat_messages(value: Any, field: str, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the chat messages in a field; a text becomes one user message.

    Raises:
        DataError: it has no messages, or a message has no role or content.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, Sequence) or not value:
        raise DataError(
            f"{where}: field '{field}' is {_shown(value)}; expected a non-empty list of chat messages "
            '[{"role": "user", "content": "…"}] or a string'
        )
    for position, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: field '{field}[{position}]' is {_shown(message)}; expected 'role' and 'content'")
    # Parquet gives every message the columns of all messages; a template must not see absent keys.
    return tuple(
        {key: item for key, item in message.items() if item is not None or key == "content"} for message in value
    )


def _messages(prompt: Any, field: str, where: str) -> tuple[Mapping[str, Any], ...]:
    messages = chat_messages(prompt, field, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: field '{field}[{len(prompt) - 1}]' is a message of the assistant, {_shown(prompt[-1])}; "
            "expected the prompt to end where the model's turn begins, so remove the message (a correct answer belongs "
            "in reward_model.ground_truth)"
        )
    return messages


def _mapping(value: Any, field: str, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: field '{field}' is {_shown(value)}; expected a mapping")
    return value


def _sampling_params(value: Any, where: str) -> Mapping[str, Any]:
    field = "extra_info.sampling_params"
    params = {key: item for key, item in _mapping(value, field, where).items() if item is not None}
    if reserved := sorted(RESERVED_SAMPLING_PARAMS & params.keys()):
        raise DataError(f"{where}: field '{field}.{reserved[0]}' cannot be set per prompt; remove it")
    limit = params.get("max_tokens", 1)
    if not isinstance(limit, int) or limit < 1:
        raise DataError(f"{where}: field '{field}.max_tokens' is {_shown(limit)}; expected an integer of at least 1")
    stop = params.get("stop", ())
    if not isinstance(stop, str | list | tuple) or not all(isinstance(one, str) for one in stop):
        raise DataError(f"{where}: field '{field}.stop' is {_shown(stop)}; expected a text or a list of texts")
    return params


def _shown(value: Any) -> str:
    return "missing" if value is None else shown(value, 80)


# ------------------------------------------------------------------------------------------------ files


class FileRows:
    """The rows of Parquet and JSON files, one file after the other."""

    def __init__(self, files: Sequence[IndexedRows]) -> None:
        self.files = files
        self._ends = list(accumulate(len(file) for file in files))

    @classmethod
    def open(cls, names: Sequence[str], *, key: str, cache: DataCache, report: Report = logger.info) -> Self:
        """Find the files, download those that are elsewhere, and index or convert them.

        Args:
            key: the configuration key that names them.
            report: gets lines about the progress.

        Raises:
            ConfigError: a file is missing, of an unknown kind, or may not be read.
            InfraError: a server cannot be reached.
            DataError: a file cannot be read as what it should be.
        """
        found = [file for name in names for file in find_files(name, key, cache, report)]
        return cls([open_rows(file, cache) for file in found])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location, see `where`."""
        for file in self.files:
            yield from ((file.row(at), file.where(at)) for at in range(len(file)))

    def _locate(self, index: int) -> tuple[IndexedRows, int]:
        number = bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number - 1] if number else 0)

    def row(self, index: int) -> Mapping[str, Any]:
        file, at = self._locate(index)
        return file.row(at)

    def where(self, index: int) -> str:
        file, at = self._locate(index)
        return file.where(at)

    def directory(self, index: int) -> Path | None:
        return self._locate(index)[0].file.directory


# ------------------------------------------------------------------------------------------------ reasoning-gym


class GymRows:
    """Generated prompts of one reasoning-gym task. They depend only on the task, its arguments and the seed."""

    def __init__(self, config: ReasoningGymConfig, *, split: str, seed: int) -> None:
        """Generate the split's entries.

        reasoning-gym derives entry `i` from `seed + i`, so nearby seeds share almost all entries. The seeds of the two
        splits are therefore 2**31 apart.

        Raises:
            ConfigError: there is no such task, or it refuses the arguments.
            UserCodeError: the task fails to generate its entries.
        """
        base = int(np.random.SeedSequence(seed).generate_state(1)[0]) % 2**31
        size, start = (config.train_size, base) if split == "train" else (config.val_size, base + 2**31)
        self._task = config.task
        self._system = config.system_prompt
        dataset = _create_task(config, size, start)
        try:
            self._entries = [dataset[i] for i in range(size)]
        except Exception as error:
            raise UserCodeError.wrap(
                f"reasoning-gym task {config.task!r} failed to generate its entries", error
            ) from error

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, index: int) -> Mapping[str, Any]:
        entry = self._entries[index]
        system = [{"role": "system", "content": self._system}] if self._system else []
        return {
            "prompt": [*system, {"role": "user", "content": entry["question"]}],
            "data_source": self._task,
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"index": index, "entry": entry},
        }

    def where(self, index: int) -> str:
        return f"reasoning-gym {self._task}, entry {index}"

    def directory(self, index: int) -> Path | None:
        return None


def _create_task(config: ReasoningGymConfig, size: int, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.task not in DATASETS:
        near = nearest(config.task, list(DATASETS))
        raise ConfigError(f"data.reasoning_gym.task: reasoning-gym has no task {config.task!r}{near}")
    try:
        return reasoning_gym.create_dataset(config.task, size=size, seed=seed, **config.kwargs)
    except Exception as error:
        raise ConfigError.wrap(
            f"data.reasoning_gym.kwargs: task {config.task!r} refuses {config.kwargs!r}: {error}", error
        ) from error
