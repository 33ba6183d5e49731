"""The event files `events/step_<step>/<part>.jsonl` of a run directory: write them, find them, parse their lines."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

logger = logging.getLogger(__name__)

EVENTS_DIRECTORY = "events"
MAX_TEXT = 1_000
"""Largest number of characters of a value that is not a number; longer values are cut."""
MAX_OPEN_FILES = 8
"""Enough for the parts of the few steps whose events arrive at the same time."""
EARLIEST_S, LATEST_S = 946_684_800, 4_102_444_800
"""The years 2000 to 2100 in Unix seconds; an event at another time is damaged."""
MAX_NUMBER = 2**53
"""Larger numbers are not exact as doubles, so such a value is damaged."""
INTEGER_FIELDS = ("step", "version", "turn", "trajectory")
"""Fields that are integers; `trajectory` may be a name instead."""


class EventLine(NamedTuple):
    part: str
    event: Mapping[str, Any]


def step_dir(directory: Path, step: int) -> Path:
    """Return the directory of one step below `events/`. Step 0 holds everything before the first step."""
    return directory / f"step_{step:06d}"


def event_files(run_dir: Path) -> Iterator[Path]:
    """Yield all event files of a run, by step and part. A live run may delete some of them meanwhile
    (`asyncrl.profiling.rotation`)."""
    for directory in sorted((run_dir / EVENTS_DIRECTORY).glob("step_*")):
        yield from files_of_step(directory)


def files_of_step(directory: Path) -> list[Path]:
    """Return the event files of one step, by part. A pipe is none, because to open it could block forever."""
    try:
        with os.scandir(directory) as entries:
            return sorted(directory / each.name for each in entries if each.name.endswith(".jsonl") and each.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []


# ------------------------------------------------------------------------------------------------ writing


class EventFiles:
    """Appends events to files. Blocking; one thread at a time.

    A failed write is logged once, and its events are returned as lost, because a lost event must not end a run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._warned_of_disk = False
        self._warned_of_event = False

    def write(self, lines: Sequence[EventLine]) -> list[EventLine]:
        """Write lines, and return those that are lost."""
        lost: list[EventLine] = []
        files: dict[tuple[int, str], list[tuple[EventLine, str]]] = {}
        for line in lines:
            try:
                text = _encode(line.event)
            except Exception as error:  # noqa: BLE001  fields may hold any object
                lost.append(line)
                if not self._warned_of_event:
                    logger.warning("the event %s and similar ones cannot be written: %s", line.event["event"], error)
                self._warned_of_event = True
            else:
                files.setdefault((_step(line.event), line.part), []).append((line, text))
        for key, encoded in files.items():
            try:
                self._append(key, "".join(f"{text}\n" for _, text in encoded).encode())
            except (OSError, ValueError) as error:  # ValueError: the part is not a valid file name
                lost += [line for line, _ in encoded]
                if not self._warned_of_disk:
                    logger.warning(
                        "events cannot be written to %s (%s): reports of this run will lack them",
                        *(self._directory, error),
                    )
                self._warned_of_disk = True
            else:
                self._warned_of_disk = False
        return lost

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, key: tuple[int, str], data: bytes) -> None:
        descriptor = self._open.get(key)
        if descriptor is not None and not os.fstat(descriptor).st_nlink:  # its step was folded and is now repeated
            os.close(self._open.pop(key))
            descriptor = None
        if descriptor is None:
            descriptor = self._open_file(key)
        else:
            self._open.move_to_end(key)
        size = os.fstat(descriptor).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, size)  # there is no other writer, so this leaves complete lines
            raise

    def _open_file(self, key: tuple[int, str]) -> int:
        step, part = key
        parent = step_dir(self._directory, step)
        parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(parent / f"{part}.jsonl", flags, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")  # ends the torn line of a killed process
        except BaseException:
            os.close(descriptor)
            raise
        self._open[key] = descriptor
        if len(self._open) > MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor


def _step(event: Mapping[str, Any]) -> int:
    step = event.get("step", 0)
    return step if isinstance(step, int) and 0 <= step < 10**9 else 0


def _encode(event: Mapping[str, Any]) -> str:
    """Return one line of JSON for fields of any type."""
    try:
        line = json.dumps(event, separators=(",", ":"), default=_plain, allow_nan=False)
    except (TypeError, ValueError, OverflowError, RecursionError):
        plain = {str(name): _plain(value) for name, value in event.items()}
        line = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return json.dumps(_without_surrogates(line), separators=(",", ":")) if "\\ud" in line else line


def _without_surrogates(line: str | bytes) -> Any:
    """Return the parsed line with `?` for lone surrogates, which a model may write but UTF-8 cannot encode."""
    return json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))


def _plain(value: Any) -> Any:
    """Return a number or text: numpy numbers become Python numbers, other objects their `repr`."""
    with suppress(Exception):
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    try:
        return repr(value)[:MAX_TEXT]
    except Exception:  # noqa: BLE001  the class is the user's
        return type(value).__name__


# ------------------------------------------------------------------------------------------------ reading


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Parse a line of an event file; None if it is damaged or no event.

    Name, time, duration and the `INTEGER_FIELDS` are valid; other fields may hold anything. All text is valid UTF-8.
    """
    try:
        # Most lines have no escape, and `json` takes time to guess the encoding of bytes.
        has_escape = b"\\u" in line and b"\\ud" in line.lower()
        event = _without_surrogates(line) if has_escape else json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_event(event) else None


def _is_event(event: dict[str, Any]) -> bool:
    name, start, duration = (event.get(field) for field in ("event", "timestamp", "duration_s"))
    if not (isinstance(name, str) and is_number(start) and is_number(duration)):
        return False
    if start < EARLIEST_S or start + duration > LATEST_S:
        return False
    for field in INTEGER_FIELDS:
        value = event.get(field)
        if not (_is_integer(value) or (field == "trajectory" and isinstance(value, str))):
            return False
    return True


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether the value is a finite number below `MAX_NUMBER`, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_integer(value: Any) -> bool:
    return value is None or (is_number(value) and value == int(value))
