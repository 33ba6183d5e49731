"""What records there are below a directory, and which of them to remove. Blocking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.blobs import DamageError
from asyncrl.failures import ConfigError
from asyncrl.steps import StepSet
from skip.files import Entry, RecordFiles, is_record, is_temporary
from skip.record import Record

DEPTH = 4
"""Of a record below `dump_dir`: project, experiment, role, step."""


@dataclass(frozen=True, slots=True)
class Found:
    """One record, whole or not."""

    files: RecordFiles
    """Of its role."""
    entry: Entry

    @property
    def path(self) -> Path:
        return self.files.root / self.entry.name

    def read(self) -> Record:
        """See `RecordFiles.read`."""
        return self.files.read(self.entry.name)


def find(directory: Path) -> list[Found]:
    """All records at or below `directory`, by role and step: a dump_dir, a project, an experiment, a role or a record.

    Raises:
        ConfigError: there is no such directory.
    """
    found = [Found(files, entry) for files in roles(directory) for entry in files.entries()]
    return [one for one in found if one.path == directory] if is_record(directory) else found


def damage(found: Found) -> str:
    """What is wrong with it; empty: nothing."""
    try:
        found.read()
    except (DamageError, OSError) as error:
        return str(error)
    return ""


def to_remove(
    found: Sequence[Found],
    now: float,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    steps: StepSet | None = None,
    damaged: Iterable[Found] = (),
) -> list[Found]:
    """Which of them go: each criterion that is given adds its own. Pure.

    Args:
        now: Unix seconds.
        older_than_s: those written longer ago.
        max_bytes: the oldest, until what stays is no more than that.
        steps: those of these steps.
        damaged: these.
    """
    chosen = {one.path for one in damaged}
    if older_than_s is not None:
        chosen |= {one.path for one in found if now - one.entry.modified_at > older_than_s}
    if steps is not None:
        chosen |= {one.path for one in found if one.entry.step in steps}
    if max_bytes is not None:
        left = sum(one.entry.num_bytes for one in found if one.path not in chosen)
        for one in sorted(found, key=lambda one: one.entry.modified_at):
            if left <= max_bytes:
                break
            if one.path not in chosen:
                chosen.add(one.path)
                left -= one.entry.num_bytes
    return [one for one in found if one.path in chosen]


def roles(directory: Path) -> list[RecordFiles]:
    """The directories of roles at or below `directory`, those with nothing but what dead writers left included.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory; give skip.<role>.dump_dir of a run, or one below")
    if is_record(directory):
        return [RecordFiles(directory.parent)]
    return [RecordFiles(root) for root in _roles(directory, DEPTH - 1)]


def _roles(directory: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    except PermissionError:
        return
    if any(is_record(path) or is_temporary(path.name) for path in inside):
        yield directory
    elif depth > 0:
        for path in inside:
            if not path.name.startswith("."):
                yield from _roles(path, depth - 1)
