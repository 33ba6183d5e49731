"""What the driver makes of the replicas' reports."""

from __future__ import annotations

from asyncrl.cli.replicas import ReplicaWatch, Seen
from asyncrl.ports import ReplicaPhase, ReplicaReport
from asyncrl.run_state import Restart

NOTHING = Seen((), (), ())


def report(replica: str, at: float, phase: ReplicaPhase = "serving", told: str = "") -> ReplicaReport:
    return ReplicaReport(replica, "node", 7, (), phase, at, 0, 0, 0, 0, at, told)


def test_a_new_name_after_the_first_full_set_is_a_replacement_until_it_serves() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
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
    watch = ReplicaWatch(2, 60.0, 600.0)
    stuck = report("a", 1.0)
    assert watch.look([stuck, report("b", 60.0)], 61.0) == NOTHING
    assert watch.look([stuck, report("b", 62.0)], 62.0).hung == (stuck,)
    assert watch.look([stuck, report("b", 63.0)], 63.0) == NOTHING
    assert [one.cause for one in watch.look([stuck, report("b", 64.0), report("c", 64.0)], 64.0).begun] == [
        "replica a (pid 7) or its engine ended or hung"
    ]


def test_one_that_hangs_while_another_one_is_replaced_is_told() -> None:
    """Two are silent, and it is the other one that is gone."""
    watch = ReplicaWatch(2, 60.0, 600.0)
    hangs, dead = report("a", 1.0), report("b", 2.0)
    assert watch.look([hangs, dead], 2.0) == NOTHING
    assert len(watch.look([hangs, dead, report("c", 10.0)], 10.0).begun) == 1
    assert hangs in watch.look([hangs, dead, report("c", 61.5)], 61.5).hung
    seen = watch.look([hangs, dead, report("c", 64.0), report("d", 64.0)], 64.0)
    assert [one.cause for one in seen.begun] == ["replica b (pid 7) or its engine ended or hung"]
    assert hangs not in seen.hung


def test_one_that_was_taken_for_gone_and_reports_is_there_and_the_other_one_is_not() -> None:
    """`b` died just after its report, and its successor came before the next one of `a`."""
    watch = ReplicaWatch(2, 60.0, 600.0)
    watch.look([report("a", 1.0), report("b", 1.5)], 1.5)
    assert len(watch.look([report("a", 1.0), report("b", 1.5), report("c", 1.8)], 1.8).begun) == 1
    for second in range(2, 1000):
        now = float(second)
        seen = watch.look([report("a", now), report("b", 1.5), report("c", now)], now)
        assert seen.begun == () and seen.missing == ()
        assert {one.replica for one in seen.hung} <= {"b"}


def test_the_silence_of_a_store_is_not_a_replicas() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    watch.look([report("a", 1.0), report("b", 1.0)], 1.0)
    # It was away for two minutes, and its successor has not been told of anybody yet.
    assert watch.look([], 120.0, store_since=119.0) == NOTHING
    assert watch.look([report("a", 121.0)], 121.0, store_since=119.0) == NOTHING
    assert [one.replica for one in watch.look([report("a", 180.0)], 180.0, store_since=119.0).hung] == ["b"]


def test_a_store_that_forgot_the_replicas_changes_nothing() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    watch.look([report("a", 1.0), report("b", 1.0)], 1.0)
    assert watch.look([], 2.0) == NOTHING
    assert watch.look([report("b", 3.0)], 3.0) == NOTHING
    assert watch.look([report("b", 4.0), report("a", 4.0)], 4.0) == NOTHING


def test_one_in_whose_place_none_comes_is_missed_once() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    gone = report("a", 1.0, "broken", "no engine")
    watch.look([gone, report("b", 1.0)], 1.0)
    assert watch.look([gone, report("b", 62.0)], 62.0) == Seen((), (), (gone,))
    assert watch.look([gone, report("b", 662.0)], 662.0) == NOTHING
    # Those that Serve starts in its place end before they report anything, again and again.
    assert watch.look([gone, report("b", 663.0)], 663.0) == Seen((), (), (), (gone,))
    assert watch.look([gone, report("b", 664.0)], 664.0) == NOTHING


def test_one_that_hung_while_nobody_looked_is_not_missed_before_it_is_ended() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    stuck = report("a", 1.0)
    watch.look([stuck, report("b", 1.0)], 1.0)
    # The driver was stopped for an hour: only now it can end what Serve does not see hanging.
    assert watch.look([stuck, report("b", 3600.0)], 3600.0) == Seen((), (), (stuck,))
    assert watch.look([stuck, report("b", 4200.0)], 4200.0) == NOTHING
    assert watch.look([stuck, report("b", 4201.0)], 4201.0).missing == (stuck,)


def test_one_that_is_heard_of_again_may_hang_again() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    watch.look([report("a", 1.0), report("b", 1.0)], 1.0)
    assert [one.replica for one in watch.look([report("b", 100.0)], 100.0).hung] == ["a"]
    assert watch.look([report("a", 110.0), report("b", 110.0)], 110.0) == NOTHING
    later = watch.look([report("b", 900.0)], 900.0)
    assert ([one.replica for one in later.hung], later.missing) == (["a"], ())


def test_one_that_has_told_that_it_starts_is_not_missed() -> None:
    watch = ReplicaWatch(2, 60.0, 600.0)
    gone = report("a", 1.0)
    watch.look([gone, report("b", 1.0)], 1.0)
    watch.look([gone, report("b", 600.0), report("c", 600.0, "starting")], 600.0)
    assert watch.look([gone, report("b", 850.0), report("c", 850.0, "starting")], 900.0) == NOTHING
    assert [one.replica for one in watch.look([report("b", 950.0)], 950.0).hung] == ["c"]
    assert [one.replica for one in watch.look([report("b", 1551.0)], 1551.0).missing] == ["c"]
