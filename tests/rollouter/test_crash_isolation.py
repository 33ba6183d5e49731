"""Which prompt crashes engines: cases by hand, and random crowds in which it has to come out."""

from __future__ import annotations

import random
from collections.abc import Iterable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.failures import EngineCrashError, PoisonError
from asyncrl.core.waits import WaitBoard
from rollouter import crash_isolation
from rollouter.crash_isolation import REMEMBERED_CRASHES, CrashBlame, CrashIsolation, TimeLimit, time_limit
from rollouter.drop_policy import TooLongError


def crash(blame: CrashBlame, *names: str, at_s: float = 0.0) -> None:
    """A replica's engine dies with these on it."""
    replica = f"replica {blame.status()['crashes']}"
    for name in names:
        blame.place(name, replica)
    for number, name in enumerate(names):
        report = blame.report(name, f"engine of {name} died", replica, at_s)
        assert blame.is_reported(report) == (number == len(names) - 1)
    blame.assess(report)


def states(blame: CrashBlame, names: Iterable[str]) -> dict[str, str]:
    return {name: blame.state_of(name) for name in names}


# ------------------------------------------------------------------------------------------------ by hand


def test_a_first_crash_isolates_no_session() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b", "c")
    assert set(states(blame, "abc").values()) == {"free"}
    for name in "abc":
        blame.end(name)
    crash(blame, "a", "d")
    assert blame.state_of("a") == "free"
    assert blame.status() == {
        "crashes": 2,
        "explained": 0,
        "blamed": 0,
        "with_strikes": 2,
        "waiting": 0,
        "isolated": "",
    }


def test_the_only_session_at_the_limit_is_blamed_with_evidence() -> None:
    blame = CrashBlame(2)
    crash(blame, "bad", "b", "c", at_s=1_000_000_000.0)
    crash(blame, "bad", "d", at_s=1_000_000_060.0)
    assert states(blame, ["bad", "b", "c", "d"]) == {"bad": "blamed", "b": "free", "c": "free", "d": "free"}
    told = blame.poison_error("bad").message
    assert "2 engines crashed while they had bad, the last time with no other possible cause in flight" in told
    assert "2001-09-09 01:46:40 UTC, with 2 others in flight: engine of bad died" in told
    assert "2001-09-09 01:47:40 UTC, with 1 others in flight: engine of bad died" in told
    blame.end("bad")
    assert blame.status() == {
        "crashes": 2,
        "explained": 2,
        "blamed": 1,
        "with_strikes": 3,
        "waiting": 0,
        "isolated": "",
    }


def test_several_possible_causes_run_isolated_one_at_a_time() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "bad", "c")
    crash(blame, "a", "bad", "c", "new")
    assert states(blame, ["a", "bad", "c", "new"]) == {
        "a": "isolated", "bad": "waiting", "c": "waiting", "new": "free",
    }  # fmt: skip
    assert blame.status()["waiting"] == 2
    blame.end("a")
    assert states(blame, ["bad", "c"]) == {"bad": "isolated", "c": "waiting"}
    crash(blame, "newer", "bad")
    assert states(blame, ["bad", "c", "new"]) == {"bad": "blamed", "c": "free", "new": "free"}
    crash(blame, "c", "newest")
    assert blame.state_of("c") == "blamed"


def test_blame_explains_no_crash_if_another_session_had_a_strike() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    crash(blame, "a", "b", "bad")
    assert states(blame, ["a", "b", "bad"]) == {"a": "isolated", "b": "waiting", "bad": "free"}
    crash(blame, "a", "bad")
    assert states(blame, ["a", "b", "bad"]) == {"a": "blamed", "b": "isolated", "bad": "waiting"}


def test_a_session_that_ends_before_the_assessment_still_counts_as_present() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    pending = blame.report("a", "", "r", 0.0)
    blame.report("b", "", "r", 0.0)
    blame.end("b")
    blame.assess(pending)
    assert blame.state_of("a") == "isolated"
    blame.end("a")
    assert blame.status() == {
        "crashes": 2, "explained": 0, "blamed": 0, "with_strikes": 0, "waiting": 0, "isolated": "",
    }  # fmt: skip


def test_open_sessions_are_waited_for_and_late_reports_count() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    for name in "abc":
        blame.place(name, "r")
    blame.place("d", "another")
    report = blame.report("a", "", "r", 0.0)
    # A crash elsewhere meanwhile is another one.
    other = blame.report("d", "", "another", 0.0)
    assert other is not report
    assert blame.is_reported(other)
    assert not blame.is_reported(report)
    blame.place("c", "")  # its call has ended otherwise
    assert not blame.is_reported(report)
    blame.assess(other)
    assert blame.report("b", "", "r", 0.0) is report
    assert blame.is_reported(report)
    blame.assess(report)
    assert states(blame, "abcd") == {"a": "isolated", "b": "waiting", "c": "free", "d": "free"}
    # Nobody has waited for this one. It is not alone with its strikes.
    assert blame.report("late", "", "r", 0.0) is report
    blame.assess(report)
    assert blame.state_of("late") == "free"
    assert blame.status()["crashes"] == 3


def test_a_bounded_number_of_assessed_crashes_is_remembered() -> None:
    blame = CrashBlame(1)
    for number in range(REMEMBERED_CRASHES + 2):
        crash(blame, f"s{number}")
        blame.end(f"s{number}")
    first = blame.report("late", "", "replica 0", 0.0)
    assert not first.assessed
    assert blame.report("later", "", f"replica {REMEMBERED_CRASHES + 1}", 0.0).assessed


def test_with_a_limit_of_one_the_first_crash_isolates() -> None:
    blame = CrashBlame(1)
    crash(blame, "a", "b")
    assert states(blame, "ab") == {"a": "isolated", "b": "waiting"}
    crash(blame, "c")
    assert blame.state_of("c") == "blamed"


# ------------------------------------------------------------------------------------------------ crowds


class Crowd:
    """Samples on replicas, in random order; poison ones crash theirs whenever it is their turn."""

    def __init__(
        self, seed: int, *, size: int, num_poison: int, replicas: int, slots: int, infra: int, max_crashes: int
    ) -> None:
        self.rng = random.Random(seed)
        self.max_crashes = max_crashes
        self.blame = CrashBlame(max_crashes)
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
        self.blame.place(name, f"{self.flying[name]}")

    def leave(self, name: str, to: set[str]) -> None:
        self.flying.pop(name, None)
        to.add(name)
        self.blame.end(name)
        self.wake()

    def wake(self) -> None:
        for name in list(self.waiting):
            if self.blame.state_of(name) != "waiting":
                self.waiting.remove(name)
                self.fly(name)
        in_lane = [name for name in self.flying if self.blame.state_of(name) == "isolated"]
        assert len(in_lane) <= 1
        assert in_lane or not self.waiting

    def crash(self, replica: int) -> None:
        struck = [name for name, where in self.flying.items() if where == replica]
        self.rng.shuffle(struck)
        before = {name: self.blame.state_of(name) for name in struck}
        self.deaths += 1
        for name in struck:  # as the name of a process
            self.blame.place(name, f"{replica}/{self.deaths}")
        reports = [self.blame.report(name, "died", f"{replica}/{self.deaths}", 0.0) for name in struck]
        assert all(self.blame.is_reported(report) for report in reports)
        for name in struck:
            del self.flying[name]
            self.met[name] = self.met.get(name, 0) + 1
        for report in reports:
            self.blame.assess(report)
        after = {name: self.blame.state_of(name) for name in struck}
        guilty = [name for name, standing in after.items() if standing == "blamed"]
        assert len(guilty) <= 1
        for name in guilty:
            # Only under suspicion of its own: it was in the lane, or alone with so many strikes.
            assert self.met[name] >= self.max_crashes
            if before[name] != "isolated":
                assert not {"waiting", "isolated"} & {after[other] for other in struck if other != name}
            self.dropped.add(name)
            self.blame.end(name)
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
def test_poison_is_dropped_after_a_bounded_number_of_crashes_and_no_session_waits_for_ever(
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
    assert crowd.blame.status()["with_strikes"] == 0


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 40),
    replicas=st.integers(1, 4),
    slots=st.integers(1, 16),
    max_crashes=st.integers(1, 3),
)
def test_a_single_poison_costs_no_innocent_and_one_crash_over_the_limit(
    seed: int, size: int, replicas: int, slots: int, max_crashes: int
) -> None:
    crowd = Crowd(seed, size=size, num_poison=1, replicas=replicas, slots=slots, infra=0, max_crashes=max_crashes)
    crowd.run()
    assert crowd.dropped == crowd.poison
    assert max_crashes <= crowd.poison_crashes <= max_crashes + 1


@pytest.mark.parametrize("max_crashes", [2, 3])
@given(seed=st.integers(0, 2**32), size=st.integers(1, 40), replicas=st.integers(1, 4), slots=st.integers(1, 16))
def test_crashes_below_the_limit_blame_no_session(
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


def test_a_suspended_session_keeps_its_strikes_and_leaves_isolation() -> None:
    blame = CrashBlame(max_crashes=1)
    for name in ("a", "b"):
        blame.place(name, "r")
    crash = blame.report("a", "died", "r", 0.0)
    blame.report("b", "died", "r", 0.0)
    blame.assess(crash)
    assert (blame.state_of("a"), blame.state_of("b")) == ("isolated", "waiting")
    blame.suspend("a")
    assert blame.state_of("b") == "isolated"
    blame.end("b")
    blame.place("a", "s")
    again = blame.report("a", "died", "s", 1.0)
    blame.assess(again)
    assert blame.state_of("a") == "blamed", "its strike of before counts"


def test_a_session_suspended_before_the_assessment_is_not_isolated() -> None:
    """Nobody would leave the lane, and all others would wait for it."""
    blame = CrashBlame(max_crashes=1)
    for name in "abc":
        blame.place(name, "r")
    for name in "abc":
        report = blame.report(name, "died", "r", 0.0)
    blame.suspend("a")
    blame.assess(report)
    assert states(blame, "abc") == {"a": "free", "b": "isolated", "c": "waiting"}
    crash(blame, "a")  # it is tried again
    assert blame.state_of("a") == "blamed", "its strike of before counts"


# ------------------------------------------------------------------------------------------------ waits


def crash_of(replica: str) -> EngineCrashError:
    error = EngineCrashError(f"{replica} died")
    error.replica = replica
    return error


class Waiters:
    def __init__(self) -> None:
        self.isolation = CrashIsolation(2, waits=WaitBoard(), settle_s=0.0)
        self.free: list[str] = []
        self.blamed: list[str] = []

    async def crashed(self, name: str, replica: str) -> None:
        with time_limit(name, 10.0) as limit:
            try:
                await self.isolation.wait_until_allowed(name, crash_of(replica), limit)
            except PoisonError:
                self.blamed.append(name)
            else:
                self.free.append(name)


async def test_a_crash_is_assessed_once_every_open_session_has_reported_it() -> None:
    rig = Waiters()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for replica in ("r1", "r2"):
                rig.free.clear()
                for name in ("a", "b"):
                    rig.isolation.place(name, replica)
                group.start_soon(rig.crashed, "a", replica)
                await anyio.wait_all_tasks_blocked()
                assert (rig.free, rig.blamed) == ([], [])
                group.start_soon(rig.crashed, "b", replica)
                await anyio.wait_all_tasks_blocked()
                assert sorted(rig.free) == (["a", "b"] if replica == "r1" else ["a"])
            # Both have two strikes, so neither is blamed: one is in the lane, and the other waits for it.
            rig.isolation.end("a")
    assert (rig.free, rig.blamed) == (["a", "b"], [])


async def test_a_crash_is_assessed_even_if_a_session_never_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_isolation, "LONGEST_S", 0.02)
    rig = Waiters()
    rig.isolation.place("a", "r1")
    rig.isolation.place("b", "r1")
    with anyio.fail_after(10):
        await rig.crashed("a", "r1")
    assert rig.free == ["a"]


async def test_an_isolated_session_that_never_ends_runs_out_of_time_while_a_sibling_waits() -> None:
    """Conversations of one sample share its time, and are suspects by themselves. A stranger's wait is not on its own
    time."""
    rig = Waiters()
    out_of_time: list[str] = []
    there: dict[str, list[str]] = {"r1": [], "r2": []}
    full = {"r1": anyio.Event(), "r2": anyio.Event()}

    async def conversation(name: str, limit: TimeLimit) -> None:
        for replica in ("r1", "r2"):
            rig.isolation.place(name, replica)
            there[replica].append(name)
            if len(there[replica]) == 3:
                full[replica].set()
            await full[replica].wait()
            await rig.isolation.wait_until_allowed(name, crash_of(replica), limit)
        rig.free.append(name)
        await anyio.sleep_forever()

    async def sample(name: str, conversations: int, limit_s: float) -> None:
        names = [f"{name}/{number}" for number in range(conversations)]
        try:
            with time_limit(name, limit_s) as limit:
                async with anyio.create_task_group() as group:
                    for each in names:
                        group.start_soon(conversation, each, limit)
        except TooLongError:
            out_of_time.append(name)
        for each in names:
            rig.isolation.end(each)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(sample, "one", 2, 0.3)
            group.start_soon(sample, "other", 1, 0.1)
    assert rig.free == ["one/0", "other/0"]
    assert out_of_time == ["one", "other"]
