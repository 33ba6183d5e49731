"""Streamed requests of agents reach the Rollouter through a real Ray, and end there when the client leaves."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import ray

from asyncrl.config.schema import Config
from asyncrl.weights.object_store import ServedRun
from rollouter.actor import RolloutActor
from rollouter.gateway.protocol import GatewayResponse, RequestError
from rollouter.serving import http


class StreamingRollouter(RolloutActor):
    """A Rollouter whose gateway sends one event and then waits forever."""

    def __init__(self) -> None:
        super().__init__(Config())
        self._closed = anyio.Event()

    @property
    def _gateway(self) -> Any:
        return SimpleNamespace(stream=self._events)

    async def _events(self, *request: Any) -> AsyncIterator[GatewayResponse | bytes]:
        try:
            yield GatewayResponse(200, {})
            yield b"data: 1\n\n"
            await anyio.sleep_forever()
        finally:
            self._closed.set()

    async def closed(self) -> bool:
        """Return whether the stream was closed within a minute."""
        with anyio.move_on_after(60):
            await self._closed.wait()
        return self._closed.is_set()


@pytest.fixture
def rollouter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    actor: Any = ray.remote(StreamingRollouter).options(num_cpus=0, max_concurrency=4).remote()

    async def attached_run(namespace: str, *, limit_s: float) -> tuple[None, ServedRun]:
        return None, ServedRun(namespace="run")

    monkeypatch.setattr(http, "attached_run", attached_run)
    monkeypatch.setattr(http.ray, "get_actor", lambda name, namespace: actor)
    yield actor
    ray.shutdown()


async def test_a_closed_stream_is_closed_in_the_rollouter_and_a_dead_rollouter_ends_one(rollouter: Any) -> None:
    calls, key = http.RolloutCalls("servers", call_s=30), f"asyncrl-1-{secrets.token_urlsafe(32)}"

    async def begun(items: Any) -> None:
        assert await anext(items) == (200, {}) and await anext(items) == b"data: 1\n\n"

    async with aclosing(calls.stream(key, "chat/completions", {})) as items:
        await begun(items)
    assert await rollouter.closed.remote()
    async with aclosing(calls.stream(key, "chat/completions", {})) as items:
        await begun(items)
        ray.kill(rollouter)
        with pytest.raises(RequestError, match="could not be generated"):
            await anext(items)
