"""Messages as clients of the OpenAI API send them, in the form that chat templates want; and whether two are the same.

What we answered comes back from clients in many shapes: `content` null or empty, `refusal` and `annotations` added,
arguments with other blanks, tool-call ids renamed, reasoning dropped. Two messages are the same if role, text and calls
are. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollouter.gateway.errors import RequestError

Message = dict[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def to_template(messages: Any) -> list[Message]:
    """The messages of a request as a chat template gets them: texts are strings, arguments of calls are objects.

    A tool's message gets the name of the call that it answers. Fields that no template knows are left out.

    Raises:
        RequestError: they are no messages, or have something in them that is no text.
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
    """The same for messages that are the same, in a template's form."""
    role, text = message["role"], message["content"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([role, text.strip() if role == "assistant" else text, calls], sort_keys=True)


def arguments_of(written: Any) -> Any:
    """A call's arguments as an object, if they are the JSON of one; else as they are."""
    if not isinstance(written, str):
        return written
    try:
        read = json.loads(written)
    except ValueError:
        return written
    return read if isinstance(read, dict) else written


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {type(message).__name__}; expected an object", param=where)
    role = _ROLES.get(message.get("role", ""))
    if role is None:
        raise RequestError(f"{where}.role is {message.get('role')!r}; expected {', '.join(_ROLES)}", param=where)
    read: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            read["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is no call of a function", param=where)
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
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RequestError(f"{where} has a part of type {kind!r}; this endpoint takes text only", param=where)
    return "\n".join(texts)
