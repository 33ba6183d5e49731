"""The log files of a private Ray cluster stay small in a run of weeks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from asyncrl.driver.cluster import log_files
from asyncrl.driver.cluster.log_files import bound_logs, keep_bounded

DAY_S = 86_400.0


def make_old(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - 8 * DAY_S,) * 2)
    return path


def test_logs_of_ended_processes_are_deleted_after_some_days(tmp_path: Path) -> None:
    logs, elsewhere = tmp_path / "session" / "logs", make_old(tmp_path / "elsewhere" / "notes.txt")
    ended = [make_old(logs / "worker-a-1.err"), make_old(logs / "serve" / "replica_x.log")]
    open_in_child, read_by_child = make_old(logs / "worker-b-2.err"), make_old(logs / "worker-c-3.out")
    recent = logs / "raylet.out"
    recent.write_text("text")
    (logs / "linked").symlink_to(elsewhere)
    # Ray's log monitor keeps the files of ended processes open, to read them.
    code = f"kept = open({str(read_by_child)!r}), open({str(open_in_child)!r}, 'a'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        bound_logs(logs, 7 * DAY_S)
        assert not any(path.exists() for path in (*ended, read_by_child))
        assert open_in_child.exists() and recent.exists() and elsewhere.exists()
        child.communicate(b"\n")
    bound_logs(logs, 7 * DAY_S)
    assert not open_in_child.exists() and recent.exists()


def test_a_large_log_is_cut_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_BYTES", 1000)
    monkeypatch.setattr(log_files, "KEPT_BYTES", 100)
    path = tmp_path / "worker-a-1.out"
    with path.open("ab", buffering=0) as file:
        for number in range(60):
            file.write(b"%03d %s\n" % (number, b"x" * 45))
            bound_logs(tmp_path, 7 * DAY_S)
    assert path.stat().st_size <= 1000 and path.read_bytes()[:4] == b"042 "
    assert path.with_name("worker-a-1.out.1").read_bytes().splitlines()[-1][:3] == b"041"
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 1100


async def test_a_directory_that_cannot_be_read_never_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fail(path: Path, keep_s: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            anyio.from_thread.run_sync(tasks.cancel_scope.cancel)
        raise PermissionError("no access")

    monkeypatch.setattr(log_files, "bound_logs", fail)
    monkeypatch.setattr(log_files, "CHECK_EVERY_S", 0.0)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_bounded, tmp_path, DAY_S)
    assert calls == 3 and len(caplog.messages) == 1 and "no access" in caplog.messages[0]
