"""The driver's decisions about the number of replicas, from the statuses of the parts, and their way to the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrl.core.ports import ReplicaPhase, ReplicaReport, StoreStatus, WantedReplicas
from asyncrl.core.waits import Wait
from asyncrl.driver import replica_scaling as module
from asyncrl.driver.replica_scaling import ReplicaScaling
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.storage.run_dir import RunDir
from tests.fakes.configurations import config_with


class Rig:
    """A driver whose parts report what a test sets."""

    def __init__(self, tmp_path: Path, num_replicas: int = 1) -> None:
        keys = {"enable": True, "max_replicas": 4, "up_after_s": 10.0, "down_after_s": 20.0}
        config = config_with({"rollout.autoscaling": keys, "rollout.num_replicas": num_replicas})
        recorder: Any = None
        self.status = RunStatus(config, RunDir(tmp_path), recorder)
        self.status.phase = "running"
        self.messages: list[str] = []
        self.expected: list[int] = []
        view: Any = SimpleNamespace(message=lambda level, text: self.messages.append(text))
        self.scaling = ReplicaScaling(config, self.status, view, self.expected.append)
        self.now = 0.0

    def spend(
        self, seconds: int, *, trainer: str = "train", rollouter: str = "engine", replicas: Sequence[Any]
    ) -> None:
        """Let the two sides wait on these edges; `replicas` are their numbers of requests, or their phases."""
        self.status.trainer = {"waits": [Wait(trainer, 1, 1.0)]}
        self.status.rollouter = {"waits": [Wait(rollouter, 1, 1.0)]}
        for _ in range(seconds):
            self.now += 1.0
            reports = tuple(report(number, each, self.now) for number, each in enumerate(replicas))
            self.status.store = StoreStatus(1, None, (report(99, 5, self.now - 30.0), *reports), at=self.now)
            self.scaling.decide(self.now)


def report(number: int, state: int | ReplicaPhase, at: float) -> ReplicaReport:
    phase, in_flight = ("serving", state) if isinstance(state, int) else (state, 0)
    return ReplicaReport(f"r{number}", "", number, (), phase, at, 0, 0, in_flight, 0, at)  # type: ignore[arg-type]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_replica_joins_while_the_trainer_waits_for_samples(rig: Rig) -> None:
    rig.spend(10, trainer="samples", replicas=[7])
    assert rig.expected == []
    rig.spend(1, trainer="samples", replicas=[7])
    assert rig.expected == [2]
    assert rig.messages == ["the run wants 2 replicas instead of 1: the Trainer waited for samples 100 % of the time"]
    # It starts for as long as it takes.
    rig.spend(100, trainer="samples", replicas=[7, "starting"])
    assert rig.expected == [2]


def test_replicas_leave_while_pacing_keeps_them_idle(tmp_path: Path) -> None:
    rig = Rig(tmp_path, num_replicas=3)
    rig.spend(30, rollouter="permit", replicas=[4, 0, 0])
    assert rig.expected == [2]
    assert rig.messages == ["the run wants 2 replicas instead of 3: pacing kept replicas idle 67 % of the time"]


def test_a_long_tail_is_no_reason_for_another_replica(tmp_path: Path) -> None:
    """The Trainer waits for the last sample that pacing permits, which one replica generates."""
    rig = Rig(tmp_path, num_replicas=3)
    rig.spend(3, trainer="samples", rollouter="permit", replicas=[1, 0, 0])
    rig.spend(200, replicas=[4, 4, 4])
    assert rig.expected == []


def test_time_in_which_a_part_is_replaced_does_not_count(rig: Rig) -> None:
    rig.status.restarting = {"trainer": 1.0}
    rig.spend(100, trainer="samples", replicas=[7])
    assert rig.expected == []
    rig.status.restarting = {}
    rig.spend(11, trainer="samples", replicas=[7])
    assert rig.expected == [2]


async def test_a_restarted_store_gets_the_number_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[WantedReplicas] = []

    async def answer(number: WantedReplicas) -> None:
        received.append(number)
        assert rig.status.store is not None
        rig.status.store = StoreStatus(1, None, rig.status.store.replicas, at=rig.now, wanted_replicas=number)

    async def call(name: str, answered: Any, limit_s: float, *, doing: str) -> None:
        await answered

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "TICK_S", 0.0)
    store = SimpleNamespace(want_replicas=SimpleNamespace(remote=answer))
    rig.spend(1, replicas=[7])
    with anyio.move_on_after(0.2):
        await rig.scaling.run(store)
    assert received == [(0, 1)]
    rig.spend(1, replicas=[7])
    with anyio.move_on_after(0.2):
        await rig.scaling.run(store)
    assert received == [(0, 1), (0, 1)]
    rig.spend(11, trainer="samples", replicas=[7])
    with anyio.move_on_after(0.2):
        await rig.scaling.run(store)
    assert received[-1] == (1, 2), "a decision has a higher number than the one before"
