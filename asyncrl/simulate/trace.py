"""The speeds, costs and lengths that a simulation needs, as a value and as a file. Pure, except for reading files.

A trace comes from the events of a run (`asyncrl.simulate.calibration`), or is written by hand from figures that are
known or published; examples/scaling/ has some.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import yaml
from pydantic import Field

from asyncrl.config.sections.base import ConfigSection, NonNegative, Positive, Share
from asyncrl.config.yaml_files import load_yaml
from asyncrl.core.failures import ConfigError

Cost = Annotated[float, Field(ge=0)]
"""Seconds of work."""
AtLeastOne = Annotated[float, Field(ge=1)]
Table = Annotated[dict[Positive, Annotated[float, Field(gt=0)]], Field(min_length=1)]
"""A measured quantity by a number on which it depends."""
RecordedTurn = tuple[Annotated[int, Field(ge=1)], Cost]
"""Sampled tokens of a turn, and the seconds from its end to the next turn of its trajectory."""
RecordedGroup = tuple[tuple[RecordedTurn, ...], ...]
"""The turns of each trajectory of a sample."""


class LengthTrace(ConfigSection):
    """How many tokens responses have. Either `recorded`, or a log-normal distribution."""

    mean_tokens: Annotated[float, Field(ge=1)] = 256.0
    """Mean number of sampled tokens of a turn, before the limit `rollout.response_length`."""
    sigma: Cost = 0.0
    """Standard deviation of the logarithm of the length; 0: all lengths are equal."""
    group_share: Share = 0.0
    """Share of the variance of the logarithm that all trajectories of a prompt have in common."""
    to_limit: Share = 0.0
    """Share of trajectories that do not end by themselves and reach `rollout.response_length`."""
    turns: Positive = 1
    """Turns of each trajectory."""
    tool_s: Cost = 0.0
    """Mean time between two turns of a trajectory, in which a tool or a user answers."""
    tool_sigma: Cost = 0.0
    """Standard deviation of the logarithm of that time."""
    recorded: tuple[RecordedGroup, ...] = ()
    """Samples in feed order. A longer run begins again with the first."""
    recorded_per_step: Positive | None = None
    """Samples of each optimizer step of the recorded run. Lengths change while the policy learns, so a run with larger
    steps takes the samples of a step from the same step of the recorded run, several times if necessary. null: samples
    are taken one after another."""


class EngineTrace(ConfigSection):
    """The speed of one engine (replica)."""

    step_s: Table
    """Time of one decoding step, which gives each sequence a token, by the number of sequences. Between two numbers,
    the time is interpolated, and above the last one it continues with the last slope."""
    start_s: Cost = 60.0
    """Time from the decision to start a replica (`rollout.autoscaling`) until it serves."""
    request_s: Cost = 0.0
    """Time from the arrival of a request to its first token, during which other requests continue."""
    prompt_tokens: NonNegative = 0
    """Tokens of a prompt."""
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Prompt tokens per second; meanwhile the engine decodes nothing. A group's prompt is computed once. null: no
    time, or part of `request_s`."""


class DispatchTrace(ConfigSection):
    """The costs of a sample outside engines."""

    sample_s: Cost = 0.0
    """Time in a generation slot without a request in an engine, per sample."""
    score_s: Cost = 0.0
    """Time from the last token of a group until the sample is READY: reward, payload, offer."""
    filtered: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of samples that the Trainer drops as `filtered`."""


class TrainerTrace(ConfigSection):
    """The speed of training. Tokens are sampled response tokens."""

    update_tokens_per_s: Table
    """Tokens per second of an update, by `trainer.num_workers`. Between two numbers it is interpolated; beyond them it
    is proportional to the number of workers."""
    experience_tokens_per_s: Table | None = None
    """The same for the forward passes before the steps of a lease; null: they take no time."""
    step_s: Cost = 0.0
    """Time of a step besides its tokens."""
    lease_s: Cost = 0.0
    """Time of a lease besides its tokens and steps: fetching payloads, making rows."""
    checkpoint_s: Cost = 0.0
    """Time for which a checkpoint stops training."""


class SyncTrace(ConfigSection):
    """The cost of a weights version."""

    publish_s: Cost = 0.0
    """Time for which publishing stops training."""
    fetch_s: Cost = 0.0
    """Time from the publication until a replica can load it; generation continues."""
    pause_s: Cost = 0.0
    """Time for which a replica generates nothing."""
    verify_s: Cost = 0.0
    """Time after the pause until the version counts as applied; generation continues."""


class ValidationTrace(ConfigSection):
    """One validation."""

    requests: NonNegative = 0
    mean_tokens: Annotated[float, Field(ge=1)] = 1.0


class ContentionTrace(ConfigSection):
    """How much both sides slow each other down if they share processors. 1: not at all."""

    engine: AtLeastOne = 1.0
    """Factor on the time of a decoding step while the Trainer computes."""
    trainer: AtLeastOne = 1.0
    """Factor on the Trainer's time while an engine decodes."""


class Trace(ConfigSection):
    """All inputs of a simulation besides the configuration. Times are in seconds."""

    lengths: LengthTrace = LengthTrace()
    engine: EngineTrace
    dispatch: DispatchTrace = DispatchTrace()
    trainer: TrainerTrace
    sync: SyncTrace = SyncTrace()
    validation: ValidationTrace = ValidationTrace()
    contention: ContentionTrace = ContentionTrace()


def read_trace(file: Path) -> Trace:
    """Read a trace file.

    Raises:
        ConfigError: it cannot be read, or a key or value in it is wrong; the message names the file and the key.
    """
    try:
        return Trace.model_validate(load_yaml(file))
    except pydantic.ValidationError as error:
        errors = error.errors()  # a misspelt key may be the reason why another one is missing
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        key = ".".join(map(str, first["loc"])) or "the file"
        wrong = f"{key} = {str(first['input'])[:60]} cannot be simulated: {first['msg']}"
        if first["type"] == "missing":
            wrong = f"{key} is missing, so this is no trace, or not all of one"
        if first["type"] == "extra_forbidden":
            wrong = f"{key} is no key of a trace{_did_you_mean([str(part) for part in first['loc']])}"
        raise ConfigError(
            f"{file}: {wrong}. Correct it; a trace with every key is written by `asyncrl simulate --trace RUN "
            "--save-trace FILE`, and docs/scaling.md explains the keys"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the trace {file} cannot be read: {error}. Give a run, or a YAML file") from error


def _did_you_mean(unknown: Sequence[str]) -> str:
    """Return a hint at the key that the last part of this one resembles, or nothing."""
    *sections, name = unknown
    section: Any = Trace
    for part in sections:
        section = section.model_fields[part].annotation
    close = get_close_matches(name, section.model_fields, n=1)
    return f" (did you mean {'.'.join([*sections, close[0]])}?)" if close else ""


def trace_yaml(trace: Trace, *, max_groups: int) -> str:
    """Return the text of a trace file with the first `max_groups` recorded samples."""
    values = trace.model_dump(mode="json")
    recorded = values["lengths"].pop("recorded")[:max_groups]
    text = yaml.safe_dump(values, sort_keys=False)
    if not recorded:
        return text
    lines = "".join(f"    - {_compact(group)}\n" for group in recorded)
    return text.replace("engine:\n", f"  recorded:\n{lines}engine:\n", 1)


def _compact(group: Any) -> str:
    """Return a recorded group as YAML on one line."""
    return str([[[tokens, round(gap_s, 3)] for tokens, gap_s in turns] for turns in group]).replace(" ", "")


# ------------------------------------------------------------------------------------------------ derived values


def interpolated(table: Mapping[int, float], number: float) -> float:
    """Return the value at `number`: interpolated, constant below the first entry, with the last slope above the last
    one."""
    numbers = sorted(table)
    if len(numbers) == 1 or number <= numbers[0]:
        return table[numbers[0]]
    place = min(bisect_left(numbers, number), len(numbers) - 1)
    low, high = numbers[place - 1], numbers[place]
    slope = (table[high] - table[low]) / (high - low)
    if number > high:  # noise in a measurement must not make ever larger batches faster
        return table[high] + max(0.0, slope) * (number - high)
    return table[low] + slope * (number - low)


def speed_of(table: Mapping[int, float], workers: int) -> float:
    """Return the speed with this number of workers: interpolated, and proportional beyond the table."""
    low, high = min(table), max(table)
    if workers < low:
        return table[low] * workers / low
    if workers > high:
        return table[high] * workers / high
    return interpolated(table, workers)


class GroupLengths:
    """The turns of every sample of a run: a function of the trace, the seed and the feed index.

    Args:
        limit: the most sampled tokens of a trajectory (`rollout.response_length`).
        per_step: samples of each optimizer step of the simulated run.
    """

    def __init__(self, trace: LengthTrace, *, limit: int, per_step: int, seed: int) -> None:
        self._trace = trace
        self._limit = limit
        self._per_step = per_step
        self._seed = seed

    def of(self, index: int, num_trajectories: int) -> RecordedGroup:
        """Return the turns of each trajectory of the sample with this feed index, from 1."""
        trace = self._trace
        if trace.recorded:
            place, times = self._recorded_place(index - 1)
            group = trace.recorded[place % len(trace.recorded)]
            first = times * num_trajectories  # smaller groups use the whole recorded one before they repeat it
            return tuple(self._cut(group[(first + number) % len(group)]) for number in range(num_trajectories))
        turns = trace.turns
        mean, sigma = math.log(trace.mean_tokens) - trace.sigma**2 / 2, trace.sigma
        draw = np.random.default_rng((self._seed, index))
        common = draw.standard_normal() * math.sqrt(trace.group_share)
        own = draw.standard_normal((num_trajectories, turns)) * math.sqrt(1 - trace.group_share)
        tokens = np.maximum(1, np.rint(np.exp(mean + sigma * (common + own)))).astype(int).tolist()
        for number in np.flatnonzero(draw.random(num_trajectories) < trace.to_limit):
            tokens[number][-1] = self._limit
        gaps = np.zeros((num_trajectories, turns))
        if turns > 1 and trace.tool_s:
            spread = trace.tool_sigma * draw.standard_normal((num_trajectories, turns)) - trace.tool_sigma**2 / 2
            gaps = trace.tool_s * np.exp(spread)
        return tuple(
            self._cut(tuple(zip(own_tokens, own_gaps, strict=True)))
            for own_tokens, own_gaps in zip(tokens, gaps.tolist(), strict=True)
        )

    def _recorded_place(self, place: int) -> tuple[int, int]:
        """Return the place among the recorded samples for this one among the simulated samples, and how often it was
        used in the same step before."""
        recorded = self._trace.recorded_per_step or self._per_step
        step, within = divmod(place, self._per_step)
        return step * recorded + within % recorded, within // recorded

    def _cut(self, turns: tuple[RecordedTurn, ...]) -> tuple[RecordedTurn, ...]:
        """Return the turns within the limit."""
        if sum(tokens for tokens, _ in turns) <= self._limit:
            return turns
        kept: list[RecordedTurn] = []
        left = self._limit
        for tokens, gap_s in turns:
            kept.append((min(tokens, left), gap_s))
            left -= kept[-1][0]
            if left <= 0:
                break
        return tuple(kept)
