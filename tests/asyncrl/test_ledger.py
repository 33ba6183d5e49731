"""The ledger: each transition, and a state machine over every interleaving of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from asyncrl.failures import BugError
from asyncrl.ledger import Ledger
from asyncrl.ports import Books, QueueSnapshot
from asyncrl.staleness import Pacing, judge
from asyncrl.types import DropReason, SampleId


def ledger_with(running: int = 0, ready: int = 0) -> tuple[Ledger, list[SampleId]]:
    ledger = Ledger(prompts_per_epoch=10)
    ids = [ledger.feed() for _ in range(running + ready)]
    for sample_id in ids[running:]:
        ledger.finish(sample_id)
    return ledger, ids


def test_ids_are_the_feed_order_and_epochs_follow_from_it() -> None:
    ledger = Ledger(prompts_per_epoch=3)
    assert [str(ledger.feed()) for _ in range(7)] == [
        "sample_0_1", "sample_0_2", "sample_0_3", "sample_1_4", "sample_1_5", "sample_1_6", "sample_2_7",
    ]  # fmt: skip


def test_ready_is_in_completion_order_and_a_release_restores_it() -> None:
    ledger, (a, b, c, d) = ledger_with(running=4)
    for sample_id in (c, a, d, b):
        ledger.finish(sample_id)
    first = ledger.lease([c, a])
    second = ledger.lease([d])
    assert list(ledger.ready()) == [b]
    ledger.release(second)
    ledger.release(first)
    assert list(ledger.ready()) == [c, a, d, b]


def test_commit_in_parts_then_release_the_rest() -> None:
    ledger, (a, b, c) = ledger_with(ready=3)
    lease = ledger.lease([a, b, c])
    ledger.commit(lease, [b])
    assert set(ledger.release(lease)) == {a, c}
    assert ledger.release(lease) == ()
    assert ledger.books() == Books(
        fed=3, running=0, ready=2, leased=0, trained=1, dropped=dict.fromkeys(map(str, DropReason), 0)
    )


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda led, ids: led.finish(ids["ready"]), r"finish of sample_0_2, which is READY"),
        (lambda led, ids: led.finish(ids["leased"]), r"finish of sample_0_3, which is LEASED \(lease 1\)"),
        (lambda led, ids: led.finish(ids["trained"]), r"finish of sample_0_4, which is TRAINED or DROPPED"),
        (lambda led, ids: led.finish(SampleId(0, 9)), r"finish of sample_0_9, which is never fed"),
        (lambda led, ids: led.drop(ids["trained"], DropReason.FAILED), r"drop \(failed\) of sample_0_4"),
        (lambda led, ids: led.lease([ids["ready"], ids["running"]]), r"lease of sample_0_1, which is RUNNING"),
        (lambda led, ids: led.lease([ids["ready"], ids["ready"]]), r"a lease names a sample twice: sample_0_2"),
        (lambda led, ids: led.commit(1, [ids["leased"], ids["ready"]]), r"commit under lease 1 of sample_0_2"),
        (lambda led, ids: led.commit(1, [ids["leased"], ids["leased"]]), r"names a sample twice: sample_0_3"),
        (lambda led, ids: led.commit(2, [ids["leased"]]), r"commit under lease 2 of sample_0_3"),
        (lambda led, ids: led.release(2), r"lease 2 was never given; the last one is 1"),
        (lambda led, ids: led.unfeed(ids["ready"]), r"unfeed of sample_0_2, which is READY"),
        (lambda led, ids: led.redo(ids["running"]), r"redo of sample_0_1, which is RUNNING"),
        (lambda led, ids: led.redo(ids["trained"]), r"redo of sample_0_4, which is TRAINED or DROPPED"),
        (lambda led, ids: led.rewind(0, bool, [ids["ready"]]), r"rewind of sample_0_2, which is READY"),
        (lambda led, ids: led.rewind(0, bool, [ids["trained"]]), r"rewind of sample_0_4, which is TRAINED or DROPPED"),
        (lambda led, ids: led.rewind(0, bool, [SampleId(0, 9)]), r"rewind of sample_0_9, which is never fed"),
    ],
)
def test_an_illegal_transition_says_what_and_changes_nothing(attempt, said: str) -> None:  # type: ignore[no-untyped-def]
    ledger, (running, ready, leased, trained) = ledger_with(running=1, ready=3)
    ledger.commit(ledger.lease([leased, trained]), [trained])
    ids = {"running": running, "ready": ready, "leased": leased, "trained": trained}
    before = ledger.dump()
    with pytest.raises(BugError, match=said):
        attempt(ledger, ids)
    assert ledger.dump() == before


def test_a_rewind_puts_everything_back_in_completion_order() -> None:
    ledger, ids = ledger_with(running=8)
    a, b, c, d, e, f, g, h = ids
    for sample_id in (h, g, f, e, d, c):
        ledger.finish(sample_id)
    lease = ledger.lease([h, g, f, e])
    ledger.commit(lease, [h])
    mark = ledger.ends
    ledger.commit(lease, [e, g])
    ledger.drop(d, DropReason.FILTERED)
    assert ledger.cover(mark) == (h,)
    ledger.rewind(mark, lambda sample_id: sample_id != g)
    assert list(ledger.ready()) == [f, e, c], "f was leased, e was trained, c had waited all the time"
    assert ledger.next_ids(2) == (g, SampleId(0, 9)), "g has no payload any more"
    assert (ledger.num_running, ledger.books().trained, ledger.num_dropped) == (2, 1, 1)
    assert ledger.state(d) == ledger.state(h) == "TRAINED or DROPPED"
    assert [ledger.state(sample_id) for sample_id in (a, b)] == ["RUNNING", "RUNNING"]


def test_a_rewind_undoes_a_shutdown_and_opens_again() -> None:
    ledger, (a, b, c, d) = ledger_with(running=1, ready=3)
    ledger.commit(ledger.lease([b]), [b])
    ledger.lease([c])
    ledger.close()
    ledger.rewind(ledger.ends, lambda sample_id: True)
    assert not ledger.closed
    assert list(ledger.ready()) == [c, d]
    assert ledger.books().dropped["shutdown"] == 0
    assert ledger.feed() == a
    assert ledger.books().trained == 1


def test_a_rewind_behind_what_is_covered_feeds_it_again() -> None:
    ledger, (a, b, c) = ledger_with(ready=3)
    ledger.commit(ledger.lease([a, b]), [b, a])
    ledger.cover(ledger.ends)
    ledger.drop(c, DropReason.FAILED)
    assert ledger.covered([a, b, c, SampleId(0, 4)]) == (a, b, c)
    with pytest.raises(BugError, match="rewind of 3 covered samples; fewer have been trained"):
        ledger.rewind(0, bool, [a, b, c])
    ledger.rewind(0, bool, [a, b])
    assert ledger.next_ids(3) == (a, b, SampleId(0, 4))
    assert (ledger.books().trained, ledger.fed) == (0, 1)


def test_a_part_that_is_gone_gives_back_what_it_held() -> None:
    ledger, (a, b, c, d) = ledger_with(running=2, ready=2)
    ledger.lease([c])
    ledger.lease([d])
    assert ledger.give_back_running() == (a, b)
    assert ledger.release_all() == (c, d)
    assert ledger.redo(c)
    assert ledger.next_ids(4) == (a, b, c, SampleId(0, 5))
    assert list(ledger.ready()) == [d]


def test_after_close_late_work_reports_in_and_changes_nothing() -> None:
    ledger, (running, ready, leased) = ledger_with(running=1, ready=2)
    lease = ledger.lease([leased])
    ledger.close()
    ledger.close()
    books = ledger.books()
    assert books.dropped["shutdown"] == 3
    assert not ledger.finish(running)
    assert not ledger.drop(ready, DropReason.FAILED)
    ledger.commit(lease, [leased])
    ledger.unfeed(running)
    assert ledger.release(lease) == ()
    assert ledger.books() == books
    with pytest.raises(BugError, match="never fed"):
        ledger.finish(SampleId(0, 99))
    with pytest.raises(BugError, match="closed"):
        ledger.feed()


def test_a_snapshot_survives_json_and_feeds_the_outstanding_first() -> None:
    ledger, (_a, b, c, d, e) = ledger_with(running=2, ready=3)
    lease = ledger.lease([c, d])
    ledger.commit(lease, [d])
    ledger.drop(b, DropReason.OVERLONG)
    raw = json.loads(json.dumps(asdict(ledger.snapshot(version=3))))
    snapshot = QueueSnapshot(
        next_index=raw["next_index"],
        outstanding=tuple(SampleId(*pair) for pair in raw["outstanding"]),
        books=Books(**raw["books"]),
        version=raw["version"],
    )
    again = Ledger.restore(snapshot, prompts_per_epoch=10)
    assert again.books().fed == 2  # one trained, one dropped
    assert [again.feed().index for _ in range(4)] == [1, 3, 5, 6]
    assert e.index == 5


@pytest.mark.parametrize("change", [{"next_index": 9}, {"outstanding": ()}, {"outstanding": (SampleId(0, 2),) * 3}])
def test_a_snapshot_that_does_not_balance_is_refused(change: dict[str, object]) -> None:
    ledger, _ids = ledger_with(running=2, ready=1)
    with pytest.raises(BugError, match="does not balance"):
        Ledger.restore(replace(ledger.snapshot(0), **change), prompts_per_epoch=10)  # type: ignore[arg-type]


def test_a_lost_sample_stops_the_next_transition() -> None:
    ledger, (a, b) = ledger_with(running=2)
    ledger._running.discard(a)
    with pytest.raises(BugError, match="books don't balance: fed 2, running 0, ready 1"):
        ledger.finish(b)


class LedgerMachine(RuleBasedStateMachine):
    """Every interleaving, against a model that is nothing but each sample's history.

    The composition under test is the one the queue makes: feed within `Pacing`, evict by `judge`, lease in completion
    order. `trainer` may be ahead of `applied`, never behind.
    """

    ids = Bundle("ids")
    leases = Bundle("leases")

    @initialize(
        size=st.integers(1, 4),
        threshold=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        bound=st.sampled_from([None, 0, 1, 2]),
        total=st.sampled_from([None, 12]),
    )
    def begin(self, size: int, threshold: float, bound: int | None, total: int | None) -> None:
        self.pacing = Pacing(size, threshold, total)
        self.bound = bound
        self.ledger = Ledger(prompts_per_epoch=5)
        self.applied = self.trainer = self.life = 0
        self.state: dict[SampleId, str] = {}
        self.completed: list[SampleId] = []
        self.oldest: dict[SampleId, int] = {}
        self.lease_of: dict[SampleId, int] = {}
        self.handed_out: list[int] = []
        self.trained: list[SampleId] = []
        self.covered: set[SampleId] = set()
        self.completion: dict[SampleId, int] = {}
        self.marks: list[tuple[int, int]] = []
        """How many were trained by then, and the ledger's own word for it."""

    def of(self, state: str) -> list[SampleId]:
        return [sample_id for sample_id, now in self.state.items() if now == state]

    def dropped(self) -> int:
        return sum(now.startswith("dropped") for now in self.state.values())

    def permits(self) -> int:
        return self.pacing.permits(self.ledger.fed, self.ledger.num_dropped, self.applied)

    @rule(target=ids, wanted=st.integers(1, 5))
    def feed(self, wanted: int):  # type: ignore[no-untyped-def]
        free = self.permits()
        fed = [self.ledger.feed() for _ in range(min(wanted, free))]
        outstanding = self.of("returned")
        assert fed[: len(outstanding)] == sorted(outstanding)[: len(fed)], "the returned go first, in feed order"
        for sample_id in fed:
            assert self.state.get(sample_id, "returned") == "returned", "no id is handed out twice"
            self.state[sample_id] = "running"
            self.oldest[sample_id] = self.applied
            self.handed_out.append(sample_id.index)
        assert self.permits() == free - len(fed)
        return multiple(*fed)

    @rule(sample_id=ids)
    def finish(self, sample_id: SampleId) -> None:
        if self.state[sample_id] == "running":
            assert self.ledger.finish(sample_id)
            self.state[sample_id] = "ready"
            self.completed.append(sample_id)
            self.completion[sample_id] = max(self.completion.values(), default=0) + 1
        else:
            self.refuse(lambda: self.ledger.finish(sample_id))

    @rule(sample_id=ids)
    def redo(self, sample_id: SampleId) -> None:
        if self.state[sample_id] in ("ready", "leased"):
            assert self.ledger.redo(sample_id)
            self.end(sample_id, "returned")
        else:
            self.refuse(lambda: self.ledger.redo(sample_id))

    @rule(sample_id=ids)
    def unfeed(self, sample_id: SampleId) -> None:
        if self.state[sample_id] == "running":
            self.ledger.unfeed(sample_id)
            self.state[sample_id] = "returned"
        else:
            self.refuse(lambda: self.ledger.unfeed(sample_id))

    @rule(sample_id=ids, reason=st.sampled_from([DropReason.FAILED, DropReason.FILTERED, DropReason.OVERLONG]))
    def drop(self, sample_id: SampleId, reason: DropReason) -> None:
        if self.state[sample_id] in ("running", "ready", "leased"):
            free = self.permits()
            assert self.ledger.drop(sample_id, reason)
            self.end(sample_id, f"dropped {reason}")
            assert self.permits() in (free, free + 1), "a drop frees its own permit and no other"
        else:
            self.refuse(lambda: self.ledger.drop(sample_id, reason))

    @rule(target=leases, wanted=st.integers(1, 4))
    def lease(self, wanted: int):  # type: ignore[no-untyped-def]
        for sample_id in list(self.ledger.ready()):
            if judge(self.trainer, self.oldest[sample_id], max_staleness=self.bound, stale_action="drop") == "drop":
                self.ledger.drop(sample_id, DropReason.STALE)
                self.end(sample_id, "dropped stale")
        assert list(self.ledger.ready()) == self.completed, "completion order"
        batch = self.completed[:wanted]
        if not batch:
            return multiple()
        lease_id = self.ledger.lease(batch)
        for sample_id in batch:
            assert self.bound is None or self.trainer - self.oldest[sample_id] <= self.bound
            self.state[sample_id] = "leased"
            self.lease_of[sample_id] = lease_id
        del self.completed[:wanted]
        return (self.life, lease_id)

    @rule(lease=leases, data=st.data())
    def commit(self, lease: tuple[int, int], data: st.DataObject) -> None:
        life, lease_id = lease
        if life != self.life:
            return
        held = [sample_id for sample_id in self.of("leased") if self.lease_of[sample_id] == lease_id]
        some = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.ledger.commit(lease_id, some)
        for sample_id in some:
            self.state[sample_id] = "trained"
            self.trained.append(sample_id)

    @rule(lease=leases, sample_id=ids)
    def commit_what_is_not_of_the_lease(self, lease: tuple[int, int], sample_id: SampleId) -> None:
        life, lease_id = lease
        if life == self.life and not (self.state[sample_id] == "leased" and self.lease_of[sample_id] == lease_id):
            self.refuse(lambda: self.ledger.commit(lease_id, [sample_id]))

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[int, int]) -> None:
        life, lease_id = lease
        if life != self.life:
            return
        held = {sample_id for sample_id in self.of("leased") if self.lease_of[sample_id] == lease_id}
        assert set(self.ledger.release(lease_id)) == held
        for sample_id in held:
            self.state[sample_id] = "ready"
        self.completed = list(self.ledger.ready())
        assert set(self.completed) == set(self.of("ready"))

    @rule()
    def mark(self) -> None:
        self.marks.append((len(self.trained), self.ledger.ends))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def cover(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.marks) - 1))
        del self.marks[:position]
        count, ends = self.marks[0]
        assert set(self.ledger.cover(ends)) == set(self.trained[:count]) - self.covered
        self.covered |= set(self.trained[:count])

    @precondition(lambda self: self.marks)
    @rule(data=st.data(), lost=st.sets(st.integers(1, 30)))
    def rewind(self, data: st.DataObject, lost: set[int]) -> None:
        """The marks behind it are void; leases are, too."""
        position = data.draw(st.integers(0, len(self.marks) - 1))
        del self.marks[position + 1 :]
        count, ends = self.marks[position]
        self.ledger.rewind(ends, lambda sample_id: sample_id.index not in lost)
        for sample_id in [*self.trained[count:], *self.of("leased"), *self.of("ready")]:
            self.state[sample_id] = "returned" if sample_id.index in lost else "ready"
        del self.trained[count:]
        self.completed = sorted(self.of("ready"), key=self.completion.__getitem__)
        self.life += 1

    @rule(part=st.sampled_from(["rollouter", "trainer"]))
    def attach(self, part: str) -> None:
        if part == "rollouter":
            assert set(self.ledger.give_back_running()) == set(self.of("running"))
            for sample_id in self.of("running"):
                self.state[sample_id] = "returned"
        else:
            assert set(self.ledger.release_all()) == set(self.of("leased"))
            for sample_id in self.of("leased"):
                self.state[sample_id] = "ready"
            self.completed = sorted(self.of("ready"), key=self.completion.__getitem__)
            self.life += 1

    @rule()
    def rebuild(self) -> None:
        """From JSON: nobody notices."""
        dump = self.ledger.dump()
        self.ledger = Ledger.load(json.loads(json.dumps(dump)), prompts_per_epoch=5)
        assert self.ledger.dump() == dump

    @rule()
    def publish(self) -> None:
        self.trainer += 1

    @precondition(lambda self: self.applied < self.trainer)
    @rule()
    def apply(self) -> None:
        self.applied = self.trainer

    @rule()
    def restart(self) -> None:
        """What had not ended comes back under its id; leases of the old life are void."""
        self.ledger = Ledger.restore(self.ledger.snapshot(self.applied), prompts_per_epoch=5)
        for sample_id in [*self.of("running"), *self.of("ready"), *self.of("leased")]:
            self.state[sample_id] = "returned"
        self.completed.clear()
        self.lease_of.clear()
        self.marks.clear()
        self.covered = set(self.trained)
        self.life += 1

    @invariant()
    def the_books_are_the_history(self) -> None:
        if not hasattr(self, "ledger"):
            return
        books = self.ledger.books()
        assert books.running == len(self.of("running"))
        assert books.ready == len(self.of("ready"))
        assert books.leased == len(self.of("leased"))
        assert books.trained == len(self.of("trained")) == len(set(self.trained)) == len(self.trained)
        assert books.num_dropped == self.dropped()
        assert books.fed == books.running + books.ready + books.leased + books.trained + books.num_dropped
        assert set(self.ledger.snapshot(0).outstanding) == {
            sample_id for sample_id, now in self.state.items() if now in ("running", "ready", "leased", "returned")
        }
        assert sorted(sample_id.index for sample_id in self.state) == list(range(1, len(self.state) + 1))
        assert books.fed - books.num_dropped <= self.pacing.limit(self.applied)
        assert list(self.ledger.ready()) == self.completed, "completion order"

    def end(self, sample_id: SampleId, how: str) -> None:
        if self.state[sample_id] == "ready":
            self.completed.remove(sample_id)
        self.state[sample_id] = how

    def refuse(self, attempt) -> None:  # type: ignore[no-untyped-def]
        before = self.ledger.snapshot(0)
        with pytest.raises(BugError, match="illegal transition"):
            attempt()
        assert self.ledger.snapshot(0) == before


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
