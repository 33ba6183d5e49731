"""`asyncrl launch`: a run directory, one run in it, its summary and its exit code, whatever happened."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

import anyio

from asyncrl.cli.cluster import cluster, link_logs
from asyncrl.cli.interrupts import Interrupts
from asyncrl.cli.nothing_left import nothing_left, planned_steps
from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError, ConfigError
from asyncrl.manifest import Resume, find_resume
from asyncrl.run_dir import RunDir, create_run_dir, reopen_run_dir
from asyncrl.telemetry.live import View, make_view
from asyncrl.telemetry.logs import logging_to
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.summary import Resumed, SummaryBuilder, Totals, describe_error
from asyncrl.telemetry.summary_file import SummaryFile

COMPLETED, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    status: Literal["completed", "failed", "interrupted"]
    error: dict[str, str] | None

    @property
    def exit_code(self) -> int:
        if self.error is not None and self.error["type"] == ConfigError.__name__:
            return BAD_CONFIG
        return {"completed": COMPLETED, "failed": FAILED, "interrupted": INTERRUPTED}[self.status]


def launch(config: Config) -> int:
    """Run `config` to its end and return the exit code: 0 completed, 1 failed, 2 bad configuration, found only when
    a part made use of it, 130 interrupted.

    Raises:
        ConfigError: nothing was started, because the checkpoint to resume or the run directory is not usable.
        InfraError: likewise, the disk is full.
    """
    resume = find_resume(config)
    run_dir = _run_dir(config, resume)
    summary = SummaryFile(run_dir.path)
    summary.reserve()
    title = f"asyncrl {config.mode} · {config.experiment_name}"
    with make_view(config.logging.console, title) as view, logging_to(view, run_dir.logs, config.logging.level):
        return anyio.run(_run, config, run_dir, resume, summary, view)


def _run_dir(config: Config, resume: Resume | None) -> RunDir:
    """The directory to run in. A run goes on where its checkpoint is.

    Raises:
        ConfigError: `run_dir` names another place, or one that cannot be used.
    """
    named = Path(config.run_dir) if config.run_dir else None
    if resume is None:
        if named is None or config.resume != "auto" or not (named / "config.yaml").exists():
            return create_run_dir(config, datetime.now())
        # It died before its first checkpoint: it starts anew in its place, and the old records are set aside.
        run_dir = reopen_run_dir(named, config)
        if run_dir.metrics.exists():
            run_dir.metrics.rename(run_dir.path / f"metrics-abandoned-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
        return run_dir
    if named is not None and named.resolve() != resume.run_dir.resolve():
        raise ConfigError(
            f"run_dir={named}: the checkpoint to resume is of the run in {resume.run_dir}, and a run goes on "
            "where it is; leave run_dir out, or start anew from its weights: "
            f"resume=none model.path={resume.checkpoint / 'hf'}"
        )
    return reopen_run_dir(resume.run_dir, config)


async def _run(config: Config, run_dir: RunDir, resume: Resume | None, summary: SummaryFile, view: View) -> int:
    resumed = None
    if resume:
        progress = resume.manifest.progress
        resumed = Resumed(progress.step, progress.version, str(resume.checkpoint))
    try:
        recorder = await Recorder.open(config.logging, run_dir, view, resumed)
    except AsyncRLError as error:
        totals = Totals(wall_s=0.0)
        summary.write(SummaryBuilder(resumed).build("failed", describe_error(error, "driver"), totals))
        raise
    outcome = await _outcome(config, run_dir, resume, recorder, view)
    told = recorder.summary(outcome.status, outcome.error)
    summary.write(told)
    await recorder.aclose()
    view.finish(told, run_dir.path, *recorder.examples())
    return outcome.exit_code


async def _outcome(config: Config, run_dir: RunDir, resume: Resume | None, recorder: Recorder, view: View) -> Outcome:
    """Run it; every way it can end becomes a value."""
    interrupts = Interrupts()
    view.phase("starting Ray")
    try:
        if resume is not None and (done := nothing_left(resume, planned_steps(config))) is not None:
            view.message("warning", done)
            return Outcome("completed", None)
        with interrupts.scope:
            async with anyio.create_task_group() as group:
                await group.start(interrupts.listen)
                async with cluster(config, run_dir.path.name) as namespace:
                    link_logs(run_dir.logs)
                    # Only now: the parts import Ray, whose settings the cluster has put into the environment.
                    from asyncrl.cli.run import Run

                    await Run(config, run_dir, resume, recorder, view).main(namespace, interrupts)
                    view.phase("shutting down")
                group.cancel_scope.cancel()
    except Exception as error:  # told in summary.json, with its traceback
        logger.debug("the run ended", exc_info=True)
        return Outcome("failed", describe_error(error, "run"))
    finally:
        view.phase("")
    return Outcome("interrupted" if interrupts.came else "completed", None)
