"""Which READY samples are too old to be leased. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.recovery import QueueState
from asyncrl.staleness import StaleAction, judge
from asyncrl.types import Provenance, SampleId


class Eviction:
    """Judges each READY sample once per version of the Trainer: later ones of a version only if they are new."""

    def __init__(self, state: QueueState, max_staleness: int | None, stale_action: StaleAction) -> None:
        """See `sample_queue.QueueOptions`."""
        self._state = state
        self._max_staleness = max_staleness
        self._stale_action = stale_action
        self._judged_for: int | None = None
        self._unjudged: list[SampleId] = []

    def came(self, sample_ids: Iterable[SampleId]) -> None:
        """These are READY now."""
        self._unjudged.extend(sample_ids)

    def judge_all(self) -> None:
        """Anything may be READY now."""
        self._judged_for = None

    def stale(self, trainer_version: int) -> tuple[SampleId, ...]:
        """Those to drop before a Trainer of this version leases. Raises `BugError` as `staleness.judge` does."""
        suspects = self._unjudged if trainer_version == self._judged_for else list(self._state.ledger.ready())
        stale = tuple(dict.fromkeys(sample_id for sample_id in suspects if self._is_stale(sample_id, trainer_version)))
        self._unjudged, self._judged_for = [], trainer_version
        return stale

    def _is_stale(self, sample_id: SampleId, trainer_version: int) -> bool:
        entry = self._state.entry(sample_id)
        if entry is None or not self._state.ledger.is_ready(sample_id):
            return False
        verdict = judge(
            trainer_version,
            entry.meta.oldest_version,
            max_staleness=self._max_staleness,
            stale_action=self._stale_action,
            allows_newer=self._state.lineage > 0 or entry.meta.provenance is not Provenance.GENERATED,
        )
        return verdict == "drop"
