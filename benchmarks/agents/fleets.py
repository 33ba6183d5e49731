"""Fleets with drawn turn lengths, and fleets that answer whole batches."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import anyio

from asyncrl.core.failures import InfraError
from asyncrl.core.ports import (
    ApplyReport,
    EngineCrashed,
    EngineFleet,
    GenerateRequest,
    GenerationEvent,
    Publication,
    TurnFinished,
)
from asyncrl.core.types import FinishReason, Turn

SHORTEST = 4


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """Log-normal turn lengths with a cut tail. A turn's length depends on its name and the seed."""

    median: float
    sigma: float
    longest: int
    prompt_sigma: float = 0.0
    """Sigma of a log-normal factor that all responses to a prompt share."""

    def of(self, request_id: str, seed: int) -> int:
        """Return the length of the turn `request_id`, which begins with the sample's name and a slash."""
        length = self.median * random.Random(f"{seed}/{request_id}").lognormvariate(0, self.sigma)
        prompt = request_id.partition("/")[0]
        length *= random.Random(f"{seed}/{prompt}").lognormvariate(0, self.prompt_sigma)
        return max(SHORTEST, min(self.longest, round(length)))


class _FleetWrapper:
    """An `EngineFleet` that wraps another one."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        return await self._fleet.apply(publication)


class DrawnFleet(_FleetWrapper):
    """Generates turns of drawn lengths, which finish with `STOP` as if the model had ended them."""

    def __init__(self, fleet: EngineFleet, lengths: TurnLengths, seed: int) -> None:
        super().__init__(fleet)
        self._lengths = lengths
        self._seed = seed

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `ports.EngineFleet`."""
        drawn = [self._drawn(request) for request in requests]
        async with aclosing(self._fleet.generate(drawn, session=session)) as events:
            async for event in events:
                yield TurnFinished(event.number, _ended(event.turn)) if isinstance(event, TurnFinished) else event

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


class BarrierFleet(_FleetWrapper):
    """Collects `parties` requests, sends them to the engines in one call, and answers all of them together.

    Conversations proceed in lockstep, as in a synchronous system: all generate a turn, all call their tools, all
    generate the next turn.
    """

    def __init__(self, fleet: EngineFleet, parties: int) -> None:
        super().__init__(fleet)
        self._parties = parties
        self._batch = _Batch()
        self.calls = 0

    async def generate(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        """See `ports.EngineFleet`; the only events are finished turns."""
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
        for number in range(len(requests)):
            yield TurnFinished(number, batch.turns[first + number])

    async def _run(self, batch: _Batch) -> None:
        self.calls += 1
        try:
            batch.turns = await finished_turns(self._fleet.generate(batch.requests, session=f"batch-{self.calls}"))
        except Exception as error:
            batch.error = error
            raise
        finally:
            batch.done.set()


async def finished_turns(events: AsyncGenerator[GenerationEvent, None]) -> list[Turn]:
    """Return the finished turns of one call, in the order of its requests. Raises the error of a crashed engine."""
    turns: dict[int, Turn] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, EngineCrashed):
                raise event.error
            if isinstance(event, TurnFinished):
                turns[event.number] = event.turn
    return [turns[number] for number in sorted(turns)]
