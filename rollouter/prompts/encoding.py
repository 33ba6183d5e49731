"""Checks and tokenizes the rows of a data set, once for all launches with the same rows, tokenizer and chat template.

    rows ─▶ chunks, in this process or in several ─▶ ids.bin, ends.npy, flags.npy in the cache

Chunks are written in the order of the rows, whatever order they are ready in, so the result depends neither on the
number of processes nor on the cache. It has the whole prompts: `data.max_prompt_length` can change without new tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import DataError
from asyncrl.core.types import Media
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.chat_template import chosen_tools, encode_texts, prompt_text
from rollouter.prompts.dataset import VERL_KEYS, FileRows, PromptRow, RowKeys, RowSource, parse_row
from rollouter.prompts.files import LoadingProgress, Report
from rollouter.prompts.media import MessagesWithMedia, VisionEncoder
from rollouter.requests import ENDING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK_ROWS = 500
ROWS_PER_PROCESS = 50_000
"""Rows for which another process, which takes seconds of CPU time to import transformers, pays off."""
MAX_PROCESSES = 16
_FORMAT = 1
"""Changes if the same rows get other tokens, or the files another format."""

HAS_MEDIA, OWN_DISTRIBUTION, LACKS_TOOLS_KWARGS = 1, 2, 4
"""Flags of a row: it has images or videos; its `sampling_params` may change the distribution; it sets
`need_tools_kwargs` and has no `tools_kwargs`."""


class EncodedChunk(NamedTuple):
    """The prompts of consecutive rows."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    flags: NDArray[np.uint8]


class EncodedPrompts:
    """The prompts of all rows. Their token ids stay on disk, and are read without mapping them, because pages of a map
    would count as memory of the process."""

    def __init__(self, directory: Path) -> None:
        """Open the files of a directory, which may be deleted afterwards.

        Raises:
            ValueError, OSError: they are damaged or missing.
        """
        # Views, because access to a `memmap` itself takes several times as long.
        self.ends: NDArray[np.int64] = np.load(directory / "ends.npy", mmap_mode="r").view(np.ndarray)
        """Where the tokens of row `i` end, at `i + 1`; the first entry is 0."""
        self.flags: NDArray[np.uint8] = np.load(directory / "flags.npy", mmap_mode="r").view(np.ndarray)
        self._ids = (directory / "ids.bin").open("rb", buffering=0)
        weakref.finalize(self, self._ids.close)
        size = os.fstat(self._ids.fileno()).st_size
        if size != 4 * int(self.ends[-1]) or len(self.flags) != len(self.ends) - 1:
            raise ValueError(f"{directory / 'ids.bin'} has {size} bytes for {self.ends[-1]} tokens")

    def __len__(self) -> int:
        return len(self.flags)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends)

    def of_row(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of a row."""
        start, end = int(self.ends[index]), int(self.ends[index + 1])
        return np.frombuffer(os.pread(self._ids.fileno(), 4 * (end - start), 4 * start), np.int32)


class RowEncoder:
    """Checks rows, renders them with the chat template, and tokenizes them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        keys: RowKeys = VERL_KEYS,
        vision: VisionEncoder | None = None,
    ) -> None:
        """
        Args:
            tools: Schemas of the tools, for the chat template.
            template_kwargs: `model.chat_template_kwargs`.
            vision: Encodes images and videos. Without it, rows with images or videos are refused.
        """
        self.tools = tools
        self.keys = keys
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._vision = vision
        self._schemas = {str(schema["function"]["name"]): schema for schema in tools}

    def parse(self, rows: RowSource, index: int, *, checked: bool = False) -> PromptRow:
        """Return a row with the media that the model accepts.

        Raises:
            DataError: the row is malformed; the message names file, row and field.
            ConfigError: it has images, and the model's processor cannot be loaded.
        """
        where, directory = rows.where(index), rows.directory(index)
        row = parse_row(rows.row(index), where, keys=self.keys, directory=directory, checked=checked)
        if not row.media:
            return row
        if self._vision is None:
            raise DataError(f"{where}: it has images or videos, which are not supported here")
        messages, media = self._vision.fitted(MessagesWithMedia(row.messages, row.media), where)
        return row._replace(messages=messages, media=media)

    def encode(self, rows: RowSource, start: int, stop: int) -> EncodedChunk:
        """Check and tokenize the rows from `start` to `stop`. Raises as `parse`."""
        found: list[list[int] | None] = []
        texts: list[str] = []
        flags = np.zeros(stop - start, np.uint8)
        for index in range(start, stop):
            row, where = self.parse(rows, index), rows.where(index)
            flags[index - start] = _flags(row)
            tools = [self._schemas[name] for name in chosen_tools(row.extra_info, list(self._schemas))]
            kwargs = self._template_kwargs
            text = prompt_text(self._tokenizer, row.messages, where, tools=tools, template_kwargs=kwargs)
            if row.media:
                found.append(self._with_media(text, row.media, where))
            else:
                found.append(None)
                texts.append(text)
        encoded = iter(encode_texts(self._tokenizer, texts))
        ids = [next(encoded) if one is None else one for one in found]
        if empty := [number for number, one in enumerate(ids) if not one]:
            where = rows.where(start + empty[0])
            raise DataError(f"{where}: field 'prompt' has no tokens after the chat template")
        lengths = np.array([len(one) for one in ids], np.int64)
        flat = np.fromiter(chain.from_iterable(ids), np.int32, count=int(lengths.sum()))
        return EncodedChunk(flat, lengths, flags)

    def _with_media(self, text: str, media: Sequence[Media], where: str) -> list[int]:
        assert self._vision is not None, "the row was parsed"
        return self._vision.encode(text, media, where)

    def cache_key(self, rows: RowSource, num_rows: int) -> str | None:
        """Return a digest of everything that determines the tokens of the first `num_rows` rows; None: not all of it is
        known."""
        if not isinstance(rows, FileRows) or self.fingerprint is None:
            return None
        about = {
            "format": _FORMAT,
            "content": [[file.content, file.file.suffix, len(file)] for file in rows.files],
            "rows": num_rows,
            "tokenizer": self.fingerprint,
            "template_kwargs": dict(self._template_kwargs),
            "tools": list(self.tools),
            "keys": self.keys,
        }
        return _digest(about)


def _flags(row: PromptRow) -> int:
    own = row.extra_info.get("sampling_params") or {}
    return (
        HAS_MEDIA * bool(row.media)
        | OWN_DISTRIBUTION * any(name not in ENDING for name in own)
        | LACKS_TOOLS_KWARGS
        * (bool(row.extra_info.get("need_tools_kwargs")) and not row.extra_info.get("tools_kwargs"))
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a digest of a tokenizer, its chat template and the packages that run them; None for tokenizers in Python,
    whose code would be part of it."""
    import jinja2
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return None
    packages = [package.__version__ for package in (transformers, tokenizers, jinja2)]
    # A call sets padding and truncation, which do not change what `encode_text` returns.
    state = {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _digest([state, tokenizer.chat_template, special, type(tokenizer).__name__, packages])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def encode_rows(
    rows: RowSource,
    encoder: RowEncoder,
    cache: DataCache,
    *,
    num_rows: int,
    model: ModelConfig | None = None,
    num_processes: int | None = None,
    what: str = "prompts",
    report: Report = logger.info,
) -> EncodedPrompts:
    """Return the prompts of the first `num_rows` rows, from the cache if it has them.

    Args:
        model: where other processes load the tokenizer of `encoder` from; None: there are none.
        num_processes: `data.num_workers`.
        what: what is tokenized, for `report`, which gets lines about the progress.

    Raises:
        DataError: a row is malformed; the message is about the first such row.
        ConfigError, UserCodeError: the user's code, or the model's processor, fails.
        InfraError: a process that tokenizes has died.
    """
    key = encoder.cache_key(rows, num_rows)
    if key is not None and (entry := cache.find("tokens", key)) is not None:
        try:
            return EncodedPrompts(entry)
        except (OSError, ValueError) as error:
            logger.warning("%s: the tokens in the cache are damaged (%s) and are made again", what, error)
            cache.discard(entry)
    with cache.building() as begun:
        progress = LoadingProgress(f"tokenizing {what}", num_rows, "rows", report)
        has_media = False
        with (begun / "ids.bin").open("wb") as file:
            lengths, flags = [np.zeros(1, np.int64)], [np.zeros(0, np.uint8)]
            for chunk in _chunks(rows, encoder, cache, num_rows, model, num_processes):
                chunk.ids.tofile(file)
                lengths.append(chunk.lengths)
                flags.append(chunk.flags)
                has_media = has_media or bool((chunk.flags & HAS_MEDIA).any())
                progress.advance(len(chunk.flags))
        np.save(begun / "ends.npy", np.cumsum(np.concatenate(lengths)))
        np.save(begun / "flags.npy", np.concatenate(flags))
        # Media are in files of their own, whose content is not part of the key.
        keep = key is not None and not has_media
        return EncodedPrompts(cache.commit(begun, "tokens", str(key)) if keep else begun)


def _chunks(
    rows: RowSource,
    encoder: RowEncoder,
    cache: DataCache,
    num_rows: int,
    model: ModelConfig | None,
    num_processes: int | None,
) -> Iterator[EncodedChunk]:
    """Yield the chunks of all rows in order."""
    bounds = [(start, min(start + CHUNK_ROWS, num_rows)) for start in range(0, num_rows, CHUNK_ROWS)]
    most = min(len(os.sched_getaffinity(0)), MAX_PROCESSES) if num_processes is None else num_processes
    count = min(most, math.ceil(num_rows / ROWS_PER_PROCESS))
    if count < 2 or model is None or not isinstance(rows, FileRows):
        yield from (encoder.encode(rows, start, stop) for start, stop in bounds)
        return
    from rollouter.prompts.encoding_processes import EncodingJob, encode_in_processes

    job = EncodingJob.of(rows, encoder, model, cache)
    yield from encode_in_processes(job, bounds, count, encoder.fingerprint)
