"""Payloads in files: what is finished is on disk before the queue hears of it, and a dead process loses none of it.

    Rollouter: payloads ─put─▶ samples/<incarnation>-<number>.safetensors ─get─▶ Trainer
                  │                                                               ▲
                  └─ SampleMeta + FileRef ─▶ sample queue ─ lease of references ──┘

A *segment* is one file with every sample that finished while the one before was being written. Both sides see the same
run directory. Segments are deleted by the queue, once checkpoints cover all of their samples.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread

from asyncrl.blobs import DamageError, decode, encode
from asyncrl.config.schema import Config
from asyncrl.convoy import Convoy
from asyncrl.failures import BugError, DataError, InfraError
from asyncrl.payload_objects import RayPayloads
from asyncrl.payloads import FileRef, PackedBlob, pack, to_blob
from asyncrl.ports import PayloadStore
from asyncrl.run_dir import SAMPLES, disk_error
from asyncrl.segments import make_directory, read_segment, segment_incarnation, segment_name, write_segment
from asyncrl.types import Sample, sample_meta

__all__ = ["FilePayloads", "FileRef", "make_payloads"]

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 32 << 20
"""Most payload bytes in a segment: what one unfinished sample can keep on disk of the others."""
MIN_WEIGHT_BYTES = 4096
"""What a sample counts for at least, so that the descriptions of tiny ones stay far below what a header may have."""
MAX_KEPT = 4
"""Segments kept in memory because a lease took only some of their samples."""
_LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ESTALE, errno.ENODATA, errno.EUCLEAN)
"""Errors that say that a file is gone, or that the disk cannot give it back."""


class FilePayloads:
    """`ports.PayloadStore` in files of the run directory. Make one per event loop.

    What `put` returned is found by every later process, also after a power cut (if the disk honours fsync).
    """

    def __init__(self, run_dir: Path, incarnation: int) -> None:
        """
        Args:
            incarnation: of the part that puts. No two processes may put as the same one.
        """
        self._directory = run_dir / SAMPLES
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        # One segment at a time: two side by side are smaller, and cost more than the waiting that they save.
        self._puts = Convoy(self._put_many, max_weight=MAX_SEGMENT_BYTES)
        self._told: set[str] = set()
        self._kept: dict[str, tuple[PackedBlob, set[int]]] = {}
        """Segments some of whose samples nobody has taken yet, and where in them; the least recently used first."""

    async def put(self, sample: Sample) -> FileRef:
        """Write the sample, in one segment with others that come at the same time.

        Raises:
            DiskFullError, ConfigError, InfraError: the segment cannot be written; nothing of it is left behind.
        """
        weight = max(MIN_WEIGHT_BYTES, sample_meta(sample).payload_bytes)
        return await self._puts.join(sample, weight=weight)

    async def get(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        """In order; arrays are read-only views of the segment's bytes in memory, which is read once for all of them.

        None: that sample's file is gone or damaged, which is logged once for each file.

        Raises:
            InfraError: a file cannot be read for a reason that is not its own.
        """
        # Longest wait: as long as the disk takes. A thread in a read cannot be ended, only left behind.
        return await anyio.to_thread.run_sync(self._get_blocking, payloads, abandon_on_cancel=True)

    async def _put_many(self, samples: Sequence[Sample]) -> Sequence[FileRef]:
        name = segment_name(self._incarnation, next(self._numbers))
        await anyio.to_thread.run_sync(self._put_blocking, name, samples)
        return [FileRef(name, position) for position in range(len(samples))]

    def _put_blocking(self, name: str, samples: Sequence[Sample]) -> None:
        arrays, texts = to_blob(pack(samples))
        try:
            buffers = encode(arrays, {"file": name, **texts})
        except ValueError as error:
            raise DataError(
                f"{len(samples)} samples do not fit in a file: {error}. Look at their reward_extra"
            ) from error
        path = self._directory / name
        try:
            make_directory(self._directory)
            write_segment(path, buffers)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.exists():
                told = f"{path} exists: two processes write samples as incarnation {self._incarnation}"
                raise BugError(told) from None
            raise disk_error(path, error) from error

    def _get_blocking(self, payloads: Sequence[FileRef]) -> list[Sample | None]:
        samples: list[Sample | None] = [None] * len(payloads)
        places: dict[str, list[int]] = {}
        for place, payload in enumerate(payloads):
            places.setdefault(payload.file, []).append(place)
        for file, wanted in places.items():
            kept = self._kept.pop(file, None) or self._open(file)
            if kept is None:
                continue
            packed, left = kept
            for place in wanted:
                position = payloads[place].position
                left.discard(position)
                try:
                    samples[place] = packed.unpack(position)
                except (DamageError, ValueError) as error:
                    self._tell(file, str(error))
            if left:
                self._kept[file] = kept
        for file in list(self._kept)[:-MAX_KEPT]:
            self._kept.pop(file, None)
        return samples

    def _open(self, file: str) -> tuple[PackedBlob, set[int]] | None:
        """A segment and all places in it; None if it is lost, or damaged as a whole."""
        path = self._directory / file
        try:
            if segment_incarnation(file) is None:
                raise DamageError("no such file was ever written")
            blob = decode(read_segment(path))
            if (written_as := blob.texts.get("file")) != file:
                raise DamageError(f"it was written as {written_as!r}")
            packed = PackedBlob(blob)
            return packed, set(range(len(packed)))
        except (DamageError, ValueError, RecursionError) as error:
            self._tell(file, str(error))
        except OSError as error:
            if error.errno not in _LOST:
                raise InfraError.wrap(f"cannot read {path}: {error.strerror or error}", error) from error
            self._tell(file, error.strerror or str(error))
        return None

    def _tell(self, file: str, cause: str) -> None:
        if file not in self._told:
            self._told.add(file)
            path = self._directory / file
            logger.error("%s is lost or damaged: %s. Its samples are generated again if they are needed", path, cause)


def make_payloads(config: Config, run_dir: Path, incarnation: int) -> PayloadStore:
    """The store that `config.journal` asks for; `incarnation` is that of the part that will put."""
    if config.journal == "on":
        return FilePayloads(run_dir, incarnation)
    return RayPayloads(config.timeouts.call_s)
