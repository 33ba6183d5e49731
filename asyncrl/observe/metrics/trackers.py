"""Trackers for Weights & Biases, MLflow and Trackio. Each works offline unless it is set up for a server."""

from __future__ import annotations

import importlib
import logging
import netrc
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config.keys import leaves
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.sinks import TrackedRun, Tracker, tracked_values

logger = logging.getLogger(__name__)

WANDB_INIT_S = 30
"""Time limit for an answer of the wandb server; after that, the run stays offline."""
WANDB_HOST = "api.wandb.ai"
MLFLOW_MAX_PARAMS = 100
MLFLOW_MAX_METRICS = 1_000
"""Metrics in one call."""
MLFLOW_MAX_VALUE = 500
"""Largest number of characters of a parameter's value that every store accepts."""
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w.\- :/]")
_PRINTING_TRACKIO_MODULES = ("trackio", "trackio.run", "trackio.utils", "trackio.deploy")


class WandbTracker(Tracker):
    """Weights & Biases: online if `WANDB_MODE` is `online` or a user is logged in, otherwise offline.

    An offline run is in wandb/ of the run directory; `wandb sync` uploads it later.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._wandb: Any = None
        self._run: Any = None
        self._abandoned = False

    def open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # the live view owns the terminal
        self._wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in(self._wandb) else "offline")
        try:
            self._run = self._init(mode)
        except Exception as error:
            if mode != "online" or self._abandoned:
                raise
            logger.warning("wandb does not answer (%s): its run stays offline; upload it with `wandb sync`", error)
            self._run = self._init("offline")
        self._tracked.save_id("wandb", self._run.id)
        # wandb's built-in step can only grow, but steps are trained again after a rewind.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, row: MetricsRow) -> None:
        self._run.log({"step": row.step, **tracked_values(row)})

    def close(self, *, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
        self._wandb.teardown()

    def abandon(self) -> None:
        self._abandoned = True

    def _init(self, mode: str) -> Any:
        run = self._tracked
        return self._wandb.init(
            project=run.project,
            group=run.experiment,
            name=run.title,
            id=run.saved_id("wandb"),
            resume="allow",
            dir=str(run.directory),
            config=run.config,
            mode=mode,
            settings=self._wandb.Settings(silent=True, console="off", init_timeout=WANDB_INIT_S),
        )


def _is_logged_in(wandb: Any) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = {WANDB_HOST, urlsplit(wandb.Settings().base_url).netloc}
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) for host in hosts)


class MlflowTracker(Tracker):
    """MLflow: the server or store of `MLFLOW_TRACKING_URI`, else files in mlflow/ of the run directory.

    A project is an MLflow experiment, and a resumed run continues its MLflow run. In a store of plain files a metric is
    a file, so `queue/dropped` and `queue/dropped/stale` cannot both exist: the second becomes `queue/dropped.stale`.
    """

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._entities: Any = None
        self._client: Any = None
        self._run_id = ""
        self._in_files = False

    def open(self) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (self._tracked.directory / "mlflow").as_uri()
            # Stores other than plain files need a database library.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._in_files = uri.startswith("file:") or "://" not in uri
        os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # the live view owns the terminal
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it logs each retry
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._run_id = self._resume() or self._create()
        self._tracked.save_id("mlflow", self._run_id)

    def write(self, row: MetricsRow) -> None:
        at_ms = int(row.unix_s * 1000)
        metrics = [
            self._entities.Metric(self._name(name), value, at_ms, row.step)
            for name, value in tracked_values(row).items()
        ]
        for start in range(0, len(metrics), MLFLOW_MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MLFLOW_MAX_METRICS])

    def close(self, *, ok: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ok else "FAILED")

    def _name(self, name: str) -> str:
        name = _NOT_IN_MLFLOW_NAMES.sub("_", name)
        head, slash, rest = name.partition("/")
        return f"{head}{slash}{rest.replace('/', '.')}" if self._in_files else name

    def _resume(self) -> str | None:
        run_id = self._tracked.saved_id("mlflow")
        if run_id is not None:
            with suppress(Exception):  # the run is not in this store, so a new one is created
                self._client.update_run(run_id, "RUNNING")
                return run_id
        return None

    def _create(self) -> str:
        run, client = self._tracked, self._client
        experiment = client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
        tags = {"asyncrl.experiment": run.experiment, "asyncrl.run": run.name}
        run_id: str = client.create_run(experiment_id, run_name=run.title, tags=tags).info.run_id
        params = [
            self._entities.Param(name, str(value)[:MLFLOW_MAX_VALUE]) for name, value in leaves(run.config).items()
        ]
        for start in range(0, len(params), MLFLOW_MAX_PARAMS):
            client.log_batch(run_id, params=params[start : start + MLFLOW_MAX_PARAMS])
        return run_id


class TrackioTracker(Tracker):
    """Trackio: its local database (`TRACKIO_DIR`), unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` names another
    place. `trackio show` displays it."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._run: Any = None

    def open(self) -> None:
        for module in _PRINTING_TRACKIO_MODULES:
            # They print regardless of all settings, and the live view owns the terminal.
            vars(importlib.import_module(module))["print"] = _print_to_log
        run = self._tracked
        name = run.saved_id("trackio")
        self._run = importlib.import_module("trackio").init(
            project=run.project,
            group=run.experiment,
            name=name or run.title,
            config=run.config,
            resume="allow" if name else "never",
            embed=False,
        )
        run.save_id("trackio", self._run.name)

    def write(self, row: MetricsRow) -> None:
        self._run.log(tracked_values(row), step=row.step)

    def close(self, *, ok: bool) -> None:
        self._run.finish()


def _print_to_log(*words: object, **_: object) -> None:
    logger.info("trackio: %s", " ".join(map(str, words)))
