"""What requests ask for, checked: a turn, sampled as the run samples, or a refusal that says why. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import SamplingConfig
from rollouter.gateway.errors import RequestError
from rollouter.gateway.messages import Message, to_template
from rollouter.sampling import SHAPING

_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "best_of": 1,
    "top_logprobs": 0, "min_tokens": 0, "use_beam_search": False, "echo": False, "suffix": "", "ignore_eos": False,
    "continue_final_message": False, "add_generation_prompt": True, "prompt_logprobs": 0,
}  # fmt: skip
"""Fields that are taken if they ask for nothing special: the rest would change what is sampled, or what it means."""
_NO_STRUCTURE = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                 "structured_outputs", "functions", "function_call", "bad_words", "allowed_token_ids")  # fmt: skip
_WHY = "what is trained on must be sampled as the run samples, or its log-probs would be wrong; leave this out"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What both kinds of requests may say."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    log_probs: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`POST /v1/chat/completions`."""

    messages: tuple[Message, ...]
    """In a template's form."""
    tools: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any]
    parse_calls: bool
    one_call: bool
    """Of several calls in a turn, only the first one is told."""
    wanted: Wanted

    @property
    def scheme(self) -> str:
        """What the template is given besides messages, as a key."""
        return json.dumps([self.tools, self.template_kwargs], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`POST /v1/completions`: exactly one of the two prompts."""

    text: str | None
    ids: tuple[int, ...] | None
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class PostedReward:
    """`POST /v1/reward`."""

    reward: float | None
    metrics: Mapping[str, float]
    done: bool


class Reader:
    """Reads requests for one run's model."""

    def __init__(self, model: str, sampling: SamplingConfig | None) -> None:
        """`sampling`: of training; a request may not ask for another distribution. None: whatever it says of that is
        passed over, as in validation, which samples by its own settings."""
        self._model = model
        self._sampling = sampling

    def chat(self, body: Mapping[str, Any]) -> ChatRequest:
        """
        Raises:
            RequestError: why it is not served.
        """
        self._check(body)
        tools = _tools(body.get("tools"))
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise RequestError(f"tool_choice={_shown(choice)} forces tokens on the model; {_WHY}", param="tool_choice")
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise RequestError("'chat_template_kwargs' must be an object", param="chat_template_kwargs")
        if kwargs.keys() & {"tools", "add_generation_prompt", "tokenize", "conversation"}:
            raise RequestError("'chat_template_kwargs' sets what the endpoint sets", param="chat_template_kwargs")
        return ChatRequest(
            messages=tuple(to_template(body.get("messages"))),
            tools=tools,
            template_kwargs=kwargs,
            parse_calls=bool(tools) and choice != "none",
            one_call=body.get("parallel_tool_calls") is False,
            wanted=_wanted(body, "max_completion_tokens", "max_tokens"),
        )

    def completion(self, body: Mapping[str, Any]) -> CompletionRequest:
        """
        Raises:
            RequestError: why it is not served.
        """
        self._check(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        wanted = _wanted(body, "max_tokens")
        if isinstance(prompt, str) and prompt:
            return CompletionRequest(prompt, None, wanted)
        if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
            return CompletionRequest(None, tuple(prompt), wanted)
        raise RequestError("'prompt' must be one text or one list of token ids, and not empty", param="prompt")

    def _check(self, body: Mapping[str, Any]) -> None:
        if (model := body.get("model")) not in (None, self._model):
            raise RequestError(
                f"there is no model {model!r} here; the run trains {self._model!r}", status=404,
                code="model_not_found", param="model",
            )  # fmt: skip
        for name, neutral in _NEUTRAL.items():
            if (value := body.get(name)) is not None and value != neutral:
                raise RequestError(f"{name}={_shown(value)}: {_WHY}", param=name)
        for name in _NO_STRUCTURE:
            value = body.get(name)
            if value and not (name == "response_format" and value == {"type": "text"}):
                raise RequestError(f"{name}={_shown(value)}: {_WHY}", param=name)
        for name in SHAPING if self._sampling is not None else ():
            value, own = body.get(name), getattr(self._sampling, name)
            if value is not None and value != own:
                raise RequestError(
                    f"{name}={_shown(value)}: the run samples with rollout.sampling.{name} = {own}; {_WHY}", param=name
                )


def read_reward(body: Mapping[str, Any]) -> PostedReward:
    """
    Raises:
        RequestError: something in it is no finite number.
    """
    reward = body.get("reward")
    metrics = body.get("metrics") or {}
    if not isinstance(metrics, Mapping):
        raise RequestError("'metrics' must be an object of numbers", param="metrics")
    try:
        return checked_reward(reward, metrics, body.get("done", False))
    except ValueError as error:
        raise RequestError(str(error), param="reward") from None


def checked_reward(reward: Any, metrics: Mapping[str, Any], done: Any) -> PostedReward:
    """
    Raises:
        ValueError: something in it is no finite number.
    """
    told = {str(name): _finite(value, f"metrics.{name}") for name, value in metrics.items()}
    if not isinstance(done, bool):
        raise ValueError(f"done is {_shown(done)}; expected true or false")
    return PostedReward(None if reward is None else _finite(reward, "reward"), told, done)


def _finite(value: Any, what: str) -> float:
    """Python's, numpy's, a tensor of one element, a bool."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {_shown(value)}; expected a finite number")
    return number


def _wanted(body: Mapping[str, Any], *limits: str) -> Wanted:
    given = [(name, body[name]) for name in limits if body.get(name) is not None]
    for name, value in given:
        if type(value) is not int or value < 1:
            raise RequestError(f"{name}={_shown(value)}; expected a positive integer", param=name)
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) and one for one in stops):
        raise RequestError(f"stop={_shown(stop)}; expected a text or a list of texts", param="stop")
    log_probs = body.get("logprobs")
    if not isinstance(log_probs, bool) and log_probs not in (None, 0):
        raise RequestError(
            f"logprobs={_shown(log_probs)}: only those of the sampled tokens are known; say true or 0", param="logprobs"
        )
    return Wanted(
        min((value for _, value in given), default=None), tuple(stops), log_probs is not None and log_probs is not False
    )


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not tools:
        return ()
    if not isinstance(tools, Sequence):
        raise RequestError("'tools' must be a list", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{place}] is no function; this endpoint knows no other tools", param="tools")
    return tuple(tools)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
