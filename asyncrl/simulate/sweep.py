"""Simulates several settings of a configuration, compares them and recommends one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from asyncrl.config.compose import Mode, check_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.base import NodePool
from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import count, percent
from asyncrl.simulate.result import SimulationResult
from asyncrl.simulate.run import simulate_run
from asyncrl.simulate.trace import Trace

MAX_SETTINGS = 200
MAX_SPLITS = 16
MAX_TRAJECTORIES = 60_000
"""Limit of the simulated trajectories of a setting, unless the number of steps is given."""
_MIN_VERSIONS = 4
_CLOSE = 0.03
"""Settings whose speeds differ by less than this share are equally fast."""
_IDLE = 0.15
_SPLIT_KEYS = [
    f"{section}.{key}"
    for section, number in (("rollout", "num_replicas"), ("trainer", "num_workers"))
    for key in (number, "nnodes", "n_gpus_per_node")
]
_MODES: Mapping[str, Mode] = {"sync": "sync", "fully_async": "fully_async"}

Settings = Mapping[str, str]
"""Overrides of one setting, by key."""


@dataclass(frozen=True, slots=True)
class SimulatedSetting:
    """A setting and what happened with it."""

    settings: Settings
    config: Config
    total_steps: int
    """Optimizer steps of the configured run; the simulation may have fewer."""
    result: SimulationResult

    @property
    def name(self) -> str:
        return _joined(self.settings) or self.config.mode

    @property
    def short_name(self) -> str:
        """The name with the last parts of the keys only."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items()) or self.name

    @property
    def run_s(self) -> float:
        """Time of the whole run: after the simulated steps, it continues at the speed of their second half."""
        steps = self.result.steps
        per_version = max(1, self.config.steps_per_lease * self.config.async_training.trigger_parameter_sync_step)
        left = self.total_steps - len(steps)
        half = len(steps) // 2 // per_version * per_version
        if left <= 0 or not half or half == len(steps):
            return self.result.wall_s * max(1.0, self.total_steps / max(1, len(steps)))
        pace_s = (steps[-1].end_s - steps[half - 1].end_s) / (len(steps) - half)
        return self.result.wall_s + left * pace_s

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second over the whole run."""
        steps = self.result.steps
        return self.result.trained_tokens / max(1, len(steps)) * self.total_steps / self.run_s if self.run_s else 0.0


def parse_sweep(texts: Sequence[str]) -> list[Settings]:
    """Return all combinations of `key=v1,v2`; without any, one setting that changes nothing.

    Raises:
        ConfigError: a text is not of this form.
    """
    knobs: list[list[tuple[str, str]]] = []
    for text in texts:
        key, equals, values = text.partition("=")
        choices = [value.strip() for value in values.split(",") if value.strip()]
        if not key.strip() or not equals or not choices:
            raise ConfigError(
                f"--sweep {text} names no values: write a key and its values, such as "
                "--sweep rollout.num_replicas=2,4,8"
            )
        knobs.append([(key.strip(), value) for value in choices])
    return [dict(combination) for combination in product(*knobs)]


def swept_settings(
    source: str | None, overrides: Sequence[str], sweep: Sequence[str], gpus: int | None
) -> list[Settings]:
    """Return the settings of `--sweep` and `--gpus`: all combinations of the swept values, each with the splits of the
    GPUs that it allows. `source`, `overrides`: as in `configurations`.

    Raises:
        ConfigError: a sweep is wrong or contradicts `gpus`, a configuration is wrong, or there are too many settings.
    """
    swept = parse_sweep(sweep)
    _check_number(len(swept))
    if gpus is None:
        return swept
    for text in sweep:
        if text.partition("=")[0].strip() in _SPLIT_KEYS:
            raise ConfigError(
                f"--sweep {text}: --gpus {gpus} chooses the numbers of replicas and ranks, and with others a setting "
                f"would not have {gpus} GPUs. Leave out this --sweep, or --gpus"
            )
    found: list[Settings] = [
        {**split, **one} for one in swept for split in _splits(_config(source, [*overrides, *_texts(one)]), gpus)
    ]
    _check_number(len(found))
    return found


def _splits(config: Config, gpus: int) -> list[Settings]:
    """Return up to `MAX_SPLITS` ways to split GPUs between generation and training.

    Raises:
        ConfigError: the configuration needs more GPUs, or its number of replicas changes.
    """
    if config.takes_turns:
        raise ConfigError(
            f"placement = colocated: both sides have all GPUs in turns, so --gpus {gpus} has nothing to split. Set it "
            "to separate, or leave out --gpus"
        )
    if config.rollout.autoscaling.enable:
        raise ConfigError(
            f"rollout.autoscaling.enable = true: the run would change the number of replicas, and --gpus {gpus} "
            "compares fixed splits. Set it to false, or leave out --gpus"
        )
    engine, ranks = config.rollout.replica_size, config.trainer.fewest_ranks
    found = [
        (replicas, gpus - replicas * engine)
        for replicas in range(1, (gpus - 1) // engine + 1)
        if (gpus - replicas * engine) % ranks == 0
    ]
    if not found:
        raise ConfigError(
            f"--gpus {gpus} cannot be split: a replica needs {engine} (rollout.tensor_parallel_size x "
            f"rollout.pipeline_parallel_size), and training a "
            f"multiple of {ranks} (trainer.ulysses_sequence_parallel_size, trainer.tensor_parallel_size and "
            "trainer.fsdp_size). Give more GPUs"
        )
    every = math.ceil(len(found) / MAX_SPLITS)
    return [
        {"rollout.num_replicas": str(replicas), "trainer.num_workers": str(workers)}
        for replicas, workers in found[every - 1 :: every]
    ]


def _check_number(settings: int) -> None:
    if settings > MAX_SETTINGS:
        raise ConfigError(f"{settings} combinations, and at most {MAX_SETTINGS} are simulated: sweep fewer values")


def configurations(source: str | None, overrides: Sequence[str], settings: Sequence[Settings]) -> list[Config]:
    """Return the configuration with each of the settings.

    `source`, `overrides`: as `asyncrl launch` has them; the key `mode` is `fully_async` or `sync`.

    Raises:
        ConfigError: a configuration is wrong.
    """
    return [_config(source, [*overrides, *_texts(one)]) for one in settings]


def simulate_settings(
    settings: Sequence[Settings],
    configs: Sequence[Config],
    trace: Trace,
    *,
    steps: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[SimulatedSetting]:
    """Simulate the configurations of the settings.

    Args:
        steps: optimizer steps to simulate; None: those of the run, but no more than `MAX_TRAJECTORIES` allows.
        progress: receives the settings done and in total.

    Raises:
        ConfigError: a configuration cannot be simulated.
    """
    done: list[SimulatedSetting] = []
    for one, config in zip(settings, configs, strict=True):
        progress(len(done), len(configs))
        simulated = steps or _affordable_steps(config)
        total = max(simulated, config.trainer.total_training_steps or simulated)
        result = simulate_run(config, trace, steps=simulated, total_steps=total, seed=seed)
        done.append(SimulatedSetting(one, config, total, result))
    return done


def _joined(settings: Settings) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _texts(settings: Settings) -> Iterator[str]:
    for key, value in settings.items():
        yield f"{key}={value}"
        if key in ("trainer.num_workers", "rollout.num_replicas"):  # they replace those of a pool of nodes
            section = key.partition(".")[0]
            yield from (f"{section}.nnodes=null", f"{section}.n_gpus_per_node=null")


def _config(source: str | None, overrides: Sequence[str]) -> Config:
    mode: Mode = "fully_async"
    others: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "mode":
            others.append(text)
        elif value in _MODES:
            mode = _MODES[value]
        else:
            raise ConfigError(f"mode = {value} is no mode: write mode=fully_async or mode=sync")
    return check_config(source, others, mode=mode, scope="simulation").require()


def _affordable_steps(config: Config) -> int:
    per_sample = config.rollout.n + config.rollout.over_sample.trajectories
    per_step = per_sample * config.trainer.ppo_mini_batch_size / config.trainer.ppo_epochs
    per_version = config.steps_per_lease * config.async_training.trigger_parameter_sync_step
    versions = max(_MIN_VERSIONS, int(MAX_TRAJECTORIES / (per_step * per_version)))
    steps = versions * per_version
    return min(steps, config.trainer.total_training_steps or steps)


# ---------------------------------------------------------------------------------------------- results


def as_rows(done: Sequence[SimulatedSetting]) -> list[dict[str, Any]]:
    """Return the figures of each setting in JSON types; `speedup` is relative to the first one."""
    first = done[0].tokens_per_s
    return [
        {
            "setting": one.name,
            "run_s": round(one.run_s, 3),
            "speedup": round(one.tokens_per_s / first, 3) if first else None,
            **one.result.as_numbers(),
        }
        for one in done
    ]


def recommend(done: Sequence[SimulatedSetting], given: SimulatedSetting) -> tuple[SimulatedSetting, str]:
    """Return the setting to use and a sentence with the reasons. `given`: the configuration without the settings, to
    compare with.

    It is the one that trains the most tokens per second. Of those that are almost as fast, it is the one with the least
    staleness, and then with the fewest replicas and ranks.
    """
    fastest = max(one.tokens_per_s for one in done)
    close = [one for one in done if one.tokens_per_s >= (1 - _CLOSE) * fastest]
    best = min(close, key=lambda one: (round(one.result.mean_staleness, 1), _resources(one.config)))
    text = f"use {_for_launch(best, given.config)}: {best.tokens_per_s:,.0f} trained tokens/s"
    if best.config == given.config:
        text += ", which is the given configuration"
    elif given.tokens_per_s:
        replicas, ranks = given.config.rollout.num_replicas, given.config.trainer.num_workers
        text += f", {best.tokens_per_s / given.tokens_per_s:.2f} times the given configuration"
        text += f" ({count(replicas, 'replica')}, {count(ranks, 'rank')})"
    equal = len(close) - 1
    if equal:
        text += f". {equal} more {'is' if equal == 1 else 'are'} as fast, with staler samples or more resources"
    return best, f"{text}. {bottleneck(best)}"


def _for_launch(one: SimulatedSetting, given: Config) -> str:
    """Return the setting as `asyncrl launch` takes it: together with the number of processes, it sets the nodes that
    would contradict it, if the configuration has them."""
    settings = dict(one.settings)
    for section, number, size in (
        ("rollout", "num_replicas", one.config.rollout.replica_size),
        ("trainer", "num_workers", 1),
    ):
        pool: NodePool = getattr(given, section)
        per_node, processes = pool.n_gpus_per_node, settings.get(f"{section}.{number}")
        scales = section == "rollout" and given.rollout.autoscaling.enable  # nodes limit the number of replicas only
        if per_node is None or processes is None or scales:
            continue
        nodes, rest = divmod(int(processes) * size, per_node)
        fills = not rest and max(size, per_node) % min(size, per_node) == 0
        if fills and (nodes == 1 or given.ray.address is not None):
            settings.setdefault(f"{section}.nnodes", str(nodes))
        else:
            settings |= {f"{section}.nnodes": "null", f"{section}.n_gpus_per_node": "null"}
    return _joined(settings) or one.name


def limits(done: Sequence[SimulatedSetting]) -> list[str]:
    """Return sentences about what the settings have and the simulation leaves out."""
    found = []
    if any(one.config.takes_turns for one in done):
        found.append(
            "placement=colocated has no effect on the simulation: it leaves out the time in which engines and ranks "
            "hand the GPUs over. Add that to trainer.lease_s and sync.pause_s of the trace"
        )
    if len({one.config.rollout.tensor_parallel_size for one in done}) > 1:
        found.append(
            "rollout.tensor_parallel_size changes only the number of GPUs: engines of every size have the speed in the "
            "trace (engine.step_s). To compare sizes, give each one a trace that was measured with it"
        )
    return found


def bottleneck(one: SimulatedSetting) -> str:
    """Return a sentence about which side waits, and the knob that helps."""
    result, config = one.result, one.config
    waits, idle = percent(round(result.trainer_waits, 3)), percent(round(result.engines_idle, 3))
    if result.trainer_waits > _IDLE and result.engines_idle > _IDLE:
        text = f"Both sides wait for each other (Trainer {waits}, engines {idle})"
        if config.mode == "sync":
            return (
                f"{text}, because they take turns. Whether mode=fully_async is faster depends on how the GPUs are "
                "split, which --gpus compares"
            )
        ahead = config.async_training.staleness_threshold
        return f"{text}: async_training.staleness_threshold (now {ahead:g}) lets them overlap more"
    if result.trainer_waits > _IDLE:
        return f"Generation is the bottleneck (the Trainer waits {waits}): more rollout.num_replicas help"
    if result.engines_idle > _IDLE:
        return f"Training is the bottleneck (engines are idle {idle}): move GPUs from replicas to trainer.num_workers"
    return f"Both sides are busy (the Trainer waits {waits}, engines are idle {idle})"


def _resources(config: Config) -> int:
    return config.rollout.num_replicas * config.rollout.replica_size + config.trainer.num_workers
