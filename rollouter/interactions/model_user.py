"""A user played by another model, behind an OpenAI-compatible endpoint: `class_name: model`.

the run's conversation       what the model that plays the user is asked
system                       system: its part, of `system_prompt`
user: the question           user: `opening`
assistant: …                 assistant: the question
tool: …                      user: what the assistant said
assistant: …                 … and it answers as the assistant: the next user message
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from asyncrl.config.import_path import nearest
from asyncrl.config.sections.base import ConfigSection, Positive, Seconds
from asyncrl.core.failures import ConfigError, DataError
from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply
from rollouter.rewards.chat_endpoint import ChatEndpoint
from rollouter.rewards.conversation import text_of
from rollouter.user_code import parse_settings

PLACEHOLDERS = ("question", "ground_truth", "instruction", "stop_phrase")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
SYSTEM_PROMPT = """You play a person who talks to an assistant. Stay in this part: write only what the person says \
next, in one or two sentences, and never do the assistant's work.

What the person wants: {question}
{instruction}
Once it is done, or the assistant is clearly not able to do it, say {stop_phrase} and nothing else."""


class ModelUserSettings(ConfigSection):
    base_url: str
    """Of the endpoint; most end in `/v1`."""
    model: str
    """Its name there."""
    api_key_env: str | None = None
    """Environment variable that holds the key; null: none is needed."""
    system_prompt: str = SYSTEM_PROMPT
    """The role to play. `{question}` becomes the prompt's last user message, `{ground_truth}` the row's,
    `{instruction}` the row's `interaction_kwargs.instruction` or nothing, `{stop_phrase}` the phrase below."""
    opening: str = "Hello, how can I help you?"
    """A turn of the assistant before the question, or empty. Some chat templates require that the other side begins."""
    stop_phrase: Annotated[str, Field(min_length=1)] = "[[DONE]]"
    """A message that contains it ends the trajectory and is not passed on."""
    timeout_s: Seconds = 30.0
    """Deadline of one request; all attempts lie within the interaction's own `timeout_s`."""
    max_concurrency: Positive = 64
    """Requests at once."""
    max_attempts: Positive = 3
    """Tries of one request."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request: `temperature`, `max_tokens`, …."""


class ModelUser(Environment):
    """A user whose messages another model writes. It gives no rewards."""

    def __init__(self, settings: ModelUserSettings, endpoint: ChatEndpoint) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._part = ""

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(ModelUserSettings, config)
        for name in _PLACEHOLDER.findall(settings.system_prompt):
            if name not in PLACEHOLDERS:
                raise ConfigError(f"system_prompt: nothing fills {{{name}}}{nearest(name, list(PLACEHOLDERS))}")
        endpoint = ChatEndpoint(
            settings.base_url,
            settings.model,
            api_key_env=settings.api_key_env,
            timeout_s=settings.timeout_s,
            max_concurrency=settings.max_concurrency,
            max_attempts=settings.max_attempts,
            params=settings.params,
        )
        return {"settings": settings, "endpoint": endpoint}

    async def reset(self, context: EpisodeContext, instruction: str = "") -> Sequence[Message]:
        """`instruction` is the row's text for the system prompt.

        Raises:
            DataError: the system prompt needs a question or a ground truth that the row lacks.
        """
        questions = [text_of(message) for message in context.messages if message.get("role") == "user"]
        fillings = {
            "question": questions[-1] if questions else None,
            "ground_truth": None if context.ground_truth is None else str(context.ground_truth),
            "instruction": instruction,
            "stop_phrase": self._settings.stop_phrase,
        }

        def filled(match: re.Match[str]) -> str:
            filling = fillings[match[1]]
            if filling is None:
                raise DataError(f"config.system_prompt has {match[0]}, and the row has nothing for it")
            return filling

        # In one pass, so that braces in a question stay.
        self._part = _PLACEHOLDER.sub(filled, self._settings.system_prompt)
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """
        Raises:
            InfraError, DataError, ConfigError: see `ChatEndpoint.ask`.
        """
        said = await self._endpoint.ask(
            [{"role": "system", "content": self._part}, *swapped(messages, opening=self._settings.opening)]
        )
        if self._settings.stop_phrase in said:
            return Reply(done=True)
        return Reply(said.strip())


def swapped(messages: Sequence[Message], *, opening: str) -> list[dict[str, str]]:
    """Return the conversation from the user's side: the assistant's messages are `user`, the user's `assistant`.

    System and tool messages and tool calls are hidden. Adjacent messages of one role are joined, for chat templates
    that require alternating roles. The last message is the assistant's; `…` stands for an empty one.
    """
    roles = {"user": "assistant", "assistant": "user"}
    turns = [("user", opening)] + [(roles[str(m["role"])], text_of(m)) for m in messages if m.get("role") in roles]
    visible: list[dict[str, str]] = []
    for role, text in turns:
        if not text:
            continue
        if visible and visible[-1]["role"] == role:
            visible[-1]["content"] += f"\n\n{text}"
        else:
            visible.append({"role": role, "content": text})
    if not visible or visible[-1]["role"] == "assistant":  # the assistant's last turn has no words
        visible.append({"role": "user", "content": "…"})
    return visible
