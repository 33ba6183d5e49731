"""The sampling parameters of one request. Pure."""

from __future__ import annotations

from typing import Any

from asyncrl.config.schema import SamplingConfig
from asyncrl.types import Prompt
from rollouter.drops import OverlongError


def sampling_params(
    sampling: SamplingConfig, prompt: Prompt, *, response_length: int, max_model_len: int
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams: the configuration's, then the prompt's own, within the context.

    No `seed`: it kills the CPU engine, and a resumed request could not honour it.

    Raises:
        OverlongError: the prompt leaves no room for a response.
    """
    room = max_model_len - len(prompt.prompt_ids)
    if room < 1:
        raise OverlongError(
            f"the prompt has {len(prompt.prompt_ids)} tokens and the model's context {max_model_len} "
            "(rollout.max_model_len): there is no room for a response"
        )
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": response_length,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    params |= prompt.extra_info.get("sampling_params") or {}
    params["max_tokens"] = min(params["max_tokens"], room)
    return params
