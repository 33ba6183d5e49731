"""The sinks that a configuration asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from asyncrl.config.schema import Config
from asyncrl.run_dir import RunDir
from asyncrl.telemetry.sinks import Sink
from asyncrl.telemetry.sinks.files import JsonlSink, TensorBoardSink
from asyncrl.telemetry.sinks.mlflow import MlflowTracker
from asyncrl.telemetry.sinks.prometheus import PrometheusTracker
from asyncrl.telemetry.sinks.remote import RemoteSink, TrackedRun, Tracker
from asyncrl.telemetry.sinks.trackio import TrackioTracker
from asyncrl.telemetry.sinks.wandb import WandbTracker

TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "prometheus": PrometheusTracker,
}


def open_sinks(config: Config, run_dir: RunDir, resumed_step: int | None) -> list[Sink]:
    """Blocking. `resumed_step`: the run goes on from there; its files are expected to be cut back to it.

    Raises:
        InfraError, ConfigError: a file cannot be written.
    """
    sinks: list[Sink] = []
    with ExitStack() as opened:
        for name in config.logging.sinks:
            sink = _open(name, config, run_dir, resumed_step)
            opened.callback(sink.close)
            sinks.append(sink)
        opened.pop_all()
    return sinks


def _open(name: str, config: Config, run_dir: RunDir, resumed_step: int | None) -> Sink:
    if name == "jsonl":
        return JsonlSink(run_dir.metrics)
    if name == "tensorboard":
        return TensorBoardSink(run_dir.tensorboard, unix_s=time.time(), resumed_step=resumed_step)
    run = TrackedRun(
        project=config.project_name,
        experiment=config.experiment_name,
        name=run_dir.path.name,
        directory=run_dir.path,
        config=config.model_dump(mode="json"),
        resumed=resumed_step is not None,
    )
    return RemoteSink(name, TRACKERS[name](run))
