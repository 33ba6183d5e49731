"""Keep the event files of a run below a size: add those of the oldest steps to a summary, then delete them.

    events/step_000001/ ─▶ events/folding_1/step_000001/ ─ read in pieces ─▶ added to events/summary.json, then deleted

The summary has sums by event, and by span of steps. Neighbouring spans are merged when there are many, so its size is
bounded. It counts its additions, so that what a killed process leaves is added exactly once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from asyncrl.profiling.catalog import EVENTS
from asyncrl.profiling.files import EVENTS_DIRECTORY, files_of_step, is_number, parse_event, step_dir
from asyncrl.storage.run_dir import read_json, read_lines, replace_file

logger = logging.getLogger(__name__)

SUMMARY = "summary.json"
PIECE_BYTES = 1 << 20
"""Bytes of events that one call reads, from as many files as it takes."""
SCAN_EVERY_S = 5.0
NEWEST_STEPS = 16
"""Steps up to the current one whose events are never folded. A process may have files of its last steps open
(`asyncrl.profiling.files.MAX_OPEN_FILES`). So many steps after the current one are not folded either."""
MAX_GAP = 128
"""Largest number of consecutive steps without events after which newer ones are still found before the next launch."""
MAX_STEPS = 64
"""Steps that are added to the summary at once, at most."""
MAX_SPANS = 512
UNKNOWN = "unknown"
"""The name under which events of other versions of asyncrl are added up."""
_SCHEMA = 1


@dataclass(slots=True)
class StepSpan:
    """Sums over the events of consecutive steps."""

    first_step: int
    last_step: int
    begin: float
    """Start of the first event, in Unix seconds."""
    end: float
    """End of the last event."""
    steps: int = 0
    """Number of `step` events; a step that was repeated after a rewind counts twice."""
    duration_s: float = 0.0
    wait_samples_s: float = 0.0
    samples: float = 0.0
    """Samples that these steps committed."""
    tokens: float = 0.0
    """Trained tokens."""
    reward: float = 0.0
    """Sum of the rewards of `samples`."""
    staleness: float = 0.0
    """Sum over the trained samples."""
    requests: int = 0
    dropped: int = 0
    """Dropped samples."""

    def add(self, event: Mapping[str, Any]) -> None:
        self.begin = min(self.begin, event["timestamp"])
        self.end = max(self.end, event["timestamp"] + max(0.0, event["duration_s"]))
        match event["event"]:
            case "step":
                samples = _number(event, "samples")
                self.steps += 1
                self.samples += samples
                self.reward += samples * _number(event, "reward")
                for name in ("duration_s", "wait_samples_s", "tokens"):
                    setattr(self, name, getattr(self, name) + _number(event, name))
            case "sample.trained":
                self.staleness += _number(event, "staleness")
            case "request":
                self.requests += 1
            case "sample.dropped":
                self.dropped += 1

    def merged(self, other: StepSpan) -> StepSpan:
        sums = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name not in ("first_step", "last_step", "begin", "end")
        }
        return StepSpan(
            min(self.first_step, other.first_step), max(self.last_step, other.last_step),
            min(self.begin, other.begin), max(self.end, other.end), **sums,
        )  # fmt: skip


@dataclass(slots=True)
class EventSum:
    count: int = 0
    duration_s: float = 0.0
    max_s: float = 0.0


@dataclass(slots=True)
class EventSummary:
    """The events of a run that were deleted."""

    folds: int = 0
    """Number of the last `folding_<number>` that was added."""
    spans: list[StepSpan] = field(default_factory=list)
    events: dict[str, EventSum] = field(default_factory=dict)
    """By name of the event."""

    def add_span(self, span: StepSpan) -> None:
        self.spans.append(span)
        if len(self.spans) > MAX_SPANS:
            self.spans = [one.merged(other) for one, other in zip(self.spans[::2], self.spans[1::2], strict=False)] + (
                self.spans[-1:] if len(self.spans) % 2 else []
            )

    def add_event(self, event: Mapping[str, Any]) -> None:
        name, duration_s = event["event"], max(0.0, event["duration_s"])
        known = self.events.setdefault(name if name in EVENTS else UNKNOWN, EventSum())
        known.count += 1
        known.duration_s += duration_s
        known.max_s = max(known.max_s, duration_s)


def read_event_summary(run_dir: Path) -> EventSummary | None:
    """Return the summary of deleted events; None: none were deleted, or it cannot be read. Blocking."""
    return _read(run_dir / EVENTS_DIRECTORY / SUMMARY)


def unfolded_files(run_dir: Path, summary: EventSummary | None) -> Iterator[Path]:
    """Yield the event files of steps that the run was about to add to `summary` when it ended."""
    directory, folds = run_dir / EVENTS_DIRECTORY, summary.folds if summary is not None else 0
    for folding in _numbered(directory, "folding_"):
        if _number_of(folding) > folds:
            for step in _numbered(directory / folding, "step_"):
                yield from files_of_step(directory / folding / step)


def _read(path: Path) -> EventSummary | None:
    try:
        raw = read_json(path)
        if raw["schema"] != _SCHEMA:
            raise ValueError(f"it has schema {raw['schema']}")
        if not all(is_number(value) for each in (*raw["spans"], *raw["events"].values()) for value in each.values()):
            raise ValueError("it has something else than numbers")
        events = {str(name): EventSum(**each) for name, each in raw["events"].items()}
        return EventSummary(int(raw["folds"]), [StepSpan(**each) for each in raw["spans"]], events)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be read (%s): sums over deleted events are lost", path, error)
        return None


class EventRotation:
    """Folds the events of the oldest steps once all of them exceed `keep_bytes`. Blocking; one thread of one process.

    An error of the disk is logged once, and tried again later: it never ends a run.
    """

    def __init__(self, directory: Path, keep_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._next_scan = 0.0
        self._sizes: dict[int, int] = {}
        """Bytes by step. Only the first look, and the first after training has gone back, lists the directory, which
        may have 100,000 steps."""
        self._listed_to = 0
        """The largest step that the last list had. Those after the current one are abandoned: training went back."""
        self._step = 0
        """The current step at the last look, or a smaller one to which training has gone back since."""
        self._folding: Iterator[bool] | None = None
        self._summary: EventSummary | None = None
        self._warned = False

    def work(self, step: int | None = None) -> bool:
        """Do a bounded part of the work: read `PIECE_BYTES`, or look for the next step. Return whether more is left.

        Args:
            step: the current step, which is smaller than before once training has gone back; None: the newest one that
                has events.
        """
        if step is not None and step < self._step:
            self._sizes.clear()
            self._step = step
        try:
            if self._folding is None:
                self._folding = self._next_fold(step)
            if self._folding is None:
                return False
            if not next(self._folding, False):
                self._folding = None
        except OSError as error:
            # The summary in memory contains more than the file.
            self._folding, self._summary, self._next_scan = None, None, self._clock() + SCAN_EVERY_S
            self._sizes.clear()
            if not self._warned:
                logger.warning("old events in %s stay on disk: %s", self._directory, error)
            self._warned = True
            return False
        return True

    def _next_fold(self, step: int | None) -> Iterator[bool] | None:
        if self._clock() < self._next_scan:
            return None
        if not self._sizes:
            if leftover := _numbered(self._directory, "folding_"):
                return self._fold(self._directory / leftover[0])
            listed = (_number_of(name) for name in _numbered(self._directory, "step_"))
            self._measure(each for each in listed if step_dir(self._directory, each).is_dir())
            self._listed_to = max(self._sizes, default=0)
        else:
            self._measure(self._steps_since(self._step, step))
        self._step = max(self._sizes, default=0) if step is None else step
        excess = sum(self._sizes.values()) - self._keep_bytes
        foldable = self._foldable() if excess > 0 else []
        if not foldable:
            self._next_scan = self._clock() + SCAN_EVERY_S
            return None
        folding = self._directory / f"folding_{self._summary_so_far().folds + 1}"
        folding.mkdir()
        for each in foldable[:MAX_STEPS]:
            directory = step_dir(self._directory, each)
            os.rename(directory, folding / directory.name)
            excess -= self._sizes.pop(each)
            if excess <= 0:
                break
        return self._fold(folding)

    def _foldable(self) -> list[int]:
        """Return the steps that may be folded: the abandoned ones first, then the oldest."""
        known = sorted(self._sizes)
        abandoned = [each for each in known if self._step + NEWEST_STEPS < each <= self._listed_to]
        return abandoned + [each for each in known if each <= self._step][:-NEWEST_STEPS]

    def _steps_since(self, before: int, step: int | None) -> Iterator[int]:
        """Yield the steps whose events may have grown since the current step was `before`."""
        yield from sorted(each for each in self._sizes if each <= before)[-NEWEST_STEPS:]
        newest = current = before if step is None else step
        for each in count(before + 1):
            if current + NEWEST_STEPS < each <= self._listed_to:
                return
            if step_dir(self._directory, each).is_dir():
                newest = max(newest, each)
                yield each
            elif each - newest >= MAX_GAP:
                return

    def _measure(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._sizes[step] = sum(file.stat().st_size for file in files_of_step(step_dir(self._directory, step)))

    def _fold(self, folding: Path) -> Iterator[bool]:
        """Add the steps in a directory to the summary, and delete it. Yields true after every piece but the last."""
        summary, number = self._summary_so_far(), _number_of(folding.name)
        if number > summary.folds:
            num_bytes = 0
            for step in _numbered(folding, "step_"):
                first = _number_of(step)
                span: StepSpan | None = None
                for file in files_of_step(folding / step):
                    for line in read_lines(file):
                        if (event := parse_event(line)) is not None:
                            span = span or StepSpan(first, first, event["timestamp"], event["timestamp"])
                            span.add(event)
                            summary.add_event(event)
                        num_bytes += len(line)
                        if num_bytes >= PIECE_BYTES:
                            num_bytes = 0
                            yield True
                if span is not None:
                    summary.add_span(span)
            summary.folds = number
            content = asdict(summary) | {"schema": _SCHEMA}
            replace_file(self._directory / SUMMARY, json.dumps(content, separators=(",", ":")))
        shutil.rmtree(folding)

    def _summary_so_far(self) -> EventSummary:
        if self._summary is None:
            self._summary = _read(self._directory / SUMMARY) or EventSummary()
        return self._summary


def _numbered(directory: Path, prefix: str) -> list[str]:
    """Return the names of directories that consist of the prefix and a number, in ascending order."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [name for name in names if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()]
    names.sort(key=lambda name: (_number_of(name), name))
    return names


def _number_of(name: str) -> int:
    return int(name.partition("_")[2])


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if is_number(value) else 0.0
