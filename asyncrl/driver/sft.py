"""`asyncrl sft`: a supervised run from its rows to the last checkpoint, with a summary and an exit code.

The driver itself runs the loop. The model is in the ranks of a launch (`trainer.workers.group`), as Ray actors; there
is no Rollouter, no engine, no queue actor and no weight store. A rank that fails ends the run, and `resume=auto`
continues it from its last checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError
from asyncrl.core.records import Metrics
from asyncrl.core.staleness import Pacing
from asyncrl.core.tasks import Interrupts, task_group
from asyncrl.core.waits import WaitBoard
from asyncrl.driver.launch import COMPLETED, OpenedRun, exit_code, opened_run, run_on_cluster, show_warnings
from asyncrl.observe.formats import elapsed, number
from asyncrl.observe.metrics.file_sinks import rewind_jsonl
from asyncrl.observe.metrics.rows import MetricsRow, finite
from asyncrl.observe.metrics.series import TenthMeans, ThinnedSeries
from asyncrl.observe.metrics.sinks import Sink, close_sinks, open_sinks
from asyncrl.observe.status.run_status import STATE_FILE, RunPhase, RunState, StateFile
from asyncrl.observe.status.summary import MAX_VALIDATIONS, RunOutcome, describe_error
from asyncrl.observe.terminal.live import MAX_STEP_LINES, logging_to
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.queue.core import QueueOptions
from asyncrl.queue.sample_queue import LocalSampleQueue
from asyncrl.storage.checkpoint_claim import read_run_id
from asyncrl.storage.checkpoint_manifest import HF_DIRECTORY, NO_REWINDS, Progress, find_latest, run_identity
from asyncrl.storage.remote_checkpoints import remote_checkpoints

if TYPE_CHECKING:  # importing torch takes seconds
    from rollouter.prompts.demonstrations import LoadedDemonstrations
    from trainer.checkpoints import CheckpointDirectory, RoleCheckpoints
    from trainer.schedule import RowOrder
    from trainer.workers.worker import RoleGroup

TICK_S = 1.0
_PATIENCE_S = 10.0
"""Longest time between two progress lines, once there is a step to show."""


def sft(config: Config) -> int:
    """Train on demonstrations and return the exit code. It is that of `asyncrl.driver.launch.launch`, as are the errors
    that this raises."""
    with opened_run(config) as run:
        if run is None:
            return COMPLETED
        with run.view, logging_to(run.view, run.run_dir.logs, config.logging.level):
            return anyio.run(_sft, config, run)


async def _sft(config: Config, run: OpenedRun) -> int:
    try:
        records = await to_thread.run_sync(SupervisedRecords, config, run)
    except AsyncRLError as error:
        run.summary.write({"status": "failed", "error": describe_error(error, "driver"), "wall_s": 0.0})
        raise
    show_warnings(run)
    profile.configure("driver", ProfilerSettings.of(config.profiler, run.run_dir.path, rotates=True))

    async def main(namespace: str, interrupts: Interrupts) -> None:
        await _train(config, run, records, interrupts)
        run.view.phase("shutting down")

    outcome, cause = await run_on_cluster(config, run, main, records.summary, records.keep_state_written)
    await to_thread.run_sync(records.close, outcome, cause)
    await to_thread.run_sync(profile.close)
    run.summary.write(records.summary(outcome, cause))
    records.show_end(outcome, cause)
    return exit_code(outcome, cause)


async def _train(config: Config, run: OpenedRun, records: SupervisedRecords, interrupts: Interrupts) -> None:
    """Read the rows, start the ranks and train. The first interrupt stops after the current step, with a checkpoint."""
    from trainer.supervised import SupervisedLoop
    from trainer.workers.group import TrainerGroups

    view, resume, trainer = run.view, run.resume, config.trainer
    view.phase("reading the rows")
    train, validation, order = await to_thread.run_sync(_read_rows, config)
    progress = replace(resume.manifest.progress) if resume is not None else Progress()
    records.begin(order.total_steps, progress, train, validation)
    files = await to_thread.run_sync(_checkpoint_directory, config, run)
    view.phase(f"loading {config.model.path} into {trainer.num_workers} rank(s)")
    groups = await TrainerGroups.start(config, run_dir=run.run_dir.path)
    try:
        actor = groups.roles["actor"]
        await _prepare(config, actor, files, run, order.total_steps)
        loop = SupervisedLoop(
            actor,
            _checkpoints(config, files, actor, progress),
            rows=train.rows,
            order=order,
            validation=validation.rows if validation is not None else (),
            progress=progress,
            test_freq=trainer.test_freq,
            val_before_train=trainer.val_before_train,
            save_last=trainer.save_last,
            end_traces=groups.end_traces,
        )

        async def stop() -> None:
            loop.stop()

        interrupts.on_first = stop
        async with task_group() as tasks:
            tasks.start_soon(groups.watch, config.timeouts.probe_s)
            await loop.run(records.put)
            tasks.cancel_scope.cancel()
    finally:
        await groups.close()


def _read_rows(config: Config) -> tuple[LoadedDemonstrations, LoadedDemonstrations | None, RowOrder]:
    """Return the rows of training and validation, and the order of the training rows. Blocking.

    Raises:
        ConfigError: the rows cannot be used, or do not fill a step.
    """
    from rollouter.prompts.chat_template import load_tokenizer
    from rollouter.prompts.demonstrations import load_demonstrations
    from trainer.schedule import RowOrder

    tokenizer = load_tokenizer(config.model)
    train, validation = (load_demonstrations(config, tokenizer, split) for split in ("train", "val"))
    if train is None:
        raise ConfigError("data.train_files: empty, so there is nothing to learn; set it, or data.dataset")
    order = RowOrder.from_config(config, len(train.rows))
    if not order.total_steps:
        raise ConfigError(
            f"trainer.ppo_mini_batch_size={order.batch_rows}: {len(train.rows)} rows do not fill a step; lower it, or "
            "set trainer.partial_final_batch=train"
        )
    return train, validation, order


def _checkpoint_directory(config: Config, run: OpenedRun) -> CheckpointDirectory:
    from trainer.checkpoints import CheckpointDirectory

    run_dir, resume = run.run_dir, run.resume
    return CheckpointDirectory(
        run_dir.checkpoints,
        identity=run_identity(config),
        keep=config.trainer.max_checkpoints_to_keep,
        history=resume.history if resume is not None else NO_REWINDS,
        run_id=None if run_dir.checkpoint_dir is None else read_run_id(run_dir.path),
        remote=remote_checkpoints(run_dir, config.timeouts.call_s),
    )


async def _prepare(
    config: Config, actor: RoleGroup, files: CheckpointDirectory, run: OpenedRun, total_steps: int
) -> None:
    """Set the loss and the schedule of the ranks, and load the checkpoint from which the run continues."""
    from trainer.algorithms.objective import SupervisedLoss
    from trainer.checkpoints import check_shared

    await actor.set_loss_fn(SupervisedLoss())
    if config.has_checkpoints:
        await check_shared(files, {"actor": actor})
    if run.resume is not None:
        await to_thread.run_sync(files.set_abandoned_aside)
        if run.resume.checkpoint is not None:
            await actor.load_checkpoint(run.resume.checkpoint / "actor")
    await actor.plan(total_steps)


def _checkpoints(config: Config, files: CheckpointDirectory, actor: RoleGroup, progress: Progress) -> RoleCheckpoints:
    from trainer.checkpoints import HfExportSettings, RoleCheckpoints

    return RoleCheckpoints(
        files,
        {"actor": actor},
        # Checkpoints contain sample counts; there are no samples.
        LocalSampleQueue(QueueOptions(1, Pacing(1, 0.0))),
        step=progress.step,
        save_freq=config.trainer.save_freq,
        export=HfExportSettings.from_config(config),
        call_limit_s=config.timeouts.train_s,
        waits=WaitBoard(),
    )


class SupervisedRecords:
    """The rows of metrics of a supervised run, its progress lines and its summary. The constructor blocks.

    Raises (on construction):
        InfraError, ConfigError: a file cannot be written.
    """

    def __init__(self, config: Config, run: OpenedRun) -> None:
        self._run = run
        self._began = self._shown = time.monotonic()
        self._earlier_s = 0.0
        self._losses = TenthMeans()
        self._validations: ThinnedSeries[tuple[int, float]] = ThinnedSeries(MAX_VALIDATIONS)
        self._newest: dict[str, float] = {}
        self._progress = Progress()
        self._total_steps = 0
        self._sets: dict[str, int] = {}
        self._phase: RunPhase = "starting"
        self._state = StateFile(run.run_dir.path / STATE_FILE)
        self._config = config
        self._started_at = self._moved_at = time.time()
        resumed = run.resumed
        if resumed is not None:
            rewind_jsonl(run.run_dir.metrics, resumed.step, resumed.version, self._add)
        self._sinks: list[Sink] = open_sinks(config, run.run_dir, resumed.step if resumed else None)

    def begin(self, total_steps: int, progress: Progress, train: Any, validation: Any) -> None:
        """Set the length of the run and its data (`LoadedDemonstrations`; None: no validation set)."""
        self._total_steps, self._progress, self._phase = total_steps, progress, "running"
        self._sets = {"train": len(train.rows), "left_out": train.num_left_out}
        self._sets["validation"] = len(validation.rows) if validation is not None else 0
        tokens = sum(int(row.mask.sum()) for row in train.rows)
        rows = f"{len(train.rows):,} rows with {tokens:,} tokens to learn"
        self._run.view.message("", f"{rows}, {total_steps:,} steps from step {progress.step}")

    async def put(self, kind: str, step: int, metrics: Metrics) -> None:
        """Write a row to all sinks, and show it: every step of a short run, some of a long one."""
        now = time.monotonic()
        metrics = metrics | ({"time/monotonic_s": now} if kind == "step" else {})
        extra: dict[str, Any] = {"rewards": [], "staleness": []} if kind == "step" else {"examples": []}
        row = MetricsRow(kind, step, 0, self._earlier_s + now - self._began, time.time(), metrics, extra)
        self._add(row)
        self._moved_at = time.time()
        await to_thread.run_sync(self._write, row)
        every = max(1, self._total_steps // MAX_STEP_LINES)
        if kind == "validation":
            self._run.view.message("", f"validation at step {step}: loss {number(metrics['validation/loss'])}")
        elif step % every == 0 or step in (1, self._total_steps) or now - self._shown > _PATIENCE_S:
            self._shown = now
            self._run.view.message(
                "",
                f"step {step}/{self._total_steps}  loss {number(metrics['sft/loss'])}  "
                f"grad norm {number(metrics['actor/grad_norm'])}  lr {metrics['actor/lr']:.2e}  "
                f"tokens/s {metrics['sft/tokens_per_s']:,.0f}",
            )

    def summary(self, outcome: RunOutcome, cause: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the content of summary.json. Losses are in nats per token; `loss` has the means over the first and the
        last tenth of the steps."""
        resumed, progress, ends = self._run.resumed, self._progress, self._validations.values
        return finite(
            {
                "status": outcome,
                "error": cause,
                "wall_s": round(time.monotonic() - self._began, 3),
                "step": progress.step,
                "total_steps": self._total_steps,
                "resumed": resumed and resumed.summary(),
                "rows": {**self._sets, "trained": progress.trained_samples},
                "tokens": {"trained": progress.trained_tokens},
                "loss": self._losses.ends(),
                "validation": {
                    "before": ends[0][1] if ends and ends[0][0] == 0 else None,
                    "after": ends[-1][1] if ends and ends[-1][0] > 0 else None,
                    "points": [{"step": step, "loss": loss} for step, loss in ends],
                },
            }
        )

    def show_end(self, outcome: RunOutcome, cause: Mapping[str, Any] | None) -> None:
        """Show the outcome, the error and what can be done next."""
        view, final = self._run.view, self.summary(outcome, cause)
        if cause is not None:
            brief = ConfigError(cause["message"], cause["cause"]).brief
            view.message("error", brief if cause["type"] == ConfigError.__name__ else f"{cause['type']}: {brief}")
        loss, validation = final["loss"], final["validation"]
        view.message(
            "",
            f"{outcome} after {elapsed(final['wall_s'])}: step {final['step']}/{self._total_steps}, loss "
            f"{number(loss['first'])} → {number(loss['last'])}, validation loss {number(validation['before'])} → "
            f"{number(validation['after'])}, {final['tokens']['trained']:,} tokens",
        )
        if outcome != "completed":
            view.message("", f"continue it with run_dir={self._run.run_dir.path} resume=auto")
        checkpoint = find_latest(self._run.run_dir.checkpoints)
        if checkpoint is not None and (model := checkpoint / HF_DIRECTORY).is_dir():
            view.message("", f"start a launch from it: asyncrl launch fully_async my.yaml model.path={model}")

    def close(self, outcome: RunOutcome, cause: Mapping[str, Any] | None) -> None:
        """Close the sinks, and write the final state; trackers get the outcome. Blocking."""
        close_sinks(self._sinks, ok=outcome == "completed")
        self._phase = outcome
        self._state.write_now(self._now(cause["message"] if cause is not None else ""))

    async def keep_state_written(self) -> None:
        """Write state.json every second, for `asyncrl status`, until cancelled."""
        while True:
            await self._state.write(self._now())
            await anyio.sleep(TICK_S)

    def _now(self, error: str = "") -> RunState:
        return RunState(
            written_at=time.time(),
            started_at=self._started_at,
            pid=os.getpid(),
            phase=self._phase,
            experiment=self._config.experiment_name,
            mode=self._config.mode,
            host=socket.gethostname(),
            error=error,
            total_steps=self._total_steps or None,
            step=self._progress.step,
            trained_tokens=self._progress.trained_tokens,
            losses=self._newest,
            num_replicas=0,
            waits={"trainer": ()},
            lineage=self._run.resume.lineage if self._run.resume is not None else 0,
            last_progress_at=self._moved_at,
        )

    def _write(self, row: MetricsRow) -> None:
        for sink in self._sinks:
            sink.write(row)

    def _add(self, row: MetricsRow) -> None:
        if row.kind == "step":
            self._losses.add(loss := row.metrics["sft/loss"])
            self._newest = self._newest | {"train": loss}
        else:
            self._validations.add((row.step, loss := row.metrics["validation/loss"]))
            self._newest = self._newest | {"validation": loss}
        self._earlier_s = self._earlier_s if row.unix_s else row.time_s
