"""A launch ends with a summary and an exit code."""

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
from asyncrl.core.failures import BugError, ConfigError, DiskFullError, InfraError
from asyncrl.core.interrupts import Interrupts
from asyncrl.driver import launch as launch_module
from asyncrl.driver import run as run_module


def config_of(tmp_path: Path, console: str = "off", **keys: Any) -> Config:
    return Config.model_validate({"run_dir": str(tmp_path / "run"), "logging": {"console": console}} | keys)


def replace_cluster(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    """Replace the start of Ray by nothing, or by a failure with `error`."""

    @asynccontextmanager
    async def cluster(config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
        if error is not None:
            raise error
        yield name

    monkeypatch.setattr(launch_module, "cluster", cluster)
    monkeypatch.setattr(launch_module, "link_logs", lambda logs: None)


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

    replace_cluster(monkeypatch)
    monkeypatch.setattr(run_module, "Run", BreaksWhenStopped)
    assert launch_module.launch(config_of(tmp_path)) == code
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("model.path=x: is none; give another"), 2), (InfraError("a rank died"), 1)]
)
def test_a_refused_configuration_exits_with_code_two_and_another_error_with_a_traceback(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_cluster(monkeypatch, error)
    assert launch_module.launch(config_of(tmp_path, console="plain")) == code
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["error"]["message"] == str(error)
    captured = capsys.readouterr()
    assert ("Traceback" in captured.out + captured.err) is (code == 1)


def test_the_choice_of_the_run_to_resume_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    replace_cluster(monkeypatch, InfraError("no Ray today"))
    monkeypatch.setattr(launch_module.View, "message", lambda view, level, text: messages.append(text))
    config = config_of(tmp_path, resume="auto")
    assert launch_module.launch(config) == 1
    assert messages == []
    assert launch_module.launch(config) == 1
    assert messages == [
        f"resume=auto starts the run in {tmp_path / 'run'} anew: it has no checkpoint, and no journal. Its records are "
        "set aside as *-abandoned-*"
    ]


async def test_serving_raises_the_error_itself_and_not_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(config: Config) -> int:
        raise ExceptionGroup("unhandled", [ConfigError("serve.host=x: no such address")])

    monkeypatch.setattr(launch_module, "_serve", fails)
    with pytest.raises(ConfigError, match="no such address"):
        await anyio.to_thread.run_sync(launch_module.serve, Config())
