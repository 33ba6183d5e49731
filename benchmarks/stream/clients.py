"""Clients of the servers that are measured: any OpenAI-compatible one over HTTP, and asyncrl's replicas by handle."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import httpx
import numpy as np
from numpy.typing import NDArray

from asyncrl.core.ports import EngineCrashed, GenerateRequest, TurnFinished, TurnProgress
from benchmarks.stream.load import Arrived

if TYPE_CHECKING:
    from rollouter.serving.fleet import ServeFleet

OpenAIPath = Literal["completions", "chat"]


class OpenAIClient:
    """Streams over HTTP: `completions` with token ids as the prompt, or `chat` with numbers as words of one message."""

    def __init__(self, http: httpx.AsyncClient, model: str, path: OpenAIPath) -> None:
        """`http` has the API's base URL and key."""
        self._http = http
        self._model = model
        self._path: OpenAIPath = path

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
