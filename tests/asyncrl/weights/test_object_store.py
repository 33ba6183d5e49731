"""The weight store's actor, publisher and feed on a real Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from ray.exceptions import GetTimeoutError

from asyncrl.core.failures import BugError, ConfigError, DeadlineError, FencedError, InfraError
from asyncrl.core.ports import Publication, ReplicaReport, StoreStatus, WeightsVersion
from asyncrl.driver.health_monitor import object_store_share
from asyncrl.weights import object_store
from asyncrl.weights.checksums import WeightChecksums
from asyncrl.weights.object_store import (
    FORGET_REPLICA_S,
    ObjectStoreFeed,
    ObjectStorePublisher,
    ReplicaReports,
    ServedRun,
    attached_run,
    claim_store,
    find_store,
    on_clock,
    start_store,
)
from benchmarks.running import publish_tensors

NAMESPACE = "weights-test"
STORE_BYTES = 200 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def store() -> Iterator[Any]:
    handle = start_store(NAMESPACE)
    ray.get(handle.status.remote())
    yield handle
    ray.kill(handle)


def weights(value: float) -> dict[str, np.ndarray]:
    return {f"model.layers.{layer}.w": np.full(1000, value + layer, dtype=np.float32) for layer in range(4)}


async def publish(store: Any, version: int, *, lineage: int = 0, **options: Any) -> Publication:
    publisher = ObjectStorePublisher(store, call_s=10, lineage=lineage, **options)
    return await publish_tensors(publisher, version, version * 10, weights(version), validate=version == 2)


def plain(version: int) -> WeightsVersion:
    return WeightsVersion(0, version)


async def ask(ref: Any) -> Any:
    return await object_store.answer_of(ref, 60, "asking")


async def newer(store: Any, known: WeightsVersion) -> tuple[WeightsVersion, bool]:
    """Return the version that the feed delivers, and whether it is to be validated."""
    newest = await ObjectStoreFeed(store, call_s=10).wait_newer(known, timeout_s=10)
    assert newest is not None
    return newest.weights_version, newest.validate


async def test_published_weights_can_be_fetched(store: Any) -> None:
    published = await publish(store, 1, bucket_bytes=9000)
    chunks = await anyio.to_thread.run_sync(lambda: ray.get(ray.get(store.tensors.remote(plain(1)))))
    assert [len(chunk) for chunk in chunks] == [2, 2]
    fetched = {name: array for chunk in chunks for name, array in chunk.items()}
    for name, array in weights(1).items():
        np.testing.assert_array_equal(fetched[name], array)
    assert (published.version, published.step, published.num_bytes, published.validate) == (1, 10, 16000, False)
    checksums = WeightChecksums()
    checksums.add(fetched)
    assert published.checksums == checksums.by_group()
    assert await ObjectStoreFeed(store, call_s=10).latest() == published


async def test_the_feed_waits_for_a_newer_version(store: Any) -> None:
    feed = ObjectStoreFeed(store, call_s=10)
    assert await feed.latest() is None
    assert await feed.wait_newer(plain(0), timeout_s=0.05) is None
    seen: list[Publication | None] = []

    async def wait() -> None:
        seen.append(await feed.wait_newer(plain(0), timeout_s=10))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await publish(store, 1)
    assert [publication.version for publication in seen if publication] == [1, 1]
    assert await feed.wait_newer(plain(1), timeout_s=0.05) is None
    await publish(store, 2)
    assert await newer(store, plain(0)) == (plain(2), True)


async def held(store: Any) -> set[int]:
    found = set()
    for version in range(1, 10):
        try:
            await ask(store.tensors.remote(plain(version)))
        except InfraError as error:
            assert f"does not hold version {version}" in str(error)
        else:
            found.add(version)
    return found


async def test_delivered_versions_are_kept_while_newer_ones_arrive(store: Any) -> None:
    feed = ObjectStoreFeed(store, call_s=10)
    await publish(store, 1)
    await feed.latest()
    for version in (2, 3, 4):
        await publish(store, version)
    assert await held(store) == {1, 4}
    await feed.latest()
    await publish(store, 5)
    await feed.latest()
    await publish(store, 6)
    assert await held(store) == {4, 5, 6}


async def test_kept_versions_that_exceed_the_object_store_are_spilled_and_read_back(store: Any) -> None:
    feed, publisher = ObjectStoreFeed(store, call_s=60), ObjectStorePublisher(store, call_s=60, lineage=0)
    num_values = STORE_BYTES // 2 // 4  # two of the three kept versions fill the object store
    for version in (1, 2, 3):
        values = np.full(num_values, version, dtype=np.float32)
        await publish_tensors(publisher, version, version, {"model.layers.0.w": values})
        if version < 3:  # the store keeps the last two that were handed out, and the newest
            await feed.latest()
    (node,) = ray.nodes()
    stats = await anyio.to_thread.run_sync(node_stats, node["NodeManagerAddress"], node["NodeManagerPort"], False)
    assert stats.store_stats.spilled_bytes_total >= STORE_BYTES // 2
    for version in (1, 2, 3):
        (chunk,) = await anyio.to_thread.run_sync(lambda v=version: ray.get(ray.get(store.tensors.remote(plain(v)))))
        assert (chunk["model.layers.0.w"] == version).all()
        del chunk


async def test_the_validation_of_a_replaced_version_passes_to_the_next_version(store: Any) -> None:
    for version in (1, 2, 3):
        await publish(store, version)
    assert await newer(store, plain(0)) == (plain(3), True)
    await store.acknowledge.remote(plain(3))  # the feed does not wait for it
    await publish(store, 4)
    assert await newer(store, plain(3)) == (plain(4), False)


async def test_versions_must_increase(store: Any) -> None:
    await publish(store, 2)
    with pytest.raises(BugError, match="version 2 published after version 2"):
        await publish(store, 2)


async def test_a_newer_lineage_is_newer_than_any_version_of_an_older_one(store: Any) -> None:
    feed = ObjectStoreFeed(store, call_s=10)
    for version in (1, 2, 3):
        await publish(store, version)
    back = await publish(store, 1, lineage=1)
    assert back.weights_version == WeightsVersion(1, 1)
    assert await feed.wait_newer(WeightsVersion(0, 3), timeout_s=10) == back
    # Training reaches version 2 again, whose validation was requested.
    assert not back.validate
    with pytest.raises(FencedError, match="lineage 0, which a Trainer of lineage 1 has replaced"):
        await publish(store, 4)
    await publish(store, 2, lineage=1)
    assert await newer(store, back.weights_version) == (WeightsVersion(1, 2), True)


async def test_a_rewind_keeps_the_request_for_validation(store: Any) -> None:
    await publish(store, 2)
    assert (await publish(store, 2, lineage=1)).validate
    await publish(store, 3, lineage=2)
    assert await newer(store, plain(0)) == (WeightsVersion(2, 3), True)


async def test_a_restarted_store_gets_the_weights_again() -> None:
    store = start_store(NAMESPACE, max_restarts=-1)
    feed = ObjectStoreFeed(store, call_s=20)
    publisher = ObjectStorePublisher(store, call_s=20)
    try:
        published = await publish_tensors(publisher, 1, 10, weights(1))
        assert await feed.latest() == published
        died = (await ask(store.status.remote())).pid
        os.kill(died, signal.SIGKILL)
        status = await object_store._ask(lambda _: store.status.remote(), 20, "status")
        assert (status.pid != died, status.newest) == (True, None)
        # The restarted store does not know whether a version was published, so it does not answer `None`.
        with pytest.raises(DeadlineError, match="nothing has been published to it since"):
            await ObjectStoreFeed(store, call_s=0.5).latest()
        async with anyio.create_task_group() as group:
            found: list[Any] = []

            async def wait() -> None:
                found.append(await feed.latest())

            group.start_soon(wait)
            await publisher.republish()
        await publisher.republish()
        assert found == [published]
        assert await feed.wait_newer(plain(0), timeout_s=10) == published
        chunks = await anyio.to_thread.run_sync(lambda: ray.get(ray.get(store.tensors.remote(plain(1)))))
        np.testing.assert_array_equal(chunks[0]["model.layers.0.w"], weights(1)["model.layers.0.w"])
    finally:
        ray.kill(store)


async def test_a_publisher_reports_that_it_has_published_nothing(store: Any) -> None:
    publisher = ObjectStorePublisher(store, call_s=10)
    await publisher.republish()
    assert await ask(store.start_with.remote(0.05)) is None
    await publish(store, 1)
    published = await publish(store, 2)
    assert (await ask(store.start_with.remote(0.05))).weights_version == plain(2)
    # The answer is a version newer than the lost one, or otherwise the lost version again.
    lost = await ask(store.start_with.remote(10, plain(1)))
    assert lost == await ask(store.start_with.remote(0.05, plain(2))) == published


async def until_share(wanted: float) -> None:
    """Wait until the used share is `wanted`. The GCS learns of changes in the object store with a delay."""
    while True:
        share = await anyio.to_thread.run_sync(object_store_share)
        if share is not None and abs(share - wanted) < 0.01:
            return


async def test_the_used_share_of_the_object_store_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(30):
        await until_share(0.0)
        kept = [ray.put(np.zeros(STORE_BYTES // 4, dtype=np.uint8)) for _ in range(2)]
        await until_share(0.5)
        del kept
        await until_share(0.0)
    monkeypatch.delattr("ray._private.state.available_resources_per_node")
    assert object_store_share() is None, "the share is unknown if this version of Ray does not report it"


def reported(name: str, at: float, phase_since: float | None = None) -> ReplicaReport:
    return ReplicaReport(name, "node", 1, (2, 3), "serving", phase_since or at, 0, 1, 4, 100, at)


def test_reports_are_converted_to_the_readers_clock_and_dropped_when_they_are_old() -> None:
    reports = ReplicaReports()
    reports.add(reported("old", 7.0, phase_since=1.0), 1000.0)
    reports.add(reported("a", 50.0, phase_since=40.0), 1100.0)
    reports.add(reported("b", 9000.0, phase_since=1.0), 1090.0)
    assert [report.replica for report in reports.recent(1000.0 + FORGET_REPLICA_S)] == ["old", "b", "a"]
    left = reports.recent(1001.0 + FORGET_REPLICA_S)
    assert [report.replica for report in left] == ["b", "a"]
    status = on_clock(StoreStatus(1, None, left, at=1001.0 + FORGET_REPLICA_S), 5000.0)
    assert status.at == 5000.0
    b, a = status.replicas
    # The store's clock measures the age of a report, and the replica's clock the age of the reported phase.
    assert 5000.0 - a.reported_at == 1001.0 + FORGET_REPLICA_S - 1100.0
    assert a.reported_at - a.phase_since == 10.0
    assert a.reported_at - b.reported_at == 10.0


async def test_the_store_converts_reports_to_its_own_clock(store: Any) -> None:
    for name, off_s in (("a", -1000.0), ("b", 1000.0)):
        at = time.time() + off_s
        report = reported(name, at, phase_since=at - 5)
        await ask(store.report.remote(report))
    await publish(store, 1)
    await ask(store.report.remote(reported("a", 0.0)))
    status = await ask(store.status.remote())
    assert [report.replica for report in status.replicas] == ["b", "a"]
    for report in status.replicas:
        assert 0 <= status.at - report.reported_at < 10
    assert status.replicas[0].reported_at - status.replicas[0].phase_since == pytest.approx(5, abs=1e-3)
    assert abs(status.at - time.time()) < 10
    assert status.newest == plain(1)
    assert status.health.rss_bytes > 1 << 20 and status.health.lag_s is not None


async def test_a_validation_whose_request_was_lost_passes_to_the_next_version(store: Any) -> None:
    publisher = ObjectStorePublisher(store, call_s=10)
    await publish_tensors(publisher, 1, 1, weights(1), validate=True)
    # The answer is lost because the caller is dead.
    assert (await ask(store.wait_newer.remote(plain(0), 10))).validate
    assert (await publish_tensors(publisher, 2, 2, weights(2))).validate is False
    assert await newer(store, plain(1)) == (plain(2), True)
    await publish_tensors(publisher, 3, 3, weights(3))
    assert await newer(store, plain(2)) == (plain(3), False)


async def test_a_store_that_does_not_answer_is_a_deadline_error(store: Any) -> None:
    ray.kill(store)
    with anyio.fail_after(20), pytest.raises(InfraError):
        while True:  # Ray kills the actor with a delay
            await ObjectStoreFeed(store, call_s=0.3).latest()
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.01 s"):
        await object_store.answer_of(anyio.sleep(5), 0.01, "nothing")


async def test_a_put_that_does_not_end_is_a_deadline_error(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(ray, "put", lambda chunk: let_go.wait(30))
    with pytest.raises(DeadlineError, match=r"did not take 16000 bytes of version 1 within 0\.05 s: .*must fit"):
        await publish_tensors(ObjectStorePublisher(store, call_s=0.05), 1, 1, weights(1))
    let_go.set()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ray.exceptions.ObjectStoreFullError("full"),
            r"no room for 16000 bytes of version 1: .*raise ray\.object_store_memory_bytes",
        ),
        (
            ray.exceptions.OutOfDiskError("/tmp is over 95% full"),
            r"(?s)could not take 16000 bytes of version 1; check the disk.*over 95% full",
        ),
    ],
)
async def test_an_object_store_that_fails_is_an_infra_error(
    store: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(chunk: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "put", fail)
    with pytest.raises(InfraError, match=message):
        await publish_tensors(ObjectStorePublisher(store, call_s=10), 1, 1, weights(1))


async def test_the_store_is_found_by_its_namespace(store: Any) -> None:
    assert find_store(NAMESPACE) is not None
    assert find_store("another") is None


async def test_one_run_at_a_time_has_the_store_of_deployed_rollout_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a run that has died makes room for every run, and a living one keeps every other run out."""
    monkeypatch.setattr(object_store, "KILLED_S", 0.5)

    async def claim(name: str, limit_s: float = 60.0) -> Any:
        run = ServedRun(name, namespace=name)
        return await claim_store("servers", run, max_restarts=0, limit_s=limit_s)

    first = await claim("runs/a on one")
    assert (await ask(first.served_run.remote())).namespace == "runs/a on one"
    with pytest.raises(ConfigError, match="the run runs/a on one is attached"):
        await claim("runs/b on two")
    with pytest.raises(DeadlineError, match=r"an earlier driver of this run \(runs/a on one\) still holds"):
        await claim("runs/a on one", limit_s=1.0)
    monkeypatch.setattr(object_store, "KILLED_S", 60.0)
    claimed: list[Any] = [first]

    async def claim_next(name: str) -> None:
        claimed.append(await claim(name))

    for name in ("runs/a on one", "runs/b on two"):
        async with anyio.create_task_group() as group:
            group.start_soon(claim_next, name)
            await anyio.sleep(0.5)  # it has asked the living store
            await anyio.to_thread.run_sync(ray.kill, claimed[-1])
        found = await attached_run("servers", limit_s=10)
        assert found is not None and found[1] == ServedRun(name, namespace=name)
    ray.kill(claimed[-1])
    with anyio.fail_after(30):
        while await attached_run("servers", limit_s=10) is not None:  # noqa: ASYNC110  Ray ends the actor
            await anyio.sleep(0.05)


async def test_a_store_that_restarts_answers_which_run_it_serves() -> None:
    store = start_store("restarts", ServedRun("a"), max_restarts=-1)
    died = (await ask(store.status.remote())).pid
    os.kill(died, signal.SIGKILL)
    found = await attached_run("restarts", limit_s=30)
    assert found is not None and (found[0], found[1].name) == (store, "a")
    ray.kill(store)


async def test_a_store_that_does_not_answer_keeps_other_runs_out_without_a_guess_at_its_run() -> None:
    store = start_store("hangs", ServedRun("runs/a on one"))
    os.kill((await ask(store.status.remote())).pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"another run in Ray namespace hangs has not answered for 0\.3 s"):
            await claim_store("hangs", ServedRun("runs/b on two"), max_restarts=0, limit_s=0.3)
        with pytest.raises(
            DeadlineError, match=r"the weight store in Ray namespace hangs did not answer within 0\.3 s"
        ):
            await attached_run("hangs", limit_s=0.3)
    finally:
        ray.kill(store)


@pytest.mark.parametrize("hangs", ["start_store", "find_store"])
async def test_claiming_a_store_ends_in_time_and_leaves_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    hung = threading.Event()

    def start_store(*_: Any, **__: Any) -> Any:
        raise ValueError("the name is taken")

    monkeypatch.setattr(object_store, "start_store", start_store)
    monkeypatch.setattr(object_store, hangs, lambda *_, **__: hung.wait(30))
    try:
        with anyio.fail_after(10), pytest.raises(DeadlineError, match=r"(within|for) 0\.1 s \(timeouts\.start_s\)"):
            await claim_store("any", ServedRun("a"), max_restarts=0, limit_s=0.1)
    finally:
        hung.set()


async def test_claiming_a_store_asks_again_when_ray_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports its own limits as `GetTimeoutError`."""
    answers = iter([GetTimeoutError("creating"), GetTimeoutError("looking up"), GetTimeoutError("creating"), None, "a"])

    def answer(*_: Any, **__: Any) -> Any:
        result = next(answers)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(object_store, "RETRY_S", 0.01)
    monkeypatch.setattr(object_store, "start_store", answer)
    monkeypatch.setattr(object_store, "find_store", answer)
    assert await claim_store("any", ServedRun("a"), max_restarts=0, limit_s=10) == "a"
