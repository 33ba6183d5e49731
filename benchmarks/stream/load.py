"""Sends the requests of a workload to a server, and records when tokens arrive.

LoadGenerator ─▶ OpenAIClient ─▶ any OpenAI-compatible server
              └▶ TokenClient ──▶ asyncrl's replicas by handle, as the Rollouter calls them
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import anyio
import httpx
import numpy as np
from numpy.typing import NDArray

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import EngineCrashed, GenerateRequest, TurnFinished, TurnProgress
from benchmarks.stream.results import StreamedChunk, StreamedResponse
from benchmarks.stream.workload import TracedSession, TracedTurn

if TYPE_CHECKING:
    from rollouter.serving.fleet import ServeFleet

OpenAIPath = Literal["completions", "chat"]
MODELS_S = 60.0
"""Limit for a server to list its models."""


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


class OpenAIClient:
    """Streams over HTTP: `completions` with token ids as the prompt, or `chat` with numbers as words of one message."""

    def __init__(self, http: httpx.AsyncClient, model: str, path: OpenAIPath) -> None:
        """`http` has the API's base URL and key."""
        self._http = http
        self._model = model
        self._path: OpenAIPath = path

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, model: str | None, path: OpenAIPath, key: str) -> AsyncIterator[Self]:
        """Connect to the API at `url`; without `model`, use the first one that it lists.

        Raises:
            ConfigError: it lists none.
        """
        headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, limits=limits, timeout=None) as http:
            if model is None:
                try:
                    with anyio.fail_after(MODELS_S):
                        answer = (await http.get("/models")).raise_for_status()
                    model = str(answer.json()["data"][0]["id"])
                except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, LookupError, TypeError) as error:
                    raise ConfigError(
                        f"{url}/models lists no model, so nothing is measured: {type(error).__name__}: {error}; check "
                        "--url, such as http://host:8000/v1, and --api-key-env, or name the model with --model"
                    ) from error
            yield cls(http, model, path)

    async def stream(
        self, context: NDArray[np.int32], output_tokens: int, *, session: str
    ) -> AsyncGenerator[Arrived, None]:
        """See `StreamClient`. Chunks without ids count as one token each."""
        body: dict[str, Any] = {
            "model": self._model, "stream": True, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 1.0,
        }  # fmt: skip
        if self._path == "completions":
            body |= {"prompt": context.tolist(), "return_token_ids": True}
        else:
            body |= {"messages": [{"role": "user", "content": " ".join(map(str, context.tolist()))}]}
        path = "completions" if self._path == "completions" else "chat/completions"
        # Serve's routers keep requests with the same session on a replica.
        async with self._http.stream("POST", path, json=body, headers={"x-session-id": session}) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise RuntimeError(f"status {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or (data := line[5:].strip()) == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"the stream failed: {str(event['error'])[:300]}")
                if (arrived := _arrived(event)) is not None:
                    yield arrived


def _arrived(event: dict[str, Any]) -> Arrived | None:
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids")
        if ids:
            return Arrived(len(ids), ids)
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return Arrived(1, None)
    return None


class TokenClient:
    """Streams the token API of replicas, as the Rollouter calls it."""

    def __init__(self, fleet: ServeFleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()

    async def stream(
        self, context: NDArray[np.int32], output_tokens: int, *, session: str
    ) -> AsyncGenerator[Arrived, None]:
        """See `StreamClient`."""
        sampling = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 1.0}
        request = GenerateRequest(f"{session}.{next(self._numbers)}", context, sampling, stream=True)
        known = 0
        async with aclosing(self._fleet.generate([request], session=session)) as events:
            async for event in events:
                if isinstance(event, EngineCrashed):
                    raise event.error
                if isinstance(event, TurnProgress | TurnFinished) and len(event.turn.response_ids) > known:
                    ids = event.turn.response_ids[known:].tolist()
                    known += len(ids)
                    yield Arrived(len(ids), ids)


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
        sent, chunks, error = self.now(), list[StreamedChunk](), ""
        ids: list[int] | None = []
        self.in_flight += 1
        try:
            with anyio.fail_after(self._timeout_s):
                async with aclosing(self._client.stream(context, turn.output_tokens, session=session)) as arrivals:
                    async for arrived in arrivals:
                        chunks.append(StreamedChunk(self.now(), arrived.tokens))
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
