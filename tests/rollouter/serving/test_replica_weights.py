"""The weights version with which a replica answers its first requests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
import ray
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from asyncrl.config.schema import Config
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.core.ports import Publication, WeightsVersion
from asyncrl.weights.object_store import STORE_NAME, ServedRun
from asyncrl.weights.transport import OwnChunk
from rollouter.serving.handles import typed
from rollouter.serving.options import ReplicaFacts, serving_options
from rollouter.serving.replica import server, weights
from rollouter.serving.replica.deployment import METHODS, RolloutReplica
from rollouter.serving.replica.event_forwarding import EventForwarder
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.server import RolloutServer
from rollouter.serving.replica.weights import WeightUpdates

FACTS = ReplicaFacts("one", "model", 768, "raw_logprobs", "float32", {"hidden_size": 128})


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

    def __init__(self, store: Store | None) -> None:
        self.health = ReplicaHealth(replica="one", node_id="node", engine_s=30.0)
        self.stores: list[dict[str, Any]] = []
        client = SimpleNamespace(init_weight_transfer_engine=self._connect)
        engine: Any = SimpleNamespace(client=client, gauges=None)
        super().__init__(engine, self.health, "run", TimeoutsConfig())
        self._store = store
        self.loading, self.loaded = anyio.Event(), anyio.Event()
        self.loaded.set()
        self.failure: InfraError | None = None

    async def _connect(self, request: WeightTransferInitRequest) -> None:
        self.stores.append(request.init_info)

    async def apply(self, publication: Publication, *mode: Any) -> Any:
        if self.failure is not None:
            raise self.failure
        self.loading.set()
        await self.loaded.wait()
        self.health.weights_version = publication.weights_version
        return self._report()


class Replica(RolloutServer):
    """A server without an engine."""

    def __del__(self) -> None:  # that of `LLMServer` is a coroutine, which asks its engine
        pass


def server_of(updates: Updates, **parts: Any) -> Any:
    """Return a server with these weight updates and no engine, whose replica has no run yet."""
    replica: Any = Replica.__new__(Replica)
    vars(replica).update(
        _weights=updates,
        _forwarder=EventForwarder("one"),
        _facts=FACTS,
        _health=updates.health,
        _namespace="servers",
        _call_s=1.0,
        _looking=asyncio.Lock(),
        _knows_run=True,
        _lent=False,
        _generation=SimpleNamespace(closed=False),
    )
    vars(replica).update(parts)
    return replica


async def test_the_first_requests_of_a_replica_get_the_newest_version() -> None:
    """The version was published after the replica had loaded its first one, and before Serve knew the replica."""
    store = Store()
    updates = Updates(store)
    served: list[int] = []

    async def run(requests: Any) -> AsyncGenerator[Any, None]:
        served.append(updates.health.weights_version.version)
        yield "accepted"

    replica = server_of(updates, _generation=SimpleNamespace(run=run))

    async def generate() -> None:
        assert [item async for item in replica.generate_tokens([])] == ["accepted"]

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(generate)
    asked = store.num_asked
    store.version = 3  # Serve knows the replica now, so this version is broadcast to it
    await generate()
    assert served == [2] * 4
    assert store.num_asked == asked


async def test_a_replica_on_lent_gpus_takes_calls_only_between_waking_up_and_sleeping() -> None:
    """It looks for no version at its first request, which would wake an engine that sleeps."""
    store = Store()
    updates = Updates(store)
    happened: list[str] = []

    async def run(requests: Any) -> AsyncGenerator[Any, None]:
        yield "accepted"

    async def sleep(mode: str) -> None:
        happened.append(f"sleep {mode}, closed: {replica._generation.closed}")

    async def wake() -> None:
        happened.append(f"wake, closed: {replica._generation.closed}")

    updates.sleep, updates.wake = sleep, wake  # type: ignore[method-assign, assignment]
    generation = SimpleNamespace(run=run, closed=False, hand_back=lambda: happened.append("hand back"))
    replica = server_of(updates, _lent=True, _generation=generation)
    await replica.sleep_engine()
    assert [item async for item in replica.generate_tokens([])] == ["accepted"]
    assert happened == ["hand back", "sleep abort, closed: True"] and store.num_asked == 0
    await replica.wake_engine()
    assert happened[2:] == ["wake, closed: True"] and not generation.closed
    await replica.sleep_engine()
    updates.loaded.set()
    await replica.apply_version(Publication(3, 1, 0, {}), "keep", True, False, "")
    assert not generation.closed


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
    assert updates.stores == [{"address": "gcs", "namespace": "run", "store_name": STORE_NAME}]
    assert updates.run is run
    assert updates.health.weights_version < WeightsVersion(0, 0)
    await updates.start()
    assert updates.health.weights_version == WeightsVersion(0, 2)


@pytest.fixture(params=[None, "import missing_on_the_nodes_of_the_replicas"])
def own_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the name of a class whose file, if there is one, cannot be imported."""
    monkeypatch.chdir(tmp_path)
    if request.param is not None:
        (tmp_path / "folder.py").write_text(request.param)
    return "folder.py:Folder"


async def test_a_backend_that_replicas_cannot_import_ends_the_run_at_once(own_backend: str) -> None:
    """Deployed replicas belong to another Ray job, which has none of the run's files."""
    updates = Updates(Store())

    async def remote(version: WeightsVersion) -> list[OwnChunk]:
        return [OwnChunk(own_backend, "handle")]

    updates._store.tensors = SimpleNamespace(remote=remote)
    with pytest.raises(ConfigError, match=r"folder\.py.* cannot load folder\.py:Folder\. .* runtime_env") as raised:
        await WeightUpdates.apply(updates, Publication(2, 1, 0, {}), "abort", True)
    failure = ray.exceptions.RayTaskError("apply_version", "traceback", raised.value)
    assert isinstance(typed(failure, "applying a version"), ConfigError), "the Rollouter tries only InfraErrors again"


@pytest.mark.usefixtures("without_ray")
async def test_an_update_of_the_earlier_run_ends_before_a_replica_attaches() -> None:
    updates = Updates(Store())
    async with anyio.create_task_group() as group, updates._lock:
        group.start_soon(lambda: updates.follow(Store(), ServedRun("b"), serves_initial=False))
        await anyio.wait_all_tasks_blocked()
        assert updates.run == ServedRun()
    assert updates.run.name == "b"


class RunsOnServers:
    """The runs that attach to the application of a replica, one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attached: tuple[Store, ServedRun] | None = None
        self.num_asked = 0
        monkeypatch.setattr(server, "attached_run", self._attached_run)

    async def _attached_run(self, namespace: str, *, limit_s: float) -> tuple[Store, ServedRun] | None:
        self.num_asked += 1
        await anyio.lowlevel.checkpoint()
        return self.attached


@pytest.mark.usefixtures("without_ray")
async def test_a_server_reports_to_the_run_that_has_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, store, runs = Updates(Store()), Store(), RunsOnServers(monkeypatch)
    runs.attached = (store, ServedRun("b"))
    reported_to: list[Any] = []
    replica = server_of(updates)
    replica._health.report_to = reported_to.append
    await replica.attach()
    assert (reported_to, updates._store) == ([store], store)
    updates.health.weights_version = WeightsVersion(0, 5)
    await replica.attach()
    assert updates.health.weights_version == WeightsVersion(0, 5), "the run had attached already"
    runs.attached = None
    with pytest.raises(InfraError, match="no run is attached any more: Ray namespace servers has no weight store"):
        await replica.attach()


@pytest.mark.usefixtures("without_ray")
async def test_the_versions_of_the_second_of_two_equal_runs_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their weight stores differ, and the versions of both begin at 1."""
    updates, runs = Updates(None), RunsOnServers(monkeypatch)
    swap = weights._Swap(drain_s=0.0, pause_s=0.1, load_s=0.1, in_flight=0)

    async def load(weights_version: WeightsVersion, *args: Any) -> weights._Swap:
        updates.health.weights_version = weights_version
        return swap

    monkeypatch.setattr(updates, "apply", partial(WeightUpdates.apply, updates))
    monkeypatch.setattr(updates, "_fetch", AsyncMock(return_value=0.0))
    monkeypatch.setattr(updates, "_swap", load)
    replica = server_of(updates)
    for _ in range(2):
        runs.attached = Store(), ServedRun("b", "run-b", verify="off")
        await replica.attach()
        reports = [
            await replica.apply_version(Publication(number, 1, 0, {}), "keep", True, False, "run-b")
            for number in (1, 2, 2)
        ]
        assert [report.load_s for report in reports] == [0.1, 0.1, 0.0]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("facts", "rollout", "message"),
    [
        (
            replace(FACTS, sizes={"hidden_size": 256, "vocab_size": 512}),
            {},
            r"have the model model \(hidden_size=256, vocab_size=512\), and model\.path=.* has hidden_size=128",
        ),
        (replace(FACTS, max_model_len=700), {}, "context of 700 tokens, and the run needs 768"),
        (
            FACTS,
            {"sampling": {"temperature": 0.5}},
            r"report raw_logprobs, and .*temperature .* processed_logprobs",
        ),
        (replace(FACTS, dtype="bfloat16"), {}, r"rollout\.dtype=bfloat16, and the run publishes weights in float32"),
        (replace(FACTS, quantization="mxfp8"), {}, r"rollout\.quantization=mxfp8, and the run has null"),
    ],
)
async def test_a_run_that_engines_do_not_fit_is_refused_and_leaves_the_replica_as_it_is(
    monkeypatch: pytest.MonkeyPatch, facts: ReplicaFacts, rollout: dict[str, Any], message: str
) -> None:
    """It is refused when it attaches, and when a replica that started later meets it at its first call."""
    config = Config.model_validate({"model": {"path": "asyncrl://quickstart"}, "rollout": rollout})
    updates, runs = Updates(Store()), RunsOnServers(monkeypatch)
    updates.run, updates.health.weights_version = ServedRun("a", "run-a"), WeightsVersion(3, 7)
    runs.attached = Store(), ServedRun("b", "run-b", engines=ReplicaFacts.wanted(config))
    replica = server_of(updates, _facts=facts, _knows_run=False)
    with pytest.raises(ConfigError, match=message):
        await replica.attach()
    with pytest.raises(ConfigError, match=message):
        await replica.apply_version(Publication(2, 1, 0, {}), "abort", True, False, "run-b")
    assert (updates.run.name, updates.health.weights_version, updates.stores) == ("a", WeightsVersion(3, 7), [])
    replica._facts = FACTS if not rollout else replace(FACTS, logprobs_mode="processed_logprobs")
    await replica.attach()
    assert updates.run.name == "b"


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(("dtype", "fits"), [("float32", True), ("bfloat16", False)])
async def test_a_replica_that_starts_while_a_run_attaches_follows_it_only_if_its_engine_fits(
    monkeypatch: pytest.MonkeyPatch, dtype: str, fits: bool
) -> None:
    config = Config.model_validate({"model": {"path": "asyncrl://quickstart"}})
    deployed = Config.model_validate({"model": {"path": "asyncrl://quickstart"}, "rollout": {"dtype": dtype}})
    store, runs, reports_to = Store(), RunsOnServers(monkeypatch), list[Any]()
    runs.attached = store, ServedRun("b", "run-b", engines=ReplicaFacts.wanted(config))

    async def start_engine(*args: Any, **kwargs: Any) -> None:
        raise InfraError("the test needs no engine")

    context = SimpleNamespace(app_name="servers", replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(server.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(server.LLMServer, "__init__", start_engine)
    monkeypatch.setattr(server, "LLMConfig", lambda **_: None)
    monkeypatch.setattr(ReplicaHealth, "report_to", lambda health, store: reports_to.append(store))
    replica = Replica.__new__(Replica)
    with pytest.raises(InfraError, match="needs no engine"):
        await replica.__init__(serving_options(deployed, namespace=None, gpus=False), openai=False)  # type: ignore[misc]
    assert reports_to == [store if fits else None]


@pytest.mark.usefixtures("without_ray")
async def test_a_late_version_of_an_earlier_run_is_refused_without_harm() -> None:
    """The call waits for an update to end, and so does the next run that attaches."""
    updates = Updates(Store())
    updates.run = ServedRun("a", "run-a")
    refused: list[str] = []

    async def late() -> None:
        try:
            await WeightUpdates.apply(updates, Publication(2, 1, 0, {"layers.0": 1}), "abort", True, run="run-a")
        except InfraError as error:
            refused.append(error.message)

    async with anyio.create_task_group() as group, updates._lock:
        group.start_soon(lambda: updates.follow(Store(), ServedRun("b", "run-b"), serves_initial=False))
        await anyio.wait_all_tasks_blocked()
        group.start_soon(late)
        await anyio.wait_all_tasks_blocked()
    assert refused == ["replica one still serves version -1: it does not follow the run run-a"]
    assert (updates.run.name, updates.health.broken) == ("b", "")


@pytest.mark.usefixtures("without_ray")
async def test_a_replica_that_started_while_a_run_attached_finds_it_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When its engine began to start, no run was attached. The broadcast of `attach` did not reach it."""
    runs = RunsOnServers(monkeypatch)

    async def run(requests: Any) -> AsyncGenerator[Any, None]:
        served.append((updates.health.weights_version.version, updates.run.name))
        yield "accepted"

    for first in ("generate", "apply"):
        updates, served = Updates(None), list[Any]()
        replica = server_of(updates, _generation=SimpleNamespace(run=run))
        replica._knows_run = False
        runs.attached, runs.num_asked = (Store(), ServedRun("b", "run-b")), 0

        async def generate(replica: Any = replica) -> None:
            assert [item async for item in replica.generate_tokens([])] == ["accepted"]

        if first == "apply":
            await replica.apply_version(Publication(2, 1, 0, {}), "abort", True, False, "run-b")
            assert (updates._store, updates.health.weights_version.version) == (runs.attached[0], 2)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(generate)
        assert served == [(2, "b")] * 3
        assert runs.num_asked == 1


@pytest.mark.usefixtures("without_ray")
async def test_the_first_requests_of_the_next_run_get_its_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, runs = Updates(Store()), RunsOnServers(monkeypatch)
    await updates.join()
    assert updates.health.weights_version.version == 2
    later = Store()
    later.version = 1
    runs.attached = (later, ServedRun("b"))
    await server_of(updates).attach()
    await updates.join()
    assert updates.health.weights_version.version == 1


@pytest.mark.usefixtures("without_ray")
async def test_a_start_for_a_run_that_attached_later_uses_no_version_of_the_earlier_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The earlier run's store answers, or turns out to be gone, after the later run has attached."""
    earlier, later = Store(), Store()
    earlier.version, later.version = 7, 3
    updates = Updates(earlier)
    applied: list[int] = []
    monkeypatch.setattr(updates, "apply", lambda publication, *_: record(publication))

    async def record(publication: Publication) -> None:
        applied.append(publication.version)
        updates.health.weights_version = publication.weights_version

    async def answer(timeout_s: float, lost: Any) -> Publication:
        await updates.follow(later, ServedRun("b"), serves_initial=False)
        return Publication(earlier.version, 1, 0, {})

    earlier.start_with = SimpleNamespace(remote=answer)
    await updates.start()
    assert applied == [3]


async def test_a_replica_whose_run_ends_while_it_starts_serves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    updates = Updates(store)
    found: list[Any] = [store, None]  # the store restarts, and then its run ends
    monkeypatch.setattr(weights, "find_store", lambda namespace: found.pop(0))
    monkeypatch.setattr(weights, "RETRY_S", 0.0)

    async def gone(timeout_s: float, lost: Any) -> Publication:
        raise ray.exceptions.ActorDiedError()

    store.start_with = SimpleNamespace(remote=gone)
    with anyio.fail_after(30):
        await updates.start()
    assert (found, updates.health.weights_version) == ([], WeightsVersion(0, 0))


async def test_a_ray_that_does_not_answer_is_no_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    monkeypatch.setattr(weights, "find_store", lambda namespace: hung.wait(30))
    monkeypatch.setattr(weights, "ASK_STORE_S", 0.1)
    try:
        with anyio.fail_after(10):
            assert not await Updates(None)._has_ended(Store())
    finally:
        hung.set()


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(("ending", "version"), [("finished", 5), ("failed", 5), ("killed", 5), ("killed at once", -1)])
async def test_a_server_goes_on_with_the_last_version_of_a_run_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, ending: str, version: int
) -> None:
    """The run finished, or failed because version 6 could not be loaded, or was killed before or after its versions."""
    store, runs, served = Store(), RunsOnServers(monkeypatch), list[int]()

    async def run(requests: Any) -> AsyncGenerator[Any, None]:
        served.append(updates.health.weights_version.version)
        yield "accepted"

    async def gone(timeout_s: float, lost: Any) -> Publication:
        raise ray.exceptions.ActorDiedError()

    updates = Updates(None)
    updates.health.weights_version = WeightsVersion(0, 7)  # of an earlier run
    replica = server_of(updates, _generation=SimpleNamespace(run=run))
    runs.attached = (store, ServedRun("b", "run-b"))
    await replica.attach()
    if ending != "killed at once":
        await replica.apply_version(Publication(5, 1, 0, {}), "abort", True, False, "run-b")
        store.version = 5
    if ending in ("finished", "failed"):
        assert [item async for item in replica.generate_tokens([])] == ["accepted"]
    if ending == "failed":
        updates.failure = InfraError("version 6 cannot be fetched")
        with pytest.raises(InfraError, match="version 6"):
            await replica.apply_version(Publication(6, 1, 0, {}), "abort", True, False, "run-b")
    runs.attached, store.start_with = None, SimpleNamespace(remote=gone)
    monkeypatch.setattr(weights, "find_store", lambda namespace: None)
    with anyio.fail_after(30):
        assert [item async for item in replica.generate_tokens([])] == ["accepted"]
    assert (served[-1], updates.health.broken) == (version, "")
    assert f'asyncrl_serve_weights_version{{replica="one"}} {float(version)}' in replica.engine_metrics()


async def test_a_user_config_changes_time_limits_of_a_running_engine() -> None:
    updates = Updates(Store())
    replica = RolloutReplica.__new__(RolloutReplica)
    replica._timeouts = TimeoutsConfig(apply_s=77)
    replica._server = SimpleNamespace(reconfigure=lambda timeouts: server_of(updates).reconfigure(timeouts))
    await replica.reconfigure({"timeouts": {"engine_s": 120}})
    assert (updates.timeouts.apply_s, updates.health.engine_s) == (77, 120)
    for wrong in (
        {"timeouts": {"engine_s": -1}},
        {"timeouts": {"engines_s": 1}},
        {"timeouts": {"probe_s": 1}},
        {"engine": 1},
    ):
        with pytest.raises(ConfigError, match=r"user_config=.*it may have `timeouts`"):
            await replica.reconfigure(wrong)


async def test_a_deployment_with_other_actor_options_keeps_the_environment_of_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve replaces `ray_actor_options` as a whole, including `runtime_env`; Ray then sets OMP_NUM_THREADS itself."""
    environment = {"OMP_NUM_THREADS": "2"}
    seen: dict[str, str] = {}

    async def start_server(options: Any, *, openai: bool) -> Any:
        seen.update(os.environ)
        return SimpleNamespace(**dict.fromkeys(METHODS))

    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(server, "start_server", start_server)
    config = Config.model_validate({"model": {"path": "/models/tiny"}, "rollout": {"cpu_kv_cache_gib": 3}})
    replica = RolloutReplica.__new__(RolloutReplica)
    await replica.__init__(serving_options(config, namespace=None, gpus=False))  # type: ignore[misc]
    assert (seen["VLLM_CPU_KVCACHE_SPACE"], seen["TORCHDYNAMO_DISABLE"], seen["OMP_NUM_THREADS"]) == ("3", "1", "2")
