"""Weight versions: how stale samples are, over how many versions they were sampled, what a sync costs. Pure."""

from __future__ import annotations

from typing import Any

import pandas as pd

from asyncrl.report.intervals import total, union
from asyncrl.report.lives import Lives
from asyncrl.report.load import Events
from asyncrl.report.numbers import histogram, spread

PHASES = {
    "sync.gather": "gather on rank 0",
    "sync.put": "hand to the weight store",
    "trainer.publish": "publish, both of these within",
    "sync.fetch": "fetch; generation goes on",
    "sync.drain": "drain before the pause",
    "sync.pause": "pause, load within",
    "sync.load": "load",
    "sync.verify": "verify; generation goes on",
    "sync.apply": "until every replica serves it",
}


def staleness(events: Events, lives: Lives) -> dict[str, Any]:
    """Of the samples that were trained and count."""
    trained = events.of("sample.trained")
    trained = trained[trained["index"].isin(lives.trained_in.index)].drop_duplicates("index", keep="last")
    told: dict[str, Any] = {"samples": len(trained)}
    for name, column in (("staleness", "staleness"), ("version_span", "versions")):
        values = trained[column].dropna().to_numpy()
        told[name] = {
            "mean": values.mean() if len(values) else None,
            "max": values.max() if len(values) else None,
            "histogram": histogram(values),
        }
    return told


_OF_REPLICAS = ("request", "sync.fetch", "sync.drain", "sync.pause", "sync.load", "sync.verify")


def weight_sync(events: Events) -> dict[str, Any]:
    """Each phase, over all replicas and syncs, and by replica where the phase is a replica's."""
    phases = []
    for name, meaning in PHASES.items():
        frame = events.of(name)
        if len(frame):
            own = spread(frame["duration_s"].to_numpy()) or {}
            phases.append({"phase": name, "meaning": meaning, **own, "by_replica": _by_replica(frame)})
    return {
        "syncs": len(events.of("sync.apply")),
        "phases": phases,
        "paused_share": _paused_share(events),
    }


def _paused_share(events: Events) -> float | None:
    """Of the time from the first event of each replica to its last; one that was replaced is another one."""
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name in _OF_REPLICAS:
        by = events.of(name).groupby("replica", observed=True)
        for replica, first in by["timestamp"].min().items():
            begins[replica] = min(first, begins.get(replica, first))
        for replica, last in by["end"].max().items():
            ends[replica] = max(last, ends.get(replica, last))
    lived = sum(ends[replica] - begin for replica, begin in begins.items())
    paused = sum(
        total(union(own["timestamp"].to_numpy(), own["end"].to_numpy()))
        for _, own in events.of("sync.pause").groupby("replica", observed=True)
    )
    return paused / lived if lived > 0 else None


def _by_replica(frame: pd.DataFrame) -> list[dict[str, Any]]:
    found = frame.groupby("replica", observed=True)["duration_s"].agg(["count", "median", "max"])
    return [{"replica": replica, **values.to_dict()} for replica, values in found.iterrows()]
