"""From a prompt's text and its media to the ids that the model sees.

The processor writes as many placeholders for an image as the model makes features of it. A model that knows no videos
gets the frames of one as images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import ModelConfig
from asyncrl.failures import DataError
from asyncrl.media import frames_of, image_bytes
from asyncrl.types import Media
from asyncrl.vision import load_processor, process, takes_videos
from rollouter.media import WithMedia

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


class Vision:
    """The model's way to see. The processor is loaded when the first row asks for it."""

    def __init__(self, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer

    @cached_property
    def _processor(self) -> ProcessorMixin | None:
        processor = load_processor(self._model)
        if processor is not None:
            processor.tokenizer = self._tokenizer  # the run's own
        return processor

    def fitted(self, found: WithMedia, where: str) -> WithMedia:
        """What of it this model takes: videos as frames if it has to be.

        Raises:
            DataError: it takes text only.
            ConfigError: its processor cannot be loaded.
        """
        processor = self._processor
        if processor is None:
            raise DataError(
                f"{where}: it has images or videos, and the model of model.path={self._model.path} takes text only; "
                "give a vision-language model, or take the row out"
            )
        if takes_videos(processor) or all(one.kind == "image" for one in found.media):
            return found
        media = iter(found.media)
        frames: list[Media] = []

        def parts(content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            fitted: list[Mapping[str, Any]] = []
            for part in content:
                if part["type"] == "text":
                    fitted.append(part)
                    continue
                one = next(media)
                pictures = [one] if one.kind == "image" else _as_images(one)
                frames.extend(pictures)
                fitted += [{"type": "image", "image": part[one.kind]}] * len(pictures)
            return fitted

        messages = tuple({**message, "content": parts(message["content"])} for message in found.messages)
        return WithMedia(messages, tuple(frames))

    def encode(self, text: str, media: Sequence[Media], where: str) -> list[int]:
        """Tokens of what the chat template wrote, with all placeholders.

        Raises:
            DataError: the template has left out media, or the processor refuses them.
        """
        assert self._processor is not None, "media were fitted"
        try:
            ids: list[int] = process(self._processor, [text], [media])["input_ids"][0]
        except (ValueError, IndexError, StopIteration, TypeError) as error:
            told = f"{where}: the model's processor refuses the prompt with its {len(media)} images or videos: {error}"
            raise DataError.wrap(told, error) from error
        return ids


def _as_images(video: Media) -> list[Media]:
    return [Media("image", image_bytes(frame)) for frame in frames_of(video)]
