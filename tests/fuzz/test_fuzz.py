"""Run the async core in thousands of seeded interleavings with faults, and check that they find planted bugs.

ASYNCRL_FUZZ_SEEDS=5000-6000 pytest tests/fuzz -k seeds     play other seeds
python -m tests.fuzz.run 5123                               play one seed and print its events
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asyncrl.core.types import SampleId
from asyncrl.driver import supervision
from asyncrl.driver.stall_watchdog import Watchdog
from asyncrl.queue import operations
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.operations import CommitSamples, QueueCore, RewindTraining, SetAppliedVersion
from asyncrl.queue.state import QueueState
from rollouter.crash_isolation import CrashBlame, ReplicaCrash
from rollouter.serving import client
from rollouter.weight_updates import WeightUpdateLoop
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
"""The number of seeds within which the fuzz has to find a planted bug."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging, which takes more time than the runs."""
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


def test_the_seeds_cover_every_fault_in_every_mode() -> None:
    met: Counter[Any] = Counter()
    for seed in SEEDS:
        setup = draw(seed)
        met.update((setup.mode, fault.kind) for fault in setup.faults)
    assert set(met) == {(mode, kind) for mode in "abcd" for kind in FAULTS}


def test_a_seed_reproduces_its_run() -> None:
    assert digest(23) == digest(23) != digest(24)


@pytest.mark.slow
def test_a_seed_reproduces_its_run_in_another_process() -> None:
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
    """Return a hash of all events of a run, without the random names of client calls."""
    lines: list[str] = []
    play(seed, lines.append)
    return hashlib.sha256("\n".join(line for line in lines if "request_id=" not in line).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ planted bugs


def found(*kinds: FaultKind, most_seeds: int = MOST_SEEDS) -> str:
    """Return the message of the first seed that fails; with `kinds`, play only seeds with one of these faults."""
    for seed in range(most_seeds):
        if kinds and not any(fault.kind in kinds for fault in draw(seed).faults):
            continue
        try:
            play(seed)
        except FuzzError as error:
            assert f"python -m tests.fuzz.run {seed}" in str(error)
            return str(error)
    raise AssertionError(f"{most_seeds} seeds have not found it")


def test_the_fuzz_finds_a_release_that_forgets_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    release = QueueState.release

    def losing(self: QueueState, sample_ids: Iterable[SampleId]) -> None:
        released = tuple(sample_ids)
        release(self, released)
        for sample_id in released[:1]:
            del self.ready[sample_id]

    monkeypatch.setattr(QueueState, "release", losing)
    assert "the sample counts are inconsistent" in found()


@pytest.mark.slow
def test_the_fuzz_finds_a_staleness_gate_that_wakes_no_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = SetAppliedVersion.perform

    def silent(self: SetAppliedVersion, queue: QueueCore, *, retried: bool) -> None:
        before = queue.num_recorded
        perform(self, queue, retried=retried)
        queue.num_recorded = before

    monkeypatch.setattr(SetAppliedVersion, "perform", silent)
    assert "no progress" in found()


def test_the_fuzz_finds_an_uncommitted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommitSamples, "perform", lambda self, queue, *, retried: None)
    assert "is in the surviving model, but not TRAINED in the journal" in found()


@pytest.mark.slow
def test_the_fuzz_finds_a_queue_that_does_not_rewind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RewindTraining, "perform", lambda self, queue, *, retried: None)
    assert "of lineage 1 applied in lineage 0" in found()


@pytest.mark.slow
def test_the_fuzz_finds_a_queue_that_forgets_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "_remember", lambda answers, request_id, answer: None)
    assert "no progress" in found("queue", "answer")


@pytest.mark.slow
def test_the_fuzz_finds_a_queue_that_answers_before_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: CrashLog, seq: int) -> None:
        """Return although the rows are only in memory."""

    monkeypatch.setattr(CrashLog, "flushed", at_once)
    assert "is in the surviving model, but not TRAINED in the journal" in found()


@pytest.mark.slow
def test_the_fuzz_finds_a_payload_that_is_deleted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue deletes a trained sample before a checkpoint covers it."""
    monkeypatch.setattr(QueueState, "forget_payload_unless_reversible", QueueState.forget_payload)
    assert "turns once" in found()


@pytest.mark.slow
def test_the_fuzz_finds_tokens_that_are_generated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resubmission = client._resubmission
    monkeypatch.setattr(client, "_resubmission", lambda request, so_far, calls: resubmission(request, None, calls))
    assert "tokens outlive their engine" in found()


@pytest.mark.slow
def test_the_fuzz_finds_tokens_that_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client requests only the rest of the response and then drops the tokens of the dead engine."""
    monkeypatch.setattr(client, "join_turns", lambda head, tail: tail)
    assert "tokens outlive their engine" in found()


@pytest.mark.slow
def test_the_fuzz_finds_a_crashing_sample_that_is_never_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CrashBlame, "_blame", lambda self, session, last: None)
    assert "poison that has crashed more than" in found()


@pytest.mark.slow
def test_the_fuzz_finds_blame_on_innocent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assess = CrashBlame.assess

    def hasty(self: CrashBlame, crash: ReplicaCrash) -> None:
        if not crash.assessed:
            assess(self, crash)
            for session in set(crash.messages) - set(crash.finished) - set(self._evidence):
                self._blame(session, crash)

    monkeypatch.setattr(CrashBlame, "assess", hasty)
    message = found()
    assert "nothing was wrong with it" in message or "no prompt gets through" in message


@pytest.mark.slow
def test_the_fuzz_finds_a_skipped_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(self: WeightUpdateLoop, step: int) -> None:
        """Skip the validation."""

    monkeypatch.setattr(WeightUpdateLoop, "_validate", later)
    assert "the last validation is of step" in found()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fuzz_finds_a_store_that_hides_its_memory_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its restart the store reports that no version was ever published. A replica that starts then serves the
    first version until the next one is published, which never happens if that one needs samples of a newer version.
    Otherwise the first version may continue responses of a newer one or answer in its place, or the last version is
    never validated."""
    start = FuzzStore.__init__

    def forgetful(self: FuzzStore, number: int) -> None:
        start(self, number)
        self._informed = True

    monkeypatch.setattr(FuzzStore, "__init__", forgetful)
    message = found("store", most_seeds=5000)  # about one in sixty of those with the fault finds the bug
    symptoms = (
        "virtual seconds and no end", "no progress", "spans in order", "the last validation is of step",
        "on-policy pacing",
    )  # fmt: skip
    assert any(symptom in message for symptom in symptoms)


@pytest.mark.slow
def test_the_fuzz_finds_an_answer_with_a_wrong_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has waited for a driver that was stopped."""
    monkeypatch.setattr(watch, "on_clock", lambda status, now: replace(status, at=now))
    assert "was well, and was ended" in found("driver stops")


@pytest.mark.slow
def test_the_fuzz_finds_a_part_killed_over_one_missed_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver had been stopped, not the part."""
    monkeypatch.setattr(supervision, "RETRY_S", 0.0)
    assert "was well, and was killed" in found("driver stops")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_fuzz_finds_a_trainer_that_ends_before_its_last_version_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: TrainPart, served: Any, waits: Any) -> None:
        """Return before the last version is served."""

    monkeypatch.setattr(TrainPart, "until_served", at_once)
    message = found("trainer", most_seeds=2000)  # few kills fall into the short moment
    assert "virtual seconds and no end" in message or "no progress" in message


@pytest.mark.slow
def test_the_fuzz_finds_a_driver_standstill_mistaken_for_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "Watchdog", partial(Watchdog, gap_s=1e9))
    assert "no progress" in found("driver stops")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", ["hang queue", "hang rollouter", "hang trainer"])
def test_the_fuzz_finds_a_call_without_a_deadline(monkeypatch: pytest.MonkeyPatch, hangs: FaultKind) -> None:
    """Callers wait for a process that hangs, and so does the driver that probes it."""
    start = QueueClient.__init__

    def patient(self: QueueClient, actor: Any, call_timeout_s: float, **options: Any) -> None:
        start(self, actor, 1e9, **options)

    async def asked(self: watch.DriverWatch, ask: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
        return await ask()

    monkeypatch.setattr(QueueClient, "__init__", patient)
    monkeypatch.setattr(watch.DriverWatch, "_asked", asked)
    assert "no progress" in found(hangs)
