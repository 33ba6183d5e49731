"""Publishes versions to rollout servers while they stream, as a run that has attached to them does."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import ray
from numpy.typing import NDArray

from asyncrl.config.schema import Config
from asyncrl.weights.object_store import ObjectStorePublisher, ServedRun, claim_store
from benchmarks.stream.statistics import SyncWindow
from rollouter.serving.app import attach
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.options import rollout_app

NAMESPACE = "bench-stream-sync"


def read_weights(model: Path) -> dict[str, NDArray[Any]]:
    """Read the tensors of a model's directory.

    Raises:
        ValueError: it has no safetensors files.
    """
    from safetensors.numpy import load_file

    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{model} has no *.safetensors file, so there are no weights to publish; name a model directory"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class VersionPublisher:
    """Publishes the same weights again and again, each time as a new version. The servers keep the last one."""

    def __init__(self, config: Config, publisher: ObjectStorePublisher, weights: dict[str, NDArray[Any]]) -> None:
        self._publisher = publisher
        self._weights = weights
        self._fleet = ServeFleet(config, namespace=NAMESPACE)
        self._version = 0

    async def publish_every(self, seconds: float, now: Callable[[], float], windows: list[SyncWindow]) -> None:
        """Publish a version every so many seconds, or as soon as the previous one is applied, until cancelled."""
        due = now()
        while True:
            due = max(due + seconds, now())
            await anyio.sleep(due - now())
            begin = now()
            self._version += 1
            publication = await self._publisher.publish(self._version, self._version, self._weights, validate=False)
            await self._fleet.apply(publication)
            windows.append(SyncWindow(self._version, begin, now()))


@asynccontextmanager
async def attached(config: Config, model: Path) -> AsyncIterator[VersionPublisher]:
    """Claim the store of the application `rollout.attach` and attach to its replicas, until the block ends.

    Raises:
        ConfigError: a run is attached, or there is no such application.
    """
    app = rollout_app(config, NAMESPACE)
    name = f"benchmarks.stream on {socket.gethostname()}"
    served = ServedRun.of(config, name=name, namespace=NAMESPACE)
    store = await claim_store(app.store_namespace, served, max_restarts=0, limit_s=config.timeouts.start_s)
    try:
        await attach(config, app)
        publisher = ObjectStorePublisher(store, call_s=config.timeouts.call_s)
        yield VersionPublisher(config, publisher, read_weights(model))
    finally:
        ray.kill(store)
