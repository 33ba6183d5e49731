"""The summary of a run, `summary.json` (docs/design.md §7), built from its rows."""

from __future__ import annotations

import errno
import json
import os
import re
import statistics
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from pydantic import TypeAdapter

from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError, conceal
from asyncrl.core.ports import PartName, SampleCounts
from asyncrl.core.records import Metrics
from asyncrl.core.text import encodable
from asyncrl.core.types import DropReason
from asyncrl.observe.metrics.rows import MetricsRow, finite
from asyncrl.observe.metrics.series import DownsampledSeries, TenthMeans, ThinnedSeries
from asyncrl.observe.status.run_status import Restart, RunProgress, load_values, read_values
from asyncrl.storage.run_dir import SUMMARY, disk_error

RESERVED_BYTES = 64 * 1024
_RAY_GUESSES = re.compile(r" There are some potential root causes\. .*")
"""A paragraph that Ray appends to the message of every process that died."""

_PART = "asyncrl_part"
"""Attribute of an exception: the part that failed."""

_SUMMARIZED = (
    *("reward/mean", "tokens/trained", "staleness/mean", "staleness/max"),
    *("weight_sync/pause_s", "weight_sync/publish_to_applied_s", "weight_sync/sent_share"),
)
MAX_VALIDATIONS = 1024
"""Validations that summary.json lists at most."""
RunOutcome = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint from which a resumed run, or a restarted Trainer, continues. Step 0 is the start of the run."""

    step: int
    version: int
    checkpoint: str
    """The path of the checkpoint; empty if there is none."""
    lineage: int = 0
    """The lineage that begins at the checkpoint."""
    lost: str = ""
    """See `Resume.lost`."""

    def summary(self) -> dict[str, Any]:
        lost = {"lost": self.lost} if self.lost else {}
        return {"step": self.step, "version": self.version, "checkpoint": self.checkpoint, **lost}


@dataclass(frozen=True, slots=True)
class RunError:
    """The error that ended a run."""

    type: str
    message: str
    part: str
    cause: str = ""
    """The traceback."""

    @property
    def text(self) -> str:
        return f"{self.type} in {self.part}: {self.message}"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    generated: int | None = None
    trained: int | None = None


@dataclass(frozen=True, slots=True)
class Staleness:
    histogram: Mapping[int, int] = field(default_factory=dict)
    """Trained samples by their staleness in versions."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A restart."""

    part: str
    incarnation: int = 0
    cause: str = ""
    detail: str = ""
    recovered_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSummary:
    """The values of summary.json that other commands read."""

    status: RunOutcome
    error: RunError | None = None
    wall_s: float | None = None
    step: int | None = None
    version: int | None = None
    lineage: int | None = None
    samples: SampleCounts = field(default_factory=SampleCounts)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    staleness: Staleness = field(default_factory=Staleness)
    restarts: Mapping[str, int] = field(default_factory=dict)
    recovery: tuple[Recovery, ...] = ()


def read_summary(run_dir: Path) -> SavedSummary | None:
    """Return the summary of a run; None: it has none, or only the early one of a driver that lives. Blocking.

    Raises:
        ConfigError: the file cannot be read, is torn, or has a value of another type.
    """
    path = run_dir / SUMMARY
    raw = read_values(path)
    driver = raw.get(_EARLY) if isinstance(raw, dict) else None
    if isinstance(driver, int) and _is_of_living(driver, path):
        return None
    return None if raw is None else load_values(_adapter(), raw, str(path))


_EARLY = "early_of"
"""Key of an early summary: the process id of the driver that replaces it at its end."""


def _is_of_living(pid: int, path: Path) -> bool:
    """Whether the process that wrote the file lives; the process id may have been given to another one since."""
    try:
        return psutil.Process(pid).create_time() <= path.stat().st_mtime + 1
    except (psutil.Error, OSError, ValueError):  # ValueError: the number is negative
        return False


@cache
def _adapter() -> TypeAdapter[SavedSummary]:
    return TypeAdapter(SavedSummary)


def read_readable_summary(run_dir: Path) -> SavedSummary | None:
    """Return the summary of a run; None: it has no readable one. Blocking."""
    try:
        return read_summary(run_dir)
    except ConfigError:
        return None


class SummaryBuilder:
    """Builds summary.json from rows, in bounded memory. `build` may be called at any time and repeatedly.

    For a run of very many samples or versions, tenths and medians are approximate, and some validations left out.
    """

    def __init__(self, resumed: ResumePoint | None = None, *, lineage: int | None = None) -> None:
        """`lineage`: the current one, if it is not that of `resumed`."""
        self._resumed = resumed
        self._lineage = lineage if lineage is not None else resumed.lineage if resumed else 0
        self.version = resumed.version if resumed else 0
        self.step = resumed.step if resumed else 0
        self.num_syncs = 0
        self.rewards = DownsampledSeries()
        """Mean rewards of the steps."""
        self.newest: dict[str, Metrics] = {"step": {}, "apply": {}}
        """The summarized metrics of the last row, by the kind of row."""
        self._first_step: int | None = None
        self._rewards = TenthMeans()
        """Rewards of the trained samples."""
        self._staleness: Counter[int] = Counter()
        self._syncs = {name: _SyncFigures() for name in ("pause_s", "publish_to_applied_s", "sent_share")}
        self._validations: ThinnedSeries[dict[str, Any]] = ThinnedSeries(MAX_VALIDATIONS)
        self._first_validation: MetricsRow | None = None
        """The validation of the lowest version."""
        self._last_validation: MetricsRow | None = None
        self.validated_step: int | None = None
        """The newest step with a validation."""

    def add(self, row: MetricsRow) -> None:
        """Add the next row. Rows of earlier processes of a resumed run come first."""
        self.version = max(self.version, row.version)
        self.newest[row.kind] = summarized(row)
        if row.kind == "step":
            self._add_step(row)
        elif row.kind == "apply":
            self.num_syncs += 1
            for name, figures in self._syncs.items():
                if (value := row.metrics.get(f"weight_sync/{name}")) is not None:
                    figures.add(value)
        else:
            self._add_validation(row)

    def _add_step(self, row: MetricsRow) -> None:
        self.step = row.step
        self._first_step = row.step if self._first_step is None else self._first_step
        if "reward/mean" in row.metrics:
            self.rewards.add(row.metrics["reward/mean"])
        for reward in row.extra["rewards"]:
            self._rewards.add(reward)
        self._staleness.update(row.extra["staleness"])

    def _add_validation(self, row: MetricsRow) -> None:
        first, last = self._first_validation, self._last_validation
        if first is None or row.version < first.version:
            self._first_validation = row
        if last is None or row.version >= last.version:
            self._last_validation = row
        self.validated_step = max(row.step, self.validated_step or 0)
        self._validations.add(_point(row))

    @property
    def staleness(self) -> Mapping[int, int]:
        """Return the number of trained samples by their staleness in versions, ascending."""
        return dict(sorted(self._staleness.items()))

    @property
    def validation_rewards(self) -> tuple[tuple[int, float], ...]:
        """Return `(version, mean reward)` of the validations, in order."""
        points = self._validations.values
        return tuple((point["version"], point["reward"]) for point in points if point["reward"] is not None)

    def reward(self) -> dict[str, float | None]:
        """Return `first` and `last`, the mean rewards of the first and the last tenth of the trained samples (at least
        one), and `best`, the highest mean reward of any tenth of consecutive samples."""
        return {**self.reward_ends(), "best": self._rewards.best()}

    def reward_ends(self) -> dict[str, float | None]:
        """Return `first` and `last` of `reward`, cheap enough for every step."""
        return self._rewards.ends()

    def validation(self) -> dict[str, Any]:
        """Return the validations `before` (the initial model), `after` (the newest later one) and `points` (all, or
        evenly spaced ones of more than `MAX_VALIDATIONS`)."""
        before, after = self._before_and_after()
        return {
            "before": before and _point(before, with_metrics=True),
            "after": after and _point(after, with_metrics=True),
            "points": self._validations.values,
        }

    def example(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Return the answers to one validation prompt before and after training."""
        before, after = self._before_and_after()
        if before is None or after is None:
            return None
        return choose_example(before.extra["examples"], after.extra["examples"])

    def _before_and_after(self) -> tuple[MetricsRow | None, MetricsRow | None]:
        first, last = self._first_validation, self._last_validation
        if first is None or last is None:
            return None, None
        before = first if self._first_step is None or first.step < self._first_step else None
        return before, last if before is None or last.step > before.step else None

    def build(
        self,
        status: RunOutcome,
        error: Mapping[str, Any] | None,
        progress: RunProgress,
        *,
        wall_s: float = 0.0,
        idle_trainer: float | None = None,
        idle_rollouter: float | None = None,
    ) -> dict[str, Any]:
        """Return the content of summary.json. Missing values are None; all floats are finite.

        Of a resumed run, `wall_s`, the idle shares of the time between first and last step, and `recovery` cover only
        the last process.
        """
        counts, resumed = progress.counts, self._resumed
        return finite(
            {
                "status": status,
                "error": error,
                "wall_s": round(wall_s, 3),
                "step": self.step,
                "version": self.version,
                "lineage": self._lineage,
                "resumed": resumed and resumed.summary(),
                "samples": {
                    **asdict(counts),
                    "dropped": {str(reason): counts.dropped.get(reason, 0) for reason in DropReason},
                },
                "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
                "reward": self.reward(),
                "staleness": staleness_summary(self.staleness),
                "idle": {"trainer": idle_trainer, "rollouter": None if progress.replays else idle_rollouter},
                "replays": progress.replays,
                "weight_sync": {
                    "count": self.num_syncs,
                    "pause_s": self._syncs["pause_s"].median_and_max(),
                    "publish_to_applied_s": self._syncs["publish_to_applied_s"].median_and_max(),
                    "sent_share": self._syncs["sent_share"].mean(),
                },
                "validation": self.validation(),
                **recovery_summary(progress.restarts, progress.earlier_restarts),
            }
        )


def summarized(row: MetricsRow) -> Metrics:
    """Return the metrics of a row that the summary and the live view need, a tenth of all."""
    return {name: row.metrics[name] for name in _SUMMARIZED if name in row.metrics}


def staleness_summary(histogram: Mapping[int, int]) -> dict[str, Any]:
    """Return `mean` and `max` in versions (None if no sample was trained) and the histogram of trained samples."""
    count = sum(histogram.values())
    return {
        "mean": sum(versions * samples for versions, samples in histogram.items()) / count if count else None,
        "max": max(histogram) if histogram else None,
        "histogram": {str(versions): samples for versions, samples in histogram.items()},
    }


def recovery_summary(restarts: Sequence[Restart], earlier: Mapping[PartName, int]) -> dict[str, Any]:
    """Return `restarts`, their number by part, and `recovery`, a list of the newest ones, oldest first."""
    counts = count_restarts(restarts, earlier)
    return {
        "restarts": {part: counts[part] for part in get_args(PartName)},
        "recovery": [_recovery(restart) for restart in restarts],
    }


def count_restarts(restarts: Iterable[Restart], earlier: Mapping[PartName, int]) -> Counter[PartName]:
    """Return the number of restarts by part, including `earlier` ones."""
    return Counter(earlier) + Counter(restart.part for restart in restarts)


def _recovery(restart: Restart) -> dict[str, Any]:
    known = asdict(restart)
    failed_at, recovered_at = known.pop("failed_at"), known.pop("recovered_at")
    return {**known, "recovered_s": None if recovered_at is None else round(recovered_at - failed_at, 3)}


class _SyncFigures:
    """Median, maximum and mean of a figure of the weight syncs."""

    def __init__(self) -> None:
        self._values: ThinnedSeries[float] = ThinnedSeries()
        self._max: float | None = None
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._values.add(value)
        self._max = value if self._max is None else max(value, self._max)
        self._sum += value

    def median_and_max(self) -> dict[str, float | None]:
        values = self._values.every
        return {"p50": statistics.median(values) if values else None, "max": self._max}

    def mean(self) -> float | None:
        return self._sum / self._values.count if self._values.count else None


def _point(row: MetricsRow, *, with_metrics: bool = False) -> dict[str, Any]:
    point = {"step": row.step, "version": row.version, "reward": row.metrics.get("validation/reward/mean")}
    metrics = {name.removeprefix("validation/"): value for name, value in row.metrics.items()}
    return {**point, "metrics": metrics} if with_metrics else point


def choose_example(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the answers to the prompt whose reward rose the most, before and after; among equals, the shortest."""

    def key(example: Mapping[str, Any]) -> tuple[str, str]:
        return str(example["prompt"]), str(example["ground_truth"])

    answers = {key(example): example for example in after}
    pairs = [(first, answers[key(first)]) for first in before if key(first) in answers]
    if not pairs:
        return None

    def gain(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[float, int]:
        first, second = pair
        return second["reward"] - first["reward"], -len(str(first["response"])) - len(str(second["response"]))

    return max(pairs, key=gain)


def describe_error(error: BaseException, part: str) -> dict[str, str]:
    """Describe `error` for summary.json: its type, message, part (`rollouter`, `trainer`, `driver`, …) and cause.

    For an exception group, this describes the first failure, with the part that `attribute_failure_to` assigned to it.
    An exception in which Ray wraps another is replaced by its cause. A `ConfigError` has no traceback, because it
    concerns the user's configuration; its cause is at most the message of a library.
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
    message, cause = encodable(conceal(message)), encodable(conceal(_RAY_GUESSES.sub("", cause)))
    return {"type": type(error).__name__, "message": message, "part": part, "cause": cause}


def describe_early_end(continuing: str) -> dict[str, str]:
    """Describe, for an early summary, that a signal ended the driver before it could stop in order.

    Args:
        continuing: how the run is continued, as the end of a sentence.
    """
    message = (
        "the run received a signal, and ended before it had stopped in order: Ray ends its driver when Ray's own "
        f"processes end first; {continuing}"
    )
    return describe_error(InfraError(message), "driver")


@contextmanager
def attribute_failure_to(part: str) -> Iterator[None]:
    """Make `describe_error` report exceptions raised inside as failures of `part`, unless a part is set already."""
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


# ------------------------------------------------------------------------------------------------ the file


class SummaryFile:
    """`summary.json` with reserved disk space, so that a run which dies of a full disk can still write it. Blocking."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / SUMMARY
        self._reserve = run_dir / "summary.reserve"

    def reserve(self) -> None:
        """Reserve the space, and remove the outdated summary of an earlier process of this run.

        Raises:
            InfraError, ConfigError: the directory is full or not writable.
        """
        try:
            with self._reserve.open("wb") as file:
                # Random, so that no file system stores it as a hole or compressed.
                file.write(os.urandom(RESERVED_BYTES))
                file.flush()
                os.fsync(file.fileno())
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(self._reserve, error) from error

    def write(self, summary: Mapping[str, Any]) -> None:
        """Write `summary` atomically.

        It overwrites the reserved bytes, which needs no new space, and renames the file. Removing the reserve first
        would give the freed space to whatever filled the disk. If the summary is longer than the reserve and the disk
        is full, the validation points and most of the traceback are left out.

        Raises:
            InfraError, ConfigError: the file cannot be written.
        """
        try:
            try:
                self._write(_encode(summary))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._write(_encode(_shortened(summary)))
            os.replace(self._reserve, self.path)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def write_early(self, summary: Mapping[str, Any]) -> None:
        """Write a summary that `write` replaces, unless Ray's processes end first: Ray then ends this process at once.

        A full disk is ignored, and the reserved space is kept for `write`."""
        early = self.path.with_suffix(".early")
        try:
            early.write_bytes(_encode({**summary, _EARLY: os.getpid()}))
            early.replace(self.path)
        except OSError:
            early.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        # Without O_TRUNC: truncating would give the reserved space back before it is used.
        descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())


def _encode(summary: Mapping[str, Any]) -> bytes:
    return (json.dumps(summary, indent=2, allow_nan=False, default=str) + "\n").encode()


def _shortened(summary: Mapping[str, Any]) -> dict[str, Any]:
    short = {**summary, "validation": {**summary["validation"], "points": []}}
    if summary["error"] is not None:
        short["error"] = {**summary["error"], "cause": summary["error"]["cause"][-16 * 1024 :]}
    return short
