"""`asyncrl serve`: the rollout engines alone, behind the OpenAI-compatible HTTP API, until Ctrl-C."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import anyio
import anyio.abc
import click

from asyncrl.cli.cluster import cluster
from asyncrl.config.schema import Config

INTERRUPTED = 130


def serve(config: Config) -> int:
    """Serve until SIGINT or SIGTERM. Exit code: 0 if it was up by then, else 130.

    Raises:
        InfraError: the engines, Ray or the HTTP server cannot start.
        ConfigError: the address asks for an API key and there is none.
    """
    click.echo(f"starting {config.rollout.num_replicas} engine(s) for {config.model.path}; Ctrl-C stops", err=True)
    with cluster(config, Path("serve")) as namespace:
        return anyio.run(_serve, config, namespace)


async def _serve(config: Config, namespace: str) -> int:
    from rollouter.serving.app import start_app, stop_app

    up = False
    try:
        async with anyio.create_task_group() as group:
            await group.start(_cancel_on_signal, group.cancel_scope)
            await start_app(config, namespace=namespace, http=True)
            up = True
            click.echo(_greeting(config, namespace))
            await anyio.sleep_forever()
    finally:
        # Serve goes down before Ray does, or its replicas' engines are killed instead of stopped.
        with anyio.CancelScope(shield=True), anyio.move_on_after(config.timeouts.stop_s):
            await stop_app()
    return 0 if up else INTERRUPTED


async def _cancel_on_signal(
    scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            click.echo("stopping", err=True)
            scope.cancel()
            return


def _greeting(config: Config, namespace: str) -> str:
    from rollouter.serving.options import serving_options

    loading = serving_options(config, namespace=namespace, gpus=False).llm_config["model_loading_config"]
    host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
    url = f"http://{host}:{config.serve.port}/v1"
    body = json.dumps({"model": loading["model_id"], "messages": [{"role": "user", "content": "12+34"}]})
    key = f' -H "Authorization: Bearer ${config.serve.api_key_env}"' if config.serve.api_key_env else ""
    return (
        f"serving {loading['model_id']} on {url}\n\n"
        f"  curl {url}/chat/completions{key} \\\n    -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
    )
