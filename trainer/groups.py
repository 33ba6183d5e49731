"""All groups of a run: every role that its configuration asks for, on its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anyio

from asyncrl.config.schema import Config
from asyncrl.failures import first_failure
from asyncrl.ports import WeightPublisher
from trainer.group import WorkerGroup
from trainer.placement import GroupPlan, Role, plan_groups
from trainer.roles import RoleGroup
from trainer.tracing import NO_PROFILING, RankProfiling


class TrainerGroups:
    """`start` makes one."""

    def __init__(self, groups: Sequence[WorkerGroup], profiling: RankProfiling = NO_PROFILING) -> None:
        self._profiling = profiling
        self.groups = tuple(groups)
        self.roles: Mapping[Role, RoleGroup] = {
            plan.role: group.role_group(plan.role) for group in groups for plan in group.plan.roles
        }

    @classmethod
    async def start(
        cls, config: Config, *, publisher: WeightPublisher | None = None, run_dir: Path | None = None
    ) -> Self:
        """Start every group of the configuration, at the same time. If one fails the others are gone too.

        Args:
            run_dir: where `profiler.steps` puts traces; None: nowhere.

        Raises:
            AsyncRLError: see `WorkerGroup.start`.
        """
        groups: dict[str, WorkerGroup] = {}
        plans = plan_groups(config)
        profiling = RankProfiling.of(config.profiler, run_dir)

        async def start(plan: GroupPlan) -> None:
            groups[plan.name] = await WorkerGroup.start(
                plan,
                config.timeouts,
                publisher=publisher,
                reserve_cpus=config.ray.address is not None,
                profiling=profiling,
            )

        try:
            async with anyio.create_task_group() as tasks:
                for plan in plans:
                    tasks.start_soon(start, plan)
        except BaseExceptionGroup as error:
            raise first_failure(error) from None
        finally:
            if len(groups) < len(plans):
                await cls(list(groups.values())).close()
        return cls([groups[plan.name] for plan in plans], profiling)

    async def end_traces(self, step: int) -> None:
        """`step` is over: where it is one of `profiler.steps`, the ranks write their traces of it. One group after the
        other, so that the machine is not busy with all at once.

        Raises:
            InfraError, DeadlineError: see `WorkerGroup.end_traces`.
        """
        if step in self._profiling.steps:
            for group in self.groups:
                await group.end_traces(step, self._profiling.ranks)

    async def status(self) -> dict[str, list[Mapping[str, Any]]]:
        """`Rank.status` of each rank, by group."""
        return {group.plan.name: await group.status() for group in self.groups}

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """`group`, `rank`, `pid`, `node_id` and `health` (`WorkerGroup.health`) of every rank, without asking any."""
        return [
            {"group": group.plan.name, "rank": rank, "pid": place.pid, "node_id": place.node_id, "health": health}
            for group in self.groups
            for rank, (place, health) in enumerate(zip(group.places, group.health, strict=False))
        ]

    async def watch(self, probe_s: float) -> None:
        """See `WorkerGroup.watch`; all groups at once. Without one it ends at once.

        Raises:
            InfraError: the first rank that died or hung.
        """
        try:
            async with anyio.create_task_group() as tasks:
                for group in self.groups:
                    tasks.start_soon(group.watch, probe_s)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def close(self) -> None:
        """See `WorkerGroup.close`; all at once."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for group in self.groups:
                    tasks.start_soon(group.close)
