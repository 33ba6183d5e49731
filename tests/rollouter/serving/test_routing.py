"""Replica affinity of sessions, alone and on a real Ray Serve with a deployment that returns the name of its
replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from rollouter.serving.options import ROUTER
from rollouter.serving.routing import ReplicaAffinity, affinity_key

pytestmark = pytest.mark.timeout(120)


def test_a_session_stays_on_its_replica_while_the_replica_is_available() -> None:
    affinity = ReplicaAffinity()
    assert affinity.find("sample_0_1", {"a", "b"}) is None
    affinity.assign("sample_0_1", "b")
    assert affinity.find("sample_0_1", {"a", "b"}) == "b"
    assert affinity.find("sample_0_2", {"a", "b"}) is None
    assert affinity.find("sample_0_1", {"a"}) is None
    affinity.assign("sample_0_1", "a")
    assert affinity.find("sample_0_1", {"a", "b"}) == "a"


def test_conversations_of_a_sample_share_a_replica() -> None:
    affinity = ReplicaAffinity()
    affinity.assign("sample_0_1/0", "a")
    assert affinity.find("sample_0_1/7", {"a"}) == "a"
    assert affinity_key("val_3_7_try_2") != affinity_key("val_3_7"), "another try may go to another replica"


def test_the_least_recently_used_sessions_are_forgotten() -> None:
    affinity = ReplicaAffinity(max_keys=2)
    affinity.assign("one", "a")
    affinity.assign("two", "a")
    assert affinity.find("one", {"a"}) == "a"
    affinity.assign("three", "a")
    assert affinity.find("one", {"a"}) == "a" and affinity.find("two", {"a"}) is None


def test_a_session_without_a_name_has_no_affinity() -> None:
    affinity = ReplicaAffinity()
    affinity.assign("", "a")
    assert affinity.find("", {"a"}) is None


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

    class Where:
        async def where(self) -> str:
            await asyncio.sleep(0.01)
            return serve.get_replica_context().replica_id.unique_id

        async def end(self) -> None:
            import os

            os._exit(1)

    deployment = serve.deployment(
        num_replicas=3,
        max_ongoing_requests=1000,
        request_router_config={"request_router_class": ROUTER},
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
    )(Where)
    serve.start(proxy_location="Disabled")
    yield serve.run(deployment.bind(), name="where", route_prefix=None)
    serve.shutdown()
    ray.shutdown()


async def test_serve_keeps_sessions_on_their_replicas(handle: Any) -> None:
    async def where(session: str) -> str:
        replica: str = await handle.options(session_id=session).where.remote()
        return replica

    from ray.exceptions import RayError

    with anyio.fail_after(100):
        names = [f"sample_0_{number}" for number in range(48)]
        replicas = dict(zip(names, await asyncio.gather(*map(where, names)), strict=True))
        # The router may not know every replica yet when the first sessions arrive.
        assert len(set(replicas.values())) >= 2, f"sessions are spread: {Counter(replicas.values())}"
        asked = [f"{name}/{turn}" for turn in range(8) for name in names]
        answers = await asyncio.gather(*map(where, asked))
        assert answers == [replicas[name.partition("/")[0]] for name in asked], (
            "sessions stay on their replicas under concurrent requests"
        )
        gone = replicas[names[0]]
        with pytest.raises(RayError):
            await handle.options(session_id=names[0]).end.remote()
        moved = await where(names[0])
        assert moved != gone and {await where(names[0]) for _ in range(5)} == {moved}
