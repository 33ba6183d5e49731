"""Trajectories as those read them who judge by text: reward models and judges. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.trajectory import Trajectory
from asyncrl.types import Prompt

Message = Mapping[str, Any]


class Conversation(NamedTuple):
    """What is scored."""

    messages: tuple[Message, ...]
    """Chat messages up to the assistant's last turn: the prompt's, and what was said since."""
    response: str
    """That turn."""


def conversation(prompt: Prompt, trajectory: Trajectory, response: str) -> Conversation:
    """`response`: the text of the trajectory's last turn."""
    messages = trajectory.messages
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return Conversation(messages[: turns[-1]] if turns else prompt.messages, response)


def question(prompt: Prompt) -> str:
    """The prompt's last user message."""
    asked = [message for message in prompt.messages if message.get("role") == "user"]
    return text_of(asked[-1]) if asked else ""


def transcript(conversation: Conversation) -> str:
    """Everything that was said and called, by role."""
    said = [(str(message.get("role")), _said(message)) for message in conversation.messages]
    return "\n\n".join(f"{role}: {text}" for role, text in [*said, ("assistant", conversation.response)])


def text_of(message: Message) -> str:
    """A message's content; of one in pieces, those that are text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    pieces: Sequence[Any] = content if isinstance(content, list | tuple) else ()
    return "\n".join(str(piece["text"]) for piece in pieces if isinstance(piece, Mapping) and "text" in piece)


def _said(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    told = [f"[calls {call['name']} with {_json(call['arguments'])}]" for call in calls]
    return "\n".join(line for line in (text_of(message), *told) if line)


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
