"""What the driver makes of the replicas' reports."""

from __future__ import annotations

from asyncrl.cli.replicas import ReplicaWatch, Seen
from asyncrl.ports import ReplicaPhase, ReplicaReport
from asyncrl.run_state import Restart

NOTHING = Seen((), (), ())


def report(replica: str, at: float, phase: ReplicaPhase = "serving", told: str = "") -> ReplicaReport:
    return ReplicaReport(replica, "node", 7, (), phase, at, 0, 0, 0, 0, at, told)


def test_a_new_name_after_the_first_full_set_is_a_replacement_until_it_serves() -> None:
    watch = ReplicaWatch(2, 60.0)
    assert watch.look([report("a", 1.0, "starting")], 1.0) == NOTHING
    assert watch.look([report("a", 2.0), report("b", 2.0)], 2.0) == NOTHING
    assert watch.look([report("a", 2.5, "broken", "no engine"), report("b", 5.0)], 5.0) == NOTHING
    restart = Restart("replica", 2, 2.5, "no engine", detail="replica c")
    seen = watch.look([report("a", 2.5, "broken", "no engine"), report("b", 6.0), report("c", 6.0, "starting")], 6.0)
    assert seen == Seen((restart,), (), ())
    # the store still knows the one that is gone
    seen = watch.look([report("a", 2.5), report("b", 7.0), report("c", 7.5)], 8.0)
    assert seen.begun == () and [one.recovered_at for one in seen.recovered] == [7.5]
    assert watch.look([report("a", 2.5), report("b", 9.0), report("c", 9.0)], 9.0) == NOTHING


def test_one_that_reports_nothing_hangs_and_is_told_once() -> None:
    watch = ReplicaWatch(2, 60.0)
    stuck = report("a", 1.0)
    assert watch.look([stuck, report("b", 60.0)], 61.0) == NOTHING
    assert watch.look([stuck, report("b", 62.0)], 62.0).hung == (stuck,)
    assert watch.look([stuck, report("b", 63.0)], 63.0) == NOTHING
    assert [one.cause for one in watch.look([stuck, report("b", 64.0), report("c", 64.0)], 64.0).begun] == [
        "replica a (pid 7) or its engine ended or hung"
    ]


def test_the_silence_of_a_store_is_not_a_replicas() -> None:
    watch = ReplicaWatch(2, 60.0)
    watch.look([report("a", 1.0), report("b", 1.0)], 1.0)
    # It was away for two minutes, and its successor has not been told of anybody yet.
    assert watch.look([], 120.0, store_since=119.0) == NOTHING
    assert watch.look([report("a", 121.0)], 121.0, store_since=119.0) == NOTHING
    assert [one.replica for one in watch.look([report("a", 180.0)], 180.0, store_since=119.0).hung] == ["b"]


def test_a_store_that_forgot_the_replicas_changes_nothing() -> None:
    watch = ReplicaWatch(2, 60.0)
    watch.look([report("a", 1.0), report("b", 1.0)], 1.0)
    assert watch.look([], 2.0) == NOTHING
    assert watch.look([report("b", 3.0)], 3.0) == NOTHING
    assert watch.look([report("b", 4.0), report("a", 4.0)], 4.0) == NOTHING
