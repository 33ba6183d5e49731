"""What a process says on its standard error: passed on to ours, and its end kept for the case that it fails."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import TextIO

MAX_LINES = 20
MAX_LINE_CHARS = 500
END_S = 1.0
"""For the last lines of a process that has ended to arrive."""


class LastWords:
    """The other end of a process's standard error, read by a thread until the process and `close` have closed it."""

    def __init__(self) -> None:
        read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")
        """For the process."""
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._thread = threading.Thread(target=self._read, args=(read,), daemon=True, name="last-words")
        self._thread.start()

    def close(self) -> None:
        """Nobody else is given `file`."""
        self.file.close()

    def told(self) -> str:
        """The last lines. Blocks for `END_S` at most, if the process has not ended."""
        self._thread.join(END_S)
        return "\n".join(self._lines)

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip()[:MAX_LINE_CHARS])
                if sys.__stderr__ is not None:
                    sys.__stderr__.write(line)
