"""The HTTP API of `asyncrl serve`, and of a launch with external agents.

    trajectory's key ──▶ the Rollouter that issued it (`rollouter.gateway`), through Ray: recorded
    other requests ────▶ checks of `rollouter.serving.access` ──▶ `openai_app` ──▶ replicas

Importing `ray.serve.llm` imports vLLM, which takes 7 s on CPU and prints messages on the terminal. The driver uses this
module without importing vLLM; only the processes that Serve starts import it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import ray
from anyio import to_thread
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from asyncrl.config.sections.run import LOOPBACK
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.weights.object_store import attached_run
from rollouter.agent.parsing import NO_TOOLS, check_format
from rollouter.gateway.http import TrajectoryKeyMiddleware
from rollouter.gateway.protocol import GatewayResponse, engines_failed, unknown_key
from rollouter.gateway.session import incarnation_of
from rollouter.serving import ray_internals
from rollouter.serving.access import HttpAccess, checked_app
from rollouter.serving.options import (
    DEPLOYMENT_NAME,
    RolloutApp,
    ServingOptions,
    app_name,
    app_namespace,
    deployment_options,
)
from rollouter.serving.replica.deployment import RolloutReplica

logger = logging.getLogger(__name__)

METRICS_S = 5.0
"""How long the replicas may take to answer a request of their metrics."""
MAX_AGENT_REQUESTS = 9_000
"""Maximum number of concurrent requests of agents to the Rollouter. The Rollouter's actor accepts more concurrent calls
(`rollouter.actor`), so that calls of the driver never wait behind those of agents."""
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def rollouter_name(incarnation: int) -> str:
    """Return the actor's name in the run's Ray namespace."""
    return f"rollouter-{incarnation}"


def route_prefix(namespace: str) -> str:
    """Return the path of the run's OpenAI API. Each run has a different one, as runs on a cluster share its port."""
    return f"/{app_name(namespace, 'agents')}"


def endpoint_url(app: RolloutApp) -> str:
    """Return the base URL of the run's OpenAI API, for agents on the node of Serve's proxy or, if the proxy listens on
    every interface, on any node. Blocking.

    Raises:
        ConfigError: Serve listens on loopback, and not on this node.
        InfraError: the application cannot be reached over HTTP.
    """
    if (address := ray_internals.http_address()) is None:
        raise InfraError(
            "Ray Serve was started on this cluster by another user without HTTP, so no agent can reach this run "
            "(rollout.agent). Shut Serve down there, or start a separate cluster for the run: ray.address=null"
        )
    host, port = address
    proxies = _proxy_addresses()
    if host in _ANYWHERE:
        host = next(iter(proxies), _ANYWHERE[host])
    elif host in LOOPBACK and (node := ray.util.get_node_ip_address()) not in proxies:
        fix = (
            "http_options: {host: 0.0.0.0} of the Serve file, and serve: {api_key_env: NAME} in its args"
            if app.attached
            else "serve.host=0.0.0.0 serve.api_key_env=NAME, after `serve shutdown` if Serve runs already"
        )
        raise ConfigError(
            f"rollout.agent: Ray Serve listens on {host} of {', '.join(proxies) or 'no node'}, and the Rollouter is on "
            f"{node}, so its agents would not reach the run. Serve has proxies on the head node and, unless "
            "proxy_location is HeadOnly, on nodes with replicas: launch on one of these, or let Serve listen on all "
            f"addresses ({fix})"
        )
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}{ray_internals.route_prefix_of(app.name)}/v1"


def _proxy_addresses() -> list[str]:
    """Return the addresses of the nodes on which Serve has a proxy."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [nodes[node] for node in serve.status().proxies if node in nodes]


class RolloutCalls:
    """Forwards agents' requests through Ray to the Rollouter that issued their key.

    A Rollouter that replaces another has a new name and new keys. So has a run that attaches to this application.
    """

    def __init__(self, store_namespace: str, *, call_s: float) -> None:
        self._store_namespace = store_namespace
        self._call_s = call_s
        self._actors: dict[int, tuple[Any, float]] = {}
        """The Rollouters by incarnation, each with the time limit of a request."""
        self._limit: anyio.Semaphore | None = None
        """Created in the replica: it belongs to an event loop, and this object is pickled."""

    async def answer(self, key: str, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """Forward one request and return the Rollouter's response.

        Raises:
            RequestError: the Rollouter that issued the key is gone.
        """
        incarnation = _incarnation(key)
        async with self._places():
            is_known = incarnation in self._actors
            try:
                return await self._ask(incarnation, key, path, body)
            except ray.exceptions.RayActorError as error:
                self._actors.pop(incarnation, None)
                if not is_known:
                    raise unknown_key() from error
            # The Rollouter of an earlier run is gone. The request did not reach one of this run.
            try:
                return await self._ask(incarnation, key, path, body)
            except ray.exceptions.RayActorError as error:
                raise unknown_key() from error

    async def stream(
        self, key: str, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[GatewayResponse | bytes, None]:
        """Forward one request with `stream: true` and yield the Rollouter's items. Closing the iterator cancels the
        request.

        Raises:
            RequestError: the Rollouter that issued the key is gone.
        """
        incarnation = _incarnation(key)
        async with self._places():
            for is_known in (True, False) if incarnation in self._actors else (False,):
                begun = False
                try:
                    async with aclosing(self._items(incarnation, key, path, body)) as items:
                        async for item in items:
                            begun = True
                            yield item
                    return
                except ray.exceptions.RayActorError as error:
                    self._actors.pop(incarnation, None)
                    if begun:
                        raise engines_failed() from error
                    if not is_known:
                        raise unknown_key() from error
                # The Rollouter of an earlier run is gone. The request did not reach one of this run.

    async def _items(
        self, incarnation: int, key: str, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[GatewayResponse | bytes, None]:
        """Raises `RayActorError` if the Rollouter is gone."""
        actor, limit_s = await self._actor(incarnation)
        items = actor.stream.remote(key, path, body)
        until = anyio.current_time() + limit_s
        ended = False
        try:
            while True:
                try:
                    with anyio.fail_after(until - anyio.current_time()):
                        item = await (await anext(items))
                except StopAsyncIteration:
                    break
                yield item
            ended = True
        except TimeoutError as error:
            raise engines_failed() from error
        except ray.exceptions.RayError as error:
            ended = True
            gone = isinstance(error, ray.exceptions.RayActorError)
            if gone and not isinstance(
                error, ray.exceptions.ActorUnavailableError
            ):  # the latter may be reachable again
                raise
            raise engines_failed() from error
        finally:
            if not ended:
                ray.cancel(items)  # the client has disconnected, so the engine stops its turn

    def _places(self) -> anyio.Semaphore:
        if self._limit is None:
            self._limit = anyio.Semaphore(MAX_AGENT_REQUESTS)
        return self._limit

    async def _ask(self, incarnation: int, key: str, path: str, body: Mapping[str, Any]) -> GatewayResponse:
        """Raises `RayActorError` if the Rollouter is gone."""
        actor, limit_s = await self._actor(incarnation)
        answer = actor.answer.remote(key, path, body)
        try:
            with anyio.fail_after(limit_s):
                response: GatewayResponse = await answer
        except TimeoutError as error:
            ray.cancel(answer)
            raise engines_failed() from error
        except asyncio.CancelledError:
            ray.cancel(answer)  # the client has disconnected, so the engine stops its turn
            raise
        except ray.exceptions.ActorUnavailableError as error:
            raise engines_failed() from error  # it may be reachable again
        except ray.exceptions.RayActorError:
            raise
        except ray.exceptions.RayError as error:
            raise engines_failed() from error
        return response

    async def _actor(self, incarnation: int) -> tuple[Any, float]:
        if incarnation not in self._actors:
            try:
                found = await attached_run(self._store_namespace, limit_s=self._call_s)
            except InfraError as error:
                raise engines_failed() from error
            if found is None:
                raise unknown_key()
            _, run = found
            find = partial(ray.get_actor, rollouter_name(incarnation), run.namespace)
            try:
                with anyio.fail_after(self._call_s):
                    actor = await to_thread.run_sync(find, abandon_on_cancel=True)
            except ValueError as error:
                raise unknown_key() from error
            except TimeoutError as error:
                raise engines_failed() from error
            # The Rollouter answers within `agent_s`, so one that does not has lost the request.
            self._actors[incarnation] = actor, run.agent_s + self._call_s
        return self._actors[incarnation]


def _incarnation(key: str) -> int:
    incarnation = incarnation_of(key)
    assert incarnation is not None  # the middleware forwards trajectory keys only
    return incarnation


class ServedReplicas:
    """The replicas as the HTTP API sees them, see `openai_app.ReplicaFleet`."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas
        self.count()  # the handle follows the replicas from its first use on

    def count(self) -> int:
        """Return how many replicas can be sent requests now."""
        return ray_internals.routable_replicas(self._replicas)

    async def metrics(self) -> Sequence[str]:
        """Return the metrics of each replica, without those of replicas that fail or do not answer in time."""
        try:
            answers = await ray_internals.each_answer(self._replicas.broadcast("engine_metrics"), limit_s=METRICS_S)
            return [one for one in answers if isinstance(one, str)]
        except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
            logger.warning("the replicas' metrics are missing: %s", error)
            return ()


class HttpFrontEnd:
    """The deployment of the HTTP API. Serve starts one replica of it."""

    def __init__(
        self, replicas: DeploymentHandle[Any], options: ServingOptions, access: HttpAccess, trajectories: bool
    ) -> None:
        self._replicas = replicas
        self._options = options
        self._access = access
        self._trajectories = trajectories

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the app. Serve calls this once, in the process that serves the app."""
        from rollouter.serving.openai_app import openai_app

        model = self._options.llm_config["model_loading_config"]["model_id"]
        app = checked_app(openai_app(model, self._replicas, ServedReplicas(self._replicas)), self._access)
        if not self._trajectories:
            return app
        namespace = self._options.namespace or app_namespace(serve.get_replica_context().app_name)
        return TrajectoryKeyMiddleware(app, RolloutCalls(namespace, call_s=self._options.timeouts.call_s))


def build_http_app(
    options: ServingOptions, access: HttpAccess, *, call_format: str, trajectories: bool = False
) -> serve.Application:
    """Return the Serve application of the replicas with the OpenAI API in front of them.

    Args:
        access: Which requests are answered.
        call_format: The name of vLLM's tool parser.
        trajectories: Whether requests with a trajectory's key are forwarded to the Rollouter.

    Raises:
        ConfigError: there is no such parser.
    """
    kwargs = dict(options.llm_config["engine_kwargs"])
    if call_format != NO_TOOLS:
        check_format(call_format)
        kwargs = {"enable_auto_tool_choice": True, "tool_call_parser": call_format, **kwargs}
    options = replace(options, llm_config={**options.llm_config, "engine_kwargs": kwargs})
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(RolloutReplica)
    front = serve.deployment(name="openai", max_ongoing_requests=1_000_000, ray_actor_options={"num_cpus": 0})
    replicas = deployment.bind(options, openai=True)
    return front(serve.ingress()(HttpFrontEnd)).bind(replicas, options, access, trajectories)
