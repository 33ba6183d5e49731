"""`asyncrl serve`: the rollout engines alone, behind the OpenAI-compatible HTTP API, until Ctrl-C."""

from __future__ import annotations

import functools
import json
import shlex

import anyio
import click

from asyncrl.cli.cluster import cluster
from asyncrl.cli.interrupts import Interrupts
from asyncrl.config.schema import Config
from asyncrl.failures import first_failure

INTERRUPTED = 130


def serve(config: Config) -> int:
    """Serve until SIGINT or SIGTERM; a second one ends at once. Exit code: 0 if it was up by then, else 130.

    Raises:
        InfraError: the engines, Ray or the HTTP server cannot start.
        ConfigError: the address asks for an API key and there is none.
    """
    click.echo(f"starting {config.rollout.num_replicas} engine(s) for {config.model.path}; Ctrl-C stops", err=True)
    try:
        return anyio.run(_serve, config)
    except BaseExceptionGroup as error:
        raise first_failure(error) from None


async def _serve(config: Config) -> int:
    interrupts = Interrupts()
    up = False
    with interrupts.scope:
        async with anyio.create_task_group() as group:
            await group.start(interrupts.listen)
            async with cluster(config, "serve") as namespace:
                # Only now: the parts import Ray, whose settings the cluster has put into the environment.
                from rollouter.serving.app import start_app, stop_app

                await start_app(config, namespace=namespace, http=True)
                stop = anyio.Event()
                interrupts.orderly = functools.partial(_set, stop)
                up = True
                click.echo(_greeting(config, namespace))
                await stop.wait()
                click.echo("stopping", err=True)
                # The app goes down before Ray does, or the engines are killed instead of stopped.
                with anyio.move_on_after(config.timeouts.stop_s):
                    await stop_app(namespace)
            group.cancel_scope.cancel()
    return 0 if up else INTERRUPTED


async def _set(event: anyio.Event) -> None:
    event.set()


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
