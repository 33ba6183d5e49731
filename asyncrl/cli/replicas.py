"""Which replicas were replaced, and which hang, from what they report to the weight store. Pure.

Serve replaces a replica that ends; what is seen of that here is a new name after the first full set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from asyncrl.ports import ReplicaReport
from asyncrl.run_state import Restart


class Seen(NamedTuple):
    """What one look has brought."""

    begun: tuple[Restart, ...]
    """A new replica is there in the place of one that is gone."""
    recovered: tuple[Restart, ...]
    """Those that serve now."""
    hung: tuple[ReplicaReport, ...]
    """Last reports of replicas that nobody has replaced although nothing was heard of them; each is told once."""


class ReplicaWatch:
    """Knows every replica by its name, since the run began."""

    def __init__(self, num_replicas: int, limit_s: float) -> None:
        """`limit_s`: one that reports nothing for longer hangs."""
        self._num_replicas = num_replicas
        self._limit_s = limit_s
        self._present: dict[str, ReplicaReport] = {}
        """Last report of each that is not known to be gone."""
        self._gone: set[str] = set()
        self._starting: dict[str, Restart] = {}
        self._told: set[str] = set()

    def look(self, reports: Sequence[ReplicaReport], now: float, *, store_since: float = 0.0) -> Seen:
        """
        Args:
            reports: as the weight store told them, which may still have those of replicas that are gone, or may have
                been restarted and know only a few.
            now: when it told them, wall clock: what nobody could have heard of since is no silence.
            store_since: from when on it could be told, wall clock.
        """
        begun: list[Restart] = []
        recovered: list[Restart] = []
        for report in sorted(reports, key=lambda report: report.reported_at):
            name = report.replica
            if name in self._gone:
                continue
            if name not in self._present and len(self._present) == self._num_replicas:
                begun.append(self._replaced(name))
            self._present[name] = report
            if report.phase == "serving" and name in self._starting:
                recovered.append(replace(self._starting.pop(name), recovered_at=report.reported_at))
        silent = [
            report for report in self._present.values() if now - max(report.reported_at, store_since) > self._limit_s
        ]
        hung = tuple(report for report in silent if report.replica not in self._told)
        self._told.update(report.replica for report in hung)
        return Seen(tuple(begun), tuple(recovered), hung)

    def _replaced(self, name: str) -> Restart:
        """`name` is new: it has taken the place of the one that is unheard of for longest."""
        old = min(self._present.values(), key=lambda report: report.reported_at)
        del self._present[old.replica]
        self._gone.add(old.replica)
        self._starting.pop(old.replica, None)
        cause = old.told or f"replica {old.replica} (pid {old.pid}) or its engine ended or hung"
        incarnation = len(self._gone) + 1
        self._starting[name] = Restart("replica", incarnation, old.reported_at, cause, detail=f"replica {name}")
        return self._starting[name]
