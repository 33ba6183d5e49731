"""The queue actor, its client and the payload stores on a real Ray cluster, including kills of the actor."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import ray
from ray.exceptions import OwnerDiedError

from asyncrl.core.failures import BugError, DeadlineError, DiskFullError, FencedError, InfraError
from asyncrl.core.ports import Lease
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import DropReason, SampleId, SampleMeta, sample_meta
from asyncrl.queue.actor import QueueActor, QueueClient, start_queue
from asyncrl.queue.core import Operation, ParkingOperation, QueueOptions
from asyncrl.queue.journal_reader import read_counts, read_head, read_operations, read_samples
from asyncrl.queue.operations import AdmitSamples, AwaitSurplus, CommitSamples, DropSamples, LeaseSamples
from asyncrl.queue.payloads import FilePayloads, PayloadRef, RayPayloads
from asyncrl.queue.sample_queue import QueueCaller
from asyncrl.queue.turn_log import FileTurns
from asyncrl.storage.sample_bytes import FileRef
from asyncrl.storage.segments import segment_sizes
from tests.fakes.queues import meta
from tests.fakes.samples import assert_same_sample, make_sample, make_turn

ONE_AT_A_TIME = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=1, staleness_threshold=0))
TEN = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=10, staleness_threshold=0))
BATCH = 16
OPTIONS = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=BATCH, staleness_threshold=1))
TOTAL = 640


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Ray notices deaths at once instead of once a second.
    fast = {"timeout_ms_task_wait_for_death_info": 100, "core_worker_internal_heartbeat_ms": 100}
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False, _system_config=fast
    )
    yield
    ray.shutdown()


@pytest.fixture
def actor(request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = start_queue(getattr(request, "param", TEN))
    yield handle
    ray.kill(handle)


@pytest.fixture
async def journaled(tmp_path: Path) -> AsyncIterator[Any]:
    """An actor with a journal in `tmp_path`, which Ray restarts."""
    handle = start_queue(OPTIONS, run_dir=tmp_path, identity={"seed": 0}, max_restarts=-1)
    yield handle
    ray.kill(handle)


async def put_and_offer(
    client: QueueClient, payloads: RayPayloads | FilePayloads, sample_id: SampleId, tokens: int = 8
) -> Any:
    sample = make_sample(sample_id.index, tokens)
    ref = await payloads.put(sample)
    await client.offer(sample_meta(sample), ref)
    return ref


async def kill(client: QueueClient) -> int:
    pid = (await client.status()).pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_samples_go_from_generation_to_training(actor: Any) -> None:
    client, payloads = QueueClient(actor, 30), RayPayloads(30)
    ids = (await client.admit(16, timeout_s=5)).sample_ids
    assert [sample_id.index for sample_id in ids] == list(range(1, 11))
    async with anyio.create_task_group() as tasks:
        for sample_id in ids:
            tasks.start_soon(put_and_offer, client, payloads, sample_id, 5000)
    lease = await client.lease(8, trainer_version=2, timeout_s=5)
    samples = await payloads.get([queued.payload for queued in lease.samples])
    for queued, sample in zip(lease.samples, samples, strict=True):
        assert_same_sample(sample, make_sample(queued.meta.sample_id.index, tokens=5000))
    await client.commit(lease.lease_id, [queued.meta.sample_id for queued in lease.samples[:6]])
    await client.release(lease.lease_id)
    await client.drop(lease.samples[7].meta.sample_id, DropReason.FILTERED)
    status = await client.status()
    counts = status.counts
    assert (counts.fed, counts.ready, counts.trained, counts.dropped["filtered"]) == (10, 3, 6, 1)
    assert status.health is not None and status.health.rss_bytes > 1 << 20 and status.health.lag_s is not None
    assert len((await client.mark(1)).outstanding) == 3
    await client.close()
    assert (await client.admit(1, timeout_s=5)).closed
    assert (await client.lease(1, trainer_version=2, timeout_s=5)).ended


async def test_the_actor_holds_references_not_payloads() -> None:
    class Spy(QueueActor):
        async def kinds(self) -> list[str]:
            return [type(entry.payload.ref).__name__ for entry in self._queue.state.entries.values()]

    handle: Any = ray.remote(Spy).options(num_cpus=0).remote(TEN)
    client, payloads = QueueClient(handle, 30), RayPayloads(30)
    (sample_id,) = (await client.admit(1, timeout_s=5)).sample_ids
    await put_and_offer(client, payloads, sample_id)
    assert await handle.kinds.remote() == ["ObjectRef"]
    ray.kill(handle)


async def test_an_illegal_transition_raises_its_bug_error_at_the_caller(actor: Any) -> None:
    client = QueueClient(actor, 30)
    (good,) = (await client.admit(1, timeout_s=5)).sample_ids
    unknown = meta(SampleId(0, 77))

    async def offer(offered: SampleMeta) -> str:
        try:
            await client.offer(offered, None)
        except BugError as error:
            return error.message
        return "accepted"

    outcomes = await asyncio.gather(offer(unknown), offer(meta(good)), offer(unknown))
    assert outcomes[1] == "accepted", "the other offers of the call are accepted"
    assert outcomes[0] == outcomes[2] == "illegal transition: offer of sample_0_77, which is never fed"
    with pytest.raises(BugError, match="lease 5 was never granted") as caught:
        await client.release(5)
    assert type(caught.value) is BugError


@pytest.mark.parametrize("actor", [ONE_AT_A_TIME], indirect=True)
async def test_parked_calls_do_not_block_the_others(actor: Any) -> None:
    client = QueueClient(actor, 30)
    (first,) = (await client.admit(1, timeout_s=5)).sample_ids
    async with anyio.create_task_group() as tasks:
        for _ in range(40):
            tasks.start_soon(lambda: client.admit(1, timeout_s=30))
        tasks.start_soon(lambda: client.lease(2, trainer_version=0, timeout_s=30))
        with anyio.fail_after(20):
            while (await client.status()).waiting != {"permit": 40, "samples": 1}:
                pass
            await client.drop(first, DropReason.FAILED)  # one of the forty callers gets its permit
            await client.close()  # the others get an empty answer
    assert (await client.status()).waiting == {}


@pytest.mark.parametrize("actor", [ONE_AT_A_TIME], indirect=True)
async def test_a_cancelled_wait_leaks_no_permit(actor: Any) -> None:
    client = QueueClient(actor, 30)
    (first,) = (await client.admit(1, timeout_s=5)).sample_ids
    for _ in range(10):
        with anyio.move_on_after(0.02):
            await client.admit(1, timeout_s=30)
    assert (await client.status()).waiting == {}, "the queue drops the parked calls of cancelled callers"
    # Here a permit races with the cancellation.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.admit(1, timeout_s=30))
        await anyio.sleep(0.02)
        actor.call.remote(client._caller, DropSamples(DropReason.FAILED, (first,)))
        tasks.cancel_scope.cancel()
    admission = await client.admit(1, timeout_s=5)
    assert [sample_id.index for sample_id in admission.sample_ids] == [2]
    assert (await client.status()).counts.running == 1


@pytest.mark.parametrize("kind", [AdmitSamples, LeaseSamples, AwaitSurplus])
async def test_an_abandoned_call_is_answered_as_if_its_time_were_up(kind: type[ParkingOperation]) -> None:
    queue, caller = QueueActor(TEN), QueueCaller("driver", 0)
    await queue.call(caller, AdmitSamples(10, request_id="all permits"), 1.0)
    arguments = {AdmitSamples: (1,), LeaseSamples: (1, 0), AwaitSurplus: (False,)}[kind]
    operation = kind(*arguments, request_id="abandoned")
    answers: list[Any] = []

    async def call() -> None:
        answers.append(await queue.call(caller, operation, 1000.0))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            assert answers == []
            await queue.abandon("abandoned")
    assert answers == [operation.timed_out()]


async def test_a_cancelled_lease_is_given_back(actor: Any) -> None:
    client, payloads = QueueClient(actor, 30), RayPayloads(30)
    ids = (await client.admit(4, timeout_s=5)).sample_ids
    leases: list[Lease] = []

    async def take() -> None:
        leases.append(await client.lease(4, trainer_version=2, timeout_s=30))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for sample_id in ids:
            await put_and_offer(client, payloads, sample_id)
        tasks.cancel_scope.cancel()
    status = await client.status()
    # If the answer wins the race against the cancellation, the caller has the lease and keeps it.
    ready, leased = (0, 4) if leases else (4, 0)
    assert (status.counts.ready, status.counts.leased, status.waiting) == (ready, leased, {})


async def test_an_actor_that_does_not_answer_is_a_deadline_error() -> None:
    class Wedged:
        async def call(self, caller: QueueCaller, operation: Operation, timeout_s: float | None) -> None:
            await asyncio.Event().wait()

    handle: Any = ray.remote(Wedged).options(num_cpus=0).remote()
    with pytest.raises(DeadlineError, match=r"did not answer `ReadStatus` within 0\.5 s"):
        await QueueClient(handle, 0.5).status()
    ray.kill(handle)


async def test_a_lost_payload_is_none_and_the_others_are_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    payloads, get = RayPayloads(20), ray.get
    first, second, third = [await payloads.put(make_sample(index)) for index in (1, 2, 3)]

    # Ray's store keeps every referenced object, so a real loss would need the death of a node.
    def second_is_lost(refs: list[Any], timeout: float) -> Any:
        if second.ref in refs:
            raise OwnerDiedError("00" * 28, b"", "")
        return get(refs, timeout=timeout)

    monkeypatch.setattr(ray, "get", second_is_lost)
    ids = [sample and sample.sample_id.index for sample in await payloads.get([first, second, third])]
    assert ids == [1, None, 3]
    assert "lost from the object store" in caplog.text


async def test_samples_put_together_share_an_object() -> None:
    payloads = RayPayloads(30)
    samples = [make_sample(index, tokens=index) for index in range(1, 21)]
    refs = await asyncio.gather(*(payloads.put(sample) for sample in samples))
    assert len({ref.ref for ref in refs}) == 1
    order = [7, 0, 19]
    back = await payloads.get([refs[position] for position in order])
    for position, sample in zip(order, back, strict=True):
        assert_same_sample(sample, samples[position])
        assert sample is not None and not sample.rows[1].response_ids.flags.writeable


async def test_a_payload_that_does_not_arrive_is_a_deadline_error() -> None:
    class Slow:
        async def never(self) -> None:
            await asyncio.Event().wait()

    handle: Any = ray.remote(Slow).options(num_cpus=0).remote()
    with pytest.raises(DeadlineError, match="sample payloads did not arrive"):
        await RayPayloads(0.2).get([PayloadRef(handle.never.remote(), 0)])
    ray.kill(handle)


# ------------------------------------------------------------------------------------------------ kills of the actor


async def test_both_sides_continue_over_kills_at_random_moments(journaled: Any, tmp_path: Path) -> None:
    rng = random.Random(7)
    driver = QueueClient(journaled, 60)
    producer = QueueClient(journaled, 60, part="rollouter", incarnation=1)
    consumer = QueueClient(journaled, 60, part="trainer", incarnation=1)
    trained: list[SampleId] = []
    all_trained = anyio.Event()

    async def finish(number: int, sample_id: SampleId) -> None:
        await anyio.sleep(rng.random() * 0.02)
        if sample_id.index % 10 == 0:
            await producer.drop(sample_id, DropReason.FAILED)
        else:
            await producer.offer(meta(sample_id), FileRef("1-1.safetensors", number))

    async def produce() -> None:
        async with anyio.create_task_group() as tasks:
            while not (admission := await producer.admit(8, timeout_s=5)).closed:
                for sample_id in admission.sample_ids:
                    tasks.start_soon(finish, sample_id.index, sample_id)

    async def consume() -> None:
        version = 0
        while len(trained) < TOTAL:
            lease = await consumer.lease(BATCH, trainer_version=version, timeout_s=5)
            ids = [queued.meta.sample_id for queued in lease.samples]
            assert [queued.payload.position for queued in lease.samples] == [i.index for i in ids]
            if not ids:
                continue
            await consumer.commit(lease.lease_id, ids)
            trained.extend(ids)
            version += 1
            await producer.set_applied_version(version)
            if version % 5 == 0:
                await consumer.mark(version)
                await consumer.cover(version, version)
        all_trained.set()
        await consumer.close()

    async def kill_twice() -> None:
        for _ in range(2):
            await anyio.sleep(0.05 + rng.random() * 0.2)
            assert not all_trained.is_set()
            await kill(driver)

    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce)
            tasks.start_soon(consume)
            tasks.start_soon(kill_twice)
    status = await driver.status()
    counts = status.counts
    assert len(trained) == len(set(trained)) == counts.trained
    assert counts.fed == counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
    assert (counts.running, counts.leased) == (0, 0)
    records = list(await anyio.to_thread.run_sync(lambda: list(read_samples(tmp_path))))
    assert {record.sample_id for record in records if record.state == "trained"} == set(trained)
    operations = await anyio.to_thread.run_sync(lambda: [operation for _, operation in read_operations(tmp_path)])
    committed = [one for each in operations if isinstance(each, CommitSamples) for one in each.sample_ids]
    assert sorted(committed) == sorted(trained)
    assert (await anyio.to_thread.run_sync(read_counts, tmp_path)).samples == counts
    assert status.notices == ()


async def test_a_killed_queue_restores_its_whole_state(journaled: Any, tmp_path: Path) -> None:
    rollouter = QueueClient(journaled, 60, part="rollouter", incarnation=2)
    trainer = QueueClient(journaled, 60, part="trainer", incarnation=1)
    await rollouter.attach("rollouter", 2)
    ids = (await rollouter.admit(6, timeout_s=5)).sample_ids
    for sample_id in reversed(ids[1:]):
        await rollouter.offer(meta(sample_id), FileRef("2-1.safetensors", sample_id.index))
    lease = await trainer.lease(3, trainer_version=0, timeout_s=5)
    await trainer.commit(lease.lease_id, [lease.samples[0].meta.sample_id])
    await rollouter.set_applied_version(1)
    caller, request = rollouter._caller, AdmitSamples(3, request_id="the answer is lost")
    admission = await journaled.call.remote(caller, request, 5.0)
    before = await trainer.status()
    pid = await kill(trainer)
    after = await trainer.status()
    assert after.pid != pid
    assert (after.counts, after.version, after.journal_seq, after.payload_bytes) == (
        before.counts, 1, before.journal_seq, 500,
    )  # fmt: skip
    assert await journaled.call.remote(caller._replace(retried=True), request, 5.0) == admission
    await trainer.release(lease.lease_id)
    again = await trainer.lease(4, trainer_version=1, timeout_s=5)
    assert [queued.meta.sample_id.index for queued in again.samples] == [5, 4, 3, 2], "completion order"
    assert again.samples[0].payload == FileRef("2-1.safetensors", 5)
    assert again.lease_id == lease.lease_id + 1
    with pytest.raises(FencedError, match="incarnation 1 of the rollouter was replaced by incarnation 2"):
        await QueueClient(journaled, 60, part="rollouter", incarnation=1).admit(1, timeout_s=0)
    head = await anyio.to_thread.run_sync(read_head, tmp_path)
    assert head is not None
    assert (head.incarnations, head.identity, head.num_prompts, head.damage) == ({"rollouter": 2}, {"seed": 0}, 100, "")


async def test_a_call_cancelled_during_a_kill_takes_no_permit(journaled: Any) -> None:
    client = QueueClient(journaled, 60)
    await client.admit(32, timeout_s=5)  # these are all permits
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.admit(1, timeout_s=30))
        while (await client.status()).waiting != {"permit": 1}:
            pass
        await kill(client)
        tasks.cancel_scope.cancel()
    status = await client.status()
    assert (status.counts.running, status.waiting) == (32, {})


async def test_payload_files_are_deleted_once_a_checkpoint_covers_their_samples(journaled: Any, tmp_path: Path) -> None:
    client, payloads = QueueClient(journaled, 60), FilePayloads(tmp_path, 1)
    ids = (await client.admit(3, timeout_s=5)).sample_ids
    files = [(await put_and_offer(client, payloads, sample_id)).file for sample_id in ids]
    assert len(set(files)) == 3
    first = await client.lease(2, trainer_version=2, timeout_s=5)
    await client.commit(first.lease_id, [first.samples[0].meta.sample_id])
    await client.mark(1)
    await client.commit(first.lease_id, [first.samples[1].meta.sample_id])
    await client.cover(1, 1)
    assert set(segment_sizes(tmp_path)) == set(files[1:]), "the second sample was trained after the mark"
    orphan = await payloads.put(make_sample(9))
    await client.attach("rollouter", 2)
    assert set(segment_sizes(tmp_path)) == set(files[1:]), "an orphan of the old Rollouter is deleted"
    assert orphan.file not in files
    await client.mark(2)
    await client.cover(2, 1)
    assert set(segment_sizes(tmp_path)) == {files[2]}


async def test_turns_of_a_dead_rollouter_are_kept_for_unfinished_samples(journaled: Any, tmp_path: Path) -> None:
    client, turns = QueueClient(journaled, 60), FileTurns(tmp_path, 1)
    ready, dropped, running = ids = (await client.admit(3, timeout_s=5)).sample_ids
    for sample_id in ids:
        await turns.record(sample_id, {"0": make_turn(1)})
    await client.offer(meta(ready), FileRef("1-1.safetensors", 0))
    await client.drop(dropped, DropReason.FAILED)
    await client.close()  # a resumed run attaches its Rollouter while the queue is closed
    await client.attach("rollouter", 2)
    again = FileTurns(tmp_path, 2)
    assert [set(await again.completed(sample_id)) for sample_id in ids] == [set(), set(), {"0"}]
    await again.forget(running)
    assert not list((tmp_path / "samples").glob("turns-*"))


async def test_a_dead_queue_without_a_journal_is_an_infra_error() -> None:
    client = QueueClient(start_queue(OPTIONS, max_restarts=3), 60)
    await client.status()
    with anyio.fail_after(20):
        with pytest.raises(InfraError, match="gone for good") as caught:
            await kill(client)
            while True:
                await client.status()
    assert not isinstance(caught.value, DeadlineError)
    with pytest.raises(InfraError, match="gone for good"):
        await client.offer(meta(SampleId(0, 1)), None)


async def test_a_journal_lost_during_the_run_is_an_infra_error(journaled: Any, tmp_path: Path) -> None:
    client = QueueClient(journaled, 60)
    await client.admit(2, timeout_s=5)
    for path in list(tmp_path.glob("journal.db*")):  # noqa: ASYNC240
        path.unlink()
    await kill(client)
    with pytest.raises(InfraError, match=r"journal\.db is gone"):
        await client.admit(2, timeout_s=5)
    assert not (tmp_path / "journal.db").exists()


async def test_a_full_disk_fails_every_call(tmp_path: Path) -> None:
    class Small(QueueActor):
        async def fill(self) -> None:
            connection = self._queue._core.log._connection  # type: ignore[union-attr]
            [pages] = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages}")

    handle: Any = ray.remote(Small).options(num_cpus=0, max_concurrency=100).remote(OPTIONS, None, tmp_path, {})
    client = QueueClient(handle, 30)
    await handle.fill.remote()
    with pytest.raises(DiskFullError, match=r"the disk is full: cannot write .*journal\.db"):
        while True:
            for sample_id in (await client.admit(8, timeout_s=0)).sample_ids:
                await client.drop(sample_id, DropReason.FAILED)
    with pytest.raises(DiskFullError):
        await client.status()
    ray.kill(handle)
