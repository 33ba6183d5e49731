"""The Protocols between the parts of a run, and the values in their calls.

The port of the sample queue is in `asyncrl.queue.sample_queue`; this module has its values.

Deadlines: a call that can wait has a `timeout_s` and returns an empty answer when that time is over; the caller reports
what it waits on and calls again. A call without `timeout_s` is answered at once; its adapter bounds it with
`timeouts.call_s` and raises `DeadlineError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from asyncrl.core.failures import EngineCrashError
from asyncrl.core.process_health import EngineLoad, ProcessHealth
from asyncrl.core.trajectory import Trajectory
from asyncrl.core.types import Media, Prompt, Sample, SampleId, SampleMeta, TokenIds, Turn

PartName = Literal["rollouter", "worker", "trainer", "queue", "store", "replica"]
"""Parts that can be restarted while the others continue. If a rank dies, the whole Trainer is restarted."""

# ------------------------------------------------------------------------------------------------ sample queue


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """The number of samples in each state. `fed == running + ready + leased + trained + sum(dropped.values())`,
    always."""

    fed: int = 0
    running: int = 0
    """Admitted and not yet READY, dispatched or not."""
    ready: int = 0
    leased: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By `DropReason` value."""
    replayed: int = 0
    """Samples that became READY from a record (docs/skip.md) instead of from an engine; a requeued one counts twice.
    The sum above contains neither this nor `substituted`."""
    substituted: int = 0
    """Replayed samples whose record belongs to another sample or another request."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


class Admission(NamedTuple):
    """Granted permits. If there are no ids and `closed` is false, no permit became free in time."""

    sample_ids: tuple[SampleId, ...]
    closed: bool
    """The queue is closed and admits no further sample, unless a rewind opens it again."""


class QueuedSample(NamedTuple):
    meta: SampleMeta
    payload: Any
    """The value that `PayloadStore.put` returned: a reference to a file, or to a Ray object."""


class Lease(NamedTuple):
    """Samples handed to the Trainer. If there are none and `ended` is false, not enough became READY in time."""

    lease_id: int
    samples: tuple[QueuedSample, ...]
    ended: bool
    """The stream has ended and no further sample will come; `samples` may hold a last, smaller batch."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The queue state that a run resumes from. Samples that were fed and have not ended (`outstanding`) are fed again
    under the same id."""

    next_index: int
    outstanding: tuple[SampleId, ...]
    counts: SampleCounts
    version: int
    seq: int = 0
    """The last journaled operation that it includes; 0: there was no journal."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    counts: SampleCounts
    version: int
    """Newest version that every replica has applied; pacing is relative to it."""
    ended: bool
    waiting: Mapping[str, int]
    """Number of waiting callers by what they wait on: `permit`, `samples`."""
    lineage: int = 0
    paced_to: int = 0
    """Limit of `fed - dropped` while the replicas serve `version`."""
    total_samples: int | None = None
    """Total number of samples that the run trains on."""
    pid: int = 0
    journal_seq: int = 0
    """Operations on disk; 0: no journal."""
    payload_bytes: int = 0
    """Payload files that no checkpoint covers yet."""
    notices: tuple[str, ...] = ()
    """Messages for users about the journal: a torn tail, damage, and the consequences."""
    closed: bool = False
    """The Trainer has all samples, or the run was stopped; only a rewind opens the queue again."""
    health: ProcessHealth | None = None
    """Health of the queue's process."""
    trained_tokens: int = 0
    """Tokens that the steps of the surviving model have trained, counted once per pass."""


class PayloadStore(Protocol):
    """Stores sample payloads while the queue holds their metadata."""

    async def put(self, sample: Sample) -> Any:
        """Store the sample and return a reference to it; with a journal, return only once the payload is on disk."""

    async def get(self, payloads: Sequence[Any]) -> list[Sample | None]:
        """Return the samples in order; None for one that is lost or damaged, which has been logged with its file and
        cause."""


class TurnLog(Protocol):
    """Keeps completed turns of RUNNING samples, in case the Rollouter dies before their sample is READY."""

    async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        """Record complete turns by their names within the sample, see `rollouter.group.turn_key`."""

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        """Return the turns of a sample that earlier incarnations of the Rollouter completed, by key."""

    async def forget(self, sample_id: SampleId) -> None:
        """Forget the turns of a sample that is READY or DROPPED."""


# ------------------------------------------------------------------------------------------------ weights


class WeightsVersion(NamedTuple):
    """Identifies weights and orders them by creation. When training goes back to a checkpoint, versions continue from
    the checkpoint's version in a new lineage."""

    lineage: int
    """Number of times that training went back to a checkpoint in this run."""
    version: int


@dataclass(frozen=True, slots=True)
class WeightsProbe:
    """Texts and the log-probs that the Trainer computes for them with published weights. An engine that serves these
    weights must compute the same ones."""

    token_ids: tuple[tuple[int, ...], ...]
    """One entry per text, of at least two tokens."""
    log_probs: tuple[tuple[float, ...], ...]
    """Log-probs in nats, at temperature 1, of every token but the first of each text."""


@dataclass(frozen=True, slots=True)
class Publication:
    """The weight store's description of one published version."""

    version: int
    step: int
    """Optimizer steps that produced these weights."""
    num_bytes: int
    checksums: Mapping[str, int]
    """Per layer group (`weights.checksums`); the weights that an engine serves must have the same ones."""
    probe: WeightsProbe | None = None
    """None if the Trainer has not trained text yet, or has already published one and not every version is verified."""
    validate: bool = False
    """The Rollouter evaluates the validation set on this version before it applies a newer one."""
    published_at_s: float = 0.0
    """When it became available: wall clock (`time.time`) of the publisher; 0: not recorded."""
    lineage: int = 0
    sent_bytes: int = 0
    """Bytes that the Trainer stored for it: fewer than `num_bytes` if they are changes (`weight_sync.max_deltas`)."""

    @property
    def weights_version(self) -> WeightsVersion:
        return WeightsVersion(self.lineage, self.version)


WeightBucket: TypeAlias = Mapping[str, NDArray[Any]]
"""Whole tensors of a version that travel together, by Hugging Face's parameter names, in the engine's dtype."""


class WeightUpload(Protocol):
    """A version on its way to the weight store."""

    async def put(self, bucket: WeightBucket) -> int:
        """Store a bucket and return the number of bytes that this took. Its arrays may be changed or freed then."""

    async def publish(self, step: int, *, validate: bool, probe: WeightsProbe | None = None) -> Publication:
        """Publish the buckets as a version in the publisher's lineage. Return once replicas can fetch it, before they
        apply it."""


class WeightPublisher(Protocol):
    """The Trainer's side of the weight store."""

    bucket_bytes: int
    """About the size that buckets should have."""

    def begin(self, version: int) -> WeightUpload:
        """Return the upload of a version."""

    async def republish(self) -> None:
        """Publish the last publication again, for a store that was restarted; do nothing if there is none."""


class WeightFeed(Protocol):
    """The Rollouter's side of the weight store."""

    async def latest(self) -> Publication | None: ...

    async def wait_newer(self, weights_version: WeightsVersion, *, timeout_s: float) -> Publication | None:
        """Return the newest publication above `weights_version`; None: there was none in time."""


GpuTurn = Literal["engines", "wanted", "ranks"]
"""The turn on GPUs that engines and ranks share (`placement: colocated`, `trainer.lend_after_s`). `wanted`: still that
of the engines, and the Trainer waits until they sleep."""


class GpuTurns(Protocol):
    """The turns on GPUs that engines and ranks share, as the weight store keeps them."""

    async def take(self) -> None:
        """Trainer: return once it is the ranks' turn, which begins when the Rollouter grants it."""

    async def give_back(self) -> None:
        """Trainer: let the engines' turn begin. The ranks have moved everything off the GPUs."""

    async def wait(self, *turns: GpuTurn, timeout_s: float) -> GpuTurn | None:
        """Return the turn once it is one of `turns`; None: it was not in time. A restarted store does not know whose
        turn it is until the Trainer reports it."""

    async def grant(self) -> None:
        """Rollouter: let the ranks' turn begin. The engines sleep."""


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """How one replica changed from one version to the next. Durations are in seconds."""

    replica: str
    version: int
    fetch_s: float
    pause_s: float
    """From the last token to the first one under the new version; contains `load_s`."""
    load_s: float
    in_flight: int
    """Requests in the engine when the pause was requested."""
    verified: bool
    lineage: int = 0
    events: tuple[Mapping[str, Any], ...] = ()
    """Profiling events, which the Rollouter takes out of the report and forwards."""
    drain_s: float = 0.0
    """From the request to pause until no token is generated; `pause_s` begins then."""
    verify_s: float = 0.0
    """Duration of the comparison of checksums and log-probs, during which generation continues."""
    mismatch_kl: float | None = None
    """KL in nats per token between the engine's and the Trainer's log-probs for the same weights; None: not
    compared."""
    fallback: str | None = None
    """Why the version came through the object store instead of a GPU broadcast; empty: it came by broadcast, None: it
    was not meant to."""

    @property
    def weights_version(self) -> WeightsVersion:
        return WeightsVersion(self.lineage, self.version)


ReplicaPhase = Literal[
    "starting", "serving", "fetching", "pausing", "loading", "verifying", "sleeping", "leaving", "broken"
]
"""`sleeping`: the ranks have its GPUs (`placement: colocated`). `leaving`: Serve has asked the replica to end, because
fewer are wanted or its node is drained; its requests go on elsewhere."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's report about itself to the weight store: at every change of phase and once a second."""

    replica: str
    node_id: str
    pid: int
    engine_pids: tuple[int, ...]
    """The child processes that vLLM started."""
    phase: ReplicaPhase
    phase_since: float
    """Wall clock (`time.time`)."""
    lineage: int
    version: int
    in_flight: int
    """Requests in the engine."""
    generated_tokens: int
    reported_at: float
    """Wall clock."""
    error: str = ""
    """Why it is `broken`."""
    health: ProcessHealth | None = None
    """Health of the replica's process."""
    engine_health: ProcessHealth | None = None
    """Health of all `engine_pids` together."""
    load: EngineLoad | None = None
    num_uncompared: int = 0
    """Versions in a row whose log-probs the engine was too full to compare with the Trainer's."""


class WantedReplicas(NamedTuple):
    """A decision of the driver about the number of replicas. Later decisions compare greater."""

    decision: int
    """Number of the decision, from 0 for the number at the start of the run."""
    num_replicas: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The weight store's state."""

    pid: int
    newest: WeightsVersion | None
    """None: nothing was published, or the store was restarted since."""
    replicas: tuple[ReplicaReport, ...]
    """The last report of each replica that reported in the last minutes, the oldest report first."""
    knows_newest: bool = True
    """False: the Trainer has not published since the store was restarted."""
    at: float = 0.0
    """Time of this status on the store's wall clock, which the times in `replicas` use, too. See `on_clock` in
    `asyncrl.weights.object_store`."""
    health: ProcessHealth | None = None
    """Health of the store's process."""
    wanted_replicas: WantedReplicas | None = None
    """The driver's last decision that has reached the store; None: there is none, see `rollout.autoscaling`."""
    fallback: str = ""
    """Why the last version went through the object store, if `weight_sync.backend` is `nccl`; empty: it did not."""


# ------------------------------------------------------------------------------------------------ generation


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A request for the next turn of one trajectory."""

    request_id: str
    prompt_ids: TokenIds
    sampling: Mapping[str, Any]
    """Keyword arguments of vLLM's SamplingParams, `max_tokens` included."""
    so_far: Turn | None = None
    """Tokens that an aborted call already produced; the engine continues after them, within the same `max_tokens`."""
    media: tuple[Media, ...] = ()
    """Images and videos, in the order of their placeholders in `prompt_ids`."""
    stream: bool = False
    """Whether a client reads the tokens as they are sampled. The replica then reports them many times a second."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A replica's engine has all requests of the call; if the replica dies from now on, they may be the cause."""

    replica: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No replica has the requests any more, for a reason other than a crash."""


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """The tokens of an unfinished turn so far. `number` is the request's position in its call."""

    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A complete turn. `number` is the request's position in its call."""

    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class EngineCrashed:
    """A replica or its engine died while it had the requests. Asking for the next event tries them again."""

    error: EngineCrashError


GenerationEvent = Accepted | Unplaced | TurnProgress | TurnFinished | EngineCrashed


class EngineFleet(Protocol):
    """The Rollouter's view of all vLLM replicas."""

    def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[GenerationEvent, None]:
        """Run the requests on one replica and yield their events until every turn is finished.

        The iterator resumes aborted requests and requests of a failed engine after the tokens that were reported.
        Closing the iterator aborts the requests; the tokens of the last second may be missing from `TurnProgress` then.

        Args:
            requests: A request whose `so_far` is already complete produces no event.
            session: Keeps a conversation on its replica.

        Raises:
            InfraError: the retry budget is spent: too many tries failed in a row without producing a token.
            DataError: the engine refuses the prompt (over length).
        """

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """Bring every replica to the publication's version, and wake those that sleep (`SleepingFleet`)."""


class SleepingFleet(EngineFleet, Protocol):
    """Replicas that sleep while the ranks use their GPUs (`placement: colocated`, `trainer.lend_after_s`)."""

    async def sleep(self) -> None:
        """Let every replica finish its requests, hold new ones back, and free its GPUs. Replicas on lent GPUs hand
        requests back instead, with their tokens."""

    async def wake(self) -> None:
        """Let every replica that sleeps take its GPUs back, with the version that it served before."""


class SharedGpus(NamedTuple):
    """The Rollouter's side of GPUs that engines and ranks share."""

    turns: GpuTurns
    fleet: SleepingFleet


class LentGpus(NamedTuple):
    """The Rollouter's side of GPUs that the Trainer lends to further engines (`trainer.lend_after_s`)."""

    turns: GpuTurns
    fleet: SleepingFleet
    """These engines."""
    use: Callable[[bool], None]
    """Give them calls, or no further ones. The fleet of the run does this."""


class PromptSource(Protocol):
    """The prompts in feed order: a pure function of data, seed and index, so one integer is enough to resume."""

    def __len__(self) -> int:
        """Return the number of prompts per epoch, after filtering."""

    def at(self, sample_id: SampleId) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a trajectory."""

    reward: float
    """Total, `turn_rewards` included."""
    extra: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    """The parts of `reward` that belong to single turns of the assistant, in order; empty: none do."""
    answer: str | None = None
    """The final answer that a reward function found in the response (`pred`), which votes in maj@k; None: none."""


class RewardScorer(Protocol):
    @property
    def whole_group(self) -> bool:
        """Whether one call of `score` should have all trajectories of a prompt, because it compares them or because
        several calls would cost more than they do. If not, each is scored as soon as it has ended. The answer may
        change from one prompt to the next."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory.

        Raises:
            UserCodeError: the reward function raised, timed out or returned no finite number.
        """
