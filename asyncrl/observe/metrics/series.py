"""Series of values that a run of any length adds to, in bounded memory. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class DownsampledSeries:
    """Reduces a series of any length to at most `max_points` means of equally many values."""

    def __init__(self, max_points: int = 512) -> None:
        self._max_points = max_points
        self._stride = 1
        self._means: list[float] = []
        self._rest: list[float] = []

    def add(self, value: float) -> None:
        self._rest.append(value)
        if len(self._rest) < self._stride:
            return
        self._means.append(sum(self._rest) / len(self._rest))
        self._rest.clear()
        if len(self._means) > self._max_points:
            # If the number of means is odd, the last one becomes the first half of the next mean.
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            if len(self._means) % 2:
                self._rest = [self._means[-1]] * self._stride
            self._means = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """Return the means, oldest first; the last one may be of fewer values."""
        return (*self._means, sum(self._rest) / len(self._rest)) if self._rest else tuple(self._means)


class ThinnedSeries(Generic[Value]):
    """Keeps all values of a short series, and every `stride`-th value and the newest one of a series of any length."""

    def __init__(self, max_values: int = 4096) -> None:
        self.stride = 1
        self.count = 0
        """Number of values that were added."""
        self.every: list[Value] = []
        """The values 0, `stride`, 2 * `stride`, …"""
        self._max_values = max_values
        self._newest: tuple[Value, ...] = ()

    def add(self, value: Value) -> None:
        self._newest = (value,)
        if self.count % self.stride == 0:
            self.every.append(value)
            if len(self.every) > self._max_values:
                del self.every[1::2]
                self.stride *= 2
        self.count += 1

    @property
    def values(self) -> list[Value]:
        """Return the kept values, oldest first."""
        is_newest_kept = (self.count - 1) % self.stride == 0
        return list(self.every) if is_newest_kept else [*self.every, *self._newest]


class TenthMeans:
    """Means over tenths of a series: exact for a short one, else of tenths that begin and end at a kept total."""

    def __init__(self, max_totals: int = 8192) -> None:
        self._total = 0.0
        self._totals: ThinnedSeries[float] = ThinnedSeries(max_totals)
        """Cumulative sums of the values."""
        self._totals.add(0.0)

    def add(self, value: float) -> None:
        self._total += value
        self._totals.add(self._total)

    def ends(self) -> dict[str, float | None]:
        """Return `first` and `last`, the means over the first and the last tenth, each of at least one value."""
        totals, stride, count = self._totals.every, self._totals.stride, self._totals.count - 1
        if not count:
            return {"first": None, "last": None}
        last = len(totals) - 1 - self._tenth
        return {
            "first": totals[self._tenth] / (self._tenth * stride),
            "last": (self._total - totals[last]) / (count - last * stride),
        }

    def best(self) -> float | None:
        """Return the largest mean over any tenth of consecutive values."""
        totals, tenth, last = self._totals.every, self._tenth, self.ends()["last"]
        pairs = zip(totals, totals[tenth:], strict=False)
        means = [(end - begin) / (tenth * self._totals.stride) for begin, end in pairs]
        return max(means if last is None else [*means, last], default=None)

    @property
    def _tenth(self) -> int:
        """Return the length of a tenth in strides."""
        return max(1, (len(self._totals.every) - 1) // 10)
