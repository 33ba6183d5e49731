"""Rollout servers that are deployed with Ray Serve's own commands, and runs that attach to them one after another."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.e2e.launches import SHORT, LaunchedRun, balanced, free_port, start, trained_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve" / "rollout.yaml"
APP = "rollout"
STEPS = 40
AGENT = """
from openai import OpenAI

CLIENT = OpenAI(base_url="http://set-for-each-task", api_key="set for each task")


def solve(task):
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    answer = client.chat.completions.create(model=task.model, messages=task.messages)
    return float(answer.choices[0].message.content.endswith(task.ground_truth))
"""
BIN = Path(sys.executable).parent


@dataclass
class DeployedServers:
    """A Ray cluster, on which the example of `examples/serve` can be deployed."""

    address: str
    dashboard: str
    http: str
    """Base URL of Serve's applications."""

    @property
    def url(self) -> str:
        return f"{self.http}/{APP}/v1"

    def serve(self, *arguments: str) -> str:
        """Run one of Serve's commands and return its output."""
        done = subprocess.run(
            [BIN / "serve", *arguments, "-a", self.dashboard], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, file: Path, **options: Any) -> None:
        """Deploy the example with options of Serve's for the deployment, written to `file`, and wait until it runs."""
        config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        config["http_options"]["port"] = int(self.http.rpartition(":")[2])
        config["applications"][0]["deployments"][0] |= options
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.serve("deploy", str(file))
        self.wait_for(APP)

    def wait_for(self, app: str) -> None:
        """Wait until an application runs."""
        until = time.monotonic() + 400
        while (found := self.get("serve/applications/")["applications"].get(app, {})).get("status") != "RUNNING":
            assert time.monotonic() < until and found.get("status") != "DEPLOY_FAILED", found
            time.sleep(0.5)

    def deployed(self) -> dict[str, Any]:
        """Return what Serve says of the deployment."""
        return self.get("serve/applications/")["applications"][APP]["deployments"]["rollout"]

    def served_version(self) -> int:
        """Return the weights version of the only replica, as its metrics show it."""
        answer = httpx.get(f"{self.http}/{APP}/metrics", timeout=60)
        (version,) = re.findall(r"^asyncrl_serve_weights_version\{.*\} (.+)$", answer.text, re.MULTILINE)
        return int(float(version))

    def get(self, path: str) -> dict[str, Any]:
        """Return an answer of the dashboard's API."""
        answer = httpx.get(f"{self.dashboard}/api/{path}", timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def attach(self, where: Path, *overrides: str, run_dir: Path | None = None) -> LaunchedRun:
        where.mkdir(exist_ok=True)
        keys = (f"ray.address={self.address}", f"rollout.attach={APP}", "trainer.save_freq=2", *overrides)
        return start(where, *SHORT, *keys, run_dir=run_dir)


@contextmanager
def ray_cluster(name: str) -> Iterator[DeployedServers]:
    """Start a cluster of one node, as `ray start` does."""
    directory = Path("/tmp") / f"{name}-{os.getpid()}"  # short, because it contains sockets
    port, dashboard, http = free_port(), free_port(), free_port()
    environment = pytest.MonkeyPatch()
    environment.setenv("RAY_AUTH_MODE", "disabled")
    cluster = subprocess.Popen(
        [
            BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=6",
            "--include-dashboard=true", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}",
            "--object-store-memory=300000000", f"--temp-dir={directory}", "--labels=pool=train",
            "--disable-usage-stats",
        ],
        start_new_session=True,
    )  # fmt: skip
    servers = DeployedServers(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{http}")
    try:
        until = time.monotonic() + 240
        while True:
            try:
                servers.get("serve/applications/")
                break
            except httpx.TransportError:
                assert time.monotonic() < until and cluster.poll() is None, "the cluster did not start"
                time.sleep(0.5)
        yield servers
    finally:
        environment.undo()
        cluster.send_signal(signal.SIGTERM)
        try:
            cluster.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(cluster.pid, signal.SIGKILL)
            raise


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeployedServers]:
    """Start a cluster and deploy the example as a user does."""
    with ray_cluster("attach") as servers:
        servers.deploy(tmp_path_factory.mktemp("deploy") / "rollout.yaml")
        yield servers
        servers.serve("shutdown", "-y")


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_options_of_serve_mean_what_they_mean_for_other_applications(servers: DeployedServers, tmp_path: Path) -> None:
    file = tmp_path / "rollout.yaml"
    (first,) = servers.deployed()["replicas"]
    servers.deploy(file, user_config={"timeouts": {"engine_s": 90}})
    (same,) = servers.deployed()["replicas"]
    assert same["pid"] == first["pid"], "a new user_config does not restart an engine"

    servers.deploy(file, ray_actor_options={"num_cpus": 0.5})
    (other,) = servers.deployed()["replicas"]
    assert other["pid"] != first["pid"], "another reservation needs another process"
    actors = servers.get("v0/actors?detail=true&limit=1000")["data"]["result"]["result"]
    (actor,) = (one for one in actors if one["actor_id"] == other["actor_id"])
    reserved = {name: amount for name, amount in actor["required_resources"].items() if name.startswith("CPU")}
    assert set(reserved.values()) == {0.5}, reserved

    servers.deploy(file, placement_group_bundles=[{"CPU": 0.25}], ray_actor_options={"num_cpus": 0.25})
    (third,) = servers.deployed()["replicas"]
    groups = servers.get("v0/placement_groups?detail=true&limit=1000")["data"]["result"]["result"]
    assert [0.25] in [[bundle["unit_resources"].get("CPU") for bundle in one["bundles"]] for one in groups], groups
    assert third["pid"] != other["pid"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_serve_build_writes_a_file_for_serve_deploy(tmp_path: Path) -> None:
    app = "from rollouter.serving.app import build_app\napp = build_app({'model': 'asyncrl://quickstart'})\n"
    (tmp_path / "mine.py").write_text(app, encoding="utf-8")
    subprocess.run([BIN / "serve", "build", "mine:app", "-o", "mine.yaml"], cwd=tmp_path, timeout=200, check=True)
    schema = ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "mine.yaml").read_text(encoding="utf-8")))
    (application,) = schema.applications
    assert application.import_path == "mine:app"
    assert {deployment.name for deployment in application.deployments} == {"rollout", "openai"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_join_and_leave_while_a_run_is_attached(servers: DeployedServers, tmp_path: Path) -> None:
    run = servers.attach(tmp_path, "trainer.total_training_steps=2000", "data.val_files=[]")
    run.wait_for("step 1/")
    (first,) = replicas(run)
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 1}
    servers.deploy(tmp_path / "auto.yaml", num_replicas="auto", autoscaling_config=scaling)
    run.wait_until(lambda: run.state()["num_replicas"] == 2, "second replica, which Serve adds for the run's requests")
    run.wait_until(
        lambda: min(one["version"] for one in run.state()["replicas"]) > 1, "version of the run's own on both replicas"
    )
    assert first in replicas(run)
    servers.deploy(tmp_path / "one.yaml", num_replicas=1)
    run.wait_until(lambda: run.state()["num_replicas"] == 1, "replica that left")
    after = run.state()["step"]
    run.wait_until(lambda: run.state()["step"] > after + 2, "steps with the replica that is left")
    run.interrupt()
    assert run.wait(60) == 130, run.output()
    assert trained_once(run) and balanced(run.summary()["samples"])
    assert not [one for one in run.state()["restarts"] if one["part"] == "replica"], "no replica has failed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launch_is_submitted_as_a_job_to_a_labelled_node(servers: DeployedServers, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = (f"run_dir={run_dir}", "ray.address=auto", f"rollout.attach={APP}", "data.val_files=[]")
    options = ("--address", servers.dashboard, "--entrypoint-label-selector", '{"pool": "train"}')
    launch = (str(BIN / "asyncrl"), "launch", "fully_async", "quickstart", *SHORT, *keys)
    done = subprocess.run(
        [BIN / "ray", "job", "submit", *options, "--", *launch],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["samples"]["trained"]) == ("completed", 64)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_agent_is_trained_in_a_run_that_attaches(servers: DeployedServers, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT, encoding="utf-8")
    keys = (f"rollout.agent.program={agent}:solve", "reward.function=none", "trainer.total_training_steps=2")
    run = servers.attach(tmp_path, *keys, "data.val_files=[]")
    assert run.wait() == 0, run.output()
    summary = run.summary()
    assert (summary["status"], summary["samples"]["trained"]) == ("completed", 32)
    assert trained_once(run) and balanced(summary["samples"])
    assert summary["reward"]["best"] > 0, "the agent posts rewards of its own"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_serve_run_starts_servers_and_ctrl_c_ends_them(tmp_path: Path) -> None:
    arguments = ("rollouter.serving.app:build_app", "model=asyncrl://quickstart", "num_replicas=1")
    question = {"model": "quickstart", "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
    output = tmp_path / "output.txt"
    with ray_cluster("run") as servers, output.open("w", encoding="utf-8") as printed:
        port = servers.http.rpartition(":")[2]
        command = [BIN / "serve", "start", "--address", servers.address, "--http-port", port]
        subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, timeout=240, check=True)
        command = [BIN / "serve", "run", "--address", servers.address, "--name", APP, "--route-prefix", f"/{APP}"]
        running = subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, stdout=printed, stderr=subprocess.STDOUT,
            # Programs that a shell starts in the background ignore Ctrl-C, and so do those that they start.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            servers.wait_for(APP)
            answer = httpx.post(f"{servers.url}/completions", json=question, timeout=60)
            assert answer.status_code == 200, answer.text
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(120)
        assert running.returncode == 0, output.read_text(encoding="utf-8")
        assert not servers.get("serve/applications/")["applications"]


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

    first.wait_until(lambda: first.state()["replicas"][0]["version"] >= 1, "version of the run's own")
    first.process.kill()
    first.process.wait()
    assert servers.served_version() >= first.state()["replicas"][0]["version"] >= 1
    second = servers.attach(tmp_path, f"trainer.total_training_steps={STEPS}", "resume=auto", run_dir=first.run_dir)
    assert second.wait(400) == 0, second.output()
    summary = second.summary()
    assert (summary["status"], summary["step"], summary["samples"]["trained"]) == ("completed", STEPS, 16 * STEPS)
    assert trained_once(second) and balanced(summary["samples"])
    assert replicas(second) == pids, "the engines were not restarted"
    assert not [one for one in second.state()["restarts"] if one["part"] == "replica"]
    learned = summary["validation"]["after"]["reward"]
    assert servers.served_version() == summary["version"]

    # The servers go on with the last weights, and the next run begins with its own.
    question = {"model": "quickstart", "prompt": "12+34=", "max_tokens": 8, "temperature": 0}
    answered = httpx.post(f"{servers.url}/completions", json=question, timeout=60)
    assert answered.status_code == 200, answered.text
    fresh = servers.attach(tmp_path / "fresh", "trainer.total_training_steps=1")
    assert fresh.wait() == 0, fresh.output()
    assert fresh.summary()["validation"]["before"]["reward"] < 0.3 < learned
    assert replicas(fresh) == pids
    assert servers.served_version() == fresh.summary()["version"] < summary["version"]
