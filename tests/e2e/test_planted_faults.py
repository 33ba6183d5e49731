"""`asyncrl report` names a fault that a test plants in a real launch as its first finding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launches import LaunchedRun, start

STEPS = 8
QUIET = (
    f"trainer.total_training_steps={STEPS}",
    "data.val_files=[]",
    "logging.console=plain",
    "trainer.save_last=false",
)
"""The run only trains: it has neither validation nor checkpoints."""


def worst(run: LaunchedRun) -> dict[str, Any]:
    """Return the first finding in the report of a completed run."""
    assert run.wait() == 0, run.output()
    command = [sys.executable, "-m", "asyncrl", "report", str(run.run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first: dict[str, Any] = json.loads(done.stdout)["findings"][0]
    assert first["severity"] == "alarm" and first["remedy"], first
    return first


@contextmanager
def slowed(pid: int, *, stopped_s: float = 0.15, running_s: float = 0.05) -> Iterator[None]:
    """Slow a process down: stop it for most of the time, in short intervals."""
    ended = threading.Event()

    def work() -> None:
        with suppress(ProcessLookupError):
            while not ended.is_set():
                os.kill(pid, signal.SIGSTOP)
                ended.wait(stopped_s)
                os.kill(pid, signal.SIGCONT)
                ended.wait(running_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_report_finds_a_slow_replica(tmp_path: Path) -> None:
    run = start(tmp_path, *QUIET, "rollout.num_replicas=2")
    run.wait_for(f"step 1/{STEPS}")
    slow = run.state()["replicas"][0]
    with slowed(slow["engine_pids"][0]):
        first = worst(run)
    assert (first["kind"], first["what"], first["name"]) == ("replica_slow", "replica", slow["replica"])
    assert first["evidence"]["duration_s"] > 1.5 * first["evidence"]["normal_s"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_report_finds_a_tool_that_hangs(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text(
        "import itertools\n"
        "import anyio\n"
        "from rollouter.tools.calculator import Calculator\n"
        "calls = itertools.count(1)\n"
        "class Hanging(Calculator):\n"
        "    async def execute(self, *args, **kwargs):\n"
        "        if next(calls) in (20, 40):\n"
        "            await anyio.sleep(20)\n"
        "        return await super().execute(*args, **kwargs)\n"
    )
    tool = f"{{class_name: '{tools}:Hanging', config: {{name: calc, argument: x}}, timeout_s: 60}}"
    run = start(tmp_path, *QUIET, f"rollout.multi_turn.tools=[{tool}]", recipe="calculator")
    first = worst(run)
    assert (first["kind"], first["name"]) == ("tool_hang", "calc")
    assert first["evidence"]["duration_s"] > 19 and first["evidence"]["sample"].startswith("sample_0_")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_report_finds_one_slow_reward_call(tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import itertools, time\n"
        "calls = itertools.count(1)\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if next(calls) == 200:\n"
        "        time.sleep(20)\n"
        "    return float(solution_str.strip() == str(ground_truth))\n"
    )
    run = start(tmp_path, *QUIET, f"reward.function={rewards}:score")
    first = worst(run)
    assert (first["kind"], first["what"]) == ("reward_hang", "reward")
    assert first["evidence"]["duration_s"] > 19 and first["evidence"]["sample"].startswith("sample_0_")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_report_finds_a_slow_reward_function(tmp_path: Path) -> None:
    """Every score takes the same time, much longer than generation and training of a step."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import asyncio\n"
        "async def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(8)\n"
        "    return float(solution_str.strip() == str(ground_truth))\n"
    )
    run = start(tmp_path, *QUIET, f"reward.function={rewards}:score", "reward.max_concurrency=1024")
    first = worst(run)
    assert (first["kind"], first["what"]) == ("reward_slow", "reward")
    assert first["evidence"]["duration_s"] > 7.9 > first["evidence"]["normal_s"]
