"""Trackio: its local database (`TRACKIO_DIR`), unless `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` names another place.

`trackio show` looks at it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.sinks.remote import TrackedRun, Tracker, values

logger = logging.getLogger(__name__)

_TALKATIVE = ("trackio", "trackio.run", "trackio.utils", "trackio.deploy")


class TrackioTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._of = run
        self._run: Any = None

    def open(self) -> None:
        for module in _TALKATIVE:
            # Past all settings they print, onto a terminal that is the live view's.
            vars(importlib.import_module(module))["print"] = _tell_the_log
        name = self._of.kept_id("trackio")
        self._run = importlib.import_module("trackio").init(
            project=self._of.project,
            group=self._of.experiment,
            name=name or self._of.title,
            config=self._of.config,
            resume="allow" if name else "never",
            embed=False,
        )
        self._of.keep_id("trackio", self._run.name)

    def write(self, row: Row) -> None:
        self._run.log(values(row), step=row.step)

    def close(self, *, ok: bool) -> None:
        self._run.finish()


def _tell_the_log(*words: object, **_: object) -> None:
    logger.info("trackio: %s", " ".join(map(str, words)))
