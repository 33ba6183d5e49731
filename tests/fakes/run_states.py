"""States of a run as the driver writes them: a healthy one that tests vary, and arbitrary ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from asyncrl.core.ports import PartName, QueueStatus, ReplicaPhase, ReplicaReport, SampleCounts, WeightsVersion
from asyncrl.core.waits import Wait
from asyncrl.observe.status.run_status import ProcessInfo, Restart, RunPhase, RunState

NOW = 1_000_000.0


def report(name: str = "0", phase: ReplicaPhase = "serving", **given: Any) -> ReplicaReport:
    values: dict[str, Any] = {
        "replica": name,
        "node_id": "n",
        "pid": 100,
        "engine_pids": (101,),
        "phase": phase,
        "phase_since": NOW - 94,
        "lineage": 0,
        "version": 11,
        "in_flight": 4,
        "generated_tokens": 1000,
        "reported_at": NOW - 0.5,
    }
    return ReplicaReport(**values | given)


def queue_status(**given: Any) -> QueueStatus:
    """Return the status of a queue with leases of 32 samples, 11 trained versions and a closed staleness gate."""
    counts = SampleCounts(fed=416, running=0, ready=30, leased=0, trained=384, dropped={"stale": 2})
    values: dict[str, Any] = {
        "counts": counts,
        "version": 11,
        "ended": False,
        "waiting": {},
        "paced_to": 414,
        "total_samples": 6400,
    }
    return QueueStatus(**values | given)


def running(**given: Any) -> RunState:
    """Return the state of a healthy run, written half a second ago."""
    values: dict[str, Any] = {
        "written_at": NOW - 0.5,
        "started_at": NOW - 1000,
        "pid": 42,
        "phase": "running",
        "experiment": "quickstart",
        "mode": "fully_async",
        "host": "here",
        "total_steps": 200,
        "samples_per_lease": 32,
        "step": 12,
        "version": 11,
        "published": WeightsVersion(0, 11),
        "queue": queue_status(),
        "counts": queue_status().counts,
        "replicas": (report("0"), report("1")),
        "num_replicas": 2,
        "waits": {"trainer": (Wait("samples", 1, 93.5),), "rollouter": ()},
        "processes": (ProcessInfo("rollouter", "rollouter", 7, "n"), ProcessInfo("rank", "rank actor/0", 8, "n")),
        "last_progress_at": NOW - 3,
    }
    return RunState(**values | given)


def rollouter_waits(state: RunState, *waits: Wait) -> RunState:
    return replace(state, waits={**state.waits, "rollouter": waits})


EDGES = [
    "samples",
    "experience",
    "critic",
    "train",
    "publish",
    "checkpoint",
    "model",
    "permit",
    "slot",
    "engine",
    "reward",
    "weights",
    "apply",
    "validation",
    "odd",
]
_small = st.integers(0, 40)
_times = st.floats(NOW - 1e4, NOW + 100)
_waits = st.builds(Wait, st.sampled_from(EDGES), _small, st.floats(0, 1e4), st.booleans())
_counts = st.builds(
    SampleCounts, _small, _small, _small, _small, _small, st.dictionaries(st.sampled_from(["stale", "failed"]), _small)
)
_versions = st.builds(WeightsVersion, _small, _small)
_parts = st.sampled_from(get_args(PartName))
_reports = st.builds(
    report,
    st.sampled_from("012"),
    st.sampled_from(get_args(ReplicaPhase)),
    phase_since=_times,
    reported_at=_times,
    lineage=st.integers(0, 1),
    version=_small,
    in_flight=_small,
    error=st.text(max_size=5),
)
_queues = st.builds(
    queue_status,
    counts=_counts,
    version=_small,
    ended=st.booleans(),
    lineage=st.integers(0, 1),
    paced_to=_small,
    total_samples=st.none() | _small,
)
states = st.builds(
    RunState,
    written_at=_times,
    started_at=_times,
    pid=_small,
    phase=st.sampled_from(get_args(RunPhase)),
    experiment=st.just("x"),
    mode=st.just("sync"),
    host=st.sampled_from(["", "here"]),
    error=st.text(max_size=20),
    total_steps=st.none() | _small,
    samples_per_lease=_small,
    step=_small,
    version=_small,
    lineage=st.integers(0, 2),
    published=st.none() | _versions,
    counts=_counts,
    staleness=st.dictionaries(st.integers(0, 4), _small, max_size=3),
    generated_tokens=_small,
    generated_per_s=st.none() | st.floats(0, 1e4),
    drops=st.dictionaries(st.text(max_size=5), _small, max_size=2),
    queue=st.none() | _queues,
    replicas=st.lists(_reports, max_size=3).map(tuple),
    num_replicas=st.integers(0, 3),
    waits=st.dictionaries(st.sampled_from(["trainer", "rollouter"]), st.lists(_waits, max_size=4).map(tuple)),
    silent_s=st.dictionaries(st.sampled_from(["queue", "store", "rollouter", "trainer"]), st.floats(0, 100)),
    restarting=st.dictionaries(_parts, _times, max_size=2),
    restarts=st.lists(
        st.builds(Restart, _parts, st.integers(2, 4), _times, st.text(max_size=5), st.none() | _times), max_size=3
    ).map(tuple),
    processes=st.lists(
        st.builds(ProcessInfo, st.sampled_from(["queue", "rank", "driver"]), st.just("p"), _small, st.just("n")),
        max_size=3,
    ).map(tuple),
    last_progress_at=_times,
)
