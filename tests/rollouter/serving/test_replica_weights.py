"""The weights version with which a replica answers its first requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import InfraError
from asyncrl.core.ports import Publication
from rollouter.serving.replica.event_forwarding import EventForwarder
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.server import RolloutServer
from rollouter.serving.replica.weights import WeightUpdates


class Store:
    """The handle of a weight store whose newest version is `version`."""

    def __init__(self) -> None:
        self.version = 2
        self.num_asked = 0
        self.start_with = SimpleNamespace(remote=self._start_with)

    async def _start_with(self, timeout_s: float, lost: Any) -> Publication:
        self.num_asked += 1
        await anyio.lowlevel.checkpoint()
        return Publication(self.version, 1, 0, {})


class Updates(WeightUpdates):
    """The updates of a replica without an engine."""

    def __init__(self, store: Store) -> None:
        self.health = ReplicaHealth(replica="one", node_id="node", engine_s=30.0, store=None)
        engine: Any = SimpleNamespace(client=None, gauges=None)
        options: Any = SimpleNamespace(namespace="run", verify="off", max_mismatch_kl=None, timeouts=TimeoutsConfig())
        super().__init__(engine, self.health, store, options)
        self.loading, self.loaded = anyio.Event(), anyio.Event()
        self.loaded.set()
        self.failure: InfraError | None = None

    async def apply(self, publication: Publication, *mode: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self.loading.set()
        await self.loaded.wait()
        self.health.weights_version = publication.weights_version


async def test_the_first_requests_of_a_replica_get_the_newest_version() -> None:
    """The version was published after the replica had loaded its first one, and before Serve knew the replica."""
    store = Store()
    updates = Updates(store)
    served: list[int] = []

    async def run(requests: Any) -> AsyncGenerator[Any, None]:
        served.append(updates.health.weights_version.version)
        yield "accepted"

    server: Any = SimpleNamespace(
        _weights=updates, _forwarder=EventForwarder("one"), _generation=SimpleNamespace(run=run)
    )

    async def generate() -> None:
        assert [item async for item in RolloutServer.generate_tokens(server, [])] == ["accepted"]

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(generate)
    asked = store.num_asked
    store.version = 3  # Serve knows the replica now, so this version is broadcast to it
    await generate()
    assert served == [2] * 4
    assert store.num_asked == asked


async def test_a_first_request_that_is_cancelled_does_not_interrupt_the_load() -> None:
    store = Store()
    updates = Updates(store)
    updates.loaded = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(updates.join)
        await updates.loading.wait()
        group.cancel_scope.cancel()
    updates.loaded.set()
    await updates.join()
    assert updates.health.weights_version.version == 2
    assert store.num_asked == 2, "once before the load and once after it"


async def test_after_a_failure_the_next_request_asks_again() -> None:
    updates = Updates(Store())
    updates.health.broken, updates.failure = "broken", InfraError("the load failed")
    with pytest.raises(InfraError, match="the load failed"):
        await updates.join()
    updates.failure = None
    await updates.join()
    assert updates.health.weights_version.version == 2
