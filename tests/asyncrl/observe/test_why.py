"""The chain of waits: every cause is found and said, and whatever the state is, there is an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chain import Driver, as_json, duration, render
from asyncrl.failures import ConfigError
from asyncrl.ports import Books, Edition
from asyncrl.run_state import Restart, RunState, dump, load
from asyncrl.waits import Wait
from asyncrl.why import explain
from tests.fakes.run_states import NOW, queue_status, report, rollouter_waits, running, states

GATE = rollouter_waits(running(published=Edition(0, 12), version=12), Wait("permit", 1, 93.5))
ENGINE = rollouter_waits(
    running(queue=queue_status(books=Books(fed=416, running=8, ready=24, trained=384), paced_to=448)),
    Wait("engine", 8, 20.0),
)
REWARD = rollouter_waits(ENGINE, Wait("engine", 2, 3.0), Wait("reward", 6, 200.0))
FAILED = replace(GATE, phase="failed", error="InfraError: no disk\nand more")
TRAINER_DOWN = Restart("trainer", 2, NOW - 30, "rank actor/0 died")


def trainer_waits(edge: str, since_s: float = 50.0, *, bounded: bool = False) -> RunState:
    return running(waits={"trainer": (Wait(edge, 1, since_s, bounded),), "rollouter": ()})


def test_the_chain_of_the_issue() -> None:
    state = replace(GATE, replicas=(report("0", version=12), report("1", "pausing")))
    links = explain(state, NOW)
    assert [f"{link.who} {link.does}" for link in links] == [
        "Trainer waits for samples",
        "Rollouter waits on staleness gate",
        "version 12 not applied",
        "replica 1 in pause",
    ]
    assert links[-1].for_s == 94.0
    assert render(links) == (
        "Trainer waits for samples for 94 s (30 of up to 32 are READY, 0 RUNNING) ◀ Rollouter waits on staleness gate "
        "for 94 s (414 of 414 samples that version 11 permits are fed) ◀ version 12 not applied ◀ replica 1 in pause "
        "for 94 s (4 requests; pid 100, engine 101)"
    )
    assert as_json(links)[-1]["cause"] == "replica"


@pytest.mark.parametrize(
    ("state", "cause", "says"),
    [
        # A run that replays: files, and no engines.
        (rollouter_waits(ENGINE, Wait("records", 3, 40.0)), "busy", "Rollouter reads or writes records for 40 s (3"),
        (
            replace(ENGINE, num_replicas=0, replicas=()),
            "busy",
            "engines are none (every sample of the run is",
        ),
        # The Trainer itself.
        (trainer_waits("model"), "model", "Trainer starts its ranks and loads the models for 50 s"),
        (trainer_waits("experience"), "ranks", "forward passes over a lease for 50 s (ranks: pid 8)"),
        (trainer_waits("train", bounded=True), "ranks", "optimizer step for 50 s (ranks: pid 8; within its deadline)"),
        (trainer_waits("checkpoint"), "checkpoint", "a checkpoint to be read or written"),
        (trainer_waits("publish"), "ranks", "ranks to publish a version"),
        (replace(trainer_waits("publish"), unheard_s={"store": 20.0}), "unheard", "◀ weight store has not answered"),
        (trainer_waits("tea"), "unknown", "Trainer waits on tea"),
        # The end.
        (
            rollouter_waits(trainer_waits("served"), Wait("apply", 1, 40.0)),
            "busy",
            "Trainer has taken its last step for 50 s ◀ Rollouter applies the last version for 40 s ◀ replicas serve",
        ),
        (
            rollouter_waits(trainer_waits("served"), Wait("validation", 9, 40.0)),
            "engine",
            "◀ Rollouter validates for 40 s (9 samples) ◀ engines",
        ),
        (trainer_waits("served"), "busy", "◀ Rollouter is about to end"),
        (replace(trainer_waits("served"), unheard_s={"rollouter": 30.0}), "unheard", "◀ Rollouter has not answered"),
        (running(waits={"trainer": (), "rollouter": ()}), "busy", "Trainer waits on nothing"),
        (running(waits={"trainer": ()}, unheard_s={"queue": 9.0}), "unheard", "waits on the queue ◀ queue has not"),
        (running(waits={}), "unknown", "Trainer has told nothing yet"),
        (running(unheard_s={"trainer": 30.0}), "unheard", "Trainer has not answered for 30 s (dead, stopped or hung)"),
        (
            running(
                restarting={"trainer": NOW - 12}, restarts=(TRAINER_DOWN,), waits={"trainer": (Wait("model", 1, 9),)}
            ),
            "restarting",
            "Trainer is being restarted for 12 s (rank actor/0 died; now it waits on model)",
        ),
        # The queue and the Rollouter.
        (running(unheard_s={"queue": 30.0}), "unheard", "◀ queue has not answered for 30 s"),
        (running(queue=None), "unknown", "queue has told nothing yet"),
        (running(queue=queue_status(ended=True)), "ended", "no sample will come"),
        (running(queue=queue_status(books=Books(ready=32, fed=32))), "busy", "queue has enough"),
        (running(unheard_s={"rollouter": 8.0}), "unheard", "◀ Rollouter has not answered for 8.5 s (pid 7: dead"),
        (running(restarting={"rollouter": NOW - 8}), "restarting", "◀ Rollouter is being restarted"),
        (running(waits={"trainer": (Wait("samples", 1, 1.0),)}), "starting", "◀ Rollouter has told nothing yet"),
        (rollouter_waits(running(), Wait("weights", 1, 5.0)), "busy", "Rollouter waits on nothing it knows of"),
        (rollouter_waits(running(), Wait("payload", 3, 5.0)), "unknown", "Rollouter waits on payload for 5.5 s (3 sam"),
        # Rewards and engines.
        (REWARD, "reward", "◀ Rollouter waits on rewards for 200 s (6 samples) ◀ reward function has not answered"),
        (ENGINE, "engine", "◀ engines generate (2 serving, 8 requests in flight)"),
        (
            replace(ENGINE, replicas=(report("0", in_flight=0), report("1", in_flight=0))),
            "engine",
            "engines have no request in flight",
        ),
        (replace(ENGINE, last_progress_at=NOW - 60), "engine", "◀ engines make no token for 60 s (2 serving, 8 req"),
        (replace(ENGINE, replicas=(report("0"),)), "engine", "1 not heard of"),
        (replace(ENGINE, replicas=()), "replica", "replicas have told nothing yet (2 configured"),
        (replace(ENGINE, replicas=(), unheard_s={"store": 9.0}), "unheard", "store has not answered"),
        (replace(ENGINE, replicas=(report("a", "starting"),)), "replica", "replica a starts its engine for 94 s"),
        (
            replace(ENGINE, replicas=(report("0"), report("1", "broken", told="OOM"))),
            "replica",
            "1 is broken for 94 s (OOM",
        ),
        (
            replace(ENGINE, replicas=(report("0"), report("1", reported_at=NOW - 60))),
            "replica",
            "replica 1 not heard of for 60 s (last serving; pid 100, engine 101; dead, stopped or hung)",
        ),
        (
            replace(ENGINE, replicas=(report("0"), report("1"), report("old", reported_at=NOW - 60))),
            "engine",
            "engines generate",
        ),
        (
            replace(ENGINE, replicas=(report("0"), report("1", "pausing", phase_since=NOW - 0.1))),
            "engine",
            "engines generate",
        ),
        (rollouter_waits(ENGINE, Wait("slot", 1, 4.0)), "engine", "Rollouter waits on a free slot"),
        (
            rollouter_waits(ENGINE, Wait("engine", 8, 4.0), Wait("probation", 7, 3.0)),
            "engine",
            "on engines for 4.5 s (8 samples; 7 held back since an engine crashed in their presence) ◀ engines",
        ),
        # The gate.
        (replace(GATE, replicas=(report("1", "loading"),)), "replica", "replica 1 in pause, loading weights for 94 s"),
        (
            rollouter_waits(GATE, Wait("permit", 1, 9), Wait("apply", 1, 8)),
            "replica",
            "version 12 not applied ◀ replica 0 still serves version 11 (serving, 4 requests in flight; pid 100)",
        ),
        (
            replace(rollouter_waits(GATE, Wait("permit", 1, 9), Wait("apply", 1, 8)), unheard_s={"store": 9.0}),
            "unheard",
            "version 12 not applied ◀ weight store has not answered",
        ),
        (
            replace(
                rollouter_waits(GATE, Wait("permit", 1, 9), Wait("apply", 1, 8)), replicas=(report("0", version=12),)
            ),
            "busy",
            "the Rollouter is about to open the gate",
        ),
        (
            rollouter_waits(GATE, Wait("permit", 1, 9), Wait("validation", 1, 80)),
            "engine",
            "Rollouter validates the version before it for 80 s ◀ engines generate",
        ),
        (rollouter_waits(GATE, Wait("permit", 1, 9), Wait("weights", 1, 80)), "busy", "has not acted on it yet"),
        (
            rollouter_waits(running(), Wait("permit", 1, 9)),
            "gate",
            "Trainer has everything that is permitted (version 11",
        ),
        (rollouter_waits(running(version=12), Wait("permit", 1, 9)), "store", "version 12 not in the store"),
        (rollouter_waits(running(published=None), Wait("permit", 1, 9)), "store", "has lost its memory"),
        (
            rollouter_waits(running(unheard_s={"store": 9.0}), Wait("permit", 1, 9)),
            "unheard",
            "gate for 9.5 s (414 of 414 samples that version 11 permits are fed) ◀ weight store has not answered",
        ),
        (
            rollouter_waits(running(queue=queue_status(paced_to=450)), Wait("permit", 1, 9)),
            "busy",
            "36 permits are free",
        ),
        (
            rollouter_waits(running(queue=queue_status(total_samples=414)), Wait("permit", 1, 9)),
            "gate",
            "Rollouter has nothing left to admit",
        ),
        # A few samples run, but they cannot fill a lease: the gate is what counts.
        (
            rollouter_waits(
                replace(GATE, queue=queue_status(books=Books(fed=414, running=2, ready=28, trained=384))),
                Wait("permit", 1, 9),
                Wait("engine", 2, 1.0),
            ),
            "busy",
            "staleness gate",
        ),
        # Before the first sample.
        (rollouter_waits(running(version=11), Wait("apply", 1, 4.0)), "busy", "it generates nothing before that"),
        (
            running(phase="starting", waits={}, replicas=(report("0", "starting"),)),
            "replica",
            "run is starting for 17 min ◀ replica 0 starts its engine for 94 s",
        ),
        (running(phase="starting", waits={"trainer": (Wait("model", 1, 9),)}), "model", "◀ Trainer starts its ranks"),
        (running(phase="starting", waits={}, replicas=(report(),)), "starting", "parts are coming up"),
        (replace(trainer_waits("train"), phase="stopping"), "ranks", "run is stopping ◀ Trainer waits for"),
    ],
)
def test_every_cause_is_found(state: RunState, cause: str, says: str) -> None:
    links = explain(state, NOW)
    assert says in render(links)
    assert links[-1].cause == cause
    assert all(not link.cause for link in links[:-1])


@pytest.mark.parametrize(
    ("state", "later_s", "driver", "starts", "cause"),
    [
        (GATE, 0.5, "alive", "Trainer waits for samples", ""),
        (GATE, 40.0, "alive", "driver has not written its state for 40 s (pid 42 on here: hung", "driver"),
        (GATE, 40.0, "unknown", "driver has not written its state for 40 s", "driver"),
        (GATE, 3.0, "stopped", "driver is stopped (pid 42; kill -CONT 42 lets it go on); at that time: T", "driver"),
        (GATE, 90.0, "gone", "driver has been dead for 90 s (pid 42 ended without a last word; launch", "driver"),
        (FAILED, 1e6, "gone", "run failed (InfraError: no disk); at that time: Trainer", "failed"),
    ],
)
def test_of_a_dead_run_it_says_how_it_ended_and_what_it_waited_on_then(
    state: RunState, later_s: float, driver: Driver, starts: str, cause: str
) -> None:
    links = explain(state, state.written_at + later_s, driver=driver)
    assert render(links).startswith(starts)
    assert links[0].cause == cause
    if cause:
        assert links[1].for_s == 93.5  # as of then
        assert links[-1].cause == "replica" or links[-1].who == "Rollouter"


def test_a_part_that_was_not_asked_any_more_is_not_the_cause() -> None:
    silent = {"store": 14.2, "queue": 14.0, "rollouter": 14.1, "trainer": 14.5}
    state = replace(FAILED, unheard_s=silent, written_at=NOW + 14, replicas=(report("1", "pausing"),))
    links = explain(state, NOW + 15)
    assert links[-1].text.startswith("replica 1 in pause for 94 s")
    # One that had hung before is.
    links = explain(replace(state, unheard_s=silent | {"rollouter": 44.0}), NOW + 15)
    assert links[-1].text.startswith("Rollouter has not answered for 30 s")


def test_an_end_without_a_wait_is_the_whole_answer() -> None:
    assert render(explain(running(phase="completed"), NOW)) == "run completed"
    assert len(explain(running(phase="interrupted"), NOW)) == 1
    # A stall's message is the chain already.
    assert len(explain(running(phase="failed", error="nothing moved for 9 s: Trainer ◀ Rollouter"), NOW)) == 1


@settings(deadline=None)
@given(states, st.floats(NOW - 100, NOW + 1e5), st.sampled_from(["alive", "stopped", "gone", "unknown"]))
def test_every_state_has_an_answer_that_ends_in_a_cause(state: RunState, now: float, driver: Driver) -> None:
    links = explain(state, now, driver=driver)
    assert 1 <= len(links) <= 8
    assert links[-1].cause
    assert [link.cause for link in links[1:-1]] == [""] * len(links[1:-1])
    assert all(link.who and link.does and (link.for_s is None or link.for_s >= 0) for link in links)
    assert links[-1].text in render(links)
    json.dumps(as_json(links), allow_nan=False)


def test_durations_read_well() -> None:
    told = [duration(seconds) for seconds in (-1, 0.44, 94.2, 754, 11520, float("nan"), float("inf"))]
    assert told == ["0.0 s", "0.4 s", "94 s", "13 min", "3.2 h", "an unknown time", "an unknown time"]


# ---------------------------------------------------------------------------------------------- the state as JSON


@settings(deadline=None)
@given(states)
def test_a_state_comes_back_as_it_was(state: RunState) -> None:
    back = load(json.loads(json.dumps(dump(state))))
    assert back == state
    assert isinstance(back.published, Edition | None)
    assert all(isinstance(wait, Wait) for waits in back.waits.values() for wait in waits)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"schema_version": 99}, r"here.json has schema version 99, this asyncrl reads 1"),
        ({"schema_version": None}, "here.json is damaged: it is no state of a run"),
        ({"pid": "many"}, r"here.json is damaged: pid: .*integer"),
        ({"queue": {"version": 3}}, r"here.json is damaged: queue.books: "),
    ],
)
def test_another_schema_or_damage_is_told(damage: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(dump(running()) | damage, "here.json")
    with pytest.raises(ConfigError, match="no state of a run"):
        load([1])
