"""Converts trajectories to messages and text, for reward models and judges. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import Prompt

Message = Mapping[str, Any]


class ScoredConversation(NamedTuple):
    """A conversation to score."""

    messages: tuple[Message, ...]
    """All chat messages before the assistant's last turn."""
    response: str
    """The text of the assistant's last turn."""


def conversation(prompt: Prompt, trajectory: Trajectory, response: str) -> ScoredConversation:
    """Return a trajectory as a conversation; `response` is the text of its last turn."""
    messages = trajectory.messages
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return ScoredConversation(messages[: turns[-1]] if turns else prompt.messages, response)


def question(prompt: Prompt) -> str:
    """Return the prompt's last user message."""
    asked = [message for message in prompt.messages if message.get("role") == "user"]
    return text_of(asked[-1]) if asked else ""


def transcript(conversation: ScoredConversation) -> str:
    """Return all messages and calls as text, by role."""
    said = [(str(message.get("role")), _said(message)) for message in conversation.messages]
    return "\n\n".join(f"{role}: {text}" for role, text in [*said, ("assistant", conversation.response)])


def text_of(message: Message) -> str:
    """Return a message's content; if it consists of parts, join the text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    pieces: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return "\n".join(str(piece["text"]) for piece in pieces if isinstance(piece, Mapping) and "text" in piece)


def _said(message: Message) -> str:
    calls = message.get("tool_calls")
    written = [_call(call) for call in calls] if isinstance(calls, list | tuple) else []
    return "\n".join(line for line in (text_of(message), *written) if line)


def _call(call: Any) -> str:
    """Return a call as text. A row may contain calls without the level `function`, or anything else."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return f"[calls {call}]"
    return f"[calls {function.get('name')} with {_json(function.get('arguments'))}]"


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
