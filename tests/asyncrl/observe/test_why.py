"""The chain of waits names every cause, and every state has an explanation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import ConfigError
from asyncrl.core.ports import ReplicaReport, SampleCounts, WeightsVersion
from asyncrl.core.waits import Wait
from asyncrl.observe.formats import duration
from asyncrl.observe.status.run_status import Restart, RunState, dump, load
from asyncrl.observe.status.why import DriverState, chain_as_json, explain, render_chain
from tests.fakes.run_states import NOW, queue_status, report, rollouter_waits, running, states

GATE = rollouter_waits(running(published=WeightsVersion(0, 12), version=12), Wait("permit", 1, 93.5))
ENGINE = rollouter_waits(
    running(queue=queue_status(counts=SampleCounts(fed=416, running=8, ready=24, trained=384), paced_to=448)),
    Wait("engine", 8, 20.0),
)
REWARD = rollouter_waits(ENGINE, Wait("engine", 2, 3.0), Wait("reward", 6, 200.0))
FAILED = replace(GATE, phase="failed", error="InfraError: no disk\nand more")
TRAINER_DOWN = Restart("trainer", 2, NOW - 30, "rank actor/0 died")


def at_gate(*waits: Wait, state: RunState = GATE) -> RunState:
    return rollouter_waits(state, Wait("permit", 1, 9), *waits)


APPLYING = at_gate(Wait("apply", 1, 8))


def with_replicas(*replicas: ReplicaReport) -> RunState:
    return replace(ENGINE, replicas=replicas)


def trainer_waits(edge: str, since_s: float = 50.0, *, bounded: bool = False) -> RunState:
    return running(waits={"trainer": (Wait(edge, 1, since_s, bounded),), "rollouter": ()})


def test_a_paused_replica_explains_a_trainer_without_samples() -> None:
    state = replace(GATE, replicas=(report("0", version=12), report("1", "pausing")))
    links = explain(state, NOW)
    assert [f"{link.subject} {link.state}" for link in links] == [
        "Trainer is blocked on samples",
        "Rollouter is blocked on the staleness gate",
        "version 12 is not applied",
        "replica 1 is paused",
    ]
    assert links[-1].for_s == 94.0
    assert render_chain(links) == (
        "Trainer is blocked on samples for 94 s (30 of up to 32 are READY, 0 RUNNING) ◀ Rollouter is blocked on the "
        "staleness gate for 94 s (414 of 414 samples that version 11 permits are admitted) ◀ version 12 is not applied "
        "◀ replica 1 is paused for 94 s (4 requests; pid 100, engine 101)"
    )
    assert chain_as_json(links)[-1]["cause"] == "replica"


SERVED = trainer_waits("served")


@pytest.mark.parametrize(
    ("state", "cause", "text"),
    [
        # A run that replays records: files and no engines.
        (
            rollouter_waits(ENGINE, Wait("records", 3, 40.0)),
            "busy",
            "is reading or writing records for 40 s (3 samples",
        ),
        (replace(ENGINE, num_replicas=0, replicas=()), "busy", "engines do not exist (every sample of the run is"),
        # The Trainer itself.
        (trainer_waits("model"), "model", "Trainer is blocked on starting its ranks and loading the models for 50 s"),
        (trainer_waits("experience"), "ranks", "forward passes over a lease for 50 s (ranks: pid 8)"),
        (trainer_waits("train", bounded=True), "ranks", "optimizer step for 50 s (ranks: pid 8; within its deadline)"),
        (trainer_waits("checkpoint"), "checkpoint", "reading or writing a checkpoint"),
        (trainer_waits("publish"), "ranks", "ranks' publication of a version"),
        (replace(trainer_waits("publish"), silent_s={"store": 20.0}), "silent", "◀ weight store has not answered"),
        (trainer_waits("tea"), "unknown", "Trainer is blocked on tea"),
        # The end.
        (
            rollouter_waits(SERVED, Wait("apply", 1, 40.0)),
            "busy",
            "its last step for 50 s ◀ Rollouter is applying the last version for 40 s ◀ replicas serve",
        ),
        (
            rollouter_waits(SERVED, Wait("validation", 9, 40.0)),
            "engine",
            "is validating for 40 s (9 samples) ◀ engines",
        ),
        (SERVED, "busy", "◀ Rollouter is about to end"),
        (replace(SERVED, silent_s={"rollouter": 30.0}), "silent", "◀ Rollouter has not answered"),
        (running(waits={"trainer": (), "rollouter": ()}), "busy", "Trainer is not blocked"),
        (running(waits={"trainer": ()}, silent_s={"queue": 9.0}), "silent", "is blocked on the queue ◀ queue has not"),
        (running(waits={}), "unknown", "Trainer has not reported yet"),
        (running(silent_s={"trainer": 30.0}), "silent", "Trainer has not answered for 30 s (dead, stopped or hung)"),
        (
            running(
                restarting={"trainer": NOW - 12}, restarts=(TRAINER_DOWN,), waits={"trainer": (Wait("model", 1, 9),)}
            ),
            "restarting",
            "Trainer is being restarted for 12 s (rank actor/0 died; now blocked on model)",
        ),
        # The queue and the Rollouter.
        (running(silent_s={"queue": 30.0}), "silent", "◀ queue has not answered for 30 s"),
        (running(queue=None), "unknown", "queue has not reported yet"),
        (running(queue=queue_status(ended=True)), "ended", "no more samples"),
        (running(queue=queue_status(counts=SampleCounts(ready=32, fed=32))), "busy", "queue has enough"),
        (running(silent_s={"rollouter": 8.0}), "silent", "◀ Rollouter has not answered for 8.5 s (pid 7: dead"),
        (running(restarting={"rollouter": NOW - 8}), "restarting", "◀ Rollouter is being restarted"),
        (running(waits={"trainer": (Wait("samples", 1, 1.0),)}), "starting", "◀ Rollouter has not reported yet"),
        (rollouter_waits(running(), Wait("weights", 1, 5.0)), "busy", "Rollouter is not blocked"),
        (rollouter_waits(running(), Wait("payload", 3, 5.0)), "unknown", "is blocked on payload for 5.5 s (3 sam"),
        # Rewards and engines.
        (REWARD, "reward", "is blocked on rewards for 200 s (6 samples) ◀ reward function has not answered"),
        (ENGINE, "engine", "◀ engines are generating (2 serving, 8 requests in flight)"),
        (with_replicas(report("0", in_flight=0), report("1", in_flight=0)), "engine", "have no request in flight"),
        (replace(ENGINE, last_progress_at=NOW - 60), "engine", "no token for 60 s (2 serving, 8 requests"),
        (with_replicas(report("0")), "engine", "no report from 1"),
        (with_replicas(), "replica", "replicas have not reported yet (2 wanted"),
        (replace(ENGINE, replicas=(), silent_s={"store": 9.0}), "silent", "store has not answered"),
        (with_replicas(report("a", "starting")), "replica", "replica a is starting its engine for 94 s"),
        (with_replicas(report("0"), report("1", "broken", error="OOM")), "replica", "1 is broken for 94 s (OOM"),
        (
            with_replicas(report("0"), report("1", reported_at=NOW - 60)),
            "replica",
            "replica 1 has not reported for 60 s (last serving; pid 100, engine 101; dead, stopped or hung)",
        ),
        (with_replicas(report("0"), report("1"), report("old", reported_at=NOW - 60)), "engine", "are generating"),
        (with_replicas(report("0"), report("1", "pausing", phase_since=NOW - 0.1)), "engine", "are generating"),
        (rollouter_waits(ENGINE, Wait("slot", 1, 4.0)), "engine", "Rollouter is blocked on a generation slot"),
        (
            rollouter_waits(ENGINE, Wait("engine", 8, 4.0), Wait("isolation", 7, 3.0)),
            "engine",
            "on engines for 4.5 s (8 samples; 7 isolated since an engine crashed while it ran them) ◀ engines",
        ),
        # The gate.
        (replace(GATE, replicas=(report("1", "loading"),)), "replica", "1 is paused and loads weights for 94 s"),
        (
            APPLYING,
            "replica",
            "version 12 is not applied ◀ replica 0 still serves version 11 (serving, 4 requests in flight; pid 100)",
        ),
        (replace(APPLYING, silent_s={"store": 9.0}), "silent", "12 is not applied ◀ weight store has not answered"),
        (replace(APPLYING, replicas=(report("0", version=12),)), "busy", "the Rollouter is about to open the gate"),
        (
            at_gate(Wait("validation", 1, 80)),
            "engine",
            "Rollouter is validating the previous version for 80 s ◀ engines are generating",
        ),
        (at_gate(Wait("weights", 1, 80)), "busy", "has not reacted yet"),
        (at_gate(state=running()), "gate", "Trainer has all permitted samples (version 11"),
        (at_gate(state=running(version=12)), "store", "version 12 is not in the weight store"),
        (at_gate(state=running(published=None)), "store", "it was restarted"),
        (
            at_gate(state=running(silent_s={"store": 9.0})),
            "silent",
            "gate for 9.5 s (414 of 414 samples that version 11 permits are admitted) ◀ weight store has not answered",
        ),
        (at_gate(state=running(queue=queue_status(paced_to=450))), "busy", "36 permits are free"),
        (at_gate(state=running(queue=queue_status(total_samples=414))), "gate", "has no samples left to admit"),
        # Some samples are running, but they cannot fill a lease: the gate is the cause.
        (
            at_gate(
                Wait("engine", 2, 1.0),
                state=replace(GATE, queue=queue_status(counts=SampleCounts(fed=414, running=2, ready=28, trained=384))),
            ),
            "busy",
            "staleness gate",
        ),
        # Before the first sample.
        (rollouter_waits(running(version=11), Wait("apply", 1, 4.0)), "busy", "before it generates"),
        (
            running(phase="starting", waits={}, replicas=(report("0", "starting"),)),
            "replica",
            "run is starting for 17 min ◀ replica 0 is starting its engine for 94 s",
        ),
        (
            running(phase="starting", waits={}, pending_demands=("2 x engine replica: 8 GPUs on one node",)),
            "cluster",
            "◀ Ray cluster has no room (2 x engine replica: 8 GPUs on one node; free resources, or add nodes)",
        ),
        (
            running(phase="starting", waits={"trainer": (Wait("model", 1, 9),)}),
            "model",
            "is blocked on starting its ra",
        ),
        (running(phase="starting", waits={}, replicas=(report(),)), "starting", "parts are starting"),
        (replace(trainer_waits("train"), phase="stopping"), "ranks", "run is stopping ◀ Trainer is blocked on"),
    ],
)
def test_the_chain_of_waits_ends_in_the_cause(state: RunState, cause: str, text: str) -> None:
    links = explain(state, NOW)
    assert text in render_chain(links)
    assert links[-1].cause == cause
    assert all(not link.cause for link in links[:-1])


@pytest.mark.parametrize(
    ("state", "later_s", "driver", "starts", "cause"),
    [
        (GATE, 0.5, "alive", "Trainer is blocked on samples", ""),
        (GATE, 40.0, "alive", "driver has not written its state for 40 s (pid 42 on here: hung", "driver"),
        (GATE, 40.0, "unknown", "driver has not written its state for 40 s", "driver"),
        (GATE, 3.0, "stopped", "driver is stopped (pid 42; kill -CONT 42 resumes it); at that time: T", "driver"),
        (GATE, 90.0, "gone", "driver has been dead for 90 s (pid 42 ended without an error message; launch", "driver"),
        (FAILED, 1e6, "gone", "run failed (InfraError: no disk); at that time: Trainer", "failed"),
    ],
)
def test_a_dead_run_is_explained_by_its_last_state(
    state: RunState, later_s: float, driver: DriverState, starts: str, cause: str
) -> None:
    links = explain(state, state.written_at + later_s, driver=driver)
    assert render_chain(links).startswith(starts)
    assert links[0].cause == cause
    if cause:
        assert links[1].for_s == 93.5
        assert links[-1].cause == "replica" or links[-1].subject == "Rollouter"


def test_a_part_that_the_ending_driver_no_longer_polled_is_not_the_cause() -> None:
    silent = {"store": 14.2, "queue": 14.0, "rollouter": 14.1, "trainer": 14.5}
    state = replace(FAILED, silent_s=silent, written_at=NOW + 14, replicas=(report("1", "pausing"),))
    links = explain(state, NOW + 15)
    assert links[-1].text.startswith("replica 1 is paused for 94 s")
    # A part that already hung before the end is the cause.
    links = explain(replace(state, silent_s=silent | {"rollouter": 44.0}), NOW + 15)
    assert links[-1].text.startswith("Rollouter has not answered for 30 s")


def test_a_completed_or_stalled_run_needs_no_chain() -> None:
    assert render_chain(explain(running(phase="completed"), NOW)) == "run completed"
    assert len(explain(running(phase="interrupted"), NOW)) == 1
    # The message of a stall already contains the chain.
    assert len(explain(running(phase="failed", error="no progress for 9 s: Trainer ◀ Rollouter"), NOW)) == 1


@settings(deadline=None)
@given(states, st.floats(NOW - 100, NOW + 1e5), st.sampled_from(["alive", "stopped", "gone", "unknown"]))
def test_every_state_has_an_explanation_that_ends_in_a_cause(state: RunState, now: float, driver: DriverState) -> None:
    links = explain(state, now, driver=driver)
    assert 1 <= len(links) <= 8
    assert links[-1].cause
    assert [link.cause for link in links[1:-1]] == [""] * len(links[1:-1])
    assert all(link.subject and link.state and (link.for_s is None or link.for_s >= 0) for link in links)
    assert links[-1].text in render_chain(links)
    json.dumps(chain_as_json(links), allow_nan=False)


def test_durations_are_readable() -> None:
    texts = [duration(seconds) for seconds in (-1, 0.44, 94.2, 754, 11520, float("nan"), float("inf"))]
    assert texts == ["0.0 s", "0.4 s", "94 s", "13 min", "3.2 h", "an unknown time", "an unknown time"]


# ---------------------------------------------------------------------------------------------- the state as JSON


@settings(deadline=None)
@given(states)
def test_a_state_survives_serialization(state: RunState) -> None:
    back = load(json.loads(json.dumps(dump(state))))
    assert back == state
    assert isinstance(back.published, WeightsVersion | None)
    assert all(isinstance(wait, Wait) for waits in back.waits.values() for wait in waits)


def test_a_state_with_other_keys_needs_another_schema_version() -> None:
    """Unknown keys are ignored and missing ones get defaults, so the state of an older run would show no samples."""
    state = dump(running())
    assert (state["schema_version"], [" ".join(sorted(keys)) for keys in (state, state["counts"], state["queue"])]) == (
        6,
        [
            "answers attention counts drops earlier_restarts error experiment generated_per_s generated_tokens health "
            "host last_progress_at lineage losses mode namespace num_replicas pending_demands phase pid processes "
            "published queue replicas restarting restarts samples_per_lease schema_version silent_s staleness "
            "started_at step total_steps trained_per_s trained_tokens version waits written_at",
            "dropped fed leased ready replayed running substituted trained",
            "closed counts ended health journal_seq lineage notices paced_to payload_bytes pid total_samples "
            "trained_tokens version waiting",
        ],
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"schema_version": 1}, r"here.json has schema version 1, this asyncrl reads 6"),
        ({"schema_version": None}, "here.json is damaged: it is not the state of a run"),
        ({"pid": "many"}, r"here.json is damaged: pid: .*integer"),
        ({"queue": {"version": 3}}, r"here.json is damaged: queue.counts: "),
    ],
)
def test_another_schema_or_damage_is_refused(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(dump(running()) | damage, "here.json")
    with pytest.raises(ConfigError, match="not the state of a run"):
        load([1])
