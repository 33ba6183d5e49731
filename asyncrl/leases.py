"""Who holds what: samples under leases, which are numbered from 1. Pure; the ledger says what is legal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from asyncrl.failures import BugError
from asyncrl.types import SampleId


class Held(NamedTuple):
    lease_id: int
    completion: int
    """The sample's place in completion order."""


class Leases:
    """Leased samples, and what is left of each lease."""

    def __init__(self, last: int = 0, held: Mapping[SampleId, Held] | None = None) -> None:
        self.last = last
        """The newest lease's number; 0: there was none."""
        self._held: dict[SampleId, Held] = {}
        self._open: dict[int, set[SampleId]] = {}
        for sample_id, (lease_id, completion) in (held or {}).items():
            self._hold(sample_id, lease_id, completion)

    def __len__(self) -> int:
        """Samples."""
        return len(self._held)

    def __iter__(self) -> Iterator[SampleId]:
        return iter(self._held)

    def __contains__(self, sample_id: SampleId) -> bool:
        return sample_id in self._held

    def __getitem__(self, sample_id: SampleId) -> Held:
        return self._held[sample_id]

    def open(self) -> tuple[int, ...]:
        """Leases of which something is left, in order."""
        return tuple(sorted(self._open))

    def left(self, lease_id: int) -> tuple[SampleId, ...]:
        """What is left of a lease. Raises `BugError` if it was never given."""
        if not 1 <= lease_id <= self.last:
            raise BugError(f"lease {lease_id} was never given; the last one is {self.last}")
        return tuple(sorted(self._open.get(lease_id, ())))

    def give(self, completions: Iterable[tuple[SampleId, int]]) -> int:
        """A new lease of these; returns its number."""
        self.last += 1
        for sample_id, completion in completions:
            self._hold(sample_id, self.last, completion)
        return self.last

    def take(self, sample_id: SampleId) -> int:
        """Forget that it is leased; returns its completion number."""
        lease_id, completion = self._held.pop(sample_id)
        lease = self._open[lease_id]
        lease.remove(sample_id)
        if not lease:
            del self._open[lease_id]
        return completion

    def _hold(self, sample_id: SampleId, lease_id: int, completion: int) -> None:
        self._held[sample_id] = Held(lease_id, completion)
        self._open.setdefault(lease_id, set()).add(sample_id)
