"""Groups of ranks as Ray actors: start them, connect them, and combine the results of each call.

    call ─▶ scatter (`trainer.workers.dispatch`) ─▶ every rank ─▶ gather outcomes ─▶ collect
                                                             │ a rank died, failed, or is late
                                                             ▼
                                  wait a little for the others ─▶ raise; kill the group unless all agree

After a failure on which all ranks agree (no trained token, a loss that is not finite) the group stays usable. After any
other failure some ranks may wait in a collective operation forever, so the group is killed and must be restarted from a
checkpoint. The same happens if `watch` finds a rank dead or hung; calls in progress then fail.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
import ray
from ray.exceptions import RayError, RayTaskError

from asyncrl.config.schema import Config
from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import AsyncRLError, BugError, DeadlineError, InfraError
from asyncrl.core.ports import WeightPublisher
from asyncrl.core.tasks import task_group
from asyncrl.profiling import profile
from trainer.engines.base import Layout
from trainer.workers.dispatch import RankCall, collect, dispatch_of, from_wire, scatter, to_wire
from trainer.workers.outcomes import (
    CallResult,
    LostRank,
    Outcome,
    find_failure,
    gather_outcomes,
    group_is_usable,
    values_of,
)
from trainer.workers.placement import GroupPlan, Role, RolePlan, plan_groups
from trainer.workers.processes import Processes, RankLocation, local_ranks
from trainer.workers.rank import Rendezvous
from trainer.workers.tracing import NO_PROFILING, RankProfiling
from trainer.workers.worker import PublishedVersion, RoleGroup, TrainingWorker

logger = logging.getLogger(__name__)

QUICK = frozenset({"set_loss_fn", "plan", "step"})
"""Methods that return quickly and have the deadline `timeouts.call_s`; all others have `timeouts.train_s`."""
READING = frozenset({"infer_batch", "save_checkpoint", "finish_checkpoint"})
"""Methods that do not change the model."""
PROBES = 4
"""Number of health checks within the time after which an unresponsive rank counts as hung."""
AGAIN = "the Trainer has to be restarted from its last checkpoint"


class WorkerGroup:
    """The ranks of a group and their roles, created by `start`. One call runs at a time and others wait. Everything
    runs on one event loop."""

    def __init__(self, processes: Processes, timeouts: TimeoutsConfig) -> None:
        self.plan = processes.plan
        self._processes = processes
        self._timeouts = timeouts
        self._ranks = range(self.plan.num_ranks)
        self._lock = anyio.Lock()
        self._health_lock = anyio.Lock()
        """Acquired during a health check, and while ranks cannot answer one."""
        self._locations: list[RankLocation] = []
        self._layouts: dict[Role, list[Layout]] = {}
        self._abandoned: dict[int, Any] = {}
        """References to the results of a call whose caller was cancelled."""
        self._failure: AsyncRLError | None = None
        """Why the group was killed."""
        self.health: Sequence[Any] = [None] * self.plan.num_ranks
        """`ProcessHealth` of each rank at the last check of `watch`; None before the first."""

    @classmethod
    async def start(
        cls,
        plan: GroupPlan,
        timeouts: TimeoutsConfig,
        *,
        publisher: WeightPublisher | None = None,
        reserve_cpus: bool = False,
        profiling: RankProfiling = NO_PROFILING,
    ) -> Self:
        """Start the processes and load their models.

        Args:
            publisher: receives the weights in `publish`; it is pickled and sent to the ranks.
            reserve_cpus: reserve CPUs in Ray for ranks on CPU, as on a shared cluster.

        Raises:
            ConfigError: a model cannot be loaded (`new_engine`).
            DeadlineError: not started within `timeouts.start_s`, for example because there are fewer GPUs than ranks.
            InfraError: a rank died.
        """
        processes = Processes(plan)
        group = cls(processes, timeouts)
        limit_s = timeouts.start_s
        until = anyio.current_time() + limit_s  # one deadline for all of the following
        try:
            await processes.reserve(cpus=reserve_cpus, limit_s=limit_s, until=until)
            await processes.start(
                publisher, reserve_cpus=reserve_cpus, limit_s=limit_s, until=until, profiling=profiling
            )
            await group._join(until)
            await group._load(until)
        except BaseException:
            await group.close()
            raise
        return group

    def role_group(self, role: Role) -> RoleGroup:
        return GroupRole(self, next(plan for plan in self.plan.roles if plan.role == role))

    @property
    def locations(self) -> Sequence[RankLocation]:
        return tuple(self._locations)

    async def call(self, role: Role, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `TrainingWorker` on the ranks, as its dispatch declares.

        Raises:
            DataError, DivergenceError, ConfigError: raised by the ranks.
            InfraError: a rank died or failed, and the group was killed.
            DeadlineError: a rank did not answer in time.
        """
        mode, layouts = dispatch_of(TrainingWorker, method), self._layouts[role]
        calls, shares = await anyio.to_thread.run_sync(scatter, mode, layouts, RankCall(args, kwargs))
        payloads = await self._put_calls(calls)
        values = await self._call_ranks(
            f"{role}.{method}",
            "call_at",
            {rank: (profile.place, role, method, payload) for rank, payload in payloads.items()},
            limit_s=self._timeouts.call_s if method in QUICK else self._timeouts.train_s,
            changes_model=method not in READING,
        )
        return await anyio.to_thread.run_sync(
            lambda: collect(mode, layouts, shares, {rank: from_wire(value) for rank, value in values.items()})
        )

    async def publish(
        self, role: Role, dtype: str, version: int, step: int, validate: bool, probe: bool
    ) -> PublishedVersion:
        """See `RoleGroup.publish`."""
        calls = dict.fromkeys(self._ranks, (profile.place, role, dtype, version, step, validate, probe))
        limit_s = self._timeouts.train_s
        what = f"publishing version {version}"
        return (await self._call_ranks(what, "publish_at", calls, limit_s=limit_s, changes_model=False))[0]

    async def republish(self) -> None:
        """See `RoleGroup.republish`.

        Raises:
            InfraError, DeadlineError: the store did not accept it, or rank 0 did not answer within `timeouts.train_s`.
        """
        what, limit_s = "publishing again", self._timeouts.train_s
        self._check_alive(what)
        answer = _outcome(self._processes.actors[0].republish.remote())
        error = find_failure(self.plan.name, what, [0], await self._gather({0: answer}, limit_s), limit_s)
        if error is not None:
            raise error

    async def end_traces(self, step: int, ranks: Collection[int]) -> None:
        """Let those of `ranks` that exist write their traces of `step`, within `timeouts.train_s`. Meanwhile they
        cannot answer health checks, so `watch` pauses.

        Raises:
            InfraError: a rank died. DeadlineError: a rank did not finish in time.
        """
        calls = {rank: (step,) for rank in self._ranks if rank in ranks}
        if not calls:
            return
        what, limit_s = f"the trace of step {step}", self._timeouts.train_s
        async with self._health_lock:
            problems = await self._call_ranks(what, "end_trace", calls, limit_s=limit_s, changes_model=False)
        for problem in problems.values():
            if problem:
                logger.warning("%s", problem)

    async def watch(self, probe_s: float) -> None:
        """Wait until a rank dies, which is detected at once, or does not answer health checks for `probe_s`. Then
        kill the group, so that every pending call fails too. Returns if the group fails for another reason.

        Raises:
            InfraError: a rank died. DeadlineError: it is hung.
        """
        async with task_group() as tasks:
            tasks.start_soon(self._check_health, "training", "wait_forever", math.inf)
            while self._failure is None:
                await anyio.sleep(probe_s / PROBES)
                async with self._health_lock:
                    self.health = await self._check_health("a health check", "health", probe_s) or self.health
            tasks.cancel_scope.cancel()

    async def _check_health(self, what: str, method: str, limit_s: float) -> Sequence[Any]:
        """Query every rank, and kill the group if one fails."""
        try:
            return await self._query_ranks(what, method, limit_s=limit_s)
        except AsyncRLError as error:
            if self._failure is None:
                await self._fail(error)
                raise
            return ()  # the group was killed meanwhile, by code that raises the failure itself

    async def wait_for_files(self, role: Role) -> None:
        """Wait until every rank has written its files of the role's checkpoint; other calls may run meanwhile.

        Raises:
            DeadlineError: not within `timeouts.train_s`. InfraError: a rank died.
        """
        what = "writing the checkpoint"
        self._check_alive(what)
        await self._query_ranks(what, "wait_for_files", role, limit_s=self._timeouts.train_s)

    async def close(self) -> None:
        """Kill the processes (`Processes.kill`). Running calls are lost, as is an unfinished checkpoint."""
        with anyio.CancelScope(shield=True):
            self._failure = self._failure or InfraError(f"the {self.plan.name} group is closed")
            await self._processes.kill(self._locations)

    async def _join(self, until: float) -> None:
        """Let all ranks join a process group through a store that rank 0 opens on its machine."""
        limit_s, device = self._timeouts.start_s, self._processes.device
        self._locations = await self._query_ranks("start", "locate", limit_s=limit_s, until=until)
        host = self._locations[0].address
        opened = await self._call_ranks("start", "open_store", {0: (host, limit_s)}, limit_s=limit_s, until=until)
        calls = {
            rank: (Rendezvous(rank, len(self._ranks), local, host, opened[0]), device, self._timeouts.collective_s)
            for rank, local in enumerate(local_ranks(self._locations, device))
        }
        await self._call_ranks("joining the process group", "join", calls, limit_s=limit_s, until=until)

    async def _load(self, until: float) -> None:
        specs = {plan.role: plan.spec_on(self._processes.device) for plan in self.plan.roles}
        calls = dict.fromkeys(self._ranks, (specs,))
        loaded = await self._call_ranks("loading", "load", calls, limit_s=self._timeouts.start_s, until=until)
        for plan in self.plan.roles:
            self._layouts[plan.role] = [loaded[rank][plan.role] for rank in sorted(loaded)]

    async def _put_calls(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Return each rank's call, with batches in the object store; ranks of a data group share one object."""
        sent: dict[int, Any] = {}
        for call in {id(call): call for call in calls.values()}.values():
            wired = call._replace(args=tuple(to_wire(value) for value in call.args))
            sent[id(call)] = wired if wired.args == call.args else await self._put(wired)
        return {rank: sent[id(call)] for rank, call in calls.items()}

    async def _put(self, call: RankCall) -> Any:
        limit_s = self._timeouts.call_s
        try:
            with anyio.fail_after(limit_s):
                return await anyio.to_thread.run_sync(ray.put, call, abandon_on_cancel=True)
        except TimeoutError as error:
            raise DeadlineError(
                f"the object store did not take a batch within {limit_s:g} s; raise ray.object_store_memory_bytes"
            ) from error
        except RayError as error:
            raise InfraError.wrap("the object store cannot take a batch", error) from None

    async def _call_ranks(
        self,
        what: str,
        method: str,
        calls: Mapping[int, tuple[Any, ...]],
        *,
        limit_s: float,
        until: float | None = None,
        changes_model: bool = True,
    ) -> dict[int, Any]:
        """Call a method of ranks after the earlier calls, and return each rank's value. The first failure is raised
        as soon as its cause is known.

        Args:
            calls: the arguments for each rank.
            until: when `limit_s` ends, by `anyio.current_time`; None: `limit_s` from now.
        """
        async with self._lock:
            await self._finish_abandoned()
            self._check_alive(what)
            actors = self._processes.actors
            refs = {rank: getattr(actors[rank], method).remote(*args) for rank, args in calls.items()}
            try:
                outcomes = await self._gather(
                    {rank: _outcome(ref) for rank, ref in refs.items()}, _time_left(limit_s, until)
                )
            except anyio.get_cancelled_exc_class():
                self._abandoned = refs
                raise
            error = find_failure(self.plan.name, what, calls, outcomes, limit_s)
            if error is not None and self._failure is not None:
                raise self._failure  # the group was killed meanwhile, which is why the ranks failed
            if error is not None:
                await self._fail_unless_usable(error, calls, outcomes, changes_model=changes_model)
                raise error
            return values_of(outcomes)

    async def _query_ranks(
        self, what: str, method: str, *args: Any, limit_s: float, until: float | None = None
    ) -> list[Any]:
        """Call a method of every rank while its other calls run."""
        refs = [getattr(actor, method).remote(*args) for actor in self._processes.actors]
        answers = {rank: _outcome(ref, plain=True) for rank, ref in enumerate(refs)}
        outcomes = await gather_outcomes(answers, _time_left(limit_s, until))
        error = find_failure(self.plan.name, what, answers, outcomes, limit_s)
        if error is not None:
            raise self._failure or error
        return [values_of(outcomes)[rank] for rank in sorted(outcomes)]

    async def _gather(self, answers: Mapping[int, Awaitable[Outcome]], limit_s: float) -> dict[int, Outcome]:
        """Gather outcomes, and ingest the events that came with them."""
        outcomes = await gather_outcomes(answers, limit_s)
        for rank, outcome in outcomes.items():
            if isinstance(outcome, CallResult) and outcome.events:
                profile.ingest(f"rank-{self.plan.name}-{rank}", outcome.events)
        return outcomes

    async def _finish_abandoned(self) -> None:
        """Wait for a call whose caller was cancelled, since the ranks may still be computing."""
        if not self._abandoned or self._failure is not None:
            return
        refs, limit_s = self._abandoned, self._timeouts.train_s
        outcomes = await self._gather({rank: _outcome(ref) for rank, ref in refs.items()}, limit_s)
        self._abandoned = {}
        error = find_failure(self.plan.name, "a cancelled call", refs, outcomes, limit_s)
        if error is not None:
            await self._fail_unless_usable(error, refs, outcomes, changes_model=True)

    async def _fail_unless_usable(
        self, error: AsyncRLError, ranks: Collection[int], outcomes: Mapping[int, Outcome], *, changes_model: bool
    ) -> None:
        if not group_is_usable(ranks, outcomes, changes_model=changes_model):
            await self._fail(error)

    async def _fail(self, error: AsyncRLError) -> None:
        """Kill the group because of `error`."""
        self._failure = self._failure or error
        with anyio.CancelScope(shield=True):
            await self._processes.kill(self._locations)

    def _check_alive(self, what: str) -> None:
        if self._failure is not None:
            raise InfraError(f"{what}: the {self.plan.name} group is gone; {AGAIN}", str(self._failure))


class GroupRole(RoleGroup):
    """One role of a `WorkerGroup`."""

    def __init__(self, group: WorkerGroup, plan: RolePlan) -> None:
        self._group = group
        self._plan = plan

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._group.call(self._plan.role, method, *args, **kwargs)

    async def publish(self, version: int, step: int, *, validate: bool, probe: bool = False) -> PublishedVersion:
        return await self._group.publish(self._plan.role, self._plan.weights_dtype, version, step, validate, probe)

    async def republish(self) -> None:
        await self._group.republish()

    async def wait_for_files(self) -> None:
        await self._group.wait_for_files(self._plan.role)


class TrainerGroups:
    """All groups of a run, and every role that its configuration needs. Created by `start`."""

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
        """Start every group of the configuration at the same time. If one fails, the others are closed.

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
            async with task_group() as tasks:
                for plan in plans:
                    tasks.start_soon(start, plan)
        finally:
            if len(groups) < len(plans):
                await cls(list(groups.values())).close()
        return cls([groups[plan.name] for plan in plans], profiling)

    async def end_traces(self, step: int) -> None:
        """Write the traces of `step`, if it is one of `profiler.steps`. Groups write one after the other, so that the
        machine is not busy with all at once.

        Raises:
            InfraError, DeadlineError: see `WorkerGroup.end_traces`.
        """
        if step in self._profiling.steps:
            for group in self.groups:
                await group.end_traces(step, self._profiling.ranks)

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """Return `group`, `rank`, `pid`, `node_id` and `health` (`WorkerGroup.health`) of every rank, without a call
        to it."""
        return [
            {"group": group.plan.name, "rank": rank, "pid": location.pid, "node_id": location.node_id, "health": health}
            for group in self.groups
            for rank, (location, health) in enumerate(zip(group.locations, group.health, strict=False))
        ]

    async def watch(self, probe_s: float) -> None:
        """Watch all groups (`WorkerGroup.watch`).

        Raises:
            InfraError: the first rank that died or hung.
        """
        async with task_group() as tasks:
            for group in self.groups:
                tasks.start_soon(group.watch, probe_s)

    async def close(self) -> None:
        """Close all groups at once (`WorkerGroup.close`)."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for group in self.groups:
                    tasks.start_soon(group.close)


def _time_left(limit_s: float, until: float | None) -> float:
    return limit_s if until is None else max(0.0, until - anyio.current_time())


async def _outcome(ref: Any, *, plain: bool = False) -> Outcome:
    """Wait for a rank's answer; return a `LostRank` if it died. `plain`: the call returns a value, no `CallResult`."""
    try:
        return CallResult(await ref, None) if plain else await ref
    except RayTaskError as error:
        return LostRank(BugError.wrap("could not take the call", error))
    except RayError as error:
        return LostRank(InfraError.wrap(f"died; {AGAIN}", error))
