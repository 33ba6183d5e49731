"""Trackers record every row, and they never delay or fail a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.import_path import load_object
from asyncrl.config.schema import Config
from asyncrl.config.sections.observe import BUILTIN_SINKS, LoggingConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.observe.metrics import registry
from asyncrl.observe.metrics.prometheus import PrometheusTracker
from asyncrl.observe.metrics.rows import MetricsRow
from asyncrl.observe.metrics.sinks import TRACKERS, RemoteSink, TrackedRun, Tracker, end_remote_sinks, open_tracker
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.summary import ResumePoint
from asyncrl.observe.terminal.live import View
from asyncrl.storage.run_dir import RunDir
from tests.fakes.metric_records import step
from tests.fakes.tracking_libraries import FakeWandb, Libraries, offline, write_twice

HEAD = {"step", "version", "lineage"}
"""Values of every row besides its metrics."""


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


def row(number: int, **metrics: float) -> MetricsRow:
    return MetricsRow("step", number, number, 1.0, 1000.0, metrics or {"reward/mean": 0.5})


def config(*sinks: str) -> Config:
    return Config(project_name="sums", experiment_name="small", logging=LoggingConfig.model_validate({"sinks": sinks}))


@asynccontextmanager
async def recording(run_dir: RunDir, *sinks: str, resumed: ResumePoint | None = None) -> AsyncIterator[Recorder]:
    recorder = await Recorder.open(config(*sinks), run_dir, View(), resumed)
    async with recorder.trackers():
        yield recorder
    await recorder.aclose()


async def part(
    run_dir: RunDir, sinks: tuple[str, ...], steps: tuple[int, ...], resumed: ResumePoint | None = None
) -> None:
    """Record these steps as one process of a run does, from start to end."""
    async with recording(run_dir, *sinks, resumed=resumed) as recorder:
        for number in steps:
            await recorder.put(step(number, 0.25 * number, **{"actor/loss": float("nan")}))


# ------------------------------------------------------------------------------------------------ what they record


async def test_wandb_records_every_step_with_its_lineage_offline(run_dir: RunDir, libraries: Libraries) -> None:
    async with recording(run_dir, "wandb") as recorder:
        for number in (1, 2, 3):
            await recorder.put(step(number, 0.25 * number))
        await recorder.rewind(ResumePoint(1, 1, "c", lineage=1))
        await recorder.put(step(2, 0.75, lineage=1))
    wandb = libraries.wandb
    (init,) = wandb.inits
    assert (init["project"], init["group"], init["name"]) == ("sums", "small", f"small-{run_dir.path.name}")
    assert (init["mode"], init["resume"], init["id"]) == ("offline", "allow", None)
    assert init["dir"] == str(run_dir.path)
    assert init["config"]["trainer"]["optim"]["lr"] == Config().trainer.optim.lr
    assert ("*", "step") in wandb.axes
    recorded = [(one["step"], one["reward/mean"], one["lineage"]) for one in wandb.rows]
    assert recorded == [(1, 0.25, 0), (2, 0.5, 0), (3, 0.75, 0), (2, 0.75, 1)]
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


def test_mlflow_names_fit_its_store(run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in (None, "http://127.0.0.1:9"):
        if uri is not None:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        sink = RemoteSink("mlflow", open_tracker("mlflow", TrackedRun("p", "e", "r", run_dir.path, {}, False)))
        sink.write(row(1, **{"validation/reward/mean/a(b)": 0.5}))
        sink.close()
    assert libraries.mlflow.uris[1] == "http://127.0.0.1:9"
    names = [name for _, name, _, _ in libraries.mlflow.metrics if "/" in name]
    assert names == ["validation/reward.mean.a_b_", "validation/reward/mean/a_b_"]


async def test_trackers_record_a_failed_run_as_failed(run_dir: RunDir, libraries: Libraries) -> None:
    with pytest.raises(OSError, match="the end"):
        async with recording(run_dir, "wandb", "mlflow"):
            raise OSError("the end")
    assert libraries.wandb.exit_code == 1
    assert list(libraries.mlflow.runs.values()) == ["FAILED"]


def test_a_resumed_run_continues_the_runs_of_its_trackers(run_dir: RunDir, libraries: Libraries) -> None:
    sinks = ("wandb", "mlflow", "trackio")
    anyio.run(part, run_dir, sinks, (1, 2))
    anyio.run(part, run_dir, sinks, (3,), ResumePoint(2, 2, "c"))
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
    # A fresh start in the same directory is another run.
    anyio.run(part, run_dir, sinks, (1,))
    assert libraries.wandb.inits[-1]["id"] is None
    assert len(libraries.mlflow.runs) == 2


def test_mlflow_creates_a_run_if_the_earlier_one_is_unknown(run_dir: RunDir, libraries: Libraries) -> None:
    (run_dir.path / "mlflow.id").write_text("of another server\n")
    anyio.run(part, run_dir, ("mlflow",), (3,), ResumePoint(2, 2, "c"))
    assert list(libraries.mlflow.runs.values()) == ["FINISHED"]


def test_prometheus_gauges_are_labelled_by_lineage_and_set_again_on_refresh(tmp_path: Path) -> None:
    set_to: dict[str, list[tuple[float, dict[str, str]]]] = {}
    labels: dict[str, tuple[str, ...]] = {}

    class Gauge:
        def __init__(self, name: str, about: str, tags: tuple[str, ...]) -> None:
            assert about and tags[:3] == ("experiment", "run", "lineage")
            labels[name] = tags[3:]
            assert name not in set_to  # Ray requires one object per name
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
    assert len(set_to["asyncrl_health_problems"]) == len(set_to["asyncrl_health_cpu_by_process"]) == 2  # unchanged
    assert len(set_to["asyncrl_validation_reward_mean_by_data_source"]) == 6
    tracker.rewind()
    tracker.refresh()
    tracker.write(replace(row(1), lineage=1))
    assert set_to["asyncrl_reward_mean"] == [(0.25, tags), (0.5, {**tags, "lineage": "1"})]
    assert [value for value, _ in set_to["asyncrl_step"]] == [1, 1, 2, 1]
    tracker.close(ok=True)


@pytest.mark.parametrize("name", ["jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus"])
async def test_no_sink_records_an_unregistered_name(name: str, run_dir: RunDir, libraries: Libraries) -> None:
    async with recording(run_dir, name) as recorder:
        with pytest.raises(BugError, match="'actor/los' is not registered"):
            await recorder.put(step(1, **{"actor/los": 1.0}))
        if name != "prometheus":  # the next row of this sink needs Ray
            await recorder.put(step(2, **{"actor/lr": 1.0}))
    recorded = [*libraries.wandb.rows, *(one for _, one in libraries.trackio.rows)]
    recorded += [{key: value} for _, key, value, _ in libraries.mlflow.metrics]
    registry.check({key for one in recorded for key in one} - HEAD)
    assert bool(recorded) == (name in ("wandb", "mlflow", "trackio"))


def test_a_tracker_has_a_name_or_an_import_path(tmp_path: Path) -> None:
    run = TrackedRun("p", "e", "r", tmp_path, {}, False)
    by_name, by_path = (open_tracker(name, run) for name in ("prometheus", TRACKERS["prometheus"]))
    assert type(by_name) is type(by_path) is PrometheusTracker
    with pytest.raises(ConfigError, match=r"logging.sinks: json:dumps is not a subclass of .*\.Tracker"):
        open_tracker("json:dumps", run)


def test_a_user_defined_sink_gets_every_row(run_dir: RunDir) -> None:
    (run_dir.path / "mine.py").write_text(
        "from asyncrl.observe.metrics.sinks import Tracker\n"
        "class Mine(Tracker):\n"
        "    steps = []\n"
        "    def write(self, row): self.steps.append((self._tracked.name, row.step))\n"
    )
    sink = f"{run_dir.path}/mine.py:Mine"
    anyio.run(part, run_dir, ("jsonl", sink), (1, 2))
    assert load_object(sink, "").steps == [(run_dir.path.name, 1), (run_dir.path.name, 2)]


def test_the_configuration_knows_every_sink() -> None:
    assert set(TRACKERS) | {"jsonl", "tensorboard"} == set(BUILTIN_SINKS)


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
def test_wandb_goes_online_only_if_a_user_is_logged_in(
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


def test_wandb_stays_offline_if_its_server_does_not_answer(
    run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = FakeWandb(reachable=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    anyio.run(part, run_dir, ("wandb",), (1, 2))
    assert [init["mode"] for init in wandb.inits] == ["online", "offline"]
    assert [one["step"] for one in wandb.rows] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb does not answer (no answer): its run stays offline; upload it with `wandb sync`"
    ]


# ------------------------------------------------------------------------------------------------ trouble


class SlowTracker(Tracker):
    """A tracker that blocks until `go` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.rows: list[int] = []
        self.abandoned = False
        self.ok: bool | None = None

    def write(self, row: MetricsRow) -> None:
        self.entered.set()
        self.go.wait(30)
        self.rows.append(row.step)

    def close(self, *, ok: bool) -> None:
        self.ok = ok

    def abandon(self) -> None:
        self.abandoned = True


class FailingTracker(Tracker):
    def __init__(self, *, at_open: bool = False, good: int = -1) -> None:
        self.at_open = at_open
        self.good = good
        self.rows: list[int] = []

    def open(self) -> None:
        if self.at_open:
            raise OSError("no connection")

    def write(self, row: MetricsRow) -> None:
        if row.step != self.good:
            raise OSError(f"row {row.step} is refused")
        self.rows.append(row.step)

    def close(self, *, ok: bool) -> None:
        raise OSError("not closed either")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_slow_tracker_delays_nothing_and_loses_rows_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowTracker()
    sink = RemoteSink("slow", slow, max_rows=3)
    sink.write(row(1))
    assert slow.entered.wait(10)
    sink.put([row(number) for number in range(2, 8)])  # three rows wait, and three are lost
    slow.go.set()
    end_remote_sinks([sink], ok=True)
    assert slow.rows == [1, 2, 3, 4]
    assert slow.ok is True and not slow.abandoned
    assert messages(caplog) == [
        "logging.sinks: slow is too slow (3 rows of metrics wait for it already, and more are lost); the run continues",
        "slow lacks 3 rows of metrics of this run",
    ]
    sink.write(row(9))
    sink.close()
    assert slow.rows == [1, 2, 3, 4]


def test_the_end_of_a_run_waits_for_hanging_trackers_only_for_a_limited_time(caplog: pytest.LogCaptureFixture) -> None:
    hanging = [SlowTracker(), SlowTracker()]
    sinks = [RemoteSink(f"hanging{number}", one) for number, one in enumerate(hanging)]
    for sink, one in zip(sinks, hanging, strict=True):
        sink.put([row(1), row(2)])
        assert one.entered.wait(10)
    started = time.monotonic()
    end_remote_sinks(sinks, ok=True, limit_s=0.2)
    for sink in sinks:
        sink.close()
    assert time.monotonic() - started < 5
    assert [one.abandoned for one in hanging] == [True, True]
    assert all("did not answer within" in text for text in messages(caplog)) and len(messages(caplog)) == 2
    for one in hanging:
        one.go.set()


def test_a_broken_tracker_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = RemoteSink("broken", FailingTracker(at_open=True))
    sink.put([row(1), row(2)])
    sink.close()
    assert messages(caplog) == ["logging.sinks: broken cannot be used (OSError: no connection); the run continues"]


def test_refused_rows_are_counted_and_the_next_ones_tried(caplog: pytest.LogCaptureFixture) -> None:
    failing = FailingTracker(good=2)
    sink = RemoteSink("picky", failing)
    sink.put([row(1), row(2), row(3), None])
    sink.close()
    assert failing.rows == [2]
    assert messages(caplog) == [
        "logging.sinks: picky does not accept rows of metrics (OSError: row 1 is refused); the run continues",
        "picky lacks 2 rows of metrics of this run",
    ]


def test_a_tracker_is_refreshed_while_no_rows_arrive() -> None:
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


def test_libraries_are_imported_only_when_configured() -> None:
    code = (
        "import sys, asyncrl.observe.recorder, asyncrl.config.rules;"
        "assert not {'wandb', 'mlflow', 'trackio', 'ray', 'opentelemetry.sdk'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 1_001])
def test_an_id_that_cannot_be_read_is_none(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncrl.storage.run_dir.MAX_FILE_BYTES", 1_000)
    (tmp_path / "wandb.id").write_bytes(content)
    run = TrackedRun("p", "e", "r", tmp_path, {}, resumed=True)
    assert run.saved_id("wandb") is None and run.saved_id("mlflow") is None
    assert len(caplog.messages) == 1 and f"{tmp_path}/wandb.id cannot be read" in caplog.text


# ------------------------------------------------------------------------------------------------ the real libraries


def test_the_real_wandb_writes_an_offline_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    offline(monkeypatch, str(tmp_path))
    write_twice("wandb", run_dir)
    run_id = (run_dir.path / "wandb.id").read_text().strip()
    files = sorted((run_dir.path / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert files  # two directories, or one if both processes began within one second
    assert all(b"reward/mean" in file.read_bytes() for file in files)


def test_the_real_mlflow_writes_files(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_the_real_trackio_writes_a_database(run_dir: RunDir, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (
        "import json, sys; from pathlib import Path; from asyncrl.storage.run_dir import RunDir;"
        "from tests.fakes.tracking_libraries import write_twice; write_twice('trackio', RunDir(Path(sys.argv[1])));"
        "from trackio.sqlite_storage import SQLiteStorage;"
        "logs = SQLiteStorage.get_logs('sums', SQLiteStorage.get_runs('sums')[0]);"
        "assert [(one['step'], one['reward/mean']) for one in logs] == [(1, 0.25), (2, 0.5), (3, 0.75)], logs"
    )  # importing trackio fixes the path of its database
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir.path)],
        cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


async def test_trackers_get_references_instead_of_values_from_the_environment(
    run_dir: RunDir, libraries: Libraries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "c4n4ry-of-sinks")
    kwargs = {"key": "${secret:CANARY}", "note": "c4n4ry-of-sinks"}
    settings = config("wandb", "mlflow", "trackio").model_copy(update={"reward": RewardConfig(kwargs=kwargs)})
    settings = settings.with_unresolved({("reward", "kwargs", "note"): "${oc.env:CANARY}"})
    recorder = await Recorder.open(settings, run_dir, View(), None)
    async with recorder.trackers():
        await recorder.put(step(1, 0.5))
    await recorder.aclose()
    expected = {"key": "${secret:CANARY}", "note": "${oc.env:CANARY}"}
    for library in (libraries.wandb, libraries.trackio):
        assert library.inits[0]["config"]["reward"]["kwargs"] == expected
    assert libraries.mlflow.params["reward.kwargs"] == str(expected)
