"""The memory of other processes that `benchmarks.weight_sync` samples."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.running import sampled_peak
from benchmarks.weight_sync import find_processes

GROWS = "import sys; print(flush=True); input(); data = b'x' * (64 << 20); print(flush=True); input()"


@contextmanager
def child(title: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes 64 MiB after a line of input, and writes a line before and after."""
    command = [sys.executable, "-c", GROWS, title]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_memory_that_an_engine_adds_is_sampled() -> None:
    with ExitStack() as stack:
        started = {
            "replica": stack.enter_context(child("ray::ServeReplica:bench-rollout:Replica")),
            "engine": stack.enter_context(child("VLLM::EngineCore")),
        }
        found = find_processes()
        assert found == {name: process.pid for name, process in started.items()}
        grows = started["engine"]
        assert grows.stdin is not None and grows.stdout is not None
        with sampled_peak(found["replica"]) as still, sampled_peak(found["engine"]) as samples:
            grows.stdin.write("\n")
            grows.stdin.flush()
            assert grows.stdout.readline() == "\n"
    assert 56 << 20 < max(samples) - samples[0] < 80 << 20
    assert max(still) - still[0] < 8 << 20


def test_a_missing_engine_is_an_error() -> None:
    with child("ray::ServeReplica:bench-rollout:Replica"), pytest.raises(RuntimeError, match="'engine': \\[\\]"):
        find_processes()
