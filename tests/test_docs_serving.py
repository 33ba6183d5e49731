"""The commands and examples of docs/serving.md are valid, and its tables have what the server has."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from starlette.testclient import TestClient

from asyncrl.config.compose import check_config
from rollouter.serving.access import HttpAccess, checked_app

PAGE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(300)  # importing vLLM takes long on a busy machine
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)


class Adder:
    """A handle whose replica answers chats with the sum in the last message."""

    def options(self, **options: Any) -> Adder:
        return self

    def __getattr__(self, method: str) -> Adder:
        return self

    async def remote(self, body: Any, info: Any) -> AsyncIterator[Any]:
        from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse

        text = str(sum(map(int, body.messages[-1]["content"].split("+"))))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "total_tokens": 2}
        yield ChatCompletionResponse(
            id="1", object="chat.completion", created=1, model=body.model, choices=[choice], usage=usage
        )


class OneReplica:
    def count(self) -> int:
        return 1

    async def metrics(self) -> tuple[str, ...]:
        from rollouter.serving.http_metrics import engine_metrics

        return (engine_metrics("a", 0),)


@pytest.fixture(scope="module")
def served() -> TestClient:
    """The server of `asyncrl serve` with one engine in this process, at the address of the page."""
    from rollouter.serving.openai_app import openai_app

    app = checked_app(openai_app("quickstart", Adder(), OneReplica()), HttpAccess(None, None))
    return TestClient(app, base_url="http://127.0.0.1:8000")


def test_every_serve_command_is_a_valid_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVE_KEY", "secret")
    (tmp_path / "my.yaml").write_text("experiment_name: mine\n")
    commands = re.findall(r"^    asyncrl serve(.*?)(?:#.*)?$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command)
        source = words.pop(0) if words and "=" not in words[0] else None
        # The port may be taken on this machine, and the model is an example.
        checked = check_config(source, [*words, "serve.port=18764"], scope="serve")
        assert {problem.key for problem in checked.problems} <= {"model.path"}, checked.problems


def test_the_clients_get_an_answer(
    served: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = (text for language, text in BLOCKS if language == "python")
    make = openai.OpenAI
    monkeypatch.setattr(openai, "OpenAI", lambda **options: make(**options, http_client=served))
    exec(compile(script, "serving.md", "exec"), {})
    assert capsys.readouterr().out == "46\n"
    (curl,) = (text for language, text in BLOCKS if language == "bash")
    words = shlex.split(curl.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    answer = served.post(words[1], json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "46"


def test_the_tables_have_the_paths_and_metrics_of_the_server(served: TestClient) -> None:
    listed = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", PAGE.split("## Errors")[0]))
    known = served.get("/openapi.json").json()["paths"]
    assert listed == {path.replace("{name}", "{model}") for path in known}
    text = served.get("/metrics").text
    for name in re.findall(r"^\| `(asyncrl_serve_\w+)`", PAGE, flags=re.MULTILINE):
        assert f"\n# HELP {name}" in f"\n{text}", name


def test_the_errors_are_those_of_the_page(served: TestClient) -> None:
    (shown,) = re.findall(r'^    (\{"error": .*\})$', PAGE, flags=re.MULTILINE)
    assert served.post("/v1/chat/completions", json={"model": "quickstart"}).json() == json.loads(shown)


def test_the_yaml_is_valid() -> None:
    found = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]
    assert [list(one) for one in found] == [["readinessProbe"], ["scrape_configs"]]
