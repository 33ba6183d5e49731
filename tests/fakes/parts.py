"""Small stand-ins for the other ports: payloads, turn log, weight feed, prompts, scorer, record sink, clock.

They use no threads and no real time, so they are deterministic under any event loop, including one with virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np

from asyncrl.core.ports import GpuTurn, Publication, Score, WeightsVersion
from asyncrl.core.records import RunRecord
from asyncrl.core.trajectory import TokenRow, Trajectory
from asyncrl.core.types import Prompt, Sample, SampleId, Turn
from asyncrl.weights.gpu_turns import GpuTurnRelay


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` holds."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


class MemoryPayloads:
    """A `PayloadStore` whose reference to a sample is the sample itself; samples in `lost` are no longer found."""

    def __init__(self) -> None:
        self.lost: set[SampleId] = set()

    async def put(self, sample: Sample) -> Any:
        return sample

    async def get(self, payloads: Sequence[Any]) -> list[Sample | None]:
        return [None if sample.sample_id in self.lost else sample for sample in payloads]


class MemoryTurns:
    """A `TurnLog` that successive Rollouters may share: later ones find the turns that earlier ones completed."""

    def __init__(self) -> None:
        self.turns: dict[SampleId, dict[str, Turn]] = {}
        self.recorded = 0
        """Number of turns that were recorded in total."""

    async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        known = self.turns.setdefault(sample_id, {})
        assert not known.keys() & turns.keys(), f"turns of {sample_id} were completed twice"
        known |= turns
        self.recorded += len(turns)

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        return dict(self.turns.get(sample_id, {}))

    async def forget(self, sample_id: SampleId) -> None:
        self.turns.pop(sample_id, None)


class FakeFeed:
    """A `WeightFeed` whose versions the test publishes. Like the store, it keeps only the newest weights version."""

    def __init__(self) -> None:
        self._latest: Publication | None = None
        self._changed = anyio.Condition()
        self.delivered: list[int] = []
        """Versions that `wait_newer` has returned. The store asks no later version to validate for these."""

    async def publish(
        self, version: int, *, lineage: int = 0, step: int = 0, validate: bool = False, published_at_s: float = 0.0
    ) -> Publication:
        publication = Publication(
            version, step, 0, {}, validate=validate, published_at_s=published_at_s, lineage=lineage
        )
        async with self._changed:
            if self._latest is None or publication.weights_version >= self._latest.weights_version:
                self._latest = publication
            self._changed.notify_all()
        return publication

    def forget(self) -> None:
        """Lose the version, as a restarted store does, until a version is published again."""
        self._latest = None

    async def latest(self) -> Publication | None:
        return self._latest

    async def wait_newer(self, weights_version: WeightsVersion, *, timeout_s: float) -> Publication | None:
        with anyio.move_on_after(timeout_s):
            async with self._changed:
                while self._latest is None or self._latest.weights_version <= weights_version:
                    await self._changed.wait()
                self.delivered.append(self._latest.version)
                return self._latest
        return None


class FakeGpuTurns:
    """The turns on shared GPUs (`ports.GpuTurns`), as the weight store keeps them. The engines begin."""

    def __init__(self) -> None:
        self.relay = GpuTurnRelay()
        self.relay._turn = "engines"

    async def take(self) -> None:
        assert await self.relay.want_gpus(0, 10.0)

    async def give_back(self) -> None:
        await self.relay.return_gpus(0)

    async def wait(self, *turns: GpuTurn, timeout_s: float) -> GpuTurn | None:
        return await self.relay.wait_gpu_turn(turns, timeout_s)

    async def grant(self) -> None:
        await self.relay.grant_gpus()


class ListPrompts:
    """A `PromptSource` and validation set with the given prompts in order."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = list(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int) -> Prompt:
        return self._prompts[number]

    def at(self, sample_id: SampleId) -> Prompt:
        return self._prompts[(sample_id.index - 1) % len(self._prompts)]


def make_prompt(*ids: int, **fields: Any) -> Prompt:
    return Prompt(prompt_ids=np.array(ids, dtype=np.int32), **fields)


class FakeScorer:
    """A `RewardScorer` that applies `reward` to the first row of a trajectory, after it has awaited `gate(prompt)`."""

    def __init__(
        self,
        reward: Callable[[Prompt, TokenRow], float] = lambda prompt, row: float(len(row.response_ids)),
        gate: Callable[[Prompt], Any] | None = None,
        *,
        whole_group: bool = True,
    ) -> None:
        self._reward = reward
        self._gate = gate
        self.whole_group = whole_group

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        if self._gate is not None:
            await self._gate(prompt)
        return [Score(self._reward(prompt, one.rows[0])) for one in trajectories]


class ListSink:
    """A `RecordSink` that keeps the records; `until(n)` waits for the nth record."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self._changed = anyio.Condition()

    async def put(self, record: RunRecord) -> None:
        async with self._changed:
            self.records.append(record)
            self._changed.notify_all()

    async def until(self, num_records: int) -> None:
        with anyio.fail_after(10):
            async with self._changed:
                while len(self.records) < num_records:
                    await self._changed.wait()


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
