"""Crash isolation: single cases, and random groups of sessions in which poison prompts must be found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Crash the engine of a replica with these sessions in flight."""
    replica = f"replica {blame.status()['crashes']}"
    for name in names:
        blame.place(name, replica)
    for number, name in enumerate(names):
        report = blame.report(name, f"engine of {name} died", replica, at_s)
        assert blame.is_reported(report) == (number == len(names) - 1)
    blame.assess(report)


def states(blame: CrashBlame, names: Iterable[str]) -> dict[str, str]:
    return {name: blame.state_of(name) for name in names}


def assert_status(blame: CrashBlame, **expected: int) -> None:
    """Check these counts, that all others are 0, and that no session is isolated."""
    zero = {"crashes": 0, "explained": 0, "blamed": 0, "with_strikes": 0, "waiting": 0, "isolated": ""}
    assert blame.status() == zero | expected


# ------------------------------------------------------------------------------------------------ single cases


def test_a_first_crash_isolates_no_session() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b", "c")
    assert set(states(blame, "abc").values()) == {"free"}
    for name in "abc":
        blame.end(name)
    crash(blame, "a", "d")
    assert blame.state_of("a") == "free"
    assert_status(blame, crashes=2, with_strikes=2)


def test_the_only_session_at_the_limit_is_blamed_with_evidence() -> None:
    blame = CrashBlame(2)
    crash(blame, "bad", "b", "c", at_s=1_000_000_000.0)
    crash(blame, "bad", "d", at_s=1_000_000_060.0)
    assert states(blame, ["bad", "b", "c", "d"]) == {"bad": "blamed", "b": "free", "c": "free", "d": "free"}
    message = blame.poison_error("bad").message
    assert "2 engines crashed with bad in flight, the last one without any other possible cause in flight" in message
    assert "2001-09-09 01:46:40 UTC, with 2 others in flight: engine of bad died" in message
    assert "2001-09-09 01:47:40 UTC, with 1 others in flight: engine of bad died" in message
    blame.end("bad")
    assert_status(blame, crashes=2, explained=2, blamed=1, with_strikes=3)


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


def test_no_strike_is_withdrawn_if_another_session_in_the_crash_had_an_earlier_strike() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    crash(blame, "a", "b", "bad")
    assert states(blame, ["a", "b", "bad"]) == {"a": "isolated", "b": "waiting", "bad": "free"}
    crash(blame, "a", "bad")
    assert states(blame, ["a", "b", "bad"]) == {"a": "blamed", "b": "isolated", "bad": "waiting"}


def test_an_isolated_session_is_not_blamed_if_a_free_session_of_another_possible_cause_was_in_flight() -> None:
    blame = CrashBlame(1)
    crash(blame, "innocent/0", "bad/1")
    crash(blame, "innocent/0", "bad/0")  # isolated, beside a conversation that no crash has hit before
    assert states(blame, ["innocent/0", "bad/0", "bad/1"]) == {
        "innocent/0": "isolated", "bad/0": "waiting", "bad/1": "waiting",
    }  # fmt: skip
    blame.end("innocent/0")
    crash(blame, "bad/1")
    assert blame.state_of("bad/1") == "blamed"


def test_a_crash_with_a_sample_that_was_blamed_meanwhile_is_explained_and_blames_no_other_sample() -> None:
    blame = CrashBlame(2)
    crash(blame, "bad/0", "bad/1")
    for name, replica in (("bad/0", "r1"), ("innocent/0", "r1"), ("bad/1", "r2"), ("innocent/1", "r2")):
        blame.place(name, replica)
    first = [blame.report(name, "died", "r1", 0.0) for name in ("bad/0", "innocent/0")]
    second = [blame.report(name, "died", "r2", 0.0) for name in ("bad/1", "innocent/1")]
    blame.assess(first[0])
    blame.assess(second[0])
    assert states(blame, ["bad/0", "bad/1", "innocent/0", "innocent/1"]) == {
        "bad/0": "blamed", "bad/1": "blamed", "innocent/0": "isolated", "innocent/1": "waiting",
    }  # fmt: skip
    for name in ("bad/0", "bad/1", "innocent/0", "innocent/1"):
        blame.end(name)
    assert_status(blame, crashes=3, explained=3, blamed=1)


def test_the_strikes_of_a_sample_stay_while_another_of_its_conversations_completes_turns() -> None:
    blame = CrashBlame(2)
    crash(blame, "bad/0", "a/0")
    blame.end("a/0")
    blame.end("bad/1")  # a turn of another conversation
    crash(blame, "bad/1", "b/0")
    assert states(blame, ["bad/0", "bad/1", "b/0"]) == {"bad/0": "blamed", "bad/1": "blamed", "b/0": "free"}


def test_a_session_that_ends_before_the_assessment_still_counts_as_present() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    pending = blame.report("a", "", "r", 0.0)
    blame.report("b", "", "r", 0.0)
    blame.end("b")
    blame.assess(pending)
    assert blame.state_of("a") == "isolated"
    blame.end("a")
    assert_status(blame, crashes=2)


def test_the_assessment_waits_for_open_sessions_and_a_late_report_blames_no_session() -> None:
    blame = CrashBlame(2)
    crash(blame, "a", "b")
    for name in "abc":
        blame.place(name, "r")
    blame.place("d", "another")
    report = blame.report("a", "", "r", 0.0)
    # A crash of another replica in the meantime is a separate crash.
    other = blame.report("d", "", "another", 0.0)
    assert other is not report
    assert blame.is_reported(other)
    assert not blame.is_reported(report)
    blame.place("c", "")  # its call ended without a crash
    assert not blame.is_reported(report)
    blame.assess(other)
    assert blame.report("b", "", "r", 0.0) is report
    assert blame.is_reported(report)
    blame.assess(report)
    assert states(blame, "abcd") == {"a": "isolated", "b": "waiting", "c": "free", "d": "free"}
    # This report is late: the crash is already assessed, and other sessions have strikes for it.
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


def test_with_a_limit_of_one_the_first_crash_isolates_its_sessions() -> None:
    blame = CrashBlame(1)
    crash(blame, "a", "b")
    assert states(blame, "ab") == {"a": "isolated", "b": "waiting"}
    crash(blame, "c")
    assert blame.state_of("c") == "blamed"


# ------------------------------------------------------------------------------------------------ random groups


@dataclass
class Crowd:
    """Samples whose conversations run on replicas in random order. A session of a poison sample crashes the engine of
    its replica when chosen."""

    seed: int
    size: int
    num_poison: int
    replicas: int
    slots: int
    infra: int
    """Number of crashes that no session causes."""
    max_crashes: int
    conversations: int
    """Sessions of each sample."""
    turns: int
    """Turns of each conversation. Between them it is on no replica."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.blame = CrashBlame(self.max_crashes)
        self.todo = [f"s{number}" for number in range(self.size)]
        self.poison = set(self.rng.sample(self.todo, min(self.num_poison, self.size)))
        self.infra_left = self.infra
        self.turns_left: dict[str, int] = {}
        """By session of the samples that have begun."""
        self.in_flight: dict[str, int] = {}
        """The replica of each session."""
        self.idle: list[str] = []
        """Sessions between two turns."""
        self.waiting: list[str] = []
        self.crashes = 0
        self.met: Counter[str] = Counter()
        """The number of crashes during which each sample was in flight."""
        self.poison_crashes = 0
        self.done: set[str] = set()
        self.dropped: set[str] = set()
        self.run()

    def run(self) -> None:
        for _ in range(100_000):
            while self.todo and len({sample_of(name) for name in self.turns_left}) < self.slots:
                sample = self.todo.pop()
                names = [f"{sample}/{number}" for number in range(self.conversations)]
                self.turns_left |= dict.fromkeys(names, self.turns)
                self.idle += names
            if self.idle and (not self.in_flight or self.rng.random() < 0.4):
                self.start(self.idle.pop(self.rng.randrange(len(self.idle))))
            if not self.in_flight:
                break
            if self.infra_left and self.rng.random() < 0.1:
                self.infra_left -= 1
                self.crash(self.rng.randrange(self.replicas))
            name = self.rng.choice(list(self.in_flight)) if self.in_flight else None
            if name is not None and sample_of(name) in self.poison:
                self.poison_crashes += 1
                self.crash(self.in_flight[name])
            elif name is not None and self.rng.random() < 0.3:
                self.end_turn(name)
        assert not (self.turns_left or self.todo), "a session waits for ever"

    def start(self, name: str) -> None:
        self.in_flight[name] = self.rng.randrange(self.replicas)
        self.blame.place(name, f"{self.in_flight[name]}")

    def end_turn(self, name: str) -> None:
        del self.in_flight[name]
        self.blame.end(name)
        self.turns_left[name] -= 1
        if self.turns_left[name]:
            self.idle.append(name)
        else:
            del self.turns_left[name]
            if not self.sessions_of(sample_of(name)):
                self.done.add(sample_of(name))
        self.wake()

    def sessions_of(self, sample: str) -> list[str]:
        """Return the sessions of the sample that are not complete."""
        return [name for name in self.turns_left if sample_of(name) == sample]

    def wake(self) -> None:
        for name in list(self.waiting):
            if self.blame.state_of(name) != "waiting":
                self.waiting.remove(name)
                self.start(name)
        isolated = {sample_of(name) for name in self.in_flight if self.blame.state_of(name) == "isolated"}
        assert len(isolated) <= 1
        assert isolated or not self.waiting

    def crash(self, replica: int) -> None:
        present = [name for name, where in self.in_flight.items() if where == replica]
        self.rng.shuffle(present)
        isolated = self.blame.isolated
        self.crashes += 1
        process = f"{replica}/{self.crashes}"
        for name in present:
            self.blame.place(name, process)
        reports = [self.blame.report(name, "died", process, 0.0) for name in present]
        assert all(self.blame.is_reported(report) for report in reports)
        for name in present:
            del self.in_flight[name]
        self.met.update({sample_of(name) for name in present})
        for report in reports:
            self.blame.assess(report)
        after = states(self.blame, present)
        blamed = {sample_of(name) for name, state in after.items() if state == "blamed"}
        assert len(blamed) <= 1
        self.waiting += present
        for sample in blamed:
            # Blame needs evidence: the sample was isolated, or it was the only one with that many strikes.
            assert self.met[sample] >= self.max_crashes
            if sample != isolated:
                assert not {"waiting", "isolated"} & {after[name] for name in present if sample_of(name) != sample}
            self.dropped.add(sample)
            for name in self.sessions_of(sample):
                self.blame.end(name)
                self.turns_left.pop(name)
                self.in_flight.pop(name, None)
                for names in (self.idle, self.waiting):
                    if name in names:
                        names.remove(name)
        self.wake()


def sample_of(session: str) -> str:
    return session.partition("/")[0]


def crowds(**fixed: int) -> st.SearchStrategy[Crowd]:
    """Return random groups of samples, of which some parameters are fixed."""
    ranges = {"seed": (0, 2**32), "size": (1, 40), "num_poison": (0, 5), "replicas": (1, 4), "slots": (1, 16)}
    ranges |= {"infra": (0, 12), "max_crashes": (1, 3), "conversations": (1, 8), "turns": (1, 4)}
    return st.fixed_dictionaries(
        {name: st.just(fixed[name]) if name in fixed else st.integers(*limits) for name, limits in ranges.items()}
    ).map(lambda parameters: Crowd(**parameters))


@given(crowds())
def test_poison_is_dropped_after_a_bounded_number_of_crashes_and_no_session_waits_for_ever(crowd: Crowd) -> None:
    assert crowd.poison <= crowd.dropped
    assert len(crowd.done | crowd.dropped) == crowd.size
    innocent = len(crowd.dropped - crowd.poison)
    assert crowd.poison_crashes <= len(crowd.poison) * (crowd.max_crashes + crowd.conversations) + innocent
    # An isolated innocent session can be blamed for the crash of a poison session, but only while the poison session
    # has too few strikes to be a suspect.
    assert crowd.max_crashes == 1 or innocent <= crowd.infra + len(crowd.poison) * crowd.max_crashes
    assert crowd.blame.status()["with_strikes"] == 0


@given(crowds(num_poison=1, infra=0))
def test_a_single_poison_is_blamed_alone_after_few_crashes_over_the_limit(crowd: Crowd) -> None:
    assert crowd.dropped == crowd.poison
    assert crowd.max_crashes <= crowd.poison_crashes <= crowd.max_crashes + crowd.conversations


@given(crowds(num_poison=0, infra=1, max_crashes=2) | crowds(num_poison=0, infra=2, max_crashes=3))
def test_crashes_below_the_limit_blame_no_session(crowd: Crowd) -> None:
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
    assert blame.state_of("a") == "blamed", "its earlier strike counts"


def test_a_session_suspended_before_the_assessment_is_not_isolated() -> None:
    """If it were isolated, all other sessions would wait until it is resumed."""
    blame = CrashBlame(max_crashes=1)
    for name in "abc":
        blame.place(name, "r")
    for name in "abc":
        report = blame.report(name, "died", "r", 0.0)
    blame.suspend("a")
    blame.assess(report)
    assert states(blame, "abc") == {"a": "free", "b": "isolated", "c": "waiting"}
    crash(blame, "a")  # the session is resumed
    assert blame.state_of("a") == "blamed", "its earlier strike counts"


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
            # Both have two strikes, so neither is blamed: one is isolated, and the other waits for it.
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
    """The conversations of a sample share its time limit, and each is a possible cause of the crash. The limit of the
    other sample is paused while that sample waits.
    """
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
