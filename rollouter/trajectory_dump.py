"""Writes scored trajectories of training to files: all of them to readable ones (`rollout.dump_dir`), and those that
`asyncrl show` can show after any run to the run directory (`rollout.kept_samples`).

Samples are written one at a time, and each sample waits until it is written. If the disk fails, only these files are
incomplete. Each kind of error is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import TokenRow, Trajectory
from asyncrl.core.types import Prompt, Row, Sample, Span, TokenIds
from asyncrl.storage.recent_samples import RecentSamples
from asyncrl.storage.run_dir import KEPT
from asyncrl.storage.trajectory_files import PROMPT_ROLE, DumpedTrajectory, VersionedText, append, pieces, to_line
from rollouter.prompts.chat_template import Decode

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TrajectoryFiles(Protocol):
    """Files that receive every scored sample."""

    span: str
    """The name of the event of a write."""

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """See `TrajectoryDump.write`."""


class TrajectoryDump:
    """The dump of one run."""

    span = "dump.write"
    _consequence = "is not dumped"
    _remedy = "Set rollout.dump_dir to another directory"

    def __init__(
        self,
        directory: Path,
        run_dir: Path,
        decode: Decode,
        wall_clock: Callable[[], float] = time.time,
        *,
        mode: int = 0o700,
    ) -> None:
        """`directory` is created with the first sample, with `mode`. Other runs may share it, so every line names
        `run_dir`."""
        self._directory = directory
        self._mode = mode
        self._run = str(run_dir.absolute())
        self._decode = decode
        self._wall_clock = wall_clock
        # One sample at a time; the others wait in order.
        self._lock = anyio.Lock()
        self._threads = anyio.CapacityLimiter(1)
        self._logged_errors: set[str] = set()

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """Append the trajectories of `sample`, and return when they are written or the failure is logged.

        Args:
            trajectories: The trajectories of the sample's rows, in order, without the baseline.
            scores: One score per trajectory.
        """
        async with self._lock:
            try:
                await self._save(sample, prompt, trajectories, scores)
            except Exception as error:  # noqa: BLE001  OSError, or any error of a tokenizer or a data set's column
                self._log_error(sample, error)

    async def _save(self, sample: Sample, *scored: Any) -> None:
        data = await self._in_thread(self.lines, sample, *scored)
        await append(self._directory, sample.sample_id.index, data, self._mode)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        # A thread cannot be cancelled, only abandoned.
        return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=self._threads)

    def lines(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> bytes:
        """Return the lines that `write` appends. Blocking: decodes every token."""
        dumped = describe(sample, prompt, trajectories, scores, self._decode, run=self._run, at=self._wall_clock())
        return b"".join(map(to_line, dumped))

    def _log_error(self, sample: Sample, error: Exception) -> None:
        # Errors are compared by kind, not by message, which may differ for each sample.
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if kind in self._logged_errors:
            return
        self._logged_errors.add(kind)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        logger.warning(
            "%s %s in %s: %s. It is still trained on; further failures of this kind are not logged. %s",
            sample.sample_id,
            self._consequence,
            self._directory,
            reason,
            self._remedy,
        )


class SampleKeeper(TrajectoryDump):
    """Keeps some samples in the run directory (`asyncrl.storage.recent_samples`), and decodes nothing."""

    span = "kept.write"
    _consequence = "is not kept for `asyncrl show`"
    _remedy = "rollout.kept_samples=0 keeps none"

    def __init__(
        self, run_dir: Path, most: int, wall_clock: Callable[[], float] = time.time, *, mode: int = 0o700
    ) -> None:
        """`most`: the largest number of samples."""
        super().__init__(run_dir / KEPT, run_dir, _never, wall_clock, mode=mode)
        self._recent = RecentSamples(run_dir / KEPT, most, mode=mode)

    async def _save(self, sample: Sample, *scored: Any) -> None:
        await self._in_thread(self._keep, sample, *scored)

    def _keep(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        kept = describe(sample, prompt, trajectories, scores, None, run=self._run, at=self._wall_clock())
        self._recent.add(kept, [bool(trajectory.messages) for trajectory in trajectories])


def _never(ids: TokenIds) -> str:
    raise NotImplementedError


def make_files(config: Config, run_dir: Path, decode: Decode) -> list[TrajectoryFiles]:
    """Return the files for `rollout.dump_dir`, relative to the working directory, and `rollout.kept_samples`."""
    files: list[TrajectoryFiles] = []
    if config.rollout.dump_dir is not None:
        directory = Path(config.rollout.dump_dir).expanduser().absolute()
        files.append(TrajectoryDump(directory, run_dir, decode, mode=config.directory_mode))
    if config.rollout.kept_samples:
        files.append(SampleKeeper(run_dir, config.rollout.kept_samples, mode=config.directory_mode))
    return files


def describe(
    sample: Sample,
    prompt: Prompt,
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    decode: Decode | None,
    *,
    run: str,
    at: float,
) -> list[DumpedTrajectory]:
    """Return the dump's entry for each trajectory; see `TrajectoryDump.write` for the arguments. Without `decode`, the
    entries have no texts, and a single turn has the messages of its prompt only."""
    dumped = []
    begin = 0
    for number, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True)):
        end = begin + len(trajectory.rows)
        rows = _with_trained_spans(trajectory.rows, sample.rows[begin:end])
        texts: tuple[tuple[VersionedText, ...], ...] = ()
        messages: tuple[Mapping[str, object], ...] = trajectory.messages or tuple(prompt.messages or ())
        if decode is not None:
            texts = tuple(pieces(rows[turn.row], turn, decode) for turn in trajectory.turns)
            messages = trajectory.messages or _messages(prompt, texts[0], decode)
        dumped.append(
            DumpedTrajectory(
                sample_id=sample.sample_id,
                number=number,
                num_trajectories=len(trajectories),
                run=run,
                at=at,
                trajectory=replace(trajectory, rows=rows, messages=messages),
                score=score,
                texts=texts,
                data_source=sample.data_source,
                ground_truth=prompt.ground_truth,
                generate_s=sample.generate_s,
                reward_s=sample.reward_s,
                baseline_reward=sample.baseline_reward,
                replayed_from=None if sample.replay is None else sample.replay.step,
                substituted=sample.replay is not None and sample.replay.substituted,
                recorded_spans=() if sample.replay is None else _differing_spans(rows, sample.replay.spans[begin:end]),
            )
        )
        begin = end
    return dumped


def _with_trained_spans(rows: Sequence[TokenRow], trained: Sequence[Row]) -> tuple[TokenRow, ...]:
    """Return the rows with the spans that training uses, which differ for replayed rows."""
    return tuple(replace(row, spans=counted.spans) for row, counted in zip(rows, trained, strict=True))


def _differing_spans(rows: Sequence[TokenRow], recorded: Sequence[tuple[Span, ...]]) -> tuple[tuple[Span, ...], ...]:
    """Return the recorded spans of the rows where they differ; empty if they do not differ."""
    others = tuple(() if row.spans == spans else spans for row, spans in zip(rows, recorded, strict=True))
    return others if any(others) else ()


def _messages(prompt: Prompt, answer: Sequence[VersionedText], decode: Decode) -> tuple[Mapping[str, object], ...]:
    """Return the messages of a trajectory without a conversation: prompt and answer."""
    question = prompt.messages or ({"role": PROMPT_ROLE, "content": decode(prompt.prompt_ids)},)
    return (*question, {"role": "assistant", "content": "".join(piece.text for piece in answer)})
