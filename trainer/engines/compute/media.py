"""Convert the images and videos of a micro-batch to inputs of a model.

Every rank calls the vision parts of the model in every micro-batch of a batch with media: a micro-batch without media
gets a row with a blank image, because sharded weights are gathered by all ranks or by none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from asyncrl.core.types import Media
from asyncrl.storage.media import image_bytes, load_processor, placeholder, placeholder_ids, process
from trainer.engines.compute.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import ProcessorMixin

BLANK_SIZE, BLANK_GRAY = (32, 32), (200, 200, 200)
"""Size and gray of a blank image. Normalization does not map the gray to 0, because some models treat images of zeros
as padding."""
TOKEN_KEYS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor that describe its text. They are not used here."""


class MediaInputs(NamedTuple):
    """Model inputs of a micro-batch with media."""

    input_ids: Tensor
    """int64 `[B', T']`: placeholders that the policy sampled are 0. If there are no media, the last row is that of a
    blank image."""
    features: dict[str, Tensor]
    """Keyword arguments of the model."""
    sampled: Tensor | None
    """int64 `[B', T']`: ids of placeholders that the policy sampled, -1 elsewhere; None: there are none."""


class MediaEncoder:
    """Runs a model's processor on media. The processor is loaded on first use."""

    def __init__(self, model: PreTrainedModel, settings: ModelConfig, path_key: str) -> None:
        self._model = model
        self._settings = settings
        self._path_key = path_key

    @cached_property
    def _processor(self) -> ProcessorMixin:
        processor = load_processor(self._settings)
        if processor is None:
            raise ConfigError(
                f"{self._path_key}={self._settings.path}: this model takes text only, but there are images or videos "
                "to train on; use a vision-language model"
            )
        return processor

    @cached_property
    def _blank(self) -> Media:
        from PIL import Image

        return Media("image", image_bytes(Image.new("RGB", BLANK_SIZE, BLANK_GRAY)))

    @cached_property
    def _ids(self) -> Tensor:
        return torch.tensor(sorted(placeholder_ids(self._processor)), dtype=torch.int64)

    @cached_property
    def _takes_types(self) -> bool:
        return "mm_token_type_ids" in inspect.signature(type(self._model).forward).parameters

    def encode(self, micro: MicroBatch) -> MediaInputs:
        """Return the model inputs of `micro`, on CPU.

        Raises:
            ConfigError: the model takes text only, or its processor cannot be loaded.
        """
        assert micro.media is not None and micro.prompt_lens is not None
        ids, sampled = self._separate_sampled(micro.input_ids, micro.prompt_lens)
        media = [each for each in micro.media if each]
        blank = not media
        if blank:
            media = [(self._blank,)]
        texts = ["".join(placeholder(self._processor, one) for one in each) for each in media]
        processed = process(self._processor, texts, media)
        if blank:
            row = torch.tensor(processed["input_ids"], dtype=torch.int64)
            width = max(ids.shape[1], row.shape[1])
            ids = torch.cat([_widened(ids, width, 0), _widened(row, width, 0)])
            if sampled is not None:
                sampled = torch.cat([_widened(sampled, width, -1), torch.full_like(ids[-1:], -1)])
        features = {
            key: value for key, value in processed.items() if key not in TOKEN_KEYS and isinstance(value, Tensor)
        }
        if self._takes_types:
            features["mm_token_type_ids"] = self._types(ids)
        return MediaInputs(ids, features, sampled)

    def _separate_sampled(self, ids: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Separate placeholder tokens that the policy sampled, which are text and not media."""
        behind = torch.arange(ids.shape[1]) >= prompt_lens[:, None]
        odd = behind & torch.isin(ids, self._ids)
        if not odd.any():
            return ids, None
        return ids.masked_fill(odd, 0), torch.where(odd, ids, -1)

    def _types(self, ids: Tensor) -> Tensor:
        """Return int64 `[B, T]`, 1 at placeholders of images and 2 at those of videos, for rotary positions in three
        dimensions."""
        types = torch.zeros_like(ids)
        for number, kind in enumerate(("image", "video"), start=1):
            token = getattr(self._processor, f"{kind}_token_id", None)
            if isinstance(token, int):
                types[ids == token] = number
        return types


@contextmanager
def embedded(embedding: nn.Module, sampled: Tensor | None) -> Iterator[None]:
    """Within the context, `embedding` looks up the ids of `sampled`, if they are not negative, instead of its input."""
    if sampled is None:
        yield
        return

    def put_back(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.where(sampled >= 0, sampled, inputs[0]), *inputs[1:])

    hook = embedding.register_forward_pre_hook(put_back)
    try:
        yield
    finally:
        hook.remove()


def _widened(rows: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=value)
