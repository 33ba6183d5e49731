"""Fixtures of the Trainer's tests: the specification of an engine, and recorded events."""

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


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """The specification of one rank of the actor on CPU."""
    config = make_config(write_model(tmp_path_factory.mktemp("model")), trainer={"strategy": "local"})
    return plan_groups(config)[0].roles[0].spec_on("cpu")


class Recorded:
    """The events that this process has recorded since the test began, as the Trainer at level `full`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        profile.configure("trainer", ProfilerSettings("full", run_dir / "events"))

    def written(self) -> list[dict[str, Any]]:
        """Return all events, ordered by file and then by end. `part` and `file_step` identify the file."""
        profile.flush()
        return [
            {**json.loads(line), "part": path.stem, "file_step": int(path.parent.name.removeprefix("step_"))}
            for path in event_files(self.run_dir)
            for line in path.read_text().splitlines()
        ]

    def all(self, *names: str) -> list[dict[str, Any]]:
        """Return the events with these names, or all events without names, in the order in which they began."""
        found = [event for event in self.written() if not names or event["event"] in names]
        return sorted(found, key=lambda event: event["timestamp"])

    def one(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the only event with this name and these fields."""
        [event] = [event for event in self.all(name) if fields.items() <= event.items()]
        return event


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    synchronize = profile.synchronize
    yield Recorded(tmp_path)
    profile.configure("", ProfilerSettings())
    profile.synchronize = synchronize
