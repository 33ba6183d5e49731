"""The OpenAI endpoint of a run on the real engine, without and with the key of a trajectory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from asyncrl.config.schema import Config
from tests.e2e.launches import balanced, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAMESPACE = "e2e-agents"
KEY_NAME = "ASYNCRL_TEST_API_KEY"
KEY = "the-run's-own-key"
EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION: Any = [{"role": "user", "content": "3*4="}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Start the application of a launch with an agent, and return a client of its endpoint."""
    import ray

    from asyncrl.weights.object_store import ServedRun, start_store
    from rollouter.serving.app import start_app, stop_app
    from rollouter.serving.http import endpoint_url
    from rollouter.serving.options import rollout_app

    config = Config.model_validate(
        {
            "model": {"path": "asyncrl://calculator"},
            "rollout": {"max_model_len": 128, "agent": {"program": "my:agent"}},
            "serve": {"port": 18231, "api_key_env": KEY_NAME},
            "timeouts": {"start_s": 240},
        }
    )
    os.environ[KEY_NAME] = KEY
    ray.init(
        address="local", num_cpus=2, namespace=NAMESPACE, include_dashboard=False, object_store_memory=300 << 20,
        log_to_driver=False,
    )  # fmt: skip
    try:
        _store = start_store(NAMESPACE, ServedRun.of(config, name="the tests", namespace=NAMESPACE))
        anyio.run(partial(start_app, config, namespace=NAMESPACE))
        url = endpoint_url(rollout_app(config, NAMESPACE))
        assert url == f"http://127.0.0.1:18231/{NAMESPACE}-agents/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, timeout=60, max_retries=0) as one:
            yield one
        anyio.run(stop_app, NAMESPACE)
    finally:
        del os.environ[KEY_NAME]
        ray.shutdown()


def test_the_endpoint_lists_its_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["calculator"]


def test_chat_completions_and_streams(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="calculator", messages=QUESTION, max_tokens=8, temperature=0)
    text = client.completions.create(
        model="calculator", prompt="<user>3*4=<eos><assistant>", max_tokens=8, temperature=0
    )
    stream = client.chat.completions.create(
        model="calculator", messages=QUESTION, max_tokens=8, temperature=0, stream=True
    )
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(chunks) == chat.choices[0].message.content
    assert chat.choices[0].message.content and text.choices[0].text


def test_streams_of_the_served_api_send_tokens_as_they_are_sampled(client: openai.OpenAI) -> None:
    with client.completions.create(
        model="calculator", prompt="<user>3*4=", max_tokens=100, extra_body={"ignore_eos": True}, stream=True,
        stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        chunks = [(time.monotonic(), chunk) for chunk in stream]
    with_text = [at for at, chunk in chunks if chunk.choices and chunk.choices[0].text]
    assert len(with_text) > 5 and with_text[-1] - with_text[0] > 0.05, "Ray sends the tokens of 50 ms at a time"
    usage = chunks[-1][1].usage
    assert usage is not None and usage.completion_tokens == 100


def test_tool_calls_of_the_model_are_parsed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "946*89="}]
    for _ in range(40):
        choice = client.chat.completions.create(model="calculator", messages=messages, tools=TOOLS).choices[0]
        if choice.message.tool_calls:
            call: Any = choice.message.tool_calls[0]
            assert (call.function.name, choice.finish_reason) == ("calc", "tool_calls")
            assert "x" in json.loads(call.function.arguments)
            return
    raise AssertionError("no tool call in 40 responses, although the model calls its tool in three of ten")


def test_unknown_api_keys_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="wrong API key"):
        client.with_options(api_key="sk-1").models.list()
    stranger = client.with_options(api_key=f"asyncrl-7-{'x' * 43}")
    with pytest.raises(openai.AuthenticationError, match="no trajectory has this key"):
        stranger.chat.completions.create(model="calculator", messages=QUESTION)
    answer = httpx.get(f"{client.base_url}models")
    assert answer.status_code == 401


@pytest.mark.parametrize("example", ["openai_agent", "subprocess_agent"])
def test_a_user_written_agent_is_trained(tmp_path: Path, example: str) -> None:
    """Agents in the Rollouter's process continue after it is replaced."""
    agent = EXAMPLES / example / "agent.py"
    own = f"rollout.agent.program={agent}:solve"
    if example == "subprocess_agent":
        own = f"rollout.agent.command=[python,{agent}]"
    killed = example == "openai_agent"
    steps = 8 if killed else 3
    run = start(
        tmp_path, own, f"trainer.total_training_steps={steps}", "data.max_val_samples=8", "rollout.n=4",
        "trainer.ppo_mini_batch_size=8", "logging.console=plain",
        "rollout.multi_turn.tokenization_sanity_check_mode=strict",
        f"rollout.dump_dir={tmp_path / 'dump'}", recipe=str(EXAMPLES / example / "config.yaml"),
    )  # fmt: skip
    if killed:
        run.wait_for("step 2/")
        run.kill("rollouter")
    assert run.wait(360) == 0, run.output()
    summary = run.summary()
    assert summary["status"] == "completed" and summary["samples"]["trained"] == 8 * steps
    assert summary["restarts"].get("rollouter", 0) == killed
    assert balanced(summary["samples"]) and summary["samples"]["dropped"].get("failed", 0) == 0
    lines = [json.loads(line) for file in (tmp_path / "dump").rglob("*.jsonl") for line in file.open(encoding="utf-8")]
    assert any(len(line["turns"]) > 1 and line["scores"] for line in lines), "some trajectories call the tool"
    assert run.survivors() == []


STREAMING_AGENT = """
from pathlib import Path
from openai import OpenAI

CLIENT = OpenAI(base_url="http://set-for-each-task", api_key="set for each task")


def solve(task):
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    texts = []
    with client.completions.create(model=task.model, prompt="<user>1+1=", stream=True, max_tokens=100) as stream:
        texts += [chunk.choices[0].text for chunk in stream]
    with Path("chunks.txt").open("a") as file:
        file.write(f"{sum(map(bool, texts))}\\n")
    return float(len(set("".join(texts))))
"""


def test_a_streaming_agent_is_trained_and_does_not_run_ahead_of_a_version_with_several_leases(tmp_path: Path) -> None:
    """Launches of other files check the other modes: sync, mode_a, mode_c, and mode_d, which is the quickstart's."""
    agent = tmp_path / "agent.py"
    agent.write_text(STREAMING_AGENT.replace("chunks.txt", str(tmp_path / "chunks.txt")))
    run = start(
        tmp_path, f"rollout.agent.program={agent}:solve", "async_training=mode_b", "trainer.total_training_steps=8",
        "data.val_files=[]", "rollout.n=4", "trainer.ppo_mini_batch_size=8", "logging.console=plain",
        recipe=str(EXAMPLES / "openai_agent" / "config.yaml"),
    )  # fmt: skip
    assert run.wait(360) == 0, run.output()
    summary = run.summary()
    assert (summary["samples"]["trained"], summary["staleness"]["max"]) == (64, 0) and balanced(summary["samples"])
    chunks = [int(line) for line in (tmp_path / "chunks.txt").read_text(encoding="utf-8").split()]
    assert any(number > 1 for number in chunks), "a turn of 20 ms or more arrives in several chunks"
    assert run.survivors() == []
