"""The prompts of a run: selects them among the tokenized rows, and yields them in a seeded order.

The order is a pure function of data, seed and feed index, so one integer describes the position of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.import_path import call_problem, defined_at, load_function
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig
from asyncrl.config.sections.rollout import SamplingConfig
from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from asyncrl.core.types import Prompt, SampleId
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.chat_template import Overlong, cut
from rollouter.prompts.dataset import VERL_KEYS, FileRows, GymRows, OwnRows, RowKeys, RowSource
from rollouter.prompts.encoding import (
    HAS_MEDIA,
    LACKS_TOOLS_KWARGS,
    OWN_DISTRIBUTION,
    EncodedPrompts,
    RowEncoder,
    encode_rows,
)
from rollouter.prompts.files import Report
from rollouter.prompts.media import VisionEncoder
from rollouter.requests import refuse_own_distribution
from rollouter.user_code import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CUTTING = ("left", "right", "middle")
"""Values of `data.overlong_prompts` that remove tokens."""


class ValidationPrompts(Protocol):
    """The validation set, by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...


class PromptSet:
    """The prompts that remain after filtering, by number. Rows and token ids are read when they are needed."""

    def __init__(
        self,
        rows: RowSource,
        encoder: RowEncoder,
        encoded: EncodedPrompts,
        *,
        max_prompt_length: int,
        overlong: Overlong,
        train_sampling: SamplingConfig | None = None,
    ) -> None:
        """Select the rows.

        Args:
            encoded: The prompts of the first rows; the others are not used.
            train_sampling: The sampling configuration of training; None for a validation set.

        Raises:
            DataError: a row asks for another distribution than `train_sampling`, is too long and `overlong` is `error`,
                or has media and would be cut; the message names file, row and field.
        """
        self._rows, self._encoder, self._encoded = rows, encoder, encoded
        self._max_prompt_length, self._overlong = max_prompt_length, overlong
        for index in np.flatnonzero(encoded.flags & OWN_DISTRIBUTION) if train_sampling is not None else ():
            assert train_sampling is not None
            row = encoder.parse(rows, int(index), checked=True)
            refuse_own_distribution(row.extra_info, rows.where(int(index)), train_sampling)
        lacking = np.flatnonzero(encoded.flags & LACKS_TOOLS_KWARGS)
        self.lacks_tools_kwargs = len(lacking), rows.where(int(lacking[0])) if len(lacking) else ""
        """The number of rows that set `need_tools_kwargs` and have no `tools_kwargs`, and where the first one is."""
        overlong_rows = encoded.lengths > max_prompt_length
        self.num_overlong = int(overlong_rows.sum())
        """Number of rows longer than `max_prompt_length`, whether filtered or cut."""
        self._check_overlong(overlong_rows)
        self._kept = np.flatnonzero(~overlong_rows) if overlong == "filter" else np.arange(len(encoded))
        self.num_filtered = len(encoded) - len(self._kept)

    def _check_overlong(self, overlong_rows: NDArray[np.bool_]) -> None:
        refused = overlong_rows
        if self._overlong in CUTTING:
            refused = overlong_rows & (self._encoded.flags & HAS_MEDIA > 0)
        elif self._overlong != "error":
            return
        if not refused.any():
            return
        index = int(np.argmax(refused))
        problem = (
            f"{self._rows.where(index)}: the prompt has {self._encoded.lengths[index]} tokens, more than "
            f"data.max_prompt_length = {self._max_prompt_length}"
        )
        fix = "raise the limit, or set data.overlong_prompts to filter"
        if self._overlong in CUTTING:
            raise DataError(f"{problem}, and a prompt with images or videos cannot be cut; {fix}")
        raise DataError(f"{problem}; {fix}, left, right or middle")

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Prompt:
        index = int(self._kept[number])
        row = self._encoder.parse(self._rows, index, checked=True)
        return Prompt(
            prompt_ids=cut(self._encoded.of_row(index), self._max_prompt_length, self._overlong),
            messages=row.messages,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            media=row.media,
        )


class ShuffledPrompts:
    """A `PromptSource` that repeats the training set, with a different seeded order in each epoch.

    Args:
        sampler: `data.sampler`, or None.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool, sampler: str | None = None) -> None:
        self._prompts = prompts
        order = partial(own_order, sampler, prompts) if sampler else partial(epoch_order, len(prompts), shuffle=shuffle)
        # At most a few epochs are in flight at once.
        self._order = lru_cache(maxsize=4)(lambda epoch: order(seed=seed, epoch=epoch))

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, sample_id: SampleId) -> Prompt:
        """Return the prompt of this id.

        Raises:
            ConfigError: the id belongs to a data set of another size.
        """
        epoch, position = divmod(sample_id.index - 1, len(self._prompts))
        if epoch != sample_id.epoch:
            raise ConfigError(
                f"{sample_id} would be in epoch {epoch} of these {len(self._prompts)} prompts: the run was started "
                "with other data, or with other data.* settings; resume it with the same data and settings, or start "
                "with resume=none"
            )
        return self._prompts[int(self._order(epoch)[position])]


def epoch_order(num_prompts: int, seed: int, epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
    """Return the permutation of prompts for one epoch, int64 `[num_prompts]`."""
    if not shuffle:
        return np.arange(num_prompts, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)


def own_order(sampler: str, prompts: Sequence[Prompt] | PromptSet, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order that the user's function `data.sampler` chooses for an epoch, int64 `[len(prompts)]`.

    Raises:
        ConfigError: the function does not take the arguments.
        UserCodeError: it raised, or did not return as many prompt numbers as there are prompts.
    """
    key = "data.sampler"
    function = load_function(sampler, key, {})
    if problem := call_problem(function, prompts, epoch=epoch, seed=seed):
        raise ConfigError(f"{key}: {defined_at(function)}: it is called with (prompts, epoch=, seed=): {problem}")
    order = np.asarray(function(prompts, epoch=epoch, seed=seed))
    is_numbers = order.shape == (len(prompts),) and order.dtype.kind in "iu"
    if not (is_numbers and ((order >= 0) & (order < len(order))).all()):
        raise UserCodeError(
            f"{key}: {defined_at(function)}: it returned {shown(order)} for epoch {epoch}; expected {len(prompts)} "
            f"prompt numbers from 0 to {len(prompts) - 1}, some of which may repeat"
        )
    return order.astype(np.int64)


class LoadedPrompts(NamedTuple):
    train: ShuffledPrompts
    """The validation set, if nothing is trained."""
    val: PromptSet | None
    """None if no validation set is configured."""
    num_filtered: int
    num_val_filtered: int


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    report: Report = logger.info,
) -> LoadedPrompts:
    """Open, check and tokenize the training set and the validation set. Blocking.

    Args:
        cache_dir: `data.cache_dir`.
        tools: Schemas of the tools, for the chat template.
        report: gets lines about the progress.

    Raises:
        ConfigError: there is no data, a file is missing, a file or a row cannot be used, or no prompt is left after
            filtering.
        InfraError: a server cannot be reached, or a process that tokenizes has died.
    """
    data, cache = config.data, DataCache(cache_dir)
    cache.sweep()
    encoder = RowEncoder(
        tokenizer,
        tools=tools,
        template_kwargs=config.model.chat_template_kwargs,
        keys=VERL_KEYS if data.reasoning_gym else RowKeys.of(data),
        vision=VisionEncoder(config.model, tokenizer),
    )

    def load(split: str, max_samples: int | None) -> PromptSet | None:
        key = f"data.{split}_files" if data.dataset is None else "data.dataset"
        try:
            rows = _rows(config, split, cache, report)
            if rows is None:
                return None
            encoded = encode_rows(
                rows,
                encoder,
                cache,
                num_rows=len(rows) if max_samples is None else min(max_samples, len(rows)),
                model=config.model,
                num_processes=data.num_workers,
                what=key,
                report=report,
            )
            prompts = PromptSet(
                rows,
                encoder,
                encoded,
                max_prompt_length=data.max_prompt_length,
                overlong=data.overlong_prompts,
                train_sampling=config.rollout.sampling if split == "train" else None,
            )
        except DataError as error:
            raise ConfigError(f"{key}: {error.message}", error.cause) from error
        _check_prompts(prompts, len(encoded), key, data)
        return prompts

    train = None if config.validates_only else load("train", data.max_train_samples)
    if train is None and not config.validates_only:
        raise ConfigError("data.train_files: empty, and data.reasoning_gym is null; set one of the two")
    val = load("val", data.max_val_samples)
    train = val if train is None else train
    if train is None:
        raise ConfigError("data.val_files: there is no validation set, so there is nothing to evaluate; give one")
    return LoadedPrompts(
        train=ShuffledPrompts(train, seed=config.seed, shuffle=data.shuffle, sampler=data.sampler),
        val=val,
        num_filtered=train.num_filtered,
        num_val_filtered=val.num_filtered if val else 0,
    )


def _check_prompts(prompts: PromptSet, num_rows: int, key: str, data: DataConfig) -> None:
    """Warn of rows that are not used as they are. Raises `ConfigError`: no prompt is left of `num_rows`."""
    if prompts.num_overlong:
        logger.warning(
            "%s: %d of %d prompts are longer than data.max_prompt_length = %d (overlong_prompts: %s)",
            key,
            prompts.num_overlong,
            num_rows,
            data.max_prompt_length,
            data.overlong_prompts,
        )
    missing, first = prompts.lacks_tools_kwargs
    if missing:
        logger.warning(
            "%s: %d rows, the first one %s, set extra_info.need_tools_kwargs and have no extra_info.tools_kwargs: "
            "their tools get no arguments from the row",
            key,
            missing,
            first,
        )
    if not len(prompts):
        raise ConfigError(
            f"{key}: no prompt is left of {num_rows} rows, so the run has nothing to do. Raise "
            f"data.max_prompt_length = {data.max_prompt_length}, or check the files"
        )


def _rows(config: Config, split: str, cache: DataCache, report: Report) -> RowSource | None:
    """Return the rows of a split; None: it has none."""
    data = config.data
    if data.dataset is not None:
        return OwnRows.load(data, split)
    if gym := data.reasoning_gym:
        return None if split == "val" and not gym.val_size else GymRows(gym, split=split, seed=config.seed)
    if files := data.train_files if split == "train" else data.val_files:
        return FileRows.open(files, key=f"data.{split}_files", cache=cache, report=report)
    return None
