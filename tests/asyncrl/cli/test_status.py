"""`asyncrl status` and `asyncrl why` on run directories: live, dead, damaged, unknown."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from asyncrl.cli.main import main
from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import SampleCounts, WeightsVersion
from asyncrl.core.staleness import Pacing
from asyncrl.core.types import SampleMeta
from asyncrl.core.waits import Wait
from asyncrl.observe.status.run_files import driver_state, events_level, read_liveness, read_run, status_report
from asyncrl.observe.status.run_status import STATE_FILE, Restart, RunState, StateFile
from asyncrl.observe.status.summary import RunTotals, SummaryBuilder
from asyncrl.observe.terminal.status_page import status_page
from asyncrl.queue.journal import Journal
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.run_dir import find_run
from asyncrl.storage.sample_bytes import FileRef
from tests.fakes.queues import end
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
    """As if it were written half a second ago, by this process."""
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
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory in `runs/quickstart` of the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "quickstart" / "20260102-030405"
    for step in (10, 20):
        (path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (path / "config.yaml").write_text("")
    return path


def write(run_dir: Path, state: RunState) -> None:
    StateFile(run_dir / STATE_FILE).write_now(state)


def summarize(run_dir: Path, status: Any, error: dict[str, str] | None = None) -> None:
    totals = RunTotals(201.0, SampleCounts(fed=3, trained=1, dropped={"stale": 2}), 10, 0.5, 0.25)
    (run_dir / "summary.json").write_text(json.dumps(SummaryBuilder().build(status, error, totals)))


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


def test_a_live_run_on_a_page_of_80_columns(run_dir: Path) -> None:
    write(run_dir, now_is(STUCK))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(status_page(status_report(read_run(run_dir)), run_dir.name))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines()[:-2])
    for figure in (
        "quickstart · 20260102-030405 · fully_async",
        "running for 16:40  driver pid",
        "step 12/200   version 12   lineage 1   published 12   applied 11",
        "fed 416   trained 384   dropped 2",
        "running 0   ready 30   leased 0",
        "counts are consistent   of 6,400 samples in all   (state.json)",
        "stale 2",
        "took too long 2",
        " 0 ██████████████████       288 (75%)   mean 0.28",
        " 3 ▏                        6 (2%)",
        "4,493 generated/s",
        "1  pausing  version 11  4 requests  1,000 tokens  pid 100",
        "trainer 1   replica 1",
        "trainer back after 11.4 s, back to step 10  rank actor/0 died",
        "replica not yet recovered  its engine ended",
        "step 10, 20",
        "◀ replica 1 is",
    ):
        assert figure in text, figure


def test_liveness_of_a_run(run_dir: Path, ended_pid: int) -> None:
    assert read_liveness(run_dir) == ("unknown", "unknown", None)
    live = now_is(STUCK)
    write(run_dir, live)
    assert read_liveness(run_dir)[:2] == ("live", "running")
    write(run_dir, replace(live, pid=ended_pid))
    assert read_liveness(run_dir)[:2] == ("died", "died")
    summarize(run_dir, "interrupted")  # comes last: its word counts, whatever the state says
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
        ("profiler: {level: off}", "off"),  # a boolean, as YAML reads it
        ("profiler: {level: 'off'}", "off"),
        ("", None),
        ("profiler: 3", None),
        ("{", None),
    ],
)
def test_at_what_level_a_run_records_events(run_dir: Path, config: str, level: str | None) -> None:
    (run_dir / "config.yaml").write_text(config)
    assert events_level(run_dir) == level


def test_a_silent_replica_is_on_the_page(run_dir: Path) -> None:
    write(run_dir, now_is(replace(STUCK, replicas=(report("0"), report("1", reported_at=NOW - 60)))))
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(status_page(status_report(read_run(run_dir)), run_dir.name))
    assert "1  serving  no report for 60 s  version 11" in console.export_text()


def test_why_prints_a_link_a_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, now_is(STUCK))
    assert main(["why"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" for ")[0] for line in lines] == [
        "Trainer is blocked on samples",
        "  ◀ Rollouter is blocked on the staleness gate",
        "  ◀ version 12 is not applied",
        "  ◀ replica 1 is paused",
    ]


def test_the_whole_answer_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, now_is(STUCK))
    assert main(["status", "quickstart", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["live"] is True
    assert answer["phase"] == "running"
    assert answer["samples"] == {
        "fed": 416,
        "running": 0,
        "ready": 30,
        "leased": 0,
        "trained": 384,
        "dropped": {"stale": 2},
        "replayed": 0,
        "substituted": 0,
    }
    assert answer["balanced"] is True
    assert answer["staleness"]["histogram"] == {"0": 288, "1": 90, "3": 6}
    assert answer["restarts"] == {"rollouter": 0, "trainer": 1, "queue": 0, "store": 0, "replica": 1}
    assert [each["recovered_s"] for each in answer["recovery"]] == [pytest.approx(11.4), None]
    assert [each["step"] for each in answer["checkpoints"]] == [10, 20]
    assert answer["why"]["cause"] == "replica"
    assert main(["why", str(run_dir), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cause"] == "replica"
    assert [link["subject"] for link in told["chain"]] == ["Trainer", "Rollouter", "version 12", "replica 1"]


def test_a_driver_that_was_killed(run_dir: Path, ended_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, replace(now_is(STUCK), pid=ended_pid))
    assert main(["status"]) == 0
    assert "dead after 16:39: the driver has been gone for" in capsys.readouterr().out
    assert main(["why"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("driver has been dead for")
    assert lines[1] == "at that time:"
    assert lines[2].startswith("  Trainer is blocked on samples for 94 s")
    assert lines[5].startswith("    ◀ replica 1 is paused for 94 s")


def test_a_driver_that_is_stopped(run_dir: Path, stopped_pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, replace(now_is(STUCK), pid=stopped_pid))
    assert main(["status"]) == 0
    assert "stopped by a signal" in capsys.readouterr().out
    assert main(["why"]) == 0
    assert f"kill -CONT {stopped_pid} resumes it" in capsys.readouterr().out.splitlines()[0]


def test_state_of_the_drivers_process() -> None:
    mine = now_is(STUCK)
    assert driver_state(mine) == "alive"
    # The number is another process's by now; the driver was somewhere else.
    assert driver_state(replace(mine, written_at=mine.written_at - 1e6)) == "gone"
    assert driver_state(replace(mine, host="elsewhere")) == "unknown"


def test_status_of_a_failed_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, now_is(STUCK, phase="failed", error="rank 0 died\nand more"))
    summarize(run_dir, "failed", {"type": "InfraError", "part": "trainer", "message": "rank 0 died", "cause": ""})
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "failed after 3:21: rank 0 died" in out
    assert "at the end   Trainer is blocked on samples" in out
    assert main(["why"]) == 0
    assert capsys.readouterr().out.startswith("run failed (rank 0 died)\nat that time:\n  Trainer is blocked")


def test_a_summary_overrides_the_state_and_suffices_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, now_is(STUCK))
    summarize(run_dir, "completed")
    assert main(["why"]) == 0
    assert capsys.readouterr().out == "run completed\n"
    (run_dir / STATE_FILE).unlink()
    assert main(["status", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["phase"], answer["live"], answer["samples"]["fed"], answer["wall_s"]) == (
        "completed",
        False,
        3,
        201.0,
    )
    assert main(["status"]) == 0
    assert "completed after 3:21" in capsys.readouterr().out
    assert main(["why"]) == 0


def test_a_torn_state_is_a_note_and_an_empty_run_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / STATE_FILE).write_text('{"schema')
    assert main(["status"]) == 2
    assert "state.json is torn" in capsys.readouterr().err
    summarize(run_dir, "interrupted")
    assert main(["status", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "is torn" in answer["notes"][0]
    (run_dir / STATE_FILE).unlink()
    (run_dir / "summary.json").unlink()
    assert main(["why"]) == 2
    assert "there is no state.json, summary.json or journal.db in it" in capsys.readouterr().err


@pytest.fixture
def journal(run_dir: Path) -> Path:
    """Five samples fed, one of them READY."""

    async def write_it() -> None:
        path = run_dir / "journal.db"
        journal = Journal.open(path, num_prompts=10, identity={"seed": 0})
        queue = LocalSampleQueue(QueueOptions(10, Pacing(5, 0.0)), journal=journal, state=journal.state)
        first, *_ = (await queue.admit(5, timeout_s=1)).sample_ids
        await queue.offer(SampleMeta(first, 0, 0, 1, 1, 100), FileRef("1-1.safetensors", 0))
        await end(journal)

    anyio.run(write_it)
    (run_dir / "samples").mkdir()
    (run_dir / "samples" / "1-1.safetensors").write_bytes(b"x" * 2500)
    return run_dir / "journal.db"


def test_counts_of_a_dead_run_are_from_the_journal(run_dir: Path, journal: Path) -> None:
    write(run_dir, replace(now_is(STUCK), written_at=time.time() - 60))
    told = status_report(read_run(run_dir))
    assert told["counts_from"] == "journal.db"
    assert (told["samples"]["fed"], told["samples"]["running"], told["samples"]["ready"]) == (5, 4, 1)
    assert told["journal"]["payload_bytes"] == 2500
    assert told["journal"]["bytes"] > 0
    # While the driver is well, its own word is as good.
    write(run_dir, now_is(STUCK))
    assert status_report(read_run(run_dir))["counts_from"] == "state.json"
    # One that starts has not heard of the queue, and would say that there is nothing; so would one that died over that.
    for state in (now_is(STUCK, phase="starting"), replace(STUCK, phase="failed", error="it did not come up")):
        write(run_dir, replace(state, queue=None, counts=SampleCounts()))
        told = status_report(read_run(run_dir))
        assert (told["counts_from"], told["samples"]["fed"]) == ("journal.db", 5)
    # Even without a state it is something.
    (run_dir / STATE_FILE).unlink()
    assert status_report(read_run(run_dir))["why"]["text"].startswith("run has left no state")


def test_a_damaged_journal_is_a_note(run_dir: Path, journal: Path) -> None:
    journal.write_bytes(b"no database, but long enough to look like one" * 100)
    write(run_dir, replace(now_is(STUCK), written_at=time.time() - 60))
    told = status_report(read_run(run_dir))
    assert told["counts_from"] == "state.json"
    assert len(told["notes"]) == 1
    assert "journal.db" in told["notes"][0]


# ---------------------------------------------------------------------------------------------- which run


def test_a_run_by_path_by_experiment_and_the_newest_of_all(run_dir: Path, tmp_path: Path) -> None:
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
    # One that was given run_dir=runs/mine.
    mine = tmp_path / "runs" / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("")
    os.utime(mine / "config.yaml", (2.5e9, 2.5e9))
    assert find_run(None) == mine
    with pytest.raises(ConfigError, match=r"contains mine \(1 run\), other \(1 run\), quickstart \(2 runs\)"):
        find_run("nosuch")
    # A run elsewhere is the newest once it writes its state.
    write(run_dir, STUCK)
    os.utime(run_dir / STATE_FILE, (3e9, 3e9))
    assert find_run(None) == run_dir


def test_an_unknown_run_lists_the_runs(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "quikstart"]) == 2
    assert f"{tmp_path / 'runs'} contains quickstart (1 run)." in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"there are no runs in .*nowhere"):
        find_run(None, Path("nowhere"))
    assert main(["status", "--watch", "--json"]) == 2


def test_watching_ends_with_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, now_is(STUCK, phase="completed"))
    assert main(["status", "--watch"]) == 0
    assert "completed after 16:39" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "why"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"asyncrl {command} runs/quickstart/" in out
    assert "the newest run of all" in out


def test_status_and_why_are_quick_and_load_nothing_heavy(run_dir: Path) -> None:
    write(run_dir, now_is(STUCK))
    code = (
        "import sys; from asyncrl.cli.main import main; rc = main(sys.argv[1:]);"
        "heavy = {'ray', 'torch', 'vllm', 'transformers', 'asyncrl.config.schema'};"
        "print('LOADED', *(heavy & set(sys.modules))); sys.exit(rc)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code, "why"], capture_output=True, text=True, timeout=60)
    after = os.times()
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "LOADED"
    # CPU time, because a busy machine stretches the other; on an idle one the two are the same.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0
