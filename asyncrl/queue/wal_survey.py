"""Parses SQLite's write-ahead log: which frames are intact, and what follows the first bad one.

SQLite silently continues from the last commit before the first bad frame, whatever follows it. After a crash, the
rest is a torn tail that was never acknowledged; after damage, it is lost acknowledged work. The frames after the bad
one distinguish the two. Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_MAGICS: Final = {0x377F0682: "<u4", 0x377F0683: ">u4"}


@dataclass(frozen=True, slots=True)
class WalSurvey:
    """Frames of the log's present generation; all zero for an empty log."""

    committed: int = 0
    """Frames up to the last intact commit, which SQLite reads."""
    torn_frames: int = 0
    """Frames after that."""
    torn_commits: int = 0
    """Those of the torn frames that end a transaction. A commit begins only once the previous one is on disk, so all
    but the last had been acknowledged."""
    torn_bytes: int = 0
    """Bytes after all frames."""
    bad_header: bool = False
    """There are frames, and they cannot be interpreted."""

    @property
    def lost(self) -> int:
        """Return the number of acknowledged commits that cannot be read, as far as the frames show."""
        return max(0, self.torn_commits - 1)


def survey(log: bytes) -> WalSurvey:
    """Survey the bytes of a whole log file."""
    if len(log) <= _HEADER.size:
        return WalSurvey()
    magic, _, page_size, _, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(log)
    words = _MAGICS.get(magic)
    if words is None or not 512 <= page_size <= 65536 or page_size & (page_size - 1):
        return WalSurvey(bad_header=True)
    state = _checksum(np.frombuffer(log, words, 6), 0, 0)
    if state != (sum1, sum2):
        return WalSurvey(bad_header=True)
    size = _FRAME.size + page_size
    number = (len(log) - _HEADER.size) // size
    frames = [_FRAME.unpack_from(log, _HEADER.size + index * size) for index in range(number)]
    committed = 0
    for index, (_, is_commit, *salts, first, second) in enumerate(frames):
        start = _HEADER.size + index * size
        state = _checksum(np.frombuffer(log, words, 2, start), *state)
        state = _checksum(np.frombuffer(log, words, page_size // 4, start + _FRAME.size), *state)
        if salts != [salt1, salt2] or state != (first, second):
            break
        if is_commit:
            committed = index + 1
    # Frames of earlier generations follow; after a damaged frame, some of this generation do.
    ours = [index for index, frame in enumerate(frames) if index >= committed and frame[2:4] == (salt1, salt2)]
    end = ours[-1] + 1 if ours else committed
    rest = len(log) - _HEADER.size - number * size
    return WalSurvey(
        committed,
        torn_frames=end - committed,
        torn_commits=sum(frame[1] > 0 for frame in frames[committed:end]),
        torn_bytes=rest if end == number else 0,
    )


def _checksum(words: NDArray[np.uint32], first: int, second: int) -> tuple[int, int]:
    """Compute SQLite's checksum: for each pair of words, `first += word + second; second += next word + first`,
    modulo 2^32.

    It is linear, so all pairs are computed at once: the pair `k` before the end is multiplied by the k-th power of
    the matrix of one round.
    """
    pairs = len(words) // 2
    powers = _powers(pairs)
    state = powers[pairs] @ np.array([first, second], dtype=np.uint32)
    # One round takes words (a, b) to (first + a + second, second + b + first + a + second).
    even, odd = words[0::2].astype(np.uint32), words[1::2].astype(np.uint32)
    added = np.stack([even, even + odd])
    state = state + np.einsum("kij,jk->i", powers[pairs - 1 :: -1], added, dtype=np.uint32)
    return int(state[0]), int(state[1])


@cache
def _powers(count: int) -> NDArray[np.uint32]:
    """Return the powers of the matrix of one round, modulo 2^32: uint32 `[count + 1, 2, 2]`."""
    powers = [np.eye(2, dtype=np.uint32)]
    one = np.array([[1, 1], [1, 2]], dtype=np.uint32)
    for _ in range(count):
        powers.append(powers[-1] @ one)
    return np.stack(powers)
