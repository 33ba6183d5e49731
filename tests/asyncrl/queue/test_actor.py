"""The queue actor, its client and the payload store on a real Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import ray
from ray.exceptions import OwnerDiedError

from asyncrl.core.failures import BugError, DeadlineError, InfraError
from asyncrl.core.ports import Lease
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import DropReason, FinishReason, Row, Sample, SampleId, SampleMeta, Span, sample_meta
from asyncrl.queue.actor import QueueActor, QueueClient, start_queue
from asyncrl.queue.operations import DropSamples, Operation, QueueOptions
from asyncrl.queue.payloads import PayloadRef, RayPayloads
from asyncrl.queue.sample_queue import QueueCaller

pytestmark = pytest.mark.asyncio

ONE_AT_A_TIME = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=1, staleness_threshold=0))
TEN = QueueOptions(prompts_per_epoch=100, pacing=Pacing(samples_per_version=10, staleness_threshold=0))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def actor(request: pytest.FixtureRequest) -> Iterator[Any]:
    handle = start_queue(getattr(request, "param", TEN))
    yield handle
    ray.kill(handle)


def make_sample(sample_id: SampleId, tokens: int = 8, version: int = 0) -> Sample:
    row = Row(
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.full(tokens, sample_id.index, dtype=np.int32),
        response_mask=np.ones(tokens, dtype=np.bool_),
        rollout_log_probs=np.zeros(tokens, dtype=np.float32),
        spans=(Span(0, version),),
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )
    return Sample(sample_id, (row, row))


async def put_and_offer(client: QueueClient, payloads: RayPayloads, sample_id: SampleId, tokens: int = 8) -> None:
    sample = make_sample(sample_id, tokens)
    await client.offer(sample_meta(sample), await payloads.put(sample))


async def test_samples_go_from_one_side_to_the_other(actor: Any) -> None:
    client, payloads = QueueClient(actor, 30), RayPayloads(30)
    ids = (await client.admit(16, timeout_s=5)).sample_ids
    assert [sample_id.index for sample_id in ids] == list(range(1, 11))
    async with anyio.create_task_group() as tasks:
        for sample_id in ids:
            tasks.start_soon(put_and_offer, client, payloads, sample_id, 5000)
    lease = await client.lease(8, trainer_version=0, timeout_s=5)
    samples = await payloads.get([queued.payload for queued in lease.samples])
    for queued, sample in zip(lease.samples, samples, strict=True):
        assert queued.meta.sample_id == sample.sample_id
        assert sample.rows[0].response_ids.tolist() == [sample.sample_id.index] * 5000
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
    assert (await client.lease(1, trainer_version=0, timeout_s=5)).ended


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


async def test_an_illegal_transition_arrives_as_it_was_raised(actor: Any) -> None:
    client = QueueClient(actor, 30)
    (good,) = (await client.admit(1, timeout_s=5)).sample_ids
    meta = SampleMeta(SampleId(0, 77), 0, 0, 1, 1, 1)

    async def offer(meta: SampleMeta) -> str:
        try:
            await client.offer(meta, None)
        except BugError as error:
            return error.message
        return "taken"

    outcomes = await asyncio.gather(offer(meta), offer(SampleMeta(good, 0, 0, 1, 1, 1)), offer(meta))
    assert outcomes[1] == "taken", "one bad offer does not spoil those that travel with it"
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
            await client.drop(first, DropReason.FAILED)  # one of the forty gets its permit
            await client.close()  # and the rest are told
    assert (await client.status()).waiting == {}


@pytest.mark.parametrize("actor", [ONE_AT_A_TIME], indirect=True)
async def test_a_cancelled_wait_leaks_no_permit(actor: Any) -> None:
    client = QueueClient(actor, 30)
    (first,) = (await client.admit(1, timeout_s=5)).sample_ids
    for _ in range(10):
        with anyio.move_on_after(0.02):
            await client.admit(1, timeout_s=30)
    assert (await client.status()).waiting == {}, "the parked calls are gone with their callers"
    # Cancelled while the grant is on its way: cancellation and permit race, whoever wins.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.admit(1, timeout_s=30))
        await anyio.sleep(0.02)
        actor.call.remote(client._caller, DropSamples(DropReason.FAILED, (first,)))
        tasks.cancel_scope.cancel()
    admission = await client.admit(1, timeout_s=5)
    assert [sample_id.index for sample_id in admission.sample_ids] == [2]
    assert (await client.status()).counts.running == 1


async def test_a_cancelled_lease_is_given_back(actor: Any) -> None:
    client, payloads = QueueClient(actor, 30), RayPayloads(30)
    ids = (await client.admit(4, timeout_s=5)).sample_ids
    taken: list[Lease] = []

    async def take() -> None:
        taken.append(await client.lease(4, trainer_version=0, timeout_s=30))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        for sample_id in ids:
            await put_and_offer(client, payloads, sample_id)
        tasks.cancel_scope.cancel()
    status = await client.status()
    # The answer may have won the race against the cancellation: then the caller has the lease, and keeps it.
    ready, leased = (0, 4) if taken else (4, 0)
    assert (status.counts.ready, status.counts.leased, status.waiting) == (ready, leased, {})


async def test_an_actor_that_does_not_answer_is_a_deadline_error() -> None:
    class Wedged:
        async def call(self, caller: QueueCaller, operation: Operation, timeout_s: float | None) -> None:
            await asyncio.Event().wait()

    handle: Any = ray.remote(Wedged).options(num_cpus=0).remote()
    with pytest.raises(DeadlineError, match=r"did not answer `ReadStatus` within 0\.5 s"):
        await QueueClient(handle, 0.5).status()
    ray.kill(handle)


async def test_a_dead_actor_is_an_infra_error() -> None:
    handle = start_queue(TEN)
    client = QueueClient(handle, 30)
    await client.status()
    ray.kill(handle)
    # Killing is asynchronous: calls may be answered until it has happened.
    with pytest.raises(InfraError, match="the sample queue is gone"):
        while True:
            await client.status()
    with pytest.raises(InfraError, match="the sample queue is gone"):
        await client.offer(SampleMeta(SampleId(0, 1), 0, 0, 1, 1, 1), None)


async def test_a_lost_payload_is_told_as_none_and_the_others_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    payloads, get = RayPayloads(20), ray.get
    first, second, third = [await payloads.put(make_sample(SampleId(0, index))) for index in (1, 2, 3)]

    # Losing one for real needs a node to die: the store keeps what somebody refers to.
    def second_is_lost(refs: list[Any], timeout: float) -> Any:
        return _raise(OwnerDiedError("00" * 28, b"", "")) if second.ref in refs else get(refs, timeout=timeout)

    monkeypatch.setattr(ray, "get", second_is_lost)
    ids = [sample and sample.sample_id.index for sample in await payloads.get([first, second, third])]
    assert ids == [1, None, 3]
    assert "lost from the object store" in caplog.text


async def test_samples_put_together_share_an_object_and_come_back_whole() -> None:
    payloads = RayPayloads(30)
    samples = [make_sample(SampleId(0, index), tokens=index) for index in range(1, 21)]
    refs = await asyncio.gather(*(payloads.put(sample) for sample in samples))
    assert len({ref.ref for ref in refs}) == 1
    order = [7, 0, 19]
    back = await payloads.get([refs[position] for position in order])
    for position, sample in zip(order, back, strict=True):
        assert sample.sample_id == samples[position].sample_id
        row, expected = sample.rows[1], samples[position].rows[1]
        np.testing.assert_array_equal(row.response_ids, expected.response_ids)
        assert row.response_ids.dtype == np.int32
        assert row.spans == expected.spans
        assert not row.response_ids.flags.writeable


async def test_a_payload_that_never_comes_is_a_deadline_error() -> None:
    class Slow:
        async def never(self) -> None:
            await asyncio.Event().wait()

    handle: Any = ray.remote(Slow).options(num_cpus=0).remote()
    with pytest.raises(DeadlineError, match="sample payloads did not arrive"):
        await RayPayloads(0.2).get([PayloadRef(handle.never.remote(), 0)])
    ray.kill(handle)


async def test_a_restored_queue_goes_on_where_it_was(actor: Any) -> None:
    client = QueueClient(actor, 30)
    ids = (await client.admit(3, timeout_s=5)).sample_ids
    await client.drop(ids[0], DropReason.OVERLONG)
    restored = start_queue(TEN, await client.mark(1), name="restored_queue")
    again = QueueClient(ray.get_actor("restored_queue"), 30)
    assert [i.index for i in (await again.admit(3, timeout_s=5)).sample_ids] == [2, 3, 4]
    ray.kill(restored)


def _raise(error: Exception) -> Any:
    raise error
