"""Sinks beyond the run directory: what they are told, and that they never hold up or fail a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config, LoggingConfig
from asyncrl.failures import BugError
from asyncrl.records import StepRecord
from asyncrl.run_dir import RunDir, create_run_dir
from asyncrl.telemetry import registry
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.sinks.opening import TRACKERS
from asyncrl.telemetry.sinks.prometheus import PrometheusTracker
from asyncrl.telemetry.sinks.remote import RemoteSink, TrackedRun, Tracker, end_all
from asyncrl.telemetry.summary import Resumed
from tests.fakes.tracking_libraries import FakeWandb, Libraries, offline

HEAD = {"step", "version", "lineage"}
"""What goes along with every row besides its metrics."""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(Config(), datetime(2026, 1, 2), root=tmp_path)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libraries:
    offline(monkeypatch, str(tmp_path))
    return Libraries(monkeypatch)


@pytest.fixture(autouse=True)
def warnings_reach_caplog() -> Iterator[None]:
    log = logging.getLogger("asyncrl")
    before, log.propagate = log.propagate, True
    yield
    log.propagate = before


def step(number: int, reward: float = 0.5, lineage: int = 0, **metrics: float) -> StepRecord:
    required = {"reward/mean": reward, "tokens/trained": 1.0, "timing/wait_samples_s": 0.0, "time/monotonic_s": 1.0}
    return StepRecord(number, number, {**required, **metrics}, (reward,), (0,), lineage)


def row(number: int, **metrics: float) -> Row:
    return Row("step", number, number, 1.0, 1000.0, metrics or {"reward/mean": 0.5})


def config(*sinks: str) -> Config:
    return Config(project_name="sums", experiment_name="small", logging=LoggingConfig.model_validate({"sinks": sinks}))


async def part(run_dir: RunDir, sinks: tuple[str, ...], steps: tuple[int, ...], resumed: Resumed | None = None) -> None:
    """Of a run: the process from its start to its end."""
    recorder = await Recorder.open(config(*sinks), run_dir, View(), resumed)
    async with recorder.trackers():
        for number in steps:
            await recorder.put(step(number, 0.25 * number, **{"actor/loss": float("nan")}))
    await recorder.aclose()


# ------------------------------------------------------------------------------------------------ what they are told


def test_wandb_is_offline_and_told_every_step_with_its_lineage(run_dir: RunDir, libraries: Libraries) -> None:
    async def main() -> None:
        recorder = await Recorder.open(config("wandb"), run_dir, View())
        async with recorder.trackers():
            for number in (1, 2, 3):
                await recorder.put(step(number, 0.25 * number))
            await recorder.rewind(Resumed(1, 1, "c", lineage=1))
            await recorder.put(step(2, 0.75, lineage=1))
        await recorder.aclose()

    anyio.run(main)
    wandb = libraries.wandb
    (init,) = wandb.inits
    assert (init["project"], init["group"], init["name"]) == ("sums", "small", f"small-{run_dir.path.name}")
    assert (init["mode"], init["resume"], init["id"]) == ("offline", "allow", None)
    assert init["dir"] == str(run_dir.path)
    assert init["config"]["trainer"]["optim"]["lr"] == Config().trainer.optim.lr
    assert ("*", "step") in wandb.axes
    told = [(one["step"], one["reward/mean"], one["lineage"]) for one in wandb.rows]
    assert told == [(1, 0.25, 0), (2, 0.5, 0), (3, 0.75, 0), (2, 0.75, 1)]
    assert (wandb.exit_code, wandb.torn_down) == (0, True)


def test_mlflow_keeps_files_in_the_run_directory(run_dir: RunDir, libraries: Libraries) -> None:
    anyio.run(part, run_dir, ("mlflow",), (1, 2))
    mlflow = libraries.mlflow
    assert mlflow.uris == [(run_dir.path / "mlflow").as_uri()]
    ((run_id, status),) = mlflow.runs.items()
    assert (run_id, status) == (f"experiment sums/small-{run_dir.path.name}/0", "FINISHED")
    assert [value[2:] for value in mlflow.metrics if value[1] == "reward/mean"] == [(0.25, 1), (0.5, 2)]
    assert not [value for value in mlflow.metrics if value[1] == "actor/loss"]  # NaN
    assert mlflow.params["experiment_name"] == "small"
    assert mlflow.params["trainer.optim.lr"] == str(Config().trainer.optim.lr)


def test_mlflow_goes_to_the_server_that_the_environment_names(
    run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    anyio.run(part, run_dir, ("mlflow",), (1,))
    assert libraries.mlflow.uris == ["http://127.0.0.1:9"]


def test_mlflow_names_are_those_that_its_store_takes(
    run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uri in (None, "http://127.0.0.1:9"):
        if uri is not None:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        sink = RemoteSink("mlflow", TRACKERS["mlflow"](TrackedRun("p", "e", "r", run_dir.path, {}, False)))
        sink.write(row(1, **{"validation/reward/mean/a(b)": 0.5}))
        sink.close()
    told = [name for _, name, _, _ in libraries.mlflow.metrics if "/" in name]
    assert told == ["validation/reward.mean.a_b_", "validation/reward/mean/a_b_"]


def test_a_run_that_ends_badly_is_told_so(run_dir: RunDir, libraries: Libraries) -> None:
    async def main() -> None:
        recorder = await Recorder.open(config("wandb", "mlflow"), run_dir, View())
        async with recorder.trackers():
            raise OSError("the end")

    with pytest.raises(OSError, match="the end"):
        anyio.run(main)
    assert libraries.wandb.exit_code == 1
    assert list(libraries.mlflow.runs.values()) == ["FAILED"]


def test_a_resumed_run_goes_on_in_the_same_runs(run_dir: RunDir, libraries: Libraries) -> None:
    sinks = ("wandb", "mlflow", "trackio")
    anyio.run(part, run_dir, sinks, (1, 2))
    anyio.run(part, run_dir, sinks, (3,), Resumed(2, 2, "c"))
    first, second = libraries.wandb.inits
    assert (first["id"], second["id"]) == (None, "id1")
    ((run_id, status),) = libraries.mlflow.runs.items()
    assert status == "FINISHED"
    assert {value[0] for value in libraries.mlflow.metrics} == {run_id}
    before, after = libraries.trackio.inits
    assert (before["resume"], after["resume"]) == ("never", "allow")
    assert before["name"] == after["name"] == f"small-{run_dir.path.name}"
    assert [number for number, _ in libraries.trackio.rows] == [1, 2, 3]
    assert libraries.trackio.finished == 2
    # Anew in the same directory is another run.
    anyio.run(part, run_dir, sinks, (1,))
    assert libraries.wandb.inits[-1]["id"] is None
    assert len(libraries.mlflow.runs) == 2


def test_mlflow_begins_anew_where_the_earlier_run_is_not_known(run_dir: RunDir, libraries: Libraries) -> None:
    (run_dir.path / "mlflow.id").write_text("of another server\n")
    anyio.run(part, run_dir, ("mlflow",), (3,), Resumed(2, 2, "c"))
    assert list(libraries.mlflow.runs.values()) == ["FINISHED"]


def test_prometheus_gets_gauges_by_lineage_and_keeps_them_alive(tmp_path: Path) -> None:
    set_to: dict[str, list[tuple[float, dict[str, str]]]] = {}
    labels: dict[str, tuple[str, ...]] = {}

    class Gauge:
        def __init__(self, name: str, about: str, tags: tuple[str, ...]) -> None:
            assert about and tags[:3] == ("experiment", "run", "lineage")
            labels[name] = tags[3:]
            assert name not in set_to  # Ray wants one object a name
            self.seen = set_to.setdefault(name, [])

        def set(self, value: float, tags: dict[str, str]) -> None:
            self.seen.append((value, tags))

    tracker = PrometheusTracker(TrackedRun("p", "e", "r", tmp_path, {}, False), Gauge)
    scores = {"validation/reward/mean/a b": 0.5, "validation/reward/mean/a_b": 0.75}
    tracker.write(row(1, **scores, **{"health/problems": 1.0, "health/cpu/rank-0": 2.0}))
    tags = {"experiment": "e", "run": "r", "lineage": "0"}
    tracker.refresh()
    by_source = [(0.5, {**tags, "data_source": "a b"}), (0.75, {**tags, "data_source": "a_b"})]
    assert set_to["asyncrl_validation_reward_mean_by_data_source"] == by_source * 2
    assert labels["asyncrl_validation_reward_mean_by_data_source"] == ("data_source",)
    assert labels["asyncrl_health_problems"] == ()
    tracker.write(row(2, **{"reward/mean": 0.25}))
    assert len(set_to["asyncrl_health_problems"]) == len(set_to["asyncrl_health_cpu_by_process"]) == 2  # gone
    assert len(set_to["asyncrl_validation_reward_mean_by_data_source"]) == 6
    tracker.rewind()
    tracker.refresh()
    tracker.write(replace(row(1), lineage=1))
    assert set_to["asyncrl_reward_mean"] == [(0.25, tags), (0.5, {**tags, "lineage": "1"})]
    assert [value for value, _ in set_to["asyncrl_step"]] == [1, 1, 2, 1]
    tracker.close(ok=True)


@pytest.mark.parametrize("name", ["jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"])
def test_no_sink_gets_a_name_that_is_not_registered(name: str, run_dir: RunDir, libraries: Libraries) -> None:
    async def main() -> None:
        recorder = await Recorder.open(config(name), run_dir, View())
        async with recorder.trackers():
            with pytest.raises(BugError, match="'actor/los' is not registered"):
                await recorder.put(step(1, **{"actor/los": 1.0}))
            if name != "prometheus":  # its next row would ask Ray
                await recorder.put(step(2, **{"actor/lr": 1.0}))
        await recorder.aclose()

    anyio.run(main)
    told = [*libraries.wandb.rows, *(one for _, one in libraries.trackio.rows)]
    told += [{key: value} for _, key, value, _ in libraries.mlflow.metrics]
    registry.check({key for one in told for key in one} - HEAD)
    assert bool(told) == (name in ("wandb", "mlflow", "trackio"))


def test_what_a_sink_is_for_can_be_chosen() -> None:
    assert set(TRACKERS) | {"jsonl", "tensorboard"} == set(
        LoggingConfig.model_json_schema()["properties"]["sinks"]["items"]["enum"]
    )


# ------------------------------------------------------------------------------------------------ wandb's modes


@pytest.mark.parametrize(
    ("environment", "netrc", "mode"),
    [
        ({}, "", "offline"),
        ({"WANDB_API_KEY": "k"}, "", "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "", "disabled"),
        ({}, "machine api.wandb.ai login user password k\n", "online"),
        ({}, "machine elsewhere.org login user password k\n", "offline"),
        ({}, "torn", "offline"),
    ],
)
def test_wandb_goes_online_only_where_somebody_is_logged_in(
    environment: dict[str, str],
    netrc: str,
    mode: str,
    run_dir: RunDir,
    libraries: Libraries,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(netrc)
    anyio.run(part, run_dir, ("wandb",), (1,))
    assert [init["mode"] for init in libraries.wandb.inits] == [mode]


def test_wandb_keeps_the_run_offline_where_its_server_does_not_answer(
    run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = FakeWandb(reachable=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    anyio.run(part, run_dir, ("wandb",), (1, 2))
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"]
    assert [one["step"] for one in wandb.rows] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb does not answer (no answer): its run is kept offline; upload it with `wandb sync`"
    ]


# ------------------------------------------------------------------------------------------------ trouble


class Slow(Tracker):
    """Stands still until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.rows: list[int] = []
        self.abandoned = False
        self.ok: bool | None = None

    def write(self, row: Row) -> None:
        self.entered.set()
        self.go.wait(30)
        self.rows.append(row.step)

    def close(self, *, ok: bool) -> None:
        self.ok = ok

    def abandon(self) -> None:
        self.abandoned = True


class Failing(Tracker):
    def __init__(self, *, at_open: bool = False, good: int = -1) -> None:
        self.at_open = at_open
        self.good = good
        self.rows: list[int] = []

    def open(self) -> None:
        if self.at_open:
            raise OSError("not today")

    def write(self, row: Row) -> None:
        if row.step != self.good:
            raise OSError(f"row {row.step} is refused")
        self.rows.append(row.step)

    def close(self, *, ok: bool) -> None:
        raise OSError("not closed either")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_slow_library_delays_nothing_and_loses_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    sink = RemoteSink("slow", slow, max_rows=3)
    sink.write(row(1))
    assert slow.entered.wait(10)
    for number in range(2, 8):  # three wait, three are lost
        sink.write(row(number))
    slow.go.set()
    end_all([sink], ok=True)
    assert slow.rows == [1, 2, 3, 4]
    assert slow.ok is True and not slow.abandoned
    assert messages(caplog) == [
        "logging.sinks: slow is too slow (3 rows wait for it already, and more are dropped); the run goes on",
        "slow lacks 3 rows of metrics of this run",
    ]
    sink.write(row(9))
    sink.close()
    assert slow.rows == [1, 2, 3, 4]


def test_the_end_of_a_run_waits_for_a_hanging_library_for_its_time_only(caplog: pytest.LogCaptureFixture) -> None:
    hanging = [Slow(), Slow()]
    sinks = [RemoteSink(f"hanging{number}", one) for number, one in enumerate(hanging)]
    for sink, one in zip(sinks, hanging, strict=True):
        sink.write(row(1))
        sink.write(row(2))
        assert one.entered.wait(10)
    started = time.monotonic()
    end_all(sinks, ok=True, limit_s=0.2)
    for sink in sinks:
        sink.close()
    assert time.monotonic() - started < 5
    assert [one.abandoned for one in hanging] == [True, True]
    assert all("did not answer within" in told for told in messages(caplog)) and len(messages(caplog)) == 2
    for one in hanging:
        one.go.set()


def test_a_library_that_cannot_be_used_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = RemoteSink("broken", Failing(at_open=True))
    for number in range(3):
        sink.write(row(number))
    sink.close()
    assert messages(caplog) == [
        "logging.sinks: broken cannot be used (OSError: not today); the run goes on",
    ]


def test_rows_that_are_refused_are_counted_and_the_next_ones_tried(caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing(good=2)
    sink = RemoteSink("picky", failing)
    for number in (1, 2, 3):
        sink.write(row(number))
    sink.rewind(1, 1)
    sink.close()
    assert failing.rows == [2]
    assert messages(caplog) == [
        "logging.sinks: picky does not take metrics (OSError: row 1 is refused); the run goes on",
        "picky lacks 2 rows of metrics of this run",
    ]


def test_what_was_told_is_told_again_while_nothing_comes() -> None:
    class Alive(Tracker):
        refresh_s = 0.01

        def __init__(self) -> None:
            self.again = threading.Semaphore(0)

        def refresh(self) -> None:
            self.again.release()

    alive = Alive()
    sink = RemoteSink("alive", alive)
    assert alive.again.acquire(timeout=10) and alive.again.acquire(timeout=10)
    sink.close()


def test_libraries_are_imported_only_when_they_are_chosen() -> None:
    code = (
        "import sys, asyncrl.telemetry.recorder, asyncrl.config.logging_rules;"
        "assert not {'wandb', 'mlflow', 'trackio', 'ray', 'opentelemetry.sdk'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ------------------------------------------------------------------------------------------------ the real ones


def tracked(run_dir: RunDir, *, resumed: bool = False) -> TrackedRun:
    return TrackedRun("sums", "small", run_dir.path.name, run_dir.path, {"lr": {"now": 0.1}}, resumed)


def write_twice(library: str, run_dir: RunDir) -> None:
    """Two processes of a run, of one and two rows."""
    for resumed, numbers in ((False, (1,)), (True, (2, 3))):
        sink = RemoteSink(library, TRACKERS[library](tracked(run_dir, resumed=resumed)))
        for number in numbers:
            sink.write(row(number, **{"reward/mean": number / 4, "queue/dropped": 1.0, "queue/dropped/stale": 1.0}))
        sink.end(ok=True)
        sink.join(60)


def test_the_real_wandb_keeps_an_offline_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    offline(monkeypatch, str(tmp_path))
    write_twice("wandb", run_dir)
    run_id = (run_dir.path / "wandb.id").read_text().strip()
    files = sorted((run_dir.path / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert files  # two, unless both began within one second, of which their names are made
    assert all(b"reward/mean" in file.read_bytes() for file in files)


def test_the_real_mlflow_keeps_files(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    offline(monkeypatch, str(tmp_path))
    write_twice("mlflow", run_dir)
    tracking: Any = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient(tracking_uri=(run_dir.path / "mlflow").as_uri())
    run_id = (run_dir.path / "mlflow.id").read_text().strip()
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(client.get_metric_history(run_id, "queue/dropped.stale")) == 3
    assert client.get_run(run_id).data.params == {"lr.now": "0.1"}


def test_the_real_trackio_keeps_a_database(run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (
        "import json, sys; from pathlib import Path; from asyncrl.run_dir import RunDir;"
        "from tests.asyncrl.test_telemetry_sinks import write_twice; write_twice('trackio', RunDir(Path(sys.argv[1])));"
        "from trackio.sqlite_storage import SQLiteStorage;"
        "logs = SQLiteStorage.get_logs('sums', SQLiteStorage.get_runs('sums')[0]);"
        "assert [(one['step'], one['reward/mean']) for one in logs] == [(1, 0.25), (2, 0.5), (3, 0.75)], logs"
    )  # where it keeps its database is decided when it is imported
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir.path)],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
