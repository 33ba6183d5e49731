"""The wire format of the OpenAI API: errors, messages, requests and responses. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncrl.config.sections.rollout import SamplingConfig
from asyncrl.core.text import encodable, encodable_values, parse_json, safe_repr
from asyncrl.core.types import FinishReason, Turn
from rollouter.requests import SHAPING
from rollouter.user_code import LARGEST, finite, shorten, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_ROOM = "context_length_exceeded"
MAX_TOKEN_ID = 2**31 - 1


class RequestError(Exception):
    """A refused request, in the form of the OpenAI API's errors. Refused requests are not recorded."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        self.message = encodable(message)
        super().__init__(self.message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unknown_key() -> RequestError:
    return RequestError(
        "no trajectory has this key: its Rollouter may have been replaced, or the trajectory ended long ago",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def closed() -> RequestError:
    return RequestError(
        "the trajectory of this key is over: its agent has ended, exceeded its time limit, or reported that it is done",
        status=409,
        kind="conflict_error",
        code="trajectory_over",
    )


def engines_failed() -> RequestError:
    return RequestError(
        "the turn could not be generated; the log of the run has the reason",
        status=503,
        kind="server_error",
        code="engines_failed",
    )


def no_room(context_tokens: int | str, max_model_len: int, response_length: int) -> RequestError:
    return RequestError(
        f"there is no room for another turn after these {context_tokens} tokens: a conversation may have "
        f"{max_model_len} tokens (rollout.max_model_len), of which at most {response_length} may follow its prompt "
        "(rollout.response_length)",
        code=NO_ROOM,
        param="messages",
    )


Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def to_template(messages: Any) -> list[Message]:
    """Convert a request's messages for chat templates: contents become strings, and call arguments become objects.

    A tool's message gets the name of the call that it answers. Fields that no template knows are dropped.

    Raises:
        RequestError: the messages are malformed, or contain something other than text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("'messages' must be a list with at least one message", param="messages")
    names: dict[str, str] = {}
    read: list[Message] = []
    for place, message in enumerate(messages):
        one = _message(message, f"messages[{place}]")
        for call in one.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if one["role"] == "tool" and "name" not in one and (name := names.get(one.get("tool_call_id", ""))):
            one["name"] = name
        read.append(one)
    return read


def fingerprint(message: Mapping[str, Any]) -> str:
    """Return a key that equal messages share.

    Clients send generated messages back in many shapes: `content` null or empty, `refusal` and `annotations` added,
    arguments with different blanks, tool-call ids renamed, reasoning dropped. Messages are equal if their roles, texts
    and calls are.
    """
    role, text = message["role"], message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([role, text.strip() if role == "assistant" else text, calls], sort_keys=True)


def arguments_of(written: Any) -> Any:
    """Parse a call's arguments if they are the JSON of an object; return all others unchanged."""
    if not isinstance(written, str):
        return written
    try:
        read = encodable_values(parse_json(written))
    except ValueError:
        return written
    return read if isinstance(read, dict) else written


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}; expected an object", param=where)
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RequestError(f"{where}.role is {shown(given)}; expected {', '.join(_ROLES)}", param=where)
    read: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise RequestError(f"{where}.tool_calls is {type(calls).__name__}; expected a list", param=where)
            read["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is not a function call", param=where)
    arguments = arguments_of(function.get("arguments") or "{}")
    return {
        "type": "function",
        "id": str(call.get("id", "")),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} is {type(content).__name__}; expected a text or a list of parts", param=where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        elif isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RequestError(f"{where} has a part of type {shown(kind)}; this endpoint takes text only", param=where)
    return "\n".join(texts)


_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1, "best_of": 1,
    "top_logprobs": 0, "min_tokens": 0, "use_beam_search": False, "echo": False, "suffix": "", "ignore_eos": False,
    "continue_final_message": False, "add_generation_prompt": True, "prompt_logprobs": 0,
}  # fmt: skip
"""The only accepted value of each field: any other would change the sampling or the meaning of the response."""
_UNSUPPORTED = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                 "structured_outputs", "functions", "function_call", "bad_words", "allowed_token_ids")  # fmt: skip
_TEMPLATE_ARGUMENTS = frozenset({
    "add_vision_id", "clear_thinking", "custom_instructions", "date_string", "enable_thinking", "enable_reasoning",
    "keep_all_reasoning", "low_effort", "model_identity", "preserve_thinking", "reasoning", "reasoning_budget",
    "reasoning_effort", "skip_think", "thinking", "thinking_budget", "thinking_mode", "tools_in_user_message",
    "truncate_history_thinking",
})  # fmt: skip
"""The arguments of chat templates that requests may set, besides those in `model.chat_template_kwargs`. All others are
refused: `chat_template`, for example, would run the caller's own template in this process."""
MAX_ARGUMENT = 1_000
"""Limit for the characters of a text among them."""
MAX_STOPS, MAX_STOP = 16, 256
"""Limits for the number of stop texts and for the characters of each: engines search every one after each token."""
FIELDS = frozenset({
    *_NEUTRAL, *_UNSUPPORTED, *SHAPING, "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "max_tokens", "max_completion_tokens", "stop", "logprobs", "stream", "stream_options",
    "reward", "metrics", "done",
})  # fmt: skip
"""The fields of all bodies that are read."""
_WHY = "responses that are trained on must be sampled as the run samples, or their log-probs are wrong; leave this out"


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options of a turn that both kinds of requests may set."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    log_probs: bool = False
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`POST /v1/chat/completions`."""

    messages: tuple[Message, ...]
    """In the form that chat templates read, see `to_template`."""
    tools: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any]
    parse_calls: bool
    one_call: bool
    """Whether to return only the first of several calls in a turn."""
    options: TurnOptions

    @property
    def scheme(self) -> str:
        """The template's inputs besides messages, as a cache key."""
        return json.dumps([self.tools, self.template_kwargs], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`POST /v1/completions`, with exactly one of `text` and `ids`."""

    text: str | None
    ids: tuple[int, ...] | None
    options: TurnOptions


@dataclass(frozen=True, slots=True)
class PostedReward:
    """`POST /v1/reward`."""

    reward: float | None
    metrics: Mapping[str, float]
    done: bool


class RequestReader:
    """Reads requests for one run's model."""

    def __init__(self, model: str, sampling: SamplingConfig | None, template_arguments: Collection[str] = ()) -> None:
        """`sampling` is the distribution of training, which requests must not change. In validation, which has
        separate settings, it is None: the sampling settings of requests are then ignored. `template_arguments` are the
        names in `model.chat_template_kwargs`, which requests may also set."""
        self._model = model
        self._sampling = sampling
        self._template_arguments = _TEMPLATE_ARGUMENTS | set(template_arguments)

    def chat(self, body: Mapping[str, Any]) -> ChatRequest:
        """Read the body of `POST /v1/chat/completions`.

        Raises:
            RequestError: the request is refused; the message says why.
        """
        self._check(body)
        tools = _tools(body.get("tools"))
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise RequestError(f"tool_choice={_shown(choice)} forces tokens on the model; {_WHY}", param="tool_choice")
        return ChatRequest(
            messages=tuple(to_template(body.get("messages"))),
            tools=tools,
            template_kwargs=self._template_kwargs(body),
            parse_calls=bool(tools) and choice != "none",
            one_call=body.get("parallel_tool_calls") is False,
            options=_turn_options(body, "max_completion_tokens", "max_tokens"),
        )

    def completion(self, body: Mapping[str, Any]) -> CompletionRequest:
        """Read the body of `POST /v1/completions`.

        Raises:
            RequestError: the request is refused; the message says why.
        """
        self._check(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        options = _turn_options(body, "max_tokens")
        if isinstance(prompt, str) and prompt:
            return CompletionRequest(prompt, None, options)
        if isinstance(prompt, list) and prompt and all(_is_token(one) for one in prompt):
            return CompletionRequest(None, tuple(prompt), options)
        raise RequestError("'prompt' must be one text or one list of token ids, and not empty", param="prompt")

    def _template_kwargs(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        kwargs = body.get("chat_template_kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise RequestError("'chat_template_kwargs' must be an object", param="chat_template_kwargs")
        for name, value in kwargs.items():
            param = f"chat_template_kwargs.{shorten(name, 80)}"
            if name not in self._template_arguments:
                raise RequestError(
                    f"{param} cannot be set by a request, because it may change more than the prompt's wording. "
                    f"Requests may set {', '.join(sorted(self._template_arguments))}; the run allows others by setting "
                    "them in model.chat_template_kwargs",
                    param=param,
                )
            if not (value is None or isinstance(value, bool | int | float | str)) or len(str(value)) > MAX_ARGUMENT:
                raise RequestError(
                    f"{param}={_shown(value)}; expected true, false, a number or a text of at most {MAX_ARGUMENT} "
                    "characters",
                    param=param,
                )
        return kwargs

    def _check(self, body: Mapping[str, Any]) -> None:
        if (model := body.get("model")) not in (None, self._model):
            raise RequestError(
                f"there is no model {shown(model)}; the run trains {self._model!r}", status=404,
                code="model_not_found", param="model",
            )  # fmt: skip
        for name, neutral in _NEUTRAL.items():
            if (value := body.get(name)) is not None and value != neutral:
                raise RequestError(f"{name}={_shown(value)}: {_WHY}", param=name)
        for name in _UNSUPPORTED:
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
    """Read the body of `POST /v1/reward`.

    Raises:
        RequestError: a number is not finite, `metrics` is not an object, or `done` is not a bool.
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
    """Check a reward and metrics.

    Raises:
        ValueError: a value is not a finite number, or `done` is not a bool.
    """
    numbers = {encodable(str(name)): _finite(value, f"metrics.{name}") for name, value in metrics.items()}
    if not isinstance(done, bool):
        raise ValueError(f"done is {_shown(done)}; expected true or false")
    return PostedReward(None if reward is None else _finite(reward, "reward"), numbers, done)


def _finite(value: Any, what: str) -> float:
    number = finite(value)
    if number is None:
        raise ValueError(f"{what} is {_shown(value)}; expected a finite number of at most {LARGEST:g}")
    return number


def _turn_options(body: Mapping[str, Any], *limits: str) -> TurnOptions:
    given = [(name, body[name]) for name in limits if body.get(name) is not None]
    for name, value in given:
        if type(value) is not int or value < 1:
            raise RequestError(f"{name}={_shown(value)}; expected a positive integer", param=name)
    stop = body.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP for one in stops):
        raise RequestError(
            f"stop={_shown(stop)}; expected a text or a list of texts of at most {MAX_STOP} characters", param="stop"
        )
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'stop' has {len(stops)} texts; at most {MAX_STOPS} are allowed", param="stop")
    log_probs = body.get("logprobs")
    if not isinstance(log_probs, bool) and log_probs not in (None, 0):
        raise RequestError(
            f"logprobs={_shown(log_probs)}: only log-probs of the sampled tokens are known; send true or 0",
            param="logprobs",
        )
    stream, stream_options = body.get("stream"), body.get("stream_options") or {}
    if stream is not None and not isinstance(stream, bool):
        raise RequestError(f"stream={_shown(stream)}; expected true or false", param="stream")
    if not isinstance(stream_options, Mapping):
        raise RequestError(f"stream_options={_shown(stream_options)}; expected an object", param="stream_options")
    return TurnOptions(
        max_tokens=min((value for _, value in given), default=None),
        stop=tuple(stops),
        log_probs=log_probs is not None and log_probs is not False,
        stream=stream is True,
        include_usage=bool(stream_options.get("include_usage")),
    )


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if not tools:
        return ()
    if not isinstance(tools, Sequence):
        raise RequestError("'tools' must be a list", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tools[{place}] is not a function; this endpoint supports no other tools", param="tools"
            )
    return tuple(tools)


def _shown(value: Any) -> str:
    try:
        return shorten(json.dumps(value, default=safe_repr), 80)
    except (TypeError, ValueError, RecursionError):  # a program in this process may return any value
        return shown(value, 80)


Body = dict[str, Any]


class GatewayResponse(NamedTuple):
    """Status and body of an HTTP response."""

    status: int
    body: Body


class ResponseHeader(NamedTuple):
    """Fields that every response has."""

    id: str
    model: str
    created: int
    """Wall clock, seconds."""
    prompt_tokens: int


def chat_response(header: ResponseHeader, turn: Turn, message: Message, pieces: Sequence[str] | None) -> Body:
    """Build a chat completion. `pieces` are the tokens' texts if the client asks for log-probs."""
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    answer: Body = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        answer["reasoning_content"] = reasoning
    if calls:
        answer["tool_calls"] = calls
    log_probs = None if pieces is None else chat_log_probs(pieces, turn.rollout_log_probs)
    length = turn.finish_reason is FinishReason.LENGTH
    reason = "length" if length else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": answer, "logprobs": log_probs, "finish_reason": reason}
    return _body(header, turn, "chat.completion", choice)


def completion_response(header: ResponseHeader, turn: Turn, text: str, pieces: Sequence[str] | None) -> Body:
    """Build a text completion. `pieces` are the tokens' texts if the client asks for log-probs."""
    log_probs = None if pieces is None else completion_log_probs(pieces, turn.rollout_log_probs)
    reason = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
    return _body(header, turn, "text_completion",
                 {"index": 0, "text": text, "logprobs": log_probs, "finish_reason": reason})  # fmt: skip


def chat_log_probs(pieces: Sequence[str], log_probs: Sequence[float] | NDArray[np.float32]) -> Body:
    """Build `logprobs` of a chat completion from each token's text and log-prob."""
    tokens = [
        {"token": piece, "logprob": float(value), "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(pieces, log_probs, strict=True)
    ]
    return {"content": tokens, "refusal": None}


def completion_log_probs(
    pieces: Sequence[str], log_probs: Sequence[float] | NDArray[np.float32], *, first_offset: int = 0
) -> Body:
    """Build `logprobs` of a completion. `first_offset` is the position of the first piece in the text."""
    offsets = [*accumulate((len(piece) for piece in pieces), initial=first_offset)][:-1]
    values = [float(value) for value in log_probs]
    return {"tokens": list(pieces), "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}


def models_response(model: str) -> Body:
    return {"object": "list", "data": [model_card(model)]}


def model_card(model: str) -> Body:
    return {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}


def _body(header: ResponseHeader, turn: Turn, kind: str, choice: Body) -> Body:
    completion_tokens = len(turn.response_ids)
    return {
        "id": header.id,
        "object": kind,
        "created": header.created,
        "model": header.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": header.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": header.prompt_tokens + completion_tokens,
        },
    }


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
