"""What a run comes to: `summary.json` (docs/design.md §7), built from its rows. Pure."""

from __future__ import annotations

import re
import statistics
import traceback
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from asyncrl.failures import AsyncRLError, ConfigError
from asyncrl.ports import Books, PartName
from asyncrl.run_state import Restart
from asyncrl.telemetry.rows import Row, finite
from asyncrl.types import DropReason

_GUESSES = re.compile(r" There are some potential root causes\. .*")
"""Ray's of a process that died, on the same line: a paragraph that is the same for every one of them."""

_PART = "asyncrl_part"
"""Attribute of an exception: the part that it is of."""

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run, or one whose Trainer was restarted, went on from. Step 0: from the start."""

    step: int
    version: int
    checkpoint: str
    """Its path; empty: none."""
    lineage: int = 0
    """In which it went on."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What the rows do not say."""

    wall_s: float = 0.0
    """Of this process; earlier parts of a resumed run are not in it."""
    books: Books = field(default_factory=Books)
    generated_tokens: int = 0
    idle_trainer: float | None = None
    """Share of the time between the first and the last step, of this process."""
    idle_rollouter: float | None = None
    restarts: tuple[Restart, ...] = ()
    """Of this process, the newest."""
    earlier_restarts: Mapping[PartName, int] = field(default_factory=dict)
    """How many there were before those, by part."""


class SummaryBuilder:
    """Collects rows; `build` may be called at any time, as often as one likes."""

    def __init__(self, resumed: Resumed | None = None, *, lineage: int | None = None) -> None:
        """`lineage`: where it is another one by now than `resumed` says."""
        self._resumed = resumed
        self._lineage = lineage if lineage is not None else resumed.lineage if resumed else 0
        self._version = resumed.version if resumed else 0
        self._step = resumed.step if resumed else 0
        self._first_step: int | None = None
        self._trained_tokens = 0
        self._reward_totals = array("d", [0.0])
        """Sum of the first so many trained samples' rewards."""
        self._staleness: Counter[int] = Counter()
        self._syncs = 0
        self._pauses = array("d")
        self._delays = array("d")
        self._validations: list[Row] = []

    def add(self, row: Row) -> None:
        """Rows in the order they were recorded, those of earlier parts of a resumed run included."""
        self._version = max(self._version, row.version)
        if row.kind == "step":
            self._add_step(row)
        elif row.kind == "apply":
            self._syncs += 1
            if "weight_sync/pause_s" in row.metrics:
                self._pauses.append(row.metrics["weight_sync/pause_s"])
            self._delays.append(row.metrics["weight_sync/publish_to_applied_s"])
        else:
            self._validations.append(row)

    def _add_step(self, row: Row) -> None:
        self._step = row.step
        self._first_step = row.step if self._first_step is None else self._first_step
        self._trained_tokens += int(row.metrics["tokens/trained"])
        for reward in row.more["rewards"]:
            self._reward_totals.append(self._reward_totals[-1] + reward)
        self._staleness.update(row.more["staleness"])

    @property
    def staleness(self) -> Mapping[int, int]:
        """Trained samples by their staleness in versions, ascending."""
        return dict(sorted(self._staleness.items()))

    @property
    def step(self) -> int:
        return self._step

    @property
    def version(self) -> int:
        return self._version

    @property
    def validated_step(self) -> int | None:
        """The newest step whose validation is in it."""
        return max((row.step for row in self._validations), default=None)

    @property
    def trained_tokens(self) -> int:
        return self._trained_tokens

    def reward(self) -> dict[str, float | None]:
        """`first` and `last`: means over the first and the last tenth of the trained samples, in training order, at
        least one sample. `best`: the highest mean of as many consecutive ones, so it is never below the two."""
        totals, count = self._reward_totals, len(self._reward_totals) - 1
        if not count:
            return {"first": None, "last": None, "best": None}
        tenth = max(1, count // 10)
        best = max((totals[end] - totals[end - tenth]) / tenth for end in range(tenth, count + 1))
        return {**self.reward_ends(), "best": best}

    def reward_ends(self) -> dict[str, float | None]:
        """`first` and `last` of `reward`, cheap enough for every step."""
        totals, count = self._reward_totals, len(self._reward_totals) - 1
        if not count:
            return {"first": None, "last": None}
        tenth = max(1, count // 10)
        return {"first": totals[tenth] / tenth, "last": (totals[count] - totals[count - tenth]) / tenth}

    def validation(self) -> dict[str, Any]:
        """`before`: the model the run started from; `after`: the newest later answer; `points`: all, in order."""
        before, after = self._before_and_after()
        return {
            "before": before and _point(before, with_metrics=True),
            "after": after and _point(after, with_metrics=True),
            "points": [_point(row) for row in self._validations],
        }

    def example(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """One validation prompt's answers before and after."""
        before, after = self._before_and_after()
        if before is None or after is None:
            return None
        return choose_example(before.more["examples"], after.more["examples"])

    def _before_and_after(self) -> tuple[Row | None, Row | None]:
        rows = sorted(self._validations, key=lambda row: row.version)
        if not rows:
            return None, None
        untrained = self._first_step is None or rows[0].step < self._first_step
        before = rows[0] if untrained else None
        after = rows[-1] if before is None or rows[-1].step > before.step else None
        return before, after

    def build(self, status: Status, error: Mapping[str, Any] | None, totals: Totals) -> dict[str, Any]:
        """The content of summary.json. What there was nothing of is None; no float in it is NaN or infinite."""
        books = totals.books
        resumed = self._resumed
        return finite(
            {
                "status": status,
                "error": error,
                "wall_s": round(totals.wall_s, 3),
                "step": self._step,
                "version": self._version,
                "lineage": self._lineage,
                "resumed": resumed
                and {"step": resumed.step, "version": resumed.version, "checkpoint": resumed.checkpoint},
                "samples": {
                    "fed": books.fed,
                    "running": books.running,
                    "ready": books.ready,
                    "leased": books.leased,
                    "trained": books.trained,
                    "dropped": {str(reason): books.dropped.get(reason, 0) for reason in DropReason},
                    "replayed": books.replayed,
                    "substituted": books.substituted,
                },
                "tokens": {"generated": totals.generated_tokens, "trained": self._trained_tokens},
                "reward": self.reward(),
                "staleness": staleness_summary(self.staleness),
                "idle": {"trainer": totals.idle_trainer, "rollouter": totals.idle_rollouter},
                "weight_sync": {
                    "count": self._syncs,
                    "pause_s": _median_and_max(self._pauses),
                    "publish_to_applied_s": _median_and_max(self._delays),
                },
                "validation": self.validation(),
                **recovery_summary(totals.restarts, totals.earlier_restarts),
            }
        )


def staleness_summary(histogram: Mapping[int, int]) -> dict[str, Any]:
    """`mean` and `max` in versions, and trained samples by versions; None where nothing was trained."""
    count = sum(histogram.values())
    return {
        "mean": sum(versions * samples for versions, samples in histogram.items()) / count if count else None,
        "max": max(histogram) if histogram else None,
        "histogram": {str(versions): samples for versions, samples in histogram.items()},
    }


def recovery_summary(restarts: Sequence[Restart], earlier: Mapping[PartName, int]) -> dict[str, Any]:
    """`restarts`: how many of each part; `recovery`: those in `restarts`, oldest first."""
    counts = count_restarts(restarts, earlier)
    return {
        "restarts": {part: counts[part] for part in get_args(PartName)},
        "recovery": [_recovery(restart) for restart in restarts],
    }


def count_restarts(restarts: Iterable[Restart], earlier: Mapping[PartName, int]) -> Counter[PartName]:
    """By part: those in `restarts`, and so many before them."""
    return Counter(earlier) + Counter(restart.part for restart in restarts)


def _recovery(restart: Restart) -> dict[str, Any]:
    recovered_s = None if restart.recovered_at is None else round(restart.recovered_at - restart.failed_at, 3)
    return {
        "part": restart.part,
        "incarnation": restart.incarnation,
        "cause": restart.cause,
        "recovered_s": recovered_s,
        "detail": restart.detail,
    }


def _median_and_max(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": statistics.median(values), "max": max(values)} if values else {"p50": None, "max": None}


def _point(row: Row, *, with_metrics: bool = False) -> dict[str, Any]:
    prefix = "validation/"
    point: dict[str, Any] = {
        "step": row.step,
        "version": row.version,
        "reward": row.metrics.get(f"{prefix}reward/mean"),
    }
    if with_metrics:
        point["metrics"] = {name.removeprefix(prefix): value for name, value in row.metrics.items()}
    return point


def choose_example(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The prompt, answered both times, whose reward rose the most; of equals, the one shortest to read."""

    def key(example: Mapping[str, Any]) -> tuple[str, str]:
        return str(example["prompt"]), str(example["ground_truth"])

    answers = {key(example): example for example in after}
    pairs = [(first, answers[key(first)]) for first in before if key(first) in answers]
    if not pairs:
        return None

    def merit(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[float, int]:
        first, second = pair
        return second["reward"] - first["reward"], -len(str(first["response"])) - len(str(second["response"]))

    return max(pairs, key=merit)


def describe_error(error: BaseException, part: str) -> dict[str, str]:
    """`error` for summary.json: what it is, says and came from, in `part` (`rollouter`, `trainer`, `driver`, …).

    Of a group the first failure is told, as one of the part that it is known to be of (`happened_in`); Ray's wrapper
    gives way to what it wraps. A `ConfigError` has no traceback of ours: it is about the user's keys, and only what a
    library said of them is its cause.
    """
    error = next(_leaves(error))
    part = getattr(error, _PART, part)
    inner = getattr(error, "cause", None)
    if isinstance(inner, BaseException):
        error = inner
    if isinstance(error, AsyncRLError):
        message, cause = error.message, error.cause
    else:
        message, cause = str(error), ""
    if not cause and not isinstance(error, ConfigError):
        cause = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": message, "part": part, "cause": _GUESSES.sub("", cause)}


@contextmanager
def happened_in(part: str) -> Iterator[None]:
    """What is raised inside is told as a failure of `part` by `describe_error`, unless a part is known already."""
    try:
        yield
    except Exception as error:
        for leaf in _leaves(error):
            if not hasattr(leaf, _PART):
                setattr(leaf, _PART, part)
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
