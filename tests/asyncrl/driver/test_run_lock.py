"""Two drivers in one run directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver import launch as launch_module
from asyncrl.driver.run_directory import LOCK, RunLocks

HOLD = """
import sys
from pathlib import Path
from asyncrl.driver.run_directory import RunLocks
with RunLocks() as locks:
    locks.take(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_driver(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock until it ends."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_driver_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("the first one's")
    config = Config.model_validate({"run_dir": str(run_dir), "resume": "auto"})
    resumes = Config.model_validate({"resume": str(run_dir)})
    with other_driver(run_dir) as process:
        before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
        for given in (config, resumes):
            with pytest.raises(ConfigError, match=rf"in {run_dir} is still running: .*\(pid {process.pid} on .*{LOCK}"):
                launch_module.launch(given)
        assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before
        process.kill()
        process.wait()
        with RunLocks() as locks:
            assert locks.take(run_dir), "nothing is left of the lock of a driver that was killed"


def test_a_lock_is_this_processes_until_the_block_ends(tmp_path: Path) -> None:
    with RunLocks() as locks:
        assert locks.take(tmp_path / "new" / "run")
        assert not locks.take(tmp_path / "new" / ".." / "new" / "run")
        with pytest.raises(ConfigError, match="still running"), RunLocks() as others:
            others.take(tmp_path / "new" / "run")
        assert "pid" in (tmp_path / "new" / "run" / LOCK).read_text(), "the other one has not had it"
    assert (tmp_path / "new" / "run" / LOCK).read_bytes() == b""
    with RunLocks() as locks:
        assert locks.take(tmp_path / "new" / "run")


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with RunLocks() as locks, pytest.raises(ConfigError, match="run_dir=PATH"):
        locks.take(tmp_path / "file" / "run")
