"""Record the metrics of a run: convert records to rows and pass them to the sinks, the view and the summary."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError
from asyncrl.core.ports import PartName, QueueStatus, SampleCounts
from asyncrl.core.process_health import RunHealth
from asyncrl.core.records import ApplyRecord, RunRecord, StepRecord
from asyncrl.observe.metrics.file_sinks import JsonlSink, rewind_jsonl
from asyncrl.observe.metrics.part_metrics import PartMetrics, TrainerIdle
from asyncrl.observe.metrics.rows import MetricsRow, apply_row, health_metrics, step_row, validation_row
from asyncrl.observe.metrics.sinks import RemoteSink, Sink, end_remote_sinks, open_sinks
from asyncrl.observe.status.run_status import Restart, RunProgress, RunState
from asyncrl.observe.status.summary import ResumePoint, RunOutcome, SummaryBuilder, summarized
from asyncrl.observe.terminal.live import ALREADY_SHOWN, Example, View
from asyncrl.observe.terminal.screen import Dashboard
from asyncrl.profiling import profile
from asyncrl.storage.run_dir import RunDir

logger = logging.getLogger(__name__)

MAX_RESTARTS = 200
"""Restarts that are listed; older ones are only counted."""
ROWS_FILE = "rows.jsonl"


class TemporaryRows(JsonlSink):
    """A file of all rows, reduced to what the summary and the view need, for runs whose sinks do not read back."""

    def __init__(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # of a process that was killed
        super().__init__(path)

    def write(self, row: MetricsRow) -> None:
        super().write(row if row.kind == "validation" else replace(row, metrics=summarized(row)))

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._path.unlink()


class Recorder:
    """Records the metrics of a run in the driver's event loop, and writes files in threads. Any task may call `put`."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        view: View,
        *,
        resumed: ResumePoint | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sinks = sinks
        self._view = view
        self._clock = clock
        self._started_s = clock()
        self._earlier_s = 0.0
        self._resumed = resumed
        self._builder = SummaryBuilder(resumed)
        self._rewound_to: ResumePoint | None = None
        """The checkpoint to which training last went back within this process."""
        self._parts = PartMetrics()
        self._known = self._parts.known
        """Newest metrics of the parts, which go into every `step` row."""
        self._trainer_idle = TrainerIdle()
        self._waited_s = 0.0
        self._step_times: deque[float] = deque(maxlen=50)
        self._writing = anyio.Lock()
        self.dashboard = Dashboard(first_step=self._builder.step)

    @classmethod
    async def open(cls, config: Config, run_dir: RunDir, view: View, resumed: ResumePoint | None = None) -> Self:
        """Open the sinks that `config.logging` names; `run_dir` must exist.

        A resumed run cuts metrics.jsonl back to the step from which it continues, and reads the remaining rows.

        Raises:
            InfraError, ConfigError: a file cannot be written.
        """
        return await to_thread.run_sync(cls._open, config, run_dir, view, resumed)

    @classmethod
    def _open(cls, config: Config, run_dir: RunDir, view: View, resumed: ResumePoint | None) -> Self:
        sinks = open_sinks(config, run_dir, resumed.step if resumed else None)
        rewind = next((sink.rewind for sink in sinks if sink.reads_back), None)
        rows = TemporaryRows(run_dir.path / ROWS_FILE) if rewind is None else None
        recorder = cls(sinks if rows is None else [*sinks, rows], view, resumed=resumed)
        if resumed is not None:

            def add(row: MetricsRow) -> None:
                recorder._add_earlier(row)
                if rows is not None:
                    rows.write(row)

            rewind = rewind or partial(rewind_jsonl, run_dir.metrics)
            rewind(resumed.step, resumed.version, add)
        return recorder

    def _add_earlier(self, row: MetricsRow) -> None:
        """Add the next row of the run's earlier processes. The summary covers them, too."""
        self._earlier_s = row.time_s
        self.add_earlier_tokens(int(row.metrics.get("rollouter/generated_tokens", 0)))
        self._builder.add(row)

    def set_total_steps(self, total_steps: int) -> None:
        """Set the last optimizer step of the run."""
        self._view.update(self._refresh(total_steps=total_steps))

    def add_earlier_tokens(self, tokens: int) -> None:
        """Set how many tokens earlier processes generated, as their driver counted them; the last row may be older."""
        self._parts.add_earlier_tokens(tokens)

    def add_earlier_restarts(self, counts: Mapping[PartName, int]) -> None:
        """Set how often earlier processes of the run replaced each part."""
        self._known["recovery/restarts"] = float(sum(counts.values()))
        self._view.update(self._refresh(earlier_restarts=dict(counts)))

    async def put(self, record: RunRecord) -> None:
        """Write a record to all sinks, and return when it is written.

        Raises:
            BugError: a metric is not registered.
            InfraError, ConfigError: a file cannot be written.
        """
        async with self._writing:  # no rewind may come between counting and writing the row
            row = self._row(record)
            if self._is_outdated(row):
                return
            self._builder.add(row)
            if row.kind == "step":
                self._time_step(row)
            self._view.row(row, self._refresh())
            await to_thread.run_sync(self._write, row)

    async def rewind(self, resumed: ResumePoint) -> None:
        """Remove from files, summary and view everything beyond the checkpoint to which training goes back.

        Counters of the running parts continue. Records of an earlier lineage that arrive later are ignored if they are
        beyond the checkpoint.

        Raises:
            InfraError, ConfigError: a file cannot be written.
        """
        async with self._writing:
            builder = SummaryBuilder(self._resumed, lineage=resumed.lineage)
            with anyio.CancelScope(shield=True):  # a cancellation must not leave files and values inconsistent
                await to_thread.run_sync(self._rewind_files, resumed, builder)
            self._rewound_to, self._builder = resumed, builder
            self._step_times.clear()
            self._view.update(self._refresh())

    @property
    def validated_step(self) -> int | None:
        """Return the newest step with a validation that no rewind has removed; None if there is none."""
        return self._builder.validated_step

    def record_restart(self, restart: Restart) -> None:
        """Record that a part is being replaced, or that its replacement has recovered."""
        key = restart.part, restart.incarnation
        restarts = [known for known in self.dashboard.restarts if (known.part, known.incarnation) != key] + [restart]
        earlier = Counter(self.dashboard.earlier_restarts)
        if len(restarts) > MAX_RESTARTS:
            earlier[restarts.pop(0).part] += 1
        self._known["recovery/restarts"] = float(len(restarts) + earlier.total())
        self._view.restart(restart, self._refresh(restarts=tuple(restarts), earlier_restarts=dict(earlier)))
        if restart.recovered_at is None:
            logger.info("the %s is being replaced: %s", restart.part, restart.cause, extra=ALREADY_SHOWN)
        else:
            took_s = restart.recovered_at - restart.failed_at
            profile.record("part.restarted", restart.failed_at, took_s, part=restart.part, cause=restart.cause)
            detail = restart.detail or restart.cause
            logger.info("the %s is back after %.1f s. %s", restart.part, took_s, detail, extra=ALREADY_SHOWN)

    def complete_state(self, state: RunState) -> RunState:
        """Return `state` with the values of `RunProgress`."""
        progress = self._refresh()
        return replace(state, **{item.name: getattr(progress, item.name) for item in fields(RunProgress)})

    def update_counts(self, samples: SampleCounts, trained_tokens: int) -> None:
        """Replace the counts that the queue records: about once a second, and at the end by those of its journal."""
        self._view.update(self._refresh(counts=samples, trained_tokens=trained_tokens))

    def update_parts(self, queue: QueueStatus, rollouter: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
        """Update the metrics from the statuses of the parts. Call it about once a second, and once more at the end.

        The statuses of Rollouter and Trainer are empty until they first answer. Both have `version`, `pid`, `waits`
        (`WaitBoard.snapshot()`), `skip` (`SkipManager.status`) and `profiler` (`Profiler.status`). The edge of the
        Trainer's wait for a lease is `samples`.

        Args:
            queue: the status of the queue.
            rollouter: also has `incarnation`, `in_flight`, and the counters of this incarnation: `generated_tokens`,
                `samples_done`, `idle_s`, `waited_s` by edge, `drops` by kind, and `agent`.
            trainer: the status of the Trainer.

        Raises:
            BugError: a key is missing.
        """
        now_s = self._clock()
        self.update_counts(queue.counts, queue.trained_tokens)
        parts = self._parts
        parts.update_queue(queue)
        parts.update_driver(profile.status()["own_dropped"])
        try:
            if rollouter:
                parts.update_rollouter(now_s, rollouter)
            if trainer:
                parts.update_trainer(now_s, trainer, self._waited_s)
        except KeyError as error:
            raise BugError(f"the status of a part has no {error}, which the view and the health rules need") from error
        parts.update_trained(now_s, queue.trained_tokens)
        self._view.update(self._refresh())

    def update_health(self, health: RunHealth) -> None:
        """Replace the health metrics, every few seconds."""
        for name in [name for name in self._known if name.startswith("health/")]:
            del self._known[name]
        self._known |= health_metrics(health)
        self._view.update(self._refresh(health=health))

    def summary(self, status: RunOutcome, error: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the content of summary.json, with the counts of the last `update_counts`.

        `error`: the result of `describe_error`; None without an error.
        """
        summary = self._builder.build(
            status,
            error,
            self._refresh(),
            wall_s=self._clock() - self._started_s,
            idle_trainer=self._trainer_idle.share,
            idle_rollouter=self._parts.rollouter_idle.share,
        )
        return {**summary, "skip": dict(self._parts.skips)}

    def examples(self) -> tuple[Example, Example] | tuple[None, None]:
        """Return the first and last answers to the validation prompt whose reward rose the most; None without two."""
        return self._builder.example() or (None, None)

    @asynccontextmanager
    async def trackers(self) -> AsyncIterator[None]:
        """At the end of the block, send the remaining rows and the outcome of the run to the trackers (wandb, …), while
        the processes that the trackers need still run. Trackers accept no later rows."""
        ok = False
        try:
            yield
            ok = True
        finally:
            with anyio.CancelScope(shield=True):
                remote = [sink for sink in self._sinks if isinstance(sink, RemoteSink)]
                await to_thread.run_sync(lambda: end_remote_sinks(remote, ok=ok))

    async def aclose(self) -> None:
        """Close the files. It raises nothing after a failed write."""
        with anyio.CancelScope(shield=True):
            async with self._writing:
                await to_thread.run_sync(self._close)

    # ------------------------------------------------------------------------------------------ rows

    def _row(self, record: RunRecord) -> MetricsRow:
        time_s = self._earlier_s + self._clock() - self._started_s
        unix_s = time.time()
        if isinstance(record, StepRecord):
            return step_row(record, self._known, time_s=time_s, unix_s=unix_s)
        if isinstance(record, ApplyRecord):
            return apply_row(record, step=self._builder.step, time_s=time_s, unix_s=unix_s)
        return validation_row(record, time_s=time_s, unix_s=unix_s)

    def _is_outdated(self, row: MetricsRow) -> bool:
        """Return whether the row is of an earlier lineage and beyond the checkpoint to which training went back."""
        rewound_to = self._rewound_to
        if rewound_to is None or row.lineage >= rewound_to.lineage:
            return False
        return not row.is_within(rewound_to.step, rewound_to.version)

    def _refresh(self, **changes: Any) -> Dashboard:
        """Bring the dashboard up to date, change these values of it, and return it."""
        builder, parts = self._builder, self._parts
        idle = {name: value for name, value in self._known.items() if name.startswith("idle/")}
        self.dashboard = replace(
            self.dashboard,
            step=builder.step,
            version=builder.version,
            staleness=builder.staleness,
            metrics={**builder.newest["step"], **builder.newest["apply"], **idle},
            num_syncs=builder.num_syncs,
            rewards=builder.rewards.points,
            reward_ends=builder.reward_ends(),
            validations=builder.validation_rewards,
            generated_tokens=parts.generated_tokens,
            generated_per_s=parts.generated.per_s,
            trained_per_s=parts.trained.per_s,
            drops=dict(parts.num_dropped),
            waits=dict(parts.waits),
            step_times=tuple(self._step_times),
            **changes,
        )
        return self.dashboard

    def _time_step(self, row: MetricsRow) -> None:
        """Update the step times and idle shares, which use the clocks of this process."""
        now_s = self._clock()
        self._step_times.append(now_s)
        self._parts.rollouter_idle.step(now_s)
        self._trainer_idle.add(row)
        self._waited_s += row.metrics["timing/wait_samples_s"]

    def _write(self, row: MetricsRow) -> None:
        for sink in self._sinks:
            sink.write(row)

    def _rewind_files(self, resumed: ResumePoint, builder: SummaryBuilder) -> None:
        """Rewind all sinks, and add the remaining rows to `builder`."""
        for sink in self._sinks:
            sink.rewind(resumed.step, resumed.version, builder.add)

    def _close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
