"""Writes scored trajectories of training to files: all of them to readable ones (`rollout.dump_dir`), and those that
`asyncrl show` can show after any run to the run directory (`rollout.kept_samples`).

Samples are dumped one at a time, and each sample waits until it is dumped. Samples are kept every few seconds, and
nothing waits for that. If the disk fails, only these files are incomplete. Each kind of error is logged once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import TokenRow, Trajectory
from asyncrl.core.types import Prompt, Row, Sample, Span
from asyncrl.profiling import profile
from asyncrl.storage.recent_samples import MAX_BYTES, RecentSample, RecentSamples
from asyncrl.storage.run_dir import KEPT
from asyncrl.storage.trajectory_files import PROMPT_ROLE, DumpedTrajectory, VersionedText, append, pieces, to_line
from rollouter.prompts.chat_template import Decode

logger = logging.getLogger(__name__)
T = TypeVar("T")
KEEP_EVERY_S = 5.0
"""Seconds between two writes of kept samples. Of the samples that are scored meanwhile, only those that will be kept
cost more than their place in a list."""
LAST_WRITE_S = 10.0


class TrajectoryFiles(Protocol):
    """Files that receive every scored sample."""

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """Take the trajectories of `sample`, in the order of its rows and without the baseline, and one score each."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Write during the block; at its end everything is written, or the failure is logged."""


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
        self._errors = ErrorLog(directory, "is not dumped", "Set rollout.dump_dir to another directory")

    def running(self) -> AbstractAsyncContextManager[None]:
        """Do nothing: `write` has written."""
        return nullcontext()

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """Append the trajectories of `sample`, and return when they are written or the failure is logged."""
        with profile.span("dump.write"):
            async with self._lock:
                try:
                    data = await _in_thread(self._threads, self.lines, sample, prompt, trajectories, scores)
                    await append(self._directory, sample.sample_id.index, data, self._mode)
                except Exception as error:  # noqa: BLE001  OSError, or any error of a tokenizer or a data set's column
                    self._errors.log(str(sample.sample_id), error)

    def lines(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> bytes:
        """Return the lines that `write` appends. Blocking: decodes every token."""
        dumped = describe(sample, prompt, trajectories, scores, self._decode, run=self._run, at=self._wall_clock())
        return b"".join(map(to_line, dumped))


class SampleKeeper:
    """Keeps some samples in the run directory (`asyncrl.storage.recent_samples`), and decodes nothing."""

    def __init__(
        self, run_dir: Path, most: int, wall_clock: Callable[[], float] = time.time, *, mode: int = 0o700
    ) -> None:
        """`most`: the largest number of samples."""
        self._run = str(run_dir.absolute())
        self._recent = RecentSamples(run_dir / KEPT, most, mode=mode)
        self._wall_clock = wall_clock
        self._new: deque[_Noted] = deque()
        self._new_bytes = 0
        self._noted = anyio.Event()
        self._threads = anyio.CapacityLimiter(1)
        self._errors = ErrorLog(run_dir / KEPT, "is not kept for `asyncrl show`", "rollout.kept_samples=0 keeps none")

    async def write(
        self, sample: Sample, prompt: Prompt, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> None:
        """Note the sample for the next write. While the disk hangs, only the newest samples are noted."""
        noted = _Noted(sample, prompt, trajectories, scores, self._wall_clock())
        self._new.append(noted)
        self._new_bytes += noted.num_bytes
        while self._new_bytes > MAX_BYTES and len(self._new) > 1:
            self._new_bytes -= self._new.popleft().num_bytes
        self._noted.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write noted samples every `KEEP_EVERY_S`, and the last ones at the end of the block, for `LAST_WRITE_S` at
        most."""
        ended = anyio.Event()
        scope = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep, ended, scope)
            try:
                yield
            finally:
                scope.deadline = anyio.current_time() + LAST_WRITE_S
                ended.set()
                self._noted.set()

    async def _keep(self, ended: anyio.Event, scope: anyio.CancelScope) -> None:
        with scope:
            while self._new or not ended.is_set():
                await self._noted.wait()
                with anyio.move_on_after(KEEP_EVERY_S):
                    await ended.wait()
                new = list(self._new)
                self._new.clear()
                self._new_bytes = 0
                self._noted = anyio.Event()
                if new:
                    await self._write(new)

    async def _write(self, new: Sequence[_Noted]) -> None:
        with profile.span("kept.write"):
            try:
                failed = await _in_thread(self._threads, self._add, new)
            except Exception as error:  # noqa: BLE001  no error of these files ends a run
                self._errors.log(str(new[0].sample.sample_id), error)
                return
        for name, reason in failed.items():
            self._errors.log(name, reason)

    def _add(self, new: Sequence[_Noted]) -> dict[str, Exception]:
        return self._recent.add([
            RecentSample(
                tuple(describe(one.sample, one.prompt, one.trajectories, one.scores, None, run=self._run, at=one.at)),
                tuple(bool(trajectory.messages) for trajectory in one.trajectories),
            )
            for one in new
        ])  # fmt: skip


class _Noted(NamedTuple):
    """The arguments of a `write`, and when it was called (wall clock)."""

    sample: Sample
    prompt: Prompt
    trajectories: Sequence[Trajectory]
    scores: Sequence[Score]
    at: float

    @property
    def num_bytes(self) -> int:
        """The size of the arrays of its rows."""
        return sum(
            array.nbytes
            for trajectory in self.trajectories
            for row in trajectory.rows
            for array in (row.prompt_ids, row.response_ids, row.response_mask, row.rollout_log_probs)
        )


class ErrorLog:
    """Logs each kind of error once."""

    def __init__(self, directory: Path, consequence: str, remedy: str) -> None:
        self._directory, self._consequence, self._remedy = directory, consequence, remedy
        self._logged: set[str] = set()

    def log(self, name: str, error: Exception) -> None:
        """Log that the sample `name` is not written, unless an error of this kind was logged before."""
        # Errors are compared by kind, not by message, which may differ for each sample.
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if kind in self._logged:
            return
        self._logged.add(kind)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        logger.warning(
            "%s %s in %s: %s. It is still trained on; further failures of this kind are not logged. %s",
            name,
            self._consequence,
            self._directory,
            reason,
            self._remedy,
        )


async def _in_thread(threads: anyio.CapacityLimiter, function: Callable[..., T], *arguments: Any) -> T:
    # A thread cannot be cancelled, only abandoned.
    return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=threads)


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
