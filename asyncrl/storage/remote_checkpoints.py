"""Checkpoints on an `fsspec` URL (`trainer.checkpoint_dir=s3://…`), with a mirror on the driver's machine. Blocking.

    ranks ─▶ ~/.asyncrl/checkpoints/<URL>/step_000050 ─▶ <URL>/step_000050/…, its manifest.json last
    resume ◀─ the same directory ◀─ every checkpoint of <URL> that has a manifest

Engines read and write files, so they work in the mirror, which is like any other `trainer.checkpoint_dir`. A checkpoint
at the URL counts once its manifest is there, and is deleted manifest first. Before a resume, the mirror becomes a copy
of the URL. An object store has neither locks nor renames: of two launches that claim the URL at the same moment, the
last writer of `run.json` wins (`asyncrl.storage.checkpoint_claim`).

A filesystem may hang, so each call runs in a thread of its own, which is left behind after the call's deadline, or when
the task that waits for it is cancelled. The copy of a file has no deadline, because its duration depends on its size.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from anyio import from_thread

from asyncrl.config.sections.run import TimeoutsConfig
from asyncrl.core.failures import AsyncRLError, ConfigError, DeadlineError, InfraError
from asyncrl.core.tasks import in_background
from asyncrl.core.text import checked_path
from asyncrl.storage.checkpoint_manifest import MANIFEST, checkpoint_name, checkpoint_steps
from asyncrl.storage.run_dir import MAX_FILE_BYTES, RunDir, disk_error, read_file, sync

DEFAULT_CALL_S = TimeoutsConfig().call_s
_POLL_S = 0.2


class RemoteCheckpoints:
    """The checkpoints at one URL, and their mirror.

    Every method raises ConfigError if the URL may not be read or written, DeadlineError if the filesystem does not
    answer, and InfraError if a transfer fails; all name the URL.
    """

    def __init__(self, url: str, mirror: Path, call_s: float = DEFAULT_CALL_S) -> None:
        """Raises `ConfigError` if the package of the URL's filesystem is not installed, or there is none.

        Args:
            call_s: `timeouts.call_s`, the deadline of one call to the filesystem that copies no file.
        """
        self.url = url.rstrip("/")
        self.mirror = mirror
        self._call_s = call_s
        with self._errors("opened"):
            # Other machines write there, so a cached listing is wrong.
            self._files, root = self._call(fsspec.url_to_fs, self.url, use_listings_cache=False)
        self._root = root.rstrip("/")

    def steps(self) -> dict[str, bytes]:
        """Return the manifest of each complete checkpoint at the URL, by the checkpoint's name."""
        found = {}
        for name in self._names():
            if (manifest := self.read(f"{name}/{MANIFEST}")) is not None:
                found[name] = manifest
        return found

    def read(self, path: str) -> bytes | None:
        """Return the content of a file below the URL; None: there is no such file."""
        with suppress(FileNotFoundError), self._errors("read", may_lack=True):
            size = self._call(self._files.size, f"{self._root}/{path}")
            if size is not None and size > MAX_FILE_BYTES:
                raise ConfigError(
                    f"trainer.checkpoint_dir={self.url}: {path} has {size} bytes, and no run writes more than "
                    f"{MAX_FILE_BYTES}. Delete {self.url}/{path}, or copy it again."
                )
            return bytes(self._call(self._files.cat_file, f"{self._root}/{path}"))
        return None

    def write(self, path: str, content: bytes) -> None:
        """Replace a file below the URL."""
        with self._errors("written"):
            self._make_parent(path)
            self._call(self._files.pipe_file, f"{self._root}/{path}", content)

    def pull(self) -> None:
        """Make the complete checkpoints in the mirror the same as those at the URL. Others are deleted."""
        remote = self.steps()
        with self._errors("read"):
            self.mirror.mkdir(0o700, parents=True, exist_ok=True)
            for path in checkpoint_steps(self.mirror).values():
                if path.name not in remote or remote[path.name] != _read(path / MANIFEST):
                    shutil.rmtree(path)
            for name in remote:
                if not (self.mirror / name).exists():
                    self._fetch(name)
            sync(self.mirror)

    def upload(self, checkpoint: Path, confirm: Callable[[], None]) -> None:
        """Copy a checkpoint of the mirror to the URL. `confirm` is called when only the manifest is missing, and may
        raise."""
        name = checkpoint.name
        with self._errors("written"):
            self._delete(name)
            for path in sorted(checkpoint.rglob("*")):
                relative = path.relative_to(checkpoint).as_posix()
                if path.is_file() and relative != MANIFEST:
                    self._make_parent(f"{name}/{relative}")
                    self._copy(self._files.put_file, str(path), f"{self._root}/{name}/{relative}")
        confirm()
        self.write(f"{name}/{MANIFEST}", read_file(checkpoint / MANIFEST))

    def keep(self, names: Collection[str]) -> None:
        """Delete all checkpoints at the URL but these, incomplete ones included."""
        for name in self._names():
            if name not in names:
                with self._errors("written"):
                    self._delete(name)

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError), self._errors("read", may_lack=True):
            names = {PurePosixPath(path).name for path in self._call(self._files.ls, self._root, detail=False)}
            steps = ((name, name.removeprefix("step_")) for name in names)
            return sorted(name for name, step in steps if step.isdecimal() and checkpoint_name(int(step)) == name)
        return []

    def _fetch(self, name: str) -> None:
        begun = self.mirror / f".{name}.fetched.tmp"
        shutil.rmtree(begun, ignore_errors=True)
        for source in self._call(self._files.find, f"{self._root}/{name}"):
            try:
                path = begun / checked_path(str(source).removeprefix(f"{self._root}/{name}/"))
            except ValueError as error:
                raise ConfigError(
                    f"trainer.checkpoint_dir={self.url}: {name} has a file that leads out of it ({error}), so the "
                    f"checkpoint is not fetched. Delete {self.url}/{name} to continue from an earlier one."
                ) from None
            path.parent.mkdir(parents=True, exist_ok=True)
            self._copy(self._files.get_file, source, str(path))
            sync(path)
        begun.rename(self.mirror / name)

    def _delete(self, name: str) -> None:
        for path in (f"{self._root}/{name}/{MANIFEST}", f"{self._root}/{name}"):
            with suppress(FileNotFoundError):
                self._call(self._files.rm, path, recursive=True)

    def _make_parent(self, path: str) -> None:
        self._call(self._files.makedirs, str(PurePosixPath(f"{self._root}/{path}").parent), exist_ok=True)

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._await(function.__name__.lstrip("_"), in_background(function, *args, **options), self._call_s)

    def _copy(self, function: Callable[..., None], source: str, target: str) -> None:
        self._await(function.__name__, in_background(function, source, target), math.inf)

    def _await(self, name: str, answer: Future[Any], limit_s: float) -> Any:
        until = time.monotonic() + limit_s
        while not wait([answer], _POLL_S).done:
            with suppress(RuntimeError):  # this thread works for no task
                from_thread.check_cancelled()
            if time.monotonic() > until:
                raise DeadlineError(
                    f"trainer.checkpoint_dir={self.url} does not answer: {name} took more than "
                    f"timeouts.call_s={limit_s:g} s. Check the network and the filesystem's address, or raise "
                    "timeouts.call_s; then continue with resume=auto."
                )
        return answer.result()

    @contextmanager
    def _errors(self, done: str, *, may_lack: bool = False) -> Iterator[None]:
        where = f"trainer.checkpoint_dir={self.url} cannot be {done}"
        try:
            yield
        except AsyncRLError:
            raise
        except ImportError as error:
            raise ConfigError(f"{where}: {error}. Install that package where the driver runs") from None
        except FileNotFoundError as error:
            if may_lack:
                raise
            raise ConfigError(f"{where}: {error}. Create the bucket, or give another directory") from None
        except PermissionError as error:
            raise ConfigError(
                f"{where}: {error}. Give the credentials of its filesystem to the driver, or give another directory"
            ) from None
        except OSError as error:
            if error.filename is not None and self.mirror in Path(str(error.filename)).parents:
                raise disk_error(Path(str(error.filename)), error) from error
            raise InfraError.wrap(f"{where}; continue with resume=auto when it is reachable", error) from error
        except ValueError as error:  # also fsspec's error for a protocol that it does not know
            raise ConfigError(f"{where}: {error}. Give a directory, or a URL that fsspec knows") from None
        except Exception as error:
            raise InfraError.wrap(f"{where}; continue with resume=auto when it is reachable", error) from error


def remote_checkpoints(run_dir: RunDir, call_s: float = DEFAULT_CALL_S) -> RemoteCheckpoints | None:
    """Return the remote checkpoints of a run whose `trainer.checkpoint_dir` is a URL; None: it is not."""
    if run_dir.checkpoint_url is None or run_dir.checkpoint_dir is None:
        return None
    return RemoteCheckpoints(run_dir.checkpoint_url, run_dir.checkpoint_dir, call_s)


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except OSError:
        return None
