"""Engines on GPUs that the Trainer lends: the order of the Rollouter's calls, and failures in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import BugError, InfraError, first_failure
from asyncrl.core.ports import ApplyReport, LentGpus, Publication
from asyncrl.core.waits import WaitBoard
from rollouter.lent_engines import LentEngines
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeFeed, FakeGpuTurns, until


class LentFleet(FakeFleet):
    """Replicas that can sleep. `happened` has the calls in order; those in `failures` fail first."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []
        self.failures: dict[str, list[Exception]] = {}
        self.sleeping: anyio.Event | None = None
        """If set, replicas fall asleep once it is."""

    async def sleep(self) -> None:
        self.happened.append("sleep")
        if self.sleeping is not None:
            await self.sleeping.wait()
        self._fail("sleep")

    async def wake(self) -> None:
        self.happened.append("wake")
        self._fail("wake")

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        self.happened.append(f"apply {publication.version}")
        self._fail("apply")
        return []

    def _fail(self, method: str) -> None:
        if self.failures.get(method):
            raise self.failures[method].pop(0)


class LentRig:
    """The lent engines of one Rollouter after another. The test is the Trainer, whose ranks begin."""

    def __init__(self, *, probe_s: float = 5.0, stop_s: float = 5.0) -> None:
        self.turns, self.feed, self.fleet = FakeGpuTurns(), FakeFeed(), LentFleet()
        self.turns.relay._turn = "ranks"
        self.timeouts = TimeoutsConfig(call_s=0.05, probe_s=probe_s, stop_s=stop_s)
        self.engines = self.successor()

    def successor(self) -> LentEngines:
        def use(is_open: bool) -> None:
            self.fleet.happened.append("open" if is_open else "close")

        lent = LentGpus(self.turns, self.fleet, use)
        return LentEngines(lent, self.feed, None, timeouts=self.timeouts, waits=WaitBoard())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(self.engines.run)
                yield
                group.cancel_scope.cancel()

    async def lend(self, last: str = "open") -> None:
        """Give the GPUs back, and wait until the engines have done so much."""
        await self.turns.give_back()
        await until(lambda: self.fleet.happened[-1:] == [last])


async def test_engines_get_the_newest_version_before_calls_and_none_before_they_sleep() -> None:
    rig = LentRig()
    async with rig.running():
        await rig.lend()
        await rig.turns.take()
        assert rig.fleet.happened == ["wake", "open", "close", "sleep"], "before the first version"
        rig.fleet.happened.clear()
        await rig.feed.publish(1)
        await rig.feed.publish(2)
        await anyio.wait_all_tasks_blocked()
        assert rig.fleet.happened == [], "the ranks have the GPUs"
        await rig.lend()
        await rig.turns.take()
    assert rig.fleet.happened == ["apply 2", "open", "close", "sleep"]
    assert await rig.turns.wait("ranks", timeout_s=0.0) == "ranks"


async def test_the_ranks_wait_until_every_engine_sleeps() -> None:
    rig = LentRig()
    rig.fleet.sleeping = anyio.Event()
    async with rig.running():
        await rig.lend()
        async with anyio.create_task_group() as group:
            group.start_soon(rig.turns.take)
            await until(lambda: rig.fleet.happened[-1] == "sleep")
            assert await rig.turns.wait("ranks", timeout_s=0.02) is None
            rig.fleet.sleeping.set()
    assert await rig.turns.wait("ranks", timeout_s=0.0) == "ranks"


async def test_engines_that_do_not_wake_up_are_tried_again() -> None:
    rig = LentRig(probe_s=0.01)
    rig.fleet.failures["apply"] = [InfraError("no memory"), InfraError("no memory")]
    await rig.feed.publish(1)
    async with rig.running():
        await rig.lend()
        await rig.turns.take()
    assert rig.fleet.happened == ["apply 1", "apply 1", "apply 1", "open", "close", "sleep"]


async def test_engines_that_do_not_wake_up_do_not_keep_the_gpus_from_the_ranks() -> None:
    rig = LentRig()
    rig.fleet.failures["apply"] = [InfraError("no memory")]
    await rig.feed.publish(1)
    async with rig.running():
        await rig.lend("apply 1")
        await rig.turns.take()
    assert rig.fleet.happened == ["apply 1", "sleep"]


async def test_wrong_weights_of_an_engine_end_the_run() -> None:
    rig = LentRig()
    rig.fleet.failures["apply"] = [BugError("checksums differ")]
    await rig.feed.publish(1)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with rig.running():
            await rig.lend("apply 1")
            await anyio.sleep_forever()
    assert isinstance(first_failure(caught.value), BugError)


async def test_the_successor_of_a_rollouter_lets_engines_sleep_that_do_not() -> None:
    rig = LentRig()
    rig.fleet.failures["sleep"] = [InfraError("an engine does not sleep")]
    async with anyio.create_task_group() as trainer:
        with pytest.raises(BaseExceptionGroup):
            async with rig.running():
                await rig.lend()
                trainer.start_soon(rig.turns.take)
                await anyio.sleep_forever()
        assert await rig.turns.wait("wanted", timeout_s=0.0) == "wanted", "engines may have the memory of the GPUs"
        rig.engines = rig.successor()
        async with rig.running():
            assert await rig.turns.wait("ranks", timeout_s=5.0) == "ranks"
    assert rig.fleet.happened == ["wake", "open", "close", "sleep", "sleep"]


async def test_the_successor_of_a_rollouter_goes_on_with_engines_that_are_awake() -> None:
    rig = LentRig()
    async with rig.running():
        await rig.lend()
    assert rig.fleet.happened == ["wake", "open", "close"], "no process gives them calls any more"
    rig.engines = rig.successor()
    async with rig.running():
        await until(lambda: rig.fleet.happened[3:] == ["wake", "open"])


async def test_a_restarted_store_does_not_end_a_loan() -> None:
    rig = LentRig()
    async with rig.running():
        await rig.lend()
        rig.turns.relay._turn = None
        await anyio.sleep(3 * rig.timeouts.call_s)
        assert rig.fleet.happened == ["wake", "open"]
        await rig.turns.give_back()  # the Trainer reports whose turn it is
        await rig.turns.take()
    assert rig.fleet.happened == ["wake", "open", "close", "sleep"]


@pytest.mark.parametrize("was_asleep", [False, True])
async def test_a_rollouter_that_ends_leaves_the_gpus_to_the_ranks(was_asleep: bool) -> None:
    rig = LentRig()
    async with rig.running():
        await rig.lend()
        if was_asleep:
            await rig.turns.take()
    await rig.engines.leave()
    assert rig.fleet.happened == ["wake", "open", "close", "sleep"], "engines that sleep are not asked again"
    assert await rig.turns.wait("ranks", timeout_s=0.0) == "ranks"


async def test_a_rollouter_that_is_stopped_does_not_wait_for_engines_that_hang() -> None:
    rig = LentRig(stop_s=0.05)
    rig.fleet.sleeping = anyio.Event()
    async with rig.running():
        await rig.lend()
    with anyio.fail_after(5):
        await rig.engines.leave()
    assert await rig.turns.wait("ranks", timeout_s=0.0) is None, "engines may have the memory of the GPUs"
