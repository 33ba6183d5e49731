"""What a process has recorded and not yet written or sent, and the count of what was lost. Any thread may use it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from asyncrl.profiling.files import Line
from asyncrl.profiling.spans import Raw

logger = logging.getLogger(__name__)


class Buffer:
    """Of one `configure`: a writer of the run before that is late has a buffer of its own."""

    def __init__(self, part: str = "", most: int = 0) -> None:
        self.waiting: deque[Raw | Line] = deque()
        self.most = most
        self.taken = 0
        """Events that have left it."""
        self.dropped = 0
        """By this process."""
        self.dropped_elsewhere = 0
        self._part = part
        self._untold = 0
        self._counting = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._warned = False

    def put_line(self, line: Line) -> None:
        if len(self.waiting) >= self.most:
            self.lose_line(line)
        else:
            self.waiting.append(line)

    def lose(self, count: int) -> None:
        with self._counting:
            self.dropped += count
            self._untold += count

    def lose_line(self, line: Line) -> None:
        """One that tells of others, too: they are told of again."""
        with self._counting:
            self.dropped += 1
            self._untold += 1 + events_dropped(line.event)

    def came(self, part: str, count: int, told_dropped: int, sent: int | None) -> None:
        """`count` events of `part`, which tell of `told_dropped` others, and that `part` has sent `sent` by now."""
        with self._counting:
            lost = self._senders.setdefault(part, _Sender()).lost(count, sent)
            self.dropped_elsewhere += told_dropped + lost
            self._untold += lost

    def take(self, most: int) -> list[Line]:
        """The oldest ones. What cannot be said is lost."""
        offset = time.time() - time.perf_counter()
        lines: list[Line] = []
        for _ in range(min(most, len(self.waiting))):
            try:
                raw = self.waiting.popleft()
            except IndexError:  # another thread has taken it
                break
            try:
                lines.append(raw if isinstance(raw, Line) else Line(self._part, _encoded(raw, offset)))
            except Exception:
                self.lose(1)
                if not self._warned:
                    logger.warning("an event cannot be encoded; it and others like it are lost", exc_info=True)
                self._warned = True
        self.taken += len(lines)
        return lines

    def marker(self, place: tuple[int | None, int | None]) -> Line | None:
        """Tells of what was lost since the last one."""
        with self._counting:
            untold, self._untold = self._untold, 0
        if not untold:
            return None
        raw = Raw("profiler.dropped", time.time(), 0.0, place, {}, {"events": untold}, wall=True)
        return Line(self._part, _encoded(raw, 0.0))

    def tell_again(self, marker: Line) -> None:
        """It got nowhere."""
        with self._counting:
            self._untold += events_dropped(marker.event)


class _Sender:
    """What a part says to have sent, against what has come. Answers may overtake each other, so that only what is
    missing at two of them in a row is lost; if it comes after all, as much less is, the next time."""

    def __init__(self) -> None:
        self._came = 0
        self._sent: int | None = None
        self._missing = 0

    def lost(self, count: int, sent: int | None) -> int:
        """Events that are known to be lost only now. `sent`: in all, with these; None: nobody said."""
        self._came += count
        if sent is None:
            return 0
        if self._sent is None:  # whoever was here before has got the others
            self._came = self._sent = sent
        self._sent = max(self._sent, sent)
        missing = self._sent - self._came
        lost = max(0, min(self._missing, missing))
        self._came += lost
        self._missing = missing - lost
        return lost


def events_dropped(event: Mapping[str, Any]) -> int:
    """How many others an event says are lost."""
    return int(event.get("events", 0)) if event["event"] == "profiler.dropped" else 0


def _encoded(raw: Raw, offset: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "timestamp": round(raw.start if raw.wall else raw.start + offset, 6),
        "event": raw.name,
        "duration_s": round(raw.duration_s, 6),
    }
    step, version = raw.place
    if step is not None:
        event["step"] = step
    if version is not None:
        event["version"] = version
    for fields in (raw.context, raw.fields):
        for name, value in fields.items():
            if value is not None:
                event[name] = value
    return event
