"""One simulated run: the queue's own operations between a simulated Rollouter and a simulated Trainer. Pure.

Every decision is the one of a run, by the same code:

    permits, over-sampling, eviction of stale samples, sample counts    `asyncrl.queue.operations`, `core.staleness`
    sizes of leases, rows of each step, due versions and validations    `trainer.schedule`, `config.resources.plan`
    the replica of a call                                               `rollouter.serving.balancing`
    the number of replicas                                              `asyncrl.core.autoscaling`

Only what takes time is simulated:

    permit ─▶ slot ─▶ decode on a replica, tools ─▶ score ─▶ offer ─▶ lease ─▶ experience ─▶ steps ─▶ publish
                                     ▲                                                               │
                                     └───────── fetch, pause (drain first, or not), verify ◀─────────┘

With `mode: sync` both sides take turns, so the same simulation stands for a system in which they share their GPUs
(colocated): give the trace the speeds of all GPUs, and the costs of changing sides as `lease_s` and `sync`.

Failures, restarts and the spread of speeds over replicas are not simulated.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.config.resources.plan import total_samples
from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.simulate.clock import SimulatedClock
from asyncrl.simulate.fleet import SimulatedFleet
from asyncrl.simulate.queue import SimulatedQueue
from asyncrl.simulate.result import SimulationResult
from asyncrl.simulate.rollouter import SimulatedRollouter
from asyncrl.simulate.trace import Trace
from asyncrl.simulate.trainer import SimulatedTrainer


def simulate_run(
    config: Config, trace: Trace, *, steps: int, total_steps: int | None = None, seed: int = 0
) -> SimulationResult:
    """Simulate one configuration with one trace.

    Args:
        steps: optimizer steps to simulate.
        total_steps: optimizer steps of the run, at least `steps`. The last steps of a run differ from the others,
            because no further sample is generated meanwhile; None: `steps`.

    Raises:
        ConfigError: the configuration does something that takes time and is not simulated.
    """
    _check(config)
    total_steps = total_steps or steps
    clock, result = SimulatedClock(), SimulationResult()
    queue = SimulatedQueue(clock, config, total_samples=total_samples(config, total_steps, None))
    fleet = SimulatedFleet(clock, config, trace, queue, seed=seed)
    rollouter = SimulatedRollouter(clock, config, trace, queue=queue, fleet=fleet, seed=seed)
    trainer = SimulatedTrainer(
        clock, config, trace, queue=queue, fleet=fleet, result=result, steps=steps, total_steps=total_steps, seed=seed
    )
    queue.on_change = rollouter.dispatch
    clock.start(fleet.updates())
    clock.start(trainer.run())
    queue.settle()
    if config.rollout.autoscaling.enable:
        clock.start(fleet.autoscale(lambda: (trainer.waits_for_samples, rollouter.waits_for_permits)))
    if not clock.run(lambda: trainer.ended):
        raise BugError(f"the simulated run waits forever after {len(result.steps)} steps: {queue.state.counts()}")
    result.wall_s, result.versions = clock.now, trainer.version
    fleet.summarize(result)
    _summarize(result, queue, rollouter, trainer.committed_tokens)
    return result


def _check(config: Config) -> None:
    """Raise ConfigError if the configuration does something that takes time and is not simulated."""
    for key, found, reason in (
        ("algorithm.adv_estimator = gae", config.needs_critic, "the critic's time is not simulated. Simulate grpo"),
        (
            "algorithm.adv_estimator = remax",
            config.algorithm.adv_estimator == "remax",
            "its greedy responses are not simulated. Simulate grpo with one more rollout.n",
        ),
        (
            "skip",
            config.generation_skip is not None and config.generation_skip.enable,
            "replayed samples take no time to generate, and which ones are recorded is not simulated. Leave out "
            "skip.rollout and skip.async_rollout",
        ),
    ):
        if found:
            raise ConfigError(f"{key}: {reason}")


def _summarize(result: SimulationResult, queue: SimulatedQueue, rollouter: SimulatedRollouter, tokens: int) -> None:
    """Compute the other figures at the end; `tokens`: those of committed samples."""
    counts, wall_s = queue.state.counts(), result.wall_s
    if wall_s:
        result.trainer_waits = sum(step.wait_s for step in result.steps) / wall_s
        result.rollouter_idle = 1 - rollouter.generation_s() / wall_s
    result.wasted_tokens = result.generated_tokens - tokens - rollouter.end()
    result.fed, result.trained = counts.fed, counts.trained
    result.in_flight = counts.running + counts.ready + counts.leased
    result.dropped = Counter({reason: number for reason, number in counts.dropped.items() if number})
