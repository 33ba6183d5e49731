"""Which node of a Ray cluster gets which processes of a run, and what the cluster lacks for them. Pure.

Ray places the processes; the plan predicts it with the same bundles, labels and strategies. So `--dry-run` can draw the
nodes, and a launch that can never fit is refused before anything is started.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import Device, on_gpus
from asyncrl.config.sections.trainer_rules import model_roles

Strategy = Literal["STRICT_PACK", "PACK", "STRICT_SPREAD"]
"""Ray's strategies for the bundles of a placement group: on one node; on few nodes; each on another node."""
Unit = Literal["CPUs", "GPUs"]
UNITS: tuple[Unit, ...] = ("CPUs", "GPUs")
_REPLICA_SECTIONS = ("rollout", "reward_model")
RANK_SHARE, ENGINE_SHARE = 0.6, 0.4
"""Shares of a GPU that a rank and an engine reserve if they use it in turns (`placement: colocated`,
`trainer.lend_after_s`). Two ranks have no room on one GPU, and where each GPU has a rank, neither have two engines. If
other GPUs are free, Ray still chooses the GPU on which the share leaves least."""
DRIVER_PARTS = ("driver", "queue", "weight store", "Rollouter", "Trainer")
"""Parts on the driver's node, where the run directory is. They reserve nothing."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A node of the cluster."""

    node_id: str
    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)
    is_driver: bool = False
    """Whether the driver runs on it."""

    @property
    def own_labels(self) -> list[str]:
        """Labels as `name=value`, without those that Ray gives every node."""
        return sorted(f"{name}={value}" for name, value in self.labels.items() if not name.startswith("ray.io/"))

    def matches(self, selector: Mapping[str, str]) -> bool:
        """Return whether the node has the labels that a label selector of Ray asks for."""
        return all(_selects(selected, self.labels.get(name)) for name, selected in selector.items())


@dataclass(frozen=True, slots=True)
class Gang:
    """Processes that are placed together: a replica, or a group of ranks. `count` gangs are alike."""

    name: str
    section: str
    """The configuration section with the number of processes."""
    count: int
    num_bundles: int
    """Bundles of one gang, which are alike."""
    cpus: float
    """CPUs of a bundle."""
    gpus: float
    """GPUs of a bundle."""
    strategy: Strategy
    node_labels: Mapping[str, str]
    processes: int = 1
    """Processes in a bundle."""

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of one gang, as Ray's placement groups take them."""
        bundle = {name: amount for name, amount in (("GPU", self.gpus), ("CPU", self.cpus)) if amount}
        return [dict(bundle) for _ in range(self.num_bundles)]

    @property
    def label_selectors(self) -> list[dict[str, str]] | None:
        """A label selector for each bundle; None if any node will do."""
        return [dict(self.node_labels) for _ in range(self.num_bundles)] if self.node_labels else None

    def total(self, what: Unit) -> float:
        """Return what all gangs need together."""
        return self.count * self.num_bundles * (self.cpus if what == "CPUs" else self.gpus)

    def fits(self, node: NodeResources) -> int:
        """Return how many bundles an empty node has room for."""
        if not node.matches(self.node_labels):
            return 0
        needs = ((node.cpus, self.cpus), (node.gpus, self.gpus))
        rooms = [math.floor(has / need + 1e-9) for has, need in needs if need]
        return min(rooms, default=self.count * self.num_bundles)


def rank_gang(
    name: str,
    section: str,
    *,
    num_ranks: int,
    per_node: int | None,
    cpus: float,
    gpus: float,
    node_labels: Mapping[str, str],
) -> Gang:
    """Return the gang of a group of ranks.

    Args:
        per_node: ranks on each node, which then share a bundle; None: on as few nodes as possible.
        cpus, gpus: CPUs and GPUs that each rank reserves.
    """
    each = per_node or 1
    strategy: Strategy = "STRICT_SPREAD" if per_node else "PACK"
    return Gang(
        name, section, 1, num_ranks // each, float(cpus * each), float(gpus * each), strategy, node_labels, each
    )


def replica_gang(config: Config, *, gpus: bool, lent: bool = False) -> Gang:
    """Return the gangs of the engines' replicas.

    Args:
        gpus: whether they run on GPUs.
        lent: those on the Trainer's GPUs (`trainer.lend_after_s`) instead of the run's own.
    """
    rollout = config.rollout
    size, count = rollout.replica_size, config.num_lent_replicas if lent else rollout.num_replicas
    if not gpus:  # its processes share one bundle
        cpus = float(size * rollout.cpu_threads)
        return Gang("engine replica", "rollout", count, 1, cpus, 0.0, "STRICT_PACK", rollout.node_labels)
    strategy: Strategy = "PACK" if rollout.spans_nodes else "STRICT_PACK"
    name = "engine worker" if rollout.spans_nodes else "engine replica"
    share = ENGINE_SHARE if lent or config.takes_turns else 1.0
    return Gang(name, "rollout", count, size, 1.0, share, strategy, rollout.node_labels)


def count_processes(tree: dict[str, Any], user_values: Mapping[str, Any]) -> None:
    """Let `nnodes` and `n_gpus_per_node` set the number of ranks and of replicas, unless these are given too. With
    autoscaling, they set the maximum number of replicas.

    If the cluster adds nodes, they also set `device`: the nodes with these GPUs may have yet to join."""
    ray = tree.get("ray")
    adds_nodes = isinstance(ray, dict) and ray.get("autoscaling") is True
    for section, key in (("trainer", "num_workers"), ("rollout", "num_replicas")):
        values = tree.get(section)
        if not isinstance(values, dict):
            continue
        has_gpus = adds_nodes and isinstance(values.get("n_gpus_per_node"), int)
        if has_gpus and values.get("device") == "auto" and f"{section}.device" not in user_values:
            values["device"] = "cuda"
        scaling = values.get("autoscaling")
        target, path = values, f"{section}.{key}"
        if isinstance(scaling, dict) and scaling.get("enable") is True:
            target, path, key = scaling, f"{section}.autoscaling.max_replicas", "max_replicas"
        # A rank has one GPU.
        parallel = [values.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline") if section == "rollout"]
        if not all(isinstance(size, int) and size > 0 for size in parallel) or path in user_values:
            continue
        match values.get("nnodes"), values.get("n_gpus_per_node"):
            case int(nodes), int(per_node):
                target[key] = max(1, nodes * per_node // math.prod(parallel))


def gangs(config: Config, *, gpus: bool, trains: bool = True) -> tuple[Gang, ...]:
    """Return everything for which a run reserves resources on a shared cluster when it starts.

    Engines that recorded samples may replace are left out (`skip.async_rollout.engines=auto`).

    Args:
        gpus: whether the cluster has GPUs.
        trains: whether it is a run; otherwise there are only engines (`asyncrl serve`).
    """
    trainer, rollout = config.trainer, config.rollout
    engines_on_gpus = on_gpus(rollout.device, gpus)
    if not trains:
        return (replica_gang(config, gpus=engines_on_gpus),)
    labels = trainer.node_labels

    def ranks(name: str, section: str, number: int, per_node: int | None, device: Device, threads: int) -> Gang:
        share = float(on_gpus(device, gpus))
        return rank_gang(
            name, section, num_ranks=number, per_node=per_node, cpus=threads, gpus=share, node_labels=labels
        )

    found = [
        ranks("policy rank", "trainer", trainer.num_workers, trainer.n_gpus_per_node, trainer.device,
              trainer.cpu_threads)
    ]  # fmt: skip
    for section, role in model_roles(config).items():
        if role.placement == "own":
            number, device = role.num_workers or trainer.num_workers, role.device or trainer.device
            name = f"{section.partition('.')[0]} rank"
            found.append(ranks(name, section, number, None, device, role.cpu_threads or trainer.cpu_threads))
    skip = config.skip.async_rollout
    if rollout.attach is None and not (skip.enable and skip.engines == "auto"):
        found.append(replica_gang(config, gpus=engines_on_gpus))
    if config.reward_model.placement == "serve" and engines_on_gpus:
        number = config.reward_model.num_replicas
        found.append(Gang("reward model replica", "reward_model", number, 1, 1.0, 1.0, "PACK", {}))
    return tuple(found)


def ranks_come_first(config: Config) -> bool:
    """Whether engines may start only after the ranks, because they could take the ranks' GPUs.

    Ray places each replica where most GPUs are free. Without labels that keep both sides apart, replicas that are
    placed first leave no node with `trainer.n_gpus_per_node` free GPUs.
    """
    labelled = bool(config.trainer.node_labels and config.rollout.node_labels)
    competes = config.ray.address is not None and config.rollout.attach is None and not labelled
    return config.shares_gpus or (competes and config.trainer.n_gpus_per_node is not None)


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a cluster with the processes that each of them gets."""

    nodes: tuple[NodeResources, ...]
    processes: Mapping[str, Mapping[str, int]]
    """Number of processes by node id and name, without those of the driver's node that reserve nothing."""
    lacks: tuple[ConfigProblem, ...]
    """Why the processes can never fit, even on an empty cluster."""
    unplaced: Mapping[str, int]
    """Gangs that the plan found no room for, by name; Ray may find it unless `lacks` says that there is none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": [asdict(node) | {"processes": dict(self.processes[node.node_id])} for node in self.nodes],
            "lacks": [str(problem) for problem in self.lacks],
            "unplaced": dict(self.unplaced),
        }


def place(wanted: Sequence[Gang], nodes: Sequence[NodeResources]) -> Placement:
    """Plan where gangs go on empty nodes.

    Those with the fewest nodes to choose from come first. A gang of ranks fills nodes one after another, and replicas
    go where most room is left.
    """
    left = {node.node_id: node for node in nodes}
    processes: dict[str, Counter[str]] = {node.node_id: Counter() for node in nodes}
    unplaced: Counter[str] = Counter()

    def choices(gang: Gang) -> tuple[int, int]:
        return sum(node.matches(gang.node_labels) for node in nodes), -gang.num_bundles

    for gang in sorted(wanted, key=choices):
        for _ in range(gang.count):
            chosen = _choose(gang, left)
            if chosen is None:
                unplaced[gang.name] += 1
                continue
            for node_id, bundles in chosen.items():
                node = left[node_id]
                left[node_id] = replace(
                    node, cpus=node.cpus - bundles * gang.cpus, gpus=node.gpus - bundles * gang.gpus
                )
                alone = gang.strategy == "STRICT_PACK"
                processes[node_id][gang.name] += 1 if alone else bundles * gang.processes
    return Placement(tuple(nodes), processes, tuple(lacks(wanted, nodes)), unplaced)


def _choose(gang: Gang, left: Mapping[str, NodeResources]) -> dict[str, int] | None:
    """Return the number of bundles on each chosen node for one gang; None if there is no room."""
    room = {node_id: gang.fits(node) for node_id, node in left.items()}
    by_room = sorted((node_id for node_id in room if room[node_id]), key=lambda node_id: -room[node_id])
    if gang.strategy == "STRICT_PACK":
        return {by_room[0]: gang.num_bundles} if by_room and room[by_room[0]] >= gang.num_bundles else None
    if gang.strategy == "STRICT_SPREAD":
        return dict.fromkeys(by_room[: gang.num_bundles], 1) if len(by_room) >= gang.num_bundles else None
    chosen: dict[str, int] = {}
    for node_id in by_room:
        if (missing := gang.num_bundles - sum(chosen.values())) > 0:
            chosen[node_id] = min(room[node_id], missing)
    return chosen if sum(chosen.values()) == gang.num_bundles else None


def lacks(wanted: Sequence[Gang], nodes: Sequence[NodeResources]) -> Iterator[ConfigProblem]:
    """Yield why gangs can never fit on these nodes. If it yields nothing, they fit on an empty cluster in most cases:
    gangs of different sizes may leave gaps that are too small."""
    usable = [node for node in nodes if any(node.matches(gang.node_labels) for gang in wanted)]
    for unit in UNITS:
        needing = sorted((gang for gang in wanted if gang.total(unit)), key=lambda gang: -gang.total(unit))
        total, has = sum(gang.total(unit) for gang in needing), _total(usable, unit)
        if total > has + 1e-6:
            parts = ", ".join(f"{gang.total(unit):g} for the {gang.name}s" for gang in needing)
            key, number = _number_of(needing[0])
            consequence = f"the run needs {total:g} {unit} ({parts}), the cluster has {has:g}"
            yield ConfigProblem(key, number, consequence, _fix([gang.section for gang in needing]))
    for gang in wanted:
        exceeds = any(gang.total(unit) > _total(nodes, unit) + 1e-6 for unit in UNITS)  # the sum says this already
        has_nodes = any(node.matches(gang.node_labels) for node in nodes)
        if (problem := _lacking(gang, nodes)) is not None and not (exceeds and has_nodes):
            yield problem


def _total(nodes: Sequence[NodeResources], what: Unit) -> float:
    return sum(node.cpus if what == "CPUs" else node.gpus for node in nodes)


def _lacking(gang: Gang, nodes: Sequence[NodeResources]) -> ConfigProblem | None:
    """Return why these gangs could not be placed even if they were alone on the cluster; None if they could."""
    usable = [node for node in nodes if node.matches(gang.node_labels)]
    if not usable and gang.node_labels:
        key = f"{'rollout' if gang.section == 'rollout' else 'trainer'}.node_labels"
        there = sorted({label for node in nodes for label in node.own_labels})
        consequence = f"no node of the cluster has these labels (it has {', '.join(there) or 'none'})"
        return ConfigProblem(key, dict(gang.node_labels), consequence, "start nodes with `ray start --labels`")
    rooms = [gang.fits(node) for node in usable]
    if gang.strategy == "STRICT_PACK":
        possible, needed, where = sum(room // gang.num_bundles for room in rooms), gang.count, ", each on one node"
    elif gang.strategy == "STRICT_SPREAD":
        possible, needed, where = sum(room > 0 for room in rooms), gang.num_bundles, f" on {gang.num_bundles} nodes"
    else:
        possible, needed, where = sum(rooms), gang.count * gang.num_bundles, ""
    if possible >= needed:
        return None
    units = [unit for unit in UNITS if gang.total(unit)]
    total = " and ".join(f"{gang.total(unit):g} {unit}" for unit in units)
    has = " and ".join(f"{_total(usable, unit):g} {unit}" for unit in units)
    labelled = f" with labels {dict(gang.node_labels)}" if gang.node_labels else ""
    largest = " and ".join(f"{max((_total([node], unit) for node in usable), default=0):g} {unit}" for unit in units)
    key, number = _number_of(gang)
    consequence = (
        f"the {gang.name}s need {total}{where}, the cluster has {has} on {len(usable)} node{'s' * (len(usable) != 1)}"
        f"{labelled}, at most {largest} on each: there is room for {possible} of {needed}"
    )
    fix = _fix([gang.section])
    if gang.strategy == "STRICT_PACK" and gang.num_bundles > 1:
        fix += "; rollout.nnodes and rollout.n_gpus_per_node let a replica span nodes"
    return ConfigProblem(key, number, consequence, fix)


def _number_of(gang: Gang) -> tuple[str, int]:
    """Return the key with the number of processes, and its value."""
    is_replica = gang.section in _REPLICA_SECTIONS
    return _number_key(gang.section), gang.count if is_replica else gang.num_bundles * gang.processes


def _number_key(section: str) -> str:
    return f"{section}.{'num_replicas' if section in _REPLICA_SECTIONS else 'num_workers'}"


def _fix(sections: Sequence[str]) -> str:
    keys = dict.fromkeys(map(_number_key, sections))
    return f"lower {' or '.join(keys)}, add nodes, or set ray.autoscaling=true if the cluster adds them"


def _selects(selected: str, value: str | None) -> bool:
    """Return whether a value (None: the node has no such label) is one that a selector's text asks for."""
    negated, text = selected.startswith("!"), selected.removeprefix("!")
    many = re.fullmatch(r"in\((.*)\)", text)
    return (value in (many[1].split(",") if many else [text])) is not negated


def node_rows(placement: Placement) -> list[tuple[str, str, str, str, str]]:
    """Return name, labels, CPUs, GPUs and processes of each node, for users."""
    rows = []
    for node in placement.nodes:
        gets = [f"{count} {name}{'s' * (count > 1)}" for name, count in placement.processes[node.node_id].items()]
        parts = ", ".join([*DRIVER_PARTS, *gets] if node.is_driver else gets) or "-"
        labels = ",".join(node.own_labels) or "-"
        rows.append((node.name, labels, f"{node.cpus:g}", f"{node.gpus:g}", parts))
    return rows
