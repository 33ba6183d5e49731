"""The async core in thousands of seeded interleavings, with faults; and planted bugs that these must find.

ASYNCRL_FUZZ_SEEDS=5000-6000 pytest tests/fuzz -k seeds     other seeds
python -m tests.fuzz.run 5123                               one of them, with everything that happens in it
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asyncrl.cli import probes
from asyncrl.cli.watchdog import Watchdog
from asyncrl.ledger import Ledger
from asyncrl.queue_actor import QueueClient
from asyncrl.recovery import QueueState
from asyncrl.sample_queue import LocalSampleQueue
from asyncrl.transitions import Applied
from rollouter import client
from rollouter.quarantine import Crash, Quarantine
from rollouter.versions import VersionLoop
from tests.fuzz import watch
from tests.fuzz.journal import CrashLog
from tests.fuzz.parts import TrainPart
from tests.fuzz.run import FuzzError, play
from tests.fuzz.setup import FAULTS, FaultKind, draw
from tests.fuzz.store import FuzzStore

SEEDS = range(*map(int, os.environ.get("ASYNCRL_FUZZ_SEEDS", "0-1000").split("-")))
BATCHES = 4
MANY = range(100_000, 120_000)
MOST_SEEDS = 200
"""A planted bug has to be found within so many."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What a part logs of its faults is no news here, and costs more than all the rest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_promise_is_kept_by_all_seeds(batch: int) -> None:
    for seed in SEEDS[batch::BATCHES]:
        play(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_promise_is_kept_by_very_many_seeds() -> None:
    for seed in MANY:
        play(seed)


def test_the_seeds_meet_every_fault_in_every_mode() -> None:
    met: Counter[Any] = Counter()
    for seed in SEEDS:
        setup = draw(seed)
        met.update((setup.mode, fault.kind) for fault in setup.faults)
    assert set(met) == {(mode, kind) for mode in "abcd" for kind in FAULTS}


def test_a_seed_is_the_same_run_every_time() -> None:
    assert digest(23) == digest(23) != digest(24)


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_every_process() -> None:
    program = (
        "import hashlib, logging; logging.disable(logging.CRITICAL)\n"
        "from tests.fuzz.test_fuzz import digest\n"
        "print(digest(23))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()},
    )
    assert told.stdout.strip() == digest(23)


def digest(seed: int) -> str:
    """Of everything that happens in a run; the names that clients give their calls aside."""
    lines: list[str] = []
    play(seed, lines.append)
    return hashlib.sha256("\n".join(line for line in lines if "ask=" not in line).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ planted bugs


def found(*kinds: FaultKind, most_seeds: int = MOST_SEEDS) -> str:
    """What the first seed says that finds something. Only those with one of these faults are played; none: all."""
    for seed in range(most_seeds):
        if kinds and not any(fault.kind in kinds for fault in draw(seed).faults):
            continue
        try:
            play(seed)
        except FuzzError as error:
            assert f"python -m tests.fuzz.run {seed}" in str(error)
            return str(error)
    raise AssertionError(f"{most_seeds} seeds have not found it")


def test_a_release_that_forgets_a_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Ledger.release

    def losing(self: Ledger, lease_id: int) -> Any:
        released = release(self, lease_id)
        for sample_id in released[:1]:
            del self._ready[sample_id]
        return released

    monkeypatch.setattr(Ledger, "release", losing)
    assert "the books don't balance" in found()


@pytest.mark.slow
def test_a_gate_that_opens_and_tells_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(self: LocalSampleQueue, version: int, *, lineage: int = 0, **_: Any) -> None:
        async with self._permits:
            if lineage == self._state.lineage and version > self._state.version:
                self._do(Applied(version))

    monkeypatch.setattr(LocalSampleQueue, "set_applied_version", silent)
    assert "nothing moved" in found()


def test_a_step_that_is_not_committed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgetful(self: LocalSampleQueue, *args: Any, **kwargs: Any) -> None:
        """The Trainer is told that it was booked."""

    monkeypatch.setattr(LocalSampleQueue, "commit", forgetful)
    assert "is in the surviving model, but not TRAINED in the journal" in found()


@pytest.mark.slow
def test_a_queue_that_does_not_rewind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rewind(self: LocalSampleQueue, step: int, **_: Any) -> None:
        """Nothing goes back."""

    monkeypatch.setattr(LocalSampleQueue, "rewind", rewind)
    assert "of lineage 1 applied in lineage 0" in found()


@pytest.mark.slow
def test_a_queue_that_forgets_what_it_has_answered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueState, "admission", lambda self, ask: None)
    assert "nothing moved" in found("queue", "answer")


@pytest.mark.slow
def test_a_queue_that_answers_before_the_disk_has_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: CrashLog, seq: int) -> None:
        """What it returns for is in memory only."""

    monkeypatch.setattr(CrashLog, "flushed", at_once)
    assert "is in the surviving model, but not TRAINED in the journal" in found()


@pytest.mark.slow
def test_a_payload_that_goes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted once it is trained, when no checkpoint covers it yet."""
    monkeypatch.setattr(QueueState, "_let_go_unless_kept", QueueState._let_go)
    assert "turns once" in found()


@pytest.mark.slow
def test_tokens_that_are_asked_for_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    resubmission = client._resubmission
    monkeypatch.setattr(client, "_resubmission", lambda request, so_far, calls: resubmission(request, None, calls))
    assert "tokens outlive their engine" in found()


@pytest.mark.slow
def test_tokens_that_are_thrown_away_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead engine had told is asked for with the rest of the response, and then not kept."""
    monkeypatch.setattr(client, "join_turns", lambda head, tail: tail)
    assert "tokens outlive their engine" in found()


@pytest.mark.slow
def test_poison_that_nobody_is_convicted_of_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "_convict", lambda self, name, last: None)
    assert "poison that has crashed more than" in found()


@pytest.mark.slow
def test_a_conviction_of_whoever_was_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Quarantine.judge

    def hasty(self: Quarantine, crash: Crash) -> None:
        if not crash.judged:
            judge(self, crash)
            for name in set(crash.told) - set(crash.gone) - set(self._evidence):
                self._convict(name, crash)

    monkeypatch.setattr(Quarantine, "judge", hasty)
    told = found()
    assert "nothing was wrong with it" in told or "no prompt gets through" in told


@pytest.mark.slow
def test_a_validation_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(self: VersionLoop, step: int) -> None:
        """Never."""

    monkeypatch.setattr(VersionLoop, "_validate", later)
    assert "the last validation is of step" in found()


@pytest.mark.slow
def test_a_store_that_forgets_that_it_has_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted, it takes it that nothing was ever published. A replica that starts then serves the first version until
    the next one is published, which never is if it has to be trained on samples of a newer one. If it is, what a newer
    version has begun may have been gone on with by the first one."""
    start = FuzzStore.__init__

    def forgetful(self: FuzzStore, number: int) -> None:
        start(self, number)
        self._informed = True

    monkeypatch.setattr(FuzzStore, "__init__", forgetful)
    told = found("store", most_seeds=5000)  # one in eighty of those with the fault finds it
    assert any(what in told for what in ("virtual seconds and no end", "nothing moved", "spans in order"))


@pytest.mark.slow
def test_an_answer_that_is_taken_for_younger_than_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has waited for a driver that was stopped."""
    monkeypatch.setattr(watch, "on_clock", lambda status, now: replace(status, at=now))
    assert "was well, and was ended" in found("driver stops")


@pytest.mark.slow
def test_a_part_that_is_killed_over_one_missed_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the driver that had been stopped."""
    monkeypatch.setattr(probes, "AGAIN_S", 0.0)
    assert "was well, and was killed" in found("driver stops")


@pytest.mark.slow
def test_a_trainer_that_ends_before_its_last_version_is_served_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: TrainPart, served: Any, waits: Any) -> None:
        """Nobody follows it any more."""

    monkeypatch.setattr(TrainPart, "until_served", at_once)
    told = found("trainer", most_seeds=2000)  # the moment is short
    assert "virtual seconds and no end" in told or "nothing moved" in told


@pytest.mark.slow
def test_a_standstill_of_the_driver_that_is_taken_for_one_of_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "Watchdog", partial(Watchdog, gap_s=1e9))
    assert "nothing moved" in found("driver stops")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["hang queue", "hang rollouter", "hang trainer"])
def test_a_call_without_a_deadline_is_found(monkeypatch: pytest.MonkeyPatch, hangs: FaultKind) -> None:
    """Who hangs is waited for, also by the driver that asks how it is."""
    start = QueueClient.__init__

    def patient(self: QueueClient, actor: Any, call_timeout_s: float, **options: Any) -> None:
        start(self, actor, 1e9, **options)

    async def asked(self: watch.Watch, ask: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
        return await ask()

    monkeypatch.setattr(QueueClient, "__init__", patient)
    monkeypatch.setattr(watch.Watch, "_asked", asked)
    assert "nothing moved" in found(hangs)
