"""Rollout servers that are deployed with Ray Serve's own commands, and runs that attach to them one after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.launches import SHORT, LaunchedRun, balanced, free_port, start, trained_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve" / "rollout.yaml"
APP = "rollout"
STEPS = 40
BIN = Path(sys.executable).parent


@dataclass
class DeployedServers:
    """A Ray cluster on which the example of `examples/serve` runs."""

    address: str
    dashboard: str
    url: str

    def serve(self, *arguments: str) -> str:
        """Run one of Serve's commands and return its output."""
        done = subprocess.run(
            [BIN / "serve", *arguments, "-a", self.dashboard], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def attach(self, where: Path, *overrides: str, run_dir: Path | None = None) -> LaunchedRun:
        where.mkdir(exist_ok=True)
        keys = (f"ray.address={self.address}", f"rollout.attach={APP}", "trainer.save_freq=2", *overrides)
        return start(where, *SHORT, *keys, run_dir=run_dir)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedServers]:
    """Start a cluster and deploy the example as a user does."""
    directory = Path("/tmp") / f"attach-{os.getpid()}"  # short, because it contains sockets
    port, dashboard, http = free_port(), free_port(), free_port()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = subprocess.Popen(
        [
            BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4",
            "--include-dashboard=true", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
            "--object-store-memory=300000000", f"--temp-dir={directory}", "--disable-usage-stats",
        ],
        start_new_session=True,
    )  # fmt: skip
    deployed = DeployedServers(
        f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{http}/{APP}/v1"
    )
    try:
        config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        config["http_options"]["port"] = http
        file = tmp_path_factory.mktemp("deploy") / "rollout.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{deployed.dashboard}/api/serve/applications/")
                break
            except httpx.TransportError:
                assert time.monotonic() < until and cluster.poll() is None, "the cluster did not start"
                time.sleep(0.5)
        deployed.serve("deploy", str(file))
        until = time.monotonic() + 240
        while (app := yaml.safe_load(deployed.serve("status"))["applications"].get(APP, {})).get("status") != "RUNNING":
            assert time.monotonic() < until and app.get("status") != "DEPLOY_FAILED", app
        yield deployed
        deployed.serve("shutdown", "-y")
    finally:
        del os.environ["RAY_AUTH_MODE"]
        cluster.send_signal(signal.SIGTERM)
        try:
            cluster.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(cluster.pid, signal.SIGKILL)
            raise


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_deployed_servers_stream_tokens_as_they_are_sampled(servers: DeployedServers) -> None:
    body = {"model": "quickstart", "prompt": "12+34=", "max_tokens": 100, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{servers.url}/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [(time.monotonic(), line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert lines.pop()[1] == "[DONE]"
    chunks = [(at, json.loads(line)) for at, line in lines]
    assert chunks[-1][1]["usage"]["completion_tokens"] == 100
    with_text = [at for at, chunk in chunks if chunk["choices"] and chunk["choices"][0]["text"]]
    assert len(with_text) > 5 and with_text[-1] - with_text[0] > 0.05, "Ray sends the tokens of 50 ms at a time"


def replicas(run: LaunchedRun) -> set[int]:
    return {replica["pid"] for replica in run.state()["replicas"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_attach_one_after_another_and_one_continues_without_an_engine_restart(
    servers: DeployedServers, tmp_path: Path
) -> None:
    first = servers.attach(tmp_path, f"trainer.total_training_steps={STEPS}")
    first.wait_for("step 1/")
    pids = replicas(first)
    other = servers.attach(tmp_path / "other", "trainer.total_training_steps=1")
    assert other.wait() == 2, other.output()
    assert f"the run {first.run_dir} on " in " ".join(other.output().split())

    first.process.kill()
    first.process.wait()
    second = servers.attach(tmp_path, f"trainer.total_training_steps={STEPS}", "resume=auto", run_dir=first.run_dir)
    assert second.wait() == 0, second.output()
    summary = second.summary()
    assert (summary["status"], summary["step"], summary["samples"]["trained"]) == ("completed", STEPS, 16 * STEPS)
    assert trained_once(second) and balanced(summary["samples"])
    assert replicas(second) == pids, "the engines were not restarted"
    assert not [one for one in second.state()["restarts"] if one["part"] == "replica"]
    learned = summary["validation"]["after"]["reward"]

    # The servers go on with the last weights, and the next run begins with its own.
    question = {"model": "quickstart", "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
    answered = httpx.post(f"{servers.url}/completions", json=question, timeout=60)
    assert answered.status_code == 200, answered.text
    fresh = servers.attach(tmp_path / "fresh", "trainer.total_training_steps=1")
    assert fresh.wait() == 0, fresh.output()
    assert fresh.summary()["validation"]["before"]["reward"] < 0.3 < learned
    assert replicas(fresh) == pids
