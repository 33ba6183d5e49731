"""Logs completed turns of unfinished samples in the run directory, so that a restarted Rollouter does not repeat them.

    frame  1 byte `L`ive or `F`orgotten, 8 bytes length, a blob (`asyncrl.storage.array_bytes`) with one turn
    file   samples/turns-<incarnation>-<number>.log: frames end to end, a new file every `MAX_LOG_BYTES`

No call waits for the disk. A killed process loses nothing that was recorded, because the kernel has it. A power cut
may lose turns, which are then generated again: that costs time but not correctness. A file is deleted once all its
turns are forgotten.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
import numpy as np

from asyncrl.core.call_batcher import CallBatcher
from asyncrl.core.failures import AsyncRLError, BugError
from asyncrl.core.types import FinishReason, SampleId, Turn
from asyncrl.storage.array_bytes import Blob, DamageError, decode, encode
from asyncrl.storage.run_dir import SAMPLES, disk_error
from asyncrl.storage.sample_bytes import spans_from_json
from asyncrl.storage.segments import make_directory, write_all

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
"""Size above which a turn is not read; one of a million tokens has 8 MB."""
MAX_LOG_BYTES = 64 << 20
"""A new file begins when the current one has this size."""
MAX_BATCH_BYTES = 32 << 20

_NAME = re.compile(r"turns-([1-9]\d*)-([1-9]\d*)\.log")
_LIVE, _FORGOTTEN = b"L", b"F"
_HEAD_BYTES = 9


def log_incarnation(name: str) -> int | None:
    """Return the incarnation of the Rollouter that wrote the file; None: it is not the name of a turn log."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class TurnFrame(NamedTuple):
    """A turn on disk. A forgotten one stays there until its file is deleted."""

    start: int
    num_bytes: int
    live: bool
    sample_id: SampleId
    key: str
    turn: Turn


def read_turns(run_dir: Path) -> Iterator[TurnFrame]:
    """Yield every turn on disk in the order of recording; of a damaged file, the turns before the damage. Blocking."""
    for log in _logs(run_dir / SAMPLES):
        yield from _frames(log.path)


async def forget_old_turns(run_dir: Path, incarnation: int, is_done: Callable[[SampleId], bool]) -> None:
    """Forget the turns of finished samples that earlier incarnations recorded and could not forget."""
    files = _LogFiles(run_dir / SAMPLES, incarnation, MAX_LOG_BYTES)
    try:
        live = list(await anyio.to_thread.run_sync(files.live))
    except OSError as error:
        logger.warning("turns that are not needed any more may stay on disk: %s", error)
        return
    calls = [partial(files.forget, sample_id) for sample_id in live if is_done(sample_id)]
    for failed in await anyio.to_thread.run_sync(files.run, calls):
        if failed is not None:
            logger.warning("turns that are not needed any more stay on disk: %s", failed)


class NoTurns:
    """A `ports.TurnLog` that stores nothing, for runs without a journal."""

    async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        pass

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        return {}

    async def forget(self, sample_id: SampleId) -> None:
        pass

    async def aclose(self) -> None:
        pass


class FileTurns:
    """A `ports.TurnLog` in files of the run directory. Create one per event loop and incarnation."""

    def __init__(self, run_dir: Path, incarnation: int, *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._files = _LogFiles(run_dir / SAMPLES, incarnation, max_log_bytes)
        self._calls: CallBatcher[Callable[[], Any], Any] = CallBatcher(self._run, max_weight=MAX_BATCH_BYTES)

    async def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        """Write the turns, and return when the kernel has them.

        Raises:
            BugError: `completed` returned one of them, and it was generated again.
            DiskFullError, ConfigError, InfraError: they cannot be written.
        """
        call = partial(self._files.record, sample_id, turns)
        await self._calls.submit(call, weight=2 * sum(turn.response_ids.nbytes for turn in turns.values()))

    async def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        return await self._calls.submit(partial(self._files.completed, sample_id))

    async def forget(self, sample_id: SampleId) -> None:
        await self._calls.submit(partial(self._files.forget, sample_id))

    async def aclose(self) -> None:
        """Delete the current file if it has no live turn. Nothing may be recorded after this."""
        await anyio.to_thread.run_sync(self._files.end)

    async def _run(self, calls: Sequence[Callable[[], Any]]) -> Sequence[Any]:
        # Not abandoned on cancellation: only one thread at a time may change the files' counts.
        return await anyio.to_thread.run_sync(self._files.run, calls)


@dataclass(eq=False, slots=True)
class _LogFile:
    path: Path
    incarnation: int
    num_bytes: int = 0
    """Size of the complete frames."""
    num_live: int = 0
    """Number of frames that are not forgotten."""


class _FramePosition(NamedTuple):
    log: _LogFile
    key: str
    start: int
    num_bytes: int


class _LogFiles:
    """The log files and their live frames. Blocking; one call at a time."""

    def __init__(self, directory: Path, incarnation: int, max_log_bytes: int) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._max_log_bytes = max_log_bytes
        self._numbers = itertools.count(1)
        self._own: _LogFile | None = None
        self._live: dict[SampleId, list[_FramePosition]] | None = None
        """Positions of all live frames; None: the files of earlier incarnations have not been read."""
        self._given: dict[SampleId, set[str]] = {}
        """Keys that `completed` returned, of samples that are not forgotten."""

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return each call's result or error."""
        return [self._result_of(call) for call in calls]

    def _result_of(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AsyncRLError as error:
            return error
        except OSError as error:
            return disk_error(Path(error.filename or self._directory), error)

    def live(self) -> dict[SampleId, list[_FramePosition]]:
        """Return the live frames by sample. The first call reads the files of earlier incarnations."""
        if self._live is None:
            live: dict[SampleId, list[_FramePosition]] = {}
            for log in _logs(self._directory):
                if log.incarnation >= self._incarnation:
                    continue
                for frame in _frames(log.path):
                    if frame.live:
                        log.num_live += 1
                        position = _FramePosition(log, frame.key, frame.start, frame.num_bytes)
                        live.setdefault(frame.sample_id, []).append(position)
                self._delete_if_done(log)
            self._live = live
        return self._live

    def end(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            try:
                self._delete_if_done(own)
            except OSError as error:
                logger.warning("cannot delete %s: %s. It is not needed any more", own.path, error.strerror)

    def record(self, sample_id: SampleId, turns: Mapping[str, Turn]) -> None:
        live = self.live()
        for key in self._given.get(sample_id, set()) & turns.keys():
            raise BugError(
                f"turn {key} of {sample_id} was completed by an earlier incarnation of the Rollouter and handed out "
                "again, and yet it was generated a second time"
            )
        log = self._current()
        frames = {key: encode_frame(sample_id, key, turn) for key, turn in turns.items()}
        descriptor = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            write_all(descriptor, list(itertools.chain.from_iterable(frames.values())))
        except OSError as error:
            # A torn frame would make later ones unreadable.
            with suppress(OSError):
                os.ftruncate(descriptor, log.num_bytes)
            raise disk_error(log.path, error) from error
        finally:
            os.close(descriptor)
        for key, frame in frames.items():
            num_bytes = sum(map(len, frame))
            live.setdefault(sample_id, []).append(_FramePosition(log, key, log.num_bytes, num_bytes))
            log.num_bytes += num_bytes
            log.num_live += 1

    def _current(self) -> _LogFile:
        """Return the file to write to; begin a new one if it is full."""
        if self._own is None or self._own.num_bytes >= self._max_log_bytes:
            full, path = self._own, self._directory / f"turns-{self._incarnation}-{next(self._numbers)}.log"
            make_directory(self._directory)
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                message = f"{path} exists: two processes log turns as incarnation {self._incarnation}"
                raise BugError(message) from None
            self._own = _LogFile(path, self._incarnation)
            if full is not None:
                self._delete_if_done(full)
        return self._own

    def completed(self, sample_id: SampleId) -> Mapping[str, Turn]:
        turns: dict[str, Turn] = {}
        for log, key, start, num_bytes in self.live().get(sample_id, ()):
            if log.incarnation == self._incarnation:
                continue
            try:
                with open(log.path, "rb") as file:
                    turns[key] = _read_frame(file, start, start + num_bytes).turn
            except (DamageError, OSError) as error:
                logger.error("%s: turn %s of %s is lost: %s. It is generated again", log.path, key, sample_id, error)
        if turns:
            self._given[sample_id] = set(turns)
        return turns

    def forget(self, sample_id: SampleId) -> None:
        live = self.live()
        self._given.pop(sample_id, None)
        for position in live.pop(sample_id, ()):
            position.log.num_live -= 1
            if not self._delete_if_done(position.log):
                with suppress(FileNotFoundError), open(position.log.path, "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), _FORGOTTEN, position.start)

    def _delete_if_done(self, log: _LogFile) -> bool:
        if log.num_live or log is self._own:
            return False
        log.path.unlink(missing_ok=True)
        return True


def _logs(directory: Path) -> list[_LogFile]:
    """Return all log files, oldest first."""
    found: list[tuple[int, int, Path]] = []
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            # A link is no log, because forgetting a turn would write to its target.
            if (match := _NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
                found.append((int(match[1]), int(match[2]), path))
    return [_LogFile(path, incarnation) for incarnation, _, path in sorted(found)]


def _frames(path: Path) -> Iterator[TurnFrame]:
    """Read frames up to the first torn or damaged one, which is logged: later ones cannot be found."""
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
            "%s: %s at byte %d of %d. The %d turns before it are used; any others are generated again",
            path, error, start, end, num_frames,
        )  # fmt: skip


def encode_frame(sample_id: SampleId, key: str, turn: Turn) -> list[memoryview]:
    """Return the buffers of the frame of a turn."""
    arrays = {
        "response_ids": np.ascontiguousarray(turn.response_ids, np.int32),
        "rollout_log_probs": np.ascontiguousarray(turn.rollout_log_probs, np.float32),
    }
    texts = {
        "sample_id": str(sample_id),
        "key": key,
        "finish_reason": str(turn.finish_reason),
        "spans": json.dumps(turn.spans),
    }
    buffers = encode(arrays, texts)
    head = _LIVE + sum(map(len, buffers)).to_bytes(8, "little")
    return [memoryview(head), *buffers]


def _read_frame(file: Any, start: int, end: int) -> TurnFrame:
    """Read the frame at `start` of a file that ends at `end`.

    Raises:
        DamageError: it is torn or damaged.
    """
    file.seek(start)
    head = file.read(_HEAD_BYTES)
    num_bytes = int.from_bytes(head[1:], "little")
    if len(head) < _HEAD_BYTES or start + _HEAD_BYTES + num_bytes > end or num_bytes > MAX_FRAME_BYTES:
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
    return TurnFrame(start, _HEAD_BYTES + num_bytes, head[:1] == _LIVE, sample_id, key, turn)


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
    return sample_id, key, Turn(ids, log_probs, spans, reason)
