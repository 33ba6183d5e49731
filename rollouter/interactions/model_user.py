"""A user played by another model, behind an OpenAI-compatible endpoint: `class_name: model`.

the run's conversation       the request to the model that plays the user
system                       system: its role, from `system_prompt`
user: the question           user: `opening`
assistant: …                 assistant: the question
tool: …                      user: the last text of the assistant
assistant: …                 … and its answer is the next user message
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
from rollouter.user_code import parse_settings, shown

PLACEHOLDERS = ("question", "ground_truth", "instruction", "stop_phrase")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
SYSTEM_PROMPT = """You play a person who talks to an assistant. Stay in this part: write only what the person says \
next, in one or two sentences, and never do the assistant's work.

What the person wants: {question}
{instruction}
Once it is done, or the assistant is clearly not able to do it, say {stop_phrase} and nothing else."""


class ModelUserSettings(ConfigSection):
    base_url: str
    """URL of the endpoint; most end in `/v1`."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that contains the API key; null if the endpoint needs no key."""
    system_prompt: str = SYSTEM_PROMPT
    """The role to play. `{question}` becomes the prompt's last user message, `{ground_truth}` the row's,
    `{instruction}` the row's `interaction_kwargs.instruction` or nothing, `{stop_phrase}` the phrase below."""
    opening: str = "Hello, how can I help you?"
    """A turn of the assistant before the question, or empty. In the request it is the first `user` message, which some
    chat templates require."""
    stop_phrase: Annotated[str, Field(min_length=1)] = "[[DONE]]"
    """A message that contains this phrase ends the trajectory and is not shown to the policy."""
    timeout_s: Seconds = 30.0
    """Deadline of one request. All attempts together have the deadline of the interaction, its `timeout_s`."""
    max_concurrency: Positive = 64
    """Maximum number of concurrent requests."""
    max_attempts: Positive = 3
    """Maximum number of attempts per request."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request: `temperature`, `max_tokens`, …."""


class ModelUser(Environment):
    """A user whose messages another model writes. It gives no rewards."""

    def __init__(self, settings: ModelUserSettings, endpoint: ChatEndpoint) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._system_prompt = ""

    @classmethod
    def prepare(cls, **config: Any) -> Mapping[str, Any]:
        settings = parse_settings(ModelUserSettings, config)
        for name in _PLACEHOLDER.findall(settings.system_prompt):
            if name not in PLACEHOLDERS:
                raise ConfigError(f"system_prompt: no value for {{{name}}}{nearest(name, list(PLACEHOLDERS))}")
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
        """Fill in the system prompt; `instruction` is the row's text for it.

        Raises:
            DataError: the system prompt needs a question or a ground truth that the row lacks, or the instruction is
                not a text.
        """
        if not isinstance(instruction, str):
            raise DataError(f"interaction_kwargs.instruction: {shown(instruction)} is not a text")
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
                raise DataError(f"config.system_prompt has {match[0]}, but the row has no value for it")
            return filling

        # All placeholders are replaced in one pass, so that braces in a question stay.
        self._system_prompt = _PLACEHOLDER.sub(filled, self._settings.system_prompt)
        return ()

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        """Ask the model for the next user message.

        Raises:
            InfraError, DataError, ConfigError: see `ChatEndpoint.ask`.
        """
        said = await self._endpoint.ask(
            [{"role": "system", "content": self._system_prompt}, *swapped(messages, opening=self._settings.opening)]
        )
        if self._settings.stop_phrase in said:
            return Reply(done=True)
        return Reply(said.strip())


def swapped(messages: Sequence[Message], *, opening: str) -> list[dict[str, str]]:
    """Return the conversation from the user's side: the assistant's messages are `user`, the user's `assistant`.

    System and tool messages and tool calls are hidden. Adjacent messages of one role are joined, for chat templates
    that require alternating roles. The last message is the assistant's; if it is empty, `…` replaces it.
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
