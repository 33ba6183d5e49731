"""What the project uses of the inside of Ray. After an upgrade, these tests say what to look at."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.worker import global_worker
from ray.serve._private.replica import Replica, ReplicaActor
from ray.serve.context import ServeControllerClient
from ray.serve.handle import DeploymentBroadcastResponse
from ray.serve.request_router import ReplicaID, RequestRouter

from asyncrl.assets import resolve
from rollouter.serving import ray_internals

ROOT = Path(__file__).parents[3]
WHERE = f"see rollouter/serving/ray_internals.py, which was checked with Ray {ray_internals.CHECKED_RAY}"


def test_this_is_the_version_of_ray_that_was_checked() -> None:
    assert ray.__version__ == ray_internals.CHECKED_RAY, (
        f"Ray {ray.__version__} may have another inside; {WHERE}: run `make slow`, mend what fails in serving, agents "
        "and attach, and then set CHECKED_RAY"
    )


def test_ray_has_everything_that_is_used() -> None:
    missing = []
    for name, module in ray_internals.LLM_MODULES.items():
        try:
            getattr(ray_internals, name)
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
    if not hasattr(ray_internals.services, "ConsolePopen"):
        missing.append("ray._private.services.ConsolePopen")
    if not hasattr(ray_internals.state, "jobs"):
        missing.append("ray._private.state.jobs")
    for owner, name in [
        (ServeControllerClient, "http_config"),
        (ServeControllerClient, "get_serve_details"),
        (RequestRouter, "_choose_replica_for_request"),
        (DeploymentBroadcastResponse, "_fetch_replica_results_async"),
        (ray_internals.LLMServer, "_start_engine"),
        # `OpenAIEngine` and `RolloutEngine` override the first two and call the last one.
        (ray_internals.VLLMEngine, "start"),
        (ray_internals.VLLMEngine, "_start_async_llm_engine"),
        (ray_internals.VLLMEngine, "_prepare_engine_config"),
    ]:
        if not hasattr(owner, name):
            missing.append(f"{owner.__module__}.{owner.__name__}.{name}")
    # `asked_to_end` reads these attributes of instances.
    for part, name in [(Replica.__init__, "_shutting_down"), (ReplicaActor.__init__, "_replica_impl")]:
        if name not in part.__code__.co_names:
            missing.append(f"{part.__module__}.{part.__qualname__}.{name}")
    deployment = ray_internals.DeploymentID("rollout", "run-1")
    if not f"ray::{deployment.to_replica_actor_class_name()}".startswith(ray_internals.REPLICA_TITLE):
        missing.append(f"process titled {ray_internals.REPLICA_TITLE}")
    if not ReplicaID("a", deployment).to_full_id_str().startswith(ray_internals.replica_prefix("run-1")):
        missing.append(f"replica named {ray_internals.replica_prefix('run-1')}")
    # Other modules use these parts of Ray's core.
    for module, name in [
        ("ray._private.worker", "print_to_stdstream"),
        ("ray._private.worker", "_global_node"),
        ("ray._private.state", "total_resources_per_node"),
        ("ray._private.state", "available_resources_per_node"),
        ("ray._common.utils", "get_default_ray_temp_dir"),
    ]:
        if not hasattr(import_module(module), name):
            missing.append(f"{module}.{name}")
    if not hasattr(global_worker, "actors"):
        missing.append("ray._private.worker.global_worker.actors")
    assert not missing, f"Ray {ray.__version__} has no {', '.join(missing)}; {WHERE}"


def test_no_other_module_uses_the_inside_of_ray() -> None:
    inside = re.compile(r"\b(?:ray\.(?:_\w+|serve\._\w+|llm\._\w+)|_private|SERVE_REPLICA)\b")
    users = {
        str(file.relative_to(ROOT))
        for package in ("asyncrl", "rollouter", "trainer", "skip", "benchmarks")
        for file in (ROOT / package).rglob("*.py")
        if inside.search(file.read_text(encoding="utf-8"))
    }
    assert users == {
        "rollouter/serving/ray_internals.py",
        # Parts of Ray's core, in modules that may not import the Rollouter's, or do without them.
        "asyncrl/driver/cluster/connection.py",
        "asyncrl/driver/health_monitor.py",
        "asyncrl/observe/metrics/prometheus.py",
    }, WHERE


def test_serve_keeps_writing_its_log_after_vllm_has_configured_logging(tmp_path: Path) -> None:
    """In a process of its own, because vLLM configures logging once."""
    program = """
import logging, sys
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
from rollouter.serving.ray_internals import SERVE_LOGGER_NAME, serve_log_stays_open

configure_component_logger(
    component_name="a", component_id="b", logging_config=LoggingConfig(logs_dir=sys.argv[1]),
    max_bytes=1_000_000, backup_count=1,
)
log = logging.getLogger(SERVE_LOGGER_NAME)
log.warning("before")
with serve_log_stays_open():
    from vllm.engine.arg_utils import EngineArgs
    EngineArgs(model=sys.argv[2], load_format="dummy").create_engine_config()
log.warning("after")
print("kept", sum(len(getattr(handler, "buffer", ())) for handler in log.handlers))
"""
    arguments = [sys.executable, "-c", program, str(tmp_path), resolve("asyncrl://quickstart")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["kept 0"], done.stderr
    (file,) = tmp_path.iterdir()
    assert [line.split()[-1] for line in file.read_text().splitlines()] == ["before", "after"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end Ray's processes by their group")
def test_rays_processes_survive_a_signal_to_the_drivers_group_and_not_the_drivers_death() -> None:
    """The driver ignores the signal, and dies without being able to do anything."""
    program = """
import signal, threading
from ray._private.services import start_ray_process
from rollouter.serving.ray_internals import processes_in_own_sessions

signal.signal(signal.SIGTERM, lambda *_: print("signalled", flush=True))
with processes_in_own_sessions():
    inside = start_ray_process(["sleep", "600"], "raylet", fate_share=True)
outside = start_ray_process(["sleep", "600"], "raylet", fate_share=True)
print(inside.process.pid, outside.process.pid, flush=True)
while True:
    signal.pause()
"""
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        try:
            inside, outside = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
            assert os.getsid(inside.pid) == inside.pid
            os.killpg(driver.pid, signal.SIGTERM)
            assert driver.stdout.readline() == "signalled\n"
            psutil.wait_procs([outside], timeout=10)
            statuses = [one.status() == psutil.STATUS_ZOMBIE for one in (inside, outside)]
            assert statuses == [False, True], "only the process in the driver's group has ended"
        finally:
            driver.kill()
    assert psutil.wait_procs([inside], timeout=10)[1] == []


class Answer:
    """The result of a call to a replica."""

    def __init__(self, text: str = "", after_s: float = 0.0) -> None:
        self._text, self._after_s = text, after_s

    async def get_async(self) -> str:
        await asyncio.sleep(self._after_s)
        if not self._text:
            raise RuntimeError("failed")
        return self._text


async def test_a_replica_that_does_not_answer_leaves_the_answers_of_the_others() -> None:
    async def sent() -> list[Any]:
        return [Answer("a"), Answer("late", 30.0), Answer(), Answer("b")]

    response = DeploymentBroadcastResponse(sent(), None)
    assert await ray_internals.each_answer(response, limit_s=0.2) == ["a", "b"]


async def test_a_broadcast_that_serve_does_not_send_is_a_timeout() -> None:
    async def sent() -> list[Any]:
        await asyncio.sleep(30)
        return []

    with pytest.raises(TimeoutError):
        await ray_internals.each_answer(DeploymentBroadcastResponse(sent(), None), limit_s=0.05)


def test_an_import_that_another_replica_disturbs_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ValueError("kv_connector_backend 'NixlConnector' is already registered. Use unregister() first")
    results: list[Exception | None] = [taken, taken, None]

    def import_module(name: str) -> None:
        if error := results.pop(0):
            raise error

    monkeypatch.setattr(ray_internals, "import_module", import_module)
    ray_internals.import_llm_library()
    assert results == []
    results[:] = [taken, taken]
    with pytest.raises(ValueError, match="already registered"):
        ray_internals.import_llm_library(most_attempts=2)
    results[:] = [ValueError("of another kind")]
    with pytest.raises(ValueError, match="another kind"):
        ray_internals.import_llm_library()
