"""Builds, starts and stops the Serve applications of a run.

The engines are one application and a served reward model is another, so that Serve reports their states separately.
Both are named after the run's Ray namespace, since runs may share a cluster.

`build_app` builds the engines' application for Serve's own commands. It is deployed separately, and runs attach to it:

    serve deploy ─▶ replicas ─▶ engines, with the weights of the model's files or of the last run
    launch ─▶ claim the weight store of the application ─▶ attach: replicas follow this store until the next attach
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState

from asyncrl.config.compose import check_config
from asyncrl.config.environment import visible_gpus
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import on_gpus
from asyncrl.core.failures import ConfigError, DeadlineError, EngineCrashError, InfraError, ReplicaLeftError
from rollouter.serving import ray_internals
from rollouter.serving.access import http_access
from rollouter.serving.client import FIRST_BACKOFF_S
from rollouter.serving.handles import connect, typed
from rollouter.serving.http import route_prefix
from rollouter.serving.options import (
    DEPLOYMENT_NAME,
    DRIVER_MARK,
    RolloutApp,
    app_name,
    deployment_options,
    lent_app,
    serving_options,
)
from rollouter.serving.replica.deployment import RolloutReplica
from rollouter.serving.reward_model import build_reward_app

logger = logging.getLogger(__name__)

CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__name__}: "
"""Start of a traceback's last line that identifies a `ConfigError` in a replica's constructor."""
STATUS_PERIOD_S = 0.5
"""Interval of status polls. Serve has no call that waits for a deployment; Serve's client polls as well."""
REPLACED_S = 10.0
"""Time for which replicas that have failed are waited for until Serve has replaced them. If the cluster has no room for
their successors, the run goes on with the others."""

SHORT_ARGUMENTS = {"model": "model.path", "num_replicas": "rollout.num_replicas"}
"""Arguments of `build_app` with a shorter name than the configuration's key."""


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build rollout servers for `serve run rollouter.serving.app:build_app model=… num_replicas=2`, `serve deploy` and
    KubeRay, to which runs attach (`rollout.attach`). They also offer the OpenAI API.

    Args:
        args: `config` (a YAML file or a recipe's name; the default is the quickstart's), `model` and `num_replicas`,
            and keys of the configuration, nested or with dots: `rollout`, `model`, `serve` and others.

    Raises:
        ConfigError: with every problem of the arguments.
    """
    given = dict(args)
    source = given.pop("config", None)
    config = check_config(source, tuple(_overrides(given)), scope="app").require()
    return build_rollout_app(config, namespace=None, http=True, agents=True)


def _overrides(args: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key=value` for each argument."""
    for name, value in args.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{SHORT_ARGUMENTS.get(key, key)}={text}"


def build_rollout_app(
    config: Config, *, namespace: str | None, http: bool, agents: bool = False, lent: bool = False
) -> serve.Application:
    """Return the application of the engines for `config`.

    Args:
        namespace: Ray namespace of the weight store; None: that of the application, to which runs attach.
        http: Add Ray's OpenAI-compatible ingress. Without it, the replicas are reachable by handles only, and the
            driver need not import vLLM.
        agents: Also forward requests of the run's agents to the Rollouter.
        lent: The engines are those on GPUs that the Trainer lends.

    Raises:
        ConfigError: the address requires an API key and none is set.
    """
    options = serving_options(config, namespace=namespace, gpus=_gpus(), lent=lent)
    if namespace is not None:
        options = replace(options, driver=ray.get_runtime_context().get_job_id())
    if http:
        from rollouter.agent.parsing import resolve_format
        from rollouter.serving.http import build_http_app

        return build_http_app(
            options,
            http_access(config.serve),
            call_format=resolve_format(config.rollout.multi_turn.format, config.model),
            trajectories=agents,
        )
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(RolloutReplica)
    return deployment.bind(options)


async def start_app(config: Config, *, namespace: str, http: bool = False, engines: bool = True) -> None:
    """Deploy the applications and wait until every replica is up. Engines are not deployed with `rollout.attach`.

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
    engines = engines and config.rollout.attach is None
    names = {app_name(namespace): "the rollout engines"} if engines else {}
    if engines and config.lends_gpus and not http:
        names[lent_app(namespace).name] = "the engines on the Trainer's GPUs"
    if config.reward_model.placement == "serve" and not http:
        names[app_name(namespace, "reward")] = "the reward model's replicas"
    _quiet_serve(config)
    if not names:
        return
    try:
        with anyio.fail_after(limit_s):
            await anyio.to_thread.run_sync(_deploy, config, namespace, http, engines, abandon_on_cancel=True)
            await _started(names)
    except TimeoutError:
        raise DeadlineError(
            f"{' and '.join(names.values())} were not up within {limit_s:g} s (timeouts.start_s). Their logs are in "
            "logs/ray of the run directory; on a slow machine, raise timeouts.start_s"
        ) from None


async def attach(config: Config, app: RolloutApp) -> None:
    """Let the replicas of a separately deployed application follow the run's weight store, which has been claimed.

    Raises:
        ConfigError: the application does not run, or its engines do not fit the run.
        InfraError: a replica refused; the message has its error.
        DeadlineError: no replica was up, or one did not answer, within `timeouts.start_s`.
    """
    limit_s = config.timeouts.start_s
    try:
        with anyio.fail_after(limit_s):
            await _attach_all(app, limit_s)
    except TimeoutError:
        message = ""
        with anyio.move_on_after(config.timeouts.call_s), suppress(InfraError):
            message = await serve_messages(app.name)
        raise DeadlineError(
            f"the replicas of {app.name} did not attach within {limit_s:g} s (timeouts.start_s): they may be starting "
            "or busy; `serve status` shows their state",
            message,
        ) from None


async def _attach_all(app: RolloutApp, limit_s: float) -> None:
    """Attach every replica that runs. If one ends meanwhile, try again. Raises as `attach`."""
    await anyio.to_thread.run_sync(count_replicas, app.name, abandon_on_cancel=True)
    while True:
        await _replaced(app.name)
        handle = await connect(partial(serve.get_deployment_handle, DEPLOYMENT_NAME, app.name), limit_s)
        try:
            await handle.broadcast("attach").results_async()
            return
        except (ray.exceptions.RayError, RayServeException) as error:
            failure = typed(error, f"attaching to {app.name}")
            ended = isinstance(failure, EngineCrashError | ReplicaLeftError)
            if not ended and not isinstance(error, DeploymentUnavailableError):
                raise failure from error
            logger.warning("%s; it is tried again", failure.brief)
        await anyio.sleep(FIRST_BACKOFF_S)


async def _replaced(app: str) -> None:
    """Wait until Serve has replaced all replicas that have ended or, after `REPLACED_S`, until one runs. Those that
    start later follow the run by themselves. Raises as `attach`."""
    until = anyio.current_time() + REPLACED_S
    while True:
        found = await _status(app)
        if found.status is ApplicationStatus.RUNNING:
            return
        if found.status is ApplicationStatus.DEPLOY_FAILED:
            raise _start_error("the rollout servers", found)
        servers = found.deployments.get(DEPLOYMENT_NAME)  # none once the application is deleted
        running = 0 if servers is None else servers.replica_states.get("RUNNING", 0)
        if running and anyio.current_time() >= until:
            logger.warning("attaching to the replicas of %s that run (%d): %s", app, running, _messages(found))
            return
        await anyio.sleep(STATUS_PERIOD_S)


def count_replicas(app: str, source: str = "rollout.attach") -> dict[str, int]:
    """Return how many replicas deployed rollout servers have, by Serve's name of their state. Blocking.

    Args:
        source: The key or option that has the application's name, for messages.

    Raises:
        ConfigError: Serve runs no rollout servers of this name.
    """
    servers = {name: one for name, one in _applications().items() if DEPLOYMENT_NAME in one.deployments}
    if app not in servers:
        alone = ", or leave the key out to start engines with the run" if source == "rollout.attach" else ""
        raise ConfigError(
            f"{source}={app!r}: Ray Serve runs no rollout servers of this name on the cluster, so there is nothing to "
            f"attach to (rollout servers: {', '.join(sorted(servers)) or 'none'}); deploy them with `serve deploy` "
            f"(docs/deploy.md){alone}"
        )
    states = servers[app].deployments[DEPLOYMENT_NAME].replica_states
    return {ReplicaState(state).value: number for state, number in states.items()}  # Serve answers with their names


def _quiet_serve(config: Config) -> None:
    """Keep Serve from logging each start, which would disturb the live view on the terminal."""
    logging.getLogger("ray.serve").setLevel(config.logging.level.upper())


def _applications() -> Mapping[str, ApplicationStatusOverview]:
    try:
        return serve.status().applications
    except RayServeException:  # Serve is not running
        return {}


async def stop_app(namespace: str) -> None:
    """Delete the applications of the run in this namespace, and no others. A cancelled call does not wait for Serve."""
    await anyio.to_thread.run_sync(delete_app, namespace, abandon_on_cancel=True)


def delete_app(namespace: str) -> None:
    """Delete the applications like `stop_app`, but blocking. Do nothing if none was started."""
    delete_apps([app_name(namespace, part) for part in ("reward", "lent", "rollout")])


def marked_apps() -> dict[str, str]:
    """Return Ray's job id of the driver of each application that a launch has deployed. Blocking."""
    if not _applications():
        return {}
    found = ray_internals.deployed_environment(DRIVER_MARK)
    return {app: driver for app, driver in found.items() if driver}


def delete_apps(apps: Collection[str]) -> None:
    """Delete these applications, and wait until their replicas have ended. Blocking.

    Raises:
        DeadlineError: replicas have not ended within Serve's own limit of 60 s. All applications are asked to end.
    """
    late = []
    for app in sorted(_applications().keys() & set(apps)):
        try:
            serve.delete(app)
        except TimeoutError:
            late.append(app)
    if late:
        raise DeadlineError(
            f"Ray Serve has not deleted {', '.join(late)} within 60 s (Serve's own limit), so replicas may keep their "
            "GPUs: Serve goes on with it. Check the nodes of these replicas (`serve status`, `ray status`), and run "
            "`asyncrl clean` again"
        )


def _deploy(config: Config, namespace: str, http: bool, engines: bool) -> None:
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
    if engines and config.lends_gpus and not http:
        app = build_rollout_app(config, namespace=namespace, http=False, lent=True)
        targets.append(serve.RunTarget(target=app, name=lent_app(namespace).name, route_prefix=None))
    if config.reward_model.placement == "serve" and not http:
        gpus = on_gpus(config.rollout.device, _gpus())
        reward = build_reward_app(config, gpus=gpus, driver=ray.get_runtime_context().get_job_id())
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
    """Return whether the cluster has GPUs at present, or this machine, before Ray is connected."""
    return ray.cluster_resources().get("GPU", 0) > 0 if ray.is_initialized() else bool(visible_gpus())


async def replicas_up(app: str, limit_s: float) -> None:
    """Wait until Serve has replaced all replicas that have ended.

    Raises:
        InfraError: the application is gone.
        DeadlineError: a replica was not replaced within `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s):
            while (await _status(app)).status is not ApplicationStatus.RUNNING:  # noqa: ASYNC110  see STATUS_PERIOD_S
                await anyio.sleep(STATUS_PERIOD_S)
    except TimeoutError as error:
        raise DeadlineError(f"replicas that ended were not replaced within {limit_s:g} s") from error


async def _started(names: Mapping[str, str]) -> None:
    """Wait until all these applications run, and raise as soon as one of them fails to start."""
    failed = {ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY}
    waiting = dict(names)
    while waiting:
        for name, what in tuple(waiting.items()):
            app = await _status(name)
            if app.status is ApplicationStatus.RUNNING:
                del waiting[name]
            elif app.status in failed:
                raise _start_error(what, app)
        if waiting:
            await anyio.sleep(STATUS_PERIOD_S)


async def serve_messages(app: str) -> str:
    """Return Serve's messages about the engines, for example why one does not start; empty without messages.

    Raises:
        InfraError: the application is gone.
    """
    return _messages(await _status(app))


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
