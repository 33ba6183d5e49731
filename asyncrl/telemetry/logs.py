"""Where the driver's log goes during a run: a file in the run directory, and above the live view."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.run_dir import disk_error
from asyncrl.telemetry.live import View

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = ("asyncrl.", "rollouter.", "trainer.", "skip.")
"""How the names of this project's loggers begin."""
ALREADY_SHOWN = {"already_shown": True}
"""`extra` of a message that its sender has told the view by itself: it is for the file alone."""


class ViewHandler(logging.Handler):
    """Hands messages to the view, which knows where there is room for them."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "already_shown", False):
            self._view.message(record.levelname.lower(), self.format(record))


class LogFile(logging.FileHandler):
    """Goes quiet, after one word about it, when its disk is full: a log never stops or drowns a run."""

    def __init__(self, path: Path, view: View) -> None:
        super().__init__(path, encoding="utf-8")
        self._view = view

    def handleError(self, record: logging.LogRecord) -> None:
        self.setLevel(logging.CRITICAL + 1)
        self._view.message("warning", f"cannot write {self.baseFilename}: the log ends here, messages are only shown")


@contextmanager
def logging_to(view: View, logs: Path, level: str) -> Iterator[None]:
    """Inside, everything this process logs at `level` or above goes to `logs/driver.log` and to the view. Into the file
    goes also what this project tells of its parts below that, from `info` on: who was replaced, and why.

    Python's own warnings count as log messages. What was set up before is back afterwards.

    Raises:
        InfraError, ConfigError: the log file cannot be made.
    """
    path = logs / "driver.log"
    try:
        file = LogFile(path, view)
    except OSError as error:
        raise disk_error(path, error) from error
    file.setFormatter(logging.Formatter(_FORMAT))
    shown = ViewHandler(view)
    shown.setLevel(level.upper())
    file.addFilter(lambda record: record.levelno >= shown.level or record.name.startswith(_OWN))
    root = logging.getLogger()
    before_level, before_handlers = root.level, root.handlers[:]
    root.handlers[:] = [file, shown]
    root.setLevel(min(shown.level, logging.INFO))
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = before_handlers
        root.setLevel(before_level)
        file.close()
