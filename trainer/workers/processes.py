"""The processes of a group, as Ray actors: reserve their resources, start them and kill them."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import anyio
import anyio.to_thread
import psutil
import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.resources.placement import Gang
from asyncrl.config.sections.base import Dtype, on_gpus
from asyncrl.core.failures import ConfigError, DeadlineError
from asyncrl.core.ports import WeightPublisher
from asyncrl.profiling import profile
from trainer.workers.dispatch import RankCall, from_wire, to_wire
from trainer.workers.outcomes import CallResult
from trainer.workers.placement import GroupPlan, Role
from trainer.workers.rank import Rank
from trainer.workers.tracing import DIRECTORY, NO_PROFILING, RankProfiling, nsight_options

logger = logging.getLogger(__name__)

TERMINATE_S = 1.0
"""Time limit for processes to end on Ray's signal, which a stopped process does not receive."""
CLOSE_S = 10.0
"""Time limit for killed processes to end."""
_numbers = itertools.count()


class RankLocation(NamedTuple):
    node_id: str
    address: str
    pid: int
    gpu: int
    """Index of the rank's GPU among those that the process sees; 0 on CPU."""


StepAndVersion = tuple[int | None, int | None]
"""Step and version that a call belongs to; None if unknown."""


class RankActor(Rank):
    """A `Rank` as a Ray actor."""

    def __init__(self, publisher: WeightPublisher | None, profiling: RankProfiling, group: str) -> None:
        super().__init__(publisher, profiling, group)
        profile.configure("rank", profiling.setup)

    async def locate(self) -> RankLocation:
        context = ray.get_runtime_context()
        gpu = own_gpu(context.get_accelerator_ids()["GPU"], os.environ.get("CUDA_VISIBLE_DEVICES"))
        return RankLocation(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), gpu)

    async def call_at(self, at: StepAndVersion, role: Role, method: str, call: RankCall) -> CallResult:
        def run() -> Any:
            args = [from_wire(value) for value in call.args]
            return to_wire(getattr(self._workers[role], method)(*args, **call.kwargs))

        profile.set_position(step=at[0], version=at[1])
        return await self._call(role, method, run)

    async def publish_at(
        self, at: StepAndVersion, role: Role, dtype: Dtype, version: int, step: int, validate: bool, probe: bool
    ) -> CallResult:
        profile.set_position(step=at[0], version=at[1])
        return await self.publish(role, dtype, version, step, validate, probe)


class Processes:
    """One actor for each rank of `plan`. Call `reserve`, `start` and finally `kill`."""

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        self.device: Literal["cpu", "cuda"] = _device(plan)
        self.actors: list[Any] = []
        """The actors by rank; empty after `kill`."""
        self._bundles: PlacementGroup | None = None
        self._bundle_of: Sequence[int] = ()
        """Index of the bundle of each rank."""

    async def reserve(self, *, cpus: bool, limit_s: float, until: float) -> None:
        """Reserve bundles for the ranks, where `GroupPlan.gang` says. Ranks on CPU need none unless their `cpus` are
        reserved.

        Reservations of an earlier Trainer of this run are freed. Otherwise Ray would keep them as long as the driver
        lives, and on a full cluster the new Trainer would wait for them forever. Ranks that share their GPUs with
        engines take over the earlier reservation instead: between the two, Ray could place an engine that is replaced
        on the GPU of another engine, and then one GPU would have no room for a rank.

        Args:
            until: when `limit_s` ends, by `anyio.current_time`.

        Raises:
            DeadlineError: the cluster did not have enough free resources in time.
        """
        gang = self.plan.gang(cpus=cpus, gpu=self.device == "cuda")
        if not any(gang.bundles):
            return
        context = ray.get_runtime_context()
        run, process = f"{context.namespace}/ranks/", context.get_worker_id()
        try:
            with anyio.fail_after(until - anyio.current_time()):
                if self.plan.shares_gpus:
                    place = partial(_find_or_place, gang, f"{run}{self.plan.name}")
                else:
                    await anyio.to_thread.run_sync(_free, run, process, abandon_on_cancel=True)
                    place = partial(_place, gang, f"{run}{process}/{self.plan.name}-{next(_numbers)}")
                bundles: Any = await anyio.to_thread.run_sync(place, abandon_on_cancel=True)
                self._bundles = bundles
                await bundles.ready()
                table = await anyio.to_thread.run_sync(placement_group_table, bundles, abandon_on_cancel=True)
        except TimeoutError as error:
            labels = f", on nodes with labels {dict(gang.node_labels)}" if gang.node_labels else ""
            raise DeadlineError(
                f"the {self.plan.name} group waited {limit_s:g} s for {gang.num_bundles} times {gang.bundles[0]} on "
                f"the Ray cluster{labels}; free these resources, add nodes, or lower {self.plan.section}.num_workers"
            ) from error
        self._bundle_of = bundle_of_ranks(table["bundles_to_node_id"], gang.processes)

    async def start(
        self,
        publisher: WeightPublisher | None,
        *,
        reserve_cpus: bool,
        limit_s: float,
        until: float,
        profiling: RankProfiling = NO_PROFILING,
    ) -> None:
        """Start the actors.

        Args:
            until: when `limit_s` ends, by `anyio.current_time`.

        Raises:
            ConfigError: `profiler.tool=nsys` with ranks on CPU.
            DeadlineError: Ray did not create them in time.
        """
        check_tool(profiling, self.plan, self.device)
        create = partial(self._create, publisher, reserve_cpus=reserve_cpus, profiling=profiling)
        try:
            with anyio.fail_after(until - anyio.current_time()):
                self.actors = await anyio.to_thread.run_sync(create, abandon_on_cancel=True)
        except TimeoutError as error:
            raise DeadlineError(
                f"Ray has not created the processes of the {self.plan.name} group within {limit_s:g} s "
                "(timeouts.start_s)"
            ) from error

    def _create(self, publisher: WeightPublisher | None, *, reserve_cpus: bool, profiling: RankProfiling) -> list[Any]:
        """Return the new actors by rank. Blocking: Ray answers once its control process has registered each."""
        threads = str(self.plan.cpu_threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        actor: Any = ray.remote(RankActor)
        actors = []
        for rank in range(self.plan.num_ranks):
            where: Any = "DEFAULT"
            if self._bundles is not None:
                where = PlacementGroupSchedulingStrategy(self._bundles, self._bundle_of[rank])
            shell = actor.options(
                num_cpus=self.plan.cpu_threads if reserve_cpus else 0,
                num_gpus=self.plan.gpu_share if self.device == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=where,
                runtime_env={"env_vars": environment, **self._nsight(rank, profiling, shared=reserve_cpus)},
            )
            actors.append(shell.remote(publisher, profiling, self.plan.name))
        return actors

    def _nsight(self, rank: int, profiling: RankProfiling, *, shared: bool) -> dict[str, Any]:
        """Return the `runtime_env` of a rank under Nsight Systems; empty for other ranks.

        `shared`: the cluster may have machines without the run directory.
        """
        if profiling.tool != "nsys" or not profiling.traces_rank(rank):
            return {}
        directory = None
        if profiling.run_dir is not None and not shared:
            directory = profiling.run_dir / DIRECTORY
            directory.mkdir(parents=True, exist_ok=True)
        return {"nsight": nsight_options(self.plan.name, rank, directory)}

    async def kill(self, places: Sequence[RankLocation]) -> None:
        """Kill every rank, because a rank that waits in a collective operation ignores other signals. Wait for at most
        `CLOSE_S` until those on this machine have ended. Shares of GPUs stay reserved (`reserve`) until the run ends,
        and with it Ray."""
        actors, self.actors = self.actors, []
        bundles, self._bundles = self._bundles, None
        if self.plan.shares_gpus:
            bundles = None
        if not ray.is_initialized():
            return
        with anyio.move_on_after(CLOSE_S):
            await anyio.to_thread.run_sync(_kill_all, actors, bundles, places, abandon_on_cancel=True)


def own_gpu(assigned: Sequence[str], visible: str | None) -> int:
    """Return the index of the GPU that Ray has assigned to a process among those that the process sees. Pure.

    The process sees only its own GPU, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 makes all GPUs visible.

    Args:
        assigned: id of the assigned GPU; empty for a rank on CPU.
        visible: CUDA_VISIBLE_DEVICES, which the ids refer to; None: not set, so ids are the machine's GPU numbers.
    """
    if not assigned:
        return 0
    return int(assigned[0]) if visible is None else visible.split(",").index(assigned[0])


def bundle_of_ranks(nodes: Mapping[int, str], ranks_per_bundle: int) -> list[int]:
    """Return the bundle of each rank, so that the ranks of a node follow one another. Pure.

    Args:
        nodes: the node of each bundle, by the bundle's index.
    """
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    ordered = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
    return [bundle for bundle in ordered for _ in range(ranks_per_bundle)]


def local_ranks(places: Sequence[RankLocation], device: Literal["cpu", "cuda"]) -> list[int]:
    """Return the `Rendezvous.local_rank` of each rank. Pure."""
    if device == "cuda":
        return [place.gpu for place in places]
    nodes = [place.node_id for place in places]
    return [nodes[:rank].count(node) for rank, node in enumerate(nodes)]


def check_tool(profiling: RankProfiling, plan: GroupPlan, device: Literal["cpu", "cuda"]) -> None:
    """Check that the configured profiler can trace ranks on `device`. Pure.

    Raises:
        ConfigError: `profiler.tool=nsys` with ranks on CPU.
    """
    if profiling.steps and profiling.tool == "nsys" and device == "cpu":
        raise ConfigError(
            f"profiler.tool=nsys: the {plan.name} group runs on CPU, where Nsight Systems has no GPU to trace; use "
            f"profiler.tool=torch, or {plan.section}.device=cuda on a cluster with GPUs"
        )


def _device(plan: GroupPlan) -> Literal["cpu", "cuda"]:
    """Return the device of a group's ranks. If it has fewer GPUs than ranks, `reserve` waits for others."""
    return "cuda" if on_gpus(plan.device, ray.cluster_resources().get("GPU", 0) > 0) else "cpu"


def _place(gang: Gang, name: str) -> PlacementGroup:
    """Request the bundles of a gang. Blocking."""
    selectors = gang.label_selectors
    return placement_group(gang.bundles, strategy=gang.strategy, name=name, bundle_label_selector=selectors)


def _find_or_place(gang: Gang, name: str) -> PlacementGroup:
    """Return the placement group of this name; if there is none, request it. Blocking."""
    try:
        return get_placement_group(name)
    except ValueError:
        return _place(gang, name)


def _free(run: str, process: str) -> None:
    """Remove the reservations whose names begin with `run`, except those that continue with `process`. Blocking."""
    for group in placement_group_table().values():
        name = group["name"]
        if name.startswith(run) and not name.startswith(f"{run}{process}/") and group["state"] != "REMOVED":
            logger.info("freeing the reservation %s of a process that has ended", name)
            remove_placement_group(get_placement_group(name))


def _kill_all(actors: Sequence[Any], bundles: PlacementGroup | None, places: Sequence[RankLocation]) -> None:
    """Kill the ranks, and block until those on this machine have ended."""
    here = ray.get_runtime_context().get_node_id()
    for actor in actors:
        ray.kill(actor)
    if bundles is not None:
        remove_placement_group(bundles)
    processes = []
    for place in places:
        with suppress(psutil.NoSuchProcess):
            if place.node_id == here:
                processes.append(psutil.Process(place.pid))
    _, alive = psutil.wait_procs(processes, timeout=TERMINATE_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=CLOSE_S)
    if alive:
        logger.warning("training processes %s have not ended %g s after they were killed", alive, CLOSE_S)
