"""A synthetic run directory for the timeline, with seeded events of all parts and a state; and views of it."""

from __future__ import annotations

import os
import random
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.observe.status.run_files import RunLiveness
from asyncrl.observe.status.run_status import RunPhase, RunState, StateFile
from asyncrl.observe.timeline.server import Timeline
from asyncrl.observe.timeline.view import Window
from asyncrl.profiling.files import EVENTS_DIRECTORY, EventFiles, EventLine

START = 1_780_000_000.0
"""Unix seconds at which the run begins."""


@dataclass
class FakeRun:
    """A synthetic run. Each step takes `step_s` and ends with its `sample.trained` events."""

    path: Path
    replicas: int = 2
    samples: int = 6
    """Number of samples in a step."""
    trajectories: int = 2
    turns: int = 2
    step_s: float = 6.0
    level: str = "full"
    seed: int = 0
    lines: list[EventLine] = field(default_factory=list)
    """Events to write with `flush`."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._files = EventFiles(self.path / EVENTS_DIRECTORY)
        self._fed = 0
        self.path.mkdir(parents=True, exist_ok=True)
        config = {"profiler": {"level": self.level}, "rollout": {"dump_dir": None}}
        (self.path / "config.yaml").write_text(yaml.safe_dump(config))

    def state(self, phase: RunPhase = "completed", step: int = 1) -> None:
        """Write the state file, in which this process is the driver."""
        StateFile(self.path / "state.json").write_now(run_state(phase, step))

    def write(self, steps: int, first: int = 1, at: float = 0.0) -> float:
        """Write steps from `first` on, `at` seconds after `START`, and return the second at which they end."""
        for step in range(first, first + steps):
            self.step(step, at)
            at += self.step_s
        self.flush()
        return at

    def flush(self) -> None:
        assert not self._files.write(self.lines)
        self._files.close()
        self.lines.clear()

    def add(self, part: str, event: str, at: float, duration: float = 0.0, /, **fields: Any) -> None:
        event_fields = {"timestamp": round(START + at, 6), "event": event, "duration_s": round(duration, 6), **fields}
        self.lines.append(EventLine(part, event_fields))

    def step(self, step: int, at: float) -> None:
        length, version = self.step_s, step - 1
        pause = (at + 0.55 * length, 0.05 * length)
        for replica in range(self.replicas):
            self._sync(f"r{replica}", step, version, pause)
        self.add("rollouter", "sync.apply", at + 0.45 * length, 0.17 * length, step=step, version=version, replicas=2)
        for place in range(self.samples):
            self._fed += 1
            begun = at + place * 0.45 * length / self.samples
            self._sample(f"sample_0_{self._fed}", step, version, begun, 0.5 * length, pause)
        self._train(step, at, length)

    def _sync(self, replica: str, step: int, version: int, pause: tuple[float, float]) -> None:
        common = {"step": step, "version": version, "replica": replica}
        part = f"replica-{replica}"
        self.add(part, "sync.fetch", pause[0] - 0.4, 0.35, **common)
        self.add(part, "sync.drain", pause[0] - 0.03, 0.03, **common)
        self.add(part, "sync.load", pause[0] + pause[1] * 0.2, pause[1] * 0.6, **common)
        self.add(part, "sync.pause", *pause, **common)

    def _sample(
        self, sample: str, step: int, version: int, at: float, length: float, pause: tuple[float, float]
    ) -> None:
        of = {"step": step, "version": version, "sample": sample}
        self.add("rollouter", "sample.admitted", at, **of)
        for number in range(self.trajectories):
            begun = at + 0.01 * number
            for turn in range(self.turns):
                request = f"{sample}/{number}.{turn}" if turn else f"{sample}/{number}"
                ids = {**of, "trajectory": number, "turn": turn, "request": request}
                took = length / self.turns * self._random.uniform(0.5, 0.8)
                replica = f"r{self._random.randrange(self.replicas)}"
                self.add(
                    f"replica-{replica}", "request", begun, took, replica=replica, **_phases(begun, took, pause), **ids
                )
                if self.level == "full":
                    self.add("rollouter", "generate.call", begun, took, replica=replica, **ids)
                begun += took
                if turn + 1 < self.turns:
                    tool = length * self._random.uniform(0.03, 0.12)
                    self.add("rollouter", "tool.execute", begun, tool, tool="search", status="ok", **ids)
                    begun += tool
                    self.add("rollouter", "user.step", begun, tool / 3, interaction="critic", **ids)
                    begun += tool / 3
            common = {**of, "trajectory": number, "turns": self.turns, "finish_reason": "stop"}
            self.add("rollouter", "trajectory", at + 0.01 * number, begun - at, **common)
            self.add("rollouter", "reward.score", begun, 0.1, **of, trajectory=number, trajectories=1)
        self.add("rollouter", "sample.generate", at, length, **of, trajectories=self.trajectories)
        self.add("rollouter", "sample.ready", at + length + 0.1, **of, reward=0.5)

    def _train(self, step: int, at: float, length: float) -> None:
        common = {"step": step, "version": step - 1}
        parts = [("trainer.wait_samples", 0.3), ("trainer.experience", 0.2), ("trainer.update", 0.35)]
        begun = at
        for event, share in parts:
            self.add("trainer", event, begun, share * length, **common)
            if event != "trainer.wait_samples":
                for rank in range(2):
                    rank_fields = {**common, "role": "actor", "rank": rank, "method": event.split(".")[1]}
                    self.add(f"rank-actor-{rank}", "rank.call", begun + 0.01, share * length - 0.05, **rank_fields)
            begun += share * length
        self.add("trainer", "trainer.publish", begun, 0.1 * length, step=step, version=step)
        self.add("trainer", "step", at, length, **common, samples=self.samples)
        first = self._fed - self.samples + 1
        for place in range(self.samples):
            self.add("trainer", "sample.trained", begun, **common, sample=f"sample_0_{first + place}", staleness=1)


def _phases(begun: float, took: float, pause: tuple[float, float]) -> dict[str, float]:
    stood = max(0.0, min(begun + took, sum(pause)) - max(begun + 0.3 * took, pause[0]))
    gate, queued, prefill = 0.05 * took, 0.1 * took, 0.15 * took
    decode = took - gate - queued - prefill - stood
    return {"gate_s": gate, "queued_s": queued, "prefill_s": prefill, "decode_s": decode, "paused_s": stood}


def run_state(phase: RunPhase = "completed", step: int = 1) -> RunState:
    """Return a state whose driver is this process, so that a running run counts as live."""
    return RunState(
        written_at=time.time(), started_at=START, pid=os.getpid(), phase=phase, experiment="fake", mode="fully_async",
        host=socket.gethostname(), total_steps=8, step=step, version=step,
    )  # fmt: skip


DONE = RunLiveness("ended", "completed", run_state())
EVERYTHING = Window(-1e6, 1e6, 10**12)
"""A window with so many pixels that no bars are merged."""


def timeline_of(run: FakeRun, liveness: RunLiveness = DONE) -> Timeline:
    return Timeline(run.path, lambda: liveness)


def read(run: FakeRun) -> Timeline:
    timeline = timeline_of(run)
    timeline.read()
    return timeline


def shown(timeline: Timeline, window: Window = EVERYTHING) -> dict[str, Any]:
    return timeline.view(window)


class FileAccess:
    """Replaces `Path.open` and `os.scandir`: records accesses, and raises `error` for the Trainer's files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[str] = []
        self.directories: list[str] = []
        self.error: Exception | None = None
        self._open, self._scandir = Path.open, os.scandir
        monkeypatch.setattr(Path, "open", lambda *given, **more: self._opened(*given, **more))
        monkeypatch.setattr(os, "scandir", self._scanned)

    def _opened(self, path: Path, *given: Any, **more: Any) -> Any:
        if path.suffix == ".jsonl" and given[0] == "rb":
            self.files.append(f"{path.parent.name}/{path.name}")
            if self.error is not None and path.name == "trainer.jsonl":
                raise self.error
        return self._open(path, *given, **more)

    def _scanned(self, path: Path) -> Any:
        self.directories.append(path.name)
        return self._scandir(path)
