"""The Protocols between the parts. Everything the parts know of each other is on this page.

Deadlines: a call that can wait takes `timeout_s` and answers "nothing yet" when it runs out; the caller says what it
waits on and calls again. A call without `timeout_s` answers at once; its adapter bounds it with `timeouts.call_s` and
raises `DeadlineError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from numpy.typing import NDArray

from asyncrl.failures import EngineCrashError
from asyncrl.health.facts import EngineLoad, ProcessHealth
from asyncrl.trajectory import Trajectory
from asyncrl.types import DropReason, Media, Prompt, Sample, SampleId, SampleMeta, TokenIds, Turn

PartName = Literal["rollouter", "trainer", "queue", "store", "replica"]
"""What can be restarted while the rest lives on. A rank that dies takes the Trainer with it."""

# ------------------------------------------------------------------------------------------------ sample queue


@dataclass(frozen=True, slots=True)
class Books:
    """The ledger's counters. `fed == running + ready + leased + trained + sum(dropped.values())`, always."""

    fed: int = 0
    running: int = 0
    """Admitted and not yet READY, dispatched or not."""
    ready: int = 0
    leased: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    """By `DropReason` value."""
    replayed: int = 0
    """Samples that became READY out of a record (docs/skip.md) and not from an engine; one that was fed again counts
    again. Beside the sum, as is `substituted`."""
    substituted: int = 0
    """Of these, those whose record is of another sample or of something else than was asked."""

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


class Admission(NamedTuple):
    """Permits granted. No ids and not `closed`: none came free within the time given."""

    sample_ids: tuple[SampleId, ...]
    closed: bool
    """Nothing will ever be admitted again."""


class QueuedSample(NamedTuple):
    meta: SampleMeta
    payload: Any
    """What `PayloadStore.put` returned (a Ray object reference, in a Ray run)."""


class Lease(NamedTuple):
    """Samples handed to the Trainer. No samples and not `ended`: not enough READY ones within the time given."""

    lease_id: int
    samples: tuple[QueuedSample, ...]
    ended: bool
    """The stream has ended and no further sample will come; `samples` may hold a last, smaller batch."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """Enough to go on after a restart: what was fed and has not reached its end is fed again under the same id."""

    next_index: int
    outstanding: tuple[SampleId, ...]
    books: Books
    version: int
    seq: int = 0
    """The journal's last transition in it; 0: there was no journal."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    books: Books
    version: int
    """Newest version that every replica has applied: what pacing counts from."""
    ended: bool
    waiting: Mapping[str, int]
    """Parked callers by what they wait on: `permit`, `samples`."""
    lineage: int = 0
    paced_to: int = 0
    """What `fed - dropped` may reach while the replicas serve `version`."""
    total_samples: int | None = None
    """What the run will train on in all."""
    pid: int = 0
    journal_seq: int = 0
    """Transitions on disk; 0: no journal."""
    payload_bytes: int = 0
    """Payload files that no checkpoint covers yet."""
    told: tuple[str, ...] = ()
    """What people should know of how the journal was found: a torn tail, damage, and what follows from it."""
    closed: bool = False
    """The Trainer has what it needs, or the run was stopped; only a rewind opens it again."""
    health: ProcessHealth | None = None
    """Of its process."""


class SampleQueue(Protocol):
    """The ledger's only door. Every method is a transition or a question; an illegal transition raises `BugError`."""

    async def admit(self, max_samples: int, *, timeout_s: float) -> Admission:
        """Wait for permits and feed up to `max_samples` samples: fresh RUNNING ids in feed order."""

    async def enough(self, known: bool, *, timeout_s: float) -> bool:
        """With over-sampling: whether as many are done as may be trained under the version that is applied, while
        others are running, which are surplus. Waits as long as that is what is `known`."""

    async def offer(self, meta: SampleMeta, payload: Any) -> None:
        """RUNNING → READY. Never waits: the permit already holds the place."""

    async def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        """Any live state → DROPPED."""

    async def lease(self, num_samples: int, *, trainer_version: int, timeout_s: float) -> Lease:
        """Wait for `num_samples` READY samples and lease them; if configured, too stale ones are dropped first."""

    async def commit(self, lease_id: int, sample_ids: Sequence[SampleId]) -> None:
        """LEASED → TRAINED for these samples of the lease: their gradient is in an optimizer step."""

    async def release(self, lease_id: int) -> None:
        """Whatever of the lease is not committed: LEASED → READY."""

    async def redo(self, sample_id: SampleId) -> None:
        """READY or LEASED → to be fed again, under the same id: its payload is lost or damaged."""

    async def set_applied_version(self, version: int, *, lineage: int = 0) -> None:
        """Every replica serves `version` now: opens the staleness gate. Of an older lineage: nothing happens."""

    async def close(self) -> None:
        """The run ends: everything live becomes DROPPED(shutdown); whoever waits is told."""

    async def mark(self, step: int) -> QueueSnapshot:
        """The books as the checkpoint of `step`, begun now, holds them; `QueueControl.rewind` goes back to here."""

    async def confirm(self, step: int) -> None:
        """The checkpoint of `step` is written, and about to be given its name.

        Raises:
            FencedError: training has gone back behind its mark, or the caller was replaced: it is of another future,
                and nobody may take it for the run's newest.
        """

    async def covered(self, step: int) -> None:
        """The checkpoint of `step` is on disk: payloads of what had ended at its mark are not needed any more."""

    async def status(self) -> QueueStatus: ...


class QueueControl(Protocol):
    """What only the supervisor does. Both are idempotent: a second call with the same numbers changes nothing."""

    async def attach(self, part: PartName, incarnation: int) -> None:
        """A new incarnation of a part begins; calls of older ones raise `FencedError` from now on.

        What the old one held goes back: of the Rollouter, RUNNING → to be fed again, first, and READY as well where
        payloads live no longer than the process that made them; of the Trainer, LEASED → READY.
        """

    async def rewind(self, step: int, *, version: int, lineage: int, total_samples: int | None) -> None:
        """The Trainer goes on from its checkpoint of `step` (0: from the start), which holds `version`.

        What was trained after that checkpoint's mark, and what is leased, is READY again at its place in completion
        order, or is fed again where there is no payload. What was dropped stays dropped, but for `shutdown`. The gate
        goes back to `version`. A closed queue is open again; a Rollouter that was generating when it was closed is
        refused from now on.
        """


class PayloadStore(Protocol):
    """Where sample payloads live while the queue holds their metadata."""

    async def put(self, sample: Sample) -> Any:
        """Returns once the payload is as durable as the run's journal promises."""

    async def get(self, payloads: Sequence[Any]) -> list[Sample | None]:
        """In order. None: that one is lost or damaged, which has been logged with its file and cause."""


class TurnLog(Protocol):
    """Completed turns of RUNNING samples, kept for the case that the Rollouter dies before their sample is READY."""

    async def record(self, sample_id: SampleId, key: str, turn: Turn) -> None:
        """`turn` is complete. `key` names it within the sample: `0` to `n-1`, `baseline`."""

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        """What earlier incarnations of the Rollouter completed of a sample that is fed again, by key."""

    async def forget(self, sample_id: SampleId) -> None:
        """It is READY or DROPPED: its turns are not needed any more."""


# ------------------------------------------------------------------------------------------------ weights


class Edition(NamedTuple):
    """Which weights, in the order in which they came to be: versions count on from a checkpoint's when training goes
    back to it, in a lineage of their own."""

    lineage: int
    """How often training went back to a checkpoint in this run."""
    version: int


@dataclass(frozen=True, slots=True)
class Publication:
    """What the store says of one published version."""

    version: int
    step: int
    """Optimizer steps behind these weights."""
    num_bytes: int
    checksums: Mapping[str, int]
    """Per layer group (`weights.checksums`); what an engine serves must give the same."""
    validate: bool = False
    """The Rollouter evaluates the validation set on this version before it applies a newer one."""
    published_at_s: float = 0.0
    """When it could be fetched: wall clock (`time.time`) of the publisher; 0: not recorded."""
    lineage: int = 0

    @property
    def edition(self) -> Edition:
        return Edition(self.lineage, self.version)


class WeightPublisher(Protocol):
    """The Trainer's side of the weight store."""

    async def publish(
        self, version: int, step: int, tensors: Mapping[str, NDArray[Any]], *, validate: bool
    ) -> Publication:
        """Offer `version` (HF parameter names, the engine's dtype); returns once it can be fetched, not applied. Its
        lineage is the publisher's."""

    async def republish(self) -> None:
        """Offer the last publication again, to a store that has lost its memory; nothing if there is none."""


class WeightFeed(Protocol):
    """The Rollouter's side of the weight store."""

    async def latest(self) -> Publication | None: ...

    async def wait_newer(self, edition: Edition, *, timeout_s: float) -> Publication | None:
        """The newest publication above `edition`, or None if none came in time."""


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """How one replica went from one version to the next. Seconds."""

    replica: str
    version: int
    fetch_s: float
    pause_s: float
    """From the moment no token is made to the moment tokens flow again; `load_s` lies inside."""
    load_s: float
    in_flight: int
    """Requests in the engine when the pause was asked for."""
    verified: bool
    lineage: int = 0
    events: tuple[Mapping[str, Any], ...] = ()
    """Of the profiler, on their way to the Rollouter, which takes them out."""
    drain_s: float = 0.0
    """From the wish to pause until no token is made: before `pause_s`."""
    verify_s: float = 0.0
    """Comparing checksums; generation goes on meanwhile."""

    @property
    def edition(self) -> Edition:
        return Edition(self.lineage, self.version)


ReplicaPhase = Literal["starting", "serving", "fetching", "pausing", "loading", "verifying", "broken"]


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself, unasked, to the weight store: at every change of phase and once a second."""

    replica: str
    node_id: str
    pid: int
    engine_pids: tuple[int, ...]
    """vLLM's processes below it."""
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
    told: str = ""
    """With `broken`: why."""
    health: ProcessHealth | None = None
    """Of its process."""
    engine_health: ProcessHealth | None = None
    """Of `engine_pids`, together."""
    load: EngineLoad | None = None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What the weight store knows."""

    pid: int
    newest: Edition | None
    """None: nothing was published, or the store has lost its memory since."""
    replicas: tuple[ReplicaReport, ...]
    """The last report of each replica heard of in the last minutes, the longest unheard of first."""
    informed: bool = True
    """False: its process is a new one, and nobody has told it of a version yet, or that there is none."""
    at: float = 0.0
    """When it told this, by its own wall clock; the times in `replicas` are by that too. See `on_clock` in
    `asyncrl.weights.replica_reports`."""
    health: ProcessHealth | None = None
    """Of its process."""


# ------------------------------------------------------------------------------------------------ generation


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One trajectory's next turn, token ids in."""

    request_id: str
    prompt_ids: TokenIds
    sampling: Mapping[str, Any]
    """Keyword arguments of vLLM's SamplingParams, `max_tokens` included."""
    so_far: Turn | None = None
    """Tokens an aborted call already produced; the engine goes on behind them, within the same `max_tokens`."""
    media: tuple[Media, ...] = ()
    """Whose placeholders are in `prompt_ids`, in this order."""


OnTurn = Callable[[int, Turn], Awaitable[None]]
"""A request's number among those of its call, and its complete turn."""
OnPlace = Callable[[str], None]
"""The replica whose engine has a call's requests from now on; empty: none has."""
OnCrash = Callable[[EngineCrashError], Awaitable[None]]
OnCut = Callable[[int, Turn], None]
"""A request's number, and what it had made when its call was cancelled."""


class EngineFleet(Protocol):
    """The Rollouter's view of all vLLM replicas."""

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        session: str,
        on_turn: OnTurn | None = None,
        on_place: OnPlace | None = None,
        on_crash: OnCrash | None = None,
        on_cut: OnCut | None = None,
    ) -> list[Turn]:
        """Run the requests on one replica and return whole turns, in order; aborts are resumed inside, and so is what
        an engine that failed had told of its tokens.

        Args:
            requests: `so_far` of one that is complete already is its answer.
            session: keeps a conversation on its replica.
            on_turn: awaited once for each request that is complete, when the others may not be yet.
            on_place: called when a replica has them, and when none has them any more but for a crash.
            on_crash: awaited each time a replica or its engine died while it had these requests; they are tried again
                once it returns, with the tokens told until then. What it raises ends the call.
            on_cut: called for each request that has tokens and is not complete when the call is cancelled; those of the
                last second may be missing.

        Raises:
            InfraError: the retry budget is spent: so many failed tries in a row without a token between them.
            DataError: the engine refuses the prompt (over length).
        """

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        """Bring every replica to the publication's version."""


class PromptSource(Protocol):
    """Prompts by feed order: a pure function of the data, the seed and the index, so a cursor is one integer."""

    def __len__(self) -> int:
        """Prompts per epoch, after filtering."""

    def at(self, sample_id: SampleId) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Score:
    """What a trajectory is worth."""

    reward: float
    """All of it, `turn_rewards` included."""
    extra: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    """The parts of `reward` that belong to single turns of the assistant, in order; empty: none do."""


class RewardScorer(Protocol):
    @property
    def whole_group(self) -> bool:
        """It wants all trajectories of a prompt in one call. Else each is given to it as soon as it has ended."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory.

        Raises:
            UserCodeError: the reward function raised, timed out or returned no finite number.
        """
