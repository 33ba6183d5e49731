"""The cache of data: entries are whole or absent, shared, swept, and errors name the directory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.core.failures import ConfigError, DiskFullError
from asyncrl.storage.data_cache import KEEP_S, DataCache

KILLED = """
import os, signal, sys
from pathlib import Path
from asyncrl.storage.data_cache import DataCache
cache = DataCache(Path(sys.argv[1]))
with cache.building() as begun:
    (begun / "part").write_text("half")
    if sys.argv[2] == "after":
        cache.commit(begun, "kind", "key")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def put(cache: DataCache, key: str, text: str = "whole") -> Path:
    with cache.building() as begun:
        (begun / "part").write_text(text)
        return cache.commit(begun, "kind", key)


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_launch_leaves_whole_entries_only(tmp_path: Path, moment: str) -> None:
    cache = DataCache(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], check=False)
    assert ended.returncode == -signal.SIGKILL
    entry = cache.find("kind", "key")
    assert (entry is None) == (moment == "before")
    late = (tmp_path.stat().st_mtime) + 3600
    for begun in tmp_path.glob(".*.tmp"):
        assert moment == "before"
        os.utime(begun, (late - 3000, late - 3000))
    cache.sweep(now=late)
    assert names(tmp_path) == ([] if moment == "before" else ["kind/key/part"])


def test_an_entry_that_is_being_built_is_not_swept(tmp_path: Path) -> None:
    cache = DataCache(tmp_path)
    with cache.building() as begun:
        (begun / "part").write_text("half")
        os.utime(begun, (0, 0))
        cache.sweep()
        assert begun.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_first_complete_entry_stays(tmp_path: Path) -> None:
    cache = DataCache(tmp_path)
    with cache.building() as slow:
        (slow / "part").write_text("late")
        put(cache, "key", "first")
        path = cache.commit(slow, "kind", "key")
    assert (path / "part").read_text() == "first"
    assert names(tmp_path) == ["kind/key/part"]


def test_entries_are_swept_when_no_launch_has_used_them_for_long(tmp_path: Path) -> None:
    cache = DataCache(tmp_path)
    used, unused = put(cache, "used"), put(cache, "unused")
    for path in (used, unused):
        os.utime(path, (0, 0))
    assert cache.find("kind", "used") == used
    cache.sweep(now=used.stat().st_mtime + KEEP_S - 1)
    assert names(tmp_path) == ["kind/used/part"]
    cache.sweep(now=used.stat().st_mtime + KEEP_S + 1)
    assert names(tmp_path) == []


def test_an_error_in_a_block_leaves_nothing(tmp_path: Path) -> None:
    cache = DataCache(tmp_path)
    with pytest.raises(ValueError, match="mine"), cache.building() as begun:
        (begun / "part").write_text("half")
        raise ValueError("mine")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"data\.cache_dir={file}: .*Give a directory that you may write to"):
        put(DataCache(file), "key")
    cache = DataCache(tmp_path / "cache")
    with pytest.raises(DiskFullError, match=r"data\.cache_dir=.*Free some space"), cache.building() as begun:
        raise OSError(errno.ENOSPC, "No space left on device", str(begun / "part"))
    with pytest.raises(FileNotFoundError, match="elsewhere"), cache.building():
        raise FileNotFoundError(errno.ENOENT, "not of the cache", "elsewhere")
