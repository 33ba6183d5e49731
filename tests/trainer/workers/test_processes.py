"""The device of a group and the GPU of a rank. The tests of groups cover the start and end of processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.profiling import ProfilerSettings, profile
from trainer.workers import rank
from trainer.workers.placement import plan_groups
from trainer.workers.processes import Processes, RankLocation, bundle_of_ranks, local_ranks, own_gpu
from trainer.workers.rank import Rank


@pytest.mark.parametrize(
    ("assigned", "visible", "gpu"),
    [
        ([], None, 0),
        (["3"], "3", 0),
        (["3"], None, 3),
        (["3"], "1,3", 1),
        (["GPU-b"], "GPU-a,GPU-b", 1),
    ],
    ids=["on CPU", "Ray shows only this GPU", "Ray shows all GPUs", "the machine shows some GPUs", "by UUID"],
)
def test_a_rank_finds_the_gpu_that_ray_has_assigned(assigned: list[str], visible: str | None, gpu: int) -> None:
    assert own_gpu(assigned, visible) == gpu


def test_local_ranks_are_numbered_by_node_or_by_gpu() -> None:
    """On CPU they are numbered as by torchrun; on GPUs they are the number of the GPU to use."""
    places = [
        RankLocation(node, "10.0.0.1", 1, gpu) for node, gpu in [("a", 2), ("b", 0), ("a", 0), ("a", 1), ("b", 1)]
    ]
    assert local_ranks(places, "cpu") == [0, 0, 1, 2, 1]
    assert local_ranks(places, "cuda") == [2, 0, 0, 1, 1]


def test_the_ranks_of_a_node_follow_one_another() -> None:
    assert bundle_of_ranks({0: "a", 1: "b", 2: "a", 3: "b"}, 1) == [0, 2, 1, 3]
    assert bundle_of_ranks({0: "b", 1: "a"}, 3) == [0, 0, 0, 1, 1, 1]


def test_ranks_are_divided_over_the_nodes_of_their_pool() -> None:
    config = Config.model_validate({"trainer": {"num_workers": 8, "nnodes": 2, "n_gpus_per_node": 4, "cpu_threads": 2}})
    gang = plan_groups(config)[0].gang(cpus=True, gpu=True)
    assert (gang.bundles, gang.strategy) == ([{"GPU": 4.0, "CPU": 8.0}] * 2, "STRICT_SPREAD")
    anywhere = replace(plan_groups(config)[0], per_node=None, node_labels={"pool": "train"})
    gang = anywhere.gang(cpus=False, gpu=True)
    assert (gang.bundles, gang.strategy) == ([{"GPU": 1.0}] * 8, "PACK")
    assert gang.label_selectors == [{"pool": "train"}] * 8
    assert not any(anywhere.gang(cpus=False, gpu=False).bundles)


@pytest.mark.parametrize("sharing", [{"placement": "colocated", "mode": "sync"}, {"trainer": {"lend_after_s": 5}}])
def test_ranks_that_share_their_gpus_with_engines_leave_room_for_them(sharing: dict[str, Any]) -> None:
    plan = plan_groups(Config.model_validate(sharing | {"trainer": {"num_workers": 2, **sharing.get("trainer", {})}}))[
        0
    ]
    assert plan.gang(cpus=False, gpu=True).bundles == [{"GPU": 0.6}] * 2
    assert not any(plan.gang(cpus=False, gpu=False).bundles)


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [("cpu", 8, "cpu"), ("auto", 0, "cpu"), ("auto", 1, "cuda"), ("cuda", 0, "cuda"), ("cuda", 1, "cuda")],
)
def test_a_group_on_gpus_waits_for_those_that_have_yet_to_join(
    device: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, **({"GPU": num_gpus} if num_gpus else {})})
    (plan,) = plan_groups(Config.model_validate({"trainer": {"device": device, "num_workers": 2}}))
    assert Processes(plan).device == expected


async def test_a_rank_reports_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profile.configure("rank-actor-0", ProfilerSettings("summary"))
    assert await Rank().health() is not None and not profile.drain(), "this machine shows no GPU"
    monkeypatch.setattr(rank, "gpu_memory", lambda: (30, 80))
    await Rank(group="critic").health()
    (event,) = profile.drain()
    assert (event["event"], event["duration_s"]) == ("gpu.memory", 0.0)
    found = {key: event[key] for key in ("role", "rank", "used_bytes", "total_bytes")}
    assert found == {"role": "critic", "rank": 0, "used_bytes": 50, "total_bytes": 80}
