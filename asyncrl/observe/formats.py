"""Format numbers, shares and durations as text. Pure."""

from __future__ import annotations

import math
import time


def elapsed(value_s: float) -> str:
    """Format a duration as `0:07`, `12:34`, `3:04:05`."""
    minutes, rest = divmod(int(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_s(value_s: float) -> str:
    """Format a duration as `28 ms`, `1.4 s`, `2:05`."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    return f"{value_s:.1f} s" if value_s < 60 else elapsed(value_s)


def duration(value_s: float) -> str:
    """Format how long something has lasted: `0.4 s`, `94 s`, `12 min`, `3.2 h`."""
    if not math.isfinite(value_s):
        return "an unknown time"
    value_s = max(0.0, value_s)
    if value_s < 10:
        return f"{value_s:.1f} s"
    if value_s < 600:
        return f"{value_s:.0f} s"
    return f"{value_s / 60:.0f} min" if value_s < 7200 else f"{value_s / 3600:.1f} h"


def seconds(value_s: float | None) -> str:
    """Format a measured duration with three digits: `12 ms`, `3.4 s`, `2 min 5 s`, `1 h 02 min`."""
    if value_s is None:
        return "-"
    if value_s < 1:
        return f"{1000 * value_s:.3g} ms"
    if value_s < 100:
        return f"{value_s:.3g} s"
    minutes, rest = divmod(round(value_s), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def number(value: float | None, form: str = ".3f") -> str:
    """Format `value`, or return a dash if it is unknown."""
    return "-" if value is None else format(value, form)


def whole_percent(share: float | None) -> str:
    """Format a share as a whole percentage."""
    return "-" if share is None else f"{share * 100:.0f} %"


def percent(share: float | None) -> str:
    """Format a share as a percentage, with three digits if it is small or almost everything."""
    if share is None or 0.1 <= share <= 0.995 or share in (0, 1):
        return whole_percent(share)
    return f"{100 * share:.3g} %"


def count(number: float, noun: str, plural: str = "") -> str:
    """Format a number with its noun: `1 step`, `1,200 steps`."""
    return f"{number:,.0f} {noun if number == 1 else plural or noun + 's'}"


def timestamp(at: float) -> str:
    """Format a wall clock as `2026-01-02 03:04:05` in local time; 0, and a time that no calendar has, is unknown."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "an unknown time"
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def size(num_bytes: float) -> str:
    """Format a number of bytes, such as `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
