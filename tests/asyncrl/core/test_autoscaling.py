"""The wanted number of replicas: within its bounds, monotone in the load, and settled once it fits the load."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.core.autoscaling import AutoscalingPolicy, ReplicaAutoscaler, ReplicaLoad

shares = st.floats(0.0, 0.95)
QUICK = AutoscalingPolicy(1, 8, target_trainer_wait=0.1, spare_capacity=0.1, up_after_s=10.0, down_after_s=20.0)
WAITS, IDLE, BALANCED = ReplicaLoad(1.0, 0.0), ReplicaLoad(0.0, 1.0), ReplicaLoad(0.05, 0.05)


@st.composite
def policies(draw: st.DrawFn) -> AutoscalingPolicy:
    low = draw(st.integers(1, 6))
    up, down = draw(st.floats(1.0, 20.0)), draw(st.floats(1.0, 20.0))
    return AutoscalingPolicy(low, draw(st.integers(low, 12)), draw(shares), draw(shares), up, down)


@st.composite
def loads(draw: st.DrawFn) -> ReplicaLoad:
    return ReplicaLoad.now(
        trainer_waits=draw(st.booleans()), pacing_shut=draw(st.booleans()), idle_replicas=draw(st.floats(0.0, 1.0))
    )


def load_of(serving: int, needed: float) -> ReplicaLoad:
    """Return the load of a run whose training takes as many samples as `needed` replicas generate."""
    return ReplicaLoad(max(0.0, 1.0 - serving / needed), max(0.0, 1.0 - needed / serving))


def wanted_over(scaler: ReplicaAutoscaler, *phases: tuple[ReplicaLoad, int]) -> list[int]:
    """Observe each load for a number of seconds, with replicas that join and leave at once."""
    found, now, serving = [], 0.0, scaler.wanted
    for load, seconds in phases:
        for _ in range(seconds):
            now += 1.0
            serving = scaler.observe(now, load, serving=serving)
            found.append(serving)
    return found


@given(policies(), st.integers(1, 12), st.lists(st.tuples(loads(), st.integers(0, 14), st.floats(0.0, 30.0))))
def test_the_wanted_number_stays_within_its_bounds(
    policy: AutoscalingPolicy, start: int, seen: list[tuple[ReplicaLoad, int, float]]
) -> None:
    scaler, now = ReplicaAutoscaler(policy, start), 0.0
    for load, serving, gap_s in seen:
        now += gap_s
        assert policy.min_replicas <= scaler.observe(now, load, serving=serving) <= policy.max_replicas


@given(policies(), st.integers(1, 12), shares, shares, shares, shares)
def test_the_choice_is_monotone_in_the_load(
    policy: AutoscalingPolicy, replicas: int, waited: float, longer: float, idle: float, busier: float
) -> None:
    """Longer waits of the Trainer never give fewer replicas, and more idle engines never more."""
    less, more = sorted((waited, longer))
    quiet, busy = max(idle, busier), min(idle, busier)
    replicas = policy.bounded(replicas)
    low, high = ReplicaLoad(less, quiet), ReplicaLoad(more, busy)
    assert policy.more(replicas, low) <= policy.more(replicas, high)
    assert policy.fewer(replicas, low, serving=replicas) <= policy.fewer(replicas, high, serving=replicas)
    assert policy.fewer(replicas, high, serving=replicas) <= replicas <= policy.more(replicas, low)


@given(policies(), st.integers(1, 12), st.floats(0.05, 20.0), st.integers(0, 30))
@example(QUICK, 8, 3.0, 30)
def test_the_number_does_not_flap(policy: AutoscalingPolicy, start: int, needed: float, delay: int) -> None:
    """Serve carries out each decision after `delay` seconds."""
    scaler = ReplicaAutoscaler(policy, start)
    now, serving, found = 0.0, policy.bounded(start), [policy.bounded(start)] * (delay + 1)
    for _ in range(600):
        now += 1.0
        serving = found[-1 - delay]
        found.append(scaler.observe(now, load_of(serving, needed), serving=serving))
    changes = [after - before for before, after in pairwise(found) if after != before]
    assert all(change > 0 for change in changes) or all(change < 0 for change in changes), found
    load = load_of(serving, needed)
    assert policy.more(serving, load) == policy.fewer(serving, load, serving=serving) == serving, "it has settled"


@given(st.lists(st.builds(ReplicaLoad, st.floats(0.0, 0.1), st.floats(0.0, 0.32)), max_size=80))
def test_loads_inside_the_hysteresis_band_change_nothing(seen: list[ReplicaLoad]) -> None:
    """Three replicas would have less than 10 % to spare, and the Trainer waits for at most 10 % of the time."""
    assert set(wanted_over(ReplicaAutoscaler(QUICK, 4), (BALANCED, 1), *((load, 1) for load in seen))) == {4}


def test_replicas_join_while_the_trainer_waits_and_leave_while_pacing_is_shut() -> None:
    scaler = ReplicaAutoscaler(QUICK, 1)
    found = wanted_over(scaler, (WAITS, 22), (BALANCED, 40), (IDLE, 30))
    assert found[:11] == [1] * 10 + [2], "the first observation only says how many serve"
    assert found[21:62] == [4] * 41 and found[-1] == 1
    assert scaler.load == IDLE


def test_a_number_between_two_bounds_is_chosen_by_the_share_of_the_load() -> None:
    assert QUICK.more(4, ReplicaLoad(0.3, 0.0)) == 6
    assert QUICK.more(4, ReplicaLoad(0.1, 0.0)) == 4
    assert QUICK.fewer(4, ReplicaLoad(0.0, 0.3), serving=4) == 4, "three replicas would have 7 % to spare"
    assert QUICK.fewer(4, ReplicaLoad(0.0, 0.4), serving=4) == 3


def test_nothing_more_is_wanted_before_the_last_replica_serves() -> None:
    scaler = ReplicaAutoscaler(QUICK, 1)
    assert [scaler.observe(float(second), WAITS, serving=1) for second in range(100)][-1] == 2
    # There is no room for it on the cluster; the run can still do with less.
    assert scaler.observe(200.0, WAITS, serving=1) == 2
    assert [scaler.observe(200.0 + second, IDLE, serving=1) for second in range(60)][-1] == 1


def test_replicas_without_requests_are_idle_only_while_pacing_is_shut() -> None:
    now = ReplicaLoad.now
    assert now(trainer_waits=True, pacing_shut=False, idle_replicas=1.0) == WAITS
    assert now(trainer_waits=True, pacing_shut=True, idle_replicas=0.75) == ReplicaLoad(0.25, 0.0), "a long tail"
    assert now(trainer_waits=False, pacing_shut=True, idle_replicas=1.0) == IDLE
    assert now(trainer_waits=False, pacing_shut=False, idle_replicas=1.0) == ReplicaLoad(0.0, 0.0)


def test_time_in_which_the_observer_was_suspended_counts_little() -> None:
    scaler = ReplicaAutoscaler(QUICK, 1)
    scaler.observe(0.0, WAITS, serving=1)
    scaler.observe(1.0, BALANCED, serving=1)
    assert scaler.observe(10_000.0, WAITS, serving=1) == 2, "ten seconds of it"
    scaler = ReplicaAutoscaler(QUICK, 1)
    scaler.observe(0.0, WAITS, serving=1)
    scaler.skip(10_000.0)
    assert scaler.observe(10_001.0, WAITS, serving=1) == 1
