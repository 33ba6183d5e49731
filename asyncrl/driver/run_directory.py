"""The run directory of a launch: choose it, lock it, and recognize a run that has already finished.

One driver uses a run directory at a time: it acquires a lock before it touches the first file, and holds the lock
until it ends. The lock is the kernel's (`flock`), so it disappears with the driver. The queue's own lock on the
journal protects against processes that a dead driver has left running.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Self, TextIO

from asyncrl.config.resources.plan import training_steps
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import num_prompts as count_prompts
from asyncrl.core.failures import ConfigError
from asyncrl.driver.resume import completed_at, find_resume
from asyncrl.observe.status.run_files import read_liveness
from asyncrl.storage.checkpoint_manifest import Resume
from asyncrl.storage.run_dir import (
    JOURNAL_FILES,
    METRICS,
    RUNS,
    SAMPLES,
    TRAINED,
    RunDir,
    SavedConfig,
    check_file_types,
    create_run_dir,
    disk_error,
    reopen_run_dir,
    runs_of,
)

LOCK = "run.lock"
"""Names the driver that holds the lock, for users. The file remains afterwards, empty unless its driver was killed."""
_LENGTH_KEYS = (
    ("trainer", "total_training_steps"),
    ("trainer", "total_epochs"),
    ("trainer", "ppo_epochs"),
    ("trainer", "partial_final_batch"),
    ("async_training", "require_batches"),
)
"""Keys that determine a run's length, in addition to those that a resumed run may not change."""

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------- locks


class RunLocks:
    """Run directories that this process has locked, until the block ends."""

    def __init__(self, mode: int = 0o700) -> None:
        """`mode`: mode of run directories that `take` creates."""
        self._mode = mode
        self._locked: set[Path] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, run_dir: Path) -> bool:
        """Lock the directory, and create it if necessary. Return False if this process has locked it before. Blocking.

        Raises:
            ConfigError: another driver holds the lock, the directory cannot be written, or a link leads out of it.
            InfraError: the disk is full.
        """
        path = run_dir.resolve()
        if path in self._locked:
            return False
        try:
            path.mkdir(self._mode, parents=True, exist_ok=True)
            check_file_types(path)
            file = self._stack.enter_context((path / LOCK).open("a+", encoding="utf-8"))
            _lock(file.fileno(), run_dir)
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            self._stack.callback(_clear, file)
        except FileNotFoundError as error:
            raise ConfigError(
                f"run_dir={run_dir}: there can be no such directory ({error.strerror}). A run needs a directory for "
                "its records. Give one you may write to with run_dir=PATH."
            ) from None
        except OSError as error:
            raise disk_error(Path(error.filename or path / LOCK), error) from error
        self._locked.add(path)
        return True


def _clear(file: TextIO) -> None:
    with suppress(OSError):
        file.truncate(0)


def _lock(file: int, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"the run in {run_dir} is still running: another driver ({owner}) holds {LOCK}, and a second one would "
            f"overwrite its records. See its status with `asyncrl status {run_dir}`, or end it first; for another "
            "run give another run_dir, and for another evaluation another --out"
        ) from None
    except OSError as error:  # a file system without locks
        logger.warning("%s cannot be locked (%s): make sure that no second driver runs there", run_dir, error)


# ---------------------------------------------------------------------------------------------- which directory


def find_locked_resume(config: Config, locks: RunLocks, warnings: list[str]) -> Resume | None:
    """Return the checkpoint or journal to continue from, with its run locked. `warnings` receives notices about the
    choice.

    Raises:
        ConfigError: see `find_resume`; or the run's driver is alive.
    """
    for named in (config.run_dir, config.resume):
        if named is not None and (Path(named) / "config.yaml").exists():
            locks.take(Path(named))
    resume = find_resume(config, warn=warnings.append)
    while resume is not None and resume.run_dir is not None and locks.take(resume.run_dir):
        warnings.clear()
        resume = find_resume(config, warn=warnings.append)  # its driver may have continued until just now
    return resume


def check_run_dir(config: Config, resume: Resume) -> None:
    """Raise `ConfigError` if `run_dir` is not the directory of the run to continue."""
    named = config.run_dir
    if named is None or resume.run_dir is None or Path(named).resolve() == resume.run_dir.resolve():
        return
    anew = ""
    if resume.checkpoint is not None:
        anew = f", or start anew from its weights: resume=none model.path={resume.checkpoint / 'hf'}"
    raise ConfigError(
        f"run_dir={named}: resume names the run in {resume.run_dir}, and a run continues in its own directory; leave "
        f"run_dir out{anew}"
    )


def open_run_dir(config: Config, resume: Resume | None) -> RunDir:
    """Return the directory to run in; a resumed run keeps its own, unless that is lost. Records that cannot be
    continued are set aside.

    Raises:
        ConfigError: `run_dir` cannot be used.
    """
    named = Path(config.run_dir) if config.run_dir else None
    if resume is None:
        if named is None or config.resume != "auto" or not (named / "config.yaml").exists():
            return create_run_dir(config, datetime.now())
        # The run in it cannot be continued, so a new one replaces it.
        run_dir = reopen_run_dir(named, config)
        _set_aside(run_dir, METRICS, TRAINED, SAMPLES, *JOURNAL_FILES)
        return run_dir
    if resume.run_dir is None:
        return create_run_dir(config, datetime.now())
    run_dir = reopen_run_dir(resume.run_dir, config)
    if config.journal == "off":
        # New checkpoints have other sample counts, which an old journal and its samples would contradict.
        _set_aside(run_dir, SAMPLES, *JOURNAL_FILES)
    return run_dir


def _set_aside(run_dir: RunDir, *names: str) -> None:
    """Rename these files and directories so that nothing reads them any more."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    for path in (run_dir.path / name for name in names):
        if path.exists():
            stem, dot, suffix = path.name.partition(".")
            path.rename(path.with_name(f"{stem}-abandoned-{stamp}{dot}{suffix}"))


# ---------------------------------------------------------------------------------------------- finished runs


def planned_steps(config: Config) -> int | None:
    """Return the run's optimizer steps, or None if they are unknown before the Rollouter reads the data.

    Filtered prompts may reduce them later.

    Raises:
        ConfigError: the prompts do not fill a lease.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    num_prompts = count_prompts(config)
    return None if num_prompts is None else training_steps(config, num_prompts)


def already_finished(resume: Resume | None, total_steps: int | None) -> str | None:
    """Return a message if the checkpoint is at `total_steps` or beyond; None: steps are left to train."""
    if resume is None or total_steps is None or resume.manifest.progress.step < total_steps:
        return None
    return _nothing_to_train(resume, f"{resume.checkpoint} is at step {resume.manifest.progress.step} of {total_steps}")


def already_completed(config: Config, resume: Resume) -> str | None:
    """Return a message if a completed run has already trained all steps of `config`; None: steps are left to train.

    A run that was stopped or died between its last step and its end is not completed: its last version may not be
    validated, and its records are incomplete.

    Raises:
        ConfigError: see `planned_steps`.
    """
    if resume.run_dir is None or (end := completed_at(resume.run_dir)) is None:
        return None
    assert resume.checkpoint is not None  # a completed run without a checkpoint is not resumed
    is_named = Path(config.resume).expanduser().resolve() == resume.checkpoint.resolve()
    step = resume.manifest.progress.step if is_named else end
    if not (step == end and _has_same_length(config, resume.run_dir)):
        total_steps = planned_steps(config)
        if total_steps is None or step < total_steps:
            return None
    return _nothing_to_train(resume, f"the run in {resume.run_dir} is completed, at step {end}, and stays as it is")


def unfinished_run(config: Config, resume: Resume | None, *, root: Path = RUNS) -> str:
    """Return a sentence about the newest run of this experiment and mode that has not ended, and that `resume=auto`
    passes over because a newer one exists; empty: there is none, or `resume` is not `auto`."""
    if config.resume != "auto" or config.run_dir is not None or config.trainer.checkpoint_dir is not None:
        return ""
    chosen = None if resume is None or resume.run_dir is None else resume.run_dir.resolve()
    for run in runs_of(config.experiment_name, root=root):
        liveness = read_liveness(run.path)
        if run.path.resolve() == chosen or liveness.phase == "completed" or liveness.how == "live":
            continue
        if (run.checkpoints.is_dir() or run.journal.exists()) and SavedConfig(run.path).value("mode") == config.mode:
            state = liveness.state
            at = f" at step {state.step} of {state.total_steps}" if state is not None and state.total_steps else ""
            command = "asyncrl sft" if config.mode == "sft" else f"asyncrl launch {config.mode}"
            return (
                f"The run in {run.path} is not finished ({liveness.phase}{at}): "
                f"`{command} {run.path / 'config.yaml'} resume={run.path}` continues it"
            )
    return ""


def _nothing_to_train(resume: Resume, reason: str) -> str:
    assert resume.checkpoint is not None  # without one it would be at step 0
    return (
        f"nothing is left to train: {reason}. To train more, raise trainer.total_training_steps or "
        f"trainer.total_epochs; to start anew from its weights: resume=none model.path={resume.checkpoint / 'hf'}"
    )


def _has_same_length(config: Config, run_dir: Path) -> bool:
    """Whether the keys that determine the length have the values of the run's last launch."""
    before, present = SavedConfig(run_dir), config.model_dump(mode="json")
    return all(before.value(section, key) == present[section][key] for section, key in _LENGTH_KEYS)
