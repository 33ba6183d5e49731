"""The chaos harness where it needs no run: broken promises are found, faults are dealt and judged, logs are torn."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.ports import Books, Edition, ReplicaReport
from asyncrl.run_state import ProcessInfo, Restart, RunState
from asyncrl.types import SampleId
from benchmarks.chaos import disk, faults, task
from benchmarks.chaos.accounts import Accounts, Fate, surviving, violations
from benchmarks.chaos.faults import KINDS, Kind, Strike

# ------------------------------------------------------------------------------------------------ accounts


def ids(*indices: int) -> list[SampleId]:
    return [SampleId(0, index) for index in indices]


def step(number: int, *indices: int, lineage: int = 0) -> dict[str, Any]:
    return {"lineage": lineage, "step": number, "version": number, "samples": list(map(str, ids(*indices)))}


def back_to(number: int, lineage: int) -> dict[str, Any]:
    return {"lineage": lineage, "rewound_to_step": number}


def good() -> Accounts:
    """Four samples: 1 to 3 trained, after 2 and 3 were trained in vain once; 4 dropped."""
    return Accounts(
        fates=[*(Fate(sample_id, "trained") for sample_id in ids(1, 2, 3)), Fate(SampleId(0, 4), "dropped", "failed")],
        books=Books(fed=4, trained=3, dropped={"failed": 1, "stale": 0}),
        trained=[step(1, 1), step(2, 2, 3), back_to(1, 1), step(2, 3, 2, lineage=1)],
        turns=[(SampleId(0, index), str(place)) for index in (1, 2, 3) for place in range(2)],
    )


def test_a_run_that_kept_its_promises_breaks_none() -> None:
    assert violations(good()) == []


def test_only_a_run_that_was_stopped_may_have_ids_that_wait_to_be_fed_again() -> None:
    fates = [*good().fates, Fate(SampleId(0, 5), "outstanding")]
    assert violations(replace(good(), fates=fates, completed=False)) == []
    assert [found.promise for found in violations(replace(good(), fates=fates))] == ["nothing lost"]
    fed = replace(good(), fates=fates, completed=False, books=Books(fed=5, trained=4, dropped={"failed": 1}))
    assert "books balance" in {found.promise for found in violations(fed)}


def test_what_was_rewound_is_in_no_model() -> None:
    lines = [step(1, 1), step(2, 2), step(3, 3), back_to(2, 1), step(3, 4, lineage=1), back_to(0, 2)]
    assert surviving(lines[:3]) == ids(1, 2, 3)
    assert surviving(lines[:4]) == ids(1, 2)
    assert surviving(lines[:5]) == ids(1, 2, 4)
    assert surviving(lines) == []


@pytest.mark.parametrize(
    ("planted", "promise", "told"),
    [
        ({"trained": [step(1, 1), step(2, 2, 3), step(3, 2)]}, "trained once", "sample_0_2"),
        ({"trained": [step(1, 1), step(2, 2)]}, "nothing lost", "sample_0_3"),
        ({"trained": [step(1, 1), step(2, 2, 3), step(3, 4)]}, "records agree", "sample_0_4"),
        ({"fates": good().fates[:1] + good().fates[2:]}, "nothing lost", "feed index 2"),
        ({"fates": [*good().fates, Fate(SampleId(0, 4), "trained")]}, "each sample once", "feed index 4"),
        ({"fates": [*good().fates[:3], Fate(SampleId(0, 4), "leased")]}, "nothing lost", "sample_0_4 (leased)"),
        ({"fates": [*good().fates[:3], Fate(SampleId(0, 4), "dropped")]}, "dropped with a reason", "sample_0_4"),
        ({"books": Books(fed=5, trained=3, dropped={"failed": 1})}, "books balance", "fed 5"),
        ({"books": Books(fed=4, trained=2, dropped={"failed": 2})}, "books balance", "2 trained in the books, 3"),
        ({"books": Books(fed=4, trained=3, dropped={"stale": 1})}, "books balance", "by reason"),
        ({"turns": [*good().turns, (SampleId(0, 2), "1")]}, "turns once", "sample_0_2/1"),
    ],
)
def test_a_broken_promise_is_found_and_named(planted: Mapping[str, Any], promise: str, told: str) -> None:
    found = [one for one in violations(replace(good(), **planted)) if one.promise == promise]
    assert found, violations(replace(good(), **planted))
    assert told in found[0].told


def test_a_lost_payload_may_be_generated_again() -> None:
    accounts = replace(good(), turns=[*good().turns, (SampleId(0, 2), "1")], generated_anew={SampleId(0, 2)})
    assert violations(accounts) == []


# ------------------------------------------------------------------------------------------------ faults


def kind(name: str) -> Kind:
    (found,) = [kind for kind in KINDS if kind.name == name]
    return found


def replica(name: str, pid: int, engine_pid: int, *, at: float, phase: Any = "serving") -> ReplicaReport:
    return ReplicaReport(name, "node-1", pid, (engine_pid,), phase, at, 0, 1, 0, 0, at)


def running(at: float, **changes: Any) -> RunState:
    processes = (
        ProcessInfo("driver", "driver", 1, ""),
        ProcessInfo("queue", "queue", 2, "node-0"),
        ProcessInfo("rollouter", "rollouter", 3, "node-0"),
        ProcessInfo("trainer", "trainer", 4, "node-0"),
        ProcessInfo("rank", "rank actor/0", 5, "node-0"),
        ProcessInfo("replica", "replica a", 6, "node-1"),
        ProcessInfo("engine", "engine a", 7, "node-1"),
    )
    state = RunState(
        written_at=at,
        started_at=0.0,
        pid=1,
        phase="running",
        experiment="chaos",
        mode="fully_async",
        processes=processes,
        replicas=(replica("a", 6, 7, at=at),),
        published=Edition(0, 1),
    )
    return replace(state, **changes)


def moved(state: RunState, **pids: int) -> tuple[ProcessInfo, ...]:
    """The processes with other pids for these parts."""
    return tuple(process._replace(pid=pids.get(process.part, process.pid)) for process in state.processes)


def struck(name: str, *parts: str) -> Strike:
    before = running(10.0)
    hit = [process for process in before.processes if process.part in parts]
    pids, names = frozenset(p.pid for p in hit), frozenset((p.part, p.name) for p in hit)
    return Strike(1, kind(name), 10.5, pids=pids, parts=names, before=before)


def test_every_kind_comes_once_before_any_comes_again_and_a_seed_decides_the_order() -> None:
    def drawn(seed: int) -> list[str]:
        draws = faults.deck(KINDS, random.Random(seed))
        return [next(draws).name for _ in range(2 * len(KINDS))]

    for half in (drawn(1)[: len(KINDS)], drawn(1)[len(KINDS) :]):
        assert sorted(half) == sorted(kind.name for kind in KINDS)
    assert drawn(1) == drawn(1) != drawn(2)


def test_kinds_are_chosen_by_part_by_name_and_by_what_there_is() -> None:
    chosen = faults.kinds(["queue", "engine stop", "node"], without={"node"})
    assert [kind.name for kind in chosen] == ["engine stop", "queue kill", "queue stop"]


def test_what_is_replaced_together_counts_together() -> None:
    state = running(1.0)
    by_part = {process.part: process for process in state.processes}

    def parts(of: str) -> Sequence[str]:
        return [process.part for process in faults.with_its_own(state.processes, by_part[of], state)]  # type: ignore[index]

    assert parts("trainer") == parts("rank") == ["trainer", "rank"]
    assert parts("engine") == parts("replica") == ["replica", "engine"]
    assert parts("queue") == ["queue"]
    assert [process.name for process in faults.victims(state.processes, "node", "node-1")] == ["replica a", "engine a"]


def test_an_actor_is_over_it_once_another_process_is_at_work() -> None:
    strike = struck("trainer kill", "trainer", "rank")
    begun = Restart("trainer", 2, 11.0, "killed")
    assert faults.recovered_at(strike, running(10.2)) is None, "told before the strike"
    assert faults.recovered_at(strike, running(11.0)) is None, "the old process is still listed"
    new = moved(running(0.0), trainer=44, rank=55)
    assert faults.recovered_at(strike, running(12.0, processes=new, restarts=(begun,))) is None
    assert faults.recovered_at(strike, running(12.0, processes=new, restarting={"trainer": 11.0})) is None
    ended = replace(begun, recovered_at=14.0)
    assert faults.recovered_at(strike, running(15.0, processes=new, restarts=(ended,))) == 14.0


def test_the_queue_is_over_it_once_it_answers_as_another_process() -> None:
    strike = struck("queue kill", "queue")
    new = moved(running(0.0), queue=22)
    assert faults.recovered_at(strike, running(12.0, processes=new, unheard_s={"queue": 1.0})) is None
    assert faults.recovered_at(strike, running(12.5, processes=new)) == 12.5


def test_an_engine_is_over_it_once_as_many_replicas_serve_as_are_wanted() -> None:
    strike = struck("engine kill", "replica", "engine")
    assert faults.recovered_at(strike, running(12.0)) is None, "its last report is of the old engine"
    coming = replica("b", 66, 77, at=20.0, phase="starting")
    assert faults.recovered_at(strike, running(20.0, replicas=(coming,))) is None
    up = replica("b", 66, 77, at=30.0)
    assert faults.recovered_at(strike, running(30.5, replicas=(up,))) == 30.0
    assert faults.recovered_at(strike, running(30.5, replicas=(up,), num_replicas=2)) is None


# ------------------------------------------------------------------------------------------------ files


def journal(run_dir: Path, num_rows: int) -> sqlite3.Connection:
    connection = sqlite3.connect(run_dir / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("CREATE TABLE rows (number INTEGER)")
    for number in range(num_rows):
        connection.execute("INSERT INTO rows VALUES (?)", (number,))
    return connection


@pytest.mark.parametrize("seed", range(6))
def test_a_torn_log_costs_at_most_its_last_commit(tmp_path: Path, seed: int) -> None:
    (tmp_path / "alive").mkdir()
    connection = journal(tmp_path / "alive", 20)
    run_dir = tmp_path / "dead"
    run_dir.mkdir()
    for name in ("journal.db", "journal.db-wal"):  # as a process that was killed leaves them
        (run_dir / name).write_bytes((tmp_path / "alive" / name).read_bytes())
    connection.close()
    told = disk.tear_journal(run_dir, random.Random(seed))
    with sqlite3.connect(run_dir / "journal.db") as again:
        rows = [row[0] for row in again.execute("SELECT number FROM rows ORDER BY number")]
    again.close()
    assert rows == list(range(20 if "behind" in told else 19)), told


def test_a_payload_is_damaged_and_an_empty_directory_is_told(tmp_path: Path) -> None:
    assert "nothing" in disk.flip_payload(tmp_path, random.Random(0))
    assert "nothing" in disk.tear_journal(tmp_path, random.Random(0))
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "1-1.safetensors"
    for seed in range(8):
        path.write_bytes(bytes(1000))
        disk.flip_payload(tmp_path, random.Random(seed))
        assert path.read_bytes() != bytes(1000)


def test_the_reward_function_goes_wrong_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    task.write_reward(path)
    space: dict[str, Any] = {"__file__": str(path), "__name__": "reward"}
    exec(compile(path.read_text(), str(path), "exec"), space)

    def scores() -> list[Any]:
        found = []
        for number in range(40):
            try:
                found.append(str(space["score"]("", f"answer {number}", str(number), {})))
            except RuntimeError:
                found.append("raised")
        return found

    assert set(scores()) == {"1.0"}
    task.go_wrong(path, "raise")
    assert {"raised", "1.0"} == set(scores())
    task.go_wrong(path, "nan")
    assert {"nan", "1.0"} == set(scores())
