"""`events/step_<step>/<part>.jsonl` of a run directory. Blocking; one thread at a time."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

DIRECTORY = "events"
MAX_TEXT = 1_000
"""Characters of a value that is no number; the rest of it is cut off."""
MAX_OPEN = 8
"""Files at once: events of a few steps at a time come in."""


class Line(NamedTuple):
    part: str
    event: Mapping[str, Any]


def step_dir(directory: Path, step: int) -> Path:
    """Of one step below `events/`; step 0 is everything before the first one."""
    return directory / f"step_{step:06d}"


class EventFiles:
    """Appends. What cannot be written is told once and counted: events are no reason to end a run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._told = False
        self._told_of_odd = False

    def write(self, lines: Sequence[Line]) -> list[Line]:
        """Returns those that are lost."""
        lost: list[Line] = []
        encoded: list[Line] = []
        texts: dict[tuple[int, str], list[str]] = {}
        for line in lines:
            try:
                text = _encoded(line.event)
            except Exception as error:  # noqa: BLE001  of whatever somebody has put into it
                lost.append(line)
                if not self._told_of_odd:
                    logger.warning("%s cannot be written, nor others like it: %s", line.event["event"], error)
                self._told_of_odd = True
            else:
                texts.setdefault((_step(line.event), line.part), []).append(text)
                encoded.append(line)
        for key, found in texts.items():
            try:
                self._append(key, ("\n".join(found) + "\n").encode())
            except (OSError, ValueError) as error:  # ValueError: a part that cannot be a file's name
                lost += [line for line in encoded if (_step(line.event), line.part) == key]
                if not self._told:
                    logger.warning(
                        "events cannot be written to %s (%s): reports of this run will lack them",
                        self._directory,
                        error,
                    )
                self._told = True
            else:
                self._told = False
        return lost

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, key: tuple[int, str], data: bytes) -> None:
        descriptor = self._open.get(key)
        if descriptor is None:
            descriptor = self._opened(key)
        else:
            self._open.move_to_end(key)
        before = os.fstat(descriptor).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, before)  # nobody else writes it: what is lost is lost as a whole
            raise

    def _opened(self, key: tuple[int, str]) -> int:
        step, part = key
        parent = step_dir(self._directory, step)
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(parent / f"{part}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")  # behind the torn line of a process that was killed
        except BaseException:
            os.close(descriptor)
            raise
        self._open[key] = descriptor
        if len(self._open) > MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor


def event_files(run_dir: Path) -> Iterator[Path]:
    """All of a run, by step and part."""
    yield from sorted((run_dir / DIRECTORY).glob("step_*/*.jsonl"))


def _step(event: Mapping[str, Any]) -> int:
    step = event.get("step", 0)
    return step if isinstance(step, int) and 0 <= step < 10**9 else 0


def _encoded(event: Mapping[str, Any]) -> str:
    """As one line of JSON, whatever somebody has put into it."""
    try:
        line = json.dumps(event, separators=(",", ":"), default=_plain, allow_nan=False)
    except (TypeError, ValueError, OverflowError, RecursionError):
        plain = {str(name): _plain(value) for name, value in event.items()}
        line = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return _whole(line) if "\\ud" in line else line


def _whole(line: str) -> str:
    """With `?` for halves of characters: a model may write "\\ud800", and readers of JSON refuse it."""
    text = json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace")
    return json.dumps(json.loads(text), separators=(",", ":"))


def _plain(value: Any) -> Any:
    """A number or text: numpy's numbers as Python's, everything else as it is printed."""
    with suppress(Exception):
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    try:
        return repr(value)[:MAX_TEXT]
    except Exception:  # noqa: BLE001  of a class of the user's
        return type(value).__name__
