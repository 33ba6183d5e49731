"""A launch ends with a summary and an exit code."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError, DiskFullError, InfraError, UserCodeError
from asyncrl.core.tasks import Interrupts
from asyncrl.driver import launch as launch_module
from asyncrl.driver import run as run_module
from asyncrl.driver.resume import journal_identity
from asyncrl.observe.status.summary import read_summary
from asyncrl.queue.journal import Journal
from asyncrl.storage.run_dir import RunDir
from rollouter.rewards.functions import ROW_ARGUMENTS, load_reward_functions
from tests.fakes.queues import end
from tests.fakes.run_on_disk import write_checkpoint


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


@pytest.mark.parametrize("private", [True, False])
def test_old_logs_of_a_private_cluster_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    logs = tmp_path / "session"
    logs.mkdir()
    old = logs / "worker-a-1.err"

    class WaitsForDeletion:
        def __init__(self, *_: Any) -> None:
            old.write_text("text")
            os.utime(old, (time.time() - 3 * 86_400,) * 2)

        async def main(self, namespace: str, interrupts: Interrupts) -> None:
            with anyio.fail_after(20):
                while private and old.exists():  # noqa: ASYNC110  a deletion is no event
                    await anyio.sleep(0.01)

    replace_cluster(monkeypatch)
    monkeypatch.setattr(launch_module, "link_logs", lambda directory: logs)
    monkeypatch.setattr(run_module, "Run", WaitsForDeletion)
    ray = {"keep_logs_days": 2.0} if private else {"address": "auto"}
    assert launch_module.launch(config_of(tmp_path, ray=ray)) == 0
    assert old.exists() != private


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


@pytest.mark.parametrize("ends", ["when Ray shuts down", "when Ray starts"])
def test_a_driver_that_ray_ends_has_written_a_summary(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the driver without any exception, so the summary must already be there."""
    found: list[dict[str, Any]] = []

    def read() -> None:
        found.append(json.loads((tmp_path / "run" / "summary.json").read_text()))
        assert read_summary(tmp_path / "run") is None, "the run has not ended while its driver lives"

    class Stops:
        def __init__(self, *_: Any) -> None:
            pass

        async def main(self, namespace: str, interrupts: Interrupts) -> None:
            pass

    @asynccontextmanager
    async def cluster(config: Config, name: str, *, stale: str = "") -> AsyncIterator[str]:
        if ends == "when Ray starts":
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await anyio.sleep(10)
            finally:
                read()
        yield name
        read()

    replace_cluster(monkeypatch)
    monkeypatch.setattr(launch_module, "cluster", cluster)
    monkeypatch.setattr(run_module, "Run", Stops)
    code = launch_module.launch(config_of(tmp_path))
    final = json.loads((tmp_path / "run" / "summary.json").read_text())
    if ends == "when Ray starts":
        assert "received a signal" in found[0]["error"]["message"]
        assert (found[0]["status"], final["status"], final["error"], code) == ("interrupted", "interrupted", None, 130)
    else:
        assert (found[0]["status"], final["status"], code) == ("completed", "completed", 0)


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


# ---------------------------------------------------------------------------------------------- secrets

SECRET, NEW_SECRET, VARIABLE = "c4n4ry-secret", "c4n4ry-later-secret", "c4n4ry-variable"
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info, key, note):
    raise ValueError(f"401 for {key}")
"""


def config_with_secrets(tmp_path: Path) -> Path:
    """Write a configuration with a secret and a variable's value in each place that may have them."""
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / VARIABLE).mkdir()
    (tmp_path / VARIABLE / "rows.jsonl").write_text('{"prompt": "1+1"}\n' * 100)
    both = {"key": "${secret:CANARY_SECRET}", "note": "${oc.env:CANARY_VARIABLE}"}
    tools = [
        {"mcp": {"command": ["cat"], "env": both}},
        {"mcp": {"url": "http://127.0.0.1:9/mcp?key=${secret:CANARY_SECRET}&at=${oc.env:CANARY_VARIABLE}"}},
        {"class_name": "calculator", "config": both},
    ]
    tree = {
        "defaults": ["quickstart"],
        "run_dir": str(tmp_path / "run"),
        "logging": {"console": "plain", "level": "debug"},
        "data": {"train_files": [f"{tmp_path}/{both['note']}/rows.jsonl"], "val_files": []},
        "reward": {"function": f"{tmp_path}/score.py:score", "kwargs": both},
        "rollout": {
            "response_length": 160,
            "multi_turn": {
                "enable": True,
                "max_tool_response_length": 64,
                "tools": tools,
                "interactions": [{"class_name": "scripted", "config": both}],
            },
        },
    }
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def error_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["error"]["message"])


def test_no_file_of_a_run_and_no_printed_line_has_a_secret_or_a_value_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANARY_SECRET", SECRET)
    monkeypatch.setenv("CANARY_VARIABLE", VARIABLE)
    called: list[dict[str, Any]] = []

    class FailsInUserCode:
        """Writes the files in which other processes of a run put settings, and fails like a reward function."""

        def __init__(self, config: Config, run_dir: RunDir, *_: Any) -> None:
            self.config, self.run_dir = config, run_dir

        async def main(self, namespace: str, interrupts: Interrupts) -> None:
            if called:
                raise RuntimeError(f"another process reports {os.environ['CANARY_SECRET']}")
            identity = journal_identity(self.config)
            await end(Journal.open(self.run_dir.journal, num_prompts=100, identity=identity, restore=None))
            write_checkpoint(self.run_dir.path, 1, config=self.config)
            (function,) = load_reward_functions(self.config.reward).values()
            called.append(dict(function.kwargs))
            try:
                await function.invoke([dict.fromkeys(ROW_ARGUMENTS)])
            except ValueError as error:
                raise UserCodeError.wrap(f"the reward raised {error}", error) from error

    replace_cluster(monkeypatch)
    monkeypatch.setattr(run_module, "Run", FailsInUserCode)
    first = load_config(config_with_secrets(tmp_path))
    assert launch_module.launch(first) == 1
    assert called == [{"key": SECRET, "note": VARIABLE}]
    run = tmp_path / "run"
    assert error_of(run) == "the reward raised 401 for ${secret:CANARY_SECRET}"
    monkeypatch.setenv("CANARY_SECRET", NEW_SECRET)
    again = load_config(run / "config.yaml", [f"resume={run}"])
    assert again.model_copy(update={"resume": "none"}) == first
    assert launch_module.launch(again) == 1, "the run resumes from the settings in its directory"
    assert error_of(run) == "another process reports ${secret:CANARY_SECRET}"
    printed = capsys.readouterr()
    texts = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "journal.db", "manifest.json", "summary.json"} <= {path.name for path in texts}
    for place, text in {**texts, "out": printed.out.encode(), "err": printed.err.encode()}.items():
        assert SECRET.encode() not in text and NEW_SECRET.encode() not in text, f"{place} has the secret"
        assert VARIABLE.encode() not in text, f"{place} has the value of the variable"
    assert b"another process reports ${secret:CANARY_SECRET}" in texts[run / "logs" / "driver.log"]
    assert run.stat().st_mode & 0o777 == 0o700
