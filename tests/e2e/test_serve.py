"""`asyncrl serve` with a real engine, as clients, load balancers and Prometheus see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.launches import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "a-key-of-this-test"


@dataclass
class ServedModel:
    """A started `asyncrl serve`."""

    process: subprocess.Popen[str]
    url: str

    def health(self) -> int:
        """Return the status of /health; 0: nothing listens yet."""
        try:
            return httpx.get(f"{self.url}/health", timeout=20).status_code
        except httpx.TransportError:
            return 0

    def until(self, condition: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.05)

    def post(self, path: str, **request: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        return httpx.post(f"{self.url}{path}", headers=headers, timeout=120, **request)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    port = free_port()
    command = [sys.executable, "-m", "asyncrl", "serve", f"serve.port={port}", "serve.api_key_env=SERVE_TEST"]
    directory = tmp_path_factory.mktemp("serve")
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, "SERVE_TEST": KEY}, stdout=log, stderr=log, text=True
        )
    model = ServedModel(process, f"http://127.0.0.1:{port}")
    seen: list[int] = []
    try:
        model.until(lambda: bool(seen.append(model.health())) or seen[-1] == 200, 400)
        assert set(seen) <= {0, 404, 503, 200}, "until an engine is ready, no answer is 200"
        yield model
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(120) == 0, (directory / "log").read_text()
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def code_of(answer: httpx.Response, status: int) -> Any:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and "ray" not in answer.text.lower(), error
    return error["code"]


def test_openais_client_gets_answers_and_its_own_exceptions(served: ServedModel) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
    (model,) = [one.id for one in client.models.list().data]
    question: Any = [{"role": "user", "content": "12+34"}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=4)
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 4
    with client.chat.completions.create(model=model, messages=question, max_tokens=4, stream=True) as stream:
        assert [chunk for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")
    long: Any = [{"role": "user", "content": "1+" * 2000 + "1"}]
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=long, stream=streamed)
        assert refused.value.code == "context_length_exceeded", refused.value
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=question)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=question, temperature=-1)
    assert "temperature" in str(refused.value)


def test_malformed_requests_are_refused_in_openais_form(served: ServedModel) -> None:
    for content in ("", "{", "[]", '{"messages": 7}', '{"messages": [{"role": "user"}], "max_tokens": "x"}'):
        answer = served.post("/v1/chat/completions", content=content)
        assert code_of(answer, 400) in (None, "invalid_value"), answer.text
    assert code_of(served.post("/v1/nothing", json={}), 404) == "not_found"
    assert code_of(served.post("/v1/models", json={}), 405) == "method_not_allowed"
    assert code_of(served.post("/v1/completions", content=b" " * (33 << 20)), 413) is None
    assert code_of(served.post("/v1/embeddings", json={"model": "quickstart", "input": "x"}), 400) is None


def test_prometheus_gets_the_requests_and_vllms_metrics(served: ServedModel) -> None:
    served.post("/v1/completions", json={"model": "quickstart", "prompt": "1+1=", "max_tokens": 3, "ignore_eos": True})
    assert httpx.get(f"{served.url}/metrics", timeout=20).status_code == 401
    text = httpx.get(f"{served.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=20).text
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert families["asyncrl_serve_replicas"][0].value == 1
    assert sum(one.value for one in families["vllm:generation_tokens"] if one.name.endswith("_total")) >= 3
    assert all(one.labels["replica"] for name, found in families.items() if name.startswith("vllm:") for one in found)
    paths = {one.labels["path"] for one in families["asyncrl_serve_requests"]}
    assert "/v1/completions" in paths


def test_health_follows_the_engine(served: ServedModel) -> None:
    """Kill the engine: the server answers 503 until Serve has replaced it."""
    everyone = psutil.Process(served.process.pid).children(recursive=True)
    (core,) = [one for one in everyone if "EngineCore" in one.name() or any("EngineCore" in a for a in one.cmdline())]
    core.kill()
    served.until(lambda: served.health() == 503, 60)
    answer = served.post("/v1/completions", json={"model": "quickstart", "prompt": "1+1=", "max_tokens": 3})
    assert code_of(answer, 503) == "engines_unavailable" and int(answer.headers["retry-after"]) > 0
    served.until(lambda: served.health() == 200, 300)
    answer = served.post("/v1/completions", json={"model": "quickstart", "prompt": "1+1=", "max_tokens": 3})
    assert answer.status_code == 200, answer.text
