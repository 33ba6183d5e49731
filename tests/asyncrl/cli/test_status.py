"""`asyncrl status` and `asyncrl why` on the directories of live, dead, damaged and unknown runs."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.staleness import Pacing
from asyncrl.core.waits import Wait
from asyncrl.observe.status.run_files import driver_state, events_level, read_liveness, read_run, status_report
from asyncrl.observe.status.run_status import STATE_FILE, Restart, RunProgress, RunState, StateFile
from asyncrl.observe.status.summary import SummaryBuilder
from asyncrl.observe.terminal.status_page import status_page
from asyncrl.queue.journal import Journal
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.run_dir import find_run
from asyncrl.storage.sample_bytes import FileRef
from tests.fakes.command_line import CommandLine, in_subprocess
from tests.fakes.queues import admit, end, meta
from tests.fakes.run_states import NOW, report, rollouter_waits, running

STUCK = replace(
    rollouter_waits(running(published=WeightsVersion(1, 12), version=12, lineage=1), Wait("permit", 1, 93.5)),
    replicas=(report("0", version=12, lineage=1), report("1", "pausing")),
    staleness={0: 288, 1: 90, 3: 6},
    drops={"took too long": 2},
    generated_per_s=4493.2,
    restarts=(
        Restart("trainer", 2, NOW - 300, "rank actor/0 died", NOW - 288.6, "back to step 10"),
        Restart("replica", 2, NOW - 3, "its engine ended"),
    ),
)


def now_is(state: RunState, **changes: Any) -> RunState:
    """Return the state as this process would have written it half a second ago."""
    shift = time.time() - NOW
    return replace(
        state,
        written_at=state.written_at + shift,
        started_at=state.started_at + shift,
        pid=os.getpid(),
        host=socket.gethostname(),
        replicas=tuple(
            replace(each, phase_since=each.phase_since + shift, reported_at=each.reported_at + shift)
            for each in state.replicas
        ),
        **changes,
    )


@pytest.fixture
def run_dir(run_dir: Path) -> Path:
    """A run with two checkpoints."""
    for step in (10, 20):
        (run_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    return run_dir


def write(run_dir: Path, state: RunState) -> None:
    StateFile(run_dir / STATE_FILE).write_now(state)


def summarize(run_dir: Path, status: Any, error: dict[str, str] | None = None) -> None:
    progress = RunProgress(
        counts=SampleCounts(fed=3, trained=1, dropped={"stale": 2}), generated_tokens=10, trained_tokens=7
    )
    summary = SummaryBuilder().build(status, error, progress, wall_s=201.0, idle_trainer=0.5, idle_rollouter=0.25)
    (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def ended_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


@pytest.fixture
def stopped_pid() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()


def page(run_dir: Path, state: RunState, width: int) -> str:
    write(run_dir, now_is(state))
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(status_page(status_report(read_run(run_dir)), run_dir.name))
    return console.export_text()


def test_a_live_run_on_a_page_of_80_columns(run_dir: Path) -> None:
    text = page(run_dir, STUCK, 80)
    assert all(len(line) <= 80 for line in text.splitlines()[:-2])
    for figure in (
        "quickstart · 20260102-030405 · fully_async",
        "running for 16:40  driver pid",
        "step 12/200   version 12   lineage 1   published 12   applied 11",
        "fed 416   trained 384   dropped 2",
        "running 0   leased 0",
        "queue        ready 30",
        "counts are consistent   of 6,400 samples in all   (state.json)",
        "stale 2",
        "took too long 2",
        " 0 ██████████████████       288 (75%)   mean 0.28",
        " 3 ▏                        6 (2%)",
        "tokens       generated 0   trained 0 ",
        "             4,493 generated/s",
        "1  pausing  version 11  4 requests  1,000 tokens  pid 100",
        "trainer 1   replica 1",
        "trainer back after 11.4 s, back to step 10  rank actor/0 died",
        "replica not yet recovered  its engine ended",
        "step 10, 20",
        "◀ replica 1 is",
    ):
        assert figure in text, figure


def test_a_run_that_could_not_write_its_last_state_has_the_counts_of_its_summary(run_dir: Path) -> None:
    """Only the summary has reserved space on a full disk."""
    write(run_dir, now_is(STUCK))
    summarize(run_dir, "failed", {"type": "DiskFullError", "part": "driver", "message": "no space", "cause": ""})
    report = status_report(read_run(run_dir))
    assert (report["samples"]["fed"], report["samples"]["trained"], report["samples"]["dropped"]) == (
        3,
        1,
        {"stale": 2},
    )
    assert (report["tokens"]["generated"], report["tokens"]["trained"]) == (10, 7)


def test_liveness_of_a_run(run_dir: Path, ended_pid: int) -> None:
    assert read_liveness(run_dir) == ("unknown", "unknown", None)
    live = now_is(STUCK)
    write(run_dir, live)
    assert read_liveness(run_dir)[:2] == ("live", "running")
    write(run_dir, replace(live, pid=ended_pid))
    assert read_liveness(run_dir)[:2] == ("died", "died")
    summarize(run_dir, "interrupted")  # written last, so it overrides the state
    how, phase, state = read_liveness(run_dir)
    assert (how, phase) == ("ended", "interrupted") and state is not None
    (run_dir / STATE_FILE).write_text("{")
    assert read_liveness(run_dir) == ("ended", "interrupted", None)
    (run_dir / "summary.json").write_text("[]")
    assert read_liveness(run_dir) == ("unknown", "unknown", None)


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ("profiler: {level: full}", "full"),
        ("profiler: {level: off}", "off"),  # YAML reads a bare `off` as a boolean
        ("profiler: {level: 'off'}", "off"),
        ("", None),
        ("profiler: 3", None),
        ("profiler: {level: 3}", None),
        (f"profiler: {{level: !!int '0x{'f' * 20_000}'}}", None),
        ("{", None),
    ],
)
def test_the_level_at_which_a_run_records_events(run_dir: Path, config: str, level: str | None) -> None:
    (run_dir / "config.yaml").write_text(config)
    assert events_level(run_dir) == level


def test_a_silent_replica_is_on_the_page(run_dir: Path) -> None:
    silent = replace(STUCK, replicas=(report("0"), report("1", reported_at=NOW - 60)))
    assert "1  serving  no report for 60 s  version 11" in page(run_dir, silent, 100)


def test_why_prints_one_link_per_line(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK))
    assert [line.split(" for ")[0] for line in cli("why").out.splitlines()] == [
        "Trainer is blocked on samples",
        "  ◀ Rollouter is blocked on the staleness gate",
        "  ◀ version 12 is not applied",
        "  ◀ replica 1 is paused",
    ]


def test_status_and_why_as_json(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK))
    answer = cli("status", "quickstart", "--json").json
    assert (answer["live"], answer["phase"]) == (True, "running")
    assert answer["samples"] == {
        "fed": 416, "running": 0, "ready": 30, "leased": 0, "trained": 384, "dropped": {"stale": 2},
        "replayed": 0, "substituted": 0,
    }  # fmt: skip
    assert answer["balanced"] is True
    assert answer["staleness"]["histogram"] == {"0": 288, "1": 90, "3": 6}
    assert answer["restarts"] == {"rollouter": 0, "worker": 0, "trainer": 1, "queue": 0, "store": 0, "replica": 1}
    assert [each["recovered_s"] for each in answer["recovery"]] == [pytest.approx(11.4), None]
    assert [each["step"] for each in answer["checkpoints"]] == [10, 20]
    assert answer["why"]["cause"] == "replica"
    why = cli("why", run_dir, "--json").json
    assert why["cause"] == "replica"
    assert [link["subject"] for link in why["chain"]] == ["Trainer", "Rollouter", "version 12", "replica 1"]


def test_status_names_checkpoints_outside_of_the_run_directory(run_dir: Path, tmp_path: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK))
    (tmp_path / "network" / "step_000030").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(f"trainer: {{checkpoint_dir: {tmp_path / 'network'}}}")
    [checkpoint] = cli("status", "quickstart", "--json").json["checkpoints"]
    assert checkpoint == {"step": 30, "path": str(tmp_path / "network" / "step_000030")}


def test_status_of_a_killed_driver(run_dir: Path, ended_pid: int, cli: CommandLine) -> None:
    write(run_dir, replace(now_is(STUCK), pid=ended_pid))
    assert "dead after 16:39: the driver has been gone for" in cli("status").out
    lines = cli("why").out.splitlines()
    assert lines[0].startswith("driver has been dead for")
    assert lines[1] == "at that time:"
    assert lines[2].startswith("  Trainer is blocked on samples for 94 s")
    assert lines[5].startswith("    ◀ replica 1 is paused for 94 s")


def test_status_of_a_stopped_driver(run_dir: Path, stopped_pid: int, cli: CommandLine) -> None:
    write(run_dir, replace(now_is(STUCK), pid=stopped_pid))
    assert "stopped by a signal" in cli("status").out
    assert f"kill -CONT {stopped_pid} resumes it" in cli("why").out.splitlines()[0]


def test_state_of_the_drivers_process() -> None:
    mine = now_is(STUCK)
    assert driver_state(mine) == "alive"
    # In the first case another process has reused the pid; in the second one the driver ran on another machine.
    assert driver_state(replace(mine, written_at=mine.written_at - 1e6)) == "gone"
    assert [driver_state(replace(mine, pid=pid)) for pid in (-1, 10**30)] == ["gone", "gone"], "of a file that was made"
    assert driver_state(replace(mine, host="elsewhere")) == "unknown"


def test_status_of_a_failed_run(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK, phase="failed", error="rank 0 died\nand more"))
    summarize(run_dir, "failed", {"type": "InfraError", "part": "trainer", "message": "rank 0 died", "cause": ""})
    out = cli("status").out
    assert "failed after 3:21: rank 0 died" in out
    assert "at the end   Trainer is blocked on samples" in out
    assert cli("why").out.startswith("run failed (rank 0 died)\nat that time:\n  Trainer is blocked")


def test_a_summary_overrides_the_state_and_is_enough_by_itself(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK))
    summarize(run_dir, "completed")
    assert cli("why").out == "run completed\n"
    (run_dir / STATE_FILE).unlink()
    answer = cli("status", "--json").json
    assert (answer["phase"], answer["live"]) == ("completed", False)
    assert (answer["samples"]["fed"], answer["wall_s"]) == (3, 201.0)
    assert "completed after 3:21" in cli("status").out
    cli("why")


def test_a_torn_state_is_reported_and_an_empty_run_is_refused(run_dir: Path, cli: CommandLine) -> None:
    (run_dir / STATE_FILE).write_text('{"schema')
    assert "state.json is torn" in cli("status", code=2).err
    summarize(run_dir, "interrupted")
    assert "is torn" in cli("status", "--json").json["notes"][0]
    (run_dir / STATE_FILE).unlink()
    (run_dir / "summary.json").unlink()
    assert "there is no state.json, summary.json or journal.db in it" in cli("why", code=2).err


@pytest.fixture
def journal(run_dir: Path) -> Path:
    """A journal with five fed samples, one of which is READY."""

    async def write_it() -> None:
        path = run_dir / "journal.db"
        journal = Journal.open(path, num_prompts=10, identity={"seed": 0})
        queue = LocalSampleQueue(QueueOptions(10, Pacing(5, 0.0)), journal=journal, state=journal.state)
        first, *_ = await admit(queue, 5)
        await queue.offer(meta(first), FileRef("1-1.safetensors", 0))
        await end(journal)

    anyio.run(write_it)
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "1-1.safetensors").write_bytes(b"x" * 2500)
    return run_dir / "journal.db"


def test_counts_of_a_dead_run_are_from_the_journal(run_dir: Path, journal: Path) -> None:
    write(run_dir, replace(now_is(STUCK), written_at=time.time() - 60))
    os.utime(journal, times=(time.time() - 61,) * 2)  # the state was written later, with an earlier answer of the queue
    found = status_report(read_run(run_dir))
    assert found["counts_from"] == "journal.db"
    assert (found["samples"]["fed"], found["samples"]["running"], found["samples"]["ready"]) == (5, 4, 1)
    assert found["journal"]["payload_bytes"] == 2500
    assert found["journal"]["bytes"] > 0
    # The counts of a healthy driver are current.
    write(run_dir, now_is(STUCK))
    assert status_report(read_run(run_dir))["counts_from"] == "state.json"
    # A driver that is still starting, or failed to start, has no counts of the queue.
    for state in (now_is(STUCK, phase="starting"), replace(STUCK, phase="failed", error="it did not come up")):
        write(run_dir, replace(state, queue=None, counts=SampleCounts()))
        found = status_report(read_run(run_dir))
        assert (found["counts_from"], found["samples"]["fed"]) == ("journal.db", 5)
    (run_dir / STATE_FILE).unlink()
    assert status_report(read_run(run_dir))["why"]["text"].startswith("run has left no state")


def test_a_damaged_journal_is_reported_in_a_note(run_dir: Path, journal: Path) -> None:
    journal.write_bytes(b"no database, but long enough to look like one" * 100)
    write(run_dir, replace(now_is(STUCK), written_at=time.time() - 60))
    found = status_report(read_run(run_dir))
    [note] = found["notes"]
    assert (found["counts_from"], "journal.db" in note) == ("state.json", True)


# ---------------------------------------------------------------------------------------------- choice of the run


def test_a_run_is_found_by_path_by_experiment_or_as_the_newest(run_dir: Path, tmp_path: Path) -> None:
    for index, name in enumerate(("quickstart/20260103-000000", "other/20250101-000000")):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text("")
        os.utime(path / "config.yaml", (2e9 + index, 2e9 + index))
    (run_dir.parent / "latest").symlink_to(run_dir.name)
    assert find_run(str(run_dir)) == run_dir
    assert find_run("runs/quickstart/latest") == run_dir
    assert find_run("quickstart").name == "20260103-000000"
    assert find_run("runs/quickstart").name == "20260103-000000"
    assert find_run(None).parts[-2:] == ("other", "20250101-000000")
    # A run that was launched with run_dir=runs/mine.
    mine = tmp_path / "runs" / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("")
    os.utime(mine / "config.yaml", (2.5e9, 2.5e9))
    assert find_run(None) == mine
    with pytest.raises(ConfigError, match=r"contains mine \(1 run\), other \(1 run\), quickstart \(2 runs\)"):
        find_run("nosuch")
    # A run becomes the newest when its state is written.
    write(run_dir, STUCK)
    os.utime(run_dir / STATE_FILE, (3e9, 3e9))
    assert find_run(None) == run_dir


def test_an_unknown_run_lists_the_runs(run_dir: Path, tmp_path: Path, cli: CommandLine) -> None:
    assert f"{tmp_path / 'runs'} contains quickstart (1 run)." in cli("status", "quikstart", code=2).err
    with pytest.raises(ConfigError, match=r"there are no runs in .*nowhere"):
        find_run(None, Path("nowhere"))
    cli("status", "--watch", "--json", code=2)


def test_watching_ends_with_the_run(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, now_is(STUCK, phase="completed"))
    assert "completed after 16:39" in cli("status", "--watch").out


@pytest.mark.parametrize("command", ["status", "why"])
def test_help_has_examples(command: str, cli: CommandLine) -> None:
    out = cli(command, "--help").out
    assert f"asyncrl {command} runs/quickstart/" in out
    assert "The default is the newest run in runs/." in " ".join(out.split())


def test_status_and_why_load_few_modules(run_dir: Path) -> None:
    write(run_dir, now_is(STUCK))
    code, loaded = in_subprocess("why")
    assert (code, loaded & {"ray", "torch", "vllm", "transformers", "asyncrl.config.schema"}) == (0, set())
    assert len(loaded) < 700
