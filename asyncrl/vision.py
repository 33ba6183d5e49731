"""A vision model's processor, as Rollouter and Trainer both call it: they have to see the same features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.assets import resolve
from asyncrl.config.schema import ModelConfig
from asyncrl.failures import ConfigError
from asyncrl.media import frames_of, video_array
from asyncrl.types import Media

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def load_processor(model: ModelConfig) -> ProcessorMixin | None:
    """None: the model takes text only.

    Raises:
        ConfigError: it has a processor, and this cannot be loaded: a package that it needs is missing, say.
    """
    from transformers import AutoConfig, AutoProcessor

    try:
        path, code = resolve(model.path), model.trust_remote_code
        if getattr(AutoConfig.from_pretrained(path, trust_remote_code=code), "vision_config", None) is None:
            return None
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=code)
    except (OSError, ValueError, ImportError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError.wrap(
            f"model.path={model.path}: the data has images or videos, and its processor cannot be loaded: {why}",
            error,
        ) from None
    return processor if getattr(processor, "image_processor", None) is not None else None


def takes_videos(processor: ProcessorMixin) -> bool:
    """Whether it has a way of its own to see them."""
    return getattr(processor, "video_processor", None) is not None


def placeholder(processor: ProcessorMixin, media: Media) -> str:
    """What stands for it in a text, before the processor makes as many of it as there are features."""
    return str(getattr(processor, f"{media.kind}_token"))


def placeholder_ids(processor: ProcessorMixin) -> frozenset[int]:
    """Ids at which the model puts features."""
    names = ("image_token_id", "video_token_id")
    listed = [*getattr(processor, "image_token_ids", ()), *getattr(processor, "video_token_ids", ())]
    ids = [*(getattr(processor, name, None) for name in names), *listed]
    return frozenset(token for token in ids if isinstance(token, int))


def process(processor: ProcessorMixin, texts: Sequence[str], media: Sequence[Sequence[Media]]) -> Mapping[str, Any]:
    """`input_ids` of each text, a list, with all its placeholders, and the features of its media as the model takes
    them, torch tensors. Each text has at least one medium.

    Raises:
        ValueError: a text has not as many placeholders as media, or a medium cannot be read.
    """
    told: dict[str, Any] = {}
    images = [[frames_of(one)[0] for one in each if one.kind == "image"] for each in media]
    videos = [video_array(one) for each in media for one in each if one.kind == "video"]
    if any(images):
        told |= {"images": images, "images_kwargs": {"return_tensors": "pt"}}
    if videos:
        told |= {"videos": videos, "videos_kwargs": {"return_tensors": "pt", "do_sample_frames": False}}
    result: Mapping[str, Any] = processor(text=list(texts), text_kwargs={"add_special_tokens": False}, **told)
    return result
