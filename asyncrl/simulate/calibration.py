"""Measures a trace from the events of a run. Blocking.

| of the trace | from |
|---|---|
| `engine.step_s` | how fast requests got tokens, by their number (`asyncrl.simulate.decoding`) |
| `engine.request_s` | `queued_s` and `prefill_s` of requests |
| `lengths.recorded` | `response_tokens` of the requests of each trajectory, and the time between its turns |
| `dispatch` | `sample.generate` before its first and after its last request; from its end to `sample.ready`; drops |
| `trainer` | `trainer.update` and `trainer.experience` against their tokens; the rest of `step` |
| `sync` | `trainer.publish`, `sync.fetch`, `sync.pause`, `sync.verify`, the rest of `sync.apply` |
| `contention` | how long the busiest processes waited for a processor (`asyncrl.simulate.contention`) |

Durations of what happens in sequence are means, so that their sums are those of the run. The first of each is left out,
because it includes what happens once (compilation, allocation). Latencies of samples are medians, because samples are
generated at the same time, and the Trainer takes those that are done first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from asyncrl.core.failures import ConfigError
from asyncrl.observe.formats import count
from asyncrl.observe.report.load import Events, load
from asyncrl.observe.report.requests import logical_requests
from asyncrl.observe.report.statistics import Intervals, clip, intersection, spans, total, union
from asyncrl.observe.status.run_status import read_readable_state
from asyncrl.profiling.files import is_number
from asyncrl.simulate.contention import measure_contention, read_cpu_use
from asyncrl.simulate.decoding import decoding_speeds, decoding_times
from asyncrl.simulate.trace import (
    ContentionTrace,
    DispatchTrace,
    EngineTrace,
    LengthTrace,
    RecordedGroup,
    SyncTrace,
    Trace,
    TrainerTrace,
    ValidationTrace,
)
from asyncrl.storage.run_dir import SavedConfig

Values = NDArray[np.float64]
_OTHER_KINDS = {
    "sft": "supervised training (`asyncrl sft`), which generates nothing",
    "eval": "an evaluation (`asyncrl eval`), which trains nothing",
}
_MIN_STEPS = 3
_COMPUTING = ("trainer.experience", "trainer.critic", "trainer.update", "trainer.publish")
_MIN_VARIATION = 0.1
"""Variation of the tokens (standard deviation over mean) from which a fit can tell a constant part. With less, all
of the time is proportional to the tokens."""


def calibrate(run_dir: Path) -> Trace:
    """Return the trace of a run.

    Raises:
        ConfigError: the run is of another kind (`asyncrl sft`, `asyncrl eval`), has no events of requests and steps, or
            did not record them.
    """
    state = read_readable_state(run_dir)
    if state is not None and (kind := _OTHER_KINDS.get(state.mode)) is not None:
        raise ConfigError(
            f"{run_dir} is {kind}, so it does not have the speeds of both generation and training. "
            "Take a run of `asyncrl launch`, fully_async or sync"
        )
    events = load(run_dir)
    missing = [name for name in ("request", "sample.generate", "trainer.update", "step") if not len(events[name])]
    if missing:
        raise ConfigError(
            f"{run_dir} has no `{missing[0]}` events, so its speeds are unknown. Take a run that has trained some "
            "steps with profiler.level=summary (the default) or full"
        )
    if (num_steps := events["step"]["step"].nunique()) < _MIN_STEPS:
        raise ConfigError(
            f"{run_dir} has trained {count(num_steps, 'step')}, and its first one includes work that later ones do not "
            "have, so its speeds say little. Take a run of 20 steps or more"
        )
    config = SavedConfig(run_dir)
    requests = logical_requests(events)
    requests = requests[~requests["aborted"]]
    contention = _contention(run_dir, events, config)
    step_s = decoding_speeds(
        events, _computing(events), warm_s=float(events["step"]["end"].min()), slowdown=contention.engine
    )
    decoding = union(*decoding_times(events["request"]))
    update = _trainer(events, decoding, contention.trainer)
    experience = _experience(events)
    workers = _positive(config, "trainer", "num_workers") or 1
    per_step = _positive(config, "trainer", "ppo_mini_batch_size")
    first_token = events["request"]["queued_s"].fillna(0.0) + events["request"]["prefill_s"].fillna(0.0)
    return Trace(
        lengths=LengthTrace(recorded=_recorded(requests), recorded_per_step=per_step),
        engine=EngineTrace(step_s=step_s, request_s=_median(first_token), **_start(events)),
        dispatch=_dispatch(events, requests),
        trainer=TrainerTrace(
            update_tokens_per_s={workers: update[1]},
            experience_tokens_per_s={workers: experience[1]} if experience is not None else None,
            step_s=update[0] + _rest_of_steps(events),
            lease_s=_lease_overhead(events) + (experience[0] if experience is not None else 0.0),
            checkpoint_s=_mean(events["trainer.checkpoint"]["duration_s"]),
        ),
        sync=_sync(events),
        validation=_validation(events),
        contention=contention,
    )


def _positive(config: SavedConfig, *keys: str) -> int | None:
    """Return a positive integer of the configuration; None: it has something else there."""
    value = config.value(*keys)
    return value if is_number(value) and isinstance(value, int) and value > 0 else None


def _mean(values: pd.Series) -> float:
    """Return the mean of all values but the first, which includes what happens once; 0 without any."""
    known = values.dropna()
    return max(0.0, float(known.iloc[1 if len(known) > 1 else 0 :].mean())) if len(known) else 0.0


def _median(values: pd.Series) -> float:
    """Return the median; 0 without values."""
    known = values.dropna()
    return max(0.0, float(known.median())) if len(known) else 0.0


# ---------------------------------------------------------------------------------------------- engines


def _start(events: Events) -> dict[str, float]:
    """Return the time from the decision to start a replica until its first request; empty if none was started."""
    wanted = events["replicas.wanted"]
    more = wanted[wanted["replicas"] > wanted["before"]]["timestamp"].to_numpy()
    first = events["request"].groupby("replica", observed=True)["timestamp"].min()
    delays = pd.Series([at - more[more < at].max() for at in first if (more < at).any()], dtype="float64")
    return {"start_s": _mean(delays)} if len(delays) else {}


# ---------------------------------------------------------------------------------------------- samples


def _recorded(requests: pd.DataFrame) -> tuple[RecordedGroup, ...]:
    """Return the turns of all samples, in feed order."""
    rows = requests[requests["of_last_generation"]].sort_values(["index", "trajectory", "turn"])
    groups: dict[int, dict[int, list[tuple[int, float]]]] = {}
    last: tuple[int, int] | None = None
    last_end = 0.0
    columns = ("index", "trajectory", "response_tokens", "timestamp", "end")
    for index, trajectory, tokens, start, end in zip(*(rows[name].tolist() for name in columns), strict=True):
        turns = groups.setdefault(index, {}).setdefault(trajectory, [])
        if last == (index, trajectory) and turns:
            turns[-1] = (turns[-1][0], max(0.0, start - last_end))
        turns.append((max(1, int(tokens)), 0.0))
        last, last_end = (index, trajectory), end
    return tuple(tuple(map(tuple, group.values())) for group in groups.values())


def _dispatch(events: Events, requests: pd.DataFrame) -> DispatchTrace:
    generated = events["sample.generate"]
    generated = generated[generated["index"] > 0].drop_duplicates("index", keep="last").set_index("index")
    own = requests[requests["of_last_generation"]].groupby("index")
    before = own["timestamp"].min() - generated["timestamp"]
    after = generated["end"] - own["end"].max()
    ready = events["sample.ready"].drop_duplicates("index", keep="last").set_index("index")["end"]
    dropped = events["sample.dropped"]
    filtered = int((dropped["reason"].astype("str") == "filtered").sum())
    trained = max(1, len(events["sample.trained"]["index"].unique()))
    return DispatchTrace(
        sample_s=_median(before) + _median(after),
        score_s=_median(ready - generated["end"]),
        filtered=filtered / (filtered + trained),
    )


def _validation(events: Events) -> ValidationTrace:
    requests = events["request"][events["request"]["index"] == 0]
    runs = len(events["validation"])
    if not runs or not len(requests):
        return ValidationTrace()
    mean = max(1.0, float(requests["response_tokens"].mean()))
    return ValidationTrace(requests=len(requests) // runs, mean_tokens=mean)


# ---------------------------------------------------------------------------------------------- the Trainer


def _computing(events: Events) -> Intervals:
    """Return when the Trainer computed."""
    return spans(pd.concat([events[name][["timestamp", "end"]] for name in _COMPUTING]))


def _contention(run_dir: Path, events: Events, config: SavedConfig) -> ContentionTrace:
    """Return how much both sides slow each other down; not at all if the run's CPU time is unknown."""
    if (use := read_cpu_use(run_dir)) is None:
        return ContentionTrace()
    first_s, last_s = float(events["step"]["end"].min()), float(events["step"]["end"].max())
    engines, trainer = (clip(one, first_s, last_s) for one in (spans(events["request"]), _computing(events)))
    both_s = total(intersection(engines, trainer))

    def threads(process: str) -> int:
        section = {"engine": "rollout", "rank": "trainer"}.get(process.partition("-")[0], "")
        number = _positive(config, section, "cpu_threads") if section else 1
        parallel = _positive(config, "rollout", "tensor_parallel_size") if section == "rollout" else 1
        return number * parallel if number and parallel else 1

    return measure_contention(use, both_s, threads)


def _trainer(events: Events, decoding: Intervals, slowdown: float) -> tuple[float, float]:
    """Return the fixed time of an update and its tokens per second, both while no engine decodes.

    `slowdown`: the factor on the Trainer's time while one does.
    """
    updates = events["trainer.update"].drop_duplicates("step", keep="last").set_index("step")
    steps = events["step"].drop_duplicates("step", keep="last").set_index("step")
    both = updates.join(steps["tokens"].rename("trained"), how="inner")
    both = both.iloc[1:] if len(both) > 1 else both  # the first step warms up
    duration, tokens = both["duration_s"].to_numpy(), both["trained"].fillna(0.0).to_numpy()
    during = zip(both["timestamp"], both["end"], strict=True)
    beside = np.array([total(clip(decoding, start, end)) for start, end in during])
    fixed, per_token = _line(duration - beside * (1 - 1 / slowdown), tokens)
    return fixed, 1.0 / max(per_token, 1e-9)


def _experience(events: Events) -> tuple[float, float] | None:
    """Return the fixed time of a lease's forward passes and their tokens per second; None without any."""
    made = events["trainer.experience"]
    if not len(made):
        return None
    steps = events["step"].drop_duplicates("step", keep="last").sort_values("step")
    leases = np.searchsorted(np.sort(made["step"].unique()), steps["step"].to_numpy(), side="right")
    by_lease = steps["tokens"].fillna(0.0).groupby(leases).sum()
    made = made.drop_duplicates("step", keep="last").sort_values("step")
    tokens = by_lease.reindex(range(1, len(made) + 1)).fillna(0.0).to_numpy()
    fixed, per_token = _line(made["duration_s"].to_numpy()[1:], tokens[1:])
    return fixed, 1.0 / max(per_token, 1e-9)


def _line(duration: Values, tokens: Values) -> tuple[float, float]:
    """Return the fixed part and the time per token, neither below 0; the mean duration is kept."""
    if not len(duration):
        return 0.0, 0.0
    mean = float(tokens.mean())
    whole = float(duration.mean()) / mean if mean else 0.0
    slope = whole
    if tokens.std() >= _MIN_VARIATION * mean:
        slope = float(((tokens - mean) * (duration - duration.mean())).sum() / ((tokens - mean) ** 2).sum())
        slope = min(max(slope, 0.0), whole)
    return max(0.0, float(duration.mean()) - slope * mean), slope


def _rest_of_steps(events: Events) -> float:
    """Return the time of a step outside its measured parts."""
    steps = events["step"].drop_duplicates("step", keep="last").set_index("step")
    rest = steps["duration_s"] - steps["wait_samples_s"].fillna(0.0)
    for name in _COMPUTING:
        rest = rest.sub(events[name].groupby("step")["duration_s"].sum(), fill_value=0.0)
    return _mean(rest.reindex(steps.index))


def _lease_overhead(events: Events) -> float:
    """Return the time from the last sample that a waiting lease needed until the Trainer has the batch."""
    ready = events["sample.ready"].drop_duplicates("index", keep="last").set_index("index")["end"]
    leased = events["sample.leased"]
    waits = events["trainer.wait_samples"].drop_duplicates("step", keep="last").set_index("step")
    last = leased.assign(ready=leased["index"].map(ready)).groupby("step")["ready"].max().reindex(waits.index)
    late = (waits["end"] - last).where(last > waits["timestamp"])
    return _mean(late)


# ---------------------------------------------------------------------------------------------- versions


def _sync(events: Events) -> SyncTrace:
    parts = {name: _mean(events[f"sync.{name}"]["duration_s"]) for name in ("fetch", "pause", "verify", "drain")}
    whole = _mean(events["sync.apply"]["duration_s"])
    rest = max(0.0, whole - sum(parts.values()))
    return SyncTrace(
        publish_s=_mean(events["trainer.publish"]["duration_s"]),
        fetch_s=parts["fetch"] + rest,
        pause_s=parts["pause"],
        verify_s=parts["verify"],
    )
