"""Builds, starts and stops the Serve applications of a run.

The engines are one application and a served reward model is another, so that Serve reports their states separately.
Both are named after the run's Ray namespace, since runs may share a cluster.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import anyio
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DeadlineError, InfraError
from asyncrl.profiling import PROFILING_OFF
from rollouter.serving.access import http_access
from rollouter.serving.http import route_prefix
from rollouter.serving.options import DEPLOYMENT_NAME, app_name, deployment_options, serving_options
from rollouter.serving.replica.deployment import RolloutReplica
from rollouter.serving.reward_model import build_reward_app

CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__name__}: "
"""Start of a traceback's last line that identifies a `ConfigError` in a replica's constructor."""
STATUS_PERIOD_S = 0.2
"""Interval of status polls. Serve has no call that waits for a deployment; Serve's client polls as well."""


def build_rollout_app(config: Config, *, namespace: str, http: bool, agents: bool = False) -> serve.Application:
    """Return the application of the engines for `config`. Ray must be connected.

    Args:
        http: Add Ray's OpenAI-compatible ingress. Without it, the replicas are reachable by handles only, and the
            driver need not import vLLM.
        agents: Also forward requests of the run's agents to the Rollouter.

    Raises:
        ConfigError: the address requires an API key and none is set.
    """
    options = serving_options(config, namespace=namespace, gpus=_gpus())
    if http:
        from rollouter.serving.http import build_http_app

        if not agents:
            options = replace(options, profiler=PROFILING_OFF)  # no Rollouter would receive the events
        return build_http_app(
            options,
            http_access(config.serve),
            call_format=config.rollout.multi_turn.format,
            trajectories=agents,
        )
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(RolloutReplica)
    return deployment.bind(options)


async def start_app(config: Config, *, namespace: str, http: bool = False, engines: bool = True) -> None:
    """Deploy the applications and wait until every replica is up.

    Args:
        http: Deploy engines with an HTTP API and no reward model, for `asyncrl serve`. In a run, `rollout.agent`
            decides whether the engines have an HTTP API.
        engines: Deploy the engines; if False, deploy only the reward model.

    Raises:
        InfraError: a replica could not start; the message contains the replica's error.
        DeadlineError: the replicas were not up within `timeouts.start_s`.
        ConfigError: see `build_rollout_app` and `RewardClassifier.load`.
    """
    limit_s = config.timeouts.start_s
    names = {app_name(namespace): "the rollout engines"} if engines else {}
    if config.reward_model.placement == "serve" and not http:
        names[app_name(namespace, "reward")] = "the reward model's replicas"
    try:
        with anyio.fail_after(limit_s):
            await anyio.to_thread.run_sync(_deploy, config, namespace, http, engines, abandon_on_cancel=True)
            await _started(names)
    except TimeoutError:
        raise DeadlineError(
            f"{' and '.join(names.values())} were not up within {limit_s:g} s (timeouts.start_s). Their logs are in "
            "logs/ray of the run directory; on a slow machine, raise timeouts.start_s"
        ) from None


async def stop_app(namespace: str) -> None:
    """Delete the applications of the run in this namespace, and no others."""
    await anyio.to_thread.run_sync(delete_app, namespace)


def delete_app(namespace: str) -> None:
    """Delete the applications like `stop_app`, but blocking. Do nothing if none was started."""
    try:
        running = serve.status().applications
    except RayServeException:  # Serve is not running
        return
    for part in ("reward", "rollout"):
        if (name := app_name(namespace, part)) in running:
            serve.delete(name)


def _deploy(config: Config, namespace: str, http: bool, engines: bool) -> None:
    # Serve logs each start at INFO, which would disturb the live view on the terminal.
    logging.getLogger("ray.serve").setLevel(config.logging.level.upper())
    agents = config.rollout.agent.enabled and engines and not http
    if http:
        serve.start(http_options=HTTPOptions(host=config.serve.host, port=config.serve.port))
    elif agents:
        serve.start(http_options=HTTPOptions(host=config.serve.host, port=_port(config)))
    else:
        serve.start(proxy_location="Disabled")
    targets = []
    if engines:
        app = build_rollout_app(config, namespace=namespace, http=http or agents, agents=agents)
        prefix = route_prefix(namespace) if agents else "/" if http else None
        targets.append(serve.RunTarget(target=app, name=app_name(namespace), route_prefix=prefix))
    if config.reward_model.placement == "serve" and not http:
        reward = build_reward_app(config, gpus=_gpus())
        targets.append(serve.RunTarget(target=reward, name=app_name(namespace, "reward"), route_prefix=None))
    try:
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    except RayServeException as error:
        raise InfraError.wrap(f"Ray Serve refuses the application: {error}", error) from error


def _port(config: Config) -> int:
    """Return the port for agents: `serve.port`, or any free port of this machine if that one is taken. On an existing
    cluster it is always `serve.port`, because Serve may be running there already."""
    wanted = (config.serve.port, 0) if config.ray.address is None else ()
    for port in wanted:
        family = socket.AF_INET6 if ":" in config.serve.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.serve.host, port))
            return int(probe.getsockname()[1])
    return config.serve.port


def _gpus() -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0


async def replicas_up(namespace: str, limit_s: float) -> None:
    """Wait until Serve has replaced all replicas that have ended.

    Raises:
        InfraError: the application is gone.
        DeadlineError: a replica was not replaced within `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s):
            while (await _status(app_name(namespace))).status is not ApplicationStatus.RUNNING:  # noqa: ASYNC110  see STATUS_PERIOD_S
                await anyio.sleep(STATUS_PERIOD_S)
    except TimeoutError as error:
        raise DeadlineError(f"replicas that ended were not replaced within {limit_s:g} s") from error


async def _started(names: Mapping[str, str]) -> None:
    """Wait until all these applications run, and raise as soon as one of them fails to start."""
    waiting = dict(names)
    while waiting:
        for name, what in tuple(waiting.items()):
            app = await _status(name)
            if app.status is ApplicationStatus.RUNNING:
                del waiting[name]
            elif app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise _start_error(what, app)
        if waiting:
            await anyio.sleep(STATUS_PERIOD_S)


async def serve_messages(namespace: str) -> str:
    """Return Serve's messages about the run's engines, for example why one does not start; empty without messages.

    Raises:
        InfraError: the application is gone.
    """
    return _messages(await _status(app_name(namespace)))


def _messages(app: ApplicationStatusOverview) -> str:
    return "\n".join(one.message for one in app.deployments.values() if one.message) or app.message


def _start_error(what: str, app: ApplicationStatusOverview) -> ConfigError | InfraError:
    cause = _messages(app)
    last = cause.strip().splitlines()[-1] if cause.strip() else app.status.value
    _, marker, message = last.partition(CONFIG_ERROR)
    return ConfigError(message) if marker else InfraError(f"{what} did not start: {last}", cause)


async def _status(name: str) -> ApplicationStatusOverview:
    """Return Serve's status of an application. A cancelled call does not wait for Serve's answer.

    Raises:
        InfraError: Serve has no such application.
    """
    applications = (await anyio.to_thread.run_sync(serve.status, abandon_on_cancel=True)).applications
    if name not in applications:
        there = ", ".join(sorted(applications)) or "none"
        raise InfraError(
            f"Ray Serve has no application {name} any more (it has {there}): it was deleted, or Serve was shut "
            "down; start the run again, with resume=auto to continue from its last checkpoint if it has one"
        )
    return applications[name]
