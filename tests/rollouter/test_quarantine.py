"""Which prompt crashes engines: cases by hand, and random crowds in which it has to come out."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.quarantine import KEPT, Quarantine


def crash(quarantine: Quarantine, *names: str, at_s: float = 0.0) -> None:
    """A replica's engine dies with these on it."""
    replica = f"replica {quarantine.figures()['crashes']}"
    for name in names:
        quarantine.placed(name, replica)
    for number, name in enumerate(names):
        report = quarantine.crashed(name, f"engine of {name} died", replica, at_s)
        assert quarantine.all_told(report) == (number == len(names) - 1)
    quarantine.judge(report)


def standings(quarantine: Quarantine, names: Iterable[str]) -> dict[str, str]:
    return {name: quarantine.standing(name) for name in names}


# ------------------------------------------------------------------------------------------------ by hand


def test_a_first_crash_costs_nobody_anything() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "a", "b", "c")
    assert set(standings(quarantine, "abc").values()) == {"free"}
    for name in "abc":
        quarantine.left(name)
    crash(quarantine, "a", "d")
    assert quarantine.standing("a") == "free"
    assert quarantine.figures() == {"crashes": 2, "explained": 0, "guilty": 0, "struck": 2, "waiting": 0, "in_lane": ""}


def test_the_only_one_with_two_strikes_is_guilty_and_the_evidence_says_when_and_with_whom() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "bad", "b", "c", at_s=1_000_000_000.0)
    crash(quarantine, "bad", "d", at_s=1_000_000_060.0)
    assert standings(quarantine, ["bad", "b", "c", "d"]) == {"bad": "guilty", "b": "free", "c": "free", "d": "free"}
    told = quarantine.poison("bad").message
    assert "2 engines crashed while they had bad, the last time with no other suspect there" in told
    assert "2001-09-09 01:46:40 UTC, with 2 others in flight: engine of bad died" in told
    assert "2001-09-09 01:47:40 UTC, with 1 others in flight: engine of bad died" in told
    quarantine.left("bad")
    assert quarantine.figures() == {"crashes": 2, "explained": 2, "guilty": 1, "struck": 3, "waiting": 0, "in_lane": ""}


def test_several_suspects_go_one_at_a_time_and_the_lane_tells() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "a", "bad", "c")
    crash(quarantine, "a", "bad", "c", "new")
    assert standings(quarantine, ["a", "bad", "c", "new"]) == {
        "a": "in the lane", "bad": "waiting", "c": "waiting", "new": "free",
    }  # fmt: skip
    assert quarantine.figures()["waiting"] == 2
    quarantine.left("a")
    assert standings(quarantine, ["bad", "c"]) == {"bad": "in the lane", "c": "waiting"}
    crash(quarantine, "newer", "bad")
    assert standings(quarantine, ["bad", "c", "new"]) == {"bad": "guilty", "c": "free", "new": "free"}
    crash(quarantine, "c", "newest")
    assert quarantine.standing("c") == "guilty"


def test_a_verdict_explains_nothing_if_somebody_else_had_been_at_a_crash_before() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "a", "b")
    crash(quarantine, "a", "b", "bad")
    assert standings(quarantine, ["a", "b", "bad"]) == {"a": "in the lane", "b": "waiting", "bad": "free"}
    crash(quarantine, "a", "bad")
    assert standings(quarantine, ["a", "b", "bad"]) == {"a": "guilty", "b": "in the lane", "bad": "waiting"}


def test_whoever_leaves_before_the_verdict_was_there_all_the_same() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "a", "b")
    pending = quarantine.crashed("a", "", "r", 0.0)
    quarantine.crashed("b", "", "r", 0.0)
    quarantine.left("b")
    quarantine.judge(pending)
    assert quarantine.standing("a") == "in the lane"
    quarantine.left("a")
    assert quarantine.figures() == {
        "crashes": 2, "explained": 0, "guilty": 0, "struck": 0, "waiting": 0, "in_lane": "",
    }  # fmt: skip


def test_whoever_is_still_there_is_waited_for_and_whoever_is_late_was_there() -> None:
    quarantine = Quarantine(2)
    crash(quarantine, "a", "b")
    for name in "abc":
        quarantine.placed(name, "r")
    quarantine.placed("d", "another")
    report = quarantine.crashed("a", "", "r", 0.0)
    # A crash elsewhere meanwhile is another one.
    other = quarantine.crashed("d", "", "another", 0.0)
    assert other is not report
    assert quarantine.all_told(other)
    assert not quarantine.all_told(report)
    quarantine.placed("c", "")  # its call has ended otherwise
    assert not quarantine.all_told(report)
    quarantine.judge(other)
    assert quarantine.crashed("b", "", "r", 0.0) is report
    assert quarantine.all_told(report)
    quarantine.judge(report)
    assert standings(quarantine, "abcd") == {"a": "in the lane", "b": "waiting", "c": "free", "d": "free"}
    # Nobody has waited for this one. It is not alone with its strikes.
    assert quarantine.crashed("late", "", "r", 0.0) is report
    quarantine.judge(report)
    assert quarantine.standing("late") == "free"
    assert quarantine.figures()["crashes"] == 3


def test_of_crashes_that_are_judged_some_are_remembered_and_no_more() -> None:
    quarantine = Quarantine(1)
    for number in range(KEPT + 2):
        crash(quarantine, f"s{number}")
        quarantine.left(f"s{number}")
    first = quarantine.crashed("late", "", "replica 0", 0.0)
    assert not first.judged
    assert quarantine.crashed("later", "", f"replica {KEPT + 1}", 0.0).judged


def test_with_a_limit_of_one_the_first_crash_makes_suspects() -> None:
    quarantine = Quarantine(1)
    crash(quarantine, "a", "b")
    assert standings(quarantine, "ab") == {"a": "in the lane", "b": "waiting"}
    crash(quarantine, "c")
    assert quarantine.standing("c") == "guilty"


# ------------------------------------------------------------------------------------------------ crowds


class Crowd:
    """Samples on replicas, in random order; poison ones crash theirs whenever it is their turn."""

    def __init__(
        self, seed: int, *, size: int, num_poison: int, replicas: int, slots: int, infra: int, max_crashes: int
    ) -> None:
        self.rng = random.Random(seed)
        self.max_crashes = max_crashes
        self.quarantine = Quarantine(max_crashes)
        self.todo = [f"s{number}" for number in range(size)]
        self.poison = set(self.rng.sample(self.todo, num_poison))
        self.replicas = replicas
        self.slots = slots
        self.infra_left = infra
        self.flying: dict[str, int] = {}
        """Sample → its replica."""
        self.waiting: list[str] = []
        self.deaths = 0
        self.met: dict[str, int] = {}
        """Crashes each was present at."""
        self.poison_crashes = 0
        self.done: set[str] = set()
        self.dropped: set[str] = set()

    def run(self) -> None:
        for _ in range(100_000):
            self.admit()
            if not self.flying:
                break
            if self.infra_left and self.rng.random() < 0.1:
                self.infra_left -= 1
                self.crash(self.rng.randrange(self.replicas))
            name = self.rng.choice(list(self.flying)) if self.flying else None
            if name in self.poison:
                self.poison_crashes += 1
                self.crash(self.flying[name])
            elif name is not None and self.rng.random() < 0.3:
                self.leave(name, self.done)
        assert not (self.flying or self.waiting or self.todo), "somebody waits for ever"

    def admit(self) -> None:
        while self.todo and len(self.flying) + len(self.waiting) < self.slots:
            self.fly(self.todo.pop())

    def fly(self, name: str) -> None:
        self.flying[name] = self.rng.randrange(self.replicas)
        self.quarantine.placed(name, f"{self.flying[name]}")

    def leave(self, name: str, to: set[str]) -> None:
        self.flying.pop(name, None)
        to.add(name)
        self.quarantine.left(name)
        self.wake()

    def wake(self) -> None:
        for name in list(self.waiting):
            if self.quarantine.standing(name) != "waiting":
                self.waiting.remove(name)
                self.fly(name)
        in_lane = [name for name in self.flying if self.quarantine.standing(name) == "in the lane"]
        assert len(in_lane) <= 1
        assert in_lane or not self.waiting

    def crash(self, replica: int) -> None:
        struck = [name for name, where in self.flying.items() if where == replica]
        self.rng.shuffle(struck)
        before = {name: self.quarantine.standing(name) for name in struck}
        self.deaths += 1
        for name in struck:  # as the name of a process
            self.quarantine.placed(name, f"{replica}/{self.deaths}")
        reports = [self.quarantine.crashed(name, "died", f"{replica}/{self.deaths}", 0.0) for name in struck]
        assert all(self.quarantine.all_told(report) for report in reports)
        for name in struck:
            del self.flying[name]
            self.met[name] = self.met.get(name, 0) + 1
        for report in reports:
            self.quarantine.judge(report)
        after = {name: self.quarantine.standing(name) for name in struck}
        guilty = [name for name, standing in after.items() if standing == "guilty"]
        assert len(guilty) <= 1
        for name in guilty:
            # Only under suspicion of its own: it was in the lane, or alone with so many strikes.
            assert self.met[name] >= self.max_crashes
            if before[name] != "in the lane":
                assert not {"waiting", "in the lane"} & {after[other] for other in struck if other != name}
            self.dropped.add(name)
            self.quarantine.left(name)
        for name in struck:
            if name not in guilty:
                self.waiting.append(name)
        self.wake()


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    num_poison=st.integers(0, 5),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 16),
    infra=st.integers(0, 12),
    max_crashes=st.integers(1, 3),
)
def test_poison_is_dropped_after_a_bounded_number_of_crashes_and_nobody_waits_for_ever(
    seed: int, size: int, num_poison: int, replicas: int, slots: int, infra: int, max_crashes: int
) -> None:
    num_poison = min(num_poison, size)
    crowd = Crowd(
        seed,
        size=size,
        num_poison=num_poison,
        replicas=replicas,
        slots=slots,
        infra=infra,
        max_crashes=max_crashes,
    )
    crowd.run()
    assert crowd.poison <= crowd.dropped
    assert len(crowd.done | crowd.dropped) == size
    innocent = len(crowd.dropped - crowd.poison)
    assert crowd.poison_crashes <= num_poison * (max_crashes + 1) + innocent
    # A poison hides behind an innocent in the lane only while it has fewer strikes than make a suspect.
    assert max_crashes == 1 or innocent <= infra + num_poison * max_crashes
    assert crowd.quarantine.figures()["struck"] == 0


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 16),
    max_crashes=st.integers(1, 3),
)
def test_one_poison_alone_costs_no_innocent_and_one_crash_more_than_the_limit(
    seed: int, size: int, replicas: int, slots: int, max_crashes: int
) -> None:
    crowd = Crowd(seed, size=size, num_poison=1, replicas=replicas, slots=slots, infra=0, max_crashes=max_crashes)
    crowd.run()
    assert crowd.dropped == crowd.poison
    assert max_crashes <= crowd.poison_crashes <= max_crashes + 1


@pytest.mark.parametrize("max_crashes", [2, 3])
@given(seed=st.integers(0, 2**32), size=st.integers(1, 40), replicas=st.integers(1, 4), slots=st.integers(1, 16))
def test_crashes_below_the_limit_that_no_prompt_is_to_blame_for_cost_nothing(
    max_crashes: int, seed: int, size: int, replicas: int, slots: int
) -> None:
    crowd = Crowd(
        seed,
        size=size,
        num_poison=0,
        replicas=replicas,
        slots=slots,
        infra=max_crashes - 1,
        max_crashes=max_crashes,
    )
    crowd.run()
    assert not crowd.dropped


def test_who_is_cut_keeps_its_strikes_and_holds_up_nobody() -> None:
    quarantine = Quarantine(max_crashes=1)
    for name in ("a", "b"):
        quarantine.placed(name, "r")
    crash = quarantine.crashed("a", "died", "r", 0.0)
    quarantine.crashed("b", "died", "r", 0.0)
    quarantine.judge(crash)
    assert (quarantine.standing("a"), quarantine.standing("b")) == ("in the lane", "waiting")
    quarantine.suspended("a")
    assert quarantine.standing("b") == "in the lane"
    quarantine.left("b")
    quarantine.placed("a", "s")
    again = quarantine.crashed("a", "died", "s", 1.0)
    quarantine.judge(again)
    assert quarantine.standing("a") == "guilty", "its strike of before counts"


def test_who_was_cut_before_the_crash_is_judged_stands_in_no_lane() -> None:
    """Nobody would leave the lane, and all others would wait for it."""
    quarantine = Quarantine(max_crashes=1)
    for name in "abc":
        quarantine.placed(name, "r")
    for name in "abc":
        report = quarantine.crashed(name, "died", "r", 0.0)
    quarantine.suspended("a")
    quarantine.judge(report)
    assert standings(quarantine, "abc") == {"a": "free", "b": "in the lane", "c": "waiting"}
    crash(quarantine, "a")  # it is tried again
    assert quarantine.standing("a") == "guilty", "its strike of before counts"
