"""The samples that a run keeps for `asyncrl show`: the newest ones, and those with remarkable rewards. Blocking.

    kept/sample_0_42.safetensors    one sample; the arrays of its rows end to end, and its lines without them

A file has what a line of the dump has (`trajectory_files`), except the texts of turns, which are decoded when it is
read: decoding is most of the cost of a dump, and most samples are never looked at.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.core.trajectory import TokenRow
from asyncrl.core.types import SampleId
from asyncrl.storage.array_bytes import Blob, DamageError, decode, encode
from asyncrl.storage.run_dir import read_file
from asyncrl.storage.trajectory_files import (
    NO_SUCH_LINE,
    PROMPT_ROLE,
    Decode,
    DumpedTrajectory,
    described,
    parse_described,
    pieces,
)

MAX_BYTES = 20 << 20
REMARKABLE = 10
"""How many samples are kept for each of the lowest, highest and oddest rewards."""
_SUFFIX = ".safetensors"
_ARRAYS = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
_DTYPES = (np.int32, np.int32, np.bool_, np.float32)


@dataclass(frozen=True)
class KeptRewards:
    """The facts by which a run chooses the samples that it keeps."""

    name: str
    """The name of its file, without the suffix: the sample's id."""
    at: float
    """When it was scored, wall clock (`time.time`)."""
    num_bytes: int
    rewards: tuple[float, ...]
    """The reward of each trajectory."""

    @cached_property
    def ranks(self) -> Mapping[str, float]:
        """The values that the choices of `CHOICES` compare: the sample with the greatest value is first."""
        rewards = self.rewards or (0.0,)
        return {"newest": self.at, "lowest": -min(rewards), "highest": max(rewards), "oddest": oddness(rewards)}


CHOICES = ("newest", "lowest", "highest", "oddest")
"""The names of the orders in which samples are chosen."""


def oddness(rewards: Sequence[float]) -> float:
    """Return how far the reward furthest from the group's mean is from it; 0 for a group of one."""
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    return max((abs(reward - mean) for reward in rewards), default=0.0)


def chosen_trajectory(rewards: Sequence[float], choice: str) -> int:
    """Return the number of the trajectory for which a sample comes first in a choice of `CHOICES`; of a choice that is
    not about rewards the first one."""
    mean = math.fsum(rewards) / len(rewards)
    value = {
        "newest": lambda reward: 0.0,
        "lowest": lambda reward: -reward,
        "highest": lambda reward: reward,
        "oddest": lambda reward: abs(reward - mean),
    }[choice]
    return max(range(len(rewards)), key=lambda number: value(rewards[number]))


def ranked(kept: Iterable[KeptRewards], choice: str) -> list[KeptRewards]:
    """Return the samples in the order of a choice of `CHOICES`, of equal ones the newest first."""
    return sorted(kept, key=lambda one: (one.ranks[choice], one.at), reverse=True)


def choose_kept(kept: Sequence[KeptRewards], most: int, max_bytes: int = MAX_BYTES) -> set[str]:
    """Return the names of the samples to keep, at most `most` with at most `max_bytes` together.

    The newest samples come first, up to half of the limits; then up to `REMARKABLE` of each other choice, those of the
    first rank before those of the second; then more of the newest. The newest sample is always kept if it fits.
    """
    chosen: dict[str, int] = {}
    used = 0

    def take(one: KeptRewards, limit: int, limit_bytes: int) -> None:
        nonlocal used
        if one.name not in chosen and len(chosen) < limit and used + one.num_bytes <= limit_bytes:
            chosen[one.name] = one.num_bytes
            used += one.num_bytes

    newest = ranked(kept, "newest")
    for one in newest[:1]:
        take(one, most, max_bytes)
    for one in newest:
        take(one, most // 2, max_bytes // 2)
    orders = [ranked(kept, choice)[:REMARKABLE] for choice in CHOICES if choice != "newest"]
    for same_rank in zip(*orders, strict=True):
        for one in same_rank:
            take(one, most, max_bytes)
    for one in newest:
        take(one, most, max_bytes)
    return set(chosen)


@dataclass(frozen=True, slots=True)
class RecentSample:
    """A kept sample as it was written; `with_texts` completes it."""

    trajectories: tuple[DumpedTrajectory, ...]
    answered: tuple[bool, ...]
    """Whether the messages of a trajectory contain its answers. Those of a single turn are only its prompt's."""

    @property
    def rewards(self) -> KeptRewards:
        """The facts by which it is chosen, without its size in a file."""
        first = self.trajectories[0]
        return KeptRewards(str(first.sample_id), first.at, 0, tuple(one.score.reward for one in self.trajectories))

    def with_texts(self, text_of: Decode) -> list[DumpedTrajectory]:
        """Return the trajectories with the texts of their turns, as the dump has them."""
        return [_with_texts(*pair, text_of) for pair in zip(self.trajectories, self.answered, strict=True)]


def _with_texts(one: DumpedTrajectory, answered: bool, text_of: Decode) -> DumpedTrajectory:
    rows, turns, messages = one.trajectory.rows, one.trajectory.turns, one.trajectory.messages
    texts = tuple(pieces(rows[turn.row], turn, text_of) for turn in turns)
    if not answered:
        question = messages or ({"role": PROMPT_ROLE, "content": text_of(rows[0].prompt_ids)},)
        messages = (*question, {"role": "assistant", "content": "".join(piece.text for piece in texts[0])})
    return replace(one, trajectory=replace(one.trajectory, messages=messages), texts=texts)


class RecentSamples:
    """The kept samples of one run directory."""

    def __init__(self, directory: Path, most: int, *, mode: int = 0o700, max_bytes: int = MAX_BYTES) -> None:
        """`directory` is created with the first sample, with `mode`."""
        self._directory = directory
        self._most = most
        self._mode = mode
        self._max_bytes = max_bytes
        self._kept: dict[str, KeptRewards] | None = None

    def add(self, samples: Sequence[RecentSample]) -> dict[str, Exception]:
        """Keep those that are chosen, and delete those that no longer are.

        Returns:
            The samples that cannot be written, and why.

        Raises:
            OSError: the directory cannot be created or read.
        """
        if self._kept is None:
            self._directory.mkdir(self._mode, exist_ok=True)
            self._kept = {one.name: one for one in list_recent(self._directory)}
        failed: dict[str, Exception] = {}
        # Most samples of a fast run are not chosen, whatever their sizes are, so they are not encoded.
        by_name = {sample.rewards.name: sample for sample in samples}
        unsized = self._kept | {name: sample.rewards for name, sample in by_name.items()}
        encoded = {}
        for name in by_name.keys() & choose_kept(list(unsized.values()), self._most, self._max_bytes):
            try:
                encoded[name] = b"".join(_encode(by_name[name].trajectories, by_name[name].answered))
            except Exception as error:  # noqa: BLE001  any error of a column of the data set
                failed[name] = error
        sized = {name: replace(by_name[name].rewards, num_bytes=len(data)) for name, data in encoded.items()}
        candidates = self._kept | sized
        chosen = choose_kept(list(candidates.values()), self._most, self._max_bytes)
        for name in encoded.keys() & chosen:
            try:
                # Not renamed into place: that waits for the disk, and checksums reveal a file that is cut off.
                with open(self._directory / f"{name}{_SUFFIX}", "wb", buffering=0) as file:
                    file.write(encoded[name])
            except OSError as error:
                failed[name] = error
        for name in self._kept.keys() - chosen:
            with suppress(FileNotFoundError):
                os.unlink(self._directory / f"{name}{_SUFFIX}")
        self._kept = {name: candidates[name] for name in chosen - failed.keys()}
        return failed


def list_recent(directory: Path) -> list[KeptRewards]:
    """Return the kept samples of a directory, without files that cannot be read. Raises `OSError`: no directory."""
    found = []
    for entry in os.scandir(directory):
        name, suffix = os.path.splitext(entry.name)
        with suppress(OSError, DamageError, ValueError):
            if suffix == _SUFFIX and SampleId.parse(name):
                sample = read_recent(directory, name)
                found.append(replace(sample.rewards, name=name, num_bytes=entry.stat().st_size))
    return found


def recent_names(directory: Path, indices: Collection[int] | None = None) -> list[str]:
    """Return the names of the kept samples, or of those with these feed indices, without reading the files."""
    names = []
    with suppress(OSError):
        for entry in os.scandir(directory):
            name, suffix = os.path.splitext(entry.name)
            with suppress(ValueError):
                if suffix == _SUFFIX and (indices is None or SampleId.parse(name).index in indices):
                    names.append(name)
    return names


def read_recent(directory: Path, name: str) -> RecentSample:
    """Read a kept sample.

    Raises:
        OSError: it cannot be read.
        DamageError, ValueError: it is damaged.
    """
    blob = decode(np.frombuffer(read_file(directory / f"{name}{_SUFFIX}"), np.uint8))
    try:
        return _from_blob(blob)
    except NO_SUCH_LINE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _from_blob(blob: Blob) -> RecentSample:
    described_lines = json.loads(blob.array("lines", np.uint8).tobytes())
    arrays = {field: blob.array(field, dtype) for field, dtype in zip(_ARRAYS, _DTYPES, strict=True)}
    prompt_end = response_end = 0
    trajectories = []
    for line in described_lines:
        rows = []
        for row in line["rows"]:
            prompt = slice(prompt_end, prompt_end := prompt_end + int(row["prompt_tokens"]))
            response = slice(response_end, response_end := response_end + int(row["response_tokens"]))
            places = (prompt, response, response, response)
            taken = {field: arrays[field][place] for field, place in zip(_ARRAYS, places, strict=True)}
            rows.append({**row, **taken})
        trajectories.append(parse_described(line, rows))
    if not trajectories:
        raise ValueError("it has no trajectories")
    return RecentSample(tuple(trajectories), tuple(bool(line["answered"]) for line in described_lines))


def _encode(trajectories: Sequence[DumpedTrajectory], answered: Sequence[bool]) -> list[memoryview]:
    lines: list[dict[str, Any]] = []
    rows: list[TokenRow] = []
    for one, complete in zip(trajectories, answered, strict=True):
        recorded = one.recorded_spans or ((),) * len(one.trajectory.rows)
        lines.append({
            **described(one),
            "answered": complete,
            "rows": [
                {"prompt_tokens": len(row.prompt_ids), "response_tokens": len(row.response_ids), "spans": row.spans,
                 "recorded_spans": spans}
                for row, spans in zip(one.trajectory.rows, recorded, strict=True)
            ],
        })  # fmt: skip
        rows += one.trajectory.rows
    text = json.dumps(lines, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
    arrays: dict[str, NDArray[Any]] = {
        field: np.concatenate([getattr(row, field) for row in rows], dtype=dtype)
        for field, dtype in zip(_ARRAYS, _DTYPES, strict=True)
    }
    return encode({**arrays, "lines": np.frombuffer(text, np.uint8)}, {})
