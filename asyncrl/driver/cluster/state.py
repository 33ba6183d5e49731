"""What a Ray cluster has, what it lacks for a run, and what the run waits for there. Ray is asked through public APIs.

All functions need a connection to the cluster, and all except `check_room` block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from asyncrl.config.problems import format_problems
from asyncrl.config.resources.placement import UNITS, Gang, NodeResources, Placement, gangs, place
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DeadlineError
from rollouter.serving.options import app_name
from rollouter.serving.ray_internals import replica_prefix

ENGINE_REPLICA = "engine replica"
"""The name of engines in `pending_demands`."""
_WAITING = ("PENDING", "RESCHEDULING")


def cluster_nodes() -> list[NodeResources]:
    """Return the living nodes, the driver's first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        NodeResources(
            node["NodeID"],
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})",
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            labels=node["Labels"],
            is_driver=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (not node.is_driver, node.name, node.node_id))


def plan_placement(config: Config) -> Placement:
    """Return the plan of a run's processes on this cluster, as if no other run used it."""
    nodes = cluster_nodes()
    return place(_gangs(config, nodes, trains=not config.validates_only), nodes)


def _gangs(config: Config, nodes: Sequence[NodeResources], *, trains: bool = True) -> tuple[Gang, ...]:
    return gangs(config, gpus=any(node.gpus for node in nodes), trains=trains)


async def check_room(config: Config, *, trains: bool = True) -> str:
    """Check that a run, or engines alone, have room on this cluster, if no other run uses it.

    Returns:
        Why it may have to wait, in a sentence; empty if it has room.

    Raises:
        ConfigError: it can never have room, and the cluster adds no nodes (`ray.autoscaling`).
        DeadlineError: the cluster did not answer within `timeouts.call_s`.
    """
    limit_s = config.timeouts.call_s
    try:
        with anyio.fail_after(limit_s):
            return await to_thread.run_sync(_compare_room, config, trains, abandon_on_cancel=True)
    except TimeoutError as error:
        raise DeadlineError(
            f"the Ray cluster at ray.address did not answer what its nodes have within {limit_s:g} s (timeouts.call_s)"
        ) from error


def _compare_room(config: Config, trains: bool) -> str:
    nodes = cluster_nodes()
    wanted = _gangs(config, nodes, trains=trains)
    if trains and config.weight_sync.backend == "nccl" and not any(gang.gpus for gang in wanted):
        raise ConfigError(
            "weight_sync.backend=nccl: versions are broadcast from a GPU, and no node of the cluster has one; set "
            "weight_sync.backend=object_store, or add nodes with GPUs"
        )
    placement = place(wanted, nodes)
    if placement.lacks and not config.ray.autoscaling:
        raise ConfigError(format_problems(placement.lacks))
    if placement.lacks:
        return f"the cluster has to add nodes: {'; '.join(problem.consequence for problem in placement.lacks)}"
    free = ray.available_resources()
    for unit in UNITS:
        needed, has = sum(gang.total(unit) for gang in wanted), free.get(unit.removesuffix("s"), 0.0)
        if needed > has:
            return (
                f"{needed:g} {unit} are needed, and {has:g} of the cluster's are free: this launch waits for others to "
                f"end, for up to timeouts.start_s={config.timeouts.start_s:g} s"
            )
    if placement.unplaced:
        names = ", ".join(f"{count} {name}" for name, count in placement.unplaced.items())
        return f"the nodes may have no room for everything (not placed: {names})"
    return ""


def pending_demands(namespace: str, app: str) -> tuple[str, ...] | None:
    """Return what a run waits for, such as `2 x engine replica: 8 GPUs and 8 CPUs on one node`; None: Ray did not
    answer.

    Args:
        namespace: the run's Ray namespace.
        app: Serve's name of the application of its engines.
    """
    parts = {
        f"{namespace}/ranks/": "ranks",
        replica_prefix(app): ENGINE_REPLICA,
        replica_prefix(app_name(namespace, "reward")): "reward model replica",
    }
    waiting: Counter[str] = Counter()
    try:
        groups = placement_group_table()
    except RayError:  # the run does not depend on the answer
        return None
    for group in groups.values():
        for prefix, part in parts.items():
            if group["name"].startswith(prefix) and group["state"] in _WAITING:
                waiting[f"{part}: {_describe(group)}"] += 1
    return tuple(f"{count} x {text}" for text, count in sorted(waiting.items()))


def _describe(group: Mapping[str, Any]) -> str:
    bundles = list(group["bundles"].values())
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    amounts = " and ".join(
        f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in sorted(total.items(), reverse=True)
    )
    where = {"STRICT_PACK": " on one node", "STRICT_SPREAD": f" on {len(bundles)} nodes"}.get(group["strategy"], "")
    never = group["stats"]["scheduling_state"] == "INFEASIBLE"
    return f"{amounts}{where}{', which no node has' if never else ''}"
