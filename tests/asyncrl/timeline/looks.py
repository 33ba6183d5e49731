"""Looking at a run's timeline in tests, and at what it reads for that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from asyncrl.timeline.server import Standing, Timeline
from asyncrl.timeline.view import Window
from tests.asyncrl.timeline.fake_run import START, FakeRun

DONE = Standing("completed", live=False, started_at=START)
WHOLE = Window(-1e6, 1e6, 10**12)
"""So many pixels that nothing is merged."""


def read(run: FakeRun) -> Timeline:
    timeline = Timeline(run.path)
    timeline.read()
    return timeline


def shown(timeline: Timeline, window: Window = WHOLE) -> dict[str, Any]:
    return timeline.view(DONE, window)


class Opened:
    """Stands for `Path.open` and `os.scandir`: remembers what was asked, and fails where it is told to."""

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
