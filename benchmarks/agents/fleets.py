"""Engines that are told how long each turn is, and engines that answer a whole batch or nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio

from asyncrl.failures import InfraError
from asyncrl.ports import ApplyReport, EngineFleet, GenerateRequest, OnTurn, Publication
from asyncrl.types import FinishReason, Turn

SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each turn: log-normal, with a long tail that is cut. Under one seed, a turn always has the same."""

    median: float
    sigma: float
    longest: int
    prompt_sigma: float = 0.0
    """Of a log-normal factor that all responses to one prompt share: some prompts take longer than others."""

    def of(self, request_id: str, seed: int) -> int:
        """`request_id`: the sample's name, a slash, and what names the turn within it."""
        length = self.median * random.Random(f"{seed}/{request_id}").lognormvariate(0, self.sigma)
        prompt = request_id.partition("/")[0]
        length *= random.Random(f"{seed}/{prompt}").lognormvariate(0, self.prompt_sigma)
        return max(SHORTEST, min(self.longest, round(length)))


class _Layer:
    """An `EngineFleet` over another one."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return await self._fleet.apply(publication)


class DrawnFleet(_Layer):
    """Turns of drawn lengths, which end as if the model had ended them itself."""

    def __init__(self, fleet: EngineFleet, lengths: Lengths, seed: int) -> None:
        super().__init__(fleet)
        self._lengths = lengths
        self._seed = seed

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str, on_turn: OnTurn | None = None, **others: Any
    ) -> list[Turn]:
        """See `ports.EngineFleet`."""

        async def told(number: int, turn: Turn) -> None:
            assert on_turn is not None
            await on_turn(number, _ended(turn))

        turns = await self._fleet.generate(
            [self._drawn(request) for request in requests],
            session=session,
            on_turn=None if on_turn is None else told,
            **others,
        )
        return [_ended(turn) for turn in turns]

    def _drawn(self, request: GenerateRequest) -> GenerateRequest:
        length = min(self._lengths.of(request.request_id, self._seed), request.sampling["max_tokens"])
        return replace(request, sampling={**request.sampling, "max_tokens": length, "ignore_eos": True})


def _ended(turn: Turn) -> Turn:
    return replace(turn, finish_reason=FinishReason.STOP) if turn.finish_reason is FinishReason.LENGTH else turn


class _Batch:
    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.turns: list[Turn] = []
        self.error: Exception | None = None
        self.done = anyio.Event()


class BarrierFleet(_Layer):
    """Nothing is generated before `parties` requests have come, and nobody has an answer before all have.

    Then they are one call to the engines. Conversations over it go in step, as in a synchronous system: all generate a
    turn, all call their tools, all generate the next one.
    """

    def __init__(self, fleet: EngineFleet, parties: int) -> None:
        super().__init__(fleet)
        self._parties = parties
        self._batch = _Batch()
        self.calls = 0

    async def generate(self, requests: Sequence[GenerateRequest], *, session: str, **_: Any) -> list[Turn]:
        """See `ports.EngineFleet`; nobody is told of what goes on meanwhile."""
        batch = self._batch
        first = len(batch.requests)
        batch.requests += requests
        if len(batch.requests) < self._parties:
            await batch.done.wait()
        else:
            self._batch = _Batch()
            await self._run(batch)
        if batch.error is not None:
            raise InfraError(f"the batch failed: {batch.error}")
        return batch.turns[first : first + len(requests)]

    async def _run(self, batch: _Batch) -> None:
        self.calls += 1
        try:
            batch.turns = await self._fleet.generate(batch.requests, session=f"batch-{self.calls}")
        except Exception as error:
            batch.error = error
            raise
        finally:
            batch.done.set()
