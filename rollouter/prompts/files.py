"""Finds the data files that the configuration names, and downloads those that are elsewhere into the cache. Blocking.

    path, asyncrl://, file://       the file itself
    s3://, gs://, hdfs://, http://  a copy of the URL's current version, through fsspec
    hub:owner/name:split            the files of that split of a data set on the Hugging Face Hub

If a server cannot be reached, the newest copy of an earlier launch is used, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from asyncrl.assets import resolve
from asyncrl.config.interpolation import without_secrets
from asyncrl.config.sections.data import DATA_SUFFIXES, HUB, HubName, data_suffix, is_remote, protocol_package
from asyncrl.core.failures import AsyncRLError, ConfigError, InfraError
from asyncrl.storage.data_cache import DataCache

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Takes a line about the progress of loading."""

REPORT_S = 5.0
"""Time between two lines about progress."""
CONNECT_S = 30.0
"""Time within which a server has to answer, and to send the next bytes of a download."""


_VERSION = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "checksum", "blob_id"),
    *("mtime", "modificationTime", "LastModified", "Last-Modified", "last_modified", "created"),
)
"""Fields with which filesystems of `fsspec` describe the version of a file."""


class DataFile(NamedTuple):
    """A data file on this machine."""

    name: str
    """As the configuration, or the hub, names it, without credentials."""
    path: Path
    suffix: str

    @property
    def directory(self) -> Path:
        """The base of relative paths in the file."""
        return self.path.parent


class LoadingProgress:
    """Reports how much of a long operation is done, at most every few seconds."""

    def __init__(
        self, what: str, total: int | None, unit: str, report: Report, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._unit, self._report, self._clock = what, unit, report, clock
        self.total = total
        self._done, self._begun = 0, clock()
        self._due = self._begun + REPORT_S

    def advance(self, number: int) -> None:
        """Count what is done since the last call."""
        self._done += number
        if (now := self._clock()) >= self._due:
            self._due = now + REPORT_S
            self._report(self._line(self._done / (now - self._begun)))

    def _line(self, rate: float) -> str:
        if not self.total or self._done > self.total:
            return f"{self._what}: {self._amount(self._done)}, {self._amount(rate)}/s"
        left = (self.total - self._done) / max(rate, 1e-9)
        share = self._done / self.total
        done = self._amount(self._done).removesuffix(f" {self._unit}")
        return (
            f"{self._what}: {done} of {self._amount(self.total)} ({share:.0%}), "
            f"{self._amount(rate)}/s, {left:.0f} s left"
        )

    def _amount(self, number: float) -> str:
        return f"{number / 1e6:.1f} MB" if self._unit == "bytes" else f"{number:,.0f} {self._unit}"


class _Download(Callback):
    """fsspec's callback of a transfer."""

    def __init__(self, progress: LoadingProgress) -> None:
        super().__init__()
        self._progress = progress

    def set_size(self, size: int | None) -> None:
        self._progress.total = size

    def relative_update(self, inc: int = 1) -> None:
        self._progress.advance(inc)


def find_files(name: str, key: str, cache: DataCache, report: Report = logger.info) -> list[DataFile]:
    """Return the files that one entry of `data.train_files` means, on this machine.

    Args:
        key: the configuration key, for messages.
        report: gets lines about the progress of downloads.

    Raises:
        ConfigError: there is no such file or data set, it has another suffix, it may not be read, or a package is
            missing; the message names key, value and fix.
        InfraError: the server cannot be reached, and the cache has no copy.
    """
    if name.startswith(HUB):
        urls = _hub_files(HubName.parse(name, key), key, cache)
        return [_checked(url, _download(url, key, cache, report), key) for url in urls]
    if is_remote(name):
        _check_suffix(name, key)
        return [_checked(name, _download(name, key, cache, report), key)]
    try:
        return [_checked(name, Path(resolve(name)), key)]
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: {error}") from error


def first_url(name: str, key: str) -> str:
    """Return the URL of the first file of a remote name. Asks the hub. Raises as `find_files`."""
    if not name.startswith(HUB):
        return name
    hub = HubName.parse(name, key)
    with remote_errors(name, key):
        _connect_to_hub()
        return _resolve(hub, key)[0]


def _connect_to_hub() -> None:
    """Raise `OSError` if the hub cannot be reached. Its client would try again for half a minute, and print that."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if constants.is_offline_mode() or {address.scheme, "all"} & getproxies().keys():
        return
    port = address.port or (80 if address.scheme == "http" else 443)
    socket.create_connection((address.hostname, port), timeout=CONNECT_S).close()


def has_copy(name: str, cache: DataCache) -> bool:
    """Return whether the cache has a copy of a remote name, of whatever version."""
    kind = "hub" if name.startswith(HUB) else "downloads"
    return _newest(cache, kind, name) is not None


def open_url(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL and the path in it."""
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        from aiohttp import ClientTimeout

        # aiohttp's own limit of five minutes is for the whole transfer.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=CONNECT_S)}
    files, path = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    return files, path


@contextmanager
def remote_errors(name: str, key: str) -> Iterator[None]:
    """Convert errors about a remote file into errors of this project.

    Raises:
        ConfigError: see `find_files`.
        InfraError: any other failure.
    """
    where = f"{key}: {name} cannot be read"
    try:
        yield
    except AsyncRLError:
        raise
    except ImportError as error:
        package = protocol_package(name)
        raise ConfigError(f"{where}: {error}. pip install {package}, or give a local copy") from None
    except ValueError as error:  # also fsspec's error for a protocol that it does not know
        raise ConfigError(f"{where}: {error}. Give a path, hub:owner/name:split, or a URL that fsspec knows") from None
    except Exception as error:
        # fsspec's filesystem of the web reports every failure as a missing file.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
        status = getattr(cause, "status", None)
        if status in (401, 403) or isinstance(cause, PermissionError):
            raise ConfigError(
                f"{where}: {cause}. Give the credentials of its filesystem to the process that reads the data, or give "
                "a local copy"
            ) from None
        if status in (404, 410) or isinstance(cause, FileNotFoundError):
            raise ConfigError(f"{where}: there is no such file ({cause}). Check the address") from None
        raise InfraError.wrap(
            f"{where}: {type(cause).__name__}: {cause}. Check the network of this machine, or give a local copy", cause
        ) from error


def _check_suffix(name: str, key: str) -> None:
    if data_suffix(name) not in DATA_SUFFIXES:
        raise ConfigError(f"{key}: {name} has the suffix {data_suffix(name)!r}; expected {' or '.join(DATA_SUFFIXES)}")


def _checked(name: str, path: Path, key: str) -> DataFile:
    if not path.is_file():
        raise ConfigError(f"{key}: {name} is not a file; give the path of a {', '.join(DATA_SUFFIXES)} file")
    if not path.stat().st_size:
        raise ConfigError(f"{key}: {name} is empty")
    _check_suffix(name, key)
    return DataFile(without_secrets(name), path, data_suffix(name))


def _download(url: str, key: str, cache: DataCache, report: Report) -> Path:
    try:
        with remote_errors(url, key):
            files, path = open_url(url)
            if isinstance(files, LocalFileSystem):
                return Path(path)
            info = files.info(path)
    except InfraError as error:
        if (copy := _newest(cache, "downloads", url)) is None:
            raise
        logger.warning("%s. The copy of an earlier launch is used", error.message)
        return next(copy.iterdir())
    version = {field: str(info[field]) for field in _VERSION if info.get(field) is not None}
    entry_key = f"{_digest(url)}-{_digest(json.dumps(version), str(info.get('size')))}"
    entry = cache.find("downloads", entry_key) if version else None
    if entry is None:
        with cache.building() as begun, remote_errors(url, key):
            target = begun / f"data{data_suffix(url)}"
            progress = LoadingProgress(f"downloading {without_secrets(url)}", None, "bytes", report)
            files.get_file(path, str(target), callback=_Download(progress))
            received, size = target.stat().st_size, info.get("size")
            if size is not None and received != size:
                raise InfraError(f"{key}: {url}: the download ended after {received} of {size} bytes; try again")
            if not version:  # the server may have another file of the same size the next time
                entry_key = f"{_digest(url)}-{content_digest(target)}"
            entry = cache.commit(begun, "downloads", entry_key)
    return next(entry.iterdir())


def _hub_files(hub: HubName, key: str, cache: DataCache) -> list[str]:
    """Return the URLs of a split's files, at one revision of the data set."""
    try:
        with remote_errors(hub.name, key):
            urls = _resolve(hub, key)
    except InfraError as error:
        if (known := _newest(cache, "hub", hub.name)) is None:
            raise
        logger.warning("%s. The files of an earlier launch are used", error.message)
        return [str(url) for url in json.loads((known / "files.json").read_text(encoding="utf-8"))]
    entry_key = f"{_digest(hub.name)}-{_digest(*urls)}"
    if cache.find("hub", entry_key) is None:
        with cache.building() as begun:
            (begun / "files.json").write_text(json.dumps(urls), encoding="utf-8")
            cache.commit(begun, "hub", entry_key)
    return urls


def _resolve(hub: HubName, key: str) -> list[str]:
    from datasets import load_dataset_builder
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    try:
        builder = load_dataset_builder(hub.dataset, hub.config, revision=hub.revision)
    except (DatasetNotFoundError, DataFilesNotFoundError) as error:
        raise ConfigError(
            f"{key}: {hub.name}: {str(error).rstrip('.')}. Check the name, or log in with `hf auth login` if access is "
            "restricted"
        ) from None
    except ValueError as error:  # the configuration is missing or unknown; an example of Python follows
        problem = " ".join(str(error).partition("Example of usage")[0].split())
        raise ConfigError(f"{key}: {hub.name}: {problem}. Write {HUB}{hub.dataset}:CONFIG/SPLIT") from None
    splits = builder.config.data_files or {}
    if hub.split not in splits:
        known = ", ".join(map(str, splits)) or "none"
        raise ConfigError(f"{key}: {hub.name}: there is no split {hub.split!r}; the data set has {known}")
    urls = [str(url) for url in splits[hub.split]]
    for url in urls:
        _check_suffix(url, key)
    return urls


def content_digest(path: Path) -> str:
    """Return a digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _newest(cache: DataCache, kind: str, name: str) -> Path | None:
    found = sorted((cache.root / kind).glob(f"{_digest(name)}-*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
