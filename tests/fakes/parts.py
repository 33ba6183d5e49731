"""Small stand-ins for the other ports: payloads, weight feed, prompts, scorer, record sink, clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np

from asyncrl.ports import Publication, RunRecord, Score
from asyncrl.types import Prompt, Sample, SampleId, Turn


class MemoryPayloads:
    """`PayloadStore` that hands the sample itself around."""

    async def put(self, sample: Sample) -> Any:
        return sample

    async def get(self, payloads: Sequence[Any]) -> list[Sample]:
        return list(payloads)


class FakeFeed:
    """`WeightFeed` whose publications the test makes."""

    def __init__(self) -> None:
        self._latest: Publication | None = None
        self._changed = anyio.Condition()

    async def publish(
        self, version: int, *, step: int = 0, validate: bool = False, published_at_s: float = 0.0
    ) -> None:
        async with self._changed:
            self._latest = Publication(version, step, 0, {}, validate=validate, published_at_s=published_at_s)
            self._changed.notify_all()

    async def latest(self) -> Publication | None:
        return self._latest

    async def wait_newer(self, version: int, *, timeout_s: float) -> Publication | None:
        with anyio.move_on_after(timeout_s):
            async with self._changed:
                while self._latest is None or self._latest.version <= version:
                    await self._changed.wait()
                return self._latest
        return None


class ListPrompts:
    """`PromptSource` and validation set over given prompts, in order."""

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
    """`RewardScorer` with a function from tokens to reward; `gate(prompt)` runs first."""

    def __init__(
        self,
        reward: Callable[[Prompt, Turn], float] = lambda prompt, turn: float(len(turn.response_ids)),
        gate: Callable[[Prompt], Any] | None = None,
    ) -> None:
        self._reward = reward
        self._gate = gate

    async def score(self, prompt: Prompt, turns: Sequence[Turn]) -> list[Score]:
        if self._gate is not None:
            await self._gate(prompt)
        return [Score(self._reward(prompt, turn)) for turn in turns]


class ListSink:
    """`RecordSink` that keeps the records; `until(n)` waits for the nth."""

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
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
