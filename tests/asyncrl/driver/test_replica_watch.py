"""The driver finds replaced, unresponsive and missing replicas by their reports."""

from __future__ import annotations

import pytest

from asyncrl.core.ports import ReplicaPhase, ReplicaReport
from asyncrl.driver.supervision import MAX_GONE, ReplicaChanges, ReplicaWatch
from asyncrl.observe.status.run_status import Restart

NOTHING = ReplicaChanges()


def report(replica: str, at: float, phase: ReplicaPhase = "serving", error: str = "") -> ReplicaReport:
    return ReplicaReport(replica, "node", 7, (), phase, at, 0, 0, 0, 0, at, error)


def watch_until(watch: ReplicaWatch, end: float, *silent: ReplicaReport) -> list[ReplicaReport]:
    """Let replica `b` report each minute until `end`, and return the replicas that were reported as missing."""
    missing: list[ReplicaReport] = []
    now = watch._updated_at or 0.0
    while now < end:
        now = min(now + 60.0, end)
        missing += watch.update([*silent, report("b", now)], now).missing
    return missing


@pytest.fixture
def watch() -> ReplicaWatch:
    return ReplicaWatch(2, limit_s=60.0, start_s=600.0)


def test_a_new_replica_after_all_have_reported_is_a_replacement_and_recovers_when_it_serves(
    watch: ReplicaWatch,
) -> None:
    assert watch.update([report("a", 1.0, "starting")], 1.0) == NOTHING
    assert watch.update([report("a", 2.0), report("b", 2.0)], 2.0) == NOTHING
    assert watch.update([report("a", 2.5, "broken", "no engine"), report("b", 5.0)], 5.0) == NOTHING
    restart = Restart("replica", 2, 2.5, "no engine", detail="replica c")
    seen = watch.update([report("a", 2.5, "broken", "no engine"), report("b", 6.0), report("c", 6.0, "starting")], 6.0)
    assert seen == ReplicaChanges((restart,), (), ())
    # The store still has the report of the replica that died.
    seen = watch.update([report("a", 2.5), report("b", 7.0), report("c", 7.5)], 8.0)
    assert seen.replaced == () and [one.recovered_at for one in seen.recovered] == [7.5]
    assert watch.update([report("a", 2.5), report("b", 9.0), report("c", 9.0)], 9.0) == NOTHING


def test_a_silent_replica_is_reported_as_unresponsive_once(watch: ReplicaWatch) -> None:
    stuck = report("a", 1.0)
    assert watch.update([stuck, report("b", 60.0)], 61.0) == NOTHING
    assert watch.update([stuck, report("b", 62.0)], 62.0).unresponsive == (stuck,)
    assert watch.update([stuck, report("b", 63.0)], 63.0) == NOTHING
    assert [one.cause for one in watch.update([stuck, report("b", 64.0), report("c", 64.0)], 64.0).replaced] == [
        "replica a (pid 7) or its engine ended or hung"
    ]


def test_a_replica_that_hangs_while_another_is_replaced_is_unresponsive(watch: ReplicaWatch) -> None:
    """Two replicas are silent, and the one with the newer report is the one that was replaced."""
    hangs, dead = report("a", 1.0), report("b", 2.0)
    assert watch.update([hangs, dead], 2.0) == NOTHING
    assert len(watch.update([hangs, dead, report("c", 10.0)], 10.0).replaced) == 1
    assert hangs in watch.update([hangs, dead, report("c", 61.5)], 61.5).unresponsive
    seen = watch.update([hangs, dead, report("c", 64.0), report("d", 64.0)], 64.0)
    assert [one.cause for one in seen.replaced] == ["replica b (pid 7) or its engine ended or hung"]
    assert hangs not in seen.unresponsive


def test_a_report_of_a_replica_presumed_dead_means_that_another_one_died(watch: ReplicaWatch) -> None:
    """`b` died just after its report, and the successor of `b` reported before `a` reported again."""
    watch.update([report("a", 1.0), report("b", 1.5)], 1.5)
    # Only the report of `a` is old, because it was delayed.
    assert len(watch.update([report("a", 1.0), report("b", 1.5), report("c", 6.2)], 6.2).replaced) == 1
    for second in range(7, 1000):
        now = float(second)
        seen = watch.update([report("a", now), report("b", 1.5), report("c", now)], now)
        assert seen.replaced == () and seen.missing == ()
        assert {one.replica for one in seen.unresponsive} <= {"b"}


@pytest.mark.parametrize("fewer", [True, False])
def test_a_starting_replica_that_serve_ends_as_planned_is_no_failure(watch: ReplicaWatch, *, fewer: bool) -> None:
    """The run wants one replica instead of two and two again, before the second one has started."""
    watch.update([report("a", 1.0), report("b", 1.0, "starting")], 1.0)
    if fewer:
        watch.num_replicas = 1
    ended = report("b", 3.0, "starting")
    assert watch.update([report("a", 3.0), ended], 3.0) == NOTHING
    watch.num_replicas = 2
    assert watch.update([report("a", 9.0), ended], 9.0) == NOTHING
    replaced = watch.update([report("a", 20.0), ended, report("c", 20.0, "starting")], 20.0).replaced
    assert len(replaced) == (0 if fewer else 1)
    # A later failure counts.
    watch.update([report("a", 30.0), report("c", 30.0)], 30.0)
    assert len(watch.update([report("a", 40.0), report("c", 30.0), report("d", 40.0)], 40.0).replaced) == 1


def test_a_replica_that_is_replaced_at_once_counts_when_it_is_silent(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.5)], 1.5)
    replaced = []
    for second in range(2, 60):
        now = float(second)
        seen = watch.update([report("a", now), report("b", 1.5), report("c", now)], now)
        replaced += [(second, one.detail) for one in seen.replaced]
        assert seen.unresponsive == seen.missing == ()
    assert replaced == [(7, "replica c")]


@pytest.mark.parametrize("wanted", [2, None])
def test_a_replica_that_leaves_as_planned_is_neither_replaced_nor_missing(
    watch: ReplicaWatch, wanted: int | None
) -> None:
    """With as many replicas wanted as before, its node is drained: the next one joins before it leaves."""
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    watch.num_replicas = wanted
    for second in range(2, 1000):
        now = float(second)
        old = report("a", now) if second < 20 else report("a", 20.0, "leaving")
        assert watch.update([old, report("b", now), *[report("c", now)] * (second > 5)], now) == NOTHING


def test_fewer_wanted_replicas_are_not_missing_even_without_a_last_report(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    watch.num_replicas = 1
    gone = report("a", 5.0)
    found = [watch.update([gone, report("b", float(second))], float(second)) for second in range(5, 1500)]
    assert [one for one in found if one != NOTHING] == [ReplicaChanges((), (), (gone,))], "its process is ended"


def test_a_replica_that_joins_because_more_are_wanted_replaces_no_other(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    watch.num_replicas = 3
    # `a` ends while the third replica joins, and a fourth one replaces it.
    found = [watch.update([report("a", 1.0), report("b", now), report("c", now)], now) for now in (9.0, 10.0)]
    assert found == [NOTHING, NOTHING]
    seen = watch.update([report("a", 1.0), report("b", 11.0), report("c", 11.0), report("d", 11.0)], 11.0)
    assert [one.detail for one in seen.replaced] == ["replica d"]


def test_a_silent_store_does_not_make_replicas_unresponsive(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    # The store was down for two minutes, and the restarted one has no report yet.
    assert watch.update([], 120.0, store_since=119.0) == NOTHING
    assert watch.update([report("a", 121.0)], 121.0, store_since=119.0) == NOTHING
    assert [one.replica for one in watch.update([report("a", 180.0)], 180.0, store_since=119.0).unresponsive] == ["b"]


def test_a_restarted_store_without_reports_changes_nothing(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    assert watch.update([], 2.0) == NOTHING
    assert watch.update([report("b", 3.0)], 3.0) == NOTHING
    assert watch.update([report("b", 4.0), report("a", 4.0)], 4.0) == NOTHING


def test_a_replica_that_is_not_replaced_is_reported_as_missing_once(watch: ReplicaWatch) -> None:
    gone = report("a", 1.0, "broken", "no engine")
    watch.update([gone, report("b", 1.0)], 1.0)
    assert watch.update([gone, report("b", 62.0)], 62.0) == ReplicaChanges((), (), (gone,))
    assert watch_until(watch, 662.0, gone) == []
    # The replicas that Serve starts in its place end before their first report, again and again.
    assert watch.update([gone, report("b", 663.0)], 663.0) == ReplicaChanges((), (), (), (gone,))
    assert watch.update([gone, report("b", 664.0)], 664.0) == NOTHING


def test_the_run_goes_on_without_a_lost_replica_while_there_is_no_room_for_its_successor(watch: ReplicaWatch) -> None:
    lost = report("a", 1.0)
    watch.update([lost, report("b", 1.0)], 1.0)
    for now in range(62, 3600, 60):
        seen = watch.update([lost, report("b", float(now))], float(now), has_room=False)
        assert (seen.missing, seen.num_without_room) == ((), 1)
    # A node joins, so the successor has the usual time to start.
    assert watch_until(watch, now + 599.0, lost) == []
    joined = [lost, report("b", now + 600.0), report("c", now + 600.0, "starting")]
    assert [one.detail for one in watch.update(joined, now + 600.0).replaced] == ["replica c"]


def test_a_successor_that_has_room_and_does_not_start_is_missing(watch: ReplicaWatch) -> None:
    lost = report("a", 1.0)
    watch.update([lost, report("b", 1.0)], 1.0)
    watch.update([lost, report("b", 1000.0)], 1000.0, has_room=False)
    assert watch_until(watch, 1660.0, lost) == [lost]


def test_without_room_the_run_fails_if_no_other_replica_serves(watch: ReplicaWatch) -> None:
    lost = report("a", 1.0)
    watch.update([lost, report("b", 1.0)], 1.0)
    watch.update([lost, report("b", 1000.0)], 1000.0, has_room=False)
    missing = []
    for now in range(1001, 1700):  # the other one is lost, too
        seen = watch.update([lost, report("b", 1000.0)], float(now), has_room=False)
        missing += [(one.replica, now) for one in seen.missing]
        assert seen.num_without_room == (now <= 1060)
    assert missing == [("a", 1661), ("b", 1662)]


def test_a_replica_that_hung_while_the_driver_was_suspended_is_not_reported_as_missing_at_once(
    watch: ReplicaWatch,
) -> None:
    stuck = report("a", 1.0)
    watch.update([stuck, report("b", 1.0)], 1.0)
    # The driver was suspended for an hour, so only now can it end the replica, whose hang Serve has not noticed.
    assert watch.update([stuck, report("b", 3600.0)], 3600.0) == ReplicaChanges((), (), (stuck,))
    assert watch_until(watch, 4200.0, stuck) == []
    assert watch.update([stuck, report("b", 4201.0)], 4201.0).missing == (stuck,)


def test_the_time_for_a_successor_does_not_pass_while_the_driver_is_suspended(watch: ReplicaWatch) -> None:
    stuck = report("a", 1.0)
    watch.update([stuck, report("b", 1.0)], 1.0)
    assert watch.update([stuck, report("b", 62.0)], 62.0).unresponsive == (stuck,)
    assert watch.update([stuck, report("b", 3662.0)], 3662.0) == NOTHING
    assert watch_until(watch, 4262.0, stuck) == []
    assert watch.update([stuck, report("b", 4263.0)], 4263.0).missing == (stuck,)


def test_a_replica_that_reports_again_may_become_unresponsive_again(watch: ReplicaWatch) -> None:
    watch.update([report("a", 1.0), report("b", 1.0)], 1.0)
    assert [one.replica for one in watch.update([report("b", 100.0)], 100.0).unresponsive] == ["a"]
    assert watch.update([report("a", 110.0), report("b", 110.0)], 110.0) == NOTHING
    later = watch.update([report("b", 900.0)], 900.0)
    assert ([one.replica for one in later.unresponsive], later.missing) == (["a"], ())


def test_a_starting_replica_is_not_missing(watch: ReplicaWatch) -> None:
    gone = report("a", 1.0)
    watch.update([gone, report("b", 1.0)], 1.0)
    assert len(watch.update([gone, report("b", 600.0), report("c", 600.0, "starting")], 600.0).replaced) == 1
    assert watch.update([gone, report("b", 850.0), report("c", 850.0, "starting")], 900.0) == NOTHING
    assert [one.replica for one in watch.update([report("b", 950.0)], 950.0).unresponsive] == ["c"]
    assert [one.replica for one in watch_until(watch, 1551.0)] == ["c"]


def test_replicas_that_have_left_are_forgotten_after_some_time(watch: ReplicaWatch) -> None:
    """A run of weeks with autoscaling has tens of thousands of replicas, each with a name of its own."""
    for number in range(3 * MAX_GONE):
        now = 600.0 * number
        leaving = report(f"old-{number}", now, "leaving")
        assert watch.update([report("a", now), report("b", now), leaving], now) == NOTHING
    assert len(watch._gone) == MAX_GONE
    assert watch.update([report("a", now), report("b", now), report(f"old-{number}", now)], now) == NOTHING
