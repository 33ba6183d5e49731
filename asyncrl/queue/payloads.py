"""Sample payloads outside the queue: in files of the run directory, or without a journal in Ray's object store.

    Rollouter: payloads ─put─▶ samples/<incarnation>-<number>.safetensors, or an object ─get─▶ Trainer
                  │                                                                            ▲
                  └─ SampleMeta + FileRef or PayloadRef ─▶ sample queue ─ lease of references ─┘

With files, a finished sample is on disk before the queue receives its metadata, and a process that dies loses none. A
*segment* is one file with every sample that finished while the previous segment was being written. Rollouter and
Trainer share the run directory. The queue deletes segments once checkpoints cover all of their samples.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from asyncrl.config.schema import Config
from asyncrl.core.call_batcher import CallBatcher
from asyncrl.core.failures import AsyncRLError, BugError, DataError, DeadlineError, InfraError
from asyncrl.core.ports import PayloadStore
from asyncrl.core.types import Sample, sample_meta
from asyncrl.storage.array_bytes import DamageError, decode, encode
from asyncrl.storage.run_dir import SAMPLES, disk_error
from asyncrl.storage.sample_bytes import FileRef, PackedBatch, PackedBlob, pack, to_blob, unpack
from asyncrl.storage.segments import make_directory, read_segment, segment_incarnation, segment_name, write_segment

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 32 << 20
"""Maximum payload bytes in a segment or object, which one unfinished sample keeps alive as a whole."""
MIN_WEIGHT_BYTES = 4096
"""Minimum weight of a sample: it bounds the number of tiny samples in a segment, whose header describes each."""
MAX_OPEN_SEGMENTS = 4
"""Segments kept in memory because a lease took only some of their samples."""
_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENODATA, errno.EUCLEAN)
"""Errors of files that are gone or unreadable for good."""


class FilePayloads:
    """`ports.PayloadStore` in files of the run directory. Create one per event loop.

    Every later process can read what `put` returned, even after a power cut (if the disk honours fsync).
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        """`incarnation`: that of the part that calls `put`; it is unique to this process."""
        self._directory = run_dir / SAMPLES
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        # One segment is written at a time. Two concurrent segments would each be smaller, and their overhead exceeds
        # the waiting time that they save.
        self._puts = CallBatcher(self._put_many, max_weight=MAX_SEGMENT_BYTES)
        self._reported: set[str] = set()
        self._open_segments: dict[str, tuple[PackedBlob, set[int]]] = {}
        """Segments with unread positions, least recently used first."""

    async def put(self, sample: Sample) -> FileRef:
        """Write the sample, in one segment with others that arrive at the same time.

        Raises:
            DiskFullError, ConfigError, InfraError: the segment cannot be written; the partial file is removed.
            DataError: the sample's texts exceed the limit of a segment's header.
        """
        weight = max(MIN_WEIGHT_BYTES, sample_meta(sample).payload_bytes)
        return await self._puts.submit(sample, weight=weight)

    async def get(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        """Return the samples in order; None for one whose file is gone or damaged, which is logged once per file.

        Arrays are read-only views of the segment's bytes; each segment is read once.

        Raises:
            InfraError: a file cannot be read because of an error of the system.
        """
        # This waits as long as the disk takes; a thread inside a read can only be abandoned.
        return await anyio.to_thread.run_sync(self._get_blocking, payloads, abandon_on_cancel=True)

    async def _put_many(self, samples: Sequence[Sample]) -> Sequence[FileRef | AsyncRLError]:
        name = segment_name(self._incarnation, next(self._numbers))
        try:
            await anyio.to_thread.run_sync(self._put_blocking, name, samples)
        except DataError as error:
            if len(samples) == 1:
                return [error]
            return [outcome for sample in samples for outcome in await self._put_many([sample])]
        return [FileRef(name, position) for position in range(len(samples))]

    def _put_blocking(self, name: str, samples: Sequence[Sample]) -> None:
        arrays, texts = to_blob(pack(samples))
        try:
            buffers = encode(arrays, {"file": name, **texts})
        except ValueError as error:
            raise DataError(
                f"{len(samples)} samples do not fit in a file: {error}. Check the size of reward_extra"
            ) from error
        path = self._directory / name
        try:
            make_directory(self._directory)
            write_segment(path, buffers)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                message = f"{path} exists: two processes write samples as incarnation {self._incarnation}"
                raise BugError(message) from None
            raise disk_error(path, error) from error

    def _get_blocking(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        samples: list[Sample | None] = [None] * len(payloads)
        by_file: dict[str, list[int]] = {}
        for place, payload in enumerate(payloads):
            by_file.setdefault(payload.file, []).append(place)
        for file, places in by_file.items():
            segment = self._open_segments.pop(file, None) or self._open(file)
            if segment is None:
                continue
            packed, left = segment
            for place in places:
                position = payloads[place].position
                left.discard(position)
                try:
                    samples[place] = packed.unpack(position)
                except (DamageError, ValueError) as error:
                    self._report_loss(file, str(error))
            if left:
                self._open_segments[file] = segment
        for file in list(self._open_segments)[:-MAX_OPEN_SEGMENTS]:
            self._open_segments.pop(file, None)
        return samples

    def _open(self, file: str) -> tuple[PackedBlob, set[int]] | None:
        """Read a segment; return it and all positions in it, or None if it is lost or unreadable."""
        path = self._directory / file
        try:
            if segment_incarnation(file) is None:
                raise DamageError("it does not have the name of a segment")
            blob = decode(read_segment(path))
            if (written_as := blob.texts.get("file")) != file:
                raise DamageError(f"it was written as {written_as!r}")
            packed = PackedBlob(blob)
            return packed, set(range(len(packed)))
        except (DamageError, ValueError, RecursionError) as error:
            self._report_loss(file, str(error))
        except OSError as error:
            if error.errno not in _LOST:
                raise InfraError.wrap(f"cannot read {path}: {error.strerror or error}", error) from error
            self._report_loss(file, error.strerror or str(error))
        return None

    def _report_loss(self, file: str, cause: str) -> None:
        if file not in self._reported:
            self._reported.add(file)
            path = self._directory / file
            logger.error("%s is lost or damaged: %s. Its samples are generated again if they are needed", path, cause)


def make_payloads(config: Config, run_dir: Path, incarnation: int) -> PayloadStore:
    """Create the store for `config.journal`; `incarnation` is that of the part that calls `put`."""
    if config.journal == "on":
        return FilePayloads(run_dir, incarnation)
    return RayPayloads(config.timeouts.call_s)


class PayloadRef(NamedTuple):
    """A payload in the object store: the position of a sample in an object that it may share with others.

    Ray passes the nested reference as a reference; it would replace a top-level argument by the object.
    """

    ref: Any
    position: int


class RayPayloads:
    """`ports.PayloadStore` in Ray's object store, on the machine that calls `put`. Create one per event loop.

    An object costs the store about as much as copying a few hundred kilobytes, so samples that finish during a put
    share the next object, up to `MAX_SEGMENT_BYTES`. It lives until the last of them ends, because the queue holds a
    reference until then. It is lost with the process that put it.

    Raises:
        DeadlineError: the store did not take or give a payload within `call_timeout_s`.
        InfraError: the store cannot take a payload, or cannot be reached.
    """

    def __init__(self, call_timeout_s: float) -> None:
        self._call_timeout_s = call_timeout_s
        self._puts = CallBatcher(self._put_many, max_weight=MAX_SEGMENT_BYTES)

    async def put(self, sample: Sample) -> PayloadRef:
        return await self._puts.submit(sample, weight=sample_meta(sample).payload_bytes)

    async def get(self, payloads: Sequence[PayloadRef]) -> list[Sample | None]:
        """Return the samples in order, in one call to the store; None for one that is lost. Arrays are read-only views
        of shared memory."""
        refs = list(dict.fromkeys(payload.ref for payload in payloads))
        objects = await anyio.to_thread.run_sync(self._get_blocking, refs, abandon_on_cancel=True)
        packed = dict(zip(refs, objects, strict=True))
        shared = [(packed[payload.ref], payload.position) for payload in payloads]
        return [unpack(values, position) if values is not None else None for values, position in shared]

    async def _put_many(self, samples: Sequence[Sample]) -> Sequence[PayloadRef]:
        try:
            with anyio.fail_after(self._call_timeout_s):
                # A put cannot be interrupted: it may continue on its thread after the deadline.
                ref = await anyio.to_thread.run_sync(_put_blocking, samples, abandon_on_cancel=True)
        except TimeoutError as error:
            size = sum(sample_meta(sample).payload_bytes for sample in samples)
            raise DeadlineError(
                f"the object store did not take {len(samples)} sample payloads ({size} bytes) within "
                f"{self._call_timeout_s:g} s: check its size (ray.object_store_memory_bytes) and the disk it spills "
                f"to; raise timeouts.call_s if the machine is overloaded"
            ) from error
        return [PayloadRef(ref, position) for position in range(len(samples))]

    def _get_blocking(self, refs: list[Any]) -> list[PackedBatch | None]:
        try:
            return ray.get(refs, timeout=self._call_timeout_s)
        except ObjectLostError as error:
            if len(refs) > 1:
                return [packed for ref in refs for packed in self._get_blocking([ref])]
            logger.error("sample payloads are lost from the object store: %s", str(error).splitlines()[0])
            return [None]
        except GetTimeoutError as error:
            raise DeadlineError(
                f"sample payloads did not arrive within {self._call_timeout_s:g} s; raise timeouts.call_s if they are "
                "large or the network is slow"
            ) from error
        except RayError as error:
            raise InfraError.wrap("sample payloads cannot be read from the object store", error) from None


def _put_blocking(samples: Sequence[Sample]) -> Any:
    try:
        return ray.put(pack(samples))
    except RayError as error:
        raise InfraError.wrap(f"the object store cannot take {len(samples)} sample payloads", error) from None
