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

from tests.e2e.launches import QUIET, LaunchedRun, start

STEPS = 8
KEYS = (*QUIET, f"trainer.total_training_steps={STEPS}")


def worst(run: LaunchedRun, number: int) -> list[dict[str, Any]]:
    """Return the first findings in the report of a completed run."""
    assert run.wait() == 0, run.output()
    command = [sys.executable, "-m", "asyncrl", "report", str(run.run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first: list[dict[str, Any]] = json.loads(done.stdout)["findings"][:number]
    assert all(one["severity"] == "alarm" and one["remedy"] for one in first), first
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
    run = start(tmp_path, *KEYS, "rollout.num_replicas=2")
    run.wait_for(f"step 1/{STEPS}")
    slow = run.state()["replicas"][0]
    with slowed(slow["engine_pids"][0]):
        (first,) = worst(run, 1)
    assert (first["kind"], first["what"], first["name"]) == ("replica_slow", "replica", slow["replica"])
    assert first["evidence"]["duration_s"] > 1.5 * first["evidence"]["normal_s"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_report_finds_a_tool_and_a_reward_call_that_hang(tmp_path: Path) -> None:
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
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import itertools, time\n"
        "calls = itertools.count(1)\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if next(calls) == 600:\n"
        "        time.sleep(20)\n"
        "    return float(solution_str.strip() == str(ground_truth))\n"
    )
    tool = f"{{class_name: '{tools}:Hanging', config: {{name: calc, argument: x}}, timeout_s: 60}}"
    # On-policy, so that the Trainer cannot go on with other samples while a call hangs.
    own = (f"rollout.multi_turn.tools=[{tool}]", f"reward.function={rewards}:score", "async_training=mode_a")
    run = start(tmp_path, *KEYS, *own, recipe="calculator")
    found = {one["kind"]: one for one in worst(run, 2)}
    assert (found["tool_hang"]["name"], found["reward_hang"]["what"]) == ("calc", "reward")
    for one in found.values():
        assert one["evidence"]["duration_s"] > 19 and one["evidence"]["sample"].startswith("sample_0_")


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
    (first,) = worst(run, 1)
    assert (first["kind"], first["what"]) == ("reward_slow", "reward")
    assert first["evidence"]["duration_s"] > 7.9 > first["evidence"]["normal_s"]
