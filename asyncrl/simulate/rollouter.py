"""The Rollouter of a simulated run: permits, slots, trajectories and their tools, over-sampling, offers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.schema import Config
from asyncrl.core.ports import Admission, QueuedSample
from asyncrl.core.types import DropReason, SampleId, SampleMeta
from asyncrl.queue.operations import AdmitSamples, DropSamples, OfferSamples
from asyncrl.simulate.clock import SimulatedClock, Timer
from asyncrl.simulate.engine import SimulatedRequest
from asyncrl.simulate.fleet import SimulatedFleet
from asyncrl.simulate.queue import SimulatedQueue
from asyncrl.simulate.trace import GroupLengths, RecordedGroup, Trace


class _Trajectory:
    """A trajectory in generation."""

    __slots__ = ("done", "oldest", "request", "sampled", "timer", "turn", "turns")

    def __init__(self, turns: Sequence[tuple[int, float]]) -> None:
        self.turns = turns
        self.turn = 0
        self.sampled = 0.0
        """Tokens of the current turn that an earlier attempt sampled."""
        self.oldest: int | None = None
        self.request: SimulatedRequest | None = None
        self.timer: Timer | None = None
        """The tool or user that answers."""
        self.done = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all its turns."""
        return sum(tokens for tokens, _ in self.turns)

    @property
    def ended_tokens(self) -> int:
        """Tokens of the turns that have ended."""
        return sum(tokens for tokens, _ in self.turns[: self.turn])


class _Generating:
    """A sample in generation."""

    __slots__ = ("has_begun", "newest", "sample_id", "timer", "trajectories")

    def __init__(self, sample_id: SampleId, group: RecordedGroup) -> None:
        self.sample_id = sample_id
        self.trajectories = [_Trajectory(turns) for turns in group]
        self.newest = 0
        self.has_begun = False
        self.timer: Timer | None = None
        """Its first requests, between its start and their calls."""

    def note_versions(self, one: _Trajectory, request: SimulatedRequest) -> None:
        if request.oldest_version >= 0:
            one.oldest = request.oldest_version if one.oldest is None else min(one.oldest, request.oldest_version)
            self.newest = max(self.newest, request.version)


class SimulatedRollouter:
    """Takes samples from their permits to the queue."""

    def __init__(
        self,
        clock: SimulatedClock,
        config: Config,
        trace: Trace,
        *,
        queue: SimulatedQueue,
        fleet: SimulatedFleet,
        seed: int,
    ) -> None:
        self._clock = clock
        self._config = config
        self._trace = trace
        self._queue = queue
        self._fleet = fleet
        self._lengths = GroupLengths(
            trace.lengths,
            limit=config.rollout.response_length,
            per_step=config.trainer.ppo_mini_batch_size,
            seed=seed,
        )
        self._generating: dict[SampleId, _Generating] = {}
        self._suspended: list[_Generating] = []
        """Surplus samples that continue when there is room."""
        self._had_surplus = False
        self._scoring_tokens = 0
        self._since = 0.0
        self._generation_s = 0.0
        self.waits_for_permits = False

    def dispatch(self) -> None:
        """Interrupt what is surplus, and start samples while there are slots and permits."""
        self._interrupt_surplus()
        limit = self._config.rollout.max_concurrent_samples
        while self._suspended and not self._had_surplus and len(self._generating) < limit:
            self._start(self._suspended.pop(0))
        rollout, self.waits_for_permits = self._config.rollout, False
        while (free := limit - len(self._generating)) > 0:
            answer = self._queue.perform(AdmitSamples(free))
            if not isinstance(answer, Admission) or not answer.sample_ids:
                self.waits_for_permits = True
                return
            for sample_id in answer.sample_ids:
                group = self._lengths.of(sample_id.index, rollout.n + rollout.over_sample.trajectories)
                self._start(_Generating(sample_id, group))

    # -------------------------------------------------------------------------------------------- one sample

    def _start(self, sample: _Generating) -> None:
        self._count_generation()
        self._generating[sample.sample_id] = sample
        sample.timer = self._clock.after(self._trace.dispatch.sample_s, lambda: self._submit(sample))

    def _submit(self, sample: _Generating) -> None:
        sample.timer = None
        unfinished = [one for one in sample.trajectories if not one.done]
        requests = [self._request(sample, one) for one in unfinished]
        prompt = self._trace.engine.prompt_tokens
        context = prompt + max(one.ended_tokens + int(one.sampled) for one in unfinished)
        self._fleet.call(
            str(sample.sample_id), requests, context=context, prompt_tokens=0 if sample.has_begun else prompt
        )
        sample.has_begun = True

    def _request(self, sample: _Generating, one: _Trajectory) -> SimulatedRequest:
        one.timer = None
        one.request = SimulatedRequest(
            max(1.0, one.turns[one.turn][0] - one.sampled),
            lambda request: self._turn_ended(sample, one, request),
            limit=max(1, self._config.rollout.response_length - one.ended_tokens - int(one.sampled)),
        )
        return one.request

    def _turn_ended(self, sample: _Generating, one: _Trajectory, request: SimulatedRequest) -> None:
        sample.note_versions(one, request)
        gap_s = one.turns[one.turn][1]
        one.turn, one.sampled, one.request = one.turn + 1, 0.0, None
        if one.turn < len(one.turns):
            one.timer = self._clock.after(gap_s, lambda: self._next_turn(sample, one))
            return
        one.done = True
        if sum(each.done for each in sample.trajectories) >= self._config.rollout.n:
            self._leave(sample)
            self._scoring_tokens += sum(each.num_tokens for each in self._kept(sample))
            self._clock.after(self._trace.dispatch.score_s, lambda: self._offer(sample))
            self.dispatch()

    def _next_turn(self, sample: _Generating, one: _Trajectory) -> None:
        context = self._trace.engine.prompt_tokens + one.ended_tokens
        self._fleet.call(str(sample.sample_id), [self._request(sample, one)], context=context)

    def _leave(self, sample: _Generating, *, keeps: str = "drop") -> None:
        """Free the slot and abort what still runs; `keeps` as `rollout.over_sample.unfinished`."""
        self._count_generation()
        del self._generating[sample.sample_id]
        if sample.timer is not None:
            sample.timer.cancelled = True
            sample.timer = None
        for one in sample.trajectories:
            if one.timer is not None:
                one.timer.cancelled = True
                one.timer = None
            if one.request is not None:
                sampled = self._fleet.abort(one.request)
                sample.note_versions(one, one.request)
                one.sampled = one.sampled + sampled if keeps == "keep_partial" else 0.0
                one.request = None

    def _offer(self, sample: _Generating) -> None:
        done = self._kept(sample)
        oldest = min(one.oldest or 0 for one in done)
        tokens = sum(one.num_tokens for one in done)
        self._scoring_tokens -= tokens
        meta = SampleMeta(sample.sample_id, oldest, sample.newest, len(done), tokens, 0)
        self._queue.perform(OfferSamples((QueuedSample(meta, None),)))

    def _kept(self, sample: _Generating) -> list[_Trajectory]:
        """Return the trajectories of a generated sample that are trained."""
        return [one for one in sample.trajectories if one.done][: self._config.rollout.n]

    def _interrupt_surplus(self) -> None:
        self._had_surplus = self._queue.has_surplus
        if not self._had_surplus:
            return
        keeps = self._config.rollout.over_sample.unfinished
        for sample in list(self._generating.values()):
            self._leave(sample, keeps=keeps)
            if keeps == "drop":
                self._queue.perform(DropSamples(DropReason.SURPLUS, (sample.sample_id,)))
            else:
                self._suspended.append(sample)
        self._had_surplus = self._queue.has_surplus

    # -------------------------------------------------------------------------------------------- figures

    def generation_s(self) -> float:
        """Return for how long a sample was in generation."""
        self._count_generation()
        return self._generation_s

    def _count_generation(self) -> None:
        if self._generating:
            self._generation_s += self._clock.now - self._since
        self._since = self._clock.now

    def end(self) -> float:
        """Abort everything, at the end of the simulation; return the tokens of samples that are neither trained nor
        dropped."""
        state, tokens = self._queue.state, float(self._scoring_tokens)
        tokens += sum(state.entries[one].meta.response_tokens for one in (*state.ready, *state.leased))
        for sample in (*self._generating.values(), *self._suspended):
            for one in sample.trajectories:
                tokens += one.ended_tokens + one.sampled
                if one.request is not None:
                    tokens += self._fleet.abort(one.request)
        return tokens
