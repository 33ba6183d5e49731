"""Finds, creates and describes run directories. Blocking."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

import yaml

from asyncrl.config.interpolation import resolved, without_secrets
from asyncrl.config.yaml_files import load_yaml
from asyncrl.core.failures import AsyncRLError, ConfigError, DiskFullError, InfraError
from asyncrl.core.text import encodable_values, parse_json

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

RUNS = Path("runs")
MIRRORS = Path("~/.asyncrl/checkpoints")
"""Directory of the local copies of checkpoints on a URL, each under its quoted URL without credentials."""
JOURNAL = "journal.db"
JOURNAL_FILES = (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm")
SAMPLES = "samples"
KEPT = "kept"
"""Samples that are kept for `asyncrl show` (`asyncrl.storage.recent_samples`)."""
METRICS = "metrics.jsonl"
TRAINED = "trained.jsonl"
SUMMARY = "summary.json"
RAY_LOGS = Path("logs", "ray")
"""A link to the logs of Ray's session."""
_WRITTEN_DIRECTORIES = ("", SAMPLES, KEPT, "checkpoints", "events", "logs", "profiles", "tensorboard")
_RUN_FILES = ("state.json", "config.yaml", SUMMARY)
"""A directory that contains one of these is a run directory."""
_MAX_LISTED = 12
MAX_FILE_BYTES = 64 << 20
"""Limit of `read_file`. The largest files that it reads are the reports of long runs and kept samples."""
MAX_LINE_BYTES = 256 << 20
"""Limit of `read_lines`. The longest lines are trajectories of many tokens."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Names inside a run directory. `path` is absolute, because parts of the run have other working directories."""

    path: Path
    checkpoint_dir: Path | None = None
    """`trainer.checkpoint_dir`, or its mirror on this machine if it is a URL; None: the checkpoints are in the run
    directory."""
    checkpoint_url: str | None = None
    """`trainer.checkpoint_dir` if it is a URL (`asyncrl.storage.remote_checkpoints`)."""

    @classmethod
    def of(cls, path: Path, checkpoint_dir: str | None) -> RunDir:
        """Return the names for a run with this `trainer.checkpoint_dir`."""
        if checkpoint_dir is not None and "://" in checkpoint_dir:
            url = checkpoint_dir.rstrip("/")
            return cls(path.absolute(), MIRRORS.expanduser() / quote(without_secrets(url), safe=""), url)
        return cls(path.absolute(), None if checkpoint_dir is None else Path(checkpoint_dir).expanduser())

    @classmethod
    def saved(cls, path: Path) -> RunDir:
        """Return the names for an existing run, with the `trainer.checkpoint_dir` of its last launch."""
        saved = SavedConfig(path).value("trainer", "checkpoint_dir")
        return cls.of(path, saved if isinstance(saved, str) else None)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def samples(self) -> Path:
        return self.path / SAMPLES

    @property
    def checkpoints(self) -> Path:
        """The directory that contains the checkpoints."""
        return self.checkpoint_dir or self.path / "checkpoints"


class SavedConfig:
    """The config.yaml of a run directory; without any values if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._values = load_yaml(RunDir(path).config)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            self._values = None

    def value(self, *keys: str, resolve: bool = True) -> Any:
        """Return a value of the configuration, or None if there is no such key. It may have any type, because anybody
        may have written the file.

        References to environment variables are resolved, unless a variable is not set here. A value that others will
        see must not be resolved: the file may refer to a secret of this user.
        """
        found: Any = self._values
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return resolved(self._values, keys) if resolve and isinstance(found, str) and "${" in found else found


def disk_error(path: Path, error: OSError) -> AsyncRLError:
    """Convert `error` about `path` into an error of this project that names consequence and fix."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError.wrap(
            f"the disk is full: cannot write {path}. The run cannot keep its records there. "
            "Free some space and continue with resume=auto, or put a new run elsewhere with run_dir=PATH, and "
            "its checkpoints with trainer.checkpoint_dir=PATH.",
            error,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return ConfigError(
            f"cannot write {path}: {error.strerror}. A run needs a directory for its records. "
            "Give one you may write to with run_dir=PATH, for checkpoints with trainer.checkpoint_dir=PATH."
        )
    return InfraError.wrap(f"cannot write {path}: {error.strerror or error}. The run's records are incomplete.", error)


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a directory, to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Others, such as a pipe without a writer, could block forever.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield file


def read_file(path: Path) -> bytes:
    """Return the content of a regular file of at most `MAX_FILE_BYTES`. Raises `OSError`; see `reading`."""
    with reading(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
            reason = f"it has {size} bytes, and no run writes more than {MAX_FILE_BYTES}: delete it, or copy it again"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file; of a long one, parts of `MAX_LINE_BYTES`. Raises `OSError`; see `reading`."""
    with reading(path) as file:
        yield from iter(partial(file.readline, MAX_LINE_BYTES), b"")


def read_json(path: Path) -> Any:
    """Return the JSON values of a regular file, with `?` for lone surrogates.

    Raises:
        OSError: see `reading`.
        ValueError: it is not JSON, nested too deeply, or has numbers that are not finite.
    """
    return encodable_values(parse_json(read_file(path), finite=True))


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically at the end of the block. After an error, `path` is unchanged.

    `durable`: the new content survives a power failure, too. Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        if durable:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace the content of a file atomically; see `replacing`. Raises `OSError`."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode())


def check_file_types(run_dir: Path) -> None:
    """Check that no link leads out of the run directory, because a run overwrites, extends and deletes its files, and
    that it has no pipe, socket or device, at which a run could wait forever.

    Raises:
        ConfigError: there is such a link or file; the message names it and the fix.
        OSError: a directory cannot be read.
    """
    root = os.path.realpath(run_dir)
    for directory in (run_dir / name for name in _WRITTEN_DIRECTORIES):
        if directory.is_dir():
            with os.scandir(directory) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                if os.path.exists(entry.path) and not entry.is_file() and not entry.is_dir():
                    raise ConfigError(
                        f"{entry.path} is a pipe, a socket or a device, which no run writes: the run could wait for it "
                        "forever. Remove it."
                    )
            for link in (Path(entry.path) for entry in found if entry.is_symlink()):
                target = os.path.realpath(link)
                if not Path(target).is_relative_to(root) and link != run_dir / RAY_LOGS:
                    raise ConfigError(
                        f"{link} is a link to {target}, outside of the run directory: the run would overwrite or "
                        "delete files there. Replace the link by what it leads to, or remove it; to keep a run on "
                        "another disk, give run_dir=PATH."
                    )


def create_run_dir(config: Config, now: datetime, *, root: Path = RUNS) -> RunDir:
    """Create a new run directory with its config.yaml: `config.run_dir`, or `root/<experiment>/<time>`.

    The default name is unique even if several runs start in the same second, and `root/<experiment>/latest` points
    at it. The run directory has the mode `config.directory_mode`; its parents have the usual one.

    Raises:
        ConfigError: `config.run_dir` already holds a run, or the directory cannot be written.
        InfraError: the disk is full.
    """
    target = Path(config.run_dir) if config.run_dir else root / config.experiment_name
    try:
        if config.run_dir:
            target.mkdir(config.directory_mode, parents=True, exist_ok=True)
            _refuse_used(target)
            path = target
        else:
            target.mkdir(parents=True, exist_ok=True)
            path = _make_unique(target, now.strftime("%Y%m%d-%H%M%S"), config.directory_mode)
            _point_latest(target / "latest", path.name)
        run_dir = RunDir.of(path, config.trainer.checkpoint_dir)
        _fill(run_dir, config)
    except OSError as error:
        raise disk_error(Path(error.filename or target), error) from error
    return run_dir


def reopen_run_dir(path: Path, config: Config) -> RunDir:
    """Continue in the directory of an earlier run, under `config`.

    Raises:
        ConfigError: it does not exist or cannot be written.
        InfraError: the disk is full.
    """
    run_dir = RunDir.of(path, config.trainer.checkpoint_dir)
    if not run_dir.path.is_dir():
        raise ConfigError(
            f"there is no run directory {path}: there is nothing to continue from. Check the path given to resume."
        )
    try:
        _fill(run_dir, config)
    except OSError as error:
        raise disk_error(Path(error.filename or path), error) from error
    return run_dir


def runs_of(experiment: str, *, root: Path = RUNS) -> Iterator[RunDir]:
    """Yield the runs of `experiment` under `root`, newest first."""
    runs = root / experiment
    found = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()] if runs.is_dir() else []
    for path in sorted(found, key=_age, reverse=True):
        yield RunDir(path.absolute())


def find_run(name: str | None, root: Path = RUNS) -> Path:
    """Return the run directory that `name` means: a path, or an experiment for its newest run; None: the newest run.

    Raises:
        ConfigError: there is no such run; the message lists the runs in `root`.
    """
    if name is None:
        return newest_runs(root)[0]
    for path in (Path(name).expanduser(), root / name):
        if _is_run(path):
            return path.resolve()
        if runs := _runs_in(path):
            return max(runs, key=_last_active).absolute()
    raise ConfigError(f"there is no run {name!r}: it is neither a run directory nor an experiment. {_list_runs(root)}")


def newest_runs(root: Path = RUNS) -> list[Path]:
    """Return the run directories in `root`, the one that was active last first.

    Raises:
        ConfigError: there are none.
    """
    runs = [run for each in _directories(root) for run in ([each] if _is_run(each) else _runs_in(each))]
    if not runs:
        raise ConfigError(f"there are no runs in {root.absolute()}: give the path of a run directory")
    return [run.absolute() for run in sorted(runs, key=_last_active, reverse=True)]


def _list_runs(root: Path) -> str:
    counts = {path.name: 1 if _is_run(path) else len(_runs_in(path)) for path in _directories(root)}
    listed = [f"{name} ({count} run{'s' if count > 1 else ''})" for name, count in counts.items() if count]
    if not listed:
        return f"There are no runs in {root.absolute()}."
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return f"{root.absolute()} contains {', '.join(listed[:_MAX_LISTED])}{more}."


def _is_run(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in _RUN_FILES)


def _runs_in(path: Path) -> list[Path]:
    return [each for each in _directories(path) if not each.is_symlink() and _is_run(each)]


def _directories(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []


def _last_active(run: Path) -> float:
    return max((run / name).stat().st_mtime for name in _RUN_FILES if (run / name).exists())


def _age(path: Path) -> tuple[str, int]:
    """Return a sort key: the time in the name, then the number after it."""
    day, _, rest = path.name.partition("-")
    clock, _, number = rest.partition("-")
    return f"{day}-{clock}", int(number) if number.isdigit() else 0


def _refuse_used(path: Path) -> None:
    if (path / "config.yaml").exists():
        raise ConfigError(
            f"run_dir={path} already holds a run. A second one would mix its records with the first one's. "
            f"Give another directory, or continue that run: resume={path}."
        )


def _make_unique(parent: Path, stamp: str, mode: int) -> Path:
    number = 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(mode)
        except FileExistsError:
            number += 1
        else:
            return path


def _point_latest(link: Path, name: str) -> None:
    """Point the link at the newest run. It is only for users; asyncrl does not read it."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".latest-{secrets.token_hex(4)}")
    try:
        temporary.symlink_to(name)
    except OSError as error:
        # A file system without symbolic links refuses them with EPERM, or with EOPNOTSUPP if it is on a network. A run
        # works without the link. For a directory that cannot be written to, an earlier call has failed.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        return
    os.replace(temporary, link)


def _fill(run_dir: RunDir, config: Config) -> None:
    run_dir.logs.mkdir(exist_ok=True)
    text = yaml.safe_dump(config.saved_values(), sort_keys=False, allow_unicode=True)
    replace_file(run_dir.config, text)
