"""The weights version with which a replica answers its first requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.core.ports import Publication, WeightsVersion
from asyncrl.weights.object_store import STORE_NAME, ServedRun
from rollouter.serving.options import ReplicaFacts
from rollouter.serving.replica import weights
from rollouter.serving.replica.deployment import RolloutReplica
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
        self.health = ReplicaHealth(replica="one", node_id="node", engine_s=30.0)
        self.calls: list[tuple[str, Any]] = []
        engine: Any = SimpleNamespace(client=SimpleNamespace(collective_rpc=self._call_workers), gauges=None)
        super().__init__(engine, self.health, "run", TimeoutsConfig())
        self._store = store
        self.loading, self.loaded = anyio.Event(), anyio.Event()
        self.loaded.set()
        self.failure: InfraError | None = None

    async def _call_workers(self, method: str, args: Any) -> None:
        self.calls.append((method, args))

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

    async def knows_its_run() -> None:
        return

    server: Any = SimpleNamespace(
        _weights=updates, _forwarder=EventForwarder("one"), _generation=SimpleNamespace(run=run),
        _health=SimpleNamespace(leaving=False), _find_run=knows_its_run,
    )  # fmt: skip

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


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="gcs", get_node_id=lambda: "node")
    monkeypatch.setattr(weights.ray, "get_runtime_context", lambda: context)


@pytest.mark.usefixtures("without_ray")
async def test_a_replica_that_attaches_to_a_run_takes_every_version_of_it() -> None:
    """It served version 7 of an earlier run, and the new one begins with version 2."""
    updates = Updates(Store())
    updates.health.weights_version = WeightsVersion(3, 7)
    run = ServedRun("runs/b on two", "run-b", verify="first", max_mismatch_kl=0.5)
    await updates.follow(Store(), run, serves_initial=False)
    assert updates.calls == [("connect_store", ("gcs", "run", STORE_NAME))]
    assert updates._run is run
    assert updates.health.weights_version < WeightsVersion(0, 0)
    await updates.start()
    assert updates.health.weights_version == WeightsVersion(0, 2)


@pytest.mark.usefixtures("without_ray")
async def test_an_update_of_the_earlier_run_ends_before_a_replica_attaches() -> None:
    updates = Updates(Store())
    async with anyio.create_task_group() as group, updates._lock:
        group.start_soon(lambda: updates.follow(Store(), ServedRun("b"), serves_initial=False))
        await anyio.wait_all_tasks_blocked()
        assert updates._run == ServedRun()
    assert updates._run.name == "b"


@pytest.mark.usefixtures("without_ray")
async def test_a_server_reports_to_the_run_that_has_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, store, run = Updates(Store()), Store(), ServedRun("b")
    facts = ReplicaFacts("one", "model", 768, "raw_logprobs")
    reported_to: list[Any] = []
    found: list[Any] = [(store, run)]

    async def find() -> Any:
        return found.pop() if found else (None, ServedRun())

    health = SimpleNamespace(report_to=reported_to.append)
    server: Any = SimpleNamespace(_weights=updates, _health=health, _facts=facts, _namespace="servers", _run=find)
    assert await RolloutServer.attach(server) == facts
    assert (reported_to, updates._store) == ([store], store)
    with pytest.raises(InfraError, match="no run is attached any more: Ray namespace servers has no weight store"):
        await RolloutServer.attach(server)


@pytest.mark.parametrize("attached", [True, False])
async def test_a_replica_that_started_while_a_run_attached_finds_it_before_its_first_request(attached: bool) -> None:
    asked: list[str] = []

    async def attach() -> None:
        asked.append("attach")
        await anyio.lowlevel.checkpoint()
        if not attached:
            raise InfraError("no run is attached")

    server: Any = SimpleNamespace(_finding_run=asyncio.Lock(), attach=attach)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(RolloutServer._find_run, server)
    await RolloutServer._find_run(server)
    assert asked == ["attach"]


async def test_a_user_config_changes_time_limits_of_a_running_engine() -> None:
    updates = Updates(Store())
    server: Any = SimpleNamespace(_weights=updates, _health=updates.health)
    replica = RolloutReplica.__new__(RolloutReplica)
    replica._timeouts = TimeoutsConfig(apply_s=77)
    replica._server = SimpleNamespace(reconfigure=lambda timeouts: RolloutServer.reconfigure(server, timeouts))
    await replica.reconfigure({"timeouts": {"engine_s": 120}})
    assert (updates.timeouts.apply_s, updates.health.engine_s) == (77, 120)
    for wrong in ({"timeouts": {"engine_s": -1}}, {"timeouts": {"engines_s": 1}}, {"engine": 1}):
        with pytest.raises(ConfigError, match=r"user_config=.*it may have `timeouts`"):
            await replica.reconfigure(wrong)
