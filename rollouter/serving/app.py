"""The Ray Serve application: built, started, watched while it starts, stopped."""

from __future__ import annotations

import logging
import os

import anyio
import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError, DeadlineError, InfraError
from rollouter.serving.options import DEPLOYMENT_NAME, deployment_options, serving_options
from rollouter.serving.replica import RolloutReplica

APP_NAME = "asyncrl"
STATUS_PERIOD_S = 0.2
"""Serve has no call that waits for a deployment's fate; its own client asks again and again as well."""


def build_rollout_app(config: Config, *, namespace: str, http: bool) -> serve.Application:
    """The application for `config`; needs a connected Ray.

    Args:
        config: The run.
        namespace: Ray namespace of the weight store.
        http: Add Ray's OpenAI-compatible ingress. Without it, only handles reach the replicas, and the driver need
            not import vLLM.

    Raises:
        ConfigError: see `serving_options`.
    """
    options = serving_options(config, namespace=namespace, gpus=ray.cluster_resources().get("GPU", 0) > 0)
    if http:
        from rollouter.serving.http import build_http_app

        return build_http_app(options, _api_key(config))
    deployment = serve.deployment(name=DEPLOYMENT_NAME, **deployment_options(options))(RolloutReplica)
    return deployment.bind(options)


async def start_app(config: Config, *, namespace: str, http: bool = False) -> None:
    """Deploy and wait until every replica is up.

    Raises:
        InfraError: a replica could not start; the message carries its error.
        DeadlineError: they were not up within `timeouts.start_s`.
        ConfigError: see `build_rollout_app`.
    """
    limit_s = config.timeouts.start_s
    try:
        with anyio.fail_after(limit_s):
            await anyio.to_thread.run_sync(_deploy, config, namespace, http, abandon_on_cancel=True)
            await _started()
    except TimeoutError as error:
        raise DeadlineError(f"the engines were not up within timeouts.start_s={limit_s:g}") from error


async def stop_app() -> None:
    """Take the application and Serve down."""
    await anyio.to_thread.run_sync(serve.shutdown)


def _deploy(config: Config, namespace: str, http: bool) -> None:
    # Serve tells about each start at INFO, on a terminal that belongs to the live view.
    logging.getLogger("ray.serve").setLevel(config.logging.level.upper())
    if http:
        serve.start(http_options=HTTPOptions(host=config.serve.host, port=config.serve.port))
    else:
        serve.start(proxy_location="Disabled")
    app = build_rollout_app(config, namespace=namespace, http=http)
    target = serve.RunTarget(target=app, name=APP_NAME, route_prefix="/" if http else None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


async def replicas_up(limit_s: float) -> None:
    """Wait until Serve has replaced whatever replicas ended.

    Raises:
        DeadlineError: not within `limit_s`.
    """
    try:
        with anyio.fail_after(limit_s):
            while (await _status()).status is not ApplicationStatus.RUNNING:  # noqa: ASYNC110  see STATUS_PERIOD_S
                await anyio.sleep(STATUS_PERIOD_S)
    except TimeoutError as error:
        raise DeadlineError(f"replicas that ended were not replaced within {limit_s:g} s") from error


async def _started() -> None:
    while (app := await _status()).status is not ApplicationStatus.RUNNING:
        if app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            reasons = [deployment.message for deployment in app.deployments.values() if deployment.message]
            cause = "\n".join(reasons) or app.message
            raise InfraError(f"the rollout engines did not start: {cause.strip().splitlines()[-1]}", cause)
        await anyio.sleep(STATUS_PERIOD_S)


async def _status() -> ApplicationStatusOverview:
    return (await anyio.to_thread.run_sync(serve.status)).applications[APP_NAME]


def _api_key(config: Config) -> str | None:
    """The key that HTTP clients must send.

    Raises:
        ConfigError: the variable is empty, or there is none and the address is not loopback.
    """
    name = config.serve.api_key_env
    if name is None:
        if config.serve.host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"serve.host={config.serve.host!r} is reachable from outside and serve.api_key_env is not set: "
                "anybody could use the model; set serve.api_key_env, or serve.host=127.0.0.1"
            )
        return None
    key = os.environ.get(name, "")
    if not key:
        raise ConfigError(f"serve.api_key_env={name!r}: the environment variable is empty or not set; export {name}=…")
    return key
