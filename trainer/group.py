"""A group of ranks as Ray actors: where they run, how they find each other, and one answer of all to each call.

    call ─▶ scatter (`trainer.dispatch`) ─▶ every rank ─▶ watch all ─▶ collect
                                                             │ a rank died, failed, or is late
                                                             ▼
                                       what the others say for a while ─▶ raise; kill the group unless all agree

Ranks that agree on a failure (no trained token, a loss that is not finite) are as usable as before. When they do not,
some of them may wait in a collective operation for ever, so the group is killed: it has to be started again from a
checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

import anyio
import anyio.to_thread
import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.schema import TimeoutsConfig
from asyncrl.failures import AsyncRLError, BugError, ConfigError, DeadlineError, InfraError
from asyncrl.ports import Publication, WeightPublisher
from trainer.dispatch import Call, collect, dispatch_of, from_wire, scatter, to_wire
from trainer.engine.base import Layout
from trainer.outcomes import Answer, Lost, Outcome, failure, gather, usable, values_of
from trainer.placement import GroupPlan, Role, RolePlan
from trainer.rank import Meeting, Rank
from trainer.roles import RoleCalls, RoleGroup
from trainer.worker import TrainingWorker, engine_spec

logger = logging.getLogger(__name__)

ASKED_S = 1.0
"""For processes to end by themselves when Ray tells them to, which a stopped one does not hear."""
CLOSE_S = 10.0
"""For processes to be gone."""
QUICK = frozenset({"set_loss_fn", "plan", "step"})
"""Methods that answer at once: `timeouts.call_s`. All others: `timeouts.train_s`."""
READING = frozenset({"infer_batch", "save_checkpoint", "finish_checkpoint"})
"""Methods that leave the model as it is."""

Send = Callable[[int], Any]
"""Rank number → reference to its answer."""


class Place(NamedTuple):
    node_id: str
    address: str
    pid: int


class RankActor(Rank):
    """`trainer.rank.Rank` in an actor."""

    async def locate(self) -> Place:
        context = ray.get_runtime_context()
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    async def call_on_wire(self, role: Role, method: str, call: Call) -> Answer:
        def run() -> Any:
            args = [from_wire(value) for value in call.args]
            return to_wire(getattr(self._workers[role], method)(*args, **call.kwargs))

        return await self._answer(f"{role}.{method}", run)


class WorkerGroup:
    """Ranks and the roles in them. One call at a time; others wait. All on one event loop. `start` makes one."""

    def __init__(self, plan: GroupPlan, timeouts: TimeoutsConfig, device: Literal["cpu", "cuda"]) -> None:
        self.plan = plan
        self._timeouts = timeouts
        self._device = device
        self._lock = anyio.Lock()
        self._bundles: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._layouts: dict[Role, list[Layout]] = {}
        self._abandoned: dict[int, Any] = {}
        """Answers that nobody waits for any more, of a call whose caller was cancelled."""
        self._failure: AsyncRLError | None = None
        """Why the group was killed."""

    @classmethod
    async def start(
        cls,
        plan: GroupPlan,
        timeouts: TimeoutsConfig,
        *,
        publisher: WeightPublisher | None = None,
        reserve_cpus: bool = False,
    ) -> Self:
        """Start the processes and load their models.

        Args:
            publisher: where `publish` puts weights; it travels to the ranks.
            reserve_cpus: take CPUs off Ray's books for ranks on CPU, as on a cluster that is shared.

        Raises:
            ConfigError: fewer GPUs than ranks; or a model cannot be loaded, see `EngineRegistry.new`.
            DeadlineError: not up within `timeouts.start_s`.
            InfraError: a rank died.
        """
        group = cls(plan, timeouts, _device(plan))
        try:
            await group._reserve(reserve_cpus)
            group._start_actors(publisher, reserve_cpus)
            await group._meet()
            await group._load()
        except BaseException:
            await group.close()
            raise
        return group

    def role_group(self, role: Role) -> RoleGroup:
        """The role's calls."""
        return _RoleOfGroup(self, next(plan for plan in self.plan.roles if plan.role == role))

    @property
    def places(self) -> Sequence[Place]:
        """Of each rank."""
        return tuple(self._places)

    async def call(self, role: Role, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of `TrainingWorker` on the ranks, as its dispatch says.

        Raises:
            DataError, DivergenceError, ConfigError: what the ranks raised.
            InfraError: a rank died or failed, and the group with it. DeadlineError: it did not answer in time.
        """
        mode, layouts = dispatch_of(TrainingWorker, method), self._layouts[role]
        calls, shares = await anyio.to_thread.run_sync(scatter, mode, layouts, Call(args, kwargs))
        payloads = await self._ship(calls)
        limit_s = self._timeouts.call_s if method in QUICK else self._timeouts.train_s

        def send(rank: int) -> Any:
            return self._actors[rank].call_on_wire.remote(role, method, payloads[rank])

        values = await self._ask(f"{role}.{method}", send, calls, limit_s, changes_model=method not in READING)
        return await anyio.to_thread.run_sync(
            lambda: collect(mode, layouts, shares, {rank: from_wire(value) for rank, value in values.items()})
        )

    async def publish(self, role: Role, dtype: str, version: int, step: int, validate: bool) -> Publication:
        """See `RoleGroup.publish`."""

        def send(rank: int) -> Any:
            return self._actors[rank].publish.remote(role, dtype, version, step, validate)

        ranks, limit_s = range(self.plan.num_ranks), self._timeouts.train_s
        values = await self._ask(f"publishing version {version}", send, ranks, limit_s, changes_model=False)
        return values[0]

    async def status(self) -> list[Mapping[str, Any]]:
        """`Rank.status` of each rank, whatever it is doing.

        Raises:
            DeadlineError: a rank did not answer within `timeouts.call_s`. InfraError: it is dead.
        """
        if self._failure is not None:
            raise self._gone("status")
        return await self._beside("status", lambda actor: actor.status.remote(), self._timeouts.call_s)

    async def written(self, role: Role) -> None:
        """Until every rank has written its files of the role's checkpoint, beside other calls.

        Raises:
            DeadlineError: not within `timeouts.train_s`. InfraError: a rank died.
        """
        if self._failure is not None:
            raise self._gone("writing the checkpoint")
        await self._beside("writing the checkpoint", lambda actor: actor.written.remote(role), self._timeouts.train_s)

    async def _beside(self, what: str, send: Callable[[Any], Any], limit_s: float) -> list[Any]:
        """Ask every rank for what it answers beside its calls."""
        answers = {rank: _outcome(send(actor), plain=True) for rank, actor in enumerate(self._actors)}
        outcomes = await gather(answers, limit_s)
        error = failure(self.plan.name, what, answers, outcomes, limit_s)
        if error is not None:
            raise error
        return [values_of(outcomes)[rank] for rank in sorted(outcomes)]

    async def close(self) -> None:
        """Kill the ranks and wait until those on this machine are gone, within `CLOSE_S`. What runs is lost."""
        with anyio.CancelScope(shield=True):
            self._failure = self._failure or InfraError(f"the {self.plan.name} group is closed")
            await self._kill()

    # ------------------------------------------------------------------------------------------------ start

    async def _reserve(self, reserve_cpus: bool) -> None:
        """A bundle for each rank, near each other. CPU ranks without a reservation need none."""
        cpus = {"CPU": float(self.plan.cpu_threads)} if reserve_cpus else {}
        bundle = cpus | ({"GPU": 1.0} if self._device == "cuda" else {})
        if not bundle:
            return
        self._bundles = placement_group([bundle] * self.plan.num_ranks, strategy="PACK")
        limit_s = self._timeouts.start_s
        try:
            with anyio.fail_after(limit_s):
                await self._bundles.ready()
        except TimeoutError as error:
            raise DeadlineError(
                f"the {self.plan.name} group waited {limit_s:g} s for {self.plan.num_ranks} times {bundle} on the Ray "
                "cluster; free them, add nodes, or lower num_workers"
            ) from error

    def _start_actors(self, publisher: WeightPublisher | None, reserve_cpus: bool) -> None:
        threads = str(self.plan.cpu_threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        actor: Any = ray.remote(RankActor)
        for rank in range(self.plan.num_ranks):
            where = PlacementGroupSchedulingStrategy(self._bundles, rank) if self._bundles is not None else "DEFAULT"
            shell = actor.options(
                num_cpus=self.plan.cpu_threads if reserve_cpus else 0,
                num_gpus=1 if self._device == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=where,
                runtime_env={"env_vars": environment},
            )
            self._actors.append(shell.remote(publisher))

    async def _meet(self) -> None:
        """Rank 0 opens a place to meet on its machine; all join there."""
        limit_s, ranks = self._timeouts.start_s, range(self.plan.num_ranks)
        self._places = await self._beside("start", lambda actor: actor.locate.remote(), limit_s)
        host = self._places[0].address
        opened = await self._ask("start", lambda rank: self._actors[rank].host.remote(host, limit_s), [0], limit_s)
        meetings = [Meeting(rank, len(ranks), self._local_rank(rank), host, opened[0]) for rank in ranks]
        collective_s = self._timeouts.collective_s

        def send(rank: int) -> Any:
            return self._actors[rank].join.remote(meetings[rank], self._device, collective_s)

        await self._ask("joining the process group", send, ranks, limit_s)

    async def _load(self) -> None:
        collective_s, ranks = self._timeouts.collective_s, range(self.plan.num_ranks)
        specs = {
            plan.role: engine_spec(plan, device=self._device, collective_s=collective_s) for plan in self.plan.roles
        }

        def send(rank: int) -> Any:
            return self._actors[rank].load.remote(specs)

        loaded = await self._ask("loading", send, ranks, self._timeouts.start_s)
        for plan in self.plan.roles:
            self._layouts[plan.role] = [loaded[rank][plan.role] for rank in sorted(loaded)]

    def _local_rank(self, rank: int) -> int:
        """Every GPU rank sees its own GPU only, as number 0."""
        if self._device == "cuda":
            return 0
        return sum(place.node_id == self._places[rank].node_id for place in self._places[:rank])

    # ------------------------------------------------------------------------------------------------ calls

    async def _ship(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """Each rank's call, batches by way of the object store; ranks of a data group share one object."""
        shipped: dict[int, Any] = {}
        for call in {id(call): call for call in calls.values()}.values():
            wired = call._replace(args=tuple(to_wire(value) for value in call.args))
            shipped[id(call)] = wired if wired.args == call.args else await self._put(wired)
        return {rank: shipped[id(call)] for rank, call in calls.items()}

    async def _put(self, call: Call) -> Any:
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

    async def _ask(
        self, what: str, send: Send, ranks: Collection[int], limit_s: float, *, changes_model: bool = True
    ) -> dict[int, Any]:
        """Send to `ranks` and return each one's value. The first failure is raised as soon as its cause is known."""
        async with self._lock:
            await self._drain()
            if self._failure is not None:
                raise self._gone(what)
            refs = {rank: send(rank) for rank in ranks}
            try:
                outcomes = await gather({rank: _outcome(ref) for rank, ref in refs.items()}, limit_s)
            except anyio.get_cancelled_exc_class():
                self._abandoned = refs
                raise
            error = failure(self.plan.name, what, ranks, outcomes, limit_s)
            if error is not None:
                await self._judge(error, ranks, outcomes, changes_model=changes_model)
                raise error
            return values_of(outcomes)

    async def _drain(self) -> None:
        """The ranks may still be at a call whose caller was cancelled: wait for them, as long as they may take."""
        if not self._abandoned or self._failure is not None:
            return
        refs, limit_s = self._abandoned, self._timeouts.train_s
        outcomes = await gather({rank: _outcome(ref) for rank, ref in refs.items()}, limit_s)
        self._abandoned = {}
        error = failure(self.plan.name, "a cancelled call", refs, outcomes, limit_s)
        if error is not None:
            await self._judge(error, refs, outcomes, changes_model=True)

    async def _judge(
        self, error: AsyncRLError, ranks: Collection[int], outcomes: Mapping[int, Outcome], *, changes_model: bool
    ) -> None:
        """Kill the group unless it is as usable as before."""
        if not usable(ranks, outcomes, changes_model=changes_model):
            self._failure = error
            with anyio.CancelScope(shield=True):
                await self._kill()

    def _gone(self, what: str) -> InfraError:
        return InfraError(
            f"{what}: the {self.plan.name} group is gone; start again from a checkpoint", str(self._failure)
        )

    # ------------------------------------------------------------------------------------------------ the end

    async def _kill(self) -> None:
        """Not politely: a rank that waits in a collective operation hears nothing."""
        actors, self._actors = self._actors, []
        bundles, self._bundles = self._bundles, None
        if not ray.is_initialized():
            return
        with anyio.move_on_after(CLOSE_S):
            await anyio.to_thread.run_sync(_kill_all, actors, bundles, self._places, abandon_on_cancel=True)


class _RoleOfGroup(RoleCalls):
    def __init__(self, group: WorkerGroup, plan: RolePlan) -> None:
        self._group = group
        self._plan = plan

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._group.call(self._plan.role, method, *args, **kwargs)

    async def publish(self, version: int, step: int, *, validate: bool) -> Publication:
        return await self._group.publish(self._plan.role, self._plan.weights_dtype, version, step, validate)

    async def written(self) -> None:
        await self._group.written(self._plan.role)


async def _outcome(ref: Any, *, plain: bool = False) -> Outcome:
    """What a rank has answered; a `Lost` if it died. `plain`: the call answers with a value, not with an `Answer`."""
    try:
        return Answer(await ref, None) if plain else await ref
    except RayTaskError as error:
        return Lost(BugError.wrap("could not take the call", error))
    except RayError as error:
        return Lost(InfraError.wrap("died; start again from a checkpoint", error))


def _device(plan: GroupPlan) -> Literal["cpu", "cuda"]:
    """`auto`: GPUs when the cluster has any."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if plan.device == "cpu" or (plan.device == "auto" and num_gpus == 0):
        return "cpu"
    if num_gpus < plan.num_ranks:
        raise ConfigError(
            f"num_workers={plan.num_ranks}: the {plan.name} group takes a GPU for each rank and the Ray cluster has "
            f"{num_gpus}; lower num_workers, or use device=cpu"
        )
    return "cuda"


def _kill_all(actors: Sequence[Any], bundles: PlacementGroup | None, places: Sequence[Place]) -> None:
    """Blocking: until the ranks on this machine are gone."""
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
    _, alive = psutil.wait_procs(processes, timeout=ASKED_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=CLOSE_S)
    if alive:
        logger.warning("training processes %s are still there %g s after they were killed", alive, CLOSE_S)
