"""Tests of the chaos harness without a run: broken promises, faults, recoveries, and damaged files."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.core.failures import EngineCrashError, InfraError
from asyncrl.core.ports import (
    Accepted,
    GenerateRequest,
    GenerationEvent,
    QueueSnapshot,
    ReplicaReport,
    SampleCounts,
    TurnFinished,
    Unplaced,
    WeightsVersion,
)
from asyncrl.core.types import Provenance, SampleId, SampleMeta, Span, Turn
from asyncrl.observe.status.run_status import ProcessInfo, Restart, RunState
from asyncrl.queue.operations import PermitsGranted, SetAppliedVersion
from asyncrl.queue.state import QueueState
from benchmarks.chaos import disk, faults, task
from benchmarks.chaos.faults import KINDS, InjectedFault
from benchmarks.chaos.promises import BrokenCall, CompletedTurn, Fate, RunRecords, surviving_samples, violations
from benchmarks.chaos.records import forgotten_fates, journal_facts
from benchmarks.chaos.watch import CallWatch, broken_calls, read_broken_calls
from rollouter.serving.client import Delta, ReplicaStream
from tests.fakes.engine import finished_turns
from tests.fakes.samples import make_turn

NAMED = {kind.name: kind for kind in KINDS}

# ------------------------------------------------------------------------------------------------ records


def ids(*indices: int) -> list[SampleId]:
    return [SampleId(0, index) for index in indices]


def step(number: int, *indices: int, lineage: int = 0) -> dict[str, Any]:
    return {"lineage": lineage, "step": number, "version": number, "samples": list(map(str, ids(*indices)))}


def back_to(number: int, lineage: int) -> dict[str, Any]:
    return {"lineage": lineage, "rewound_to_step": number}


def meta(sample_id: SampleId, oldest: int = 0, newest: int = 1, trajectories: int = 2) -> SampleMeta:
    return SampleMeta(sample_id, oldest, newest, trajectories, 8, 100)


def turn(index: int, place: int, *spans: tuple[int, int]) -> CompletedTurn:
    return CompletedTurn(SampleId(0, index), str(place), 4, tuple(Span(*span) for span in spans or ((0, 0), (2, 1))))


def good() -> RunRecords:
    """Return the records of four samples: 1 to 3 are trained, 2 and 3 again after a rewind, and 4 is dropped."""
    return RunRecords(
        fates=[*(Fate(sample_id, "trained") for sample_id in ids(1, 2, 3)), Fate(SampleId(0, 4), "dropped", "failed")],
        counts=SampleCounts(fed=4, trained=3, dropped={"failed": 1, "stale": 0}),
        trained=[step(1, 1), step(2, 2, 3), back_to(1, 1), step(2, 3, 2, lineage=1)],
        turns=[turn(index, place) for index in (1, 2, 3) for place in range(2)],
        metas={sample_id: meta(sample_id) for sample_id in ids(1, 2, 3)},
        rewinds=[WeightsVersion(1, 1)],
        broken_calls=[BrokenCall("sample_0_1/0", (7, 8), (7, 8), (7, 8, 9)), BrokenCall("sample_0_4/0", (7, 8))],
        max_staleness=2,
    )


def test_a_run_that_kept_its_promises_breaks_none() -> None:
    assert violations(good()) == []


def test_a_turn_may_move_to_a_replica_that_loads_the_newer_version_later() -> None:
    for spans in ([(0, 1), (2, 0)], [(0, 2), (2, 0)]):
        moved = replace(good(), turns=[turn(1, 0, *spans), *good().turns[1:]], rewinds=[], metas={})
        assert violations(moved) == []
        served = {SampleId(0, 1): 1}
        assert [one.promise for one in violations(replace(moved, served_when_fed=served))] == ["spans in order"]


def test_what_all_replicas_served_when_a_sample_was_fed_comes_from_the_journal() -> None:
    facts = journal_facts(
        [
            PermitsGranted("a", tuple(ids(1, 2))),
            SetAppliedVersion(version=3, lineage=0),
            PermitsGranted("b", tuple(ids(2, 3))),
        ]
    )
    assert facts.served_when_fed == {SampleId(0, 1): 0, SampleId(0, 2): 0, SampleId(0, 3): 3}


def test_samples_that_the_journal_has_forgotten_follow_from_its_counts_and_the_trainers_record() -> None:
    at_beginning = SampleCounts(fed=4, running=1, trained=2, dropped={"failed": 1})
    begin = QueueState.begin(10, QueueSnapshot(5, (SampleId(0, 3),), at_beginning, 0), keeps_payloads=True)
    known = [Fate(SampleId(0, 3), "trained"), Fate(SampleId(0, 5), "dropped", "stale")]
    counts = SampleCounts(fed=5, trained=3, dropped={"failed": 1, "stale": 1})
    forgotten = forgotten_fates(begin, known, counts, ids(1, 2, 3))
    assert forgotten == [
        *(Fate(sample_id, "trained") for sample_id in ids(1, 2)),
        Fate(SampleId(0, 4), "dropped", "failed"),
    ]
    records = RunRecords(fates=[*forgotten, *known], counts=counts, trained=[step(1, 1, 2, 3)])
    assert violations(records) == []
    lost = forgotten_fates(begin, known, counts, ids(1, 3))
    broken = {one.promise for one in violations(replace(records, fates=[*lost, *known], trained=[step(1, 1, 3)]))}
    assert broken == {"dropped with a reason", "sample counts are consistent"}


def test_only_a_stopped_run_may_have_outstanding_samples() -> None:
    fates = [*good().fates, Fate(SampleId(0, 5), "outstanding")]
    assert violations(replace(good(), fates=fates, completed=False)) == []
    assert [found.promise for found in violations(replace(good(), fates=fates))] == ["nothing lost"]
    fed = replace(good(), fates=fates, completed=False, counts=SampleCounts(fed=5, trained=4, dropped={"failed": 1}))
    assert "sample counts are consistent" in {found.promise for found in violations(fed)}


def test_rewound_steps_are_not_in_the_surviving_model() -> None:
    lines = [step(1, 1), step(2, 2), step(3, 3), back_to(2, 1), step(3, 4, lineage=1), back_to(0, 2)]
    assert surviving_samples(lines[:3]) == ids(1, 2, 3)
    assert surviving_samples(lines[:4]) == ids(1, 2)
    assert surviving_samples(lines[:5]) == ids(1, 2, 4)
    assert surviving_samples(lines) == []


@pytest.mark.parametrize(
    ("planted", "promise", "details"),
    [
        ({"trained": [step(1, 1), step(2, 2, 3), step(3, 2)]}, "trained once", "sample_0_2"),
        ({"trained": [step(1, 1), step(2, 2)]}, "nothing lost", "sample_0_3"),
        ({"trained": [step(1, 1), step(2, 2, 3), step(3, 4)]}, "records agree", "sample_0_4"),
        ({"fates": [*good().fates[:1], *good().fates[2:]]}, "nothing lost", "feed index 2"),
        ({"fates": [*good().fates, Fate(SampleId(0, 4), "trained")]}, "each sample once", "feed index 4"),
        ({"fates": [*good().fates[:3], Fate(SampleId(0, 4), "leased")]}, "nothing lost", "sample_0_4 (leased)"),
        ({"fates": [*good().fates[:3], Fate(SampleId(0, 4), "dropped")]}, "dropped with a reason", "sample_0_4"),
        ({"counts": SampleCounts(fed=5, trained=3, dropped={"failed": 1})}, "sample counts are consistent", "fed 5"),
        (
            {"counts": SampleCounts(fed=4, trained=2, dropped={"failed": 2})},
            "sample counts are consistent",
            "2 trained in the sample counts, 3",
        ),
        ({"counts": SampleCounts(fed=4, trained=3, dropped={"stale": 1})}, "sample counts are consistent", "by reason"),
        ({"turns": [*good().turns, turn(2, 1)]}, "turns once", "sample_0_2/1"),
        (
            {"metas": {SampleId(0, 1): meta(SampleId(0, 1), 1, 2)}},
            "versions in order",
            "version 2, trained at 1",
        ),
        ({"max_staleness": 1}, "staleness bound", "sample_0_3 (made by version 0, trained at 2)"),
        (
            {"metas": {SampleId(0, 3): meta(SampleId(0, 3), 1, 1)}},
            "records agree",
            "versions 1 to 1; turns: 0",
        ),
        (
            {"turns": [turn(1, 0, (0, 2), (2, 0))], "served_when_fed": {SampleId(0, 1): 1}},
            "spans in order",
            "sample_0_1/0",
        ),
        ({"turns": [turn(1, 0, (1, 0))]}, "spans in order", "sample_0_1/0"),
        ({"turns": [turn(1, 0, (0, 0), (4, 1))]}, "spans in order", "sample_0_1/0"),
        ({"turns": [turn(1, 0, (0, 0), (2, 0))], "rewinds": []}, "spans in order", "sample_0_1/0"),
        ({"broken_calls": [BrokenCall("x/0", (7, 8), ())]}, "tokens outlive their engine", "2 tokens received, 0 kept"),
        (
            {"broken_calls": [BrokenCall("x/0", (7, 8), None, (7, 9, 8))]},
            "tokens outlive their engine",
            "x/0 (2 tokens",
        ),
    ],
)
def test_a_broken_promise_is_found_and_named(planted: Mapping[str, Any], promise: str, details: str) -> None:
    found = [one for one in violations(replace(good(), **planted)) if one.promise == promise]
    assert found, violations(replace(good(), **planted))
    assert details in found[0].details


def test_a_lost_payload_may_be_generated_again() -> None:
    again = turn(2, 1, (0, 3))
    newer = {**good().metas, SampleId(0, 2): meta(SampleId(0, 2), 3, 3)}
    records = replace(good(), turns=[*good().turns, again], metas=newer, generated_anew={SampleId(0, 2)})
    assert violations(records) == []


def test_a_sample_whose_record_was_read_too_late_the_first_time_may_be_replayed_after_a_restart() -> None:
    """Its turns were generated by version 0; what became READY is the record, of version 1."""
    replayed = meta(SampleId(0, 3), 1, 1)._replace(provenance=Provenance.REPLAYED)
    assert violations(replace(good(), metas={**good().metas, SampleId(0, 3): replayed})) == []


# ------------------------------------------------------------------------------------------------ the watch


def request(name: str, so_far: Turn | None = None) -> GenerateRequest:
    return GenerateRequest(name, np.array([1], dtype=np.int32), {"max_tokens": 8}, so_far)


def noted() -> tuple[Callable[[Any], None], list[Any]]:
    lines: list[Any] = []
    return lines.append, lines


async def call(*events: Accepted | Delta, error: Exception | None = None) -> ReplicaStream:
    for one in events:
        yield one if isinstance(one, Accepted) else [one]
    if error is not None:
        raise error


async def finish(watch: CallWatch, turns: Mapping[str, Turn]) -> None:
    async def events() -> AsyncGenerator[GenerationEvent, None]:
        for number, turn in enumerate(turns.values()):
            yield TurnFinished(number, turn)

    await finished_turns(watch.record_turns(events(), [request(name) for name in turns]))


async def test_tokens_reported_before_a_crash_are_compared_with_the_final_turn() -> None:
    put, lines = noted()
    watch = CallWatch(put)
    names = [request("a/0-1"), request("a/1-1")]
    died = call(Delta(0, make_turn(3, 2), False), Delta(0, make_turn(5, 1), False), error=EngineCrashError("it died"))
    with pytest.raises(EngineCrashError):
        async for _ in watch.record_failures(died, names):
            pass
    async for _ in watch.record_failures(call(), [request("a/0-2", make_turn(3, 3)), request("a/1-2")]):
        pass
    await finish(watch, {"a/0": make_turn(3, 4), "a/1": make_turn(8, 1)})
    await finish(watch, {"b/0": make_turn(3, 4)})
    first, second = broken_calls(lines)
    assert first._replace(at=0.0) == BrokenCall("a/0", (3, 4, 5), (3, 4, 5), (3, 4, 5, 6))
    assert second._replace(at=0.0) == BrokenCall("a/1", (), (), (8,))
    assert violations(replace(good(), broken_calls=[first, second])) == []


async def test_tokens_of_an_abandoned_call_may_be_lost(tmp_path: Path) -> None:
    put, lines = noted()
    watch = CallWatch(put)
    for _ in range(2):  # the sample is requeued under the same name
        with pytest.raises(InfraError):
            died = call(Accepted("replica-0"), Delta(0, make_turn(3, 2), False), error=InfraError("gone"))
            async for _ in watch.record_failures(died, [request("a/0-1")]):
                pass

        async def events() -> AsyncGenerator[GenerationEvent, None]:
            yield Unplaced()

        given_up = watch.record_turns(events(), [request("a/0")])
        await anext(given_up)
        await given_up.aclose()
    torn = "".join(json.dumps(line) + "\n" for line in lines) + '{"request": "a/0", "tur'
    (tmp_path / "1.jsonl").write_text(torn)
    assert [one._replace(at=0.0) for one in read_broken_calls(tmp_path)] == [BrokenCall("a/0", (3, 4))] * 2


# ------------------------------------------------------------------------------------------------ faults


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
        published=WeightsVersion(0, 1),
    )
    return replace(state, **changes)


def moved(state: RunState, **pids: int) -> tuple[ProcessInfo, ...]:
    """Return the processes with new pids for these parts."""
    return tuple(process._replace(pid=pids.get(process.part, process.pid)) for process in state.processes)


def injected(name: str, *parts: str) -> InjectedFault:
    before = running(10.0)
    hit = [process for process in before.processes if process.part in parts]
    pids, names = frozenset(p.pid for p in hit), frozenset((p.part, p.name) for p in hit)
    return InjectedFault(1, NAMED[name], 10.5, pids=pids, parts=names, before=before)


def test_every_kind_of_fault_occurs_once_before_any_repeats_in_an_order_set_by_the_seed() -> None:
    def drawn(seed: int) -> list[str]:
        draws = faults.draw_kinds(KINDS, random.Random(seed))
        return [next(draws).name for _ in range(sum(kind.weight for kind in KINDS))]

    for seed in range(3):
        assert sorted(drawn(seed)[: len(KINDS)]) == sorted(kind.name for kind in KINDS)
        assert Counter(drawn(seed)) == {kind.name: kind.weight for kind in KINDS}
    assert drawn(1) == drawn(1) != drawn(2)


def test_most_faults_hit_actors_and_engines() -> None:
    drawn = list(islice(faults.draw_kinds(KINDS, random.Random(3)), 100))
    counts = Counter(kind.target for kind in drawn)
    assert sum(counts[target] for target in faults.ACTORS | faults.ENGINES) >= 75
    assert sum(kind.ends_launch for kind in drawn) <= 15


def test_a_hundred_faults_fit_into_a_planned_round() -> None:
    """The plan uses recovery times in seconds that were measured on two idle cores."""
    takes: dict[str, float] = {
        **dict.fromkeys(faults.ACTORS, 15.0), **dict.fromkeys(faults.ENGINES, 55.0),
        **dict.fromkeys({kind.target for kind in KINDS if kind.ends_launch}, 70.0), "reward": 12.0,
    }  # fmt: skip
    rng = random.Random(1)
    now, limit_s = 80.0, 75 * 60.0
    for number, fault in enumerate(islice(faults.draw_kinds(KINDS, rng), 100)):
        now += faults.gap_s(rng, (1.0, 12.0), done=number, planned=100, elapsed_s=now, limit_s=limit_s)
        now += takes[fault.target]
    assert now < limit_s


def test_a_round_that_is_late_makes_the_shortest_pauses() -> None:
    gap = partial(faults.gap_s, random.Random(0), (1.0, 12.0), limit_s=100.0)
    assert gap(done=4, planned=10, elapsed_s=60.0) == 1.0
    assert gap(done=7, planned=10, elapsed_s=60.0) > 1.0
    assert gap(done=0, planned=None, elapsed_s=60.0) > 1.0


def test_fault_kinds_are_selected_by_part_name_and_availability() -> None:
    chosen = faults.kinds(["queue", "engine stop", "node"], without={"node"})
    assert [kind.name for kind in chosen] == ["engine stop", "queue kill", "queue stop"]
    assert [kind.name for kind in faults.kinds(["engine stop idle"])] == ["engine stop idle"]


def test_an_engine_is_idle_once_its_replica_reports_no_requests() -> None:
    (engine,) = [process for process in running(1.0).processes if process.part == "engine"]
    dry, other = replica("a", 6, 7, at=20.0), replica("b", 66, 77, at=20.0)
    busy = replace(dry, in_flight=1)
    assert not faults.is_idle(engine, running(21.0, replicas=(busy, other)), since=10.0)
    assert not faults.is_idle(engine, running(21.0, replicas=(dry,)), since=20.5), (
        "the report was made before the fault"
    )
    assert faults.is_idle(engine, running(21.0, replicas=(dry,)), since=10.0)


def test_parts_that_are_replaced_together_count_as_one() -> None:
    state = running(1.0)
    by_part = {process.part: process for process in state.processes}

    def parts(of: str) -> Sequence[str]:
        return [process.part for process in faults.replaced_together(state.processes, by_part[of], state)]  # type: ignore[index]

    assert parts("trainer") == parts("rank") == ["trainer", "rank"]
    assert parts("engine") == parts("replica") == ["replica", "engine"]
    assert parts("queue") == ["queue"]
    on_node = faults.target_processes(state.processes, "node", "node-1")
    assert [process.name for process in on_node] == ["replica a", "engine a"]


def test_an_actor_has_recovered_once_its_successor_works() -> None:
    fault = injected("trainer kill", "trainer", "rank")
    begun = Restart("trainer", 2, 11.0, "killed")
    assert faults.recovered_at(fault, running(10.2)) is None, "written before the fault"
    assert faults.recovered_at(fault, running(11.0)) is None, "the old process is still listed"
    new = moved(running(0.0), trainer=44, rank=55)
    assert faults.recovered_at(fault, running(12.0, processes=new, restarts=(begun,))) is None
    assert faults.recovered_at(fault, running(12.0, processes=new, restarting={"trainer": 11.0})) is None
    ended = replace(begun, recovered_at=14.0)
    assert faults.recovered_at(fault, running(15.0, processes=new, restarts=(ended,))) == 14.0


def test_the_queue_has_recovered_once_its_successor_answers() -> None:
    fault = injected("queue kill", "queue")
    new = moved(running(0.0), queue=22)
    assert faults.recovered_at(fault, running(12.0, processes=new, silent_s={"queue": 1.0})) is None
    assert faults.recovered_at(fault, running(12.5, processes=new)) == 12.5


def test_an_engine_has_recovered_once_enough_replicas_serve() -> None:
    fault = injected("engine kill", "replica", "engine")
    assert faults.recovered_at(fault, running(12.0)) is None, "the last report comes from the old engine"
    coming = replica("b", 66, 77, at=20.0, phase="starting")
    assert faults.recovered_at(fault, running(20.0, replicas=(coming,))) is None
    up = replica("b", 66, 77, at=30.0)
    assert faults.recovered_at(fault, running(30.5, replicas=(up,))) == 30.0
    assert faults.recovered_at(fault, running(30.5, replicas=(up,), num_replicas=2)) is None


def test_a_stopped_driver_has_recovered_once_it_knows_every_part() -> None:
    fault = injected("driver stop", "driver")
    stale = (replica("a", 6, 7, at=10.2),)
    assert faults.driver_back_at(fault, running(10.2)) is None, "written before it continued"
    assert faults.driver_back_at(fault, running(12.0, replicas=stale)) is None
    assert faults.driver_back_at(fault, running(12.0, silent_s={"queue": 9.0})) is None
    assert faults.driver_back_at(fault, running(12.0, restarting={"trainer": 11.0})) is None
    assert faults.driver_back_at(fault, running(12.0)) == 12.0


def test_only_replacements_since_the_fault_are_reported() -> None:
    earlier, later = Restart("queue", 2, 1.0, "killed"), Restart("trainer", 2, 11.0, "it did not answer")
    before = running(10.0, restarts=(earlier,))
    assert faults.replaced(before, running(12.0, restarts=(replace(earlier, recovered_at=10.5),))) == []
    assert faults.replaced(before, running(12.0, restarts=(earlier, later))) == ["trainer: it did not answer"]


def test_a_silent_replica_is_not_a_working_part() -> None:
    gone = replica("a", 6, 7, at=1.0)
    assert {process.part for process in faults.working_processes(running(2.0, replicas=(gone,)))} == {
        "queue", "rollouter", "trainer", "rank", "replica", "engine",
    }  # fmt: skip
    assert {process.part for process in faults.working_processes(running(20.0, replicas=(gone,)))} == {
        "queue", "rollouter", "trainer", "rank",
    }  # fmt: skip


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
def test_a_torn_log_loses_no_committed_row(tmp_path: Path, seed: int) -> None:
    (tmp_path / "alive").mkdir()
    connection = journal(tmp_path / "alive", 20)
    run_dir = tmp_path / "dead"
    run_dir.mkdir()
    for name in ("journal.db", "journal.db-wal"):  # a killed process leaves these files
        (run_dir / name).write_bytes((tmp_path / "alive" / name).read_bytes())
    connection.close()
    disk.tear_journal(run_dir, random.Random(seed))
    with sqlite3.connect(run_dir / "journal.db") as again:
        rows = [row[0] for row in again.execute("SELECT number FROM rows ORDER BY number")]
    again.close()
    assert rows == list(range(20))


def test_payloads_are_damaged_if_the_run_has_any(tmp_path: Path) -> None:
    for damage in (disk.flip_payload, disk.tear_journal):
        with pytest.raises(disk.NothingToDamageError):
            damage(tmp_path, random.Random(0))
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "1-1.safetensors"
    for seed in range(8):
        path.write_bytes(bytes(1000))
        disk.flip_payload(tmp_path, random.Random(seed))
        assert path.read_bytes() != bytes(1000)


def test_the_reward_function_fails_on_demand(tmp_path: Path) -> None:
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
    assert task.num_failed_calls(path) == 0
    task.start_failing(path, "raise")
    assert {"raised", "1.0"} == set(found := scores())
    assert task.num_failed_calls(path) == found.count("raised")
    task.start_failing(path, "nan")
    assert {"nan", "1.0"} == set(scores())
