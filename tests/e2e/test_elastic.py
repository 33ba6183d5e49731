"""Replicas join and leave while they are under load."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.core.ports import Accepted, EngineCrashed, GenerationEvent, ReplicaReport, WantedReplicas
from asyncrl.core.types import FinishReason, Turn, versions_per_token
from tests.e2e.conftest import EngineProcess
from tests.e2e.launches import LaunchedRun, balanced, start, trained_once
from tests.e2e.test_vllm_serving import LONG, PROMPT, fleet_of, publish, replicas, requests
from tests.fakes.engine import finished_turns

ROLLOUT = {"autoscaling": {"enable": True, "max_replicas": 2}}
CALLERS = 4
PHASES = ("serving", "fetching", "pausing", "loading", "verifying")
STEPS = 60
SCALING = (
    "rollout.autoscaling.enable=true",
    "rollout.autoscaling.max_replicas=2",
    "rollout.autoscaling.target_trainer_wait=0.02",
    "rollout.autoscaling.up_after_s=5",
    "rollout.autoscaling.down_after_s=5",
)


class Load:
    """Callers that generate without a pause, and every turn and every replica that they got."""

    def __init__(self, fleet: Any) -> None:
        self.turns: list[Turn] = []
        self.moved = 0
        """Calls that a second replica has continued."""
        self._fleet = fleet
        self._numbers = count()

    async def call(self) -> None:
        while True:
            name, accepted = f"r{next(self._numbers)}", list[str]()

            def observe(event: GenerationEvent, accepted: list[str] = accepted) -> None:
                assert not isinstance(event, EngineCrashed), "a replica that leaves blames no request"
                if isinstance(event, Accepted):
                    accepted.append(event.replica)

            batch = [replace(one, request_id=f"{name}.{one.request_id}") for one in requests(2, LONG)]
            self.turns += await finished_turns(self._fleet.generate(batch, session=name), observe)
            self.moved += len(set(accepted)) > 1


async def until(engine: EngineProcess, holds: Callable[[list[ReplicaReport]], bool]) -> list[ReplicaReport]:
    """Wait until `holds` is true of the replicas that have reported within the last seconds, and return them."""
    while True:
        reports = await replicas(engine)
        newest = max(one.reported_at for one in reports)
        fresh = [one for one in reports if newest - one.reported_at < 5.0]
        if holds(fresh):
            return fresh
        await anyio.sleep(0.1)


def busy(reports: list[ReplicaReport]) -> list[ReplicaReport]:
    return [one for one in reports if one.phase in PHASES and one.in_flight]


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_requests_of_a_leaving_replica_go_on_elsewhere_and_a_joining_one_has_the_newest_version(
    engine: EngineProcess,
) -> None:
    fleet = fleet_of(engine, clear_kv=True)
    models = {0: replace(engine, model=copy.deepcopy(engine.model))}

    async def update() -> list[Any]:
        publication = await publish(engine)
        models[engine.version] = replace(engine, model=copy.deepcopy(engine.model))
        return await fleet.apply(publication)

    load = Load(fleet)
    async with anyio.create_task_group() as group:
        for _ in range(CALLERS):
            group.start_soon(load.call)
        (first,) = await update()
        await engine.store.want_replicas.remote(WantedReplicas(1, 2))
        both = await until(engine, lambda reports: len(busy(reports)) == 2)
        assert {one.version for one in both} == {engine.version}, "the second replica joins with the newest version"
        assert {one.replica for one in await update()} == {one.replica for one in both}

        await engine.store.want_replicas.remote(WantedReplicas(2, 1))
        (left,) = [
            one.replica
            for one in await until(engine, lambda reports: any(one.phase == "leaving" for one in reports))
            if one.phase == "leaving"
        ]
        (stayed,) = {one.replica for one in both} - {left}
        # A version that is published at this moment does not wait for the replica that leaves.
        assert stayed in {one.replica for one in await update()}
        await until(engine, lambda reports: [one.replica for one in reports] == [stayed])
        num_turns = len(load.turns)
        while len(load.turns) < num_turns + 2 * CALLERS:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        group.cancel_scope.cancel()
    assert load.moved, "the replica had requests when it left"
    assert first.replica in {left, stayed}
    for turn in load.turns:
        assert (len(turn.response_ids), turn.finish_reason) == (LONG, FinishReason.LENGTH)
        versions = versions_per_token(turn.spans, LONG)
        assert (np.diff(versions) >= 0).all()
        for version in set(versions.tolist()):
            sampled = versions == version
            expected = models[version].log_probs(PROMPT, turn)[sampled]
            np.testing.assert_allclose(turn.rollout_log_probs[sampled], expected, atol=1e-3)


def serving(run: LaunchedRun) -> list[str]:
    state = run.state()
    fresh = state["written_at"] - 5.0
    return [one["replica"] for one in state["replicas"] if one["phase"] in PHASES and one["reported_at"] > fresh]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_replicas_of_a_run_follow_its_trainer_and_its_pacing(tmp_path: Path) -> None:
    run = start(
        tmp_path, *SCALING, f"trainer.total_training_steps={STEPS}", "logging.console=plain", "data.max_val_samples=16",
        "rollout.max_concurrent_samples=8", "profiler.level=summary",
    )  # fmt: skip
    run.wait_until(lambda: len(serving(run)) == 2 if run.state().get("replicas") else False, "second replica", 400)
    assert run.state()["num_replicas"] == 2
    # While the ranks stand still, pacing stops generation.
    ranks = run.pids("rank")
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    run.wait_until(lambda: run.state()["num_replicas"] == 1 and len(serving(run)) == 1, "replica that leaves", 200)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert run.wait(500) == 0, run.output()
    summary = run.summary()
    assert (summary["status"], summary["step"]) == ("completed", STEPS)
    assert balanced(summary["samples"]) and trained_once(run)
    dropped = {reason for reason, number in summary["samples"]["dropped"].items() if number}
    assert dropped <= {"stale"}, "no sample is blamed for a planned change"
    assert summary["restarts"].get("replica", 0) == 0, "planned changes are no failures"
    decisions = [
        event["replicas"]
        for file in sorted((run.run_dir / "events").glob("*/driver.jsonl"))
        for event in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if event["event"] == "replicas.wanted"
    ]
    assert decisions[:2] == [2, 1]
