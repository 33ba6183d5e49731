"""Writes every scored trajectory of training to readable files (`rollout.dump_dir`).

Samples are written one at a time, and each sample waits until it is written. If the disk fails, only lines of the dump
are lost. Each kind of error is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import TokenRow, Trajectory
from asyncrl.core.types import Prompt, Row, Sample, Span
from asyncrl.storage.trajectory_files import PROMPT_ROLE, DumpedTrajectory, VersionedText, append, pieces, to_line
from rollouter.prompts.chat_template import Decode

logger = logging.getLogger(__name__)


class TrajectoryDump:
    """The dump of one run."""

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
        index = sample.sample_id.index
        async with self._lock:
            try:
                # A thread cannot be cancelled, only abandoned.
                data = await to_thread.run_sync(
                    self.lines, sample, prompt, trajectories, scores, abandon_on_cancel=True, limiter=self._threads
                )
                await append(self._directory, index, data, self._mode)
            except Exception as error:  # noqa: BLE001  OSError, or any error of a tokenizer or a data set's column
                self._log_error(sample, error)

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
            "%s is not dumped in %s: %s. It is still trained on; further failures of this kind "
            "are not logged. Set rollout.dump_dir to another directory",
            sample.sample_id,
            self._directory,
            reason,
        )


def make_dump(config: Config, run_dir: Path, decode: Decode) -> TrajectoryDump | None:
    """Return the dump for `rollout.dump_dir`, relative to the working directory, or None if that key is null."""
    if config.rollout.dump_dir is None:
        return None
    directory = Path(config.rollout.dump_dir).expanduser().absolute()
    return TrajectoryDump(directory, run_dir, decode, mode=config.directory_mode)


def describe(
    sample: Sample,
    prompt: Prompt,
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    decode: Decode,
    *,
    run: str,
    at: float,
) -> list[DumpedTrajectory]:
    """Return the dump's entry for each trajectory; see `TrajectoryDump.write` for the arguments."""
    dumped = []
    begin = 0
    for number, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True)):
        end = begin + len(trajectory.rows)
        rows = _with_trained_spans(trajectory.rows, sample.rows[begin:end])
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
