"""The queue actor killed for real: it comes back from its journal, and the parts that live on notice nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import ray

from asyncrl.core.failures import DeadlineError, DiskFullError, FencedError, InfraError
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import DropReason, FinishReason, Row, Sample, SampleId, SampleMeta, Span, sample_meta
from asyncrl.queue.actor import QueueActor, QueueClient, start_queue
from asyncrl.queue.journal_reader import read_head, read_sample_counts, read_samples
from asyncrl.queue.operations import AdmitSamples, QueueOptions
from asyncrl.queue.payloads import FilePayloads
from asyncrl.queue.turn_log import FileTurns
from asyncrl.storage.sample_bytes import FileRef
from asyncrl.storage.segments import segment_sizes
from tests.fakes.samples import make_turn

pytestmark = pytest.mark.asyncio

OPTIONS = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=16, staleness_threshold=1))
TOTAL = 640
BATCH = 16


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Deaths are noticed at once, instead of once a second.
    fast = {"timeout_ms_task_wait_for_death_info": 100, "core_worker_internal_heartbeat_ms": 100}
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False, _system_config=fast
    )
    yield
    ray.shutdown()


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[Any]:
    handle = start_queue(OPTIONS, run_dir=tmp_path, identity={"seed": 0}, max_restarts=-1)
    yield handle
    ray.kill(handle)


def meta(sample_id: SampleId) -> SampleMeta:
    return SampleMeta(sample_id, 0, 0, 1, 1, 100)


async def kill(client: QueueClient) -> int:
    pid = (await client.status()).pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def test_both_sides_go_on_over_kills_at_random_moments(actor: Any, tmp_path: Path) -> None:
    rng = random.Random(7)
    driver = QueueClient(actor, 60)
    producer = QueueClient(actor, 60, part="rollouter", incarnation=1)
    consumer = QueueClient(actor, 60, part="trainer", incarnation=1)
    trained: list[SampleId] = []
    enough = anyio.Event()

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
                await consumer.covered(version)
        enough.set()
        await consumer.close()

    async def kill_now_and_then() -> None:
        for _ in range(2):
            await anyio.sleep(0.05 + rng.random() * 0.2)
            assert not enough.is_set()
            await kill(driver)

    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce)
            tasks.start_soon(consume)
            tasks.start_soon(kill_now_and_then)
    status = await driver.status()
    counts = status.counts
    assert len(trained) == len(set(trained)) == counts.trained
    assert counts.fed == counts.running + counts.ready + counts.leased + counts.trained + counts.num_dropped
    assert (counts.running, counts.leased) == (0, 0)
    records = list(await anyio.to_thread.run_sync(lambda: list(read_samples(tmp_path))))
    assert {record.sample_id for record in records if record.state == "trained"} == set(trained)
    assert all(record.num_commits == (record.state == "trained") for record in records)
    assert await anyio.to_thread.run_sync(read_sample_counts, tmp_path) == counts
    assert status.notices == ()


async def test_a_killed_queue_remembers_everything(actor: Any, tmp_path: Path) -> None:
    rollouter = QueueClient(actor, 60, part="rollouter", incarnation=2)
    trainer = QueueClient(actor, 60, part="trainer", incarnation=1)
    await rollouter.attach("rollouter", 2)
    ids = (await rollouter.admit(6, timeout_s=5)).sample_ids
    for sample_id in reversed(ids[1:]):
        await rollouter.offer(meta(sample_id), FileRef("2-1.safetensors", sample_id.index))
    lease = await trainer.lease(3, trainer_version=0, timeout_s=5)
    await trainer.commit(lease.lease_id, [lease.samples[0].meta.sample_id])
    await rollouter.set_applied_version(1)
    caller, request = rollouter._caller, AdmitSamples(3, "carried out, and its answer lost")
    admission = await actor.call.remote(caller, request, 5.0)
    before = await trainer.status()
    pid = await kill(trainer)
    after = await trainer.status()
    assert after.pid != pid
    assert (after.counts, after.version, after.journal_seq, after.payload_bytes) == (
        before.counts, 1, before.journal_seq, 500,
    )  # fmt: skip
    assert await actor.call.remote(caller._replace(retried=True), request, 5.0) == admission
    await trainer.release(lease.lease_id)
    again = await trainer.lease(4, trainer_version=1, timeout_s=5)
    assert [queued.meta.sample_id.index for queued in again.samples] == [5, 4, 3, 2], "completion order"
    assert again.samples[0].payload == FileRef("2-1.safetensors", 5)
    assert again.lease_id == lease.lease_id + 1
    with pytest.raises(FencedError, match="incarnation 1 of the rollouter was replaced by incarnation 2"):
        await QueueClient(actor, 60, part="rollouter", incarnation=1).admit(1, timeout_s=0)
    head = await anyio.to_thread.run_sync(read_head, tmp_path)
    assert head is not None
    assert (head.incarnations, head.identity, head.num_prompts, head.damage) == ({"rollouter": 2}, {"seed": 0}, 100, "")


async def test_a_cancelled_ask_takes_nothing_with_it_over_a_kill(actor: Any) -> None:
    client = QueueClient(actor, 60)
    await client.admit(32, timeout_s=5)  # all permits
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.admit(1, timeout_s=30))
        while (await client.status()).waiting != {"permit": 1}:
            pass
        await kill(client)
        tasks.cancel_scope.cancel()
    status = await client.status()
    assert (status.counts.running, status.waiting) == (32, {})


def make_sample(sample_id: SampleId) -> Sample:
    row = Row(
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.full(8, sample_id.index, dtype=np.int32),
        response_mask=np.ones(8, dtype=np.bool_),
        rollout_log_probs=np.zeros(8, dtype=np.float32),
        spans=(Span(0, 0),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )
    return Sample(sample_id, (row,))


async def test_payload_files_go_once_a_checkpoint_covers_all_in_them(actor: Any, tmp_path: Path) -> None:
    client, payloads = QueueClient(actor, 60), FilePayloads(tmp_path, 1)
    ids = (await client.admit(3, timeout_s=5)).sample_ids

    async def put(sample_id: SampleId) -> str:
        sample = make_sample(sample_id)
        ref = await payloads.put(sample)
        await client.offer(sample_meta(sample), ref)
        return ref.file

    files = [await put(sample_id) for sample_id in ids]
    assert len(set(files)) == 3
    first = await client.lease(2, trainer_version=0, timeout_s=5)
    await client.commit(first.lease_id, [first.samples[0].meta.sample_id])
    await client.mark(1)
    await client.commit(first.lease_id, [first.samples[1].meta.sample_id])
    await client.covered(1)
    assert set(segment_sizes(tmp_path)) == set(files[1:]), "the second was trained after the mark"
    orphan = await payloads.put(make_sample(SampleId(0, 9)))
    await client.attach("rollouter", 2)
    assert set(segment_sizes(tmp_path)) == set(files[1:]), "nobody will ever offer it"
    assert orphan.file not in files
    await client.mark(2)
    await client.covered(2)
    assert set(segment_sizes(tmp_path)) == {files[2]}


async def test_turns_of_a_dead_rollouter_go_unless_their_sample_is_to_be_generated(actor: Any, tmp_path: Path) -> None:
    client, turns = QueueClient(actor, 60), FileTurns(tmp_path, 1)
    ready, dropped, running = ids = (await client.admit(3, timeout_s=5)).sample_ids
    for sample_id in ids:
        await turns.record(sample_id, "0", make_turn(1))
    await client.offer(meta(ready), FileRef("1-1.safetensors", 0))
    await client.drop(dropped, DropReason.FAILED)
    await client.close()  # as a resume finds it, which opens it again behind this
    await client.attach("rollouter", 2)
    again = FileTurns(tmp_path, 2)
    assert [set(await again.completed(sample_id)) for sample_id in ids] == [set(), set(), {"0"}]
    await again.forget(running)
    assert not list((tmp_path / "samples").glob("turns-*"))


async def test_a_rewind_hands_out_again_what_was_trained_since(actor: Any) -> None:
    client = QueueClient(actor, 60)
    ids = (await client.admit(4, timeout_s=5)).sample_ids
    for sample_id in ids:
        await client.offer(meta(sample_id), FileRef("1-1.safetensors", sample_id.index))
    for step, count in ((1, 2), (2, 1)):
        lease = await client.lease(count, trainer_version=0, timeout_s=5)
        await client.commit(lease.lease_id, [queued.meta.sample_id for queued in lease.samples])
        await client.mark(step)
    await client.covered(1)
    await client.attach("trainer", 2)
    await client.rewind(1, version=0, lineage=1, total_samples=None)
    await client.rewind(1, version=0, lineage=1, total_samples=None)
    lease = await client.lease(2, trainer_version=0, timeout_s=5)
    assert [queued.meta.sample_id.index for queued in lease.samples] == [3, 4]
    status = await client.status()
    assert (status.lineage, status.counts.trained, status.counts.leased) == (1, 2, 2)
    # Back behind what is covered: those payloads are gone, so they are fed again.
    await client.rewind(0, version=0, lineage=2, total_samples=None)
    assert [i.index for i in (await client.admit(2, timeout_s=5)).sample_ids] == [1, 2]
    assert (await client.status()).counts.trained == 0


async def test_a_queue_without_a_journal_that_dies_is_gone_at_once() -> None:
    client = QueueClient(start_queue(OPTIONS, max_restarts=3), 60)
    await client.status()
    with anyio.fail_after(20):
        with pytest.raises(InfraError, match="gone for good") as caught:
            await kill(client)
            while True:
                await client.status()
    assert not isinstance(caught.value, DeadlineError)


async def test_a_journal_that_is_lost_under_a_living_run_ends_it_in_words(actor: Any, tmp_path: Path) -> None:
    client = QueueClient(actor, 60)
    await client.admit(2, timeout_s=5)
    for path in list(tmp_path.glob("journal.db*")):  # noqa: ASYNC240
        path.unlink()
    await kill(client)
    with pytest.raises(InfraError, match=r"journal\.db is gone"):
        await client.admit(2, timeout_s=5)
    assert not (tmp_path / "journal.db").exists()


async def test_a_full_disk_is_told_to_everybody(tmp_path: Path) -> None:
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
