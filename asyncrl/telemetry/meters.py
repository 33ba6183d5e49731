"""Rates and idle shares from cumulative counters. Pure: the caller brings the clock."""

from __future__ import annotations

from collections import deque

from asyncrl.telemetry.rows import Row


class Total:
    """A counter that goes on when the part that counts is restarted and begins at 0 again."""

    def __init__(self) -> None:
        self._earlier = 0.0
        self._present = 0.0
        self._incarnation = 0

    def see(self, value: float, incarnation: int) -> float:
        """The counter of the part's process of this incarnation stands at `value`; returns the total of all
        incarnations seen so far.

        A value that falls would not tell them apart: a new process may have counted further than the one before.
        """
        if incarnation != self._incarnation:
            self._earlier += self._present
            self._incarnation = incarnation
        self._present = value
        return self.value

    @property
    def value(self) -> float:
        return self._earlier + self._present


class WindowRate:
    """How fast a counter grows, over the last `span_s` seconds."""

    def __init__(self, span_s: float = 20.0) -> None:
        self._span_s = span_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, total: float) -> None:
        """The counter stands at `total`. One that falls was restarted: the window begins anew."""
        if self._points and total < self._points[-1][1]:
            self._points.clear()
        self._points.append((now_s, total))
        while len(self._points) > 2 and self._points[1][0] <= now_s - self._span_s:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """None until two points at different times are known."""
        if len(self._points) < 2:
            return None
        (start_s, start), (end_s, end) = self._points[0], self._points[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else None


class Course:
    """The course of a value over a run of any length, in at most `most` means of equally many values."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._stride = 1
        self._means: list[float] = []
        self._rest: list[float] = []

    def add(self, value: float) -> None:
        self._rest.append(value)
        if len(self._rest) < self._stride:
            return
        self._means.append(sum(self._rest) / len(self._rest))
        self._rest.clear()
        if len(self._means) > self._most:
            # One value stays over when their number is odd: it opens the next mean.
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            if len(self._means) % 2:
                self._rest = [self._means[-1]] * self._stride
            self._means = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """Oldest first; the newest values may be too few for a mean of their own yet."""
        return (*self._means, sum(self._rest) / len(self._rest)) if self._rest else tuple(self._means)


class RollouterIdle:
    """Share of the time between the first and the last step in which nothing was in generation.

    The counter is seen about once a second, the steps fall in between: its value at a step is interpolated.
    """

    def __init__(self) -> None:
        self._previous: tuple[float, float] | None = None
        self._start: tuple[float, float] | None = None
        self._end: tuple[float, float] | None = None
        self._steps: deque[float] = deque()
        """Times of steps that no later observation brackets yet."""

    def step(self, now_s: float) -> None:
        """A step's record arrived."""
        if len(self._steps) == 2 or (self._start is not None and self._steps):
            self._steps.pop()  # Only the first and the newest step matter.
        self._steps.append(now_s)

    def observe(self, now_s: float, idle_s: float) -> None:
        """The Rollouter's cumulative idle time stands at `idle_s`."""
        while self._steps and self._steps[0] <= now_s:
            point = self._at(self._steps.popleft(), now_s, idle_s)
            self._start, self._end = self._start or point, point
        self._previous = (now_s, idle_s)

    def _at(self, time_s: float, now_s: float, idle_s: float) -> tuple[float, float]:
        if self._previous is None:
            return now_s, idle_s
        before_s, before = self._previous
        if time_s <= before_s or now_s <= before_s:
            return before_s, before
        return time_s, before + (idle_s - before) * (time_s - before_s) / (now_s - before_s)

    @property
    def share(self) -> float | None:
        """None before a second step. Steps after the last observation are not covered."""
        if self._start is None or self._end is None or self._end[0] <= self._start[0]:
            return None
        share = (self._end[1] - self._start[1]) / (self._end[0] - self._start[0])
        return min(max(share, 0.0), 1.0)


class TrainerIdle:
    """Share of the time between the ends of the first and the last step that the Trainer waited for samples."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._waited_s = 0.0

    def add(self, row: Row) -> None:
        """A `step` row of this process."""
        end_s = row.metrics["time/monotonic_s"]
        if self._first_s is None or end_s < self._last_s:  # The first; or of a Trainer that went to another machine.
            self._first_s, self._waited_s = end_s, 0.0
        else:
            self._waited_s += row.metrics["timing/wait_samples_s"]
        self._last_s = end_s

    @property
    def share(self) -> float | None:
        """None before a second step."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return min(self._waited_s / (self._last_s - self._first_s), 1.0)
