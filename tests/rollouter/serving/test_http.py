"""Requests of agents find the Rollouter of the run that uses the replicas. The tests run no Ray."""

from __future__ import annotations

import secrets
import threading
from collections.abc import AsyncIterator, Awaitable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import ray

from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.weights.object_store import ServedRun
from rollouter.gateway.protocol import GatewayResponse, RequestError
from rollouter.serving import http
from rollouter.serving.options import RolloutApp


def key(incarnation: int) -> str:
    """Return a trajectory's key as a Rollouter issues it."""
    return f"asyncrl-{incarnation}-{secrets.token_urlsafe(32)}"


class Rollouter:
    """The handle of a Rollouter, which answers with its run's name until it has ended."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.has_ended = False
        self.answer = SimpleNamespace(remote=self._answer)
        self.stream = SimpleNamespace(remote=self._stream)

    async def _answer(self, key: str, path: str, body: Any) -> GatewayResponse:
        if self.has_ended:
            raise ray.exceptions.ActorDiedError()
        return GatewayResponse(200, {"run": self.run})

    async def _stream(self, key: str, path: str, body: Any) -> AsyncIterator[Awaitable[Any]]:
        yield self._answer(key, path, body)


async def test_agents_of_the_next_run_reach_its_rollouter(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouters: dict[str, Rollouter] = {}

    async def attached_run(namespace: str, *, limit_s: float) -> tuple[Any, ServedRun] | None:
        assert namespace == "servers"
        return (None, ServedRun(namespace=next(reversed(rollouters)))) if rollouters else None

    def get_actor(name: str, namespace: str) -> Rollouter:
        if name != "rollouter-1":
            raise ValueError(name)
        return rollouters[namespace]

    monkeypatch.setattr(http, "attached_run", attached_run)
    monkeypatch.setattr(http.ray, "get_actor", get_actor)
    calls = http.RolloutCalls("servers", call_s=1)
    with pytest.raises(RequestError, match="key"):
        await calls.answer(key(1), "/chat/completions", {})
    for run in ("a", "b"):
        rollouters[run] = Rollouter(run)
        assert (await calls.answer(key(1), "/chat/completions", {})).body == {"run": run}
        assert [item async for item in calls.stream(key(1), "/chat/completions", {})] == [(200, {"run": run})]
        rollouters[run].has_ended = True
    for number in (1, 2):
        with pytest.raises(RequestError, match="key"):
            await calls.answer(key(number), "/chat/completions", {})
        with pytest.raises(RequestError, match="key"):
            await anext(calls.stream(key(number), "/chat/completions", {}))


async def test_a_stream_whose_rollouter_has_just_been_replaced_reaches_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouters = [Rollouter("a"), Rollouter("b")]

    async def attached_run(namespace: str, *, limit_s: float) -> tuple[None, ServedRun]:
        return None, ServedRun(namespace="run")

    monkeypatch.setattr(http, "attached_run", attached_run)
    monkeypatch.setattr(http.ray, "get_actor", lambda name, namespace: rollouters[0])
    calls = http.RolloutCalls("servers", call_s=1)
    for run in ("a", "b"):
        assert [item async for item in calls.stream(key(1), "/completions", {})] == [(200, {"run": run})]
        rollouters.pop(0).has_ended = True


async def test_agents_are_told_to_try_again_while_the_store_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def attached_run(namespace: str, *, limit_s: float) -> None:
        raise InfraError("asking for the attached run: the weight store is gone")

    monkeypatch.setattr(http, "attached_run", attached_run)
    with pytest.raises(RequestError) as raised:
        await http.RolloutCalls("servers", call_s=1).answer(key(1), "/chat/completions", {})
    assert raised.value.status == 503


class SilentRollouter(Rollouter):
    """A Rollouter that has lost its requests."""

    async def _answer(self, key: str, path: str, body: Any) -> GatewayResponse:
        await anyio.sleep_forever()
        raise AssertionError

    async def _stream(self, key: str, path: str, body: Any) -> AsyncIterator[Awaitable[Any]]:
        yield super()._answer(key, path, body)
        yield self._answer(key, path, body)


async def test_requests_end_although_ray_or_the_rollouter_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, cancelled = threading.Event(), list[Any]()

    async def attached_run(namespace: str, *, limit_s: float) -> tuple[None, ServedRun]:
        return None, ServedRun(namespace="run", agent_s=0.1)

    monkeypatch.setattr(http, "attached_run", attached_run)
    monkeypatch.setattr(http.ray, "cancel", cancelled.append)
    monkeypatch.setattr(http.ray, "get_actor", lambda name, namespace: hung.wait(30))
    calls = http.RolloutCalls("servers", call_s=0.1)
    try:
        with anyio.fail_after(10), pytest.raises(RequestError, match="could not be generated"):
            await calls.answer(key(1), "/completions", {})
    finally:
        hung.set()
    monkeypatch.setattr(http.ray, "get_actor", lambda name, namespace: SilentRollouter("a"))
    with anyio.fail_after(10):
        with pytest.raises(RequestError, match="could not be generated"):
            await calls.answer(key(1), "/completions", {})
        items = calls.stream(key(1), "/completions", {})
        assert await anext(items) == (200, {"run": "a"})
        with pytest.raises(RequestError, match="could not be generated"):
            await anext(items)
    assert len(cancelled) == 2


def endpoint(monkeypatch: pytest.MonkeyPatch, host: str, here: str, *, attached: bool = False) -> str:
    """Return the endpoint for agents on the node `here` if Serve has a proxy on the head only."""
    nodes = {"head": "10.0.0.1", "worker": "10.0.0.2", "beside the head": "10.0.0.1"}
    found = [{"NodeID": node, "NodeManagerAddress": address} for node, address in nodes.items()]
    monkeypatch.setattr(http.ray, "nodes", lambda: found)
    monkeypatch.setattr(http.ray.util, "get_node_ip_address", lambda: nodes[here])
    monkeypatch.setattr(http.serve, "status", lambda: SimpleNamespace(proxies={"head": "HEALTHY"}))
    monkeypatch.setattr(http.ray_internals, "http_address", lambda: (host, 8000))
    monkeypatch.setattr(http.ray_internals, "route_prefix_of", lambda app: f"/{app}")
    return http.endpoint_url(RolloutApp("servers", "servers", attached))


@pytest.mark.parametrize(
    ("host", "here", "reached"),
    [
        ("127.0.0.1", "head", "127.0.0.1"),
        ("localhost", "beside the head", "localhost"),
        ("::1", "head", "[::1]"),
        ("0.0.0.0", "worker", "10.0.0.1"),
    ],
)
def test_agents_reach_the_proxy(monkeypatch: pytest.MonkeyPatch, host: str, here: str, reached: str) -> None:
    assert endpoint(monkeypatch, host, here) == f"http://{reached}:8000/servers/v1"


@pytest.mark.parametrize(("attached", "fix"), [(False, r"\(serve\.host=0\.0\.0\.0 "), (True, r"\(http_options: ")])
def test_a_proxy_on_the_loopback_of_another_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, attached: bool, fix: str
) -> None:
    """Nothing listens there on the node of the agents, which may be any with `ray job submit`."""
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 of 10\.0\.0\.1, .* on 10\.0\.0\.2, .*{fix}"):
        endpoint(monkeypatch, "127.0.0.1", "worker", attached=attached)
