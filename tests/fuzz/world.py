"""One run in one event loop: the real core between fake engines, fake ranks and a disk in memory.

    real   Rollouter (dispatcher, versions, validation, isolation), ServeFleet and its client, WeightStoreActor and its
           clients, TrainLoop and BatchSource, QueueClient, QueueActor over LocalSampleQueue and QueueState, operations
           as rows, the Supervisors, probes, Watchdog and ReplicaWatch
    fake   engines and replicas, ranks, checkpoints, payload and turn files, processes and the network between them

`launch` is the driver, `parts` the processes that it replaces, `files` what outlives them all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from asyncrl.core.ports import GenerateRequest
from asyncrl.core.records import ValidationRecord
from asyncrl.core.types import SampleId
from asyncrl.queue.operations import Operation
from tests.fuzz.files import Files
from tests.fuzz.setup import FuzzSetup

POISON = 7
"""The first token of a prompt that crashes engines."""
VALIDATES = 3
"""That of one of the validation set."""


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
        """What each process of the Rollouter has seen of calls that failed, see `benchmarks.chaos.watch`."""
        self.validations: list[ValidationRecord] = []
        """All, also of weights that were given up."""
        self.poisoned_by: Counter[str] = Counter()
        """Crashes that a poisonous request has brought about, by its session."""
        self.let_go: set[SampleId] = set()
        """Samples that were finished when the queue had just been closed: they are generated again in a next launch."""
        self.broken: list[str] = []
        """Promises that were seen to be broken while it ran."""

    def say(self, told: str) -> None:
        if self.trace is not None:
            self.trace(f"{anyio.current_time():9.4f}  {told}")

    def see(self, operation: Operation) -> None:
        """Of the queue, as it is made: what a crash forgets is seen once more by `rebuilt`."""
        if self.trace is not None:
            self.say(str(operation))

    async def pause(self) -> None:
        """A message travels."""
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

    def poisoned(self, request: GenerateRequest) -> None:
        self.poisoned_by[request.request_id.partition("/")[0]] += 1
