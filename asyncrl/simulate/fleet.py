"""The engines of a simulated run: calls and their routing, weight updates, validations, and the number of replicas.

call ─▶ `SessionBalancer` ─▶ engine ─▶ `on_end` of each request
                              ▲   └─ a replica that leaves hands its requests back, and they go to another one
publish ─▶ fetch ─▶ pause on every engine (drain first, or not) ─▶ verify ─▶ applied ─▶ validation, if due
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from asyncrl.config.resources.plan import validation_due
from asyncrl.config.schema import Config
from asyncrl.core.autoscaling import ReplicaAutoscaler, ReplicaLoad
from asyncrl.queue.operations import SetAppliedVersion
from asyncrl.simulate.clock import Process, Signal, SimulatedClock
from asyncrl.simulate.engine import SimulatedEngine, SimulatedRequest
from asyncrl.simulate.queue import SimulatedQueue
from asyncrl.simulate.result import SimulationResult
from asyncrl.simulate.trace import Trace
from rollouter.serving.balancing import CallSize, SessionBalancer

OBSERVED_EVERY_S = 1.0
"""Period of the observations on which `rollout.autoscaling` rests, as in the driver."""


class _Call:
    """Requests that were sent to an engine together."""

    __slots__ = ("context", "engine", "left", "name", "requests", "session")

    def __init__(
        self, name: str, session: str, engine: SimulatedEngine, requests: list[SimulatedRequest], context: int
    ) -> None:
        self.name = name
        self.session = session
        self.engine = engine
        self.requests = requests
        self.context = context
        self.left = len(requests)
        """Requests that have not ended."""


class SimulatedFleet:
    """All engines of a run. Pure."""

    def __init__(
        self, clock: SimulatedClock, config: Config, trace: Trace, queue: SimulatedQueue, *, seed: int
    ) -> None:
        self._clock = clock
        self._config = config
        self._trace = trace
        self._queue = queue
        self._balancer = SessionBalancer(random.Random(seed), lambda: clock.now)
        self._calls: dict[SimulatedRequest, _Call] = {}
        self._num_calls = 0
        self._num_engines = 0
        self._factor = 1.0
        self._left: list[SimulatedEngine] = []
        self._left_s = 0.0
        """For how long the engines served that have left."""
        self._published = 0
        self._published_version = Signal(clock)
        self._validate: set[int] = set()
        self._validated_step = 0
        self._validated_tokens = 0.0
        self.on_busy: Callable[[], None] = lambda: None
        """Called when the first engine begins to decode, or the last one stops."""
        self.num_busy = 0
        self._busy: list[tuple[float, int]] = []
        self._replicas_from: list[tuple[float, int]] = []
        self.engines: dict[str, SimulatedEngine] = {}
        for _ in range(config.rollout.num_replicas):
            self._join()

    # -------------------------------------------------------------------------------------------- calls

    def call(
        self, session: str, requests: Sequence[SimulatedRequest], *, context: int = 0, prompt_tokens: float = 0.0
    ) -> None:
        """Send requests to one replica, as one call.

        Args:
            session: conversations of one sample stay on their replica.
            context: tokens of the longest context, for the router.
            prompt_tokens: tokens of contexts that the engine has to compute.
        """
        [replica] = self._balancer.choose(session, self.engines)
        self._num_calls += 1
        call = _Call(f"call {self._num_calls}", session, self.engines[replica], list(requests), context)
        size = CallSize(context, sum(max(0, request.limit - int(request.sampled)) for request in requests))
        self._balancer.reserve(call, session, replica, size)
        self._balancer.sent(call, session, replica, call.name, context=context)
        for request in requests:
            self._calls[request] = call
        call.engine.submit(requests, prompt_tokens=prompt_tokens)

    def abort(self, request: SimulatedRequest) -> float:
        """End a request early; return all tokens that it has sampled. One that has ended is ignored."""
        call = self._calls.get(request)
        if call is None:
            return request.sampled
        sampled = request.sampled + call.engine.abort(request)
        self._finish(request)
        return sampled

    def _finish(self, request: SimulatedRequest) -> None:
        call = self._calls.pop(request)
        call.left -= 1
        if not call.left:
            self._balancer.outstanding.finish(call.engine.name, call.name)

    def _ended(self, request: SimulatedRequest) -> None:
        if request in self._calls:  # otherwise it was aborted at the moment of its end
            self._finish(request)
            request.on_end(request)

    # -------------------------------------------------------------------------------------------- replicas

    def autoscale(self, waits: Callable[[], tuple[bool, bool]]) -> Process:
        """Let the number of replicas follow the run. `waits`: whether the Trainer waits for samples, and whether the
        Rollouter waits for permits."""
        scaler = ReplicaAutoscaler(self._config.rollout.autoscaling.policy, len(self.engines))
        starting = 0
        while self._clock.has_more:  # otherwise nothing can happen any more
            yield OBSERVED_EVERY_S
            trainer_waits, pacing_shut = waits()
            serving = len(self.engines)
            idle = sum(engine.is_empty for engine in self.engines.values()) / serving
            load = ReplicaLoad.now(trainer_waits=trainer_waits, pacing_shut=pacing_shut, idle_replicas=idle)
            wanted = scaler.observe(self._clock.now, load, serving=serving)
            starting = min(starting, max(0, wanted - serving))
            for _ in range(wanted - serving - starting):
                self._clock.after(self._trace.engine.start_s, lambda: self._join_if(scaler.wanted))
                starting += 1
            for engine in list(self.engines.values())[wanted:]:
                self._leave(engine)

    def _join_if(self, wanted: int) -> None:
        if len(self.engines) < wanted:
            self._join()

    def _join(self) -> None:
        """Add an engine, which serves the newest version before its first request."""
        self._num_engines += 1
        name = f"replica {self._num_engines}"
        limit = self._config.rollout.max_num_seqs
        engine = SimulatedEngine(
            self._clock, self._trace.engine, max_num_seqs=limit, name=name, version=self._published
        )  # fmt: skip
        engine.on_busy, engine.on_end = self._count_busy, self._ended
        engine.set_factor(self._factor)
        self.engines[name] = engine
        self._replicas_from.append((self._clock.now, len(self.engines)))

    def _leave(self, engine: SimulatedEngine) -> None:
        """Remove an engine. Its requests continue elsewhere, with the tokens that they have."""
        del self.engines[engine.name]
        self._left.append(engine)
        self._left_s += self._clock.now - engine.since_s
        self._replicas_from.append((self._clock.now, len(self.engines)))
        for call in {one: None for one in self._calls.values() if one.engine is engine}:
            moved = [request for request in call.requests if self._calls.get(request) is call]
            context = 0.0
            for request in moved:
                sampled = engine.abort(request)
                self._finish(request)
                request.sampled, request.tokens = request.sampled + sampled, max(1e-6, request.tokens - sampled)
                context += request.sampled
            self.call(
                call.session, moved, context=call.context + int(context / len(moved)),
                prompt_tokens=call.context + context,
            )  # fmt: skip

    def set_factor(self, factor: float) -> None:
        """Multiply the time of all decoding steps by `factor` from now on."""
        self._factor = factor
        for engine in self.engines.values():
            engine.set_factor(factor)

    def _count_busy(self) -> None:
        was, self.num_busy = self.num_busy, sum(engine.is_busy for engine in self.engines.values())
        self._busy.append((self._clock.now, self.num_busy))
        if bool(was) != bool(self.num_busy):
            self.on_busy()

    def summarize(self, result: SimulationResult) -> None:
        """Add the figures of all engines until now."""
        for engine in self.engines.values():
            engine.account()
        engines = (*self._left, *self.engines.values())
        served_s = self._left_s + sum(self._clock.now - engine.since_s for engine in self.engines.values())
        if served_s:
            result.replicas = served_s / self._clock.now
            result.engines_idle = 1 - sum(engine.busy_s for engine in engines) / served_s
        result.generated_tokens = sum(engine.tokens for engine in engines) - self._validated_tokens
        result.busy, result.replicas_from = self._busy, self._replicas_from

    # -------------------------------------------------------------------------------------------- versions

    def publish(self, version: int, *, step: int) -> None:
        """Let the engines apply a version, which `step` optimizer steps produced."""
        self._published = version
        test_freq = self._config.trainer.test_freq
        if self._config.has_validation and validation_due(test_freq, validated_step=self._validated_step, step=step):
            self._validated_step = step
            self._validate.add(version)
        self._published_version.fire()

    def updates(self) -> Process:
        """Apply the newest version to all engines, and validate the versions that are due."""
        sync = self._trace.sync
        if self._config.has_validation and self._config.trainer.val_before_train:
            yield from self._validation()
        applied = 0
        while True:
            while self._published == applied:
                yield self._published_version
            version = self._published
            yield sync.fetch_s
            yield from self._clock.join([self._load(engine, version) for engine in self.engines.values()])
            yield sync.verify_s
            applied = version
            self._queue.perform(SetAppliedVersion(version, 0))
            due = {one for one in self._validate if one <= version}
            self._validate -= due
            if due:
                yield from self._validation()

    def _load(self, engine: SimulatedEngine, version: int) -> Process:
        drift, sync = self._config.async_training, self._config.weight_sync
        return engine.load(
            version,
            drains=not drift.partial_rollout,
            recomputes=drift.partial_mode == "abort" or sync.clear_kv_cache,
            pause_s=self._trace.sync.pause_s,
        )

    def _validation(self) -> Process:
        """Answer the validation set while training generation continues."""
        costs, limit = self._trace.validation, self._config.rollout.response_length
        left, ended = costs.requests, Signal(self._clock)
        self._validated_tokens += costs.requests * costs.mean_tokens

        def on_end(_request: SimulatedRequest) -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.fire()

        for number in range(costs.requests):
            self.call(
                f"validation {self._published} {number}", [SimulatedRequest(costs.mean_tokens, on_end, limit=limit)]
            )
        while left:
            yield ended
