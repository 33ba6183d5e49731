"""Stand-ins for wandb, mlflow and trackio: the parts that the sinks use, kept in memory."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.sinks import RemoteSink, TrackedRun, open_tracker
from asyncrl.storage.run_dir import RunDir


class FakeWandb(ModuleType):
    """A stand-in for wandb; with `reachable=False` its server does not answer."""

    def __init__(self, *, reachable: bool = True) -> None:
        super().__init__("wandb")
        self.reachable = reachable
        self.inits: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.exit_code: int | None = None
        self.torn_down = False

    def Settings(self, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(base_url="https://api.wandb.ai", **given)

    def init(self, **given: Any) -> FakeWandb:
        self.inits.append(given)
        if given["mode"] == "online" and not self.reachable:
            raise ConnectionError("no answer")
        self.id = given["id"] or f"id{len(self.inits)}"
        return self

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool = False) -> None:
        self.axes.append((name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def teardown(self) -> None:
        self.torn_down = True


class FakeMlflow:
    """A stand-in for `mlflow.entities` and `mlflow.tracking`."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.runs: dict[str, str] = {}
        self.metrics: list[tuple[str, str, float, int]] = []
        """Run, name, value, step."""
        self.params: dict[str, str] = {}

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        run_id = f"{experiment_id}/{run_name}/{len(self.runs)}"
        self.runs[run_id] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.runs:
            raise LookupError(run_id)
        self.runs[run_id] = status

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100
        self.metrics += [(run_id, one.key, one.value, one.step) for one in metrics]
        self.params |= {one.key: one.value for one in params}


class FakeTrackio:
    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **given: Any) -> FakeTrackio:
        self.inits.append(given)
        self.name = given["name"]
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished += 1


class Libraries:
    """The stand-ins of all three libraries, which `import` finds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wandb = FakeWandb()
        self.mlflow = FakeMlflow()
        self.trackio = FakeTrackio()
        entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
        vars(entities)["Metric"] = lambda key, value, at, step: SimpleNamespace(key=key, value=value, at=at, step=step)
        vars(entities)["Param"] = lambda key, value: SimpleNamespace(key=key, value=value)
        vars(tracking)["MlflowClient"] = self.mlflow.MlflowClient
        trackio = ModuleType("trackio")
        vars(trackio)["init"] = self.trackio.init
        modules = [self.wandb, entities, tracking, trackio]
        modules += [ModuleType(name) for name in ("trackio.run", "trackio.utils", "trackio.deploy", "mlflow")]
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)


def offline(patch: pytest.MonkeyPatch, home: str) -> None:
    """Remove the configuration of this machine's user; environment variables that the libraries set end with the
    test."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_URI"):
        patch.delenv(name, raising=False)
    for name in ("WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_CONFIGURE_LOGGING"):
        patch.setenv(name, "true")
    patch.setenv("NETRC", f"{home}/netrc")


def write_twice(library: str, run_dir: RunDir) -> None:
    """Write one row in a first process of a run and two rows in a second one."""
    for resumed, numbers in ((False, (1,)), (True, (2, 3))):
        run = TrackedRun("sums", "small", run_dir.path.name, run_dir.path, {"lr": {"now": 0.1}}, resumed)
        sink = RemoteSink(library, open_tracker(library, run))
        for number in numbers:
            metrics = {"reward/mean": number / 4, "queue/dropped": 1.0, "queue/dropped/stale": 1.0}
            sink.write(MetricsRow("step", number, number, 1.0, 1000.0, metrics))
        sink.close(60)
