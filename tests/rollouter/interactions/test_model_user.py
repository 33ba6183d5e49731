"""A user played by a model: what that model is asked, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import ConfigError, DataError
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import EpisodeContext, Reply
from rollouter.interactions.loading import InteractionSet
from rollouter.interactions.model_user import swapped
from tests.fakes.environments import context, interaction, load
from tests.fakes.openai_server import Hang, OpenAIServer, failed, openai_server, said


def user(server: OpenAIServer, *, timeout_s: float = 60.0, on_error: Any = "stop", **config: Any) -> InteractionSet:
    settings = {"base_url": server.base_url, "model": "user-1", "opening": "Hello?", **config}
    return load(interaction("model", config=settings, timeout_s=timeout_s, on_error=on_error))


def row(question: str = "17+5?", **interaction_kwargs: Any) -> EpisodeContext:
    messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": question})
    return context(messages=messages, ground_truth=22, extra_info={"interaction_kwargs": interaction_kwargs})


ANSWERED = [*row().messages, {"role": "assistant", "content": "21"}]


async def test_a_dialogue_until_the_stop_phrase() -> None:
    async with openai_server([said(" Are you sure?\n"), said("Good. [[DONE]]")]) as server:
        loaded = user(server, params={"temperature": 0.7})
        async with loaded.session(row()) as session:
            assert await session.reset() == ()
            assert await session.step("21", ANSWERED) == Reply("Are you sure?")
            more = [*ANSWERED, {"role": "user", "content": "Are you sure?"}, {"role": "assistant", "content": "22"}]
            assert await session.step("22", more) == Reply(done=True)
            assert await session.score() is None
        await loaded.aclose()
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


async def test_the_part_is_filled_in_once() -> None:
    """Braces in a question are the question's."""
    template = "{instruction}|{question}|{ground_truth}|{stop_phrase}|{ no }"
    async with openai_server([said("bye")]) as server:
        loaded = user(server, system_prompt=template, stop_phrase="bye")
        async with loaded.session(row("what is {ground_truth}?", instruction="be brief", name=None)) as session:
            await session.reset()
            assert (await session.step("21", ANSWERED)).done
        await loaded.aclose()
    assert server.requests[0]["messages"][0]["content"] == "be brief|what is {ground_truth}?|22|bye|{ no }"


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("{question}", context(messages=({"role": "system", "content": "Be kind."},))),
        ("{ground_truth}", context()),
    ],
)
async def test_a_row_that_lacks_what_the_part_wants(template: str, given: EpisodeContext) -> None:
    async with openai_server([]) as server:
        loaded = user(server, system_prompt=template)
        async with loaded.session(given) as session:
            with pytest.raises(DataError, match=r"the row has nothing for it"):
                await session.reset()
        await loaded.aclose()


def test_the_conversation_with_roles_swapped() -> None:
    """Tools are not for the user to see, roles alternate, and the last word is the assistant's."""
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
    async with openai_server([failed(500), said("Why?")]) as server:
        loaded = user(server, max_attempts=1, on_error="drop")
        async with loaded.session(row()) as session:
            await session.reset()
            with pytest.raises(
                ToolFailedError, match=r"ModelUser\.step raised model 'user-1' at .* failed once"
            ) as raised:
                await session.step("21", ANSWERED)
            assert raised.value.on_error == "drop"
            assert await session.step("21", ANSWERED) == Reply("Why?")
        await loaded.aclose()


async def test_its_other_failures_keep_their_class() -> None:
    async with openai_server([said(None, refusal="never"), failed(401)]) as server:
        loaded = user(server)
        async with loaded.session(row()) as session:
            await session.reset()
            with pytest.raises(DataError, match="refused to answer: never"):
                await session.step("21", ANSWERED)
            with pytest.raises(ConfigError, match="cannot be asked: status 401"):
                await session.step("21", ANSWERED)
        await loaded.aclose()


async def test_the_interactions_deadline_is_the_last_one() -> None:
    async with openai_server([Hang()]) as server:
        loaded = user(server, timeout_s=0.3)
        async with loaded.session(row()) as session:
            await session.reset()
            with pytest.raises(ToolFailedError, match=r"ModelUser\.step did not return within 0\.3 s"):
                await session.step("21", ANSWERED)
        await loaded.aclose()


async def test_all_trajectories_share_its_limit() -> None:
    async with openai_server(lambda request: said("Why?")) as server:
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_url": None}, r"config\.base_url: None cannot be used"),
        ({"modl": "x"}, r"config\.modl: there is no such key.*did you mean 'model'\?"),
        (
            {"system_prompt": "ask {queston}"},
            r"config\.system_prompt: nothing fills \{queston\}; did you mean 'question'",
        ),
        ({"api_key_env": "NO_SUCH_KEY"}, r"config\.api_key_env: the environment variable 'NO_SUCH_KEY' is not set"),
        ({"base_url": "localhost"}, r"config\.base_url: 'localhost' is no address"),
        ({"params": {"model": "x"}}, r"config\.params\.model: it is set for every request"),
        ({"stop_phrase": ""}, r"config\.stop_phrase: '' cannot be used"),
    ],
)
def test_configuration_errors_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"interactions\[0\]\.{message}"):
        load(interaction("model", config={"base_url": "http://localhost:1/v1", "model": "m"} | config))
    with pytest.raises(ConfigError, match=r"config\.model: it is required here"):
        load(interaction("model", config={"base_url": "http://localhost:1/v1"}))
