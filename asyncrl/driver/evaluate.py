"""`asyncrl eval`: the answers of one model to a validation set, with engines and a Rollouter, and without a Trainer.

    checkpoint=RUN|PATH ─▶ model directory ─▶ engines ─▶ Rollouter ─▶ answers.jsonl ─▶ evaluation.json, page, terminal

evals/<experiment>/<model>-<digest of the settings>/
  settings.json      what the answers depend on
  answers.jsonl      `asyncrl.storage.answer_files`
  evaluation.json    the figures, once every prompt is done (`asyncrl.observe.report.evaluation`)
  state.json, metrics.jsonl, tensorboard/, wandb/   see `evaluation_records`
  index.html, figures.png, logs/

The same command with the same settings finds the same directory, and continues with the answers that are missing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import click
from rich.console import Console

from asyncrl.assets import resolve
from asyncrl.config.environment import local_path
from asyncrl.config.import_path import own_code
from asyncrl.config.interpolation import texts
from asyncrl.config.keys import leaves
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DataError, InfraError
from asyncrl.core.tasks import Interrupts, task_group
from asyncrl.driver.cluster.connection import cluster, link_logs
from asyncrl.driver.evaluation_records import EvaluationRecords, evaluation_records
from asyncrl.driver.run_directory import LOCK, RunLocks
from asyncrl.driver.supervision import RestartBudget
from asyncrl.observe.terminal.live import View, logging_to, make_view
from asyncrl.storage.answer_files import ANSWERS, read_answers
from asyncrl.storage.checkpoint_manifest import CHECKPOINTS, HF_DIRECTORY, MANIFEST, checkpoint_steps, find_latest
from asyncrl.storage.remote_checkpoints import remote_checkpoints
from asyncrl.storage.run_dir import RUNS, RunDir, disk_error, find_run, read_json, replace_file

COMPLETED, INTERRUPTED = 0, 130
EVALUATIONS = Path("evals")
SETTINGS, EVALUATION = "settings.json", "evaluation.json"
PROGRESS_S = 1.0
MAX_MESSAGES = 10
"""Messages about the progress of an evaluation."""
_WITHOUT_EFFECT = ("on_error", "max_errors", "timeout_s", "max_concurrency", "max_per_s")
"""Names of keys that change no answer and no score."""
_DATA_KEYS = (
    *("val_files", "dataset", "dataset_kwargs", "reasoning_gym", "max_prompt_length", "overlong_prompts"),
    "max_val_samples",
)
_ROLLOUT_KEYS = ("val", "response_length", "max_model_len", "dtype", "multi_turn", "agent")
_CODE_SUFFIX = "*.py"

logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------ what is evaluated


class EvaluatedModel(NamedTuple):
    """The model that `checkpoint=` means."""

    path: str
    """Its directory in Hugging Face format, or an `asyncrl://` name."""
    run_dir: Path | None = None
    """The run that wrote it; None: another program did, or the run directory is not here."""


def find_model(checkpoint: str, *, root: Path = RUNS) -> EvaluatedModel:
    """Return the model of a run's newest checkpoint, of one checkpoint, or in a model directory. Blocking.

    Args:
        checkpoint: a run directory or the name of an experiment; a checkpoint; or a model in Hugging Face format.
        root: the directory of experiments.

    Raises:
        ConfigError: there is no such checkpoint, or it has no model; or it is at an address that another user's run
            names.
    """
    if checkpoint.startswith("asyncrl://"):
        return EvaluatedModel(checkpoint)
    path = Path(checkpoint).expanduser()
    if path.name == HF_DIRECTORY and (path.parent / MANIFEST).is_file():
        path = path.parent
    if (path / MANIFEST).is_file() or (path / HF_DIRECTORY).is_dir():
        return _of_checkpoint(path, checkpoint)
    if checkpoint_steps(path):
        return _of_checkpoint(_newest(path, checkpoint), checkpoint)
    if (path / "config.json").is_file():
        return EvaluatedModel(str(path))
    try:
        run_dir = find_run(checkpoint, root)
    except ConfigError as error:
        why = error.message[0].upper() + error.message[1:]
        raise ConfigError(
            f"checkpoint={checkpoint}: it is no run, no checkpoint and no model directory, so there is nothing to "
            f"evaluate. Give a run directory, its {CHECKPOINTS}/step_*, or a directory with config.json and "
            f"*.safetensors; a model of the hub is given as model.path=NAME. {why}"
        ) from None
    saved = RunDir.saved(run_dir)
    if saved.checkpoint_url is not None and not checkpoint_steps(saved.checkpoints):
        check_owner(
            run_dir,
            "its checkpoints are at an address, to which a request would go. Copy a checkpoint to this machine and "
            "give its directory",
        )
        if (remote := remote_checkpoints(saved)) is not None:
            remote.pull()
    return _of_checkpoint(_newest(saved.checkpoints, checkpoint), checkpoint)._replace(run_dir=run_dir)


def check_owner(run_dir: Path, consequence: str) -> None:
    """Check that the run directory and its config.yaml belong to this user or to root, so that the addresses and the
    code that the file names may be used. `consequence` says what would be used, and the fix.

    Raises:
        ConfigError: another user could have written the file.
    """
    for path in (run_dir, RunDir(run_dir).config):
        if path.exists() and (owner := path.stat().st_uid) not in (os.geteuid(), 0):
            raise ConfigError(f"checkpoint={run_dir}: {path} belongs to another user (uid {owner}), and {consequence}")


def _newest(directory: Path, checkpoint: str) -> Path:
    if (found := find_latest(directory)) is None:
        raise ConfigError(
            f"checkpoint={checkpoint}: {directory} has no checkpoint yet, so there are no trained weights to evaluate. "
            "A run writes one at its end, and every trainer.save_freq steps; for the model that it starts from, give "
            "model.path instead"
        )
    return found


def _of_checkpoint(path: Path, checkpoint: str) -> EvaluatedModel:
    path = path.absolute()
    if not (path / HF_DIRECTORY / "config.json").is_file():
        raise ConfigError(
            f"checkpoint={checkpoint}: {path / HF_DIRECTORY} has no model in Hugging Face format, which engines load: "
            "the checkpoint is incomplete, or was written without it (trainer.hf_export=last or never). Give another "
            "checkpoint, or continue the run with resume=auto: it writes the model at its end, unless it is never"
        )
    run_dir = next((one for one in path.parents[:2] if (one / "config.yaml").is_file()), None)
    return EvaluatedModel(str(path / HF_DIRECTORY), run_dir)


def settings_of(config: Config) -> dict[str, Any]:
    """Return everything in the configuration on which answers and scores depend, in JSON types by dotted key, with the
    sizes and times of the model's files and a digest of the user's code."""
    values = config.identity_values()
    chosen = {
        "model": {**values["model"], "files": dict(_model_files(config.model.path))},
        "data": {key: values["data"][key] for key in _DATA_KEYS},
        "rollout": {key: values["rollout"][key] for key in _ROLLOUT_KEYS},
        "reward": values["reward"],
        "reward_model": {key: values["reward_model"][key] for key in ("placement", "path", "weight")},
        "seed": config.seed,
    }
    flat = {key: value for key, value in leaves(chosen).items() if key.rpartition(".")[2] not in _WITHOUT_EFFECT}
    names = [text for _, text in texts([chosen["reward"], chosen["data"], chosen["rollout"]])]
    return {**flat, "code": dict(_code(names))}


def _model_files(model: str) -> Iterator[tuple[str, list[int]]]:
    directory = local_path(model)
    for path in sorted(directory.iterdir()) if directory is not None and directory.is_dir() else ():
        if path.is_file():
            found = path.stat()
            yield path.name, [found.st_size, found.st_mtime_ns]


def _code(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a digest of each file and package of the user's that `names` refer to."""
    for path in own_code([name for name in names if ":" in name]):
        files = [path] if path.is_file() else sorted(path.rglob(_CODE_SUFFIX))
        digest = hashlib.sha256(b"".join(one.read_bytes() for one in files))
        yield path.name, digest.hexdigest()[:16]


def default_directory(config: Config, settings: Mapping[str, Any], *, root: Path = EVALUATIONS) -> Path:
    """Return the directory of the evaluation with these settings."""
    parts = [part for part in Path(resolve(config.model.path)).absolute().parts if part != HF_DIRECTORY]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return root / config.experiment_name / f"{parts[-1]}-{digest}"


# ------------------------------------------------------------------------------------------------ the command


def evaluate(config: Config, *, out: Path | None = None, fresh: bool = False, as_json: bool = False) -> int:
    """Evaluate the model at `model.path` and return the exit code: 0 evaluated, 130 interrupted. The figures are
    printed and written to the evaluation's directory.

    Args:
        out: the directory; None: see `default_directory`.
        fresh: answer every prompt again.
        as_json: print evaluation.json instead of a table.

    Raises:
        ConfigError: `out` cannot be used, or the data, the model or a reward function is unusable.
        AsyncRLError: the first failure; all answers so far are kept.
    """
    settings = settings_of(config)
    directory = (out or default_directory(config, settings)).absolute()
    view = make_view(config.logging.console, f"asyncrl eval · {directory.name}", Console(stderr=True, highlight=False))
    with RunLocks(config.directory_mode) as locks:
        with _disk_errors(directory):
            _check_directory(directory)
            locks.take(directory)
            found = _open(directory, settings, fresh=fresh)
        if found is not None:
            view.message("", f"evaluated before: {directory} has all answers; --fresh answers every prompt again")
        else:
            with view, logging_to(view, directory / "logs", config.logging.level):
                found = _run(config, directory, view)
    if found is None:
        return INTERRUPTED
    _show(found, as_json=as_json)
    return COMPLETED


def plan_text(config: Config, *, out: Path | None, fresh: bool) -> str:
    """Return what `evaluate` would do, in one line. Raises `ConfigError` as `evaluate` does."""
    directory = (out or default_directory(config, settings_of(config))).absolute()
    _check_directory(directory)
    done = 0 if fresh else sum(1 for one in read_answers(directory / ANSWERS).values() if one.answers)
    kept = f", which has answers to {done:,} prompts" if done else ""
    return f"{config.rollout.val.n} answer(s) per prompt of {config.model.path}, into {directory}{kept}"


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(Path(error.filename or directory), error) from error


def _check_directory(directory: Path) -> None:
    """Raise `ConfigError` if the directory has other files than those of an evaluation."""
    if not directory.is_dir() or (directory / SETTINGS).is_file():
        return
    if others := sorted(path.name for path in directory.iterdir() if path.name not in (LOCK, "logs")):
        raise ConfigError(
            f"--out={directory} has other files ({', '.join(others[:3])}) and no evaluation: nothing there is "
            "overwritten. Name a new or an empty directory with --out DIR"
        )


def _open(directory: Path, settings: Mapping[str, Any], *, fresh: bool) -> dict[str, Any] | None:
    """Prepare the directory. Return the evaluation that it has, or None if prompts have to be answered.

    Raises:
        ConfigError: its answers were made with other settings.
    """
    if fresh:
        for name in (EVALUATION, ANSWERS, SETTINGS):
            (directory / name).unlink(missing_ok=True)
    (directory / "logs").mkdir(exist_ok=True)
    file = directory / SETTINGS
    if file.is_file():
        before = _read(file)
        for key in sorted(before.keys() | settings.keys()):
            if before.get(key) != settings.get(key):
                raise ConfigError(
                    f"{file} has {key}={before.get(key)!r}, and this evaluation has {settings.get(key)!r}: the answers "
                    "there would be mixed with other ones. Restore the setting, name another directory with --out DIR, "
                    "or answer every prompt again with --fresh"
                )
    else:
        replace_file(file, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    if not (directory / EVALUATION).is_file():
        return None
    found = _read(directory / EVALUATION)
    return None if found.get("failed") else found  # prompts that failed are tried again


def _read(file: Path) -> dict[str, Any]:
    try:
        if isinstance(found := read_json(file), dict):
            return found
        reason = "it is no JSON object"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(f"{file} cannot be read: {reason}. Answer every prompt again with --fresh, or delete the file")


def _run(config: Config, directory: Path, view: View) -> dict[str, Any] | None:
    """Answer what is missing; return the evaluation, or None if it was interrupted."""
    with evaluation_records(config, directory, continued=(directory / ANSWERS).exists()) as records:
        return _record(config, directory, view, records)


def _record(config: Config, directory: Path, view: View, records: EvaluationRecords) -> dict[str, Any] | None:
    began = time.monotonic()
    status = anyio.run(_evaluate, config, directory, view, records)
    if status is not None:
        records.report(status)
    done = sum(1 for one in read_answers(directory / ANSWERS).values() if one.answers)
    if status is None or status["known"] + status["answered"] + status["failed"] < status["prompts"]:
        view.message("", f"interrupted: {done} prompts are answered; the same command continues with the others")
        return None
    found = _summarize(config, directory, status, time.monotonic() - began)
    if found["answered"] == 0:
        first = found["failed"][0]["error"]
        raise DataError(f"no prompt of {status['prompts']} could be answered; the first error: {first}")
    from asyncrl.observe.report.evaluation import write_page

    view.phase("drawing the page")
    with _disk_errors(directory):
        write_page(found, read_answers(directory / ANSWERS), directory)
        records.put(found)
        replace_file(directory / EVALUATION, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for one in found["failed"][:MAX_MESSAGES]:
        view.message("warning", f"prompt {one['number']} ({one['data_source']}) has no answers: {one['error']}")
    view.phase("")
    return found


def _summarize(config: Config, directory: Path, status: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    from asyncrl.core.answer_statistics import summarize

    lines = [one for number, one in read_answers(directory / ANSWERS).items() if number < status["prompts"]]
    answered = [one for one in lines if one.answers]
    graded = [(one.data_source, [each.graded for each in one.answers]) for one in answered]
    return {
        "format": 1,
        "directory": str(directory),
        "model": config.model.path,
        "sampling": config.rollout.val.model_dump(mode="json"),
        "prompts": status["prompts"],
        "answered": len(answered),
        "kept": status["known"],
        "generated_tokens": status["generated_tokens"],
        "wall_s": round(wall_s, 3),
        "failed": [
            {"number": one.number, "data_source": one.data_source, "error": one.error} for one in lines if one.error
        ],
        **(summarize(graded) if graded else {"all": None, "sources": {}}),
    }


def _show(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    from asyncrl.observe.report.evaluation import summary_table

    console = Console(highlight=False)
    console.print(summary_table(found))
    console.print(f"{Path(found['directory']) / 'index.html'}\n[dim]with {EVALUATION} and {ANSWERS}[/]", soft_wrap=True)


# ------------------------------------------------------------------------------------------------ the processes


async def _evaluate(
    config: Config, directory: Path, view: View, records: EvaluationRecords
) -> Mapping[str, Any] | None:
    """Return the last status of the Rollouter's evaluation; None: it was interrupted before.

    Raises:
        AsyncRLError: the first failure.
    """
    interrupts = Interrupts(records.note_interrupt)
    status: Mapping[str, Any] | None = None
    view.phase("starting Ray")
    try:
        with interrupts.scope:
            async with task_group() as group:
                await group.start(interrupts.listen)
                group.start_soon(records.keep_state_written)
                async with cluster(config, "eval") as namespace:
                    link_logs(directory / "logs")
                    status = await _answer(config, directory, namespace, view, interrupts, records)
                    view.phase("shutting down")
                group.cancel_scope.cancel()
    except InfraError:
        logger.debug("the evaluation ended", exc_info=True)
        if not interrupts.received:  # otherwise it lost a part while it was stopping
            raise
    return status


async def _answer(
    config: Config,
    directory: Path,
    namespace: str,
    view: View,
    interrupts: Interrupts,
    records: EvaluationRecords,
) -> Mapping[str, Any]:
    # Imported here, because Ray reads the environment that the cluster has set.
    from asyncrl.driver.actors import call, create
    from asyncrl.driver.cluster.state import check_room
    from rollouter.actor import start_rollouter
    from rollouter.serving.app import start_app, stop_app

    if config.ray.address is not None and (delay := await check_room(config, trains=False)):
        view.message("warning", delay)
    view.phase("starting engines and reading data (about 40 s on a CPU)")
    rollouter = await create("rollouter", functools.partial(start_rollouter, config), config.timeouts.start_s)

    async def prepare() -> None:
        limit_s = config.timeouts.start_s
        prepared = await call("rollouter", rollouter.prepare.remote(str(directory)), limit_s, doing="reading the data")
        if filtered := prepared["num_val_filtered"]:
            view.message("warning", f"{filtered} prompts over data.max_prompt_length were left out")
        if parser := prepared["call_format"]:
            view.message("", f"the parser of tool calls: {parser} (rollout.multi_turn.format=auto)")

    async def stop() -> None:
        view.phase("stopping; Ctrl-C again stops at once")
        await call("rollouter", rollouter.stop.remote(), config.timeouts.call_s, doing="stopping")

    async with task_group() as starting:
        starting.start_soon(prepare)
        starting.start_soon(functools.partial(start_app, config, namespace=namespace))
    view.phase("answering prompts")
    interrupts.on_first = stop
    async with task_group() as group:
        group.start_soon(_report, config, rollouter, view, records)
        # Every call inside it has a deadline, and the process is probed.
        ref = rollouter.evaluate.remote(str(directory / ANSWERS))
        status: Mapping[str, Any] = await call("rollouter", ref, math.inf, doing="its evaluation")
        group.cancel_scope.cancel()
    interrupts.on_first = None
    # The application is stopped before Ray, whose shutdown would kill the engines.
    with anyio.move_on_after(config.timeouts.stop_s):
        await stop_app(namespace)
    return status


async def _report(config: Config, rollouter: Any, view: View, records: EvaluationRecords) -> None:
    """Probe the Rollouter, and report now and then how far it is.

    Raises:
        InfraError: it does not answer, or the budget of restarts for its workers is spent.
    """
    from asyncrl.driver.actors import call

    recovery = config.recovery
    budget = RestartBudget("Rollouter's workers", recovery.max_restarts, recovery.window_s, unit="prompt")
    num_lost = 0
    reported = -1
    while True:
        status = await call("rollouter", rollouter.status.remote(), config.timeouts.probe_s, doing="its status report")
        if (at := status.get("evaluation")) is not None and at["prompts"]:
            records.report(at)
            done = at["known"] + at["answered"] + at["failed"]
            if done:
                budget.reached(done)
            if (part := done * MAX_MESSAGES // at["prompts"]) > reported:
                reported = part
                view.message("", f"{done} of {at['prompts']} prompts are answered")
        for lost in status.get("lost_workers", ()):
            if lost.number > num_lost:
                num_lost = lost.number
                view.message("warning", f"worker {lost.worker} is replaced: {lost.cause}")
                budget.spend(time.monotonic(), InfraError(lost.cause))
        await anyio.sleep(PROGRESS_S)
