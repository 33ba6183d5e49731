"""Engines without models, behind the real `ServeFleet` and its client.

    replica   starting ─▶ serving ─▶ fetching ─▶ pausing ─▶ loading ─▶ serving ─▶ … ─▶ crashed, or hung until ended
              with the newest version of the store                                      ▼
                                                                       a replacement with a new name
    wanted fewer, or its node is drained: serving ─▶ leaving, hands its calls back ─▶ ended

With `rollout.autoscaling`, the number of replicas is that of the real policy on what the replicas push, as in Serve's
controller.

Each process of the Rollouter has its own fleet. Tokens are numbered and never repeat, so a check can tell whether a
response contains all tokens that the Rollouter accepted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import numpy as np
from anyio.abc import TaskGroup
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import TimeStampedValue

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, DeadlineError, EngineCrashError, InfraError, ReplicaLeftError
from asyncrl.core.ports import (
    Accepted,
    ApplyReport,
    GenerateRequest,
    GenerationEvent,
    Publication,
    ReplicaPhase,
    ReplicaReport,
    WantedReplicas,
    WeightsVersion,
)
from asyncrl.core.types import FinishReason, Span, Turn
from asyncrl.weights import object_store
from asyncrl.weights.object_store import ObjectStoreFeed
from benchmarks.chaos.watch import CallWatch
from rollouter.serving import fleet as serving
from rollouter.serving.autoscaling import replica_metrics, wanted_replicas
from rollouter.serving.client import Delta, ReplicaStream
from rollouter.serving.options import rollout_app
from rollouter.serving.replica.weights import OTHER_WEIGHTS
from tests.fuzz.remote import ActorHost, Gate
from tests.fuzz.setup import MAX_REPLICAS
from tests.fuzz.world import FuzzWorld

REPORT_S = 1.0
RECORD_SHARE = 0.6
"""Serve records metrics every 6 s and pushes them every 10 s."""
LOOK_BACK_S = 30.0
"""The age up to which Serve pushes metrics (`look_back_period_s`)."""
POLICY_S = 0.1
"""Period in which Serve's controller calls the policy."""
LEAVE_S = 10.0
"""Seconds after which Serve kills a replica that should leave."""
SERVE_S = 20.0
"""Seconds until a hung replica has failed its health checks."""
EARLIER_RUN = WeightsVersion(3, 40)
"""The version that replicas still serve of another run that was attached to them."""
FLEETS: dict[str, Engines] = {}
"""The engines by the name of their application: those of each launch, or those to which all launches attach."""


@contextmanager
def patched() -> Iterator[None]:
    """Replace Ray Serve."""

    async def replicas_up(app: str, limit_s: float) -> None:
        with anyio.move_on_after(limit_s):
            return await FLEETS[app].until_all_up()
        raise DeadlineError(f"not all replicas were up within {limit_s:g} s")

    serve = SimpleNamespace(get_deployment_handle=lambda *names: None)
    with (
        patch.object(serving, "serve", serve),
        patch.object(serving, "replicas_up", replicas_up),
    ):
        yield
    FLEETS.clear()


class FuzzFleet(serving.ServeFleet):
    """The engines as one process of the Rollouter sees them. It records the accepted tokens of calls that fail."""

    def __init__(self, config: Config, engines: Engines, feed: ObjectStoreFeed, lines: list[Any]) -> None:
        super().__init__(config, namespace=engines.namespace)
        self._engines = engines
        self._feed = feed
        self._watch = CallWatch(lines.append)

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        async with aclosing(self._watch.record_turns(super().generate(requests, session=session), requests)) as events:
            async for event in events:
                yield event

    def _call(self, requests: Sequence[GenerateRequest], *, session: str) -> ReplicaStream:
        return self._watch.record_failures(self._engines.call(requests, session), requests)

    async def _everywhere(self, method: str, *args: Any, limit_s: float) -> list[Any]:
        assert method == "apply_version"
        publication, mode, *_ = args
        return await self._engines.apply(publication, mode, limit_s)

    async def _newest(self, publication: Publication) -> Publication:
        newest = await self._feed.latest()
        return newest if newest is not None and newest.weights_version > publication.weights_version else publication


class FuzzReplica:
    """One engine and its replica, from start to end."""

    def __init__(self, name: str, gate: Gate) -> None:
        self.name = name
        self.gate = gate
        """The gate of its messages to the store, which arrive in order."""
        self.phase: ReplicaPhase = "starting"
        self.phase_since = anyio.current_time()
        self.weights_version = WeightsVersion(0, 0)
        self.calls: list[OpenCall] = []
        self.scope = anyio.CancelScope()
        self.hung = self.ended = self.leaving = False
        self.paused = False
        """True while it generates no tokens."""
        self.end = anyio.Event()
        self.joined = False
        """See `WeightUpdates.join`."""
        self.joining = anyio.Lock()
        self.generated_tokens = 0
        self.wanted_replicas: WantedReplicas | None = None
        """See `StatusReporter.wanted_replicas`."""
        self.recorded: dict[str, list[TimeStampedValue]] = {}
        """The metrics that Serve has recorded in the replica, by name."""
        self.pushed: dict[str, list[TimeStampedValue]] = {}
        """Those that have reached Serve's controller."""

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises `InfraError` if the replica ends meanwhile."""
        with anyio.move_on_after(None if self.hung else seconds):
            await self.end.wait()
        if self.hung and not self.ended:
            await self.end.wait()
        if self.ended:
            raise InfraError(f"{self.name} ended")

    def report(self, num: int) -> ReplicaReport:
        lineage, version = self.weights_version
        now = anyio.current_time()
        return ReplicaReport(
            self.name, "", num, (), self.phase, self.phase_since, lineage, version, len(self.calls),
            self.generated_tokens, now,
        )  # fmt: skip


class OpenCall:
    """A generate call on a replica."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.aborted = False
        self.error: EngineCrashError | None = None
        self.woken = anyio.Event()

    async def sleep(self, seconds: float | None) -> None:
        """Sleep for `seconds`, or until the call is woken. Raises the error that ended the replica."""
        with anyio.move_on_after(seconds):
            await self.woken.wait()
        if self.error is not None:
            raise self.error


class Engines:
    """All replicas of one application, and Serve, which replaces those that end."""

    def __init__(self, world: FuzzWorld, namespace: str, store: ActorHost | None = None) -> None:
        """`store`: that of the launch which starts the replicas; None: launches attach to them."""
        self.namespace = namespace
        self.replicas: list[FuzzReplica] = []
        self.fail_next_apply = False
        self.owners: dict[WeightsVersion, Gate] = {}
        """The process that holds the weights of each published version."""
        self._world = world
        self._config = world.setup.config
        self._store = store
        self._names = itertools.count(1)
        self._tokens = itertools.count(1)
        self._lengths: dict[str, int] = {}
        self._chunk = world.rng.randint(1, 3)
        self._restart_s = world.rng.uniform(0.1, 3.0)
        self._changed = anyio.Event()
        self.wanted = world.setup.num_replicas
        """The number of replicas that Serve keeps up."""
        self._surplus = 0
        """Replicas that have ended and get no successor, because fewer are wanted."""
        FLEETS[rollout_app(self._config, namespace).name] = self

    def start(self, group: TaskGroup) -> None:
        self._group = group
        for _ in range(self.wanted):
            group.start_soon(self._keep_one)
        if self._world.setup.autoscales:
            group.start_soon(self._follow_policy)

    async def _follow_policy(self) -> None:
        """Call the policy as Serve's controller does, with the metrics of the running replicas."""
        state: dict[str, Any] = {}
        while True:
            await anyio.sleep(POLICY_S)
            metrics: dict[str, dict[str, list[TimeStampedValue]]] = {}
            for replica in self.up():
                if not replica.leaving:
                    for name, series in replica.pushed.items():
                        metrics.setdefault(name, {})[replica.name] = series
            context: Any = SimpleNamespace(
                raw_metrics=metrics, target_num_replicas=self.wanted, policy_state=state, current_time=0.0
            )
            wanted, state = wanted_replicas(context)
            if wanted != self.wanted:
                self._scale_to(wanted)

    def _scale_to(self, number: int) -> None:
        """Start replicas, or end some as Serve does: first those that still start, which end without a report."""
        self._world.log(f"Serve runs {number} replicas instead of {self.wanted}")
        more, self.wanted = number - self.wanted, number
        for _ in range(more):
            if self._surplus > 0:
                self._surplus -= 1
            else:
                self._group.start_soon(self._keep_one)
        stay = [replica for replica in self.replicas if not replica.leaving and not replica.ended]
        self._world.rng.shuffle(stay)
        stay.sort(key=lambda replica: replica.phase != "starting")
        for replica in stay[: max(0, -more)]:
            if replica.phase == "starting":
                replica.leaving = True
                self.crash(replica, "it is not needed any more")
            else:
                self._group.start_soon(self._leave, replica)
        self._surplus += max(0, -more - len(stay))

    def change(self, kind: str) -> None:
        """Let a replica join or leave, or replace one whose node is drained."""
        stay = [replica for replica in self.replicas if not replica.leaving and not replica.ended]
        if kind == "join" and self.wanted < MAX_REPLICAS:
            self.wanted += 1
            self._group.start_soon(self._keep_one)
        elif kind == "leave" and self.wanted > 1 and stay:
            self.wanted -= 1
            self._group.start_soon(self._leave, self._world.rng.choice(stay))
        elif kind == "drain" and stay:
            self._group.start_soon(self._drain, self._world.rng.choice(stay))

    async def _drain(self, replica: FuzzReplica) -> None:
        """Start a successor, and let the replica leave once the successor is up or the node goes."""
        self._group.start_soon(self._keep_one)
        with anyio.move_on_after(LEAVE_S):
            while len(self.up()) <= self.wanted:
                await self._changed.wait()
        if replica.ended or replica.leaving:  # its place is taken already, so one of the others is too many
            others = [one for one in self.replicas if not one.leaving and not one.ended]
            if len(others) <= self.wanted:
                return
            replica = self._world.rng.choice(others)
        await self._leave(replica)

    async def _leave(self, replica: FuzzReplica) -> None:
        """See `RolloutServer._await_leave`, and Serve's graceful shutdown."""
        if replica.leaving or replica.ended:
            return
        self._world.log(f"{replica.name} leaves with {len(replica.calls)} calls")
        replica.leaving = True
        self._phase(replica, "leaving")
        with anyio.move_on_after(LEAVE_S):
            if not replica.hung:
                for call in replica.calls:
                    call.aborted = True
                    call.woken.set()
                with anyio.move_on_after(1.0), suppress(InfraError, ActorUnavailableError):
                    number = int(replica.name.partition("-")[2])
                    if self._store is not None:
                        await self._store.handle(replica.gate).report.remote(replica.report(number))
            while replica.calls or replica.hung:
                await self._changed.wait()
        self.crash(replica, "it has left")

    def crash(self, replica: FuzzReplica, why: str = "the engine died") -> None:
        """End the replica with its calls."""
        if replica.ended:
            return
        self._world.log(f"{replica.name} ends: {why}, with {len(replica.calls)} calls")
        replica.ended = True
        replica.end.set()
        replica.gate.kill()
        for call in replica.calls:
            call.error = EngineCrashError(f"{replica.name}: {why}")
            call.error.replica = replica.name
            call.woken.set()
        replica.scope.cancel()
        self._notify()

    def hang(self, replica: FuzzReplica) -> None:
        """Let the replica hang. Its health checks fail after a while."""
        replica.hung = True
        asyncio.get_running_loop().call_later(SERVE_S, self.crash, replica, "Serve has ended it")

    async def attach(self, store: ActorHost) -> None:
        """Let the replicas follow the store of a launch, as `app.attach` does."""
        self._store = store
        await self.until_all_up()
        for replica in self.up():
            replica.weights_version = OTHER_WEIGHTS

    def detach(self) -> None:
        """Serve the last version from now on, because the launch and its store have ended."""
        self._store = None

    async def until_all_up(self) -> None:
        while len(self.up()) < self.wanted:
            await self._changed.wait()

    def up(self) -> list[FuzzReplica]:
        return [replica for replica in self.replicas if replica.phase != "starting" and not replica.ended]

    # ------------------------------------------------------------------------------------------------ one replica

    async def _keep_one(self) -> None:
        while True:
            replica = FuzzReplica(f"replica-{next(self._names)}", Gate())
            self.replicas.append(replica)
            with replica.scope:
                try:
                    await self._live(replica)
                except AsyncRLError as error:
                    self.crash(replica, str(error))
            self.replicas.remove(replica)
            if replica.leaving:
                return
            await anyio.sleep(self._restart_s)
            if self._surplus > 0:
                self._surplus -= 1
                return

    async def _live(self, replica: FuzzReplica) -> None:
        await replica.sleep(0.01)
        await self._catch_up(replica)
        # Serve does not know the replica yet.
        await replica.sleep(self._world.some(0.05))
        self._phase(replica, "serving")
        if self._world.setup.autoscales:
            self._group.start_soon(self._record_metrics, replica)
            self._group.start_soon(self._push_metrics, replica)
        number = int(replica.name.partition("-")[2])
        while True:
            if (host := self._store) is not None:
                store = host.handle(replica.gate)
                with suppress(InfraError):  # the store is being restarted
                    replica.wanted_replicas = await object_store._ask(
                        lambda _, store=store: store.report.remote(replica.report(number)), 5.0, "reporting"
                    )
            await replica.sleep(REPORT_S)

    async def _record_metrics(self, replica: FuzzReplica) -> None:
        with suppress(InfraError):
            while True:
                now = anyio.current_time()
                for name, value in replica_metrics(replica.wanted_replicas).items():
                    replica.recorded.setdefault(name, []).append(TimeStampedValue(now, value))
                await replica.sleep(self._world.setup.push_s * RECORD_SHARE)

    async def _push_metrics(self, replica: FuzzReplica) -> None:
        with suppress(InfraError):
            while True:
                since = anyio.current_time() - LOOK_BACK_S
                replica.pushed = {
                    name: [point for point in series if point.timestamp >= since]
                    for name, series in replica.recorded.items()
                }
                await replica.sleep(self._world.setup.push_s)

    async def _catch_up(self, replica: FuzzReplica) -> None:
        """See `WeightUpdates._catch_up`."""
        if self._store is None:
            replica.weights_version = EARLIER_RUN
            return
        store, lost = self._store.handle(replica.gate), None
        while True:
            newest = await object_store._ask(
                lambda _, lost=lost: store.start_with.remote(60.0, lost), 100.0, "the version to start with"
            )
            if newest is None or newest.weights_version <= replica.weights_version:
                return
            await replica.sleep(self._world.some(0.05))
            if self.owners[newest.weights_version].dead:
                lost = newest.weights_version
            else:
                replica.weights_version = newest.weights_version

    async def _join(self, replica: FuzzReplica) -> None:
        """See `WeightUpdates.join`."""
        async with replica.joining:
            if not replica.joined:
                await self._catch_up(replica)
                replica.joined = True

    def _phase(self, replica: FuzzReplica, phase: ReplicaPhase) -> None:
        if not replica.leaving or phase == "leaving":
            replica.phase, replica.phase_since = phase, anyio.current_time()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # ------------------------------------------------------------------------------------------------ calls

    async def call(self, requests: Sequence[GenerateRequest], session: str) -> AsyncGenerator[Any, None]:
        replica, call = await self._choose(), OpenCall(session)
        replica.calls.append(call)
        try:
            if replica.leaving:
                await call.sleep(0.1)
                yield [Delta(number, _turn([], replica, FinishReason.ABORTED), True) for number in range(len(requests))]
                return
            await self._join(replica)
            yield Accepted(replica.name)
            pending = list(range(len(requests)))
            made = [0 if request.so_far is None else len(request.so_far.response_ids) for request in requests]
            while pending:
                await self._pace(session, replica, call)
                if call.aborted:
                    yield [Delta(number, _turn([], replica, FinishReason.ABORTED), True) for number in pending]
                    return
                if any(self._world.is_poison(requests[number]) for number in pending):
                    self._world.poisoned(session, [call.session for call in replica.calls])
                    self.crash(replica, "poison")
                    continue
                deltas = [self._next_delta(replica, number, requests[number], made) for number in pending]
                pending = [delta.number for delta in deltas if not delta.done]
                yield deltas
        finally:
            replica.calls.remove(call)
            self._notify()

    async def _choose(self) -> FuzzReplica:
        while not (free := [replica for replica in self.up() if replica.phase in ("serving", "fetching")]):
            await self._changed.wait()
        if (leaving := [one for one in self.up() if one.leaving and not one.hung]) and self._world.rng.random() < 0.3:
            return leaving[0]  # the caller has not heard yet that it leaves
        return min(free, key=lambda replica: len(replica.calls))

    async def _pace(self, session: str, replica: FuzzReplica, call: OpenCall) -> None:
        """Wait for the next tokens, or for the end of the call or the replica."""
        if not session.startswith("val") and self._world.straggles(session):
            self._world.log(f"{session} does not end")
            await call.sleep(None)
        await call.sleep(self._world.some(self._world.setup.mean_s))
        while replica.paused and not call.aborted:
            await self._changed.wait()
            await call.sleep(0)
        if replica.hung:
            await call.sleep(None)

    def _next_delta(self, replica: FuzzReplica, number: int, request: GenerateRequest, made: list[int]) -> Delta:
        name = request.request_id.rpartition("-")[0]
        drawn = self._lengths.setdefault(name, self._world.rng.randint(1, self._config.rollout.response_length))
        length = min(drawn, request.sampling["max_tokens"])
        size = min(self._chunk, max(0, length - made[number]))
        made[number] += size
        replica.generated_tokens += size
        done = made[number] >= length
        stop = FinishReason.LENGTH if length >= request.sampling["max_tokens"] else FinishReason.STOP
        ids = list(itertools.islice(self._tokens, size))
        return Delta(number, _turn(ids, replica, stop if done else FinishReason.ABORTED), done)

    # ------------------------------------------------------------------------------------------------ versions

    async def apply(self, publication: Publication, mode: str, limit_s: float) -> list[Any]:
        """Broadcast to every replica that is up, as Serve does."""
        outcomes: list[Any] = []

        async def ask(replica: FuzzReplica) -> None:
            try:
                outcomes.append(await self._apply(replica, publication, mode))
            except InfraError as error:
                outcomes.append(error)

        with anyio.move_on_after(limit_s) as deadline:
            async with anyio.create_task_group() as group:
                for replica in self.up():
                    group.start_soon(ask, replica)
        if deadline.cancelled_caught:
            return [DeadlineError(f"not every replica answered within {limit_s:g} s")]
        return outcomes or [DeadlineError("no replica is up")]

    async def _apply(self, replica: FuzzReplica, publication: Publication, mode: str) -> ApplyReport:
        await replica.sleep(self._world.some(0.03))
        if replica.leaving:
            raise ReplicaLeftError(f"{replica.name} is leaving")
        load_s = 0.0
        if replica.weights_version < publication.weights_version:
            self._phase(replica, "fetching")
            try:
                await replica.sleep(self._world.some(0.03))
                if self.fail_next_apply:
                    self.fail_next_apply = False
                    raise InfraError(f"{replica.name} could not fetch {publication.weights_version}")
                self._fetch(replica, publication)
                self._phase(replica, "pausing")
                await self._pause(replica, mode)
                self._phase(replica, "loading")
                load_s = self._world.some(0.03)
                await replica.sleep(load_s)
                replica.weights_version = max(replica.weights_version, publication.weights_version)
            finally:
                replica.paused = False
                self._phase(replica, "serving")
        lineage, version = replica.weights_version
        return ApplyReport(replica.name, version, 0.0, load_s, load_s, len(replica.calls), True, lineage=lineage)

    def _fetch(self, replica: FuzzReplica, publication: Publication) -> None:
        if self.owners[publication.weights_version].dead:
            raise InfraError(f"{replica.name} could not fetch {publication.weights_version}: its owner is dead")

    async def _pause(self, replica: FuzzReplica, mode: str) -> None:
        if mode == "abort":
            for call in replica.calls:
                call.aborted = True
                call.woken.set()
        while mode == "wait" and replica.calls and not replica.ended:
            await self._changed.wait()
        replica.paused = True
        await replica.sleep(0.001)


def _turn(ids: list[int], replica: FuzzReplica, finish: FinishReason) -> Turn:
    spans = (Span(0, replica.weights_version.version),) if ids else ()
    return Turn(np.array(ids, dtype=np.int32), np.full(len(ids), -0.5, dtype=np.float32), spans, finish)
