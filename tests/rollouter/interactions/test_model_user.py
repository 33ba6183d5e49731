"""A user that a model plays: the requests to the model, and the use of its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import ConfigError, DataError
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import EpisodeContext, Reply
from rollouter.interactions.loading import InteractionSet
from rollouter.interactions.model_user import swapped
from tests.fakes.environments import context, interaction, load
from tests.fakes.openai_server import Hang, OpenAIServer, chat_answer, error_answer, openai_server


def user(server: OpenAIServer, *, timeout_s: float = 60.0, on_error: Any = "stop", **config: Any) -> InteractionSet:
    settings = {"base_url": server.base_url, "model": "user-1", "opening": "Hello?", **config}
    return load(interaction("model", config=settings, timeout_s=timeout_s, on_error=on_error))


def row(question: str = "17+5?", **interaction_kwargs: Any) -> EpisodeContext:
    messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": question})
    return context(messages=messages, ground_truth=22, extra_info={"interaction_kwargs": interaction_kwargs})


@asynccontextmanager
async def talking(script: Any, given: EpisodeContext | None = None, **config: Any) -> AsyncIterator[Any]:
    """Return a session whose user is played by a script, and the server that receives the requests."""
    async with openai_server(script) as server:
        loaded = user(server, **config)
        async with loaded.session(given or row()) as session:
            yield session, server
        await loaded.aclose()


ANSWERED = [*row().messages, {"role": "assistant", "content": "21"}]


async def test_the_stop_phrase_ends_the_dialogue() -> None:
    script = [chat_answer(" Are you sure?\n"), chat_answer("Good. [[DONE]]")]
    async with talking(script, params={"temperature": 0.7}) as (session, server):
        assert await session.reset() == ()
        assert await session.step("21", ANSWERED) == Reply("Are you sure?")
        more = [*ANSWERED, {"role": "user", "content": "Are you sure?"}, {"role": "assistant", "content": "22"}]
        assert await session.step("22", more) == Reply(done=True)
        assert await session.score() is None
    first, second = server.requests
    assert (first["model"], first["temperature"]) == ("user-1", 0.7)
    part, *conversation = second["messages"]
    assert part["role"] == "system"
    assert "17+5?" in part["content"] and "[[DONE]]" in part["content"] and "{" not in part["content"]
    assert conversation == [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "17+5?"},
        {"role": "user", "content": "21"},
        {"role": "assistant", "content": "Are you sure?"},
        {"role": "user", "content": "22"},
    ]
    assert first["messages"] == [part, *conversation[:3]]


async def test_the_fields_of_the_system_prompt_are_replaced_once() -> None:
    """Braces in a question are text and not fields."""
    template = "{instruction}|{question}|{ground_truth}|{stop_phrase}|{ no }"
    given = row("what is {ground_truth}?", instruction="be brief", name=None)
    async with talking([chat_answer("bye")], given, system_prompt=template, stop_phrase="bye") as (session, server):
        await session.reset()
        assert (await session.step("21", ANSWERED)).done
    assert server.requests[0]["messages"][0]["content"] == "be brief|what is {ground_truth}?|22|bye|{ no }"


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("{question}", context(messages=({"role": "system", "content": "Be kind."},))),
        ("{ground_truth}", context()),
    ],
)
async def test_a_row_without_a_value_for_the_system_prompt_is_refused(template: str, given: EpisodeContext) -> None:
    async with talking([], given, system_prompt=template) as (session, _):
        with pytest.raises(DataError, match=r"the row has no value for it"):
            await session.reset()


def test_the_model_gets_the_conversation_with_swapped_roles() -> None:
    """The user's model sees no tools, roles alternate, and the last message is the assistant's."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    messages: list[Mapping[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "a black cat"},
        {"role": "assistant", "content": "A cat."},
    ]
    assert swapped(messages, opening="") == [
        {"role": "assistant", "content": "what is this?"},
        {"role": "user", "content": "Let me see.\n\nA cat."},
    ]
    assert swapped([*messages[:2], {"role": "assistant", "content": ""}], opening="")[-1] == {
        "role": "user",
        "content": "…",
    }


async def test_a_user_that_cannot_be_reached_is_a_failed_interaction() -> None:
    async with talking([error_answer(500), chat_answer("Why?")], max_attempts=1, on_error="drop") as (session, _):
        await session.reset()
        failure = r"ModelUser\.step raised model 'user-1' at .* failed once"
        with pytest.raises(ToolFailedError, match=failure) as raised:
            await session.step("21", ANSWERED)
        assert raised.value.on_error == "drop"
        assert await session.step("21", ANSWERED) == Reply("Why?")


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (chat_answer(None, refusal="never"), DataError, "refused to answer: never"),
        (error_answer(401), ConfigError, "cannot be asked: status 401"),
        (Hang(), ToolFailedError, r"ModelUser\.step did not return within 0\.3 s"),
    ],
)
async def test_other_failures_keep_their_class(script: Any, kind: type[Exception], message: str) -> None:
    async with talking([script], timeout_s=0.3 if isinstance(script, Hang) else 60.0) as (session, _):
        await session.reset()
        with pytest.raises(kind, match=message):
            await session.step("21", ANSWERED)


async def test_all_trajectories_share_the_concurrency_limit() -> None:
    async with openai_server(lambda request: chat_answer("Why?")) as server:
        loaded = user(server, max_concurrency=2)

        async def one() -> None:
            async with loaded.session(row()) as session:
                await session.reset()
                await session.step("21", ANSWERED)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(one)
        await loaded.aclose()
    assert len(server.requests) == 8
    assert server.most_open <= 2
