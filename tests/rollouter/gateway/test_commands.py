"""Agents that are commands: their input, their failures, and the end of their process group."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from asyncrl.core.failures import ConfigError, UserCodeError
from rollouter.gateway.program import TAIL_BYTES, CommandProgram
from rollouter.gateway.task import AgentTask

TASK = AgentTask(
    base_url="http://127.0.0.1:8000/run/v1",
    api_key="asyncrl-1-key",
    model="tiny",
    messages=({"role": "user", "content": "3*4="},),
    ground_truth="12",
    extra_info={"index": 7},
    sample_id="sample_0_42",
    trajectory=3,
)
TWO = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
if sys.argv[2] != "leaves":
    time.sleep(600)
"""


def python(code: str, *arguments: str) -> CommandProgram:
    return CommandProgram([sys.executable, "-c", code, *arguments])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(*pids: int) -> None:
    with anyio.fail_after(10):
        while any(map(alive, pids)):  # noqa: ASYNC110  other processes send no event
            await anyio.sleep(0.02)


async def test_the_command_gets_its_task(tmp_path: Path) -> None:
    code = (
        "import json, os, sys; task = json.load(sys.stdin); "
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL', 'ASYNCRL_MODEL']; "
        "json.dump([task, {name: os.environ[name] for name in names}], open(sys.argv[1], 'w'))"
    )
    await python(code, str(tmp_path / "message")).run(TASK)
    task, environment = json.loads((tmp_path / "message").read_text())
    assert task == {
        "base_url": "http://127.0.0.1:8000/run/v1", "api_key": "asyncrl-1-key", "model": "tiny",
        "messages": [{"role": "user", "content": "3*4="}], "ground_truth": "12", "extra_info": {"index": 7},
        "data_source": "default", "sample_id": "sample_0_42", "trajectory": 3,
    }  # fmt: skip
    assert environment == {
        "OPENAI_BASE_URL": TASK.base_url, "OPENAI_API_KEY": TASK.api_key, "OPENAI_MODEL": "tiny",
        "ASYNCRL_MODEL": "tiny",
    }  # fmt: skip


async def test_a_command_need_not_read_its_task() -> None:
    await python("pass").run(AgentTask("", "", "", messages=({"role": "user", "content": "x" * 1_000_000},)))


async def test_a_failed_command_shows_the_end_of_its_output() -> None:
    code = f"import sys; print('x' * {2 * TAIL_BYTES} + 'the end'); sys.exit('what went wrong')"
    with pytest.raises(UserCodeError, match="ended with exit code 1") as failed:
        await python(code).run(TASK)
    assert "the end" in failed.value.cause and failed.value.cause.endswith("what went wrong")
    assert len(failed.value.cause) < 2 * TAIL_BYTES
    with pytest.raises(UserCodeError, match="was ended by SIGKILL"):
        await python(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})").run(TASK)


@pytest.mark.parametrize("kind", ["polite", "deaf"])
async def test_the_deadline_ends_the_process_group(tmp_path: Path, kind: str) -> None:
    pids = tmp_path / "pids"

    async def started() -> None:
        while not pids.exists():  # noqa: ASYNC110  another process makes it
            await anyio.sleep(0.02)
        group.cancel_scope.cancel()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(started)
            group.start_soon(python(TWO, str(pids), kind).run, TASK)
    await gone(*map(int, pids.read_text().split()))


async def test_processes_left_behind_are_killed(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        await python(TWO, str(tmp_path / "pids"), "leaves").run(TASK)
    leader, child = map(int, (tmp_path / "pids").read_text().split())
    await gone(leader, child)
    assert leader != os.getpid()


def test_a_missing_program_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.command: there is no program 'no-such-program'"):
        CommandProgram(["no-such-program"])
