"""Versions by GPU broadcast, from the publisher to the workers, with the real weight store and both sides of vLLM's
transfer in one process (`tests.fakes.broadcast_rig`)."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from itertools import groupby
from typing import Any

import anyio
import numpy as np
import pytest
import ray
import torch

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import ApplyReport
from asyncrl.weights.object_store import ObjectStorePublisher, WeightStoreActor
from benchmarks.running import publish_tensors
from rollouter.serving.replica.broadcast import BroadcastReceiver
from tests.fakes.broadcast_rig import BroadcastRig
from tests.fakes.one_run import NAMESPACE, LocalActor, without_ray

LOAD = ["start_weight_update", "update_weights", "broadcast_failure", "finish_weight_update"]
CHECK = ["group_sizes", "group_checksums"]
FETCH = ["fetch_version", "await_fetch"]
BUCKET_BYTES = 9000


class Model(torch.nn.Module):
    """Four layers of 4 kB, which load by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1000, 1, bias=False) for _ in range(4)])

    def load_weights(self, tensors: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)


def weights(version: int) -> dict[str, np.ndarray]:
    return {f"layers.{k}.weight": np.full((1, 1000), version + k / 8, dtype=np.float32) for k in range(4)}


class Run(BroadcastRig):
    """A rig whose Trainer publishes versions."""

    publisher: ObjectStorePublisher

    async def publish(self, version: int) -> list[ApplyReport]:
        """Publish a version and let the fleet apply it. Return the reports, by replica."""
        publication = await publish_tensors(self.publisher, version, version, weights(version))
        return sorted(await self.fleet.apply(publication), key=lambda report: report.replica)

    def served(self, name: str) -> float:
        """Return the version that the replica's workers all have, completely."""
        found = set()
        for worker in self.replicas[name].engine.workers:
            layers = worker.model_runner.model.layers
            found |= {float(layer.weight[0, 0]) - k / 8 for k, layer in enumerate(layers)}
            assert all(layer.weight.unique().numel() == 1 for layer in layers)
        (version,) = found
        return version

    def of(self, name: str) -> list[str]:
        """Return the calls to the replica's engine, with repeated ones once: a fetch is awaited in slices."""
        return [method for method, _ in groupby(method for replica, method in self.calls if replica == name)]


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    actors: dict[str, Any] = {}
    with without_ray(actors):
        store = actors["store"] = LocalActor(WeightStoreActor())
        rig = Run(monkeypatch, store, NAMESPACE, Model, apply_s=120.0, probe_s=30.0, call_s=60.0)
        rig.publisher = ObjectStorePublisher(store, call_s=60, backend="nccl", bucket_bytes=BUCKET_BYTES)
        rig.add("a")
        rig.add("b", num_workers=2)
        yield rig
        rig.nccl.release()
        assert await store.next_round.remote(99, 0.0) is None, "a newer Trainer ends rank 0's thread"
        for thread in threading.enumerate():
            if thread.name == "broadcast":
                await anyio.to_thread.run_sync(thread.join, 60)
                assert not thread.is_alive()


async def test_vllms_calls_reach_every_engine_in_order(run: Run) -> None:
    reports = await run.publish(1)
    assert [(report.version, report.fallback, report.verified) for report in reports] == [(1, "", True)] * 2
    assert (run.served("a"), run.served("b")) == (1.0, 1.0)
    for name in ("a", "b"):
        # The engine resumes once it has the version, and is verified while it decodes.
        assert run.of(name) == ["pause", "init_weight_transfer_engine", *LOAD, "resume", *CHECK]
        assert run.replicas[name].engine.version == "1"
    # A bucket ends with the tensor that exceeds its size, on both sides.
    assert run.nccl.sizes == [3 * 4000, 4000]
    (port,) = run.nccl.groups
    assert sorted(run.nccl.groups[port].joined) == [0, 1, 2, 3], "rank 0, one worker, two workers"
    joined, received = run.replicas["b"].engine.infos
    assert joined["broadcast"] == {
        "master_address": ray.util.get_node_ip_address(),
        "master_port": port,
        "rank_offset": 2,
        "world_size": 4,
        "packed": True,
        "packed_buffer_size_bytes": BUCKET_BYTES,
        "packed_num_buffers": 2,
    }
    assert received["broadcast"] == {
        "names": [f"layers.{k}.weight" for k in range(4)],
        "dtype_names": ["float32"] * 4,
        "shapes": [[1, 1000]] * 4,
    }
    assert 0 < received["limit_s"] <= joined["limit_s"] <= 60.0


async def test_the_group_is_kept_for_the_same_members_and_formed_anew_for_others(run: Run) -> None:
    await run.publish(1)
    with run.watched():
        await run.publish(2)
        assert run.of("a") == ["pause", *LOAD, "resume", *CHECK]
    run.add("c")
    run.replicas["c"].weights._health.weights_version = run.replicas["a"].weights._health.weights_version
    with run.watched():
        reports = await run.publish(3)
        assert {report.fallback for report in reports} == {""}
        assert run.of("a") == ["pause", "init_weight_transfer_engine", *LOAD, "resume", *CHECK]
    del run.replicas["b"]
    await run.publish(4)
    assert [group.world_size for group in run.nccl.groups.values()] == [4, 5, 3]
    old, older, current = run.nccl.groups.values()
    assert all(one.disabled for group in (old, older) for one in group.joined.values() if one.rank < 2)
    assert not any(one.disabled for one in current.joined.values())
    assert (run.served("a"), run.served("c")) == (4.0, 4.0)


async def test_a_replica_that_dies_before_the_round_costs_no_pause(run: Run) -> None:
    await run.publish(1)
    run.dead.add("b")
    run.fleet._timeouts = run.config.timeouts.model_copy(update={"probe_s": 3.0})
    with run.watched():
        (report,) = await run.publish(2)
        assert run.of("a") == [*FETCH, "pause", *LOAD[:2], LOAD[3], "resume", *CHECK]
    assert str(report.fallback).endswith("b did not take part within 3 s")
    assert run.served("a") == 2.0
    run.fleet._timeouts = run.config.timeouts
    (report,) = await run.publish(3)
    assert (report.fallback, run.served("a")) == ("", 3.0), "the next version is broadcast to those who are left"


async def test_a_replica_that_is_leaving_is_no_member_and_does_not_prevent_the_round(run: Run) -> None:
    run.leaving.add("b")
    (report,) = await run.publish(1)
    assert (report.fallback, run.served("a")) == ("", 1.0)


async def test_a_replica_that_cannot_pause_lets_the_others_continue_at_once(run: Run) -> None:
    engine = run.replicas["b"].engine
    pause = engine.engine_core.pause_scheduler_async

    async def fail(**options: Any) -> None:
        engine.engine_core.pause_scheduler_async = pause
        raise RuntimeError("no pause")

    engine.engine_core.pause_scheduler_async = fail
    reports = await run.publish(1)
    assert [str(report.fallback) for report in reports] == [
        "replica b: RuntimeError: no pause",
        "the version was applied once more",
    ]
    assert (run.served("a"), run.served("b")) == (1.0, 1.0)


async def test_an_update_that_is_cancelled_ends_the_round_for_the_others(run: Run) -> None:
    """`b` waits for the others, who take part only after that."""
    version = (await publish_tensors(run.publisher, 1, 1, weights(1))).weights_version
    members = [run.replicas[name].weights.member() for name in ("a", "b")]
    store = run.publisher._store
    assert await store.open_round.remote(version, members, 0, 60.0, 60.0) == ""
    receiver = BroadcastReceiver(run.replicas["b"].engine, store, "b", version)  # type: ignore[arg-type]
    asked, ask = anyio.Event(), receiver._ask

    async def observed(*args: Any) -> Any:
        asked.set()
        return await ask(*args)

    receiver._ask = observed  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(receiver.join, 60.0)
        await asked.wait()
        group.cancel_scope.cancel()
    with pytest.raises(InfraError, match=r"replica b: CancelledError"):
        await store.join_round.remote(version, "a")
    assert {report.fallback for report in await run.publish(2)} == {""}


async def test_a_broadcast_that_does_not_end_is_aborted_and_the_version_comes_from_the_store(run: Run) -> None:
    await run.publish(1)
    run.nccl.deaf = {3}
    with run.watched():
        first, second = await run.publish(2)
        # In the same update, without another start. vLLM finishes it once.
        assert run.of("b") == ["pause", *LOAD[:3], *FETCH, "update_weights", "finish_weight_update", "resume", *CHECK]
    assert first.fallback in ("", second.fallback), "it has the version or, if that came late, the same problem"
    assert re.fullmatch(r"replica b: it was not received within \d+ s", str(second.fallback))
    assert (run.served("a"), run.served("b")) == (2.0, 2.0)
    run.nccl.deaf = set()
    with run.watched():
        reports = await run.publish(3)
        assert run.of("b") == [*FETCH, "pause", *LOAD[:2], LOAD[3], "resume", *CHECK]
    status = await run.publisher._store.status.remote()
    assert [report.fallback for report in reports] == [status.fallback] * 2 == [second.fallback] * 2
    assert run.served("b") == 3.0


@pytest.mark.parametrize("absent", [2, 0])
async def test_a_group_that_is_not_complete_in_time_is_given_up(run: Run, absent: int) -> None:
    """Rank 0 also gives up at the deadline if its own forming of the group does not end."""
    run.nccl.absent = {absent}
    with run.watched():
        reports = await run.publish(1)
        calls = [call for call in run.of("a") if call != "init_weight_transfer_engine"]  # not made if b failed first
        assert calls == ["pause", *FETCH, *LOAD[:2], LOAD[3], "resume", *CHECK]
    assert all("the process group for broadcasts was not complete" in str(report.fallback) for report in reports)
    assert (run.served("a"), run.served("b")) == (1.0, 1.0)


async def test_engines_without_nccl_say_so_and_load_from_the_store(run: Run) -> None:
    run.nccl.is_disabled = lambda rank: rank == 1
    first, second = await run.publish(1)
    problem = "replica a: RuntimeError: vLLM cannot load the NCCL library (VLLM_NCCL_SO_PATH, VLLM_DISABLE_PYNCCL)"
    assert first.fallback == second.fallback == problem
    assert (run.served("a"), run.served("b")) == (1.0, 1.0)


async def test_a_failure_of_rank_zero_is_reported(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.nccl.is_disabled = lambda rank: rank == 0
    reports = await run.publish(1)
    problem = "rank 0 of the Trainer: InfraError: vLLM cannot load the NCCL library"
    assert all(str(report.fallback).startswith(problem) for report in reports)
    logged = "version 1 went through the object store instead of a GPU broadcast on 2 of 2 replicas"
    assert f"{logged}: {problem}" in caplog.text
    assert (run.served("a"), run.served("b")) == (1.0, 1.0)
