"""Requests to engines: their names, and their sampling parameters. Pure.

The Rollouter names requests, and replicas parse the names to find the turn that a request belongs to:

    sample_0_42/3          the first turn of trajectory 3; with an agent, also its session's name
    sample_0_42/3.1        the turn after it
    sample_0_42/3.1-2      the second call to a replica about that turn
    sample_0_42/baseline   the greedy trajectory of ReMax

In validation the prompt's name replaces the sample's: `val_3_17/0`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncrl.config.sections.rollout import SamplingConfig
from asyncrl.core.failures import DataError
from asyncrl.core.types import Prompt
from rollouter.drop_policy import OverlongError

BASELINE = "baseline"
"""The key of ReMax's greedy trajectory; the keys of the others are their numbers."""
BASELINE_NUMBER = -1
"""The greedy trajectory's number in events."""

_ID = re.compile(rf"(.+)/(\d+|{BASELINE})(?:\.(\d+))?(?:-\d+)?", re.DOTALL)
ENDING = ("max_tokens", "stop", "stop_token_ids", "ignore_eos")
"""Parameters that a row may set: they decide where responses end, and change no token's probability."""
SHAPING = ("temperature", "top_p", "top_k", "min_p")
"""Parameters of the sampling distribution. A run has one value of each, as engines and Trainer compute log-probs under
that distribution."""
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


class RequestOrigin(NamedTuple):
    """The turn that a request belongs to; all None if the Rollouter did not name the request."""

    sample: str | None = None
    """In validation, the prompt's name."""
    trajectory: int | None = None
    turn: int | None = None


def is_validation(session: str) -> bool:
    """Return whether a session is that of a validation's prompt (`validation.validator.validation_session`)."""
    return session.startswith("val_")


def trajectory_id(name: str, key: str) -> str:
    """Return the name of a trajectory's session and of its first turn; `name` is the group's."""
    return f"{name}/{key}"


def turn_id(session: str, number: int) -> str:
    """Return the name of turn `number` of the trajectory `session`."""
    return session if number == 0 else f"{session}.{number}"


def call_id(request_id: str, number: int) -> str:
    """Return the name of call `number` for a turn. Each call needs a new name, because an engine may still hold the
    previous call."""
    return f"{request_id}-{number}"


def number_of(key: str) -> int:
    """Return the number that events use for the trajectory with this key."""
    return BASELINE_NUMBER if key == BASELINE else int(key)


def parse_request_id(request_id: str) -> RequestOrigin:
    """Return the turn that a request belongs to."""
    match = _ID.fullmatch(request_id)
    if match is None:
        return RequestOrigin()
    sample, key, turn = match.groups()
    return RequestOrigin(sample, number_of(key), int(turn or 0))


def sampling_params(
    sampling: SamplingConfig, prompt: Prompt, *, response_length: int, max_model_len: int, training: bool
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams, from the configuration and the prompt's own entries.

    `max_tokens` exceeds neither `response_length` nor the room left in the context. There is no `seed`: it crashes
    the CPU engine, and a resumed request could not honour it.

    Raises:
        OverlongError: the prompt leaves no room for a response.
        DataError: see `refuse_own_distribution`; validation ignores such entries instead.
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
    if isinstance(params.get("stop"), str):  # a row may give a single text instead of a list
        params["stop"] = [params["stop"]]
    params["max_tokens"] = min(own.get("max_tokens", response_length), response_length, room)
    return params


def greedy(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the same request under greedy decoding."""
    return {**params, **GREEDY}


def refuse_own_distribution(extra_info: Mapping[str, Any], where: str, sampling: SamplingConfig) -> None:
    """Check that a training row's `extra_info.sampling_params` do not change the run's sampling distribution.

    Engines and Trainer compute log-probs under the distribution of `rollout.sampling`; they would be wrong for a row
    that is sampled differently.

    Raises:
        DataError: the row changes the distribution; the message names the row and the entry.
    """
    own = extra_info.get("sampling_params") or {}
    for name, value in own.items():
        if name not in ENDING and not (name in SHAPING and value == getattr(sampling, name)):
            raise DataError(
                f"{where}: field 'extra_info.sampling_params.{name}' is {value!r}, but all rows must be sampled as "
                "configured in rollout.sampling, or their log-probs would be wrong in the loss; remove it. A row may "
                f"set {', '.join(ENDING)}"
            )


def _row(prompt: Prompt) -> str:
    index = prompt.extra_info.get("index")
    return f"a row of {prompt.data_source!r}" if index is None else f"{prompt.data_source!r}, row {index}"
