"""One driver for each run directory: a lock, from before the first file in it is touched until the driver ends.

The lock is the kernel's (`flock`), so nothing is left of it when the driver dies, however it does. The queue's lock on
the journal is another one: it holds against what a dead driver has left running.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self, TextIO

from asyncrl.failures import ConfigError
from asyncrl.run_dir import disk_error

LOCK = "run.lock"
"""Says who has the lock, for people; it is empty when that driver has ended, unless it was killed. It stays, and means
nothing by itself."""

logger = logging.getLogger(__name__)


class RunLocks:
    """Run directories that belong to this process until the block ends."""

    def __init__(self) -> None:
        self._held: set[Path] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, run_dir: Path) -> bool:
        """Lock it, and make it if it is not there. False: it was this process's already. Blocking.

        Raises:
            ConfigError: another driver has it, or the directory cannot be written. InfraError: the disk is full.
        """
        path = run_dir.resolve()
        if path in self._held:
            return False
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = self._stack.enter_context((path / LOCK).open("a+", encoding="utf-8"))
            _lock(file.fileno(), run_dir)
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            self._stack.callback(_forget, file)
        except OSError as error:
            raise disk_error(Path(error.filename or path / LOCK), error) from error
        self._held.add(path)
        return True


def _forget(file: TextIO) -> None:
    with suppress(OSError):  # it is for people only
        file.truncate(0)


def _lock(file: int, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.pread(file, 200, 0).decode(errors="replace").strip() or "it has not said which"
        raise ConfigError(
            f"the run in {run_dir} is still running: another driver ({who}) holds {LOCK}, and a second one would write "
            f"over its records. Look at it with `asyncrl status {run_dir}`, or end it first; for another run give "
            "another run_dir"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): see to it that no second driver runs there", run_dir, error)
