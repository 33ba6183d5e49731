"""Checks the promises of a fuzzed run, which must hold under any faults."""

from __future__ import annotations

from collections import Counter

from asyncrl.core.types import DropReason, Provenance
from asyncrl.queue.journal_reader import SampleHistories
from asyncrl.queue.state import QueueState
from benchmarks.chaos.promises import Fate, RunRecords, surviving_samples, violations
from benchmarks.chaos.records import journal_facts
from benchmarks.chaos.watch import broken_calls
from tests.fuzz.world import FuzzWorld


def check(world: FuzzWorld) -> None:
    """Check all promises. Raises AssertionError for the first broken one."""
    setup, files = world.setup, world.files
    operations = files.journal.operations()
    histories = SampleHistories(QueueState.begin(setup.num_prompts, keeps_payloads=True))
    state = QueueState.begin(setup.num_prompts, keeps_payloads=True)
    facts = journal_facts(operations)
    drift = setup.config.async_training
    over_sampled = setup.config.rollout.over_sample.samples > 0
    metas = {
        sample_id: meta
        for sample_id, meta in facts.metas.items()
        # Replayed tokens get the current version, so it is not that of their turns.
        if meta.provenance is Provenance.GENERATED or setup.config.skip.async_rollout.replay_versions == "recorded"
    }
    for operation in operations:
        histories.add(0.0, operation)
        operation.apply(state)
    records = RunRecords(
        fates=[Fate(record.sample_id, record.state, record.reason) for record in histories.records()],
        counts=state.counts(),
        trained=files.trained,
        turns=files.turns.log,
        metas=metas,
        generated_anew=facts.generated_anew | world.late_samples,
        rewinds=facts.rewinds,
        served_when_fed=facts.served_when_fed,
        broken_calls=[call for lines in world.watched for call in broken_calls(lines)],
        # With over-sampling, a requeued sample may never be needed again.
        completed=not over_sampled,
        max_staleness=drift.max_staleness if drift.stale_action == "drop" else None,
    )
    broken = violations(records)
    assert not broken, "\n".join(f"{one.promise}: {one.details}" for one in broken)
    assert not world.broken, "\n".join(world.broken)
    _check_model(world)
    _check_validations(world)
    _check_poison(world, records)
    _check_staleness(world)
    steps = setup.config.trainer.total_training_steps
    assert world.completed_step == steps, f"the run ended at step {world.completed_step} of {steps}"


def _check_model(world: FuzzWorld) -> None:
    """Check that the newest checkpoint was trained on exactly the samples recorded for the steps up to it."""
    if not (checkpoints := world.files.checkpoints):
        return
    newest = checkpoints[max(checkpoints)]
    step, epochs = newest.progress.step, world.setup.config.trainer.ppo_epochs
    # The checkpoint does not contain the steps that were recorded after it.
    recorded = surviving_samples([*world.files.trained, {"rewound_to_step": step}])
    counts = Counter(newest.model)
    assert set(counts) == set(recorded), f"checkpoint {step} has {sorted(counts)}, the record {sorted(recorded)}"
    over = {sample_id: count for sample_id, count in counts.items() if count > epochs}
    assert not over, f"trained more than {epochs} times in the surviving model: {over}"


def _check_validations(world: FuzzWorld) -> None:
    """Check that the last weights of the run were validated, and that no weights were validated twice."""
    counts = Counter((record.lineage, record.version) for record in world.validations)
    # The driver may die after a record arrives and before it is written.
    again = [weights_version for weights_version, count in counts.items() if count > 1]
    assert not again or world.launches > 1, f"(lineage, version) {again} was validated more than once"
    if world.setup.config.has_validation and world.launches == 1:
        last = max((record.step for record in world.validations), default=0)
        assert last == world.completed_step, f"the last validation is of step {last} of {world.completed_step}"


def _check_poison(world: FuzzWorld, records: RunRecords) -> None:
    """Check that a sample that crashes every engine is dropped, and no other one if there are no other faults."""
    setup = world.setup
    # Each conversation of a sample may be in a crash before it waits with the others.
    sessions = setup.config.rollout.n + setup.config.rollout.over_sample.trajectories if setup.max_turns > 1 else 1
    limit = setup.config.recovery.max_crashes + sessions
    over = {name: count for name, count in world.poisoned_by.items() if count > limit}
    # A new Rollouter does not know earlier crashes, and a sample that over-sampling cuts is not isolated.
    cut = setup.config.rollout.over_sample.samples > 0 and setup.config.rollout.over_sample.unfinished != "drop"
    assert not over or setup.unplanned or cut, f"poison that has crashed more than {limit} engines: {over}"
    if not setup.unplanned and setup.stragglers == 0 and setup.reward_fails == 0:
        failed = [fate.sample_id for fate in records.fates if fate.reason == DropReason.FAILED]
        # A sample that two others crash may be blamed (`rollouter.crash_isolation`); every epoch has a poisonous one.
        innocent = [
            sample_id
            for sample_id in failed
            if not world.is_poisonous(sample_id) and len(world.crashed_with[str(sample_id)]) < 2
        ]
        assert not innocent, f"innocent samples were dropped as failed: {innocent}"


def _check_staleness(world: FuzzWorld) -> None:
    drift = world.setup.config.async_training
    first = [age for lineage, age in world.staleness if lineage == 0]
    if drift.max_staleness is not None:
        assert max(first, default=0) <= drift.max_staleness, f"staleness {max(first)} beyond {drift.max_staleness}"
    # Surplus samples are trained one version later, and recorded ones at any time.
    role = world.setup.config.generation_skip
    is_late = world.setup.config.rollout.over_sample.samples or (role and role.replay_versions == "recorded")
    if drift.staleness_threshold == 0 and not is_late:
        assert max(first, default=0) == 0, f"on-policy pacing, but a sample was {max(first)} versions old"
