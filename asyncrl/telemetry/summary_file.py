"""`summary.json` on disk, with its place reserved at the start: a run that dies of a full disk can still say so."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.run_dir import disk_error

RESERVED_BYTES = 64 * 1024


class SummaryFile:
    """Blocking; call it before the run and after it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "summary.json"
        self._reserve = run_dir / "summary.reserve"

    def reserve(self) -> None:
        """Take the space. The summary of an earlier part of this run goes: it is not the run's any more.

        Raises:
            InfraError, ConfigError: the directory is full or not writable.
        """
        try:
            with self._reserve.open("wb") as file:
                # Random, so that no file system stores it as a hole or compressed.
                file.write(os.urandom(RESERVED_BYTES))
                file.flush()
                os.fsync(file.fileno())
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(self._reserve, error) from error

    def write(self, summary: Mapping[str, Any]) -> None:
        """Put `summary` in place, whole or not at all.

        It is written over the reserved bytes, which needs no new space, and then renamed. Removing the reserve first
        would leave the freed space to whatever filled the disk. A summary longer than the reserve that finds the disk
        full is shortened: the validation points and most of the traceback go.

        Raises:
            InfraError, ConfigError: not even that worked.
        """
        try:
            try:
                self._write(_encode(summary))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._write(_encode(_shortened(summary)))
            os.replace(self._reserve, self.path)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def _write(self, data: bytes) -> None:
        # Without O_TRUNC: truncating would give the reserved space back before it is used.
        descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def _encode(summary: Mapping[str, Any]) -> bytes:
    return (json.dumps(summary, indent=2, allow_nan=False, default=str) + "\n").encode()


def _shortened(summary: Mapping[str, Any]) -> dict[str, Any]:
    short = {**summary, "validation": {**summary["validation"], "points": []}}
    if summary["error"] is not None:
        short["error"] = {**summary["error"], "cause": summary["error"]["cause"][-16 * 1024 :]}
    return short
