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
    """Last reports of those of which nothing is heard although they may be there; each silence is told once."""
    missing: tuple[ReplicaReport, ...] = ()
    """Those in whose place none has come since they were told to hang, in time to start one; each is told once."""


class ReplicaWatch:
    """Knows every replica by its name, since the run began."""

    def __init__(self, num_replicas: int, limit_s: float, start_s: float) -> None:
        """
        Args:
            num_replicas: as configured.
            limit_s: one that reports nothing for longer hangs.
            start_s: so much later another one has come in its place, and has reported at least that it starts.
        """
        self._num_replicas = num_replicas
        self._limit_s = limit_s
        self._start_s = start_s
        self._present: dict[str, ReplicaReport] = {}
        """Last report of each that is not known to be gone."""
        self._gone: set[str] = set()
        self._left: dict[str, ReplicaReport] = {}
        """Last report of each that was taken for gone when another one came, and may be one that hangs instead."""
        self._starting: dict[str, Restart] = {}
        self._hung_at: dict[str, float] = {}
        """When each of those that are silent was told."""
        self._missed: set[str] = set()

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
            if name in self._left and report.reported_at > self._left[name].reported_at:
                self._is_back(name)
            if name in self._gone:
                continue
            if name not in self._present and len(self._present) == self._num_replicas:
                begun.append(self._replaced(name))
            self._present[name] = report
            if report.phase == "serving" and name in self._starting:
                recovered.append(replace(self._starting.pop(name), recovered_at=report.reported_at))
        hung, missing = self._silent(now, store_since)
        return Seen(tuple(begun), tuple(recovered), hung, missing)

    def _silent(self, now: float, store_since: float) -> tuple[tuple[ReplicaReport, ...], tuple[ReplicaReport, ...]]:
        """Those that hang, and those that are missing, see `Seen`."""
        silent = {
            name: report
            for name, report in self._present.items()
            if now - max(report.reported_at, store_since) > self._limit_s
        }
        hung = [name for name in silent if name not in self._hung_at]
        self._hung_at = {name: self._hung_at.get(name, now) for name in silent}
        missing = [name for name in silent if now - max(self._hung_at[name], store_since) > self._start_s]
        missing = [name for name in missing if name not in self._missed]
        self._missed.update(missing)
        left = [report for report in self._left.values() if now - max(report.reported_at, store_since) > self._limit_s]
        for report in left:
            del self._left[report.replica]
        return (*(silent[name] for name in hung), *left), tuple(silent[name] for name in missing)

    def _replaced(self, name: str) -> Restart:
        """`name` is new: it has taken the place of the one that is unheard of for longest."""
        old = self._let_go()
        self._starting.pop(old.replica, None)
        cause = old.told or f"replica {old.replica} (pid {old.pid}) or its engine ended or hung"
        incarnation = len(self._gone) + 1
        self._starting[name] = Restart("replica", incarnation, old.reported_at, cause, detail=f"replica {name}")
        return self._starting[name]

    def _let_go(self) -> ReplicaReport:
        """Take the one that is unheard of for longest for gone; its last report."""
        old = min(self._present.values(), key=lambda report: report.reported_at)
        del self._present[old.replica]
        self._gone.add(old.replica)
        if old.replica not in self._hung_at:
            self._left[old.replica] = old
        return old

    def _is_back(self, name: str) -> None:
        """It was another one that had gone: of two that died or spoke last within a second, nobody can tell."""
        del self._left[name]
        self._gone.remove(name)
        self._let_go()
