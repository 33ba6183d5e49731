"""`asyncrl status`, `why`, `report`, `show`, `timeline` and `simulate` end with a page or an error, whatever is in the
files of a run."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.cli.report import about
from asyncrl.core.failures import ConfigError
from asyncrl.core.process_health import EngineLoad, MachineHealth, Problem, ProcessHealth, RunHealth
from asyncrl.core.waits import Wait
from asyncrl.observe.status.run_files import read_liveness
from asyncrl.observe.status.run_status import STATE_FILE, Restart, RunProgress, dump
from asyncrl.observe.status.summary import SummaryBuilder, describe_error, read_readable_summary
from asyncrl.observe.timeline.details import conversation_of
from asyncrl.observe.timeline.server import Timeline
from asyncrl.profiling.files import event_files
from asyncrl.simulate.calibration import calibrate
from asyncrl.storage.run_dir import MAX_FILE_BYTES
from asyncrl.storage.trajectory_files import as_json, file_name
from benchmarks.synthetic_run import RunPlan, write_run
from rollouter.trajectory_dump import describe
from tests.fakes import hostile
from tests.fakes.command_line import CommandLine
from tests.fakes.dumped import SCORES, decode, group, prompt, sample
from tests.fakes.run_states import NOW, queue_status, report, running
from tests.fakes.timeline_run import EVERYTHING

RESTARTS = (Restart("trainer", 2, NOW - 300, "rank actor/0 died", NOW - 288.6, "back to step 10"),)
HEALTH = ProcessHealth(1 << 30, 0.5, 0.01)
PROGRESS = RunProgress(
    total_steps=200, counts=queue_status().counts, staleness={0: 288, 1: 90}, generated_tokens=10, trained_tokens=7,
    generated_per_s=1.5, drops={"took too long": 2}, restarts=RESTARTS, earlier_restarts={"replica": 1},
    health=RunHealth(
        {"driver": HEALTH}, {"0": EngineLoad()}, MachineHealth(8, 4, 0.5, 2), 0.5, (Problem("lag", NOW, "slow"),)
    ),
)  # fmt: skip
STATE = dump(
    running(
        written_at=time.time(), pid=os.getpid(), host=socket.gethostname(), staleness={0: 288, 1: 90},
        restarts=RESTARTS, restarting={"trainer": NOW}, silent_s={"store": 7.0}, health=PROGRESS.health,
        replicas=(report(health=HEALTH, load=EngineLoad()),),
        waits={"trainer": (Wait("samples", 1, 93.5),), "rollouter": (Wait("permit", 1, 90.0),)},
    )
)  # fmt: skip
SUMMARY = SummaryBuilder().build("failed", describe_error(OSError("no disk"), "driver"), PROGRESS, wall_s=201.0)
CONFIG = {
    "experiment_name": "quickstart", "project_name": "p", "profiler": {"level": "full"}, "model": {"path": "nowhere"},
    "rollout": {"dump_dir": "dump", "response_length": 64},
    "skip": {"async_rollout": {"enable": True, "dump_dir": "records"}},
}  # fmt: skip
LINE = as_json(describe(sample(), prompt(), group(), SCORES, decode, run="elsewhere", at=0.5)[0])
SPEEDS = {"trainer": {"num_workers": 1, "ppo_mini_batch_size": 2}, "rollout": {"cpu_threads": 2}}
"""The keys of the configuration from which a simulation takes something."""
STEP = {
    "kind": "step", "step": 1, "time/monotonic_s": 1.0, "health/machine_cpus": 2.0, "health/machine_cpu": 0.75,
    **{f"health/{kind}/{name}": 0.5 for kind in ("cpu", "cpu_wait") for name in ("trainer", "engine-a")},
}  # fmt: skip
TRAINED = {"lineage": 0, "step": 7, "version": 3, "samples": ["sample_0_42"]}
ODD_YAML = (
    "a: !!bool maybe", "a: !!int ''", "a: !!timestamp no", f"a: !!float {'1:' * 200}1.0", "{1: 2}: 3", "a: !!binary é",
    "experiment_name: ${rollout}\nrollout: {response_length: '${experiment_name}'}", "a: 2020-13-45",
    f"profiler: {{level: !!int '0x{'f' * 20_000}'}}", "profiler: {level: 0x" + "f" * 200 + "}",
    "model: {path: '${model}'}\nproject_name: ${secret:}\nexperiment_name: ${oc.decode:1..}",
)  # fmt: skip


def texts(value: Any) -> st.SearchStrategy[str]:
    """Return files with a damaged JSON value, or without JSON."""
    return hostile.damaged(value).map(hostile.dumps) | st.sampled_from(hostile.BROKEN_JSON)


configurations = (
    hostile.damaged(CONFIG).map(partial(hostile.dumps, write=yaml.safe_dump))
    | st.sampled_from(ODD_YAML)
    | st.sampled_from(hostile.BROKEN_JSON)
    | st.just(yaml.safe_dump(CONFIG))
)


def write(path: Path, text: str | None) -> None:
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")


relaxed = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json"), ("why",), ("why", "--json")], ids=" ".join)
@relaxed
@given(
    state=texts(STATE) | st.just(json.dumps(STATE)) | st.none(),
    summary=texts(SUMMARY) | st.just(json.dumps(SUMMARY)) | st.none(),
)
def test_status_of_any_state_and_summary(
    run_dir: Path, arguments: tuple[str, ...], state: str | None, summary: str | None
) -> None:
    write(run_dir / STATE_FILE, state)
    write(run_dir / "summary.json", summary)
    assert main([*arguments[:1], str(run_dir), *arguments[1:]]) in (0, 2)


@relaxed
@given(state=texts(STATE) | st.none(), summary=texts(SUMMARY) | st.none(), config=configurations)
def test_facts_about_any_run_in_a_report(run_dir: Path, state: str | None, summary: str | None, config: str) -> None:
    write(run_dir / STATE_FILE, state)
    write(run_dir / "summary.json", summary)
    write(run_dir / "config.yaml", config)
    facts = about(run_dir)
    texts_of = {facts[name] for name in ("name", "run_dir", "experiment", "status", "level")}
    assert all(isinstance(each, str | None) for each in texts_of)
    assert all(isinstance(facts[name], float | int | None) for name in ("started_at", "response_length"))
    read_readable_summary(run_dir)


def test_a_report_has_no_variable_of_the_environment(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_READER", "c4n4ry")
    write(run_dir / "config.yaml", "experiment_name: ${oc.env:OF_THE_READER}")
    assert about(run_dir)["experiment"] == "${oc.env:OF_THE_READER}"


def test_report_of_a_damaged_run(run_dir: Path, cli: CommandLine) -> None:
    """Times and lengths of the wrong size are in the report; nothing else of these files is."""
    write_run(run_dir, RunPlan(steps=2, samples=2, n=1))
    write(run_dir / STATE_FILE, json.dumps({**STATE, "started_at": -1e308, "phase": "failed"}))
    write(run_dir / "summary.json", json.dumps({**SUMMARY, "wall_s": 1e308}))
    write(run_dir / "config.yaml", "rollout: {response_length: -1.0e+15}\nexperiment_name: 2020-01-01\n")
    cli("report", run_dir, "--json")


@relaxed
@given(config=configurations)
def test_show_with_any_configuration(run_dir: Path, config: str) -> None:
    show(run_dir, config, json.dumps(LINE), json.dumps(TRAINED))


@relaxed
@given(line=texts(LINE), trained=texts(TRAINED) | st.none())
def test_show_of_any_record(run_dir: Path, line: str, trained: str | None) -> None:
    show(run_dir, yaml.safe_dump(CONFIG), line, trained)


def show(run_dir: Path, config: str, line: str, trained: str | None) -> None:
    write(run_dir / "config.yaml", config)
    Path("dump").mkdir(exist_ok=True)
    write(Path("dump", file_name(42)), f"{line}\n")
    write(run_dir / "trained.jsonl", None if trained is None else f"{trained}\n")
    assert main(["show", str(run_dir), "sample_0_42"]) in (0, 2)


# ------------------------------------------------------------------------------------------------ timeline and simulate


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sequence[str]]:
    """Return the lines of the event files of a run, by the path in its directory."""
    write_run(run := tmp_path_factory.mktemp("recorded"), RunPlan(steps=4, samples=2, n=2, turns=2, validation_every=2))
    return {str(file.relative_to(run)): file.read_text().splitlines() for file in event_files(run)}


def write_damaged(run_dir: Path, recorded: Mapping[str, Sequence[str]], data: st.DataObject) -> None:
    """Write these events, some of them damaged."""
    places = [(name, number) for name, lines in recorded.items() for number in range(len(lines))]
    damaged = {
        place: data.draw(texts(json.loads(recorded[place[0]][place[1]])))
        for place in data.draw(st.lists(st.sampled_from(places), max_size=4, unique=True))
    }
    for name, lines in recorded.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        write(run_dir / name, "".join(f"{damaged.get((name, number), line)}\n" for number, line in enumerate(lines)))


@settings(relaxed, max_examples=40)
@given(data=st.data(), state=texts(STATE) | st.none())
def test_timeline_of_any_run(
    run_dir: Path, recorded: Mapping[str, Sequence[str]], data: st.DataObject, state: str | None
) -> None:
    write_damaged(run_dir, recorded, data)
    write(run_dir / STATE_FILE, state)
    assert main(["timeline", str(run_dir), "--trace", "trace.json"]) == 0
    json.loads(Path("trace.json").read_text())
    page = Timeline(run_dir, partial(read_liveness, run_dir))
    page.read()
    status = page.status()
    json.dumps([status, page.view(EVERYTHING)], allow_nan=False)
    for number in range(0, status["events"], 20):
        assert page.details(number, partial(conversation_of, run_dir))


@settings(relaxed, max_examples=40)
@given(data=st.data(), state=texts(STATE) | st.none(), config=configurations | texts(SPEEDS))
def test_speeds_of_any_run(
    run_dir: Path, recorded: Mapping[str, Sequence[str]], data: st.DataObject, state: str | None, config: str
) -> None:
    write_damaged(run_dir, recorded, data)
    write(run_dir / STATE_FILE, state)
    write(run_dir / "config.yaml", config)
    rows = [data.draw(texts({**STEP, "time/monotonic_s": float(number)})) for number in range(3)]
    write(run_dir / "metrics.jsonl", "\n".join(rows))
    with suppress(ConfigError):
        calibrate(run_dir)


def test_simulate_with_the_speeds_of_a_damaged_run(run_dir: Path, cli: CommandLine) -> None:
    write_run(run_dir, RunPlan(steps=4, samples=2, n=2))
    write(run_dir / STATE_FILE, json.dumps(STATE))
    huge = {"num_workers": 10**400, "ppo_mini_batch_size": 10**400, "cpu_threads": 10**400}
    write(run_dir / "config.yaml", yaml.safe_dump({"trainer": huge, "rollout": huge}))
    later = {**STEP, "time/monotonic_s": 2.0}
    odd = {**later, **dict.fromkeys((name for name in STEP if name.startswith("health/")), "a")}
    rows = [*map(json.dumps, (STEP, odd, later)), hostile.DEEP, hostile.NESTED, hostile.LONG_INTEGER]
    write(run_dir / "metrics.jsonl", "\n".join(rows))
    cli("simulate", "--trace", run_dir, "--steps", 1)


# ------------------------------------------------------------------------------------------------ pipes and large files


@pytest.mark.parametrize(
    ("command", "file"),
    [
        *(("status", name) for name in (STATE_FILE, "summary.json", "config.yaml", "journal.db")),
        ("report", "report/report.json"),
        ("report", "events"),
        ("show", f"dump/{file_name(42)}"),
        ("show", "kept/sample_0_42.safetensors"),
        ("show", "trained.jsonl"),
        ("timeline", "events"),
        ("simulate", "metrics.jsonl"),
        ("simulate", "events/summary.json"),
    ],
)
def test_no_command_waits_for_a_pipe(run_dir: Path, command: str, file: str) -> None:
    write_run(run_dir, RunPlan(steps=4, samples=2, n=2))
    write(run_dir / "config.yaml", yaml.safe_dump({"rollout": {"dump_dir": str(run_dir / "dump")}}))
    if command == "simulate":
        write(run_dir / STATE_FILE, json.dumps(STATE))
    path = run_dir / file
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    arguments = {
        "show": (run_dir, "sample_0_42"),
        "timeline": (run_dir, "--trace", "trace.json"),
        "simulate": ("--trace", run_dir, "--steps", 1),
    }
    assert main([command, *map(str, arguments.get(command, (run_dir,)))]) in (0, 2)


def test_a_file_that_is_too_large_is_named_with_its_size_and_the_fix(run_dir: Path, cli: CommandLine) -> None:
    (run_dir / STATE_FILE).touch()
    os.truncate(run_dir / STATE_FILE, MAX_FILE_BYTES + 1)
    error = cli("status", run_dir, code=2).err
    assert str(run_dir / STATE_FILE) in error and f"has {MAX_FILE_BYTES + 1} bytes" in error and "delete it" in error
