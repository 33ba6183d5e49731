"""`asyncrl launch` and `asyncrl serve`: one run that always ends with a summary and an exit code, or engines alone."""

from __future__ import annotations

import functools
import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import click
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, ConfigError, DiskFullError, InfraError, first_failure
from asyncrl.core.tasks import Interrupts
from asyncrl.driver.cluster.connection import cluster, link_logs
from asyncrl.driver.cluster.log_files import keep_bounded
from asyncrl.driver.resume import find_resume
from asyncrl.driver.run_directory import (
    RunLocks,
    already_completed,
    check_run_dir,
    find_locked_resume,
    open_run_dir,
    unfinished_run,
)
from asyncrl.driver.run_status_writer import RunStatus
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.status.run_status import RunProgress, read_readable_state
from asyncrl.observe.status.summary import (
    ResumePoint,
    RunOutcome,
    SummaryBuilder,
    SummaryFile,
    count_restarts,
    describe_early_end,
    describe_error,
)
from asyncrl.observe.terminal.live import ALREADY_SHOWN, View, logging_to, make_view
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.storage.checkpoint_claim import claim_checkpoints
from asyncrl.storage.checkpoint_manifest import NO_REWINDS, Resume
from asyncrl.storage.run_dir import RunDir

COMPLETED, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130

logger = logging.getLogger(__name__)


_EXIT_CODES: Mapping[RunOutcome, int] = {"completed": COMPLETED, "failed": FAILED, "interrupted": INTERRUPTED}


def launch(config: Config) -> int:
    """Run `config` to its end and return the exit code: 0 completed, 1 failed, 2 bad configuration that was detected
    after the start, 130 interrupted. A completed run is left untouched.

    Raises:
        ConfigError: the checkpoint to resume from, the run directory or `trainer.checkpoint_dir` is unusable; nothing
            was started.
        InfraError: the disk is full; nothing was started.
    """
    with opened_run(config) as run:
        if run is None:
            return COMPLETED
        with run.view, logging_to(run.view, run.run_dir.logs, config.logging.level):
            return anyio.run(_launch, config, run)


class OpenedRun(NamedTuple):
    """A run whose directory is locked and ready to be written."""

    run_dir: RunDir
    resume: Resume | None
    summary: SummaryFile
    view: View
    warnings: Sequence[str]
    """Notices about what the run continues from."""

    @property
    def resumed(self) -> ResumePoint | None:
        if self.resume is None:
            return None
        progress, checkpoint = self.resume.manifest.progress, self.resume.checkpoint
        path = str(checkpoint) if checkpoint is not None else ""
        return ResumePoint(progress.step, progress.version, path, self.resume.lineage, self.resume.lost)


@contextmanager
def opened_run(config: Config) -> Iterator[OpenedRun | None]:
    """Choose, lock and open the run directory, and reserve the space of its summary; None: the run is completed, and a
    message says so.

    Raises:
        ConfigError, InfraError: see `launch`.
    """
    with RunLocks(config.directory_mode) as locks:
        warnings: list[str] = []
        resume = find_locked_resume(config, locks, warnings)
        if (resume is None or resume.run_dir is None) and config.run_dir is not None:
            locks.take(Path(config.run_dir))
        console = "plain" if config.mode == "sft" and config.logging.console != "off" else config.logging.console
        view = make_view(console, f"asyncrl {config.mode} · {config.experiment_name}")
        if resume is not None:
            check_run_dir(config, resume)
            if (message := already_completed(config, resume)) is not None:
                for text in filter(None, (*warnings, message, unfinished_run(config, resume))):
                    view.message("warning", text)
                yield None
                return
        run_dir = open_run_dir(config, resume)
        locks.take(run_dir.path)
        claim_checkpoints(
            run_dir,
            resume.history if resume is not None else NO_REWINDS,
            new=resume is None,
            exclusive=config.resume == "none",
            mode=config.directory_mode,
            call_s=config.timeouts.call_s,
        )
        summary = SummaryFile(run_dir.path)
        summary.reserve()
        yield OpenedRun(run_dir, resume, summary, view, warnings)


def preview_resume(config: Config) -> tuple[str, ...]:
    """Return lines about what a launch would continue from; nothing is locked or written.

    Raises:
        ConfigError: see `launch`.
    """
    if config.resume == "none" or "://" in (config.trainer.checkpoint_dir or ""):  # a launch fetches checkpoints first
        return ()
    warnings: list[str] = []
    resume = find_resume(config, warn=warnings.append)
    if resume is None:
        found = f"resume={config.resume} finds no run to continue: a new one begins"
    elif (message := already_completed(config, resume)) is not None:
        found = message
    else:
        step, source = resume.manifest.progress.step, resume.checkpoint or f"the journal of {resume.run_dir}"
        found = f"resume={config.resume} continues from {source}, at step {step}"
    return tuple(filter(None, (*warnings, found, unfinished_run(config, resume))))


async def _launch(config: Config, run: OpenedRun) -> int:
    run_dir, view, summary, resumed = run.run_dir, run.view, run.summary, run.resumed
    try:
        recorder = await Recorder.open(config, run_dir, view, resumed)
    except AsyncRLError as error:
        summary.write(SummaryBuilder(resumed).build("failed", describe_error(error, "driver"), RunProgress()))
        raise
    earlier = read_readable_state(run_dir.path)
    if resumed is not None and earlier is not None:
        recorder.add_earlier_tokens(earlier.generated_tokens)
        recorder.add_earlier_restarts(count_restarts(earlier.restarts, earlier.earlier_restarts))
    show_warnings(run)
    profile.configure("driver", ProfilerSettings.of(config.profiler, run_dir.path, rotates=True))
    profile.set_position(step=(resumed.step if resumed else 0) + 1)
    status = RunStatus(config, run_dir, recorder, resumed_at=resumed)
    stale_namespace = earlier.namespace if earlier is not None else ""

    async def main(namespace: str, interrupts: Interrupts) -> None:
        from asyncrl.driver.run import Run

        async with recorder.trackers():
            await Run(config, run_dir, run.resume, recorder, view, status).main(namespace, interrupts)
            view.phase("shutting down")
        if status.queue is not None:
            recorder.update_counts(status.queue.counts, status.queue.trained_tokens)

    outcome, cause = await run_on_cluster(
        config, run, main, recorder.summary, status.keep_written, stale=stale_namespace
    )
    await status.take_final_counts()
    final = recorder.summary(outcome, cause)
    status.end(outcome, cause["message"] if cause is not None else "")
    await recorder.aclose()
    await to_thread.run_sync(profile.close)
    summary.write(final)
    view.finish(final, run_dir.path, *recorder.examples())
    return exit_code(outcome, cause)


def show_warnings(run: OpenedRun) -> None:
    for text in run.warnings:
        run.view.message("warning", text)
        logger.warning("%s", text, extra=ALREADY_SHOWN)


def exit_code(outcome: RunOutcome, cause: Mapping[str, str] | None) -> int:
    is_bad_config = cause is not None and cause["type"] == ConfigError.__name__
    return BAD_CONFIG if is_bad_config else _EXIT_CODES[outcome]


async def run_on_cluster(
    config: Config,
    run: OpenedRun,
    main: Callable[[str, Interrupts], Awaitable[None]],
    summarize: Callable[[RunOutcome, Mapping[str, str] | None], Mapping[str, Any]],
    *background: Callable[[], Coroutine[Any, Any, None]],
    stale: str = "",
) -> tuple[RunOutcome, dict[str, str] | None]:
    """Start Ray, call `main` with its namespace and the interrupts, and return the outcome and the error.

    Modules that import Ray are imported in `main`, because Ray reads the environment that the cluster has set.

    Args:
        summarize: returns the summary for an outcome and an error. It is written early at the first signal, and before
            Ray stops.
        background: calls that run beside it until it has ended.
        stale: namespace of the run's last driver.
    """

    def note_interrupt() -> None:
        run.summary.write_early(summarize("interrupted", describe_early_end("resume=auto continues the run")))

    interrupts, view = Interrupts(note_interrupt), run.view
    view.phase("starting Ray")
    try:
        with interrupts.scope:
            async with anyio.create_task_group() as group:
                await group.start(interrupts.listen)
                for call in background:
                    group.start_soon(call)
                async with cluster(config, run.run_dir.path.name, stale=stale) as namespace:
                    logs = link_logs(run.run_dir.logs)
                    if logs is not None and config.ray.address is None:
                        group.start_soon(keep_bounded, logs, 86_400 * config.ray.keep_logs_days)
                    await main(namespace, interrupts)
                    run.summary.write_early(summarize("interrupted" if interrupts.received else "completed", None))
                group.cancel_scope.cancel()
    except Exception as error:  # it goes into summary.json, with its traceback
        logger.debug("the run ended", exc_info=True)
        described = describe_error(error, "driver")
        text = "%(type)s in %(part)s: %(message)s\n%(cause)s"
        logger.error(text, described, extra=ALREADY_SHOWN)  # the closing summary shows less
        return _final_status(error, interrupted=interrupts.received), described
    finally:
        view.phase("")
    return "interrupted" if interrupts.received else "completed", None


def _final_status(error: Exception, *, interrupted: bool) -> RunOutcome:
    """Return the final status. An interrupted run that then lost a part counts as interrupted; with any other failure,
    such as a write error, it counts as failed."""
    failure = first_failure(error)
    lost_a_part = isinstance(failure, InfraError) and not isinstance(failure, DiskFullError)
    return "interrupted" if interrupted and lost_a_part else "failed"


# ---------------------------------------------------------------------------------------------- serve


def serve(config: Config) -> int:
    """Serve until SIGINT or SIGTERM; a second one ends at once. Return 0 if the server was up, else 130.

    Raises:
        InfraError: the engines, Ray or the HTTP server cannot start.
        ConfigError: the address asks for an API key and the variable is not set, or the cluster at `ray.address` can
            never have room.
    """
    click.echo(f"starting {config.rollout.num_replicas} engine(s) for {config.model.path}; Ctrl-C stops", err=True)
    try:
        return anyio.run(_serve, config)
    except BaseExceptionGroup as error:
        raise first_failure(error) from None


async def _serve(config: Config) -> int:
    interrupts = Interrupts()
    up = False
    with interrupts.scope:
        async with anyio.create_task_group() as group:
            await group.start(interrupts.listen)
            async with cluster(config, "serve") as namespace:
                # Imported here, because Ray reads the environment that the cluster has set.
                from asyncrl.driver.cluster.state import check_room
                from rollouter.serving.app import start_app, stop_app

                if config.ray.address is not None and (delay := await check_room(config, trains=False)):
                    click.echo(f"warning: {delay}", err=True)
                await start_app(config, namespace=namespace, http=True)
                stop = anyio.Event()
                interrupts.on_first = functools.partial(_set, stop)
                up = True
                click.echo(_instructions(config, namespace))
                await stop.wait()
                click.echo("stopping", err=True)
                # The app is stopped before Ray, because the shutdown of Ray would kill the engines.
                with anyio.move_on_after(config.timeouts.stop_s):
                    await stop_app(namespace)
            group.cancel_scope.cancel()
    return 0 if up else INTERRUPTED


async def _set(event: anyio.Event) -> None:
    event.set()


def _instructions(config: Config, namespace: str) -> str:
    from rollouter.serving.options import serving_options

    loading = serving_options(config, namespace=namespace, gpus=False).llm_config["model_loading_config"]
    host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
    url = f"http://{host}:{config.serve.port}/v1"
    body = json.dumps({"model": loading["model_id"], "messages": [{"role": "user", "content": "12+34"}]})
    key = f' -H "Authorization: Bearer ${config.serve.api_key_env}"' if config.serve.api_key_env else ""
    return (
        f"serving {loading['model_id']} on {url}\n\n"
        f"  curl {url}/chat/completions{key} \\\n    -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
    )
