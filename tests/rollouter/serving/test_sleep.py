"""A replica whose engine sleeps while the ranks have its GPUs: the order of calls, and failures in the middle."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import InfraError
from asyncrl.core.ports import Publication, WeightsVersion
from asyncrl.weights.object_store import ServedRun, StoreGpuTurns, WeightStoreActor
from rollouter.serving.replica import server
from rollouter.serving.replica.health import ReplicaHealth
from rollouter.serving.replica.weights import WeightUpdates
from tests.fakes.one_run import LocalActor, without_ray


class Engine:
    """vLLM's engine, of which only the order of calls matters. A call in `broken` fails, one in `hung` never ends."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken, self.hung = "", ""
        self.output_processor = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0, propagate_error=lambda error: None
        )
        self.engine_core = SimpleNamespace(pause_scheduler_async=lambda **how: self._call(f"pause {how['mode']}"))

    async def sleep(self, level: int) -> None:
        await self._call(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        await self._call(f"wake {' '.join(tags)}")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.hung:
            await anyio.sleep_forever()
        if name == self.broken:
            raise RuntimeError("no memory")


class Updates(WeightUpdates):
    """Versions need no fetch, and their load is a call to the engine."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.engine = Engine()
        started: Any = SimpleNamespace(client=self.engine, gauges=None)
        health = ReplicaHealth(replica="one", node_id="", engine_s=60.0)
        health._exit = lambda: None  # type: ignore[method-assign]  # it would end this process
        super().__init__(started, health, "run", TimeoutsConfig(apply_s=limit_s))
        self.run, self.health = ServedRun(verify="off"), health

    async def _fetch(self, *args: Any) -> float:
        self.engine.calls.append("fetch")
        return 0.0

    async def _load(self, weights_version: WeightsVersion, adapter: Any) -> None:
        await self.engine._call(f"load {weights_version.version}")


def version(number: int) -> Publication:
    return Publication(number, number, 0, {})


SLEEP = ["pause wait", "sleep 1"]


async def test_an_engine_that_sleeps_gets_the_next_version_before_its_kv_cache() -> None:
    updates = Updates()
    await updates.sleep()
    assert not updates.gate.is_set() and updates.health._phase[0] == "sleeping"
    await updates.sleep()  # of another Rollouter
    report = await updates.apply(version(1), "wait", False)
    assert updates.engine.calls == [*SLEEP, "fetch", "wake weights", "load 1", "wake kv_cache", "resume"]
    assert updates.gate.is_set() and not updates.asleep and report.version == 1
    await updates.apply(version(2), "wait", False)
    assert updates.engine.calls[7:] == ["fetch", "pause wait", "load 2", "resume"], "it does not sleep any more"


async def test_engines_on_lent_gpus_abort_what_the_callers_continue_elsewhere() -> None:
    updates = Updates()
    await updates.sleep("abort")
    await updates.apply(version(3), "keep", True)
    expected = ["pause keep", "pause abort", "sleep 1", "fetch", "wake weights", "load 3", "wake kv_cache", "resume"]
    assert updates.engine.calls == expected


@pytest.mark.parametrize("wake", [WeightUpdates.wake, lambda updates: updates.apply(version(0), "wait", False)])
async def test_without_a_newer_version_it_wakes_up_with_the_old_one(wake: Callable[[Updates], Any]) -> None:
    updates = Updates()
    await updates.sleep()
    await wake(updates)
    await wake(updates)
    assert updates.engine.calls == [*SLEEP, "wake weights", "wake kv_cache"]
    assert updates.gate.is_set() and not updates.health.paused


async def test_requests_that_do_not_end_in_time_go_on() -> None:
    updates = Updates(limit_s=0.01)
    updates.engine.hung = "pause wait"
    with pytest.raises(InfraError, match="replica one still serves version 0: it does not sleep"):
        await updates.sleep()
    assert updates.engine.calls == ["pause wait", "resume"]
    assert updates.gate.is_set() and not updates.asleep and not updates.health.broken


@pytest.mark.parametrize("how", ["broken", "hung"])
@pytest.mark.parametrize("call", ["sleep 1", "wake weights", "load 1", "wake kv_cache"])
async def test_an_engine_that_fails_half_way_is_replaced(call: str, how: str) -> None:
    updates = Updates(limit_s=0.05)
    setattr(updates.engine, how, call)
    with pytest.raises(InfraError):
        await updates.sleep()
        await updates.apply(version(1), "wait", False)
    assert "replica one must be replaced" in updates.health.broken
    with pytest.raises(InfraError, match="must be replaced"):
        await updates.wake()
    assert updates.gate.is_set(), "requests that wait are refused"


@pytest.mark.parametrize("call", ["wake weights", "wake kv_cache"])
async def test_an_engine_that_does_not_wake_up_is_replaced(call: str) -> None:
    updates = Updates(limit_s=0.05)
    updates.engine.hung = call
    await updates.sleep()
    with pytest.raises(InfraError, match="waking up failed half-way"):
        await updates.wake()
    assert updates.health.broken


async def test_a_first_request_does_not_wake_an_engine_that_sleeps() -> None:
    updates, asked = Updates(), anyio.Event()

    async def start_with(*args: Any) -> None:
        asked.set()

    updates._store = SimpleNamespace(start_with=SimpleNamespace(remote=start_with))
    await updates.sleep()
    async with anyio.create_task_group() as group:
        group.start_soon(updates.join)
        await anyio.wait_all_tasks_blocked()
        assert not asked.is_set()
        await updates.wake()
    assert asked.is_set()


async def test_a_replica_that_starts_in_the_ranks_turn_waits_for_its_end() -> None:
    with without_ray({}):
        store = LocalActor(WeightStoreActor())
        trainer = StoreGpuTurns(store, call_s=5.0)
        await trainer.take()
        async with anyio.create_task_group() as group:
            waited = anyio.Event()

            async def start() -> None:
                await server.wait_for_gpus(store, 5.0)
                waited.set()

            group.start_soon(start)
            await anyio.wait_all_tasks_blocked()
            assert not waited.is_set()
            await trainer.give_back()
            await waited.wait()
