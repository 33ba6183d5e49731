"""Answers of the engines' OpenAI API, through Ray's ingress and with a replica in this process, without Ray itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import openai
import pytest
import ray
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from rollouter.serving.access import HttpAccess, checked_app
from rollouter.serving.http_metrics import HttpMetrics, engine_metrics

pytestmark = pytest.mark.timeout(300)  # importing vLLM takes long on a busy machine
QUESTION = {"model": "small", "messages": [{"role": "user", "content": "12+34"}]}
COMPLETION = {"id": "cmpl-1", "object": "chat.completion", "created": 1, "model": "small", "choices": [],
              "usage": {"prompt_tokens": 1, "total_tokens": 1}}  # fmt: skip


class Replica:
    """A handle whose replica answers with the items of `script`; an exception in it is raised."""

    def __init__(self, *script: Any) -> None:
        self.script = script

    def options(self, **options: Any) -> Replica:
        return self

    def __getattr__(self, method: str) -> Replica:
        return self

    async def remote(self, body: Any, info: Any) -> AsyncIterator[Any]:
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            yield item


class Fleet:
    """A fleet of `size` replicas with these metrics."""

    def __init__(self, size: int = 1, metrics: tuple[str, ...] = ()) -> None:
        self.size = size
        self.answers = metrics

    def count(self) -> int:
        return self.size

    async def metrics(self) -> tuple[str, ...]:
        return self.answers


def client(replica: Replica | None = None, fleet: Fleet | None = None, access: HttpAccess | None = None) -> TestClient:
    from rollouter.serving.openai_app import openai_app

    app = openai_app("small", replica or Replica(), fleet or Fleet())
    return TestClient(checked_app(app, access or HttpAccess(None, None)), base_url="http://127.0.0.1")


def engine_error(message: str, status: int, param: str | None = None) -> Any:
    """Return vLLM's answer to a request that it refuses."""
    from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse

    return ErrorResponse(error=ErrorInfo(message=message, type="BadRequestError", param=param, code=status))


def chat_answer() -> Any:
    from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse

    return ChatCompletionResponse(**COMPLETION)


def task_error(cause: Exception) -> Exception:
    """Return what a handle raises for an exception in the replica."""
    return ray.exceptions.RayTaskError("chat", "Traceback: ray/serve/_private/replica.py", cause).as_instanceof_cause()


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """Return the error of an answer, whose form must be that of the OpenAI API."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "ray" not in answer.text.lower() and "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "body"),
        ("{", "body"),
        ("[1, 2]", "body"),
        ('"text"', "body"),
        ('{"model": "small"}', "messages"),
        ('{"model": "small", "messages": "12+34"}', "messages"),
        ('{"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', "max_tokens"),
        ('{"model": "small", "messages": [{"role": "user", "content": "x"}], "temperature": []}', "temperature"),
        ('{"model": "small", "messages": 7}', "body"),
        ('{"messages": [{"role": "user"}], "max_tokens": "x"}', "max_tokens"),
        ('{"model": "small", "messages": [{"role": "user", "content": [7]}]}', "content"),
        ('{"model": "small", "messages": [{"role": "user", "content": {"a": 1}}]}', "content"),
        ('{"model": "small", "messages": [{"role": "assistant", "tool_calls": [7]}]}', "ToolCall"),
        ('{"model": 7, "messages": [{"role": "user", "content": "x"}]}', "model"),
    ],
)
def test_a_malformed_body_is_refused_with_the_field(content: str, said: str) -> None:
    answer = client().post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert said in error["message"] and error["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_refused_as_openai_refuses_it() -> None:
    text = "This model's maximum context length is 64 tokens. However, your prompt contains 99 input tokens"
    refusal = Replica(engine_error(text, 400, "input_tokens"))
    error = error_of(client(refusal).post("/v1/chat/completions", json=QUESTION), 400)
    assert error == {"message": text, "type": "invalid_request_error", "param": "input_tokens",
                     "code": "context_length_exceeded"}  # fmt: skip
    streamed = client(Replica([engine_error(text, 400)])).post(
        "/v1/chat/completions", json={**QUESTION, "stream": True}
    )
    assert error_of(streamed, 400)["code"] == "context_length_exceeded"


def test_unknown_paths_methods_models_and_keys_are_refused_alike() -> None:
    served = client(access=HttpAccess("secret", None))
    key = {"authorization": "Bearer secret"}
    assert error_of(served.get("/v1/models"), 401)["code"] == "invalid_api_key"
    assert error_of(served.get("/v1/nothing", headers=key), 404)["code"] == "not_found"
    wrong = served.get("/v1/chat/completions", headers=key)
    assert error_of(wrong, 405)["code"] == "method_not_allowed" and wrong.headers["allow"] == "POST"
    unknown = served.post("/v1/chat/completions", json={**QUESTION, "model": "gpt-9"}, headers=key)
    assert error_of(unknown, 404) == {
        "message": "there is no model 'gpt-9'; this server has 'small'", "type": "invalid_request_error",
        "param": "model", "code": "model_not_found"}  # fmt: skip
    assert error_of(served.get("/v1/models/gpt-9", headers=key), 404)["code"] == "model_not_found"
    assert [one["id"] for one in served.get("/v1/models", headers=key).json()["data"]] == ["small"]
    card = {"id": "small", "object": "model", "created": 0, "owned_by": "asyncrl"}
    assert served.get("/v1/models/small", headers=key).json() == card


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (ray.exceptions.ActorDiedError(), 503, "engines_failed"),
        (task_error(RuntimeError("EngineCore died in /home/user/ray")), 503, "engines_failed"),
        (engine_error("EngineCore encountered an issue in ray", 500), 503, "engines_failed"),
        (RuntimeError("ray: an internal state"), 500, "internal_error"),
    ],
)
def test_failures_of_engines_show_no_internals(failure: Any, status: int, code: str) -> None:
    answer = client(Replica(failure)).post("/v1/chat/completions", json=QUESTION)
    assert error_of(answer, status) | {"message": ""} == {
        "message": "", "type": "server_error", "param": None, "code": code}  # fmt: skip


def test_an_answer_that_takes_too_long_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Replica):
        async def remote(self, body: Any, info: Any) -> AsyncIterator[Any]:
            await anyio.sleep(30)
            yield chat_answer()

    monkeypatch.setattr("ray.llm._internal.serve.core.ingress.ingress.DEFAULT_LLM_ROUTER_HTTP_TIMEOUT", 0.1)
    error = error_of(client(Slow()).post("/v1/chat/completions", json=QUESTION), 408)
    assert (error["code"], error["message"]) == ("timeout", "the request took too long")


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    chunk = 'data: {"id": "1"}\n\n'
    replica = Replica([chunk], ray.exceptions.ActorDiedError())
    answer = client(replica).post("/v1/chat/completions", json={**QUESTION, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert json.loads(events[0]) == {"id": "1"} and json.loads(events[1])["error"]["code"] == "engines_failed"


def test_without_replicas_health_and_requests_answer_503_at_once() -> None:
    fleet = Fleet(0)
    served = client(Replica(chat_answer()), fleet, HttpAccess("secret", None))
    assert error_of(served.get("/health"), 503)["code"] == "engines_unavailable"
    asked = served.post("/v1/chat/completions", json=QUESTION, headers={"authorization": "Bearer secret"})
    assert error_of(asked, 503)["code"] == "engines_unavailable" and int(asked.headers["retry-after"]) > 0
    fleet.size = 2
    ready = served.get("/health")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "replicas": 2})
    asked = served.post("/v1/chat/completions", json=QUESTION, headers={"authorization": "Bearer secret"})
    assert asked.status_code == 200 and asked.json()["id"] == "cmpl-1"


def test_the_official_client_understands_the_errors() -> None:
    served = client(Replica(engine_error("temperature must be finite", 400, "temperature")))
    caller = openai.OpenAI(api_key="none", base_url="http://127.0.0.1/v1", http_client=served, max_retries=0)
    with pytest.raises(openai.BadRequestError) as raised:
        caller.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}])
    assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        caller.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


@pytest.fixture
def vllm_counter() -> Iterator[Counter]:
    counter = Counter("vllm:toy_tokens", "Tokens of a toy.", ["engine"])
    yield counter
    REGISTRY.unregister(counter)


def test_metrics_have_the_requests_and_those_of_vllm_by_replica(vllm_counter: Counter) -> None:
    vllm_counter.labels("0").inc(3)
    texts = (engine_metrics("a", 7), engine_metrics("b", 8))
    served = client(Replica(chat_answer()), Fleet(2, texts))
    served.post("/v1/chat/completions", json=QUESTION)
    served.get("/v1/nothing")
    served.get("/v1/models/small")
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    tokens = [one for one in families["vllm:toy_tokens"].samples if one.name == "vllm:toy_tokens_total"]
    assert [(one.labels, one.value) for one in tokens] == [({"engine": "0", "replica": name}, 3.0) for name in "ab"]
    versions = families["asyncrl_serve_weights_version"].samples
    assert [(one.labels["replica"], one.value) for one in versions] == [("a", 7.0), ("b", 8.0)]
    assert families["asyncrl_serve_replicas"].samples[0].value == 2
    requests = {
        (one.labels["path"], one.labels["status"]): one.value
        for one in families["asyncrl_serve_requests"].samples
        if one.name.endswith("_total")
    }
    assert requests == {
        ("/v1/chat/completions", "200"): 1, ("other", "404"): 1, ("/v1/models/{name:path}", "200"): 1}  # fmt: skip
    assert answer.text.count("# TYPE vllm:toy_tokens_total") == 1, "a family is written once for all replicas"


def test_metrics_of_the_api_are_there_without_replicas() -> None:
    assert b"asyncrl_serve_replicas 0.0" in HttpMetrics().text(0, ())
