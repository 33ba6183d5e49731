"""Where a run's rows go: `logging.sinks`. Blocking; the recorder calls them off the event loop.

Files of the run directory are written as the rows come, and a full disk ends the run. Everything else (`remote`) is
held up, fails and loses rows for itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.telemetry.rows import Row


class Sink(Protocol):
    reads_back: bool
    """`rewind` returns the rows that stay."""

    def write(self, row: Row) -> None:
        """On return the row is with the operating system: a killed process loses nothing.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """

    def rewind(self, step: int, version: int) -> Sequence[Row]:
        """Training goes back to a checkpoint: what was recorded beyond it is no part of the run any more.

        Returns:
            The rows that stay, in order, if it `reads_back`.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """

    def close(self) -> None: ...
