"""One simulated run: the queue's own operations, driven by simulated engines and a simulated Trainer. Pure.

Every decision about samples is the product's: permits and over-sampling (`asyncrl.core.staleness.Pacing`), leases,
drops of stale samples and sample counts (`asyncrl.queue.operations` on a `QueueCore` without a journal), mini-batches
(`trainer.batches`), due validations (`asyncrl.config.plan`). Only what takes time is simulated:

    permit ─▶ slot ─▶ decode on a replica, tools ─▶ score ─▶ offer ─▶ lease ─▶ experience ─▶ steps ─▶ publish
                                     ▲                                                               │
                                     └───────── fetch, pause (drain first, or not), verify ◀─────────┘

With `mode: sync` both sides take turns, so the same simulation stands for a system in which they share their GPUs
(colocated): give the trace the speeds of all GPUs, and the costs of changing sides as `lease_s` and `sync`.

Failures, restarts and the spread of speeds over replicas are not simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.config.plan import validation_due
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import Admission, Lease, QueuedSample
from asyncrl.core.staleness import Pacing, staleness
from asyncrl.core.types import DropReason, SampleId, SampleMeta
from asyncrl.queue.operations import (
    WAIT,
    AdmitSamples,
    CommitSamples,
    DropSamples,
    LeaseSamples,
    OfferSamples,
    QueueCore,
    QueueOptions,
    SetAppliedVersion,
)
from asyncrl.queue.state import QueueState
from asyncrl.simulate.clock import Process, Signal, SimulatedClock, Timer
from asyncrl.simulate.replica import SimulatedReplica, SimulatedRequest
from asyncrl.simulate.trace import GroupLengths, RecordedGroup, Trace, speed_of
from trainer.schedule import mini_batches

_PROMPTS_PER_EPOCH = 2**40
_FILTER_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One optimizer step. Times are in seconds since the start of the run."""

    end_s: float
    wait_s: float
    """Wait for the samples of its lease; 0 in later steps of a lease."""
    samples: int
    tokens: int


@dataclass(slots=True)
class SimulationResult:
    """What happened in a simulated run. Shares refer to `wall_s`."""

    wall_s: float = 0.0
    """From the first permit to the end of the last step."""
    steps: list[SimulatedStep] = field(default_factory=list)
    trainer_waits: float = 0.0
    """Share of time in which the Trainer waited for samples."""
    rollouter_idle: float = 0.0
    """Share of time in which no sample was in generation."""
    engines_idle: float = 0.0
    """Share of time in which an engine decoded nothing, mean over the replicas."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained samples by their staleness in versions at the lease."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped samples by reason."""
    fed: int = 0
    trained: int = 0
    in_flight: int = 0
    """Samples that were fed and neither trained nor dropped at the end."""
    versions: int = 0
    trained_tokens: int = 0
    generated_tokens: float = 0.0
    """Sampled tokens, without those of validations."""
    wasted_tokens: float = 0.0
    """Sampled tokens of samples and trajectories that were dropped."""
    busy: list[tuple[float, float]] = field(default_factory=list)
    """Share of engines that decode, from each of these times on."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each wait of the Trainer."""

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.wall_s / max(1, len(self.steps))

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.trained_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    @property
    def wasted(self) -> float:
        """Share of the generated tokens that were dropped."""
        return max(0.0, self.wasted_tokens / self.generated_tokens) if self.generated_tokens else 0.0


class _Trajectory:
    """A trajectory in generation."""

    __slots__ = ("done", "number", "oldest", "request", "sampled", "timer", "turn", "turns")

    def __init__(self, number: int, turns: Sequence[tuple[int, float]]) -> None:
        self.number = number
        self.turns = turns
        self.turn = 0
        self.sampled = 0.0
        """Tokens of the current turn that earlier attempts sampled."""
        self.oldest: int | None = None
        self.request: SimulatedRequest | None = None
        self.timer: Timer | None = None
        """The tool or user that answers."""
        self.done = False

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)


class _Generating:
    """A sample in generation."""

    __slots__ = ("began", "newest", "replica", "sample_id", "trajectories")

    def __init__(self, sample_id: SampleId, group: RecordedGroup) -> None:
        self.sample_id = sample_id
        self.trajectories = [_Trajectory(number, turns) for number, turns in enumerate(group)]
        self.replica: SimulatedReplica | None = None
        self.newest = 0
        self.began = False
        """Whether its prompt was computed before."""


class RunSimulation:
    """Simulates one configuration with one trace. `run()` is called once.

    Args:
        steps: optimizer steps to simulate.
        total_steps: optimizer steps of the run, at least `steps`. The last steps of a run differ from the others,
            because no further sample is generated meanwhile; None: `steps`.

    Raises:
        ConfigError: the configuration does something that takes time and is not simulated.
    """

    def __init__(
        self, config: Config, trace: Trace, *, steps: int, total_steps: int | None = None, seed: int = 0
    ) -> None:
        if config.needs_critic:
            raise ConfigError("algorithm.adv_estimator = gae: the critic's time is not simulated; simulate with grpo")
        self._config = config
        self._trace = trace
        self._total = math.ceil((total_steps or steps) / config.trainer.ppo_epochs) * config.trainer.ppo_mini_batch_size
        self._total_steps = steps
        self._seed = seed
        drift, rollout, workers = config.async_training, config.rollout, config.trainer.num_workers
        pacing = Pacing(
            config.samples_per_version,
            drift.staleness_threshold,
            total_samples=self._total,
            over_sample=rollout.over_sample.samples,
        )
        options = QueueOptions(
            _PROMPTS_PER_EPOCH, pacing, drift.max_staleness, drift.stale_action, in_feed_order=drift.deterministic
        )
        state = QueueState.begin(_PROMPTS_PER_EPOCH, keeps_payloads=False, total_samples=self._total)
        self._queue = QueueCore(options, state, None)
        self._clock = SimulatedClock()
        self._lengths = GroupLengths(trace.lengths, limit=rollout.response_length, seed=seed)
        self._replicas = [
            SimulatedReplica(self._clock, trace.engine, max_num_seqs=rollout.max_num_seqs, name=name)
            for name in range(rollout.num_replicas)
        ]
        for replica in self._replicas:
            replica.on_busy = self._engines_changed
        self._update_speed = speed_of(trace.trainer.update_tokens_per_s, workers)
        # Without the proximal policy's log-probs, the reference and a reward model, there is no forward pass.
        bypasses = config.algorithm.rollout_correction.bypass_mode and not config.needs_reference
        skips = bypasses and config.reward_model.placement != "worker"
        experience = None if skips else trace.trainer.experience_tokens_per_s
        self._experience_speed = speed_of(experience, workers) if experience else None
        self._num_busy = 0
        self._generating: dict[SampleId, _Generating] = {}
        self._suspended: list[_Generating] = []
        self._scoring_tokens = 0
        self._committed_tokens = 0
        self._validated_tokens = 0.0
        self._generation_since = 0.0
        self._generation_s = 0.0
        self._changed = Signal(self._clock)
        self._settling = False
        self._had_surplus = False
        self._published = 0
        self._validate: set[int] = set()
        self._new_version = Signal(self._clock)
        self._computing = False
        self._computed = Signal(self._clock)
        self._left_s = 0.0
        """Work of the Trainer's current computation that is left, without contention."""
        self._compute_since = 0.0
        self._compute_timer: Timer | None = None
        self._ended = False
        self.result = SimulationResult()

    def run(self) -> SimulationResult:
        """Simulate the run to the end of its last step.

        Raises:
            ConfigError: the run would wait forever.
        """
        clock, result = self._clock, self.result
        clock.start(self._updates())
        clock.start(self._trainer())
        self._settle()
        if not clock.run(lambda: self._ended):
            counts = self._queue.state.counts()
            raise ConfigError(
                f"the simulated run stops after {len(result.steps)} steps: {counts.running} samples are in generation, "
                f"{counts.ready} are ready, and a lease needs {self._config.samples_per_lease}. Check "
                "async_training.max_staleness and rollout.max_concurrent_samples"
            )
        wall = result.wall_s = clock.now
        counts = self._queue.state.counts()
        self._count_generation()
        busy = [replica.busy_s for replica in self._replicas]
        result.trainer_waits = sum(step.wait_s for step in result.steps) / wall if wall else 0.0
        result.rollouter_idle = 1 - self._generation_s / wall if wall else 0.0
        result.engines_idle = 1 - sum(busy) / len(busy) / wall if wall else 0.0
        result.generated_tokens = sum(replica.tokens for replica in self._replicas) - self._validated_tokens
        result.wasted_tokens = result.generated_tokens - self._committed_tokens - self._tokens_in_flight()
        result.fed, result.trained = counts.fed, counts.trained
        result.in_flight = counts.running + counts.ready + counts.leased
        result.dropped = Counter({reason: number for reason, number in counts.dropped.items() if number})
        result.versions = self._published
        return result

    # -------------------------------------------------------------------------------------------- the queue

    def _settle_soon(self) -> None:
        """Let waiting calls see a change of the queue, once everything that happens now has happened."""
        if not self._settling:
            self._settling = True
            self._clock.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._changed.fire()
        self._interrupt_surplus()
        self._dispatch()

    def _dispatch(self) -> None:
        """Start samples while there are slots and permits."""
        if self._ended:
            return
        limit = self._config.rollout.max_concurrent_samples
        while self._suspended and not self._had_surplus and len(self._generating) < limit:
            self._start(self._suspended.pop(0))
        while (free := limit - len(self._generating)) > 0:
            answer = AdmitSamples(free).perform(self._queue, retried=False)
            if answer is WAIT:
                return
            assert isinstance(answer, Admission)
            if not answer.sample_ids:
                return
            rollout = self._config.rollout
            for sample_id in answer.sample_ids:
                group = self._lengths.of(sample_id.index, rollout.n + rollout.over_sample.trajectories)
                self._start(_Generating(sample_id, group))

    # -------------------------------------------------------------------------------------------- generation

    def _start(self, sample: _Generating) -> None:
        self._count_generation()
        self._generating[sample.sample_id] = sample
        self._clock.after(self._trace.dispatch.sample_s, lambda: self._submit(sample))

    def _submit(self, sample: _Generating) -> None:
        if sample.sample_id not in self._generating:
            return
        # As the router: a sample stays on its replica, and a new one goes to the one with the least outstanding work.
        if sample.replica is None:
            sample.replica = min(self._replicas, key=lambda replica: (replica.outstanding, replica.name))
        sample.replica.outstanding += len(sample.trajectories)
        requests = [self._request(sample, one) for one in sample.trajectories if not one.done]
        prompt = 0 if sample.began else self._trace.engine.prompt_tokens
        sample.began = True
        sample.replica.submit(requests, prompt_tokens=prompt)

    def _request(self, sample: _Generating, one: _Trajectory) -> SimulatedRequest:
        one.timer = None
        one.request = SimulatedRequest(
            max(1.0, one.turns[one.turn][0] - one.sampled), lambda request: self._turn_ended(sample, one, request)
        )
        return one.request

    def _turn_ended(self, sample: _Generating, one: _Trajectory, request: SimulatedRequest) -> None:
        if sample.replica is None or one.request is not request:
            return  # aborted at the moment of its end
        self._note_versions(sample, one, request)
        gap_s = one.turns[one.turn][1]
        one.turn, one.sampled, one.request = one.turn + 1, 0.0, None
        if one.turn < len(one.turns):
            replica = sample.replica
            one.timer = self._clock.after(gap_s, lambda: replica.submit([self._request(sample, one)]))
            return
        one.done = True
        if sum(each.done for each in sample.trajectories) >= self._config.rollout.n:
            self._leave(sample)
            score_s = self._trace.dispatch.score_s
            self._scoring_tokens += sum(each.num_tokens for each in self._kept(sample))
            self._clock.after(score_s, lambda: self._offer(sample))
            self._settle_soon()

    def _note_versions(self, sample: _Generating, one: _Trajectory, request: SimulatedRequest) -> None:
        if request.oldest_version >= 0:
            one.oldest = request.oldest_version if one.oldest is None else min(one.oldest, request.oldest_version)
            sample.newest = max(sample.newest, request.version)

    def _leave(self, sample: _Generating, *, keeps: str = "drop") -> None:
        """Free the slot and abort what still runs; `keeps` as `rollout.over_sample.unfinished`."""
        self._count_generation()
        del self._generating[sample.sample_id]
        if sample.replica is None:
            return
        sample.replica.outstanding -= len(sample.trajectories)
        for one in sample.trajectories:
            if one.timer is not None:
                one.timer.cancelled = True
                one.timer = None
            if one.request is not None:
                sampled = sample.replica.abort(one.request)
                self._note_versions(sample, one, one.request)
                one.sampled = one.sampled + sampled if keeps == "keep_partial" else 0.0
                one.request = None

    def _offer(self, sample: _Generating) -> None:
        done = self._kept(sample)
        oldest = min(one.oldest or 0 for one in done)
        tokens = sum(one.num_tokens for one in done)
        self._scoring_tokens -= tokens
        meta = SampleMeta(sample.sample_id, oldest, sample.newest, len(done), tokens, 0)
        OfferSamples((QueuedSample(meta, None),)).perform(self._queue, retried=False)
        self._settle_soon()

    def _kept(self, sample: _Generating) -> list[_Trajectory]:
        """Return the trajectories of a generated sample that are trained."""
        return [one for one in sample.trajectories if one.done][: self._config.rollout.n]

    def _tokens_in_flight(self) -> float:
        """Return the tokens of samples that are neither trained nor dropped, at the end of the simulation."""
        state, tokens = self._queue.state, float(self._scoring_tokens)
        tokens += sum(state.entries[one].meta.response_tokens for one in (*state.ready, *state.leased))
        for sample in (*self._generating.values(), *self._suspended):
            for one in sample.trajectories:
                tokens += sum(length for length, _ in one.turns[: one.turn]) + one.sampled
                if one.request is not None and sample.replica is not None:
                    tokens += sample.replica.abort(one.request)
        return tokens

    def _interrupt_surplus(self) -> None:
        self._had_surplus = self._queue.has_surplus
        if not self._had_surplus:
            return
        keeps = self._config.rollout.over_sample.unfinished
        for sample in list(self._generating.values()):
            self._leave(sample, keeps=keeps)
            if keeps == "drop":
                DropSamples(DropReason.SURPLUS, (sample.sample_id,)).perform(self._queue, retried=False)
            else:
                self._suspended.append(sample)
        if keeps == "drop":
            self._had_surplus = self._queue.has_surplus

    def _count_generation(self) -> None:
        if self._generating:
            self._generation_s += self._clock.now - self._generation_since
        self._generation_since = self._clock.now

    # -------------------------------------------------------------------------------------------- training

    def _trainer(self) -> Process:
        config, clock, costs = self._config, self._clock, self._trace.trainer
        version = trained = validated = 0
        epochs, size = config.trainer.ppo_epochs, config.trainer.ppo_mini_batch_size
        while trained < self._total and len(self.result.steps) < self._total_steps:
            wanted = min(
                config.samples_per_lease, (version + 1) * config.samples_per_version - trained, self._total - trained
            )
            began = clock.now
            leases: list[tuple[int, SampleMeta]] = []
            yield from self._lease(leases, wanted, version)
            wait_s = clock.now - began
            self.result.waits.append((began, clock.now))
            yield costs.lease_s
            metas = [meta for _, meta in leases]
            if self._experience_speed:
                yield from self._compute(sum(meta.response_tokens for meta in metas) / self._experience_speed)
            batches = mini_batches(range(len(metas)), size=size, epochs=epochs, seed=trained)
            for number, rows in enumerate(batches[: self._total_steps - len(self.result.steps)]):
                tokens = sum(metas[row].response_tokens for row in rows)
                yield from self._compute(costs.step_s + tokens / self._update_speed)
                self.result.trained_tokens += tokens
                is_first_pass = number < math.ceil(len(metas) / size)
                if is_first_pass:
                    for row in rows:
                        lease_id, meta = leases[row]
                        CommitSamples(lease_id, (meta.sample_id,)).perform(self._queue, retried=False)
                        self.result.staleness[staleness(version, meta.oldest_version)] += 1
                        self._committed_tokens += meta.response_tokens
                    trained += len(rows)
                step = len(self.result.steps) + 1
                if number == len(batches) - 1 and trained >= (version + 1) * config.samples_per_version:
                    yield from self._compute(self._trace.sync.publish_s)
                    version = self._published = version + 1
                    if validation_due(config.trainer.test_freq, validated_step=validated, step=step):
                        validated = step
                        self._validate.add(version)
                    self._new_version.fire()
                self.result.steps.append(SimulatedStep(clock.now, wait_s, len(rows) if is_first_pass else 0, tokens))
                wait_s = 0.0
                if config.trainer.save_freq > 0 and step % config.trainer.save_freq == 0:
                    yield costs.checkpoint_s
        self._ended = True

    def _lease(self, leases: list[tuple[int, SampleMeta]], wanted: int, version: int) -> Process:
        """Lease samples until there are as many as wanted, and drop those that are filtered."""
        while len(leases) < wanted:
            before = self._queue.num_recorded
            answer = LeaseSamples(wanted - len(leases), version).perform(self._queue, retried=False)
            if answer is WAIT:
                if self._queue.num_recorded > before:  # stale samples were dropped, which frees permits
                    self._settle_soon()
                yield self._changed
                continue
            assert isinstance(answer, Lease)
            for queued in answer.samples:
                if self._is_filtered(queued.meta.sample_id.index):
                    DropSamples(DropReason.FILTERED, (queued.meta.sample_id,)).perform(self._queue, retried=False)
                else:
                    leases.append((answer.lease_id, queued.meta))
            self._settle_soon()

    def _is_filtered(self, index: int) -> bool:
        """Whether the sample is filtered: evenly spread over feed indices, in an order that the seed decides."""
        spread = ((index + self._seed) * _FILTER_SEED * 0.6180339887498949) % 1.0
        return spread < self._trace.dispatch.filtered

    def _compute(self, work_s: float) -> Generator[Signal, None, None]:
        """Let the Trainer compute for this time, which contention with engines makes longer."""
        if work_s <= 0:
            return
        self._computing, self._left_s, self._compute_since = True, work_s, self._clock.now
        self._contend()
        yield self._computed
        self._computing = False
        self._contend()

    def _contend(self) -> None:
        """Set the speeds of both sides by whether the other one works."""
        slow = self._trace.contention.engine if self._computing else 1.0
        for replica in self._replicas:
            replica.set_factor(slow)
        self._schedule_compute()

    def _engines_changed(self) -> None:
        was, self._num_busy = self._num_busy, sum(replica.is_busy for replica in self._replicas)
        self.result.busy.append((self._clock.now, self._num_busy / len(self._replicas)))
        if self._computing and bool(was) != bool(self._num_busy):
            elapsed = self._clock.now - self._compute_since
            self._left_s = max(0.0, self._left_s - elapsed / (self._trace.contention.trainer if was else 1.0))
            self._compute_since = self._clock.now
            self._schedule_compute()

    def _schedule_compute(self) -> None:
        if self._compute_timer is not None:
            self._compute_timer.cancelled = True
            self._compute_timer = None
        if self._computing:
            slow = self._trace.contention.trainer if self._num_busy else 1.0
            self._compute_timer = self._clock.after(self._left_s * slow, self._computed.fire)

    # -------------------------------------------------------------------------------------------- versions

    def _updates(self) -> Process:
        """Apply the newest version to all replicas, and validate the versions that are due."""
        sync = self._trace.sync
        if self._config.has_validation and self._config.trainer.val_before_train:
            yield from self._validation()
        applied = 0
        while True:
            while self._published == applied:
                yield self._new_version
            version = self._published
            yield sync.fetch_s
            loads = _Join(self._clock, [self._load(replica, version) for replica in self._replicas])
            yield from loads.wait()
            yield sync.verify_s
            applied = version
            SetAppliedVersion(version, 0).perform(self._queue, retried=False)
            self._settle_soon()
            due = {one for one in self._validate if one <= version}
            self._validate -= due
            if due:
                yield from self._validation()

    def _load(self, replica: SimulatedReplica, version: int) -> Process:
        drift, sync = self._config.async_training, self._config.weight_sync
        return replica.load(
            version,
            drains=not drift.partial_rollout,
            recomputes=drift.partial_mode == "abort" or sync.clear_kv_cache,
            pause_s=self._trace.sync.pause_s,
        )

    def _validation(self) -> Process:
        """Answer the validation set, spread over the replicas, while training generation continues."""
        costs = self._trace.validation
        if not costs.requests:
            return
        left, ended = costs.requests, Signal(self._clock)
        self._validated_tokens += costs.requests * costs.mean_tokens

        def on_end(_request: SimulatedRequest) -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.fire()

        for number, replica in enumerate(self._replicas):
            share = len(range(number, costs.requests, len(self._replicas)))
            if share:
                replica.submit([SimulatedRequest(costs.mean_tokens, on_end) for _ in range(share)])
        while left:
            yield ended


class _Join:
    """Waits until several processes have ended."""

    def __init__(self, clock: SimulatedClock, processes: Sequence[Process]) -> None:
        self._left = len(processes)
        self._ended = Signal(clock)
        for process in processes:
            clock.start(self._watched(process))

    def _watched(self, process: Process) -> Process:
        yield from process
        self._left -= 1
        self._ended.fire()

    def wait(self) -> Process:
        while self._left:
            yield self._ended


def as_numbers(result: SimulationResult) -> Mapping[str, float | int | dict[str, int]]:
    """Return the figures of a result as they appear in tables and JSON. Shares are in [0, 1]."""
    return {
        "wall_s": round(result.wall_s, 3),
        "steps": len(result.steps),
        "step_s": round(result.step_s, 4),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "trainer_waits": round(result.trainer_waits, 4),
        "rollouter_idle": round(result.rollouter_idle, 4),
        "engines_idle": round(result.engines_idle, 4),
        "mean_staleness": round(result.mean_staleness, 3),
        "max_staleness": result.max_staleness,
        "dropped": dict(sorted(result.dropped.items())),
        "wasted": round(result.wasted, 4),
        "versions": result.versions,
    }
