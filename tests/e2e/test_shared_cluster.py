"""Launches on existing Ray clusters: one of three nodes, whose nodes come and go, and one that wants its token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.assets import resolve
from tests.e2e.launches import SHORT, LaunchedRun, balanced, start, trained_once
from tests.e2e.test_attach import BIN, free_port

PHASES = ("serving", "fetching", "pausing", "loading", "verifying")
SYSTEM = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 6}
"""Ray notices a lost node within seconds instead of a minute."""
STORE_BYTES = 200 << 20
LEFT_BYTES = 10 << 20
"""The versions that the weight store keeps need more, about 4 MB each."""
POOLS = ("trainer.node_labels={pool: train}", "rollout.node_labels={pool: rollout}")
ENDLESS = (*SHORT, *POOLS, "trainer.total_training_steps=100000", "timeouts.start_s=300")
VERSIONS = 8
TOKEN = "2c1b6f0e4a7d4d0f9d3a5b8c7e6f1a20"


class StoreUser:
    """An actor with an object that it reads in place, which Ray cannot spill meanwhile."""

    def hold(self, size: int) -> None:
        import numpy as np
        import ray

        self._reference = ray.put(np.zeros(size, dtype=np.uint8))
        self._view = ray.get(self._reference)


class ThreeNodes:
    """A Ray cluster with a node for the driver and the Trainer, and two nodes with room for two engines each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "labels": {"pool": "train"}, "include_dashboard": False, "_system_config": SYSTEM}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": STORE_BYTES})
        self._nodes: dict[str, Any] = {}
        self.head_id = str(self._cluster.head_node.node_id)
        self.rollout_ids = [self.add(), self.add()]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> str:
        """Add a node for engines, and return its id."""
        node = self._cluster.add_node(num_cpus=2, labels={"pool": "rollout"}, object_store_memory=STORE_BYTES)
        self._nodes[str(node.node_id)] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Kill all processes of a node for engines."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id: str) -> None:
        """Announce that a node will be preempted in five minutes, as a cloud's notice does."""
        reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "preempted")
        command = [BIN / "ray", "drain-node", "--address", self.address, "--node-id", node_id, *reason]
        done = subprocess.run(
            [*command, "--deadline-remaining-seconds", "300"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def created_bytes(self, node_id: str) -> int:
        """Return how many bytes of objects a node's object store has got so far, by puts and by transfers."""
        return int(self._store_stats(node_id).cumulative_created_bytes)

    def spilled_bytes(self, node_id: str) -> int:
        """Return how many bytes of objects a node has written to its disk so far, because its store was full."""
        return int(self._store_stats(node_id).spilled_bytes_total)

    def _store_stats(self, node_id: str) -> Any:
        from ray._private.internal_api import node_stats

        (node,) = [one for one in self._cluster.global_state.node_table() if one["NodeID"] == node_id]
        return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats

    @contextmanager
    def filled(self, node_id: str) -> Iterator[None]:
        """Keep most of a node's object store in use, so that what others put there is spilled."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.init(address=self.address, namespace="filled", log_to_driver=False)
        try:
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            # Detached, because Ray sometimes counts no reference to a new actor of a driver that has just connected.
            options = {"name": "store-user", "lifetime": "detached", "num_cpus": 0, "scheduling_strategy": where}
            user = ray.remote(StoreUser).options(**options).remote()
            ray.get(user.hold.remote(STORE_BYTES - LEFT_BYTES), timeout=60)
            yield
            ray.kill(user)
        finally:
            ray.shutdown()

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables for the block, or remove those with None."""
    before = {name: os.environ.get(name) for name in values}

    def apply(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    apply(values)
    try:
        yield
    finally:
        apply(before)


def asyncrl(*arguments: str, timeout_s: float = 240.0) -> tuple[int, str]:
    """Run a command, and return its exit code and what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[ThreeNodes]:
    from ray._private.authentication_test_utils import reset_auth_token_state

    with ExitStack() as stack:
        directory = Path("/tmp") / f"nodes-{os.getpid()}"  # short, because it contains sockets
        stack.callback(reset_auth_token_state)  # Ray reads the mode once in a process, and later tests use its default
        stack.enter_context(environment(RAY_TMPDIR=str(directory), RAY_AUTH_MODE="disabled"))
        reset_auth_token_state()
        directory.mkdir(exist_ok=True)
        cluster = ThreeNodes()
        stack.callback(cluster.close)
        yield cluster


def nodes_of(run: LaunchedRun, *parts: str) -> Counter[str]:
    """Return the number of the parts' processes by node."""
    return Counter(one["node_id"] for one in run.state().get("processes", ()) if one["part"] in parts)


def serving(run: LaunchedRun) -> dict[str, str]:
    """Return the node of each replica that serves and has reported within the last seconds."""
    state = run.state()
    fresh = state.get("written_at", 0.0) - 5.0
    replicas = [one for one in state.get("replicas", ()) if one["phase"] in PHASES and one["reported_at"] > fresh]
    return {one["replica"]: one["node_id"] for one in replicas}


def applied(run: LaunchedRun) -> int:
    """Return the version that all replicas have applied."""
    return min((one["version"] for one in run.state()["replicas"]), default=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_of_killed_drivers_are_removed_by_the_next_launch_and_by_clean(
    nodes: ThreeNodes, tmp_path: Path
) -> None:
    keys = (*ENDLESS, f"ray.address={nodes.address}")
    first = start(tmp_path, *keys, "rollout.num_replicas=2", run_dir=tmp_path / "first")
    first.wait_for("step 1/", 300)
    parts = ("rollouter", "trainer", "rank")
    first.wait_until(lambda: nodes_of(first, *parts) == {nodes.head_id: 3}, "parts on the driver's node", 20)
    assert nodes_of(first, "replica") == dict.fromkeys(nodes.rollout_ids, 1), "replicas spread over the nodes"
    first.process.kill()
    first.process.wait()
    code, printed = asyncrl("clean", "--dry-run", "--address", nodes.address)
    assert (code, printed.count("would remove the Serve application asyncrl-first-")) == (0, 1), printed

    # Three replicas have room only without these two.
    second = start(tmp_path, *keys, "rollout.num_replicas=3", run_dir=tmp_path / "second")
    second.wait_until(lambda: len(serving(second)) == 3, "three replicas", 300)
    assert "removed the Serve application asyncrl-first-" in second.output()
    assert "asyncrl-first" not in asyncrl("clean", "--dry-run", "--address", nodes.address)[1]
    second.process.kill()
    second.process.wait()
    code, printed = asyncrl("clean", "--address", nodes.address)
    assert (code, printed.count("removed the Serve application asyncrl-second-")) == (0, 1), printed
    assert asyncrl("clean", "--address", nodes.address) == (0, "nothing is left of launches that have ended\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_three_nodes_fetches_weights_once_per_node_spills_and_survives_preempted_and_lost_nodes(
    nodes: ThreeNodes, tmp_path: Path
) -> None:
    run = start(tmp_path, *ENDLESS, f"ray.address={nodes.address}", "rollout.num_replicas=3")
    run.wait_until(lambda: len(serving(run)) == 3 and run.state()["step"] >= 1, "first step", 300)
    where = Counter(serving(run).values())
    assert sorted(where.values()) == [1, 2] and set(where) == set(nodes.rollout_ids)
    (crowded,) = (node for node, number in where.items() if number == 2)

    # The two replicas of a node share one copy of each version.
    first, before = applied(run), {node: nodes.created_bytes(node) for node in nodes.rollout_ids}
    run.wait_until(lambda: applied(run) >= first + VERSIONS, f"{VERSIONS} versions", 300)
    passed = applied(run) - first
    weights = (Path(resolve("asyncrl://quickstart")) / "model.safetensors").stat().st_size
    for node in nodes.rollout_ids:
        copies = (nodes.created_bytes(node) - before[node]) / weights
        assert passed - 2 <= copies <= passed + 2, f"{copies} copies of {passed} versions on {node} of {where}"

    # If others fill the object store of the Trainer's node, versions are spilled to disk, and engines still get them.
    with nodes.filled(nodes.head_id):
        first, spilled = applied(run), nodes.spilled_bytes(nodes.head_id)
        run.wait_until(lambda: applied(run) >= first + VERSIONS, f"{VERSIONS} versions with a full object store", 300)
        assert nodes.spilled_bytes(nodes.head_id) >= spilled + weights, "a version was spilled meanwhile"

    # Replicas leave a node that will be preempted, once others have taken their places.
    nodes.add()
    nodes.drain(crowded)
    run.wait_until(lambda: len(serving(run)) >= 3 and crowded not in serving(run).values(), "replicas elsewhere", 300)
    assert not run.state()["pending_demands"]
    nodes.kill(crowded)

    # The loss of the node with two replicas, without a word, leaves room for one of them.
    (crowded,) = (node for node, number in Counter(serving(run).values()).items() if number == 2)
    nodes.kill(crowded)
    run.wait_until(lambda: bool(run.state()["pending_demands"]), "pending demand", 200)
    run.wait_until(lambda: len(serving(run)) == 2, "replica on the remaining node", 300)
    left = ["1 x engine replica: 1 CPU on one node"]
    run.wait_until(lambda: run.state()["pending_demands"] == left, "demand for the other replica alone", 60)
    step = run.state()["step"]
    run.wait_until(lambda: run.state()["step"] > step + 2, "steps with the two replicas", 200)
    run.interrupt()
    assert run.wait(120) == 130, run.output()
    summary = run.summary()
    assert balanced(summary["samples"]) and trained_once(run)
    dropped = {reason for reason, number in summary["samples"]["dropped"].items() if number}
    assert dropped <= {"stale", "shutdown"}, "no sample is lost with the node"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_without_room_or_without_its_token_is_refused_in_a_line(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        stack.enter_context(environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN))
        head = subprocess.Popen(
            [
                BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
                "--num-cpus=6", "--labels=pool=train", "--include-dashboard=false", "--disable-usage-stats",
                "--object-store-memory=100000000", f"--temp-dir=/tmp/token-{os.getpid()}",
                f"--dashboard-agent-listen-port={free_port()}",
            ]
        )  # fmt: skip
        stack.callback(head.wait, 60)
        stack.callback(head.terminate)
        keys = ("launch", "fully_async", "quickstart", f"ray.address={address}")
        until = time.monotonic() + 120
        while (drawn := asyncrl(*keys, "--dry-run"))[0] != 0:
            assert time.monotonic() < until and head.poll() is None, drawn
        assert "pool=train" in drawn[1]
        assert "driver, queue, weight store, Rollouter, Trainer, 1 policy rank, 1 engine replica" in drawn[1]

        for dry_run in (["--dry-run"], []):
            code, printed = asyncrl(*keys, f"run_dir={tmp_path / 'full'}", "rollout.num_replicas=9", *dry_run)
            assert code == 2, printed
            assert "rollout.num_replicas = 9" in printed, printed
            assert "the run needs 10 CPUs (9 for the engine replicas, 1 for the policy ranks), the cluster has 6" in (
                " ".join(printed.split())
            ), printed
        code, printed = asyncrl("serve", "quickstart", f"ray.address={address}", "rollout.num_replicas=7")
        assert code == 2 and "the run needs 7 CPUs (7 for the engine replicas), the cluster has 6" in printed, printed
        code, printed = asyncrl(*keys, "rollout.num_replicas=9", "--dry-run", "--json")
        assert code == 2 and json.loads(printed)["placement"]["lacks"]

        stack.enter_context(environment(RAY_AUTH_MODE=None, RAY_AUTH_TOKEN=None, HOME=str(tmp_path)))
        run_dir = f"run_dir={tmp_path / 'run'}"
        for arguments in ([*keys, "--dry-run"], [*keys, run_dir], ["clean", "--address", address]):
            code, printed = asyncrl(*arguments)
            assert code == 2, printed
            assert "`export RAY_AUTH_MODE=token`" in " ".join(printed.split()) and "Traceback" not in printed, printed
        stack.enter_context(environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * len(TOKEN)))
        code, printed = asyncrl(*keys, "--dry-run")
        assert code == 2 and "the token in RAY_AUTH_TOKEN is not the cluster's" in " ".join(printed.split()), printed
