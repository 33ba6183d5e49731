"""Rules about what is recorded and traced; `rules` runs them. Pure. Whether `nsys` is there is in `engine_checks`."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.problems import Given, Problem, Rule, warning
from asyncrl.config.schema import Config
from asyncrl.config.trainer_rules import roles


def _idle(config: Config, given: Given) -> Iterator[Problem]:
    """Keys without an effect under what others say."""
    profiler = config.profiler
    off = "profiler.level is off, so no events are recorded"
    none = "profiler.steps names no step, so nothing looks into the training processes"
    levels, steps = "set profiler.level=summary or full", "set profiler.steps, e.g. [3]"
    idle = {
        "buffer_events": (profiler.level == "off", off, levels),
        "synchronize": (profiler.level == "off", off, levels),
        "ranks": (not profiler.steps, none, steps),
        "tool": (not profiler.steps, none, steps),
    }
    for name, (has_none, because, fix) in idle.items():
        if has_none and f"profiler.{name}" in given:
            yield Problem(
                f"profiler.{name}",
                getattr(profiler, name),
                f"it would have no effect: {because}",
                f"{fix}, or leave this key out",
            )


def _steps(config: Config, given: Given) -> Iterator[Problem]:
    profiler, last = config.profiler, config.trainer.total_training_steps
    beyond = [step for step in profiler.steps if last is not None and step > last]
    if beyond:
        yield warning(
            "profiler.steps",
            list(profiler.steps),
            f"the run ends at step {last} (trainer.total_training_steps), before step {beyond[0]}",
            f"name steps from 1 to {last}",
        )


def _ranks(config: Config, given: Given) -> Iterator[Problem]:
    profiler = config.profiler
    if not profiler.steps:
        return
    if not profiler.ranks:
        yield Problem(
            "profiler.ranks", [], "there would be no process to look into", "name some, e.g. [0], or leave this key out"
        )
    apart = [role.num_workers or config.trainer.num_workers for role in roles(config).values()]
    most = max([config.trainer.num_workers, *apart])
    beyond = [rank for rank in profiler.ranks if rank >= most]
    if beyond:
        yield Problem(
            "profiler.ranks",
            list(profiler.ranks),
            f"training processes are numbered from 0 to {most - 1}, so there is no rank {beyond[0]}",
            f"name ranks below {most}, or raise trainer.num_workers",
        )


def _nsys(config: Config, given: Given) -> Iterator[Problem]:
    if config.profiler.tool == "nsys" and config.profiler.steps and config.trainer.device == "cpu":
        yield Problem(
            "profiler.tool",
            "nsys",
            "trainer.device is cpu, and Nsight Systems would have no GPU to look into",
            "set profiler.tool=torch, or trainer.device=cuda",
        )


RULES: tuple[Rule, ...] = (_idle, _steps, _ranks, _nsys)
