"""Run the async core in thousands of seeded interleavings with faults, and check that the runs find planted bugs.

ASYNCRL_FUZZ_SEEDS=5000-6000 pytest tests/fuzz -k seeds     play other seeds
python -m tests.fuzz.run 5123                               play one seed and print its events
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import pytest

from asyncrl.core.autoscaling import AutoscalingPolicy, ReplicaAutoscaler, ReplicaLoad
from asyncrl.core.types import SampleId
from asyncrl.driver import supervision
from asyncrl.driver.stall_watchdog import Watchdog
from asyncrl.queue import operations
from asyncrl.queue.actor import QueueClient
from asyncrl.queue.core import QueueCore
from asyncrl.queue.operations import CommitSamples, RewindTraining, SetAppliedVersion
from asyncrl.queue.state import QueueState
from asyncrl.storage import array_bytes
from asyncrl.weights.object_store import WeightStoreActor
from rollouter.crash_isolation import CrashBlame, ReplicaCrash, _sample_of
from rollouter.serving import client
from rollouter.serving.autoscaling import WANTED_REPLICAS
from rollouter.weight_updates import WeightUpdateLoop
from skip import RecordSkip
from skip.record import TENSORS
from skip.store import RecordFiles
from tests.fuzz import fleet, launch, watch
from tests.fuzz.journal import FuzzJournal
from tests.fuzz.parts import TrainPart
from tests.fuzz.records import damage
from tests.fuzz.run import FuzzError, play
from tests.fuzz.setup import FaultKind, draw
from tests.fuzz.store import FuzzStore

SEEDS = range(*map(int, os.environ.get("ASYNCRL_FUZZ_SEEDS", "0-1000").split("-")))
BATCHES = 8
MANY = [range(first, first + 2000) for first in range(100_000, 120_000, 2000)]
DEFECTS = (
    100763, 100891, 104027, 106571, 107129, 107939, 113707, 113716, 126661, 131750, 146423, 149275, 186616,
)  # fmt: skip
"""Seeds that found defects."""
MOST_SEEDS = 200
"""The number of seeds within which the fuzz has to find a planted bug."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging, which takes more time than the runs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_all_seeds_keep_every_promise(batch: int) -> None:
    for seed in SEEDS[batch::BATCHES]:
        play(seed)


@pytest.mark.parametrize("seed", DEFECTS)
def test_a_defect_stays_mended(seed: int) -> None:
    play(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds.start}-{seeds.stop}")
def test_very_many_seeds_keep_every_promise(seeds: range) -> None:
    for seed in seeds:
        play(seed)


def test_the_seeds_cover_every_fault_in_every_mode() -> None:
    met: Counter[Any] = Counter()
    for seed in SEEDS:
        setup = draw(seed)
        met.update((setup.mode, fault.kind) for fault in setup.faults)
    assert set(met) == {(mode, kind) for mode in "abcd" for kind in get_args(FaultKind)}


def test_the_seeds_cover_decisions_about_replicas() -> None:
    runs = [play(seed) for seed in SEEDS[:100] if draw(seed).autoscales]
    changes = [change for run in runs for change in run.decisions]
    assert min(changes) < 0 < max(changes)


def test_a_seed_reproduces_its_run() -> None:
    assert digest(23) == digest(23) != digest(24)


@pytest.mark.slow
def test_a_seed_reproduces_its_run_in_another_process() -> None:
    program = (
        "import hashlib, logging; logging.disable(logging.CRITICAL)\n"
        "from tests.fuzz.test_fuzz import digest\n"
        "print(digest(23))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()},
    )
    assert output.stdout.strip() == digest(23)


def digest(seed: int) -> str:
    """Return a hash of all events of a run, without the random names of client calls."""
    lines: list[str] = []
    play(seed, lines.append)
    return hashlib.sha256("\n".join(line for line in lines if "request_id=" not in line).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------ planted bugs


def found(*kinds: FaultKind, most_seeds: int = MOST_SEEDS, autoscaled: bool = False) -> str:
    """Return the message of the first seed that fails; with `kinds`, play only seeds with one of these faults, and with
    `autoscaled`, only those with `rollout.autoscaling`."""
    for seed in range(most_seeds):
        setup = draw(seed)
        if (kinds and not any(fault.kind in kinds for fault in setup.faults)) or autoscaled > setup.autoscales:
            continue
        try:
            play(seed)
        except FuzzError as error:
            assert f"python -m tests.fuzz.run {seed}" in str(error)
            return str(error)
    raise AssertionError(f"none of {most_seeds} seeds finds the bug")


_release, _set_applied = QueueState.release, SetAppliedVersion.perform
_resubmission, _assess, _start_store = client._resubmission, CrashBlame.assess, FuzzStore.__init__
_start_client = QueueClient.__init__
_observe, _load = ReplicaAutoscaler.observe, ReplicaLoad.now


def lose_one(self: QueueState, sample_ids: Iterable[SampleId]) -> None:
    released = tuple(sample_ids)
    _release(self, released)
    for sample_id in released[:1]:
        del self.ready[sample_id]


def wake_no_caller(self: SetAppliedVersion, queue: QueueCore, *, retried: bool) -> None:
    before = queue.num_recorded
    _set_applied(self, queue, retried=retried)
    queue.num_recorded = before


def damage_tokens(files: RecordFiles, rng: random.Random) -> None:
    for name in files.names():
        damage(files.root / name / TENSORS, rng)


async def do_nothing(*args: Any) -> None:
    """Return at once."""


def blame_every_sample(self: CrashBlame, crash: ReplicaCrash) -> None:
    if not crash.assessed:
        _assess(self, crash)
        for sample in {_sample_of(session) for session in set(crash.messages) - set(crash.ended)} - set(self._evidence):
            self._blame(sample, crash)


def claim_to_know_the_newest(self: FuzzStore, number: int) -> None:
    _start_store(self, number)
    self._knows_newest = True


def wait_forever(self: QueueClient, actor: Any, call_timeout_s: float, **options: Any) -> None:
    _start_client(self, actor, 1e9, **options)


async def ask_without_limit(self: watch.DriverWatch, ask: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
    return await ask()


def follow_last_report(context: Any) -> tuple[int, dict[str, Any]]:
    numbers = context.raw_metrics.get(WANTED_REPLICAS, {})
    points = [point for series in numbers.values() for point in series]
    return int(max(points, key=lambda point: point.timestamp).value) if points else context.target_num_replicas, {}


def observe_at_once(self: ReplicaAutoscaler, now_s: float, load: ReplicaLoad, *, serving: int) -> int:
    return _observe(self, now_s, load, serving=min(serving, self.wanted))


def load_without_pacing(*, trainer_waits: bool, pacing_shut: bool, idle_replicas: float) -> ReplicaLoad:
    return _load(trainer_waits=trainer_waits, pacing_shut=True, idle_replicas=idle_replicas)


def load_of_a_long_tail(*, trainer_waits: bool, pacing_shut: bool, idle_replicas: float) -> ReplicaLoad:
    return _load(
        trainer_waits=trainer_waits, pacing_shut=pacing_shut and not trainer_waits, idle_replicas=idle_replicas
    )


class PlantedBug(NamedTuple):
    patches: tuple[tuple[Any, str, Any], ...]
    symptoms: tuple[str, ...]
    """Texts of which at least one is in the message of the failed run."""
    kinds: tuple[FaultKind, ...] = ()
    """Only seeds with one of these faults are played, or all seeds if there are none."""
    most_seeds: int = MOST_SEEDS
    autoscaled: bool = False
    """Only seeds with `rollout.autoscaling` are played."""


PLANTED = {
    "a release forgets a sample": PlantedBug(
        ((QueueState, "release", lose_one),), ("the sample counts are inconsistent",)
    ),
    "a step is not committed": PlantedBug(
        ((CommitSamples, "perform", lambda self, queue, *, retried: None),),
        ("is in the surviving model, but not TRAINED in the journal",),
    ),
    "the staleness gate wakes no waiter": PlantedBug(
        ((SetAppliedVersion, "perform", wake_no_caller),), ("no progress",)
    ),
    "the queue does not rewind": PlantedBug(
        ((RewindTraining, "perform", lambda self, queue, *, retried: None),), ("of lineage 1 applied in lineage 0",)
    ),
    "the queue forgets its answers": PlantedBug(
        ((operations, "_remember", lambda answers, request_id, answer: None),),
        ("no progress", "the run ended at step"),
        ("queue", "answer"),
    ),
    "the queue answers before the commit": PlantedBug(
        ((FuzzJournal, "flushed", do_nothing),), ("is in the surviving model, but not TRAINED in the journal",)
    ),
    "a trained sample's payload is deleted before a checkpoint covers it": PlantedBug(
        ((QueueState, "forget_payload_unless_reversible", QueueState.forget_payload),), ("turns once",)
    ),
    "a replica that leaves counts as lost": PlantedBug(
        ((supervision.ReplicaWatch, "_forget", lambda self, name: None),),
        ("a planned change is recorded as a restart",),
        ("drain",),
    ),
    "an attached replica keeps the version of the run before": PlantedBug(
        ((fleet, "OTHER_WEIGHTS", fleet.EARLIER_RUN),), ("its staleness would be negative",)
    ),
    "tokens of a dead engine are generated again": PlantedBug(
        ((client, "_resubmission", lambda request, so_far, calls: _resubmission(request, None, calls)),),
        ("tokens outlive their engine",),
    ),
    "tokens of a dead engine are dropped from the response": PlantedBug(
        ((client, "join_turns", lambda head, tail: tail),), ("tokens outlive their engine",)
    ),
    "a crashing sample is never blamed": PlantedBug(
        ((CrashBlame, "_blame", lambda self, sample, last: None),),
        ("poison that has crashed more than", "virtual seconds without an end"),
    ),
    "innocent samples are blamed": PlantedBug(
        ((CrashBlame, "assess", blame_every_sample),), ("innocent samples were dropped", "no prompt gets through"),
        most_seeds=1000,
    ),
    "a validation is skipped": PlantedBug(
        ((WeightUpdateLoop, "_validate", do_nothing),), ("the last validation is of step",)
    ),
    # A restarted store reports that no version was ever published, so a replica that starts then serves the initial
    # version until the next publication. The run stalls if that publication needs samples of a newer version. Otherwise
    # the replica may continue responses of a newer version or generate samples that are too old, or the last version is
    # never validated. About one in sixty of the seeds with this fault finds the bug.
    "the store hides its memory loss": PlantedBug(
        ((FuzzStore, "__init__", claim_to_know_the_newest),),
        ("virtual seconds without an end", "no progress", "spans in order", "the last validation is of step",
         "on-policy pacing"),
        ("store",),
        most_seeds=5000,
    ),
    # The answer of the store waits while the driver is stopped.
    "the age of an answer is wrong": PlantedBug(
        ((watch, "on_clock", lambda status, now: replace(status, at=now)),),
        ("was healthy but was ended",),
        ("driver stops",),
    ),
    # The probe is missed because the driver is stopped, although the part is healthy.
    "a part is killed after one missed probe": PlantedBug(
        ((supervision, "RETRY_S", 0.0),), ("was healthy but was killed",), ("driver stops",)
    ),
    # Only few kills hit the short time between the end of the Trainer and the last apply.
    "the trainer ends before its last version is served": PlantedBug(
        ((TrainPart, "until_served", do_nothing),),
        ("virtual seconds without an end", "no progress"),
        ("trainer",),
        most_seeds=2000,
    ),
    "a stop of the driver counts as a stall of the run": PlantedBug(
        ((watch, "Watchdog", partial(Watchdog, gap_s=1e9)),), ("no progress",), ("driver stops",)
    ),
    "intact records are not replayed": PlantedBug(
        ((RecordSkip, "may_serve", lambda self, served: False),), ("although its record is intact",), ("record",)
    ),
    "damaged records are replayed": PlantedBug(
        ((array_bytes, "xxh3_64_hexdigest", lambda data: ""), (launch, "spoil", damage_tokens)),
        ("was replayed with other tokens than were recorded",),
        ("record",),
    ),
    "a decision exceeds the maximum of replicas": PlantedBug(
        ((AutoscalingPolicy, "bounded", lambda self, number: max(number, self.min_replicas)),),
        ("outside of the bounds",),
        autoscaled=True,
    ),
    "a decision does not reach Serve": PlantedBug(
        ((WeightStoreActor, "want_replicas", do_nothing),), ("has not reached Serve after",), autoscaled=True
    ),
    # The number of the replica that has reported last, which may not know the latest decision yet.
    "Serve follows the last report": PlantedBug(
        ((fleet, "wanted_replicas", follow_last_report),), ("which is not one of the decisions",),
        most_seeds=1000, autoscaled=True,
    ),
    "a decision rests on a moment": PlantedBug(
        ((ReplicaAutoscaler, "_mean", lambda self, period_s: self._observed[-1].load),),
        ("with a constant number of replicas", "although the Trainer waited"),
        autoscaled=True,
    ),
    "a decision does not wait for the one before": PlantedBug(
        ((ReplicaAutoscaler, "observe", observe_at_once),), ("so the last decision has not been carried out",),
        autoscaled=True,
    ),
    "replicas leave while pacing is open": PlantedBug(
        ((ReplicaLoad, "now", load_without_pacing),), ("although pacing kept",), autoscaled=True
    ),
    "replicas join while pacing is shut": PlantedBug(
        ((ReplicaLoad, "now", load_of_a_long_tail),), ("although the Trainer waited",), most_seeds=1000,
        autoscaled=True,
    ),
    # The callers of a hung process wait for it, and so does the driver that probes it.
    **{
        f"calls have no deadline ({hangs})": PlantedBug(
            ((QueueClient, "__init__", wait_forever), (watch.DriverWatch, "asked", ask_without_limit)),
            ("no progress",),
            (hangs,),
        )
        for hangs in ("hang queue", "hang rollouter", "hang trainer")
    },
}  # fmt: skip
QUICK = (
    "a release forgets a sample", "a step is not committed", "an attached replica keeps the version of the run before",
)  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in QUICK else pytest.mark.slow) for bug in PLANTED])
def test_the_fuzz_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    patches, symptoms, kinds, most_seeds, autoscaled = PLANTED[bug]
    for owner, name, replacement in patches:
        monkeypatch.setattr(owner, name, replacement)
    message = found(*kinds, most_seeds=most_seeds, autoscaled=autoscaled)
    assert any(symptom in message for symptom in symptoms)
