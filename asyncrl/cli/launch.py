"""`asyncrl launch`: a run directory, one run in it, its summary and its exit code, whatever happened."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Literal, NamedTuple

import anyio

from asyncrl.cli.cluster import cluster
from asyncrl.cli.interrupts import Interrupts
from asyncrl.config.schema import Config
from asyncrl.manifest import Resume, find_resume
from asyncrl.run_dir import RunDir, create_run_dir, reopen_run_dir
from asyncrl.telemetry.live import View, make_view
from asyncrl.telemetry.logs import logging_to
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.summary import Resumed, describe_error
from asyncrl.telemetry.summary_file import SummaryFile

COMPLETED, FAILED, INTERRUPTED = 0, 1, 130

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    status: Literal["completed", "failed", "interrupted"]
    error: dict[str, str] | None

    @property
    def exit_code(self) -> int:
        return {"completed": COMPLETED, "failed": FAILED, "interrupted": INTERRUPTED}[self.status]


def launch(config: Config) -> int:
    """Run `config` to its end and return the exit code: 0 completed, 1 failed, 130 interrupted.

    Raises:
        ConfigError: nothing was started, because the checkpoint to resume or the run directory is not usable.
        InfraError: likewise, the disk is full.
    """
    resume = find_resume(config)
    run_dir = reopen_run_dir(resume.run_dir, config) if resume else create_run_dir(config, datetime.now())
    summary = SummaryFile(run_dir.path)
    summary.reserve()
    title = f"asyncrl {config.mode} · {config.experiment_name}"
    with make_view(config.logging.console, title) as view, logging_to(view, run_dir.logs, config.logging.level):
        return anyio.run(_run, config, run_dir, resume, summary, view)


async def _run(config: Config, run_dir: RunDir, resume: Resume | None, summary: SummaryFile, view: View) -> int:
    resumed = None
    if resume:
        progress = resume.manifest.progress
        resumed = Resumed(progress.step, progress.version, str(resume.checkpoint))
    recorder = await Recorder.open(config.logging, run_dir, view, resumed)
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
        with interrupts.scope:
            async with anyio.create_task_group() as group:
                await group.start(interrupts.listen)
                async with cluster(config, run_dir.path.name) as namespace:
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
