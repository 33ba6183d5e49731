"""Tests of the simulated run: conservation, time, staleness, modes, and what more replicas do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.failures import ConfigError
from asyncrl.simulate.result import SimulationResult
from asyncrl.simulate.run import simulate_run
from asyncrl.simulate.trace import (
    ContentionTrace,
    DispatchTrace,
    EngineTrace,
    GroupLengths,
    LengthTrace,
    SyncTrace,
    Trace,
    TrainerTrace,
    ValidationTrace,
)
from tests.fakes.configurations import config_with

SIZE, N = 4, 3
MODES: dict[str, dict[str, Any]] = {
    "a": {"trigger_parameter_sync_step": 1, "staleness_threshold": 0},
    "b": {"trigger_parameter_sync_step": 3, "staleness_threshold": 0},
    "c": {"trigger_parameter_sync_step": 1, "staleness_threshold": 1, "partial_rollout": False},
    "d": {"trigger_parameter_sync_step": 2, "staleness_threshold": 0.5, "partial_rollout": True},
    "d, abort": {"staleness_threshold": 1.5, "partial_rollout": True, "partial_mode": "abort"},
}


def simulate(trace: Trace, *, steps: int = 12, mode: str = "d", seed: int = 0, **keys: Any) -> SimulationResult:
    """Simulate the quickstart with small batches; `rollout__n=2` sets `rollout.n`."""
    changes = {
        "trainer.ppo_mini_batch_size": SIZE,
        "rollout.n": N,
        "algorithm.rollout_correction.bypass_mode": False,
        **{f"async_training.{name}": value for name, value in MODES[mode].items()},
        **{name.replace("__", "."): value for name, value in keys.items()},
    }
    return simulate_run(config_with(changes), trace, steps=steps, seed=seed)


def trace(*, lengths: LengthTrace | None = None, dispatch: DispatchTrace | None = None, update: float = 400.0,
          sync: SyncTrace | None = None, contention: ContentionTrace | None = None,
          step_s: dict[int, float] | None = None) -> Trace:  # fmt: skip
    return Trace(
        lengths=lengths or LengthTrace(mean_tokens=30, sigma=0.8, group_share=0.5),
        engine=EngineTrace(step_s=step_s or {1: 0.01, 16: 0.02}, request_s=0.02, prompt_tokens=10,
                           prefill_tokens_per_s=2000.0),
        dispatch=dispatch or DispatchTrace(sample_s=0.01, score_s=0.02),
        trainer=TrainerTrace(update_tokens_per_s={1: update}, experience_tokens_per_s={1: 4 * update}, step_s=0.05),
        sync=sync or SyncTrace(publish_s=0.05, fetch_s=0.1, pause_s=0.02, verify_s=0.05),
        contention=contention or ContentionTrace(),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(sorted(MODES)),
    seed=st.integers(0, 99),
    filtered=st.sampled_from([0.0, 0.3]),
    over=st.sampled_from([0.0, 0.5]),
    unfinished=st.sampled_from(["drop", "keep_finished", "keep_partial"]),
    surplus=st.integers(0, 2),
    turns=st.integers(1, 3),
    bound=st.sampled_from([None, 0, 1]),
    slots=st.integers(2, 9),
    epochs=st.integers(1, 2),
)
def test_every_sample_is_trained_or_dropped_or_in_flight(
    mode: str, seed: int, filtered: float, over: float, unfinished: str, surplus: int, turns: int,
    bound: int | None, slots: int, epochs: int,
) -> None:  # fmt: skip
    lengths = LengthTrace(mean_tokens=20, sigma=1.0, group_share=0.3, turns=turns, tool_s=0.1, tool_sigma=0.5,
                          to_limit=0.02)  # fmt: skip
    result = simulate(
        trace(lengths=lengths, dispatch=DispatchTrace(sample_s=0.01, score_s=0.02, filtered=filtered)),
        mode=mode,
        seed=seed,
        rollout__over_sample={"samples": over, "trajectories": surplus, "unfinished": unfinished},
        rollout__max_concurrent_samples=slots,
        rollout__max_num_seqs=8,
        rollout__num_replicas=2,
        async_training__max_staleness=bound,
        trainer__ppo_epochs=epochs,
    )
    assert len(result.steps) == 12
    assert result.fed == result.trained + sum(result.dropped.values()) + result.in_flight
    assert result.trained == result.staleness.total() == 12 // epochs * SIZE
    ends = [step.end_s for step in result.steps]
    assert ends == sorted(ends) and ends[-1] == result.wall_s
    assert all(begin <= end <= result.wall_s for begin, end in result.waits)
    for share in (result.trainer_waits, result.rollouter_idle, result.engines_idle):
        assert -1e-9 <= share <= 1 + 1e-9
    if bound is not None:
        assert result.max_staleness <= bound
    assert result.wasted_tokens >= -1e-6 * result.generated_tokens
    if not filtered and not surplus and not over and bound is None:
        assert result.wasted == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_run(mode: str) -> None:
    first, second = (simulate(trace(), mode=mode, seed=3) for _ in range(2))
    assert first.steps == second.steps and first.staleness == second.staleness


@settings(max_examples=15, deadline=None)
@given(mode=st.sampled_from(sorted(MODES)), tokens=st.integers(5, 60), replicas=st.integers(1, 4))
def test_more_replicas_never_make_fixed_lengths_slower(mode: str, tokens: int, replicas: int) -> None:
    fixed = trace(lengths=LengthTrace(mean_tokens=tokens), update=1e6)
    fewer, more = (
        simulate(fixed, mode=mode, rollout__num_replicas=number).wall_s for number in (replicas, replicas + 1)
    )
    # With partial rollouts, the updates interrupt other requests, and each interruption costs a prefill.
    assert more <= fewer * (1.02 if mode.startswith("d") else 1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(threshold=st.sampled_from([0.0, 0.5, 1.0, 2.0]), seed=st.integers(0, 20))
def test_pacing_bounds_what_is_in_flight(threshold: float, seed: int) -> None:
    run = simulate(trace(update=100.0), async_training__staleness_threshold=threshold, seed=seed,
                   async_training__trigger_parameter_sync_step=1, steps=16)  # fmt: skip
    assert run.in_flight <= (1 + threshold) * SIZE
    if threshold == 0:
        assert run.max_staleness == 0


def test_on_policy_takes_turns_and_async_overlaps() -> None:
    slow = trace(lengths=LengthTrace(mean_tokens=60, sigma=0.3), update=400.0)
    on_policy = simulate(slow, mode="a")
    overlapping = simulate(slow, mode="d", async_training__trigger_parameter_sync_step=1,
                           async_training__staleness_threshold=1)  # fmt: skip
    # On-policy, no sample is generated while the Trainer works: scoring ends before the lease.
    assert 1 - on_policy.rollouter_idle <= on_policy.trainer_waits + 1e-9
    assert overlapping.wall_s < 0.8 * on_policy.wall_s
    assert on_policy.max_staleness == 0 < overlapping.max_staleness


def test_a_step_takes_the_time_of_its_parts() -> None:
    """On-policy with equal lengths, every duration follows from the inputs."""
    inputs = Trace(
        lengths=LengthTrace(mean_tokens=50),
        engine=EngineTrace(step_s={1: 0.01, 12: 0.01}, request_s=0.2),
        dispatch=DispatchTrace(sample_s=0.1, score_s=0.3),
        trainer=TrainerTrace(
            update_tokens_per_s={1: 600.0}, experience_tokens_per_s={1: 1200.0}, step_s=0.4, lease_s=0.7
        ),
        sync=SyncTrace(publish_s=0.5, fetch_s=0.6, pause_s=0.8, verify_s=0.9),
    )
    result = simulate(inputs, mode="a", steps=5)
    tokens = SIZE * N * 50
    generation = 0.1 + 0.2 + 50 * 0.01 + 0.3
    training = 0.7 + tokens / 1200 + 0.4 + tokens / 600 + 0.5
    assert result.steps[0].end_s == pytest.approx(generation + training)
    period = result.steps[2].end_s - result.steps[1].end_s
    assert period == pytest.approx(0.6 + 0.8 + 0.9 + generation + training)
    assert result.trained_tokens == 5 * tokens == pytest.approx(result.generated_tokens)


def test_draining_costs_more_than_keeping_requests_in_flight() -> None:
    long_tail = trace(lengths=LengthTrace(mean_tokens=40, sigma=1.2), update=2000.0)
    drained = simulate(long_tail, mode="c", steps=30)
    kept = simulate(long_tail, mode="c", steps=30, async_training__partial_rollout=True)
    assert kept.wall_s < drained.wall_s


def test_contention_slows_both_sides() -> None:
    alone = simulate(trace(), mode="d")
    shared = simulate(trace(contention=ContentionTrace(engine=1.5, trainer=1.5)), mode="d")
    assert shared.wall_s > 1.2 * alone.wall_s


def test_over_sampling_saves_time_on_a_long_tail_and_wastes_tokens() -> None:
    long_tail = trace(lengths=LengthTrace(mean_tokens=40, sigma=1.2), update=1e5)
    plain = simulate(long_tail, mode="a", steps=20)
    over = simulate(long_tail, mode="a", steps=20, rollout__over_sample={"samples": 0.5})
    assert over.wall_s < plain.wall_s
    assert over.wasted > 0.1
    assert plain.wasted == pytest.approx(0.0, abs=1e-6)
    assert set(over.dropped) == {"surplus"}


def test_a_tool_delays_only_its_own_trajectory() -> None:
    tools = LengthTrace(mean_tokens=20, turns=3, tool_s=1.0)
    result = simulate(trace(lengths=tools, update=1e6), mode="a", steps=3)
    # Two tool calls of one second lie between three turns.
    assert result.step_s >= 2.0
    assert result.trained_tokens == 3 * SIZE * N * 60


def test_a_validation_delays_the_next_version_and_not_the_samples_of_this_one() -> None:
    inputs = trace().model_copy(update={"validation": ValidationTrace(requests=20, mean_tokens=200)})
    without = simulate(inputs, mode="a", trainer__val_before_train=False)
    validated = simulate(inputs, mode="a", trainer__val_before_train=True)
    assert validated.wall_s > without.wall_s


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm__adv_estimator": "gae"}, "critic"),
        ({"algorithm__adv_estimator": "remax"}, "greedy responses"),
        ({"skip__async_rollout": {"enable": True, "dump_dir": "/records"}}, "replayed samples"),
    ],
)
def test_what_takes_time_and_is_not_simulated_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(trace(), **keys)


AUTOSCALING = {"enable": True, "min_replicas": 1, "max_replicas": 6, "up_after_s": 5.0, "down_after_s": 10.0}


def autoscaled(
    update: float, *, replicas: int, steps: int = 150, start_s: float = 2.0, **keys: Any
) -> SimulationResult:
    inputs = trace(lengths=LengthTrace(mean_tokens=60, sigma=0.5), update=update)
    inputs = inputs.model_copy(update={"engine": inputs.engine.model_copy(update={"start_s": start_s})})
    return simulate(inputs, steps=steps, rollout__num_replicas=replicas, rollout__autoscaling=AUTOSCALING,
                    rollout__max_num_seqs=4, **keys)  # fmt: skip


def test_replicas_join_until_the_trainer_does_not_wait() -> None:
    scaled = autoscaled(4000.0, replicas=1)
    fixed = simulate(trace(lengths=LengthTrace(mean_tokens=60, sigma=0.5), update=4000.0), steps=150,
                     rollout__num_replicas=1, rollout__max_num_seqs=4)  # fmt: skip
    numbers = [number for _, number in scaled.replicas_from]
    assert numbers == sorted(numbers) and numbers[-1] > 1
    assert scaled.wall_s < fixed.wall_s
    assert 1 < scaled.replicas < max(numbers)
    joined = [at for at, number in scaled.replicas_from if number > 1]
    assert joined[0] >= AUTOSCALING["up_after_s"] + 2.0  # the period that is observed, and the start of the replica


@pytest.mark.parametrize("partial", [True, False])
def test_replicas_leave_while_pacing_is_shut_and_their_tokens_are_kept(partial: bool) -> None:
    scaled = autoscaled(100.0, replicas=6, async_training__partial_rollout=partial)
    assert min(number for _, number in scaled.replicas_from) < 6
    assert scaled.wasted == pytest.approx(0.0, abs=1e-6)
    assert scaled.fed == scaled.trained + scaled.in_flight
    assert scaled.max_staleness <= 2


@given(per_step=st.sampled_from([4, 8, 16, 6]), step=st.integers(0, 9))
def test_a_step_has_the_lengths_of_the_same_recorded_step(per_step: int, step: int) -> None:
    """Lengths change while the policy learns: with larger steps, a run is not at its end after the recorded samples."""
    groups = tuple(tuple(((1 + 100 * index + number, 0.0),) for number in range(4)) for index in range(80))
    recorded = LengthTrace(recorded=groups, recorded_per_step=8)
    lengths = GroupLengths(recorded, limit=10**6, per_step=per_step, seed=0)
    sampled = [lengths.of(1 + step * per_step + place, 2) for place in range(per_step)]
    tokens = [tokens for group in sampled for ((tokens, _),) in group]
    assert {number // 100 for number in tokens} <= set(range(8 * step, 8 * step + 8))
    assert len(set(tokens)) == len(tokens), "half as large groups use both halves of the recorded ones"
