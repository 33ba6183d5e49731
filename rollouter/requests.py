"""The sampling parameters of one request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import SamplingConfig
from asyncrl.failures import DataError
from asyncrl.types import Prompt
from rollouter.drops import OverlongError

ENDING = ("max_tokens", "stop", "stop_token_ids", "ignore_eos")
"""What a row may say for itself: where its responses end. That changes no token's probability."""
SHAPING = ("temperature", "top_p", "top_k", "min_p")
"""What shapes the distribution, and is one for the whole run: engines and Trainer temper log-probs by it."""
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def sampling_params(
    sampling: SamplingConfig, prompt: Prompt, *, response_length: int, max_model_len: int, training: bool
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams: the configuration's, and the prompt's own about its responses' end.

    `max_tokens` is at most `response_length` and what the context has room for. No `seed`: it kills the CPU engine, and
    a resumed request could not honour it.

    Raises:
        OverlongError: the prompt leaves no room for a response.
        DataError: see `refuse_own_distribution`, which validation has no need of: it leaves such entries out.
    """
    room = max_model_len - len(prompt.prompt_ids)
    if room < 1:
        raise OverlongError(
            f"the prompt has {len(prompt.prompt_ids)} tokens and the model's context {max_model_len} "
            "(rollout.max_model_len): there is no room for a response"
        )
    params: dict[str, Any] = {name: getattr(sampling, name) for name in SHAPING}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if training:
        refuse_own_distribution(prompt.extra_info, _row(prompt), sampling)
    own = prompt.extra_info.get("sampling_params") or {}
    params |= {name: own[name] for name in ENDING if name in own}
    if isinstance(params.get("stop"), str):  # a row may name a single one
        params["stop"] = [params["stop"]]
    params["max_tokens"] = min(own.get("max_tokens", response_length), response_length, room)
    return params


def greedy(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, answered by the most likely tokens."""
    return {**params, **GREEDY}


def refuse_own_distribution(extra_info: Mapping[str, Any], where: str, sampling: SamplingConfig) -> None:
    """A training row's `extra_info.sampling_params` must not ask for another distribution than the run's.

    Engines record log-probs of the one distribution that `rollout.sampling` gives, and the Trainer computes its own of
    the same; of a row that is sampled otherwise they would be wrong.

    Raises:
        DataError: it does; names the row and the entry.
    """
    own = extra_info.get("sampling_params") or {}
    for name, value in own.items():
        if name not in ENDING and not (name in SHAPING and value == getattr(sampling, name)):
            raise DataError(
                f"{where}: field 'extra_info.sampling_params.{name}' is {value!r}: all rows are sampled as "
                "rollout.sampling says, or the log-probs that the loss is made of would be wrong for this one; take it "
                f"out of the row, which may set {', '.join(ENDING)}"
            )


def _row(prompt: Prompt) -> str:
    index = prompt.extra_info.get("index")
    return f"a row of {prompt.data_source!r}" if index is None else f"{prompt.data_source!r}, row {index}"
