"""The GPUs of ranks that share them with engines, on a Ray cluster with declared GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.resources.placement import ENGINE_SHARE, RANK_SHARE
from asyncrl.config.schema import Config
from trainer.workers.placement import GroupPlan, plan_groups
from trainer.workers.processes import Processes


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    yield
    ray.shutdown()


async def reserve(processes: Processes, limit_s: float = 20.0) -> None:
    await processes.reserve(cpus=False, limit_s=limit_s, until=anyio.current_time() + limit_s)


@ray.remote(num_cpus=0)
class TrainerProcess:
    """A Trainer's process that reserves resources for its ranks."""

    async def reserve(self, plan: GroupPlan) -> None:
        await reserve(Processes(plan))


async def start_engine() -> PlacementGroup:
    """Reserve what Serve reserves for the replica of an engine."""
    engine = placement_group([{"GPU": ENGINE_SHARE}], strategy="STRICT_PACK")
    with anyio.fail_after(60):
        await engine.ready()
    return engine


@ray.remote(num_cpus=0, num_gpus=RANK_SHARE)
def gpu_of_rank() -> Any:
    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["ranks", pytest.param("Trainer", marks=pytest.mark.slow)])
async def test_a_rank_and_an_engine_that_end_together_get_their_gpus_back(kind: str) -> None:
    """Serve replaces the engine while no rank runs. Ray would place it where it leaves least, on the GPU of the other
    engine, so that one GPU would have no room for a rank."""
    changes: Any = {"placement": "colocated", "mode": "sync", "trainer": {"num_workers": 2}}
    (plan,) = plan_groups(Config.model_validate(changes | {"rollout": {"num_replicas": 2}}))
    processes = Processes(plan)
    if kind == "ranks":
        await reserve(processes)
    else:
        trainer = TrainerProcess.remote()
        await trainer.reserve.remote(plan)
    engines = [await start_engine() for _ in range(2)]
    if kind == "ranks":
        await processes.kill([])
    else:
        ray.kill(trainer)
    remove_placement_group(engines[0])
    engines[0] = await start_engine()

    await reserve(processes)
    with anyio.fail_after(60):
        places = [PlacementGroupSchedulingStrategy(processes._bundles, bundle) for bundle in processes._bundle_of]
        assert sorted([await gpu_of_rank.options(scheduling_strategy=one).remote() for one in places]) == [["0"], ["1"]]
    for engine in engines:
        remove_placement_group(engine)
