"""The one place a run's records go through: rows out of records, to the files, the view and the summary."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import anyio
from anyio import to_thread

from asyncrl.config.schema import LoggingConfig
from asyncrl.failures import BugError
from asyncrl.ports import Books, PartName, QueueStatus
from asyncrl.records import ApplyRecord, Metrics, RunRecord, StepRecord
from asyncrl.run_dir import RunDir
from asyncrl.run_state import Restart, RunState
from asyncrl.telemetry.closing import Example
from asyncrl.telemetry.dashboard import Dashboard, SyncShown
from asyncrl.telemetry.live import View
from asyncrl.telemetry.meters import Course, RollouterIdle, Total, TrainerIdle, WindowRate
from asyncrl.telemetry.rows import Row, apply_row, queue_metrics, step_row, validation_row
from asyncrl.telemetry.sinks import JsonlSink, Sink, TensorBoardSink, rewind_jsonl
from asyncrl.telemetry.summary import Resumed, Status, SummaryBuilder, Totals
from asyncrl.waits import Wait

logger = logging.getLogger(__name__)

MAX_RESTARTS = 200
"""Restarts that are told one by one; older ones only count."""


class Recorder:
    """Lives in the driver's event loop; files are written off it. `put` may be called from several tasks."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        view: View,
        *,
        resumed: Resumed | None = None,
        history: Sequence[Row] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`history`: rows of the run's earlier parts, oldest first; the summary covers them too."""
        self._sinks = sinks
        self._view = view
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = clock()
        self._earlier_s = history[-1].time_s if history else 0.0
        self._earlier_tokens = int(_last(history, "rollouter/generated_tokens"))
        self._resumed = resumed
        self._builder = SummaryBuilder(resumed)
        self._back_to: Resumed | None = None
        """Where training went back to last, within this process."""
        self._reads_back = any(sink.reads_back for sink in sinks)
        self._kept: list[Row] = []
        """All rows, reduced to what the summary and the picture are made of, where no file has them."""
        self._restarts: list[Restart] = []
        self._earlier_restarts: Counter[PartName] = Counter()
        """By part, those that are not in the list any more."""
        self._books = Books()
        self._skips: dict[str, dict[str, int]] = {}
        """By role, what the newest process did with its records."""
        self._generated_tokens = self._earlier_tokens
        self._made_tokens, self._samples_done, self._idle_s = Total(), Total(), Total()
        self._drops: dict[str, Total] = {}
        self._agent: dict[str, Total] = {}
        self._num_dropped: dict[str, int] = {}
        """By kind, of all incarnations of the Rollouter."""
        self._known: Metrics = {}
        """Of the parts other than the Trainer, newest; goes on every step's line."""
        self._generated = WindowRate()
        self._trained = WindowRate()
        self._idle_rollouter = WindowRate()
        self._idle_trainer = WindowRate()
        self._rollouter_idle = RollouterIdle()
        self._trainer_idle = TrainerIdle()
        self._waited_s = 0.0
        self._trainer_waited_s = 0.0
        self._rewards = Course()
        self._step_times: deque[float] = deque(maxlen=50)
        self._writing = anyio.Lock()
        self._board = Dashboard()
        for row in history:
            self._keep(row)
        self._board = replace(self._board, first_step=self._builder.step)

    @classmethod
    async def open(cls, logging: LoggingConfig, run_dir: RunDir, view: View, resumed: Resumed | None = None) -> Self:
        """With the files that `logging` asks for in `run_dir`, which must exist.

        Resumed: metrics.jsonl is cut back to the step the run goes on from, and read for what happened until then.

        Raises:
            InfraError, ConfigError: a file cannot be written.
        """
        return await to_thread.run_sync(cls._open, logging, run_dir, view, resumed)

    @classmethod
    def _open(cls, logging: LoggingConfig, run_dir: RunDir, view: View, resumed: Resumed | None) -> Self:
        history = rewind_jsonl(run_dir.metrics, resumed.step, resumed.version) if resumed else []
        with ExitStack() as opened:
            sinks: list[Sink] = []
            if logging.jsonl:
                sinks.append(JsonlSink(run_dir.metrics))
                opened.callback(sinks[-1].close)
            if logging.tensorboard:
                step = resumed.step if resumed else None
                sinks.append(TensorBoardSink(run_dir.tensorboard, unix_s=time.time(), resumed_step=step))
                opened.callback(sinks[-1].close)
            recorder = cls(sinks, view, resumed=resumed, history=history)
            opened.pop_all()
        return recorder

    def plan(self, total_steps: int) -> None:
        """The run will take optimizer steps up to `total_steps`, counted from the first ever."""
        self._board = replace(self._board, total_steps=total_steps)
        self._view.update(self._board)

    def made_earlier(self, tokens: int) -> None:
        """So many were generated by earlier processes, as far as their driver knew: more than the rows kept tell of."""
        self._earlier_tokens = self._generated_tokens = max(self._earlier_tokens, tokens)

    async def put(self, record: RunRecord) -> None:
        """Record it everywhere. On return it is written.

        Raises:
            BugError: a metric is not registered.
            InfraError, ConfigError: a file cannot be written.
        """
        async with self._writing:  # so that no row is counted before a rewind and written after it
            row = self._row(record)
            if self._is_outdated(row):
                return
            self._keep(row)
            if row.kind == "step":
                self._time_step(row)
            self._view.row(row, self._board)
            await to_thread.run_sync(self._write, row)

    async def rewind(self, resumed: Resumed) -> None:
        """Training goes back to a checkpoint: what was recorded beyond it leaves the files, the summary and the view.

        What the living parts count goes on. Records of an earlier lineage that come later and are beyond the
        checkpoint are left out.

        Raises:
            InfraError, ConfigError: a file cannot be written.
        """
        async with self._writing:
            with anyio.CancelScope(shield=True):  # files and figures tell the same, or the run is over
                read = await to_thread.run_sync(self._rewind_files, resumed)
            kept = read or [row for row in self._kept if row.is_within(resumed.step, resumed.version)]
            self._back_to = resumed
            self._builder = SummaryBuilder(self._resumed, lineage=resumed.lineage)
            self._kept = []
            self._rewards = Course()
            self._step_times.clear()
            self._board = replace(
                self._board,
                lineage=resumed.lineage,
                step=self._builder.step,
                version=self._builder.version,
                reward_now=None,
                rewards=(),
                reward_first=None,
                reward_last=None,
                validations=(),
                staleness_mean=None,
                staleness_max=None,
                sync=None,
                step_times=(),
            )
            for row in kept:
                self._keep(row)
            self._view.update(self._board)

    @property
    def validated_step(self) -> int | None:
        """The newest step whose validation is recorded and was not gone back behind; None: none is."""
        return self._builder.validated_step

    def restarted(self, restart: Restart) -> None:
        """A part is being replaced, or the one that was has recovered."""
        key = restart.part, restart.incarnation
        self._restarts = [known for known in self._restarts if (known.part, known.incarnation) != key] + [restart]
        if len(self._restarts) > MAX_RESTARTS:
            self._earlier_restarts[self._restarts.pop(0).part] += 1
        self._known["recovery/restarts"] = float(len(self._restarts) + self._earlier_restarts.total())
        self._board = replace(
            self._board, restarts=tuple(self._restarts), earlier_restarts=dict(self._earlier_restarts)
        )
        self._view.restart(restart, self._board)
        if restart.recovered_at is None:
            logger.info("the %s is replaced: %s", restart.part, restart.cause)
        else:
            took_s = restart.recovered_at - restart.failed_at
            logger.info("the %s is back after %.1f s. %s", restart.part, took_s, restart.detail or restart.cause)

    def tell(self, state: RunState) -> RunState:
        """`state` with what only the recorder knows: total steps, staleness, tokens and rates, drops, restarts."""
        return replace(
            state,
            total_steps=self._board.total_steps,
            staleness=self._builder.staleness,
            generated_tokens=self._generated_tokens,
            generated_per_s=self._generated.per_s,
            trained_per_s=self._trained.per_s,
            drops=dict(self._num_dropped),
            restarts=tuple(self._restarts),
            earlier_restarts=dict(self._earlier_restarts),
        )

    def tick(self, queue: QueueStatus, rollouter: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
        """The parts' state, about once a second and once more at the very end. An empty mapping: no answer yet.

        Of the Rollouter: `incarnation`, by that process `generated_tokens`, `samples_done`, `idle_s` and `drops` by
        kind, from 0 on, `in_flight`, `waits` and `skip` (`SkipManager.status`). Of the Trainer: `waits` and `skip`.
        Waits are `WaitBoard.snapshot()`; the Trainer's wait for a lease is `samples`.

        Raises:
            BugError: a key is missing.
        """
        now_s = self._clock()
        self._books = queue.books
        self._known |= queue_metrics(queue)
        try:
            if rollouter:
                self._see_rollouter(now_s, rollouter)
            if trainer:
                self._see_trainer(now_s, trainer)
        except KeyError as error:
            raise BugError(f"a part's status has no {error}: the run cannot be shown or judged without it") from error
        self._trained.add(now_s, self._builder.trained_tokens)
        self._set_known("throughput/trained_tokens_per_s", self._trained.per_s)
        self._board = replace(
            self._board,
            books=queue.books,
            generated_per_s=self._generated.per_s,
            trained_per_s=self._trained.per_s,
            idle_rollouter=self._known.get("idle/rollouter"),
            idle_trainer=self._known.get("idle/trainer"),
        )
        self._view.update(self._board)

    def summary(self, status: Status, error: Mapping[str, Any] | None) -> dict[str, Any]:
        """What summary.json holds; `error` as `describe_error` gives it. After a last `tick`, its books are final."""
        totals = Totals(
            wall_s=self._clock() - self._started_s,
            books=self._books,
            generated_tokens=self._generated_tokens,
            idle_trainer=self._trainer_idle.share,
            idle_rollouter=self._rollouter_idle.share,
            restarts=tuple(self._restarts),
            earlier_restarts=dict(self._earlier_restarts),
        )
        return {**self._builder.build(status, error, totals), "skip": dict(self._skips)}

    def examples(self) -> tuple[Example, Example] | tuple[None, None]:
        """One validation prompt's answers before and after, the one that gained most; none without two validations."""
        return self._builder.example() or (None, None)

    async def aclose(self) -> None:
        """Close the files. Not an error after a failed write."""
        with anyio.CancelScope(shield=True):
            async with self._writing:
                await to_thread.run_sync(self._close)

    # ------------------------------------------------------------------------------------------ rows

    def _row(self, record: RunRecord) -> Row:
        time_s = self._earlier_s + self._clock() - self._started_s
        unix_s = self._wall_clock()
        if isinstance(record, StepRecord):
            return step_row(record, self._known, time_s=time_s, unix_s=unix_s)
        if isinstance(record, ApplyRecord):
            return apply_row(record, step=self._builder.step, time_s=time_s, unix_s=unix_s)
        return validation_row(record, time_s=time_s, unix_s=unix_s)

    def _is_outdated(self, row: Row) -> bool:
        """It tells of what training has gone back behind."""
        back_to = self._back_to
        if back_to is None or row.lineage >= back_to.lineage:
            return False
        return not row.is_within(back_to.step, back_to.version)

    def _keep(self, row: Row) -> None:
        """Into the summary and the picture, whichever part of the run it is from."""
        if not self._reads_back:
            self._kept.append(row if row.kind == "validation" else _reduced(row))
        self._builder.add(row)
        board = replace(self._board, step=self._builder.step, version=self._builder.version)
        if row.kind == "step":
            if "reward/mean" in row.metrics:
                self._rewards.add(row.metrics["reward/mean"])
            reward = self._builder.reward_ends()
            board = replace(
                board,
                reward_now=row.metrics.get("reward/mean"),
                rewards=self._rewards.points,
                reward_first=reward["first"],
                reward_last=reward["last"],
                staleness_mean=row.metrics.get("staleness/mean"),
                staleness_max=row.metrics.get("staleness/max"),
            )
        elif row.kind == "apply":
            count = board.sync.count + 1 if board.sync else 1
            pause_s = row.metrics.get("weight_sync/pause_s")
            board = replace(board, sync=SyncShown(count, pause_s, row.metrics["weight_sync/publish_to_applied_s"]))
        elif "validation/reward/mean" in row.metrics:
            point = (row.version, row.metrics["validation/reward/mean"])
            board = replace(board, validations=(*board.validations, point))
        self._board = board

    def _time_step(self, row: Row) -> None:
        """What only holds within this process: its clocks."""
        now_s = self._clock()
        self._step_times.append(now_s)
        self._board = replace(self._board, step_times=tuple(self._step_times))
        self._rollouter_idle.step(now_s)
        self._trainer_idle.add(row)
        self._waited_s += row.metrics["timing/wait_samples_s"]

    def _write(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)

    def _rewind_files(self, resumed: Resumed) -> Sequence[Row]:
        """The rows that stay, as far as a file has them."""
        return [row for sink in self._sinks for row in sink.rewind(resumed.step, resumed.version)]

    def _close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    # ------------------------------------------------------------------------------------------ statuses

    def _see_rollouter(self, now_s: float, status: Mapping[str, Any]) -> None:
        incarnation: int = status["incarnation"]
        made_tokens = self._made_tokens.see(status["generated_tokens"], incarnation)
        self._generated_tokens = self._earlier_tokens + int(made_tokens)
        self._generated.add(now_s, self._generated_tokens)
        idle_s = self._idle_s.see(status["idle_s"], incarnation)
        self._rollouter_idle.observe(now_s, idle_s)
        self._idle_rollouter.add(now_s, idle_s)
        for kind, count in status["drops"].items():
            self._num_dropped[kind] = int(self._drops.setdefault(kind, Total()).see(count, incarnation))
        self._known["rollouter/generated_tokens"] = float(self._generated_tokens)
        self._known["rollouter/samples_done"] = self._samples_done.see(status["samples_done"], incarnation)
        for name, count in status["agent"].items():
            self._known[f"rollouter/{name}"] = self._agent.setdefault(name, Total()).see(count, incarnation)
        self._known["rollouter/in_flight"] = float(status["in_flight"])
        self._set_known("throughput/generated_tokens_per_s", self._generated.per_s)
        self._set_known("idle/rollouter", self._idle_rollouter.per_s, most=1.0)
        self._see_waits("rollouter", status)
        self._see_skips(status)

    def _see_trainer(self, now_s: float, status: Mapping[str, Any]) -> None:
        waits = self._see_waits("trainer", status)
        self._see_skips(status)
        open_s = max((wait.since_s for wait in waits if wait.edge == "samples"), default=0.0)
        # A wait that has ended is in no step's record yet: the counter stands until the record comes, it never falls.
        self._trainer_waited_s = max(self._trainer_waited_s, self._waited_s + open_s)
        self._idle_trainer.add(now_s, self._trainer_waited_s)
        self._set_known("idle/trainer", self._idle_trainer.per_s, most=1.0)

    def _see_skips(self, status: Mapping[str, Any]) -> None:
        """What was replayed and recorded, by that process."""
        for role, counts in status["skip"].items():
            self._skips[role] = dict(counts)
            for what, count in counts.items():
                self._known[f"skip/{role}/{what}"] = float(count)

    def _see_waits(self, part: str, status: Mapping[str, Any]) -> tuple[Wait, ...]:
        waits: tuple[Wait, ...] = tuple(status["waits"])
        self._board = replace(self._board, waits={**self._board.waits, part: waits})
        return waits

    def _set_known(self, name: str, value: float | None, most: float = float("inf")) -> None:
        if value is not None:
            self._known[name] = min(value, most)


_OF_INTEREST = (
    "reward/mean",
    "tokens/trained",
    "staleness/mean",
    "staleness/max",
    "weight_sync/pause_s",
    "weight_sync/publish_to_applied_s",
)


def _reduced(row: Row) -> Row:
    """A tenth of it, so that a long run's rows can be kept."""
    metrics = {name: row.metrics[name] for name in _OF_INTEREST if name in row.metrics}
    return replace(row, metrics=metrics)


def _last(rows: Sequence[Row], name: str) -> float:
    """The newest value of a counter; 0 if it was never recorded."""
    return next((row.metrics[name] for row in reversed(rows) if name in row.metrics), 0.0)
