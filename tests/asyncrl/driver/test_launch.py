"""How a launch ends, with a run that does as the test says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, DiskFullError, InfraError
from asyncrl.driver import launch as launch_module
from asyncrl.driver import run as run_module
from asyncrl.driver.processes import Interrupts


@asynccontextmanager
async def no_cluster(config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
    yield name


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InfraError("the queue is gone for good"), "interrupted", 130),
        (DiskFullError("no room for the last checkpoint"), "failed", 1),
        (BugError("the sample counts do not balance"), "failed", 1),
    ],
)
def test_status_and_error_of_a_run_that_fails_after_an_interrupt(
    error: Exception, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BreaksWhenStopped:
        def __init__(self, *_: Any) -> None:
            self.asked = anyio.Event()

        async def main(self, namespace: str, interrupts: Interrupts) -> None:
            interrupts.on_first = self.stop
            os.kill(os.getpid(), signal.SIGINT)
            await self.asked.wait()
            raise ExceptionGroup("tasks", [error])

        async def stop(self) -> None:
            self.asked.set()

    monkeypatch.setattr(launch_module, "cluster", no_cluster)
    monkeypatch.setattr(launch_module, "link_logs", lambda logs: None)
    monkeypatch.setattr(run_module, "Run", BreaksWhenStopped)
    config = Config.model_validate({"run_dir": str(tmp_path / "run"), "logging": {"console": "off"}})
    assert launch_module.launch(config) == code
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["message"]) == (status, str(error))
