"""Turns as the OpenAI API tells them: whole, or in chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.types import FinishReason, Turn
from rollouter.gateway.messages import Message

Body = dict[str, Any]


class Answer(NamedTuple):
    """What goes back over HTTP."""

    status: int
    body: Body


class Told(NamedTuple):
    """What every response says of its turn."""

    id: str
    model: str
    created: int
    """Wall clock, seconds."""
    prompt_tokens: int


def chat_response(told: Told, turn: Turn, message: Message, pieces: Sequence[str] | None) -> Body:
    """`pieces`: the tokens' texts, if log-probs are wanted."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    said: Body = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = calls
    log_probs = None
    if pieces is not None:
        log_probs = {"content": [
            {"token": piece, "logprob": float(value), "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, value in zip(pieces, turn.rollout_log_probs, strict=True)
        ], "refusal": None}  # fmt: skip
    length = turn.finish_reason is FinishReason.LENGTH
    reason = "length" if length else "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": said, "logprobs": log_probs, "finish_reason": reason}
    return _body(told, turn, "chat.completion", choice)


def completion_response(told: Told, turn: Turn, text: str, pieces: Sequence[str] | None) -> Body:
    """`pieces`: the tokens' texts, if log-probs are wanted."""
    log_probs = None
    if pieces is not None:
        offsets = [0]
        for piece in pieces[:-1]:
            offsets.append(offsets[-1] + len(piece))
        values = [float(value) for value in turn.rollout_log_probs]
        log_probs = {"tokens": list(pieces), "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}
    reason = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
    return _body(told, turn, "text_completion",
                 {"index": 0, "text": text, "logprobs": log_probs, "finish_reason": reason})  # fmt: skip


def models_response(model: str) -> Body:
    return {"object": "list", "data": [model_card(model)]}


def model_card(model: str) -> Body:
    return {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}


def events(body: Body, *, include_usage: bool) -> Iterator[bytes]:
    """A whole response as the server-sent events of a stream."""
    chat = body["object"] == "chat.completion"
    head = {"id": body["id"], "created": body["created"], "model": body["model"],
            "object": "chat.completion.chunk" if chat else "text_completion"}  # fmt: skip
    if include_usage:
        head["usage"] = None
    for choice in _chunks(body["choices"][0]) if chat else body["choices"]:
        yield _event({**head, "choices": [choice]})
    if include_usage:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _chunks(choice: Mapping[str, Any]) -> Iterator[Body]:
    said = choice["message"]

    def chunk(delta: Body, reason: str | None = None, log_probs: Any = None) -> Body:
        return {"index": 0, "delta": delta, "logprobs": log_probs, "finish_reason": reason}

    yield chunk({"role": "assistant", "content": ""})
    if "reasoning_content" in said:
        yield chunk({"reasoning_content": said["reasoning_content"]})
    if said["content"]:
        yield chunk({"content": said["content"]}, log_probs=choice["logprobs"])
    for index, call in enumerate(said.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, choice["finish_reason"], None if said["content"] else choice["logprobs"])


def _event(chunk: Body) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _body(told: Told, turn: Turn, kind: str, choice: Body) -> Body:
    completion_tokens = len(turn.response_ids)
    return {
        "id": told.id,
        "object": kind,
        "created": told.created,
        "model": told.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": told.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": told.prompt_tokens + completion_tokens,
        },
    }


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
