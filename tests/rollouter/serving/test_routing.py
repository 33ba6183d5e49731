"""Sessions and their replicas behind a real Ray Serve; what is deployed only says which replica it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from rollouter.serving.options import ROUTER

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

    class Told:
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
    )(Told)
    serve.start(proxy_location="Disabled")
    yield serve.run(deployment.bind(), name="told", route_prefix=None)
    serve.shutdown()
    ray.shutdown()


async def test_a_session_stays_on_its_replica_until_that_is_gone(handle: Any) -> None:
    async def where(session: str) -> str:
        replica: str = await handle.options(session_id=session).where.remote()
        return replica

    from ray.exceptions import RayError

    with anyio.fail_after(100):
        names = [f"sample_0_{number}" for number in range(24)]
        homes = dict(zip(names, await asyncio.gather(*map(where, names)), strict=True))
        assert len(set(homes.values())) == 3, f"nobody is left out: {Counter(homes.values())}"
        asked = [f"{name}/{turn}" for turn in range(8) for name in names]
        answers = await asyncio.gather(*map(where, asked))
        assert answers == [homes[name.partition("/")[0]] for name in asked], "whatever is asked at the same time"
        gone = homes[names[0]]
        with pytest.raises(RayError):
            await handle.options(session_id=names[0]).end.remote()
        moved = await where(names[0])
        assert moved != gone and {await where(names[0]) for _ in range(5)} == {moved}
