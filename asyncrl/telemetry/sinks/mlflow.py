"""MLflow: the server or store of `MLFLOW_TRACKING_URI`, else files in mlflow/ of the run directory.

In a store of plain files a metric is a file, so that `queue/dropped` and `queue/dropped/stale` cannot both be there:
the second is called `queue/dropped.stale`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from contextlib import suppress
from typing import Any

from asyncrl.config.keys import leaves
from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.sinks.remote import TrackedRun, Tracker, values

logger = logging.getLogger(__name__)

MAX_PARAMS = 100
MAX_METRICS = 1_000
"""In one call."""
MAX_VALUE = 500
"""Characters of a parameter that every store takes."""
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowTracker(Tracker):
    """A project is an experiment of MLflow's; each run is one run of it, found again by its id."""

    def __init__(self, run: TrackedRun) -> None:
        self._of = run
        self._entities: Any = None
        self._client: Any = None
        self._run_id = ""
        self._in_files = False

    def open(self) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (self._of.directory / "mlflow").as_uri()
            # Stores other than plain files need a database library.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._in_files = uri.startswith("file:") or "://" not in uri
        os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # the terminal is the live view's
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it tells of each retry
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._run_id = self._resumed() or self._created()
        self._of.keep_id("mlflow", self._run_id)

    def write(self, row: Row) -> None:
        at_ms = int(row.unix_s * 1000)
        metrics = [
            self._entities.Metric(self._named(name), value, at_ms, row.step) for name, value in values(row).items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])

    def close(self, *, ok: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ok else "FAILED")

    def _named(self, name: str) -> str:
        name = _NOT_IN_NAMES.sub("_", name)
        head, slash, rest = name.partition("/")
        return f"{head}{slash}{rest.replace('/', '.')}" if self._in_files else name

    def _resumed(self) -> str | None:
        run_id = self._of.kept_id("mlflow")
        if run_id is not None:
            with suppress(Exception):  # another store than the earlier one: a run of its own begins there
                self._client.update_run(run_id, "RUNNING")
                return run_id
        return None

    def _created(self) -> str:
        client = self._client
        experiment = client.get_experiment_by_name(self._of.project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._of.project)
        tags = {"asyncrl.experiment": self._of.experiment, "asyncrl.run": self._of.name}
        run_id: str = client.create_run(experiment_id, run_name=self._of.title, tags=tags).info.run_id
        params = [self._entities.Param(name, str(value)[:MAX_VALUE]) for name, value in leaves(self._of.config).items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[start : start + MAX_PARAMS])
        return run_id
