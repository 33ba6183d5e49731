"""A request with images or videos as the engine takes it.

Its ids have all placeholders already: they are what the Trainer will see. vLLM's own processor would put placeholders
in for single ones, so it is asked for the features only, and for where in these ids it would have put them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.parse import parse_mm_uuids
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.utils.torch_utils import set_default_torch_num_threads

from asyncrl.failures import DataError
from asyncrl.media import digest, frames_of, video_array
from asyncrl.types import Media

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer


async def with_media(
    renderer: BaseRenderer[Any], prompt_ids: Sequence[int], media: Sequence[Media], salt: str
) -> MultiModalInput:
    """The engine's input of `prompt_ids` and `media`, off the event loop.

    Args:
        salt: Names the weights: features are cached, and those of other weights are others.

    Raises:
        DataError: the model takes no such media, or vLLM puts placeholders elsewhere than the prompt has them.
    """
    # vLLM's own thread: its processor and the processor's cache are used by one at a time.
    return await asyncio.get_running_loop().run_in_executor(
        renderer._mm_executor, _with_media, renderer, list(prompt_ids), media, salt
    )


def _with_media(
    renderer: BaseRenderer[Any], prompt_ids: list[int], media: Sequence[Media], salt: str
) -> MultiModalInput:
    processor = renderer.mm_processor
    if processor is None:
        raise DataError("its prompt has images or videos, and vLLM serves this model with text only")
    data: dict[str, list[Any]] = {}
    names: dict[str, list[str]] = {}
    try:
        for one in media:
            data.setdefault(one.kind, []).append(frames_of(one)[0] if one.kind == "image" else video_array(one))
            names.setdefault(one.kind, []).append(f"{salt}-{digest(one)}")
        inputs = ProcessorInputs(
            prompt_ids,
            processor.info.parse_mm_data(data),
            parse_mm_uuids(names),
            cache=renderer._mm_processor_only_cache,
        )
        with set_default_torch_num_threads():
            result = processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    except ValueError as error:
        raise DataError.wrap(f"vLLM cannot process its {', '.join(data)}: {error}", error) from error
    found = processor._find_mm_placeholders(prompt_ids, result.prompt_updates)
    missing = [kind for kind, items in data.items() if len(found.get(kind, ())) != len(items)]
    if missing:
        kind = missing[0]
        raise DataError(
            f"its tokens have the placeholders of {len(found.get(kind, ()))} {kind}s as vLLM writes them, and "
            f"{len(data[kind])} are given; the model's processor in transformers and in vLLM disagree, or the chat "
            "template has rewritten the conversation"
        )
    ranges = {kind: [place.to_range() for place in places] for kind, places in found.items()}
    return mm_input(prompt_ids, result.kwargs, result.hashes, ranges, cache_salt=salt)
