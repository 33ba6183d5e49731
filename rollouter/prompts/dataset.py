"""Reads the rows of the data set, from files or from reasoning-gym, and checks them.

`datasets` reads the files and keeps them memory-mapped in the run's cache. Nothing is written next to the files, and
nothing is downloaded. The field names are verl's, so verl's files load unchanged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from asyncrl.assets import resolve
from asyncrl.config.import_path import call_problem, defined_at, load_function, nearest
from asyncrl.config.sections.data import DataConfig, ReasoningGymConfig
from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from asyncrl.core.text import MAX_DEPTH, TOO_DEEP, parse_json
from asyncrl.core.types import Media
from rollouter.prompts.media import extract, has_media
from rollouter.user_code import shown

RESERVED_SAMPLING_PARAMS = frozenset({"seed", "n", "logprobs", "prompt_logprobs", "output_kind"})
"""`seed` crashes the CPU engine; the trajectory format depends on the others."""

_BATCH_ROWS = 100


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
            raise ConfigError(f"{key}: {name} returned {shown(rows)} for {split!r}; expected a sequence of rows")
        return cls(f"{name} {split}", rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where(index)}: {shown(row)} is not a row; return mappings with a `prompt`")
        return row

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def directory(self, index: int) -> Path | None:
        return None


class PromptRow(NamedTuple):
    """A checked row."""

    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    media: tuple[Media, ...] = ()


def parse_row(row: Mapping[str, Any], where: str, *, directory: Path | None = None, checked: bool = False) -> PromptRow:
    """Check a raw row. Only `prompt` is required: chat messages, or a string that becomes one user message.

    Args:
        directory: The base of relative paths of images and videos (`rollouter.prompts.media`).
        checked: Whether the row was parsed before, so that its texts and images need not be checked again.

    Raises:
        DataError: a field is missing, of the wrong type, or has text that cannot be encoded; the message names the row
            and the field.
    """
    if not checked and (found := _unusable(row)):
        raise DataError(f"{where}: field '{found.place.removeprefix('.')}': {found.problem}")
    source = row.get("data_source")
    reward_model = _mapping(row.get("reward_model"), "reward_model", where)
    extra_info = dict(_mapping(row.get("extra_info"), "extra_info", where))
    if extra_info.get("sampling_params") is not None:
        extra_info["sampling_params"] = _sampling_params(extra_info["sampling_params"], where)
    if "prompt" not in row:
        raise DataError(
            f"{where}: there is no field 'prompt'; the row has {', '.join(map(str, row)) or 'no fields'}. Rename the "
            "field with the chat messages, or the text, of the prompt"
        )
    messages = _messages(row["prompt"], where)
    media: tuple[Media, ...] = ()
    if has_media(row, messages):
        messages, media = extract(row, messages, directory, where, checked=checked)
    return PromptRow(
        messages=messages,
        data_source="default" if source is None else str(source),
        ground_truth=reward_model.get("ground_truth"),
        extra_info=extra_info,
        media=media,
    )


class _Unusable(NamedTuple):
    """A value inside a row that cannot be used."""

    place: str
    """Its place below the value that was searched, such as `.content[0]`."""
    problem: str


def _unusable(value: Any, depth: int = 0) -> _Unusable | None:
    """Return the first text that cannot be encoded, or the first value that is nested too deeply."""
    if isinstance(value, str):
        return _half_of_a_pair(value)
    if not isinstance(value, Mapping | list | tuple):
        return None
    if depth == MAX_DEPTH:
        return _Unusable("", TOO_DEEP)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if found := _half_of_a_pair(str(key)) or _unusable(item, depth + 1):
                return _Unusable(f".{key}{found.place}", found.problem)
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


def _messages(prompt: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(
            f"{where}: field 'prompt' is {_shown(prompt)}; expected a non-empty list of chat messages "
            '[{"role": "user", "content": "…"}] or a string'
        )
    for position, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{where}: field 'prompt[{position}]' is {_shown(message)}; expected 'role' and 'content'")
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: field 'prompt[{len(prompt) - 1}]' is a message of the assistant, {_shown(prompt[-1])}; expected "
            "the prompt to end where the model's turn begins, so remove the message (a correct answer belongs in "
            "reward_model.ground_truth)"
        )
    # Parquet gives every message the columns of all messages; a template must not see absent keys.
    return tuple(
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in prompt
    )


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
    """The rows of Parquet and JSONL files, one file after the other."""

    def __init__(self, files: Sequence[str], *, key: str, cache_dir: Path) -> None:
        """Open the files; `key` is the configuration key that names them.

        Raises:
            ConfigError: a file is missing or of an unknown kind.
            DataError: a file cannot be read.
        """
        self._files = [_open(name, key, cache_dir) for name in files]
        self._ends = list(accumulate(len(file) for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each row with its location, see `where`. This is faster than access by number."""
        for file in self._files:
            yield from ((file.parsed(raw, at), file.where(at)) for at, raw in enumerate(_rows(file.dataset)))

    def _locate(self, index: int) -> tuple[_DataFile, int]:
        number = bisect_right(self._ends, index)
        return self._files[number], index - (self._ends[number - 1] if number else 0)

    def row(self, index: int) -> Mapping[str, Any]:
        file, at = self._locate(index)
        return file.parsed(file.dataset[at], at)

    def where(self, index: int) -> str:
        file, at = self._locate(index)
        return file.where(at)

    def directory(self, index: int) -> Path | None:
        return self._locate(index)[0].directory


def _rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset`, read in batches: row by row takes about ten times as long."""
    for columns in dataset.iter(_BATCH_ROWS):
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


class _DataFile:
    """One memory-mapped Parquet file."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self.directory = Path(resolve(name)).parent
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def parsed(self, raw: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        return raw

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class _JsonLines(_DataFile):
    """A JSON-lines file, parsed line by line on access, so that rows keep their own keys and types.

    The JSON reader of `datasets` derives one schema for all rows and would turn the text "007" into a number.
    """

    def __init__(self, name: str, dataset: Any) -> None:
        self._lines = np.array([i for i, row in enumerate(_rows(dataset)) if row["text"].strip()], dtype=np.int64)
        super().__init__(name, dataset.select(self._lines) if len(self._lines) < len(dataset) else dataset)

    def parsed(self, raw: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        return json_row(raw["text"], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._lines[index] + 1}"


def json_row(line: str, where: str) -> Mapping[str, Any]:
    """Return the raw row of a line of JSON.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: {_shown(row)} is not a JSON object")
    return row


def _open(name: str, key: str, cache_dir: Path) -> _DataFile:
    from datasets import Dataset, disable_progress_bars
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowException

    disable_progress_bars()
    try:
        path = resolve(name)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not Path(path).is_file():
        raise ConfigError(f"{key}: {name} is not a file; give the path of a .parquet or .jsonl file")
    if not Path(path).stat().st_size:
        raise ConfigError(f"{key}: {name} is empty")
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".parquet":
            return _DataFile(name, Dataset.from_parquet(path, cache_dir=str(cache_dir)))
        if suffix in (".jsonl", ".ndjson"):
            return _JsonLines(name, Dataset.from_text(path, cache_dir=str(cache_dir), keep_linebreaks=False))
    except (DatasetsError, ArrowException, UnicodeDecodeError) as error:
        raise DataError.wrap(f"{name}: cannot be read as {suffix}: {error}", error) from error
    raise ConfigError(f"{key}: {name} has the suffix {suffix!r}; expected .parquet or .jsonl")


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
