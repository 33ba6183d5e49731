"""The plan of a run's processes on the nodes of a cluster."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.compose import changed_values, check_config, value_sources
from asyncrl.config.resources.placement import Gang, NodeResources, gangs, lacks, node_rows, place
from asyncrl.config.schema import Config

CLUSTER = ("ray.address=auto",)


def node(name: str, cpus: float, gpus: float = 0, **labels: str) -> NodeResources:
    return NodeResources(name, name, cpus, gpus, labels, is_driver=name == "head")


def configured(*overrides: str) -> Config:
    return check_config("quickstart", CLUSTER + overrides).require()


def problems(*overrides: str, address: bool = True) -> list[str]:
    found = check_config("quickstart", (CLUSTER if address else ()) + overrides).problems
    return [problem.key for problem in found if problem.severity == "error"]


def test_pools_set_the_number_of_processes_and_where_they_go() -> None:
    config = configured(
        "trainer.nnodes=2", "trainer.n_gpus_per_node=4", "trainer.node_labels={pool: train}",
        "rollout.nnodes=2", "rollout.n_gpus_per_node=8", "rollout.tensor_parallel_size=2",
        "rollout.node_labels={pool: rollout}", "trainer.strategy=fsdp2",
    )  # fmt: skip
    assert (config.trainer.num_workers, config.rollout.num_replicas) == (8, 8)
    nodes = [
        node("head", 4),
        *(node(f"t{number}", 8, 4, pool="train") for number in range(2)),
        *(node(f"r{number}", 16, 8, pool="rollout") for number in range(2)),
    ]
    placement = place(gangs(config, gpus=True), nodes)
    assert not placement.lacks and not placement.unplaced
    assert {row[0]: row[4] for row in node_rows(placement)} == {
        "head": "driver, queue, weight store, Rollouter, Trainer",
        "t0": "4 policy ranks",
        "t1": "4 policy ranks",
        "r0": "4 engine replicas",
        "r1": "4 engine replicas",
    }


def test_the_example_of_the_documentation_is_drawn_as_it_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "deploy.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^    ray:     \{address: auto\}\n(?:    .*\n)+", page, re.MULTILINE)
    (drawn,) = re.findall(r"^    node +labels.*\n((?:    gpu.*\n)+)", page, re.MULTILINE)
    file = tmp_path / "my.yaml"
    file.write_text(f"defaults: [quickstart]\n{textwrap.dedent(example)}")
    config = check_config(str(file), [f"trainer.checkpoint_dir={tmp_path}"]).require()
    nodes = [node(f"gpu{number}", 96, 8, pool="train" if number < 2 else "rollout") for number in range(8)]
    nodes[0] = replace(nodes[0], is_driver=True)
    placement = place(gangs(config, gpus=True), nodes)
    assert not placement.lacks and not placement.unplaced
    expected = [re.split(r" {2,}", re.sub(r" \(.*?\)", "  ", line.strip())) for line in drawn.splitlines()]
    assert expected == [list(row) for row in node_rows(placement)[: len(expected)]]


@pytest.mark.parametrize(
    "parallel",
    [["rollout.tensor_parallel_size=16"], ["rollout.tensor_parallel_size=8", "rollout.pipeline_parallel_size=2"]],
)
def test_a_replica_spans_nodes_only_if_the_configuration_says_so(parallel: list[str]) -> None:
    nodes = [node("head", 64), *(node(f"r{number}", 64, 8) for number in range(3))]
    on_one = configured(*parallel, "trainer.device=cpu", "rollout.device=cuda")
    (problem,) = place(gangs(on_one, gpus=True), nodes).lacks
    assert "16 GPUs" in problem.consequence and "at most 64 CPUs and 8 GPUs on each" in problem.consequence
    spanning = configured(
        *parallel, "rollout.nnodes=2", "rollout.n_gpus_per_node=8", "trainer.device=cpu", "rollout.device=cuda"
    )
    assert spanning.rollout.num_replicas == 1
    placement = place(gangs(spanning, gpus=True), nodes)
    assert not placement.lacks and not placement.unplaced
    assert sorted(found["engine worker"] for found in placement.processes.values()) == [0, 0, 8, 8]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.nnodes=2"], "rollout.nnodes"),
        (["trainer.n_gpus_per_node=8"], "trainer.n_gpus_per_node"),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=2", "trainer.num_workers=3", "trainer.strategy=ddp"],
         "trainer.num_workers"),
        (["rollout.nnodes=2", "rollout.n_gpus_per_node=8", "rollout.num_replicas=3"], "rollout.num_replicas"),
        (["rollout.nnodes=2", "rollout.n_gpus_per_node=8", "rollout.tensor_parallel_size=3"],
         "rollout.tensor_parallel_size"),
        (["rollout.nnodes=2", "rollout.n_gpus_per_node=6", "rollout.tensor_parallel_size=4",
          "rollout.pipeline_parallel_size=3", "rollout.device=cuda"], "rollout.tensor_parallel_size"),
        (["rollout.node_labels={pool: 'a b'}"], "rollout.node_labels"),
        (["trainer.node_labels={'': a}"], "trainer.node_labels"),
    ],
)  # fmt: skip
def test_pools_that_contradict_themselves_are_refused(overrides: list[str], key: str) -> None:
    assert problems(*overrides) == [key]


def test_a_private_cluster_has_one_node() -> None:
    assert problems("rollout.nnodes=2", "rollout.n_gpus_per_node=1", address=False) == ["rollout.nnodes"]
    assert problems("trainer.node_labels={pool: a}", address=False) == ["trainer.node_labels"]
    assert problems("trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.strategy=ddp", address=False) == []


def test_with_autoscaling_the_pool_sets_the_maximum_of_replicas() -> None:
    scaled = ("rollout.autoscaling.enable=true", "rollout.nnodes=2", "rollout.n_gpus_per_node=8")
    rollout = configured(*scaled, "rollout.tensor_parallel_size=4").rollout
    assert (rollout.num_replicas, rollout.autoscaling.max_replicas) == (1, 4)
    assert problems(*scaled, "rollout.autoscaling.max_replicas=3") == ["rollout.autoscaling.max_replicas"]


def test_the_source_of_a_number_of_processes_is_the_pool() -> None:
    overrides = (
        *CLUSTER,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "trainer.strategy=ddp",
        "rollout.num_replicas=3",
    )
    config = configured(*overrides[1:])
    assert changed_values(config)["trainer.num_workers"] == 8
    sources = value_sources("quickstart", overrides, config)
    assert sources["trainer.num_workers"] == "trainer.nnodes x trainer.n_gpus_per_node"
    assert sources["rollout.num_replicas"] == "command line"


def test_problems_of_room_have_the_numbers() -> None:
    config = configured("rollout.num_replicas=9")
    (problem,) = place(gangs(config, gpus=False), [node("head", 2), node("a", 4)]).lacks
    assert (problem.key, problem.value) == ("rollout.num_replicas", 9)
    assert problem.consequence == (
        "the run needs 10 CPUs (9 for the engine replicas, 1 for the policy ranks), the cluster has 6"
    )
    pools = ("trainer.node_labels={pool: train}", "rollout.node_labels={pool: rollout}", "rollout.num_replicas=4")
    nodes = [node("head", 8, pool="train"), node("a", 2, pool="rollout")]
    (problem,) = place(gangs(configured(*pools), gpus=False), nodes).lacks
    assert problem.consequence.startswith(
        "the engine replicas need 4 CPUs, each on one node, the cluster has 2 CPUs on 1 node with labels"
    )
    labelled = configured("rollout.node_labels={pool: rollout}")
    (problem,) = place(gangs(labelled, gpus=False), [node("head", 9, pool="other")]).lacks
    assert "(it has pool=other)" in problem.consequence


def test_engines_that_records_may_replace_are_not_required() -> None:
    recorded = ("skip.async_rollout.enable=true", "skip.async_rollout.steps=all")
    auto = configured(*recorded, "skip.async_rollout.engines=auto")
    assert [gang.name for gang in gangs(auto, gpus=False)] == ["policy rank"]
    always = configured(*recorded, "skip.async_rollout.engines=always")
    assert [gang.name for gang in gangs(always, gpus=False)] == ["policy rank", "engine replica"]
    assert [gang.name for gang in gangs(auto, gpus=False, trains=False)] == ["engine replica"]


@pytest.mark.parametrize(
    ("selected", "matching"),
    [("a", {"a"}), ("!a", {"b", "c", None}), ("in(a,b)", {"a", "b"}), ("!in(a,b)", {"c", None})],
)
def test_label_selectors_are_those_of_ray(selected: str, matching: set[str | None]) -> None:
    for value in ("a", "b", "c", None):
        labels = {} if value is None else {"pool": value}
        assert NodeResources("n", "n", 1, 0, labels).matches({"pool": selected}) == (value in matching)


SIZES = st.integers(0, 3).map(float)
LABELS = st.sampled_from([{}, {"pool": "a"}, {"pool": "!a"}])
NODES = st.lists(
    st.builds(lambda cpus, gpus, pool: (cpus, gpus, pool), SIZES, SIZES, st.sampled_from(["a", "b"])), max_size=3
).map(lambda found: [node(str(at), cpus, gpus, pool=pool) for at, (cpus, gpus, pool) in enumerate(found)])


@st.composite
def some_gangs(draw: Any) -> list[Gang]:
    found = []
    for number in range(draw(st.integers(1, 2))):
        strategy = draw(st.sampled_from(["STRICT_PACK", "PACK", "STRICT_SPREAD"]))
        count = 1 if strategy == "STRICT_SPREAD" else draw(st.integers(1, 2))
        bundles, cpus = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        gpus = float(draw(st.integers(0, 1)))
        found.append(Gang(f"g{number}", "rollout", count, bundles, float(cpus), gpus, strategy, draw(LABELS)))
    return found


def placements(wanted: Sequence[Gang], nodes: Sequence[NodeResources]) -> Iterator[list[tuple[Gang, tuple[int, ...]]]]:
    """Yield every way to place gangs, as the node of each bundle."""
    all_gangs = [gang for gang in wanted for _ in range(gang.count)]
    options = [list(itertools.product(range(len(nodes)), repeat=gang.num_bundles)) for gang in all_gangs]
    for choice in itertools.product(*options):
        yield list(zip(all_gangs, choice, strict=True))


def is_valid(chosen: Sequence[tuple[Gang, tuple[int, ...]]], nodes: Sequence[NodeResources]) -> bool:
    cpus: Counter[int] = Counter()
    gpus: Counter[int] = Counter()
    for gang, where in chosen:
        distinct = len(set(where))
        if gang.strategy == "STRICT_PACK" and distinct != 1:
            return False
        if gang.strategy == "STRICT_SPREAD" and distinct != len(where):
            return False
        if not all(nodes[at].matches(gang.node_labels) for at in where):
            return False
        cpus.update({at: where.count(at) * gang.cpus for at in where})
        gpus.update({at: where.count(at) * gang.gpus for at in where})
    return all(cpus[at] <= one.cpus and gpus[at] <= one.gpus for at, one in enumerate(nodes))


@settings(max_examples=300, deadline=None)
@given(some_gangs(), NODES)
def test_nothing_is_refused_that_fits_and_the_plan_fits(wanted: list[Gang], nodes: list[NodeResources]) -> None:
    fits = any(is_valid(chosen, nodes) for chosen in placements(wanted, nodes))
    if fits:
        assert not list(lacks(wanted, nodes))
    placement = place(wanted, nodes)
    if not placement.unplaced:
        assert fits, "the plan found a place that does not exist"
    placed = Counter[str]()
    for found in placement.processes.values():
        placed.update(found)
    for gang in wanted:
        each = 1 if gang.strategy == "STRICT_PACK" else gang.num_bundles
        assert placed[gang.name] + each * placement.unplaced.get(gang.name, 0) == gang.count * each
