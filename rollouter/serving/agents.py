"""The way of agents' requests through Ray: from the HTTP side to the Rollouter that gave their key.

A Rollouter that replaces another has a name and keys of its own, so nothing has to be told of it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client

from asyncrl.failures import InfraError
from rollouter.gateway.errors import engines_failed, unknown_key
from rollouter.gateway.gateway import incarnation_of
from rollouter.gateway.responses import Answer
from rollouter.serving.options import app_name

MOST_AT_ONCE = 9_000
"""Requests of agents that the Rollouter has at once; less than its actor takes (`rollouter.actor`), or the questions of
the driver would wait behind them."""
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def rollouter_name(incarnation: int) -> str:
    """Of the actor, in the run's Ray namespace."""
    return f"rollouter-{incarnation}"


def route_prefix(namespace: str) -> str:
    """Where the run's OpenAI API is mounted: runs that share a cluster share its port."""
    return f"/{app_name(namespace, 'agents')}"


def endpoint_url(namespace: str) -> str:
    """Base URL of the run's OpenAI API, for agents on the node of Serve's proxy or, where that listens everywhere, on
    any. Blocking.

    Raises:
        InfraError: Serve has no HTTP side.
    """
    options = _get_global_client().http_config
    if options.host is None or options.location == ProxyLocation.Disabled:
        raise InfraError(
            "Ray Serve was started on this cluster without an HTTP side, by somebody else, so no agent can reach this "
            "run (rollout.agent). Shut Serve down there, or take a cluster of the run's own: ray.address=null"
        )
    host = options.host
    if host in _ANYWHERE:
        host = _proxy_address() or _ANYWHERE[host]
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{options.port}{route_prefix(namespace)}/v1"


def _proxy_address() -> str:
    """Of a node with a proxy; empty: Serve tells of none."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return next((nodes[node] for node in serve.status().proxies if node in nodes), "")


class RolloutCalls:
    """Hands requests to the Rollouter that gave their key: `asgi.Call`."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._actors: dict[int, Any] = {}
        self._places: anyio.Semaphore | None = None
        """Made in the replica: it belongs to an event loop, and this object comes from another process."""

    async def __call__(self, key: str, path: str, body: Mapping[str, Any]) -> Answer:
        """
        Raises:
            RequestError: that Rollouter is gone.
        """
        incarnation = incarnation_of(key)
        assert incarnation is not None  # else it is no trajectory's key
        if self._places is None:
            self._places = anyio.Semaphore(MOST_AT_ONCE)
        async with self._places:
            actor = await self._actor(incarnation)
            answer = actor.answer.remote(key, path, body)
            try:
                told: Answer = await answer
            except asyncio.CancelledError:
                ray.cancel(answer)  # so that the engine does not go on for a client that has gone
                raise
            except ray.exceptions.RayActorError as error:
                self._actors.pop(incarnation, None)
                raise unknown_key() from error
            except ray.exceptions.RayError as error:
                raise engines_failed() from error
        return told

    async def _actor(self, incarnation: int) -> Any:
        if incarnation not in self._actors:
            name = rollouter_name(incarnation)
            try:
                self._actors[incarnation] = await to_thread.run_sync(ray.get_actor, name, self._namespace)
            except ValueError as error:
                raise unknown_key() from error
        return self._actors[incarnation]
