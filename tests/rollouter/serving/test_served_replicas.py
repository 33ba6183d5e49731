"""The HTTP API follows its replicas, on a real Ray Serve whose replicas have no engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest

from rollouter.serving.http import ServedReplicas
from rollouter.serving.http_metrics import HttpMetrics, engine_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class EngineLess:
    """A replica that has only metrics."""

    def engine_metrics(self) -> str:
        return engine_metrics(str(os.getpid()), 3)

    def end(self) -> None:
        os._exit(1)


@pytest.fixture
def replicas() -> Iterator[ServedReplicas]:
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    deployment = serve.deployment(
        EngineLess, num_replicas=2, ray_actor_options={"num_cpus": 0}, health_check_period_s=1.0
    )
    serve.start(proxy_location="Disabled")
    handle = serve.run(deployment.bind(), route_prefix=None)
    yield ServedReplicas(handle)
    serve.shutdown()
    ray.shutdown()


async def until(replicas: ServedReplicas, count: int) -> None:
    with anyio.fail_after(120):
        while replicas.count() != count:  # noqa: ASYNC110  Serve has no call that waits
            await anyio.sleep(0.02)


async def test_the_count_follows_the_replicas_and_their_metrics_are_collected(replicas: ServedReplicas) -> None:
    await until(replicas, 2)
    texts = await replicas.metrics()
    assert len(texts) == 2
    assert HttpMetrics().text(2, texts).count(b"asyncrl_serve_weights_version{") == 2
    with suppress(TimeoutError):  # the replicas end before they answer
        await replicas._replicas.broadcast("end").results_async(timeout_s=20, return_exceptions=True)
    await until(replicas, 0)
    assert await replicas.metrics() == (), "without replicas there is nothing to collect"
    await until(replicas, 2)
    assert len(await replicas.metrics()) == 2
