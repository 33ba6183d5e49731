"""An engine that cannot start fails early with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import InfraError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]
NAMESPACE = "e2e-start"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=2, namespace=NAMESPACE, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.mark.slow
async def test_a_missing_model_is_reported_by_name(tmp_path: Path) -> None:
    from rollouter.serving.app import start_app, stop_app

    path = tmp_path / "nothing-here"
    config = Config.model_validate({"model": {"path": str(path)}, "timeouts": {"start_s": 120}})
    try:
        with pytest.raises(InfraError, match="did not start") as raised:
            await start_app(config, namespace=NAMESPACE)
    finally:
        await stop_app(NAMESPACE)
    assert "nothing-here" in raised.value.message
