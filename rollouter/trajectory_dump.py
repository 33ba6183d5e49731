"""Every scored trajectory of training, written where people can read it (`rollout.dump_dir`).

The samples wait for their lines, one after another, so what is dumped is never far behind. A disk that does not take
them costs lines and nothing else: that is told once for each kind of error, and counted.
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
from asyncrl.ports import Score
from asyncrl.trajectory import TokenRow, Trajectory
from asyncrl.trajectory_files import append
from asyncrl.trajectory_lines import PROMPT_ROLE, DumpedTrajectory, Piece, pieces, to_line
from asyncrl.types import Prompt, Row, Sample, Span
from rollouter.template import Decode

logger = logging.getLogger(__name__)


class TrajectoryDump:
    """The dump of one run. Any number of samples may be on their way into it."""

    def __init__(
        self, directory: Path, run_dir: Path, decode: Decode, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """
        Args:
            directory: Made with the first sample; other runs may write there too.
            run_dir: Names the run in every line.
            decode: Text of tokens, special ones left out.
        """
        self._directory = directory
        self._run = str(run_dir.absolute())
        self._decode = decode
        self._wall_clock = wall_clock
        # One sample at a time, and the others wait for their turn in order.
        self._one = anyio.CapacityLimiter(1)
        self._told: set[str] = set()
        self._written = 0
        self._failed = 0

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """Append the trajectories of `sample`; returns when they are written, or cannot be, which has been told.

        Args:
            trajectories: What its rows were made of, in order, without the baseline's; `scores` is of them.
        """
        # Longest wait: as long as the disk takes. A thread in a write cannot be ended, only left behind.
        await to_thread.run_sync(
            self._write, sample, prompt, trajectories, scores, abandon_on_cancel=True, limiter=self._one
        )

    def status(self) -> Mapping[str, int]:
        """Samples: `written`, and `failed`, which are in no file."""
        return {"written": self._written, "failed": self._failed}

    def _write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        try:
            dumped = describe(sample, prompt, trajectories, scores, self._decode, run=self._run, at=self._wall_clock())
            append(self._directory, sample.sample_id.index, (to_line(one) for one in dumped))
        except Exception as error:  # noqa: BLE001  OSError, or what a tokenizer or a data set's column raises
            self._failed += 1
            self._tell(sample, error)
        else:
            self._written += 1

    def _tell(self, sample: Sample, error: Exception) -> None:
        # By what it is and not by its words, which may be others for each sample.
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if kind in self._told:
            return
        self._told.add(kind)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        logger.warning(
            "%s is not dumped in %s: %s. It is trained on all the same; further samples that cannot be dumped for this "
            "are counted and not told. rollout.dump_dir names another place",
            sample.sample_id,
            self._directory,
            reason,
        )


def make_dump(config: Config, run_dir: Path, decode: Decode) -> TrajectoryDump | None:
    """What `rollout.dump_dir` asks for; a relative one is below this process's working directory."""
    if config.rollout.dump_dir is None:
        return None
    return TrajectoryDump(Path(config.rollout.dump_dir).expanduser().absolute(), run_dir, decode)


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
    """What is written of each trajectory; for the arguments see `TrajectoryDump.write`."""
    dumped = []
    begin = 0
    for number, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True)):
        end = begin + len(trajectory.rows)
        rows = _counted(trajectory.rows, sample.rows[begin:end])
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
                recorded_spans=() if sample.replay is None else _others(rows, sample.replay.spans[begin:end]),
            )
        )
        begin = end
    return dumped


def _counted(rows: Sequence[TokenRow], trained: Sequence[Row]) -> tuple[TokenRow, ...]:
    """With the versions that they count as: those of a replayed row may be others than sampled it."""
    return tuple(replace(row, spans=counted.spans) for row, counted in zip(rows, trained, strict=True))


def _others(rows: Sequence[TokenRow], recorded: Sequence[tuple[Span, ...]]) -> tuple[tuple[Span, ...], ...]:
    """The recorded spans where they differ; empty: nowhere."""
    others = tuple(() if row.spans == spans else spans for row, spans in zip(rows, recorded, strict=True))
    return others if any(others) else ()


def _messages(prompt: Prompt, answer: Sequence[Piece], decode: Decode) -> tuple[Mapping[str, object], ...]:
    """Of a trajectory that has no more than a prompt and an answer."""
    asked = prompt.messages or ({"role": PROMPT_ROLE, "content": decode(prompt.prompt_ids)},)
    return (*asked, {"role": "assistant", "content": "".join(piece.text for piece in answer)})
