"""An engine's specification, and the events that a test records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.files import event_files
from tests.fakes.trainer_model import make_config, write_model
from trainer.engines.base import EngineSpec
from trainer.workers.placement import plan_groups
from trainer.workers.worker import engine_spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """One rank of the actor on CPU."""
    config = make_config(write_model(tmp_path_factory.mktemp("model")), trainer={"strategy": "local"})
    return engine_spec(plan_groups(config)[0].roles[0], device="cpu", collective_s=10)


class Recorded:
    """What this process has recorded since the test began, as the Trainer does at level `full`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        profile.configure("trainer", ProfilerSettings("full", run_dir / "events"))

    def written(self) -> list[dict[str, Any]]:
        """By file, and in a file in the order in which they ended. `part` and `file_step` say which file."""
        profile.flush()
        return [
            {**json.loads(line), "part": path.stem, "file_step": int(path.parent.name.removeprefix("step_"))}
            for path in event_files(self.run_dir)
            for line in path.read_text().splitlines()
        ]

    def all(self, *names: str) -> list[dict[str, Any]]:
        """In the order in which they began; none named: of every name."""
        found = [event for event in self.written() if not names or event["event"] in names]
        return sorted(found, key=lambda event: event["timestamp"])

    def one(self, name: str, **fields: Any) -> dict[str, Any]:
        """The only one with these fields."""
        [event] = [event for event in self.all(name) if fields.items() <= event.items()]
        return event


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    synchronize = profile.synchronize
    yield Recorded(tmp_path)
    profile.configure("", ProfilerSettings())
    profile.synchronize = synchronize
