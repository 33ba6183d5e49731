"""What a run waits for on a cluster without room, as Ray and Serve report it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.trainer import RewardModelConfig
from asyncrl.core.failures import DeadlineError
from asyncrl.driver.cluster import state
from asyncrl.driver.cluster.state import check_room, pending_demands
from rollouter.serving.options import REWARD_DEPLOYMENT_NAME, app_name, reward_deployment_options

NAMESPACE = "run-1"


@pytest.fixture
def cluster() -> Iterator[None]:
    """Start a cluster that says it has one GPU."""
    import ray
    from ray import serve

    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


class Idle:
    pass


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("cluster")
def test_a_replica_of_the_reward_model_without_a_gpu_and_ranks_without_a_node_are_pending() -> None:
    from ray import serve
    from ray.util.placement_group import placement_group

    model = RewardModelConfig(placement="serve", path="/models/reward", num_replicas=2)
    options = reward_deployment_options(model, probe_s=10.0, gpus=True, driver="")
    target = serve.deployment(Idle, name=REWARD_DEPLOYMENT_NAME, **options).bind()
    app = serve.RunTarget(target=target, name=app_name(NAMESPACE, "reward"), route_prefix=None)
    serve.run_many([app], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    placement_group([{"CPU": 8}] * 2, strategy="STRICT_SPREAD", name=f"{NAMESPACE}/ranks/policy")
    expected = ("1 x ranks: 16 CPUs on 2 nodes, which no node has", "1 x reward model replica: 1 GPU and 1 CPU")
    until = time.monotonic() + 60
    while (found := pending_demands(NAMESPACE, app_name(NAMESPACE))) != expected:
        assert time.monotonic() < until, found
        time.sleep(0.1)
    assert pending_demands("another", app_name("another")) == ()


def test_only_groups_of_the_run_that_wait_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(name: str, state: str = "PENDING") -> dict[str, Any]:
        stats = {"scheduling_state": "QUEUED"}
        return {"name": name, "state": state, "strategy": "PACK", "stats": stats, "bundles": {0: {"GPU": 1.0}}}

    engines, reward = app_name(NAMESPACE), app_name(NAMESPACE, "reward")
    names = [
        f"{engines}#rollout#a",
        f"{engines}#rollout#b",
        f"{reward}#reward-model#c",
        f"other-{reward}#reward-model#d",
    ]
    table = {name: group(f"SERVE_REPLICA::{name}") for name in names}
    table["placed"] = group(f"{NAMESPACE}/ranks/policy", "CREATED")
    monkeypatch.setattr(state, "placement_group_table", lambda: table)
    assert pending_demands(NAMESPACE, engines) == ("2 x engine replica: 1 GPU", "1 x reward model replica: 1 GPU")


async def test_a_cluster_that_does_not_answer_what_it_has_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    monkeypatch.setattr(state, "cluster_nodes", hung.wait)
    try:
        with pytest.raises(DeadlineError, match=r"what its nodes have within 0\.1 s \(timeouts\.call_s\)"):
            await check_room(Config.model_validate({"timeouts": {"call_s": 0.1}}))
    finally:
        hung.set()
