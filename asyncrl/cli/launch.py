"""`asyncrl launch`: a run directory, one run in it, its summary and its exit code, whatever happened."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio import to_thread

from asyncrl.cli.cluster import cluster, link_logs
from asyncrl.cli.interrupts import Interrupts
from asyncrl.cli.nothing_left import finished
from asyncrl.cli.picture import Picture
from asyncrl.cli.run_lock import RunLocks
from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError, ConfigError, DiskFullError, InfraError, first_failure
from asyncrl.profiling import Setup, profile
from asyncrl.resume import Resume, find_resume
from asyncrl.run_dir import JOURNAL_FILES, METRICS, SAMPLES, TRAINED, RunDir, create_run_dir, reopen_run_dir
from asyncrl.run_state import RunState
from asyncrl.telemetry.live import View, make_view
from asyncrl.telemetry.logs import logging_to
from asyncrl.telemetry.recorder import Recorder
from asyncrl.telemetry.state_file import read_state
from asyncrl.telemetry.summary import Resumed, Status, SummaryBuilder, Totals, describe_error
from asyncrl.telemetry.summary_file import SummaryFile

COMPLETED, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    status: Status
    error: dict[str, str] | None

    @property
    def exit_code(self) -> int:
        if self.error is not None and self.error["type"] == ConfigError.__name__:
            return BAD_CONFIG
        return {"completed": COMPLETED, "failed": FAILED, "interrupted": INTERRUPTED}[self.status]


def launch(config: Config) -> int:
    """Run `config` to its end and return the exit code: 0 completed, 1 failed, 2 bad configuration, found only when
    a part made use of it, 130 interrupted. Of a run that is completed nothing is touched.

    Raises:
        ConfigError: nothing was started, because the checkpoint to resume or the run directory is not usable.
        InfraError: likewise, the disk is full.
    """
    with RunLocks() as locks:
        told: list[str] = []
        resume = _find_resume(config, locks, told)
        if resume is None and config.run_dir is not None:
            locks.take(Path(config.run_dir))
        view = make_view(config.logging.console, f"asyncrl {config.mode} · {config.experiment_name}")
        if resume is not None:
            _check_place(config, resume)
            if (done := finished(config, resume)) is not None:
                for text in (*told, done):
                    view.message("warning", text)
                return COMPLETED
        run_dir = _run_dir(config, resume)
        locks.take(run_dir.path)
        summary = SummaryFile(run_dir.path)
        summary.reserve()
        with view, logging_to(view, run_dir.logs, config.logging.level):
            return anyio.run(_run, config, run_dir, resume, summary, view, told)


def _find_resume(config: Config, locks: RunLocks, told: list[str]) -> Resume | None:
    """What to go on from, in a run that no other driver can change any more. `told` gets how it was chosen.

    Raises:
        ConfigError: see `find_resume`; or the run's driver lives.
    """
    for named in (config.run_dir, config.resume):
        if named is not None and (Path(named) / "config.yaml").exists():
            locks.take(Path(named))
    resume = find_resume(config, tell=told.append)
    while resume is not None and locks.take(resume.run_dir):
        told.clear()
        resume = find_resume(config, tell=told.append)  # its driver may have gone on until just now
    return resume


def _state_of(path: Path) -> RunState | None:
    """What the run there was doing, as far as it can be read."""
    try:
        return read_state(path)
    except ConfigError:
        return None


def _check_place(config: Config, resume: Resume) -> None:
    """Raises `ConfigError` if `run_dir` names another place than that of the run to go on with."""
    named = config.run_dir
    if named is None or Path(named).resolve() == resume.run_dir.resolve():
        return
    anew = ""
    if resume.checkpoint is not None:
        anew = f", or start anew from its weights: resume=none model.path={resume.checkpoint / 'hf'}"
    raise ConfigError(
        f"run_dir={named}: what resume names is of the run in {resume.run_dir}, and a run goes on where it is; leave "
        f"run_dir out{anew}"
    )


def _run_dir(config: Config, resume: Resume | None) -> RunDir:
    """The directory to run in. A run goes on where it is. What cannot be gone on with is set aside.

    Raises:
        ConfigError: `run_dir` cannot be used.
    """
    named = Path(config.run_dir) if config.run_dir else None
    if resume is None:
        if named is None or config.resume != "auto" or not (named / "config.yaml").exists():
            return create_run_dir(config, datetime.now())
        # Nothing is left of it that a run could go on from: it starts anew in its place.
        run_dir = reopen_run_dir(named, config)
        _set_aside(run_dir, METRICS, TRAINED, SAMPLES, *JOURNAL_FILES)
        return run_dir
    run_dir = reopen_run_dir(resume.run_dir, config)
    if config.journal == "off":
        # From here on the checkpoints have books of their own, which this journal and its samples have no part in.
        _set_aside(run_dir, SAMPLES, *JOURNAL_FILES)
    return run_dir


def _set_aside(run_dir: RunDir, *names: str) -> None:
    """Give these files and directories of a run names under which nothing looks for them."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    for path in (run_dir.path / name for name in names):
        if path.exists():
            stem, dot, suffix = path.name.partition(".")
            path.rename(path.with_name(f"{stem}-abandoned-{stamp}{dot}{suffix}"))


async def _run(
    config: Config,
    run_dir: RunDir,
    resume: Resume | None,
    summary: SummaryFile,
    view: View,
    told_before: Sequence[str],
) -> int:
    """`told_before`: what people should know, from before there was a view."""
    resumed = None
    if resume:
        progress = resume.manifest.progress
        checkpoint = str(resume.checkpoint) if resume.checkpoint is not None else ""
        resumed = Resumed(progress.step, progress.version, checkpoint, resume.lineage)
    try:
        recorder = await Recorder.open(config, run_dir, view, resumed)
    except AsyncRLError as error:
        totals = Totals(wall_s=0.0)
        summary.write(SummaryBuilder(resumed).build("failed", describe_error(error, "driver"), totals))
        raise
    earlier = _state_of(run_dir.path)
    if resumed is not None and earlier is not None:
        recorder.made_earlier(earlier.generated_tokens)
    for text in told_before:
        view.message("warning", text)
    profile.configure("driver", Setup.of(config.profiler, run_dir.path))
    profile.at(step=(resumed.step if resumed else 0) + 1)
    picture = Picture(config, run_dir, recorder, back_to=resumed)
    outcome = await _outcome(config, run_dir, resume, recorder, view, picture, earlier)
    told = recorder.summary(outcome.status, outcome.error)
    picture.end(outcome.status, outcome.error["message"] if outcome.error is not None else "")
    await recorder.aclose()
    await to_thread.run_sync(profile.close)
    summary.write(told)
    view.finish(told, run_dir.path, *recorder.examples())
    return outcome.exit_code


async def _outcome(
    config: Config,
    run_dir: RunDir,
    resume: Resume | None,
    recorder: Recorder,
    view: View,
    picture: Picture,
    earlier: RunState | None,
) -> Outcome:
    """Run it; every way it can end becomes a value. `earlier`: how the run's last driver left it."""
    interrupts = Interrupts()
    view.phase("starting Ray")
    try:
        with interrupts.scope:
            async with anyio.create_task_group() as group:
                await group.start(interrupts.listen)
                group.start_soon(picture.keep)
                stale = earlier.namespace if earlier is not None else ""
                async with cluster(config, run_dir.path.name, stale=stale) as namespace, recorder.trackers():
                    link_logs(run_dir.logs)
                    # Only now: the parts import Ray, whose settings the cluster has put into the environment.
                    from asyncrl.cli.run import Run

                    await Run(config, run_dir, resume, recorder, view, picture).main(namespace, interrupts)
                    view.phase("shutting down")
                group.cancel_scope.cancel()
    except Exception as error:  # told in summary.json, with its traceback
        logger.debug("the run ended", exc_info=True)
        return Outcome(_how_it_ended(error, interrupted=interrupts.came), describe_error(error, "driver"))
    finally:
        view.phase("")
    return Outcome("interrupted" if interrupts.came else "completed", None)


def _how_it_ended(error: Exception, *, interrupted: bool) -> Status:
    """A run that was asked to end, and lost a part over it, has ended as it was asked to, if not in order. What it
    could not write, or would have failed of anyhow, is a failure still."""
    failure = first_failure(error)
    lost_a_part = isinstance(failure, InfraError) and not isinstance(failure, DiskFullError)
    return "interrupted" if interrupted and lost_a_part else "failed"
