"""Everything that the project takes from the inside of Ray Serve and of Ray's LLM library, and most of what it takes
from that of Ray: it may change with any release.

`tests/rollouter/serving/test_ray_internals.py` fails on a version of Ray other than `CHECKED_RAY` and names what is
missing there. The names of Ray's LLM library are imported at their first use, because they import vLLM, which
takes 7 s on CPU; the driver needs only the functions.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING, Any, cast

import ray
from ray._private import services, state
from ray._private.worker import global_worker
from ray.serve._private.common import (
    REPLICA_ID_FULL_ID_STR_PREFIX,
    DeploymentHandleSource,
    DeploymentID,
    RequestMetadata,
)
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from asyncrl.core.failures import InfraError

if TYPE_CHECKING:
    from ray.llm._internal.common.errors import VLLM_CLIENT_ERRORS
    from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse, OpenAIHTTPException
    from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS, OpenAiIngress
    from ray.llm._internal.serve.core.ingress.middleware import SetRequestIdMiddleware
    from ray.llm._internal.serve.core.server.llm_server import LLMServer
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

__all__ = [
    "DEFAULT_ENDPOINTS",
    "VLLM_CLIENT_ERRORS",
    "DeploymentHandleSource",
    "DeploymentID",
    "ErrorResponse",
    "LLMServer",
    "OpenAIHTTPException",
    "OpenAiIngress",
    "PowerOfTwoChoicesRequestRouter",
    "PrefixCacheAffinityRouter",
    "PrefixTree",
    "RequestMetadata",
    "SetRequestIdMiddleware",
    "VLLMEngine",
]

CHECKED_RAY = "2.60.0"
"""The version of Ray with which the tests of serving have passed."""
REPLICA_TITLE = "ray::ServeReplica:"
"""Start of the command line of a replica's process."""
LLM_MODULES = {
    "DEFAULT_ENDPOINTS": "ray.llm._internal.serve.core.ingress.ingress",
    "ErrorResponse": "ray.llm._internal.serve.core.configs.openai_api_models",
    "LLMServer": "ray.llm._internal.serve.core.server.llm_server",
    "OpenAIHTTPException": "ray.llm._internal.serve.core.configs.openai_api_models",
    "OpenAiIngress": "ray.llm._internal.serve.core.ingress.ingress",
    "PrefixCacheAffinityRouter": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
    "PrefixTree": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree",
    "SetRequestIdMiddleware": "ray.llm._internal.serve.core.ingress.middleware",
    "VLLM_CLIENT_ERRORS": "ray.llm._internal.common.errors",
    "VLLMEngine": "ray.llm._internal.serve.engines.vllm.vllm_engine",
}


def __getattr__(name: str) -> Any:
    if name not in LLM_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LLM_MODULES[name]), name)


def import_llm_library(most_attempts: int = 20) -> None:
    """Import Ray's LLM library.

    Ray 2.60 registers its connectors in the cluster during the import, after it has looked whether they are registered.
    So of two replicas that start at the same time, the import of one may fail; it succeeds when it is repeated.
    """
    for attempt in range(1, most_attempts + 1):
        try:
            import_module("ray.serve.llm")
        except ValueError as error:
            if "is already registered" not in str(error) or attempt == most_attempts:
                raise
        else:
            return


@contextmanager
def processes_in_own_sessions() -> Iterator[None]:
    """Start Ray inside this context: each process of its node (GCS, raylet, …) gets a session of its own (Linux).

    A signal to the driver's process group (`timeout`, a container's runtime) then reaches the driver alone, which stops
    the run with a checkpoint; otherwise Ray would end in the same moment, and the driver with it. Ray still asks
    the kernel to end its processes when the driver dies; where it cannot, it ends them by their group.
    """
    if sys.platform != "linux":
        yield
        return
    original = services.ConsolePopen
    services.ConsolePopen = partial(original, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = original


@contextmanager
def serve_log_stays_open() -> Iterator[None]:
    """Start an engine inside this context, in the process of a replica.

    vLLM configures logging with `dictConfig`, which closes all existing handlers. Serve's `MemoryHandler` then has no
    target any more: it writes nothing and keeps every record, about 1 KB per request, until the process ends.
    """
    handlers = [one for one in logging.getLogger(SERVE_LOGGER_NAME).handlers if isinstance(one, MemoryHandler)]
    targets = [handler.target for handler in handlers]
    try:
        yield
    finally:
        for handler, target in zip(handlers, targets, strict=True):
            handler.setTarget(target)  # its file is opened again by the next record


class PlacementRouter(RequestRouter):
    """A request router that learns what becomes of each call that it routes.

    Serve's public hooks report calls that a replica has accepted and tries that have ended. A caller that is cancelled
    while Serve routes its call appears in none of them.
    """

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self.on_request_abandoned(pending_request)
            raise
        self.on_request_placed(pending_request, replica.replica_id)
        return replica

    def on_request_placed(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        """Serve sends the call to this replica now; `on_request_completed` follows once, even if sending fails."""
        raise NotImplementedError

    def on_request_abandoned(self, pending_request: PendingRequest) -> None:
        """Serve will not send the call, because the caller was cancelled or routing failed."""
        raise NotImplementedError


async def choose_replica(router: RequestRouter, request: PendingRequest) -> RunningReplica:
    """Have a router choose the replica of a call as Serve does, through its queue of pending calls."""
    return await router._choose_replica_for_request(request)


def replica_prefix(app: str) -> str:
    """Return the start of the names that Serve gives the replicas of an application and their placement groups."""
    return f"{REPLICA_ID_FULL_ID_STR_PREFIX}{app}#"


def routable_replicas(handle: DeploymentHandle[Any]) -> int:
    """Return how many replicas this handle can send calls to at this moment."""
    router = handle._init_router()._asyncio_router._request_router  # None until the handle has received its options
    return 0 if router is None else len(router.curr_replicas)


async def each_answer(response: DeploymentBroadcastResponse, *, limit_s: float) -> list[Any]:
    """Return the answers of a broadcast that arrive in time. `results_async` has none if one of them does not.

    Raises:
        TimeoutError: Serve did not send the calls in time.
    """
    until = time.monotonic() + limit_s
    replicas = await asyncio.wait_for(response._fetch_replica_results_async(), limit_s)
    left_s = max(0.0, until - time.monotonic())
    calls = [asyncio.wait_for(replica.get_async(), left_s) for replica in replicas]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def asked_to_end() -> bool:
    """Return whether Serve has asked this replica to end. Call it in the process of a replica.

    Serve waits for the replica's calls to end, for `graceful_shutdown_timeout_s`, before it calls the replica's own
    code (`__del__`), so the replica could not hand its calls back.
    """
    actor = global_worker.actors[ray.ActorID.from_hex(ray.get_runtime_context().get_actor_id())]
    return bool(actor._replica_impl._shutting_down)


def http_address() -> tuple[str, int] | None:
    """Return host and port on which Serve listens, or None if it runs without HTTP. Blocking."""
    options = _get_global_client().http_config
    if options.host is None or options.location == ProxyLocation.Disabled:
        return None
    return options.host, options.port


def route_prefix_of(app: str) -> str:
    """Return the path under which Serve offers an application over HTTP, without a slash at its end. Blocking.

    Raises:
        InfraError: Serve does not run the application, or offers it by handle only.
    """
    details = cast("dict[str, Any]", _get_global_client().get_serve_details())
    prefix = details["applications"].get(app, {}).get("route_prefix")
    if prefix is None:
        raise InfraError(
            f"Ray Serve does not offer the application {app} over HTTP, so no agent can reach it (rollout.agent); "
            "deploy it with a route_prefix"
        )
    return str(prefix).rstrip("/")


def deployed_environment(name: str) -> dict[str, str]:
    """Return the value that the replicas of each application have for an environment variable, empty for those without
    it. Requires that Serve runs. Blocking."""
    details = cast("dict[str, Any]", _get_global_client().get_serve_details())
    values = {}
    for app, found in details["applications"].items():
        options = [one["deployment_config"].get("ray_actor_options") or {} for one in found["deployments"].values()]
        given = [((one.get("runtime_env") or {}).get("env_vars") or {}).get(name, "") for one in options]
        values[app] = next(filter(None, given), "")
    return values


def living_drivers() -> frozenset[str]:
    """Return the job ids of the drivers that are connected to the cluster. Blocking."""
    return frozenset(job["JobID"] for job in state.jobs() if not job["IsDead"])
