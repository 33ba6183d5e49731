"""Parses SQLite's write-ahead log: which frames are intact, and what follows the first bad one.

SQLite silently continues from the last commit before the first bad frame, whatever follows it. After a crash, the
rest is a torn tail that was never acknowledged; after damage, it is lost acknowledged work. The frames after the bad
one distinguish the two. Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_BYTE_ORDERS: Final = {0x377F0682: "<", 0x377F0683: ">"}
"""The byte order of the words that checksums add up, by magic number."""
_WORD: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class WalSurvey:
    """Counts of the frames in the log's current generation; all zero for an empty log."""

    torn_frames: int = 0
    """Frames after the last intact commit."""
    torn_commits: int = 0
    """Torn frames that end a transaction. A commit begins only once the previous one is on disk, so all of these but
    the last had been acknowledged."""
    torn_bytes: int = 0
    """Bytes after all frames."""
    bad_header: bool = False
    """Whether the log has frames that cannot be interpreted, because its header is damaged."""

    @property
    def lost(self) -> int:
        """Return the number of acknowledged commits that cannot be read, as far as the frames show."""
        return max(0, self.torn_commits - 1)


def survey(log: bytes) -> WalSurvey:
    """Survey the bytes of a whole log file."""
    if len(log) <= _HEADER.size:
        return WalSurvey()
    magic, _, page_size, _, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(log)
    order = _BYTE_ORDERS.get(magic)
    if order is None or not 512 <= page_size <= 65536 or page_size & (page_size - 1):
        return WalSurvey(bad_header=True)
    state = _checksum(struct.unpack_from(f"{order}6I", log), 0, 0)
    if state != (sum1, sum2):
        return WalSurvey(bad_header=True)
    size, page = _FRAME.size + page_size, struct.Struct(f"{order}{page_size // 4}I")
    number = (len(log) - _HEADER.size) // size
    frames = [_FRAME.unpack_from(log, _HEADER.size + index * size) for index in range(number)]
    committed = 0
    for index, (_, is_commit, *salts, first, second) in enumerate(frames):
        start = _HEADER.size + index * size
        state = _checksum(struct.unpack_from(f"{order}2I", log, start), *state)
        state = _checksum(page.unpack_from(log, start + _FRAME.size), *state)
        if salts != [salt1, salt2] or state != (first, second):
            break
        if is_commit:
            committed = index + 1
    # The frames after `committed` are of earlier generations, or, after a damaged frame, some are of this one.
    ours = [index for index, frame in enumerate(frames) if index >= committed and frame[2:4] == (salt1, salt2)]
    end = ours[-1] + 1 if ours else committed
    rest = len(log) - _HEADER.size - number * size
    return WalSurvey(
        torn_frames=end - committed,
        torn_commits=sum(frame[1] > 0 for frame in frames[committed:end]),
        torn_bytes=rest if end == number else 0,
    )


def _checksum(words: Sequence[int], first: int, second: int) -> tuple[int, int]:
    """Continue SQLite's checksum over the words, two at a time."""
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _WORD
        second = (second + other + first) & _WORD
    return first, second
