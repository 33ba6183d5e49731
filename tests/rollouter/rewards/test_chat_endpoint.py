"""The client of an OpenAI-compatible endpoint against a real server: requests, retries and errors."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import AsyncRLError, ConfigError, DataError, DeadlineError, InfraError
from rollouter.rewards.chat_endpoint import ChatEndpoint
from tests.fakes.hostile import BROKEN_JSON, LONE, dumps, messages, texts, values
from tests.fakes.openai_server import (
    Hang,
    HangUp,
    OpenAIServer,
    Script,
    ServerAnswer,
    chat_answer,
    error_answer,
    openai_server,
)

QUESTION = [{"role": "user", "content": "17+5?"}]


class EndpointSetup(NamedTuple):
    server: OpenAIServer
    endpoint: ChatEndpoint
    waits: list[float]


@asynccontextmanager
async def endpoint(script: Any, **changes: Any) -> AsyncIterator[EndpointSetup]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    settings = {"api_key_env": None, "timeout_s": 10.0, "max_concurrency": 4, "sleep": sleep} | changes
    async with openai_server(script) as server:
        asked = ChatEndpoint(server.base_url, "judge-1", **settings)
        try:
            yield EndpointSetup(server, asked, waits)
        finally:
            await asked.aclose()


async def test_the_endpoint_returns_the_models_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    params = {"temperature": 0.5, "top_k": 3, "chat_template_kwargs": {"thinking": False}}
    async with endpoint([chat_answer("22")], api_key_env="JUDGE_KEY", params=params) as setup:
        assert await setup.endpoint.ask(QUESTION) == "22"
        assert setup.server.requests == [{"model": "judge-1", "messages": QUESTION, **params}]
        assert setup.server.keys == ["Bearer secret"]
        assert setup.waits == []


@pytest.mark.parametrize("bad", [*map(error_answer, (408, 429, 500, 503)), HangUp(), ServerAnswer("{not json")])
async def test_transient_failures_are_retried(bad: Script) -> None:
    async with endpoint([bad, bad, chat_answer("22")]) as setup:
        assert await setup.endpoint.ask(QUESTION) == "22"
        assert setup.waits == [1.0, 2.0]
        assert len(setup.server.requests) == 3


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7.0), ("0.25", 1.0), ("1e9", 60.0), ("soon", 1.0), ("nan", 1.0)])
async def test_retry_after_is_honoured(header: str, wait_s: float) -> None:
    async with endpoint([error_answer(429, retry_after=header), chat_answer("22")]) as setup:
        assert await setup.endpoint.ask(QUESTION) == "22"
        assert setup.waits == [wait_s]


async def test_retries_end_after_max_attempts() -> None:
    async with endpoint([error_answer(500, "out of memory")] * 4, max_attempts=4) as setup:
        with pytest.raises(InfraError, match=r"model 'judge-1' at http.*failed 4 times.*500.*out of memory") as raised:
            await setup.endpoint.ask(QUESTION)
        assert not isinstance(raised.value, DeadlineError)
        assert "InternalServerError" in raised.value.cause
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        assert setup.waits == [1.0, 2.0, 4.0]


async def test_a_refused_connection_is_an_infra_error() -> None:
    async with openai_server([]) as server:
        base_url = server.base_url
    asked = ChatEndpoint(base_url, "m", api_key_env=None, timeout_s=10, max_concurrency=1, max_attempts=1)
    with pytest.raises(InfraError, match=r"failed once.*APIConnectionError"):
        await asked.ask(QUESTION)
    await asked.aclose()


async def test_each_try_has_its_deadline() -> None:
    async with endpoint([Hang(), chat_answer("22")], timeout_s=0.3) as setup:
        assert await setup.endpoint.ask(QUESTION) == "22"
        assert setup.waits == [1.0]
    async with endpoint([Hang()], timeout_s=0.2, max_attempts=1) as setup:
        with pytest.raises(DeadlineError, match=r"failed once.*no answer within timeout_s = 0\.2 s"):
            await setup.endpoint.ask(QUESTION)


@pytest.mark.parametrize(
    ("status", "fix"), [(401, "check the key"), (403, "check the key"), (404, "check base_url and the model's name")]
)
async def test_errors_that_every_request_would_get_are_config_errors(status: int, fix: str) -> None:
    async with endpoint([error_answer(status, "unknown")]) as setup:
        with pytest.raises(ConfigError, match=rf"cannot be asked: status {status}.*unknown.*{fix}"):
            await setup.endpoint.ask(QUESTION)
        assert setup.waits == []


async def test_a_server_without_chat_completions_is_a_config_error() -> None:
    async with endpoint([ServerAnswer("<html>welcome</html>", kind="text/html")]) as setup:
        with pytest.raises(ConfigError, match=r"something other than a chat completion.*welcome.*base_urls end in /v1"):
            await setup.endpoint.ask(QUESTION)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (error_answer(400, "too many tokens"), "refuses the conversation: status 400.*too many tokens"),
        (error_answer(422), "refuses the conversation: status 422"),
        (chat_answer(None), "without a text, finish_reason 'stop'"),
        (chat_answer(" \n", finish_reason="length"), "without a text, finish_reason 'length'"),
        (chat_answer(None, refusal="I will not"), "refused to answer: I will not"),
        (chat_answer("", finish_reason="content_filter"), "refused to answer$"),
        (ServerAnswer({"id": "1", "object": "chat.completion", "choices": []}), "without a choice"),
    ],
)
async def test_errors_of_one_conversation_are_data_errors(answer: ServerAnswer, message: str) -> None:
    async with endpoint([answer]) as setup:
        with pytest.raises(DataError, match=message):
            await setup.endpoint.ask(QUESTION)
        assert setup.waits == []


async def test_the_concurrency_limit_counts_only_running_tries() -> None:
    """A request that waits for its next try does not count against the limit."""
    others_are_done = anyio.Event()
    answered = 0

    async def sleep(seconds: float) -> None:
        await others_are_done.wait()

    def answer(request: Any) -> ServerAnswer:
        return (
            error_answer(503)
            if request["messages"][0]["content"] == "first" and not others_are_done.is_set()
            else chat_answer("22")
        )

    async with endpoint(answer, max_concurrency=1, sleep=sleep) as setup:

        async def ask(content: str) -> None:
            nonlocal answered
            assert await setup.endpoint.ask([{"role": "user", "content": content}]) == "22"
            answered += 1
            if answered == 3:
                others_are_done.set()

        async with anyio.create_task_group() as group:
            for content in ("first", "second", "third", "fourth"):
                group.start_soon(ask, content)
        assert setup.server.most_open == 1
        assert len(setup.server.requests) == 5


async def test_cancellation_ends_a_request() -> None:
    async with endpoint([Hang()]) as setup:
        async with anyio.create_task_group() as group:
            group.start_soon(setup.endpoint.ask, QUESTION)
            await setup.server.hanging.wait()
            group.cancel_scope.cancel()
        assert setup.waits == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "localhost:8000/v1"}, "base_url: 'localhost:8000/v1' is not an address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env: the environment variable 'NO_SUCH_KEY' is not set"),
        ({"api_key_env": "EMPTY_KEY"}, "api_key_env: the environment variable 'EMPTY_KEY' is not set"),
        ({"timeout_s": 0.0}, r"timeout_s = 0\.0"),
        ({"max_attempts": 0}, "max_attempts = 0"),
        ({"max_concurrency": 0}, "max_concurrency = 0"),
        ({"params": {"temperature": 1.0, "n": 2}}, "params.n: it is set for every request"),
    ],
)
def test_bad_settings_are_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("EMPTY_KEY", "")
    settings: dict[str, Any] = {"base_url": "http://localhost:1/v1", "model": "m", "api_key_env": None}
    settings |= {"timeout_s": 1.0, "max_concurrency": 1, **changes}
    with pytest.raises(ConfigError, match=message):
        ChatEndpoint(**settings)


async def test_closing_takes_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The close of a connection has a time limit, and a cancellation does not skip the close."""
    monkeypatch.setattr("rollouter.rewards.chat_endpoint.CLOSE_S", 0.05)
    closings: list[str] = []
    async with endpoint([]) as setup:

        async def stuck() -> None:
            closings.append("begun")
            await anyio.sleep_forever()

        monkeypatch.setattr(setup.endpoint._client, "close", stuck)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await setup.endpoint.aclose()
        assert closings == ["begun"]


# ------------------------------------------------------------------------------------------------ hostile answers


@settings(max_examples=10)
@given(contents=st.lists(texts() | values(), min_size=8, max_size=8), choice=messages(), message=messages())
async def test_answers_of_any_shape_are_text_or_an_error(contents: list[Any], choice: Any, message: Any) -> None:
    answers: list[Script] = [ServerAnswer({"choices": [choice]}), ServerAnswer({"choices": [{"message": message}]})]
    for content in contents:
        answers += [chat_answer(content), ServerAnswer({"choices": content}), ServerAnswer(dumps(content))]
    async with endpoint(answers, max_attempts=1) as setup:
        for _ in answers:
            try:
                (await setup.endpoint.ask(QUESTION)).encode()
            except AsyncRLError as error:
                assert error.message.startswith("model 'judge-1' at")


@pytest.mark.parametrize("body", BROKEN_JSON)
async def test_an_answer_that_is_no_json_is_asked_for_again(body: str) -> None:
    broken = ServerAnswer(body.encode(errors="replace").decode())
    async with endpoint([broken, chat_answer(LONE)]) as setup:
        with suppress(ConfigError, DataError):  # some of it is JSON, but no chat completion
            assert await setup.endpoint.ask(QUESTION) == "?"
