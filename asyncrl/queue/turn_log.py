"""Completed turns of unfinished samples, in log files of the run directory: what a dead Rollouter need not do again.

    frame  1 byte `L`ive or `F`orgotten, 8 bytes length, a blob (`asyncrl.blobs`) with one turn
    file   samples/turns-<incarnation>-<number>.log: frames end to end, a new number each `MAX_LOG_BYTES`

Nothing waits for the disk here. A killed process loses nothing that was recorded: the kernel has it. A power cut may,
and then turns are generated again, which costs time and no correctness. A file is deleted once all in it is forgotten.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np

from asyncrl.blobs import Blob, DamageError, decode, encode
from asyncrl.convoy import Convoy
from asyncrl.failures import AsyncRLError, BugError
from asyncrl.payloads import spans_from_json
from asyncrl.run_dir import SAMPLES, disk_error
from asyncrl.segments import make_directory, write_all
from asyncrl.types import FinishReason, SampleId, Span, Turn

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 << 20
"""A file that has reached this size is followed by the next one."""
MAX_TRIP_BYTES = 32 << 20

_NAME = re.compile(r"turns-([1-9]\d*)-([1-9]\d*)\.log")
_LIVE, _FORGOTTEN = b"L", b"F"
_HEAD_BYTES = 9


def log_incarnation(name: str) -> int | None:
    """Which incarnation of the Rollouter wrote it; None: it is no turn log's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class RecordedTurn(NamedTuple):
    """A turn on disk, forgotten or not: forgotten ones are there until their file goes."""

    incarnation: int
    """Of the Rollouter that recorded it."""
    sample_id: SampleId
    key: str
    num_tokens: int
    spans: tuple[Span, ...]


def read_turns(run_dir: Path) -> Iterator[RecordedTurn]:
    """Every turn on disk, in the order in which they were recorded; of a damaged file, those before the damage.

    Blocking.
    """
    for log in _logs(run_dir / SAMPLES):
        for frame in _frames(log.path):
            turn = frame.turn
            yield RecordedTurn(log.incarnation, frame.sample_id, frame.key, len(turn.response_ids), turn.spans)


async def forget_old_turns(run_dir: Path, incarnation: int, is_over: Callable[[SampleId], bool]) -> None:
    """Of samples that are over, forget what incarnations before this one recorded: they died before they could."""
    files = _Files(run_dir / SAMPLES, incarnation, MAX_LOG_BYTES)
    try:
        live = await anyio.to_thread.run_sync(files.live)
    except OSError as error:
        logger.warning("turns that are not needed any more may stay on disk: %s", error)
        return
    over = [_Forget(sample_id) for sample_id in live if is_over(sample_id)]
    for failed in await anyio.to_thread.run_sync(files.run, over):
        if failed is not None:
            logger.warning("turns that are not needed any more stay on disk: %s", failed)


class NoTurns:
    """`ports.TurnLog` without a memory, for runs without a journal."""

    async def record(self, sample_id: SampleId, key: str, turn: Turn) -> None:
        pass

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        return {}

    async def forget(self, sample_id: SampleId) -> None:
        pass

    async def aclose(self) -> None:
        pass


class FileTurns:
    """`ports.TurnLog` in files of the run directory. Make one per event loop, and one per incarnation."""

    def __init__(self, run_dir: Path, incarnation: int, *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._files = _Files(run_dir / SAMPLES, incarnation, max_log_bytes)
        self._trips: Convoy[_Task, Any] = Convoy(self._run, max_weight=MAX_TRIP_BYTES)

    async def record(self, sample_id: SampleId, key: str, turn: Turn) -> None:
        """Returns when the kernel has it.

        Raises:
            BugError: `completed` gave this turn, and it was generated again.
            DiskFullError, ConfigError, InfraError: it cannot be written.
        """
        await self._trips.join(_Record(sample_id, key, turn), weight=turn.response_ids.nbytes * 2)

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        return await self._trips.join(_Ask(sample_id))

    async def forget(self, sample_id: SampleId) -> None:
        await self._trips.join(_Forget(sample_id))

    async def aclose(self) -> None:
        """Delete the file that was written to last, if nothing in it is live. Nothing is recorded behind this."""
        await anyio.to_thread.run_sync(self._files.end)

    async def _run(self, tasks: Sequence[_Task]) -> Sequence[Any]:
        # Not abandoned on cancellation: the files' books belong to one thread at a time.
        return await anyio.to_thread.run_sync(self._files.run, tasks)


class _Record(NamedTuple):
    sample_id: SampleId
    key: str
    turn: Turn


class _Ask(NamedTuple):
    sample_id: SampleId


class _Forget(NamedTuple):
    sample_id: SampleId


_Task = _Record | _Ask | _Forget


@dataclass(eq=False, slots=True)
class _Log:
    path: Path
    incarnation: int
    num_bytes: int = 0
    """Of whole frames."""
    num_live: int = 0
    """Frames not forgotten."""


class _Place(NamedTuple):
    log: _Log
    key: str
    start: int
    num_bytes: int


class _Frame(NamedTuple):
    start: int
    num_bytes: int
    live: bool
    sample_id: SampleId
    key: str
    turn: Turn


class _Files:
    """The files and what is live in them. Blocking; one call at a time."""

    def __init__(self, directory: Path, incarnation: int, max_log_bytes: int) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._max_log_bytes = max_log_bytes
        self._numbers = itertools.count(1)
        self._own: _Log | None = None
        self._places: dict[SampleId, list[_Place]] | None = None
        """Of everything live; None: earlier incarnations' files have not been read."""
        self._given: dict[SampleId, set[str]] = {}
        """Keys that `completed` gave, of samples not forgotten."""

    def run(self, tasks: Sequence[_Task]) -> list[Any]:
        """What each task gives, or its error."""
        return [self._one(task) for task in tasks]

    def live(self) -> list[SampleId]:
        """Samples with turns in earlier incarnations' files that are not forgotten."""
        self._places = self._load()
        return list(self._places)

    def end(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            try:
                self._delete_if_done(own)
            except OSError as error:
                logger.warning("cannot delete %s: %s. It is not needed any more", own.path, error.strerror)

    def _one(self, task: _Task) -> Any:
        try:
            if self._places is None:
                self._places = self._load()
            match task:
                case _Record():
                    return self._record(self._places, task)
                case _Ask():
                    return self._completed(self._places, task.sample_id)
                case _Forget():
                    return self._forget(self._places, task.sample_id)
        except AsyncRLError as error:
            return error
        except OSError as error:
            return disk_error(Path(error.filename or self._directory), error)

    def _load(self) -> dict[SampleId, list[_Place]]:
        places: dict[SampleId, list[_Place]] = {}
        for log in _logs(self._directory):
            if log.incarnation >= self._incarnation:
                continue
            for frame in _frames(log.path):
                if frame.live:
                    log.num_live += 1
                    place = _Place(log, frame.key, frame.start, frame.num_bytes)
                    places.setdefault(frame.sample_id, []).append(place)
            self._delete_if_done(log)
        return places

    def _record(self, places: dict[SampleId, list[_Place]], task: _Record) -> None:
        if task.key in self._given.get(task.sample_id, ()):
            raise BugError(
                f"turn {task.key} of {task.sample_id} was completed by an earlier incarnation of the Rollouter and "
                "handed out again, and yet it was generated a second time"
            )
        log = self._current()
        frame = _encode(task)
        num_bytes = sum(map(len, frame))
        descriptor = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            write_all(descriptor, frame)
        except OSError as error:
            # Or what comes behind the torn frame would not be found.
            with suppress(OSError):
                os.ftruncate(descriptor, log.num_bytes)
            raise disk_error(log.path, error) from error
        finally:
            os.close(descriptor)
        places.setdefault(task.sample_id, []).append(_Place(log, task.key, log.num_bytes, num_bytes))
        log.num_bytes += num_bytes
        log.num_live += 1

    def _current(self) -> _Log:
        """The file to write to, made if it is not there."""
        if self._own is None or self._own.num_bytes >= self._max_log_bytes:
            full, path = self._own, self._directory / f"turns-{self._incarnation}-{next(self._numbers)}.log"
            make_directory(self._directory)
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                told = f"{path} exists: two processes log turns as incarnation {self._incarnation}"
                raise BugError(told) from None
            self._own = _Log(path, self._incarnation)
            if full is not None:
                self._delete_if_done(full)
        return self._own

    def _completed(self, places: Mapping[SampleId, list[_Place]], sample_id: SampleId) -> Mapping[str, Turn]:
        turns: dict[str, Turn] = {}
        for place in places.get(sample_id, ()):
            if place.log.incarnation == self._incarnation:
                continue
            try:
                with open(place.log.path, "rb") as file:
                    frame = _read_frame(file, place.start, place.start + place.num_bytes)
                turns[place.key] = frame.turn
            except (DamageError, OSError) as error:
                logger.error(
                    "%s: turn %s of %s is lost: %s. It is generated again", place.log.path, place.key, sample_id, error
                )
        if turns:
            self._given[sample_id] = set(turns)
        return turns

    def _forget(self, places: dict[SampleId, list[_Place]], sample_id: SampleId) -> None:
        self._given.pop(sample_id, None)
        for place in places.pop(sample_id, ()):
            place.log.num_live -= 1
            if not self._delete_if_done(place.log):
                with suppress(FileNotFoundError), open(place.log.path, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), _FORGOTTEN, place.start)

    def _delete_if_done(self, log: _Log) -> bool:
        if log.num_live or log is self._own:
            return False
        log.path.unlink(missing_ok=True)
        return True


def _logs(directory: Path) -> list[_Log]:
    """All log files, the oldest first."""
    found: list[tuple[int, int, Path]] = []
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), int(match[2]), path))
    return [_Log(path, incarnation) for incarnation, _, path in sorted(found)]


def _frames(path: Path) -> Iterator[_Frame]:
    """Up to the end, or to the first one that is torn or damaged: it is logged, and what follows cannot be found."""
    start = end = num_frames = 0
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            while start < end:
                frame = _read_frame(file, start, end)
                yield frame
                start += frame.num_bytes
                num_frames += 1
    except FileNotFoundError:
        return
    except (DamageError, OSError) as error:
        logger.warning(
            "%s: %s at byte %d of %d. The %d turns before it count; any others are generated again",
            path, error, start, end, num_frames,
        )  # fmt: skip


def _encode(task: _Record) -> list[memoryview]:
    turn = task.turn
    arrays = {
        "response_ids": np.ascontiguousarray(turn.response_ids, np.int32),
        "rollout_log_probs": np.ascontiguousarray(turn.rollout_log_probs, np.float32),
    }
    texts = {
        "sample_id": str(task.sample_id),
        "key": task.key,
        "finish_reason": str(turn.finish_reason),
        "spans": json.dumps(turn.spans),
    }
    buffers = encode(arrays, texts)
    head = _LIVE + sum(map(len, buffers)).to_bytes(8, "little")
    return [memoryview(head), *buffers]


def _read_frame(file: Any, start: int, end: int) -> _Frame:
    """The frame at `start` of a file that ends at `end`.

    Raises:
        DamageError: it is torn or damaged.
    """
    file.seek(start)
    head = file.read(_HEAD_BYTES)
    num_bytes = int.from_bytes(head[1:], "little")
    if len(head) < _HEAD_BYTES or start + _HEAD_BYTES + num_bytes > end:
        raise DamageError("torn or damaged")
    if head[:1] not in (_LIVE, _FORGOTTEN):
        raise DamageError("no turn begins here")
    data = np.empty(num_bytes, dtype=np.uint8)
    if file.readinto(data.data) < num_bytes:
        raise DamageError("torn")
    try:
        sample_id, key, turn = _decode(decode(data))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"damaged: {error}") from error
    return _Frame(start, _HEAD_BYTES + num_bytes, head[:1] == _LIVE, sample_id, key, turn)


def _decode(blob: Blob) -> tuple[SampleId, str, Turn]:
    try:
        sample_id, key = SampleId.parse(blob.texts["sample_id"]), blob.texts["key"]
        reason, spans = FinishReason(blob.texts["finish_reason"]), spans_from_json(json.loads(blob.texts["spans"]))
    except KeyError as error:
        raise ValueError(f"there is no {error}") from error
    ids = blob.array("response_ids", np.int32)
    log_probs = blob.array("rollout_log_probs", np.float32)
    if len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} tokens have {len(log_probs)} log-probs")
    return sample_id, key, Turn(ids, log_probs, tuple(Span(*span) for span in spans), reason)
