"""`state.json` and `stall.json` in the run directory: what is going on, for `asyncrl status` and `asyncrl why`."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyio import to_thread

from asyncrl.chain import as_json, render
from asyncrl.failures import ConfigError
from asyncrl.run_state import FILE_NAME, RunState, dump, load
from asyncrl.telemetry.rows import finite
from asyncrl.why import explain

STALL_FILE = "stall.json"

logger = logging.getLogger(__name__)


class StateFile:
    """Replaced whole at every write: a reader sees the old state or the new one, never a part of either.

    What cannot be written is told once and never ends a run: the records that have to be complete are other files.
    """

    def __init__(self, path: Path) -> None:
        """`path`: `run_dir / run_state.FILE_NAME`."""
        self._path = path
        self._lock = threading.Lock()
        self._told = False

    async def write(self, state: RunState) -> None:
        """Off the event loop."""
        await to_thread.run_sync(self.write_now, state)

    def write_now(self, state: RunState) -> None:
        """Blocking."""
        with self._lock:
            try:
                _replace(self._path, dump(state))
            except OSError as error:
                if not self._told:
                    logger.warning("cannot write %s (%s): asyncrl status and why show an old state", self._path, error)
                self._told = True
            else:
                self._told = False


def read_state(run_dir: Path) -> RunState | None:
    """The newest state of the run; None: there is none. Blocking.

    Raises:
        ConfigError: it is torn, damaged or of another schema; the message names the file.
    """
    path = run_dir / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        raw = json.loads(text)
    except ValueError:
        raise ConfigError(f"{path} is torn: what the run was doing cannot be told from it") from None
    return load(raw, str(path))


def write_stall(run_dir: Path, state: RunState) -> Path | None:
    """Everything known of a run in which nothing moves, and the chain of waits, into `stall.json`. Blocking.

    Returns:
        The file; None: it could not be written, which has been logged.
    """
    links = explain(state, state.written_at)
    path = run_dir / STALL_FILE
    try:
        _replace(path, {"why": render(links), "chain": as_json(links), "state": dump(state)})
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
        return None
    return path


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
