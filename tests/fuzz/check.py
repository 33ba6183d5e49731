"""What every fuzzed run owes, whatever happened in it."""

from __future__ import annotations

from collections import Counter

from asyncrl.lives import Lives
from asyncrl.recovery import QueueState
from asyncrl.transitions import Redone, Rewound
from asyncrl.types import SampleId
from benchmarks.chaos.accounts import Accounts, Fate, surviving, violations
from tests.fuzz.world import World


def check(world: World) -> None:
    """Raises AssertionError for the first promise that was broken."""
    setup, files = world.setup, world.files
    transitions = files.journal.transitions()
    lives = Lives(QueueState.begin(setup.num_prompts, keeps_payloads=True))
    state = QueueState.begin(setup.num_prompts, keeps_payloads=True)
    anew: set[SampleId] = set()
    for transition in transitions:
        lives.see(0.0, transition)
        state.apply(transition)
        if isinstance(transition, Redone):
            anew.add(transition.sample_id)
        elif isinstance(transition, Rewound):
            anew.update(transition.again)
    accounts = Accounts(
        fates=[Fate(record.sample_id, record.state, record.reason) for record in lives.records()],
        books=state.ledger.books(),
        trained=files.trained,
        turns=files.turns.log,
        generated_anew=anew,
    )
    broken = violations(accounts)
    assert not broken, "\n".join(f"{one.promise}: {one.told}" for one in broken)
    _check_model(world)
    _check_staleness(world)
    steps = setup.config.trainer.total_training_steps
    assert world.completed_step == steps, f"the run ended at step {world.completed_step} of {steps}"


def _check_model(world: World) -> None:
    """The weights of the newest checkpoint hold exactly what the record says of the steps up to it."""
    if not (checkpoints := world.files.checkpoints):
        return
    newest = checkpoints[max(checkpoints)]
    step, epochs = newest.progress.step, world.setup.config.trainer.ppo_epochs
    # What comes behind the checkpoint in the record is not in it.
    recorded = surviving([*world.files.trained, {"rewound_to_step": step}])
    counts = Counter(newest.model)
    assert set(counts) == set(recorded), f"checkpoint {step} has {sorted(counts)}, the record {sorted(recorded)}"
    over = {sample_id: count for sample_id, count in counts.items() if count > epochs}
    assert not over, f"trained more than {epochs} times in the surviving model: {over}"


def _check_staleness(world: World) -> None:
    drift = world.setup.config.async_training
    first = [age for lineage, age in world.staleness if lineage == 0]
    if drift.max_staleness is not None:
        assert max(first, default=0) <= drift.max_staleness, f"staleness {max(first)} beyond {drift.max_staleness}"
    if drift.staleness_threshold == 0:
        assert max(first, default=0) == 0, f"on-policy pacing, and a sample was {max(first)} versions old"
