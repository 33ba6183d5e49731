"""A group of ranks as Ray actors: where they run, how they find each other, and one answer of all to each call.

    call ─▶ scatter (`trainer.dispatch`) ─▶ every rank ─▶ watch all ─▶ collect
                                                             │ a rank died, failed, or is late
                                                             ▼
                                       what the others say for a while ─▶ raise; kill the group unless all agree

Ranks that agree on a failure (no trained token, a loss that is not finite) are as usable as before. When they do not,
some of them may wait in a collective operation for ever, so the group is killed: it has to be started again from a
checkpoint. So it is when `watch` finds a rank dead or hung, whatever the others are doing: their calls end with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Self

import anyio
import anyio.to_thread
import ray
from ray.exceptions import RayError, RayTaskError

from asyncrl.config.schema import TimeoutsConfig
from asyncrl.failures import AsyncRLError, BugError, DeadlineError, InfraError, first_failure
from asyncrl.ports import WeightPublisher
from asyncrl.profiling import profile
from trainer.dispatch import Call, collect, dispatch_of, from_wire, scatter, to_wire
from trainer.engine.base import Layout
from trainer.outcomes import Answer, Lost, Outcome, failure, gather, usable, values_of
from trainer.placement import GroupPlan, Role, RolePlan
from trainer.processes import Place, Processes, local_ranks
from trainer.rank import Meeting
from trainer.roles import Published, RoleCalls, RoleGroup
from trainer.tracing import NO_PROFILING, RankProfiling
from trainer.worker import TrainingWorker, engine_spec

logger = logging.getLogger(__name__)

QUICK = frozenset({"set_loss_fn", "plan", "step"})
"""Methods that answer at once: `timeouts.call_s`. All others: `timeouts.train_s`."""
READING = frozenset({"infer_batch", "save_checkpoint", "finish_checkpoint"})
"""Methods that leave the model as it is."""

PROBES = 4
"""So often a rank is asked within the time after which its silence counts as a hang."""
AGAIN = "the Trainer has to be started again, from its last checkpoint"

Send = Callable[[int], Any]
"""Rank number → reference to its answer."""


class WorkerGroup:
    """Ranks and the roles in them. One call at a time; others wait. All on one event loop. `start` makes one."""

    def __init__(self, processes: Processes, timeouts: TimeoutsConfig) -> None:
        self.plan = processes.plan
        self._processes = processes
        self._timeouts = timeouts
        self._lock = anyio.Lock()
        self._listening = anyio.Lock()
        """Held while `watch` asks for a sign of life, and while ranks cannot give one."""
        self._places: list[Place] = []
        self._layouts: dict[Role, list[Layout]] = {}
        self._abandoned: dict[int, Any] = {}
        """Answers that nobody waits for any more, of a call whose caller was cancelled."""
        self._failure: AsyncRLError | None = None
        """Why the group was killed."""
        self._signs: Sequence[Mapping[str, Any]] = ()
        """What each rank said of itself last, see `Rank.status`."""

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
            publisher: where `publish` puts weights; it travels to the ranks.
            reserve_cpus: take CPUs off Ray's books for ranks on CPU, as on a cluster that is shared.

        Raises:
            ConfigError: fewer GPUs than ranks; or a model cannot be loaded, see `EngineRegistry.new`.
            DeadlineError: not up within `timeouts.start_s`.
            InfraError: a rank died.
        """
        processes = Processes(plan)
        group = cls(processes, timeouts)
        until = anyio.current_time() + timeouts.start_s  # of all that follows together
        try:
            await processes.reserve(cpus=reserve_cpus, limit_s=timeouts.start_s, until=until)
            processes.start(publisher, reserve_cpus=reserve_cpus, profiling=profiling)
            await group._meet(until)
            await group._load(until)
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

    @property
    def health(self) -> Sequence[Any]:
        """`ProcessHealth` of each rank, as `watch` heard last; None: nothing yet."""
        return [sign["health"] for sign in self._signs] or [None] * len(self._places)

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
            return self._processes.actors[rank].call_on_wire.remote(profile.place, role, method, payloads[rank])

        values = await self._ask(f"{role}.{method}", send, calls, limit_s, changes_model=method not in READING)
        return await anyio.to_thread.run_sync(
            lambda: collect(mode, layouts, shares, {rank: from_wire(value) for rank, value in values.items()})
        )

    async def publish(self, role: Role, dtype: str, version: int, step: int, validate: bool) -> Published:
        """See `RoleGroup.publish`."""

        def send(rank: int) -> Any:
            actor = self._processes.actors[rank]
            return actor.publish_at.remote(profile.place, role, dtype, version, step, validate)

        ranks, limit_s = range(self.plan.num_ranks), self._timeouts.train_s
        values = await self._ask(f"publishing version {version}", send, ranks, limit_s, changes_model=False)
        return values[0]

    async def republish(self) -> None:
        """See `RoleGroup.republish`.

        Raises:
            InfraError, DeadlineError: the store did not take it, or rank 0 did not answer within `timeouts.train_s`.
        """
        what, limit_s = "publishing again", self._timeouts.train_s
        if self._failure is not None:
            raise self._gone(what)
        answer = _outcome(self._processes.actors[0].republish.remote())
        error = failure(self.plan.name, what, [0], await self._answers({0: answer}, limit_s), limit_s)
        if error is not None:
            raise error

    async def end_traces(self, step: int, ranks: Collection[int]) -> None:
        """`step` is over: those of `ranks` that there are write their traces of it. Meanwhile they say nothing, so
        `watch` asks nothing: they have `timeouts.train_s`.

        Raises:
            InfraError: a rank died. DeadlineError: it was not done within `timeouts.train_s`.
        """
        there = [rank for rank in range(self.plan.num_ranks) if rank in ranks]
        if not there:
            return

        def send(rank: int) -> Any:
            return self._processes.actors[rank].end_trace.remote(step)

        what, limit_s = f"the trace of step {step}", self._timeouts.train_s
        async with self._listening:
            problems = await self._ask(what, send, there, limit_s, changes_model=False)
        for problem in problems.values():
            if problem:
                logger.warning("%s", problem)

    async def watch(self, probe_s: float) -> None:
        """Until a rank dies, of which it hears at once, or does not say for `probe_s` that it lives. Then the group is
        killed, so that whoever waits for an answer of it has the failure too. Ends when the group has failed otherwise.

        Raises:
            InfraError: a rank died. DeadlineError: it is hung.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sound, "training", lambda actor: actor.stay.remote(), math.inf)
                while self._failure is None:
                    await anyio.sleep(probe_s / PROBES)
                    async with self._listening:
                        signs = await self._sound("a sign of life", lambda actor: actor.status.remote(), probe_s)
                    self._signs = signs or self._signs
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _sound(self, what: str, send: Callable[[Any], Any], limit_s: float) -> Sequence[Any]:
        """Ask every rank; kill the group if one fails."""
        try:
            return await self._beside(what, send, limit_s)
        except AsyncRLError as error:
            # Of a group that was killed it is told by whoever did so.
            if self._failure is None:
                await self._condemn(error)
                raise
            return ()

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

    async def _beside(
        self, what: str, send: Callable[[Any], Any], limit_s: float, *, until: float | None = None
    ) -> list[Any]:
        """Ask every rank for what it answers beside its calls."""
        answers = {rank: _outcome(send(actor), plain=True) for rank, actor in enumerate(self._processes.actors)}
        outcomes = await gather(answers, _left(limit_s, until))
        error = failure(self.plan.name, what, answers, outcomes, limit_s)
        if error is not None:
            raise self._failure or error
        return [values_of(outcomes)[rank] for rank in sorted(outcomes)]

    async def close(self) -> None:
        """See `Processes.kill`. What runs is lost, a checkpoint that nobody has waited for too."""
        with anyio.CancelScope(shield=True):
            self._failure = self._failure or InfraError(f"the {self.plan.name} group is closed")
            await self._processes.kill(self._places)

    async def _meet(self, until: float) -> None:
        """Rank 0 opens a place to meet on its machine; all join there."""
        limit_s, ranks, actors = self._timeouts.start_s, range(self.plan.num_ranks), self._processes.actors
        self._places = await self._beside("start", lambda actor: actor.locate.remote(), limit_s, until=until)
        host = self._places[0].address

        def open_at(rank: int) -> Any:
            return actors[rank].host.remote(host, limit_s)

        opened = await self._ask("start", open_at, [0], limit_s, until=until)
        local = local_ranks(self._places, self._processes.device)
        meetings = [Meeting(rank, len(ranks), local[rank], host, opened[0]) for rank in ranks]
        device, collective_s = self._processes.device, self._timeouts.collective_s

        def send(rank: int) -> Any:
            return actors[rank].join.remote(meetings[rank], device, collective_s)

        await self._ask("joining the process group", send, ranks, limit_s, until=until)

    async def _load(self, until: float) -> None:
        device, collective_s = self._processes.device, self._timeouts.collective_s
        specs = {plan.role: engine_spec(plan, device=device, collective_s=collective_s) for plan in self.plan.roles}

        def send(rank: int) -> Any:
            return self._processes.actors[rank].load.remote(specs)

        loaded = await self._ask("loading", send, range(self.plan.num_ranks), self._timeouts.start_s, until=until)
        for plan in self.plan.roles:
            self._layouts[plan.role] = [loaded[rank][plan.role] for rank in sorted(loaded)]

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
        self,
        what: str,
        send: Send,
        ranks: Collection[int],
        limit_s: float,
        *,
        until: float | None = None,
        changes_model: bool = True,
    ) -> dict[int, Any]:
        """Send to `ranks` and return each one's value. The first failure is raised as soon as its cause is known.

        Args:
            until: when `limit_s` ends, by `anyio.current_time`; None: it begins now.
        """
        async with self._lock:
            await self._drain()
            if self._failure is not None:
                raise self._gone(what)
            refs = {rank: send(rank) for rank in ranks}
            try:
                answers = {rank: _outcome(ref) for rank, ref in refs.items()}
                outcomes = await self._answers(answers, _left(limit_s, until))
            except anyio.get_cancelled_exc_class():
                self._abandoned = refs
                raise
            error = failure(self.plan.name, what, ranks, outcomes, limit_s)
            if error is not None and self._failure is not None:
                raise self._failure  # it was killed meanwhile, which is why they failed
            if error is not None:
                await self._judge(error, ranks, outcomes, changes_model=changes_model)
                raise error
            return values_of(outcomes)

    async def _answers(self, answers: Mapping[int, Awaitable[Outcome]], limit_s: float) -> dict[int, Outcome]:
        """See `outcomes.gather`. Events that came along become the run's."""
        outcomes = await gather(answers, limit_s)
        for rank, outcome in outcomes.items():
            if isinstance(outcome, Answer) and outcome.events:
                profile.take(f"rank-{self.plan.name}-{rank}", outcome.events)
        return outcomes

    async def _drain(self) -> None:
        """The ranks may still be at a call whose caller was cancelled: wait for them, as long as they may take."""
        if not self._abandoned or self._failure is not None:
            return
        refs, limit_s = self._abandoned, self._timeouts.train_s
        outcomes = await self._answers({rank: _outcome(ref) for rank, ref in refs.items()}, limit_s)
        self._abandoned = {}
        error = failure(self.plan.name, "a cancelled call", refs, outcomes, limit_s)
        if error is not None:
            await self._judge(error, refs, outcomes, changes_model=True)

    async def _judge(
        self, error: AsyncRLError, ranks: Collection[int], outcomes: Mapping[int, Outcome], *, changes_model: bool
    ) -> None:
        """Kill the group unless it is as usable as before."""
        if not usable(ranks, outcomes, changes_model=changes_model):
            await self._condemn(error)

    async def _condemn(self, error: AsyncRLError) -> None:
        self._failure = self._failure or error
        with anyio.CancelScope(shield=True):
            await self._processes.kill(self._places)

    def _gone(self, what: str) -> InfraError:
        return InfraError(f"{what}: the {self.plan.name} group is gone; {AGAIN}", str(self._failure))


class _RoleOfGroup(RoleCalls):
    def __init__(self, group: WorkerGroup, plan: RolePlan) -> None:
        self._group = group
        self._plan = plan

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._group.call(self._plan.role, method, *args, **kwargs)

    async def publish(self, version: int, step: int, *, validate: bool) -> Published:
        return await self._group.publish(self._plan.role, self._plan.weights_dtype, version, step, validate)

    async def republish(self) -> None:
        await self._group.republish()

    async def written(self) -> None:
        await self._group.written(self._plan.role)


def _left(limit_s: float, until: float | None) -> float:
    return limit_s if until is None else max(0.0, until - anyio.current_time())


async def _outcome(ref: Any, *, plain: bool = False) -> Outcome:
    """What a rank has answered; a `Lost` if it died. `plain`: the call answers with a value, not with an `Answer`."""
    try:
        return Answer(await ref, None) if plain else await ref
    except RayTaskError as error:
        return Lost(BugError.wrap("could not take the call", error))
    except RayError as error:
        return Lost(InfraError.wrap(f"died; {AGAIN}", error))
