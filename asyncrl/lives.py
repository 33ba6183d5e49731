"""Every sample's life, out of the transitions of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from asyncrl.recovery import QueueState
from asyncrl.transitions import Admitted, Closed, Committed, Dropped, Finished, Leased, Transition
from asyncrl.types import DropReason, SampleId


class SampleRecord(NamedTuple):
    """One sample's life so far. Times are wall clock (`time.time`), of the last of its kind; 0: there was none."""

    sample_id: SampleId
    state: str
    """`running`, `ready`, `leased`, `trained`, `dropped`, `outstanding`: waits to be fed again."""
    reason: str
    """Of a drop, else empty."""
    fed_at: float
    ready_at: float
    leased_at: float
    ended_at: float
    num_feeds: int
    num_commits: int


class Lives:
    """Every sample's record, out of all transitions of a run in order. `begin` is the state before the first."""

    def __init__(self, begin: QueueState) -> None:
        self._state = begin
        self._seen: dict[SampleId, dict[str, Any]] = {}

    def see(self, at: float, transition: Transition) -> None:
        """Raises `BugError` if it is illegal there."""
        ending = list(self._live()) if isinstance(transition, Closed) else []
        self._state.apply(transition)
        if isinstance(transition, Admitted):
            for sample_id in transition.sample_ids:
                life = self._of(sample_id)
                life["fed_at"], life["num_feeds"] = at, life.get("num_feeds", 0) + 1
        elif isinstance(transition, Finished):
            for sample in transition.samples:
                self._of(sample.meta.sample_id)["ready_at"] = at
        elif isinstance(transition, Leased):
            for sample_id in transition.sample_ids:
                self._of(sample_id)["leased_at"] = at
        elif isinstance(transition, Committed):
            for sample_id in transition.sample_ids:
                life = self._of(sample_id)
                life |= {"ended_at": at, "reason": "", "num_commits": life.get("num_commits", 0) + 1}
        elif isinstance(transition, Dropped):
            for sample_id in transition.sample_ids:
                self._of(sample_id).update(ended_at=at, reason=str(transition.reason))
        for sample_id in ending:
            self._of(sample_id).update(ended_at=at, reason=str(DropReason.SHUTDOWN))

    def records(self) -> Iterator[SampleRecord]:
        """By index: what was fed in these transitions, and what was to be fed again before them."""
        ledger = self._state.ledger
        known = self._seen.keys() | {i for i in ledger.snapshot(0).outstanding}
        for sample_id in sorted(known, key=lambda i: i.index):
            life = self._seen.get(sample_id, {})
            name = ledger.state(sample_id).partition(" ")[0].lower()
            if name == "waiting":
                name = "outstanding"
            elif not ledger.is_live(sample_id):
                name = "dropped" if life.get("reason") else "trained"
            live = name not in ("trained", "dropped")
            yield SampleRecord(
                sample_id,
                name,
                "" if live else life.get("reason", ""),
                life.get("fed_at", 0.0),
                life.get("ready_at", 0.0),
                life.get("leased_at", 0.0),
                0.0 if live else life.get("ended_at", 0.0),
                life.get("num_feeds", 0),
                life.get("num_commits", 0),
            )

    def _of(self, sample_id: SampleId) -> dict[str, Any]:
        return self._seen.setdefault(sample_id, {})

    def _live(self) -> Iterator[SampleId]:
        return (sample_id for sample_id in self._seen if self._state.ledger.is_live(sample_id))
