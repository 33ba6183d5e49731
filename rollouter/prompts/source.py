"""The prompts of a run: renders and tokenizes all rows once, and yields them in a seeded order.

The order is a pure function of data, seed and feed index, so one integer describes the position of a run.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.import_path import call_problem, defined_at, load_function
from asyncrl.config.schema import Config
from asyncrl.config.sections.rollout import SamplingConfig
from asyncrl.core.failures import ConfigError, DataError, UserCodeError
from asyncrl.core.types import Prompt, SampleId
from rollouter.prompts.chat_template import Overlong, chosen_tools, encode, fit
from rollouter.prompts.dataset import FileRows, GymRows, OwnRows, PromptRow, RowSource, parse_row
from rollouter.prompts.media import MessagesWithMedia, VisionEncoder
from rollouter.requests import refuse_own_distribution
from rollouter.user_code import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CUTTING = ("left", "right", "middle")
"""Values of `data.overlong_prompts` that remove tokens."""


class PromptSet:
    """The prompts that remain after filtering, by number. One flat array contains all token ids; the rows have the
    rest."""

    def __init__(
        self,
        rows: RowSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        overlong: Overlong,
        max_samples: int | None = None,
        train_sampling: SamplingConfig | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        vision: VisionEncoder | None = None,
    ) -> None:
        """Check and tokenize every row.

        Args:
            train_sampling: The sampling configuration of training; None for a validation set.
            tools: Schemas of the tools, for the chat template.
            template_kwargs: `model.chat_template_kwargs`.
            vision: Encodes images and videos. Without it, rows with images or videos are refused.

        Raises:
            DataError: a row is malformed, asks for another distribution than `train_sampling`, is too long and
                `overlong` is `error`, or has media and would be cut; the message names file, row and field.
            ConfigError: rows have images, and the model's processor cannot be loaded.
        """
        self._rows = rows
        self._vision = vision
        kept, flat, ends = array("q"), array("i"), array("q", [0])
        self.num_overlong = 0
        """Number of rows longer than `max_prompt_length`, whether filtered or cut."""
        self.lacks_tools_kwargs: list[str] = []
        """Rows that set `need_tools_kwargs` and have no `tools_kwargs`."""
        schemas = {str(schema["function"]["name"]): schema for schema in tools}
        num_rows = len(rows) if max_samples is None else min(max_samples, len(rows))
        for index in range(num_rows):
            where = rows.where(index)
            row = self._row(index)
            if train_sampling is not None:
                refuse_own_distribution(row.extra_info, where, train_sampling)
            chosen = chosen_tools(row.extra_info, list(schemas))
            if row.extra_info.get("need_tools_kwargs") and not row.extra_info.get("tools_kwargs"):
                self.lacks_tools_kwargs.append(where)
            full = encode(
                tokenizer,
                row.messages,
                where,
                tools=[schemas[name] for name in chosen],
                template_kwargs=template_kwargs,
                to_ids=partial(vision.encode, media=row.media, where=where) if vision and row.media else None,
            )
            if row.media and overlong in CUTTING and len(full) > max_prompt_length:
                raise DataError(
                    f"{where}: the prompt has {len(full)} tokens, more than data.max_prompt_length = "
                    f"{max_prompt_length}, and a prompt with images or videos cannot be cut; raise the limit, or set "
                    "data.overlong_prompts to filter"
                )
            ids = fit(full, max_prompt_length, overlong, where)
            self.num_overlong += len(full) > max_prompt_length
            if ids is None:
                continue
            kept.append(index)
            flat.extend(ids)
            ends.append(len(flat))
        self.num_filtered = num_rows - len(kept)
        self._kept: NDArray[np.int64] = np.array(kept, dtype=np.int64)
        self._flat: NDArray[np.int32] = np.array(flat, dtype=np.int32)
        self._ends: NDArray[np.int64] = np.array(ends, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Prompt:
        row = self._row(int(self._kept[number]), checked=True)
        return Prompt(
            prompt_ids=self._flat[self._ends[number] : self._ends[number + 1]],
            messages=row.messages,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
            media=row.media,
        )

    def _row(self, index: int, *, checked: bool = False) -> PromptRow:
        where = self._rows.where(index)
        row = parse_row(self._rows.row(index), where, directory=self._rows.directory(index), checked=checked)
        if not row.media:
            return row
        if self._vision is None:
            raise DataError(f"{where}: it has images or videos, which are not supported here")
        messages, media = self._vision.fitted(MessagesWithMedia(row.messages, row.media), where)
        return row._replace(messages=messages, media=media)


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
) -> LoadedPrompts:
    """Open, check and tokenize the training set and the validation set. Blocking.

    Args:
        tools: Schemas of the tools, for the chat template.

    Raises:
        ConfigError: there is no data, a file is missing, a file or a row cannot be used, or no prompt is left after
            filtering.
    """
    data = config.data
    vision = VisionEncoder(config.model, tokenizer)

    def load(split: str, max_samples: int | None) -> PromptSet | None:
        key = f"data.{split}_files"
        rows: RowSource
        try:
            if data.dataset is not None:
                own = OwnRows.load(data, split)
                if own is None:
                    return None
                key, rows = "data.dataset", own
            elif gym := data.reasoning_gym:
                if split == "val" and not gym.val_size:
                    return None
                rows = GymRows(gym, split=split, seed=config.seed)
            elif files := data.train_files if split == "train" else data.val_files:
                rows = FileRows(files, key=key, cache_dir=cache_dir)
            else:
                return None
            prompts = PromptSet(
                rows,
                tokenizer,
                max_prompt_length=data.max_prompt_length,
                overlong=data.overlong_prompts,
                max_samples=max_samples,
                train_sampling=config.rollout.sampling if split == "train" else None,
                tools=tools,
                template_kwargs=config.model.chat_template_kwargs,
                vision=vision,
            )
        except DataError as error:
            raise ConfigError(f"{key}: {error.message}", error.cause) from error
        if prompts.num_overlong:
            logger.warning(
                "%s: %d of %d prompts are longer than data.max_prompt_length = %d (overlong_prompts: %s)",
                key,
                prompts.num_overlong,
                len(prompts) + prompts.num_filtered,
                data.max_prompt_length,
                data.overlong_prompts,
            )
        if missing := prompts.lacks_tools_kwargs:
            logger.warning(
                "%s: %d rows, the first one %s, set extra_info.need_tools_kwargs and have no extra_info.tools_kwargs: "
                "their tools get no arguments from the row",
                key,
                len(missing),
                missing[0],
            )
        if not len(prompts):
            raise ConfigError(
                f"{key}: no prompt is left of {prompts.num_filtered} rows, so the run has nothing to do. Raise "
                f"data.max_prompt_length = {data.max_prompt_length}, or check the files"
            )
        return prompts

    train = load("train", data.max_train_samples)
    if train is None:
        raise ConfigError("data.train_files: empty, and data.reasoning_gym is null; set one of the two")
    val = load("val", data.max_val_samples)
    return LoadedPrompts(
        train=ShuffledPrompts(train, seed=config.seed, shuffle=data.shuffle, sampler=data.sampler),
        val=val,
        num_filtered=train.num_filtered,
        num_val_filtered=val.num_filtered if val else 0,
    )
