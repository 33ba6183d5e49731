"""Sends the requests of a workload to a server, and records when tokens arrive."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from benchmarks.stream.statistics import Chunk, StreamedResponse
from benchmarks.stream.workload import TracedSession, TracedTurn


class Arrived(NamedTuple):
    """Tokens that have arrived; `ids` is None if the server sends text only."""

    tokens: int
    ids: Sequence[int] | None


class StreamClient(Protocol):
    """Requests streamed responses from one server."""

    def stream(self, context: NDArray[np.int32], output_tokens: int, *, session: str) -> AsyncGenerator[Arrived, None]:
        """Yield the response's tokens as they arrive. Closing the iterator cancels the request.

        Raises:
            Exception: the request failed, for any reason.
        """


class LoadGenerator:
    """Runs sessions against one client."""

    def __init__(
        self,
        client: StreamClient,
        *,
        vocabulary: int,
        seed: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prompts are random token ids from 5 to below `vocabulary`. A request fails if it takes over `timeout_s`."""
        self._client = client
        self._vocabulary = vocabulary
        self._seed = seed
        self._timeout_s = timeout_s
        self._clock = clock
        self._begun = clock()
        self.responses: list[StreamedResponse] = []
        self.in_flight = 0

    def now(self) -> float:
        """Return the seconds since the start of the measurement."""
        return self._clock() - self._begun

    async def run(self, sessions: Sequence[TracedSession], *, concurrency: int | None) -> None:
        """Run all sessions: `concurrency` at a time, one after another (a closed loop), or each at its `at_s`."""
        self._begun = self._clock()
        limiter = anyio.CapacityLimiter(concurrency) if concurrency else None
        async with anyio.create_task_group() as group:
            for number, session in enumerate(sessions):
                if limiter is None:
                    await anyio.sleep(max(0.0, session.at_s - self.now()))
                    group.start_soon(self._run, number, session)
                else:
                    await limiter.acquire_on_behalf_of(number)
                    group.start_soon(self._run_limited, number, session, limiter)

    async def _run_limited(self, number: int, session: TracedSession, limiter: anyio.CapacityLimiter) -> None:
        try:
            await self._run(number, session)
        finally:
            limiter.release_on_behalf_of(number)

    async def _run(self, number: int, session: TracedSession) -> None:
        rng = np.random.default_rng((self._seed, number))
        context = np.empty(0, dtype=np.int32)
        for turn in session.turns:
            await anyio.sleep(turn.wait_s)
            context = np.concatenate([context, self._tokens(rng, turn.new_tokens)])
            response, ids = await self._request(context, turn, f"session-{number}")
            self.responses.append(response)
            if response.error:
                return
            # A server that sends no ids gets random ones for its own text, so its prefix cache has only the prompts.
            more = self._tokens(rng, response.tokens) if ids is None else np.asarray(ids, dtype=np.int32)
            context = np.concatenate([context, more])

    async def _request(
        self, context: NDArray[np.int32], turn: TracedTurn, session: str
    ) -> tuple[StreamedResponse, list[int] | None]:
        sent, chunks, error = self.now(), list[Chunk](), ""
        ids: list[int] | None = []
        self.in_flight += 1
        try:
            with anyio.fail_after(self._timeout_s):
                async with aclosing(self._client.stream(context, turn.output_tokens, session=session)) as arrivals:
                    async for arrived in arrivals:
                        chunks.append(Chunk(self.now(), arrived.tokens))
                        ids = None if ids is None or arrived.ids is None else [*ids, *arrived.ids]
            if not chunks:
                error = "the response has no token"
        except Exception as failure:  # noqa: BLE001  it is one of the results
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self.in_flight -= 1
        return StreamedResponse(sent, tuple(chunks), error), ids

    def _tokens(self, rng: np.random.Generator, number: int) -> NDArray[np.int32]:
        tokens: NDArray[Any] = rng.integers(5, self._vocabulary, number, dtype=np.int32)
        return tokens
