"""One run in one event loop: the real core between fake engines, fake ranks and a disk in memory.

    real   Rollouter (dispatcher, versions, validation, isolation), ServeFleet and its client, WeightStoreActor and its
           clients, TrainLoop and BatchSource, QueueClient, QueueActor over LocalSampleQueue and QueueState, operations
           as rows, the Supervisors, probes, Watchdog and ReplicaWatch, ReplicaScaling and Serve's policy,
           records of samples and their files
    fake   engines and replicas, ranks, checkpoints, payload and turn files, processes and the network between them

`launch` plays the driver, `parts` are the processes that it replaces, and `files` are the files that survive all of
them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from asyncrl.core.ports import GenerateRequest
from asyncrl.core.records import ValidationRecord
from asyncrl.core.types import SampleId
from asyncrl.queue.core import Operation
from asyncrl.queue.operations import DropSamples, OfferSamples
from skip.store import RecordFiles
from tests.fuzz.files import Files
from tests.fuzz.setup import FuzzSetup

POISON = 7
"""The first token of a prompt that crashes engines."""
VALIDATES = 3
"""The first token of a prompt of the validation set."""


class FuzzWorld:
    """The run of one seed, over all its launches."""

    def __init__(self, setup: FuzzSetup, trace: Callable[[str], None] | None = None) -> None:
        self.setup = setup
        self.files = Files(setup)
        self.rng = random.Random(setup.seed + 1)
        self.trace = trace
        self.faults = list(setup.faults)
        self.staleness: list[tuple[int, int]] = []
        """`(lineage, staleness)` of every trained sample."""
        self.launches = 0
        self.struck = 0
        self.completed_step = 0
        self.watched: list[list[Any]] = []
        """Records of failed calls (`benchmarks.chaos.watch`) for each process of the Rollouter."""
        self.validations: list[ValidationRecord] = []
        """All validations, including those of abandoned weights."""
        self.poisoned_by: Counter[str] = Counter()
        """The number of crashes that poisonous requests caused, by sample."""
        self.crashed_with: defaultdict[str, set[str]] = defaultdict(set)
        """The poisonous samples that crashed an engine while a sample was in flight there, by sample."""
        self.late_samples: set[SampleId] = set()
        """Samples that were finished just after the queue was closed; the next launch generates them again."""
        self.records: RecordFiles | None = None
        """The records of generated samples, if the run has any."""
        self.recorded: dict[int, Any] = {}
        """The tokens in the record of each step."""
        self._stragglers: set[SampleId] = set()
        """Unfinished samples with a session that never continues."""
        self._dropped_in_a_row = 0
        self.decisions: list[int] = []
        """By how many replicas each decision about their number has changed it."""
        self.broken: list[str] = []
        """Promises that were broken during the run."""

    def log(self, event: str) -> None:
        if self.trace is not None:
            self.trace(f"{anyio.current_time():9.4f}  {event}")

    def see(self, operation: Operation) -> None:
        """Trace an operation of the queue when it is appended; a crash may lose it."""
        if isinstance(operation, OfferSamples):
            self._dropped_in_a_row = 0
            self._stragglers.difference_update(sample.meta.sample_id for sample in operation.samples)
        elif isinstance(operation, DropSamples):
            self._dropped_in_a_row += len(operation.sample_ids)
            self._stragglers.difference_update(operation.sample_ids)
        if self.trace is not None:
            self.log(str(operation))

    async def pause(self) -> None:
        """Wait for the duration of a message."""
        if self.rng.random() < 0.3:
            await anyio.sleep(self.rng.random() * 0.004)
        else:
            await anyio.lowlevel.checkpoint()

    def some(self, mean_s: float) -> float:
        return self.rng.expovariate(1 / mean_s)

    def is_poison(self, request: GenerateRequest) -> bool:
        return int(request.prompt_ids[0]) == POISON

    def is_poisonous(self, sample_id: SampleId) -> bool:
        return (sample_id.index - 1) % self.setup.num_prompts == self.setup.poison

    def straggles(self, session: str) -> bool:
        """Draw whether a training session never continues."""
        if self.rng.random() >= self.setup.stragglers or not self._may_fail():
            return False
        self._stragglers.add(SampleId.parse(session.partition("/")[0]))
        return True

    def reward_fails(self) -> bool:
        """Draw whether the scoring of a group raises."""
        return self.rng.random() < self.setup.reward_fails and self._may_fail()

    def _may_fail(self) -> bool:
        """Return whether one more sample may fail: a run ends if all samples of an epoch in a row are dropped."""
        return self._dropped_in_a_row + len(self._stragglers) < self.setup.num_prompts // 2

    def poisoned(self, session: str, in_flight: Sequence[str]) -> None:
        """Record a crash that a poisonous session has caused, with the sessions in flight."""
        poison = session.partition("/")[0]
        self.poisoned_by[poison] += 1
        for other in in_flight:
            self.crashed_with[other.partition("/")[0]].add(poison)
