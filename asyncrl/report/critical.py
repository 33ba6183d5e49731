"""The samples that the Trainer waited for, one after the other, from its last wait back to the start of the run. Pure.

    wait ◀─ reward ◀─ generation ◀─┬─ a permit ◀─ the Trainer's work ◀─ the wait before it ◀─ …
                                   └─ a place ◀─ generation of the sample that had it ◀─ …

With many samples in flight some reward is under way at nearly every moment, and the Trainer would have waited without
it too: only what is on this chain would have let it go on sooner.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.report.intervals import Intervals, union
from asyncrl.report.lives import newest
from asyncrl.report.load import Events
from asyncrl.report.requests import CLOCKS_S, whole_trajectories

WAITED_S = 0.1
"""Who is permitted a sample, or given a place, sooner than that has not waited for it."""
_ROUNDING_S = 1e-3


class Chain:
    """What of the run's rewards and tools is on it."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._scored, self._made = _walk(events)
        whole = whole_trajectories(events).sort_values("end", kind="stable").drop_duplicates("index", keep="last")
        self._longest = pd.MultiIndex.from_frame(whole[["index", "trajectory"]])

    def rewards(self) -> Intervals:
        """When one of its samples was scored while the Trainer waited for that."""
        rows = self._events.of("sample.reward").drop_duplicates("index", keep="last")
        rows = rows[rows["index"].isin(self._scored)]
        return union(rows["timestamp"].to_numpy(), rows["end"].to_numpy())

    def calls(self, calls: pd.DataFrame) -> Intervals:
        """When one of these was made by the trajectory that its group waited for."""
        held = pd.MultiIndex.from_frame(calls[["index", "trajectory"]]).isin(self._longest)
        rows = calls[held & calls["index"].isin(self._made)]
        return union(rows["timestamp"].to_numpy(), rows["end"].to_numpy())


def _walk(events: Events) -> tuple[list[int], list[int]]:
    """Feed indices of the samples whose reward is on the chain, and of those whose generation is."""
    waits = events.of("trainer.wait_samples")
    begins, ends = waits["timestamp"].to_numpy(), waits["end"].to_numpy()
    leased = events.of("sample.leased")
    leased_at = leased["timestamp"].to_numpy()
    ready = leased["index"].map(newest(events.of("sample.ready"), "timestamp")).to_numpy(dtype="float64")
    samples = _samples(events)
    scored: list[int] = []
    made: list[int] = []
    place = len(waits) - 1
    while place >= 0:
        begin, end = begins[place], ends[place]
        place -= 1
        first, behind = np.searchsorted(leased_at, [begin - _ROUNDING_S, end + _ROUNDING_S])
        late = np.flatnonzero((ready[first:behind] > begin) & (ready[first:behind] <= end + CLOCKS_S))
        if not len(late):
            continue  # all of them were there before
        last = first + late[ready[first:behind][late].argmax()]
        index = int(leased["index"].iloc[last])
        scored.append(index)
        chain, permitted = _generation(samples, index)
        made += chain
        # The Trainer was at what it had got by then.
        place = min(place, int(np.searchsorted(ends, permitted + _ROUNDING_S, side="right")) - 1)
    return scored, made


def _samples(events: Events) -> pd.DataFrame:
    """By feed index, in the order in which they left generation."""
    made, admitted = events.of("sample.generate"), events.of("sample.admitted")
    found = pd.DataFrame({"begun": newest(made, "timestamp"), "generated": newest(made, "end")})
    found["admitted"] = newest(admitted, "timestamp").reindex(found.index).fillna(found["begun"])
    found["permit_s"] = newest(admitted, "permit_wait_s").reindex(found.index).fillna(0.0)
    return found.sort_values("generated", kind="stable")


def _generation(samples: pd.DataFrame, index: int) -> tuple[list[int], float]:
    """This sample and those that had its place before it, back to one that had waited for a permit; and when that was
    given, -inf: none had."""
    if index not in samples.index:
        return [], -np.inf
    begun, generated, admitted, permit_s = (samples[name].to_numpy() for name in samples.columns)
    at = int(samples.index.get_loc(index))
    found = [at]
    while True:
        has_place = begun[at] - admitted[at] <= max(WAITED_S, permit_s[at])
        if has_place and permit_s[at] > WAITED_S:
            return samples.index[found].tolist(), float(admitted[at])
        given = admitted[at] if has_place else begun[at]
        before = _last_before(generated, begun, given + _ROUNDING_S, begun[at])
        if before < 0:
            return samples.index[found].tolist(), -np.inf
        found.append(before)
        at = before


def _last_before(generated: NDArray[np.float64], begun: NDArray[np.float64], at: float, since: float) -> int:
    """Of those that left generation by then, the last that came before `since`; -1: there is none."""
    place = int(np.searchsorted(generated, at, side="right")) - 1
    while place >= 0 and begun[place] >= since:
        place -= 1
    return place
