"""Events of the user's own code: `from asyncrl import profile`.

    with profile.span("my.lookup", table="prices") as span:
        ...
        span.add(rows=12)
    profile.note("my.cache_miss", key="a")

The name needs no registration. Report and timeline show it as it is. Names of asyncrl's events, and names that begin
like them up to the first dot, are refused, so that an event of a later version cannot have the same name.
"""

from __future__ import annotations

from typing import Any

from asyncrl.profiling.catalog import check_own_name
from asyncrl.profiling.profiler import DISABLED_SPAN, ProfilerSpan
from asyncrl.profiling.profiler import profile as _profiler


def span(name: str, **fields: Any) -> ProfilerSpan:
    """Time a `with` or `async with` block. The class of an exception becomes the field `error`.

    It is recorded at `profiler.level` summary and full, with the sample, trajectory and turn in whose context it runs.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        fields: numbers or text.

    Raises:
        ValueError: the name belongs to asyncrl, or the name or a field cannot be used.
    """
    check_own_name(name, fields)
    return ProfilerSpan(_profiler, name, fields, False) if _profiler.enabled else DISABLED_SPAN


def note(name: str, **fields: Any) -> None:
    """Record an event without duration. Raises as `span`."""
    with span(name, **fields):
        pass
