"""Prepare the samples that the loop trains on: lease and fetch them, convert them to checked rows, form mini-batches.

A sample that cannot be trained on is dropped and replaced; one whose payload is lost is requeued for generation.
This module doesn't use torch: `trainer.workers.tensors` converts rows to tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from asyncrl.config.import_path import load_function
from asyncrl.core.failures import AsyncRLError, DataError, InfraError
from asyncrl.core.ports import Lease, PayloadStore
from asyncrl.core.staleness import stale_token_mask, staleness
from asyncrl.core.types import (
    DropReason,
    FinishReason,
    Media,
    Provenance,
    Row,
    Sample,
    SampleId,
    TokenIds,
    versions_per_token,
)
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import SampleQueue

logger = logging.getLogger(__name__)

MAX_PAYLOAD_LOSSES = 3
"""The run stops when the payload of one sample was lost this often, although the sample was generated again after each
loss. Losses of many payloads at once are normal, because a process or a file can hold the payloads of many samples."""


class UnusableRowError(DataError):
    """A row is invalid: it would train on wrong data or crash the model. Its sample is dropped."""

    def __init__(self, message: str, cause: str = "", kind: str = "") -> None:
        super().__init__(message, cause)
        self.kind = kind
        """The kind of problem, as text that does not depend on the sample."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainRow:
    """One checked row of a trajectory. Arrays have one entry for each of the `L` response tokens."""

    sample_id: SampleId
    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: NDArray[np.bool_]
    """Whether the policy sampled the token."""
    loss_mask: NDArray[np.bool_]
    """Whether the policy sampled the token and it is not masked as too stale."""
    rollout_log_probs: NDArray[np.float32]
    versions: NDArray[np.int64]
    """Weights version that sampled each token."""
    reward: float
    """Reward of the whole trajectory, the `turn_rewards` of all its rows included."""
    trajectory: int
    """Number of the trajectory within the sample; the rows of one trajectory are adjacent."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """See `asyncrl.core.types.Row`."""
    reward_extra: Mapping[str, float] = field(default_factory=dict)
    baseline_reward: float | None = None
    """Score of the greedy response to the same prompt (ReMax)."""
    media: tuple[Media, ...] = ()
    """Images and videos of the prompt."""
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One leased sample, ready to be trained on."""

    sample_id: SampleId
    lease_id: int
    rows: tuple[TrainRow, ...]
    rewards: tuple[float, ...]
    """The Rollouter's score of each trajectory, without the terms that the Trainer adds (`trainer.experience`)."""
    staleness: int
    """The Trainer's version at the lease minus the version of the sample's oldest token, including masked tokens."""
    version_span: int
    """Newest minus oldest version among those that sampled its tokens."""
    processing_s: float
    """Time of generation, including resumed generation, and of scoring, without the waits between them."""
    provenance: Provenance
    untrainable: DropReason | None
    """Why the sample is not trained on: `stale` if the staleness bound masked all its tokens, `filtered` if it has
    no token to train on or `group_filter` selects it."""

    @property
    def response_tokens(self) -> int:
        """Number of response tokens of all rows, including those of tools and users."""
        return sum(len(row.response_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowRules:
    """The rules by which `prepare_sample` makes rows."""

    mask_beyond: int | None
    """With `stale_action: mask`, tokens that are older than this, in versions, are masked; None masks none."""
    group_filter: str | None
    """`algorithm.filter_groups.drop`: mark the samples that it selects as `filtered`. It gets the Rollouter's scores;
    the overlong penalty, the KL penalty and the Trainer's reward model come later. None: no filter."""
    vocab_size: int | None
    """Size of the model's vocabulary. None if it is unknown: then only negative token ids are refused."""
    rewound: bool = False
    """Whether training went back to a checkpoint in this run, so that samples may come from versions that the
    Trainer has not reached again. Their staleness is 0, like that of replayed samples."""


def prepare_sample(sample: Sample, *, lease_id: int, trainer_version: int, rules: RowRules) -> TrainSample:
    """Turn a sample into rows.

    Raises:
        BugError: a token's version is newer than the Trainer's, without a rewind or a replay that explains it.
        UnusableRowError: see `check_row` and `check_trajectories`.
        UserCodeError: the user's filter raised.
    """
    rows, was_stale = [], False
    for row in sample.rows:
        stale = stale_token_mask(row.spans, len(row.response_ids), trainer_version, rules.mask_beyond)
        was_stale |= bool((stale & row.response_mask).any())
        rows.append(_train_row(sample, row, stale))
        check_row(rows[-1], vocab_size=rules.vocab_size)
    check_trajectories(rows)
    rewards = tuple(trajectory[0].reward for trajectory in rows_by_trajectory(rows))
    oldest = min(row.oldest_version for row in sample.rows)
    untrainable = None
    if not any(row.loss_mask.any() for row in rows):
        untrainable = DropReason.STALE if was_stale else DropReason.FILTERED
    elif rules.group_filter and load_function(rules.group_filter, _FILTER_KEY, GROUP_FILTERS)(rewards):
        untrainable = DropReason.FILTERED
    return TrainSample(
        sample_id=sample.sample_id,
        lease_id=lease_id,
        rows=tuple(rows),
        rewards=rewards,
        staleness=staleness(trainer_version, oldest, allows_newer=rules.rewound or sample.replay is not None),
        version_span=max(row.newest_version for row in sample.rows) - oldest,
        processing_s=sample.generate_s + sample.reward_s,
        provenance=sample.provenance,
        untrainable=untrainable,
    )


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Return whether all trajectories of a sample have the same reward, so that group-relative advantages are 0.

    Dynamic sampling drops such samples (DAPO, https://arxiv.org/abs/2503.14476 eq. 11).
    """
    return all(reward == rewards[0] for reward in rewards)


GROUP_FILTERS: dict[str, Callable[[Sequence[float]], bool]] = {"equal_rewards": rewards_are_equal}
"""Names of `algorithm.filter_groups.drop`."""
_FILTER_KEY = "algorithm.filter_groups.drop"


def rows_by_trajectory(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    return [list(members) for _, members in groupby(rows, key=lambda row: row.trajectory)]


def _train_row(sample: Sample, row: Row, stale: NDArray[np.bool_]) -> TrainRow:
    return TrainRow(
        sample_id=sample.sample_id,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.response_mask,
        loss_mask=row.response_mask & ~stale,
        rollout_log_probs=row.rollout_log_probs,
        versions=versions_per_token(row.spans, len(row.response_ids)),
        reward=float(row.reward),
        trajectory=row.trajectory,
        turn_rewards=row.turn_rewards,
        reward_extra=row.reward_extra,
        baseline_reward=sample.baseline_reward,
        media=sample.media,
        finish_reason=row.finish_reason,
    )


# ---------------------------------------------------------------------------------------------------------- checks


def check_row(row: TrainRow, *, vocab_size: int | None) -> None:
    """Refuse a row that would train on wrong data or crash the model.

    Raises:
        UnusableRowError: empty prompt or response, arrays of unequal length, a token id outside the vocabulary, a
            behaviour log-prob of a sampled token or a reward that is not finite, or a turn's reward on a token that the
            policy did not sample.
    """
    kind, problem = _row_problem(row, vocab_size)
    if problem:
        raise _unusable(row, problem, kind)


def _row_problem(row: TrainRow, vocab_size: int | None) -> tuple[str, str]:
    """Return kind and description of the first problem; empty strings if there is none."""
    length = len(row.response_ids)
    if len(row.prompt_ids) == 0 or length == 0:
        problem = f"prompt of {len(row.prompt_ids)} and response of {length} tokens; both need at least one"
        return "no prompt or no response", problem
    if {len(row.response_mask), len(row.loss_mask), len(row.rollout_log_probs), len(row.versions)} != {length}:
        return "arrays of unequal length", (
            f"{length} response tokens but masks, rollout_log_probs and versions of {len(row.response_mask)}, "
            f"{len(row.loss_mask)}, {len(row.rollout_log_probs)} and {len(row.versions)}"
        )
    low = int(min(row.prompt_ids.min(), row.response_ids.min()))
    high = int(max(row.prompt_ids.max(), row.response_ids.max()))
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        vocabulary = "vocabulary" if vocab_size is None else f"vocabulary of {vocab_size}"
        problem = f"token id {low if low < 0 else high} outside the model's {vocabulary}"
        return "tokens outside the vocabulary", problem
    if not np.all(np.isfinite(row.rollout_log_probs[row.response_mask])):
        problem = "a behaviour log-prob that is not finite: its probability ratio would be 0 or infinite"
        return "log-probs that are not finite", problem
    if not np.isfinite(row.reward) or (row.baseline_reward is not None and not np.isfinite(row.baseline_reward)):
        problem = f"a reward of {row.reward} (baseline {row.baseline_reward}), which is not finite"
        return "rewards that are not finite", problem
    for token, reward in row.turn_rewards:
        if not (0 <= token < len(row.response_mask) and row.response_mask[token]):
            problem = f"a turn's reward on token {token} of {len(row.response_mask)}, which the policy did not sample"
            return "turn rewards on tokens that were not sampled", problem
        if not np.isfinite(reward):
            return "turn rewards that are not finite", f"a turn's reward of {reward}, which is not finite"
    return "", ""


def check_trajectories(rows: Sequence[TrainRow]) -> None:
    """Refuse rows of a sample that do not form trajectories.

    Raises:
        UnusableRowError: rows of one trajectory are not adjacent, or have different rewards.
    """
    numbers: set[int] = set()
    for first, *others in rows_by_trajectory(rows):
        if first.trajectory in numbers:
            problem = f"rows of trajectory {first.trajectory} are not adjacent"
            raise _unusable(first, problem, "rows of a trajectory that are not adjacent")
        numbers.add(first.trajectory)
        different = [row.reward for row in others if row.reward != first.reward]
        if different:
            problem = f"rows of trajectory {first.trajectory} have rewards of {first.reward} and {different[0]}"
            raise _unusable(first, problem, "rows of a trajectory with different rewards")


def _unusable(row: TrainRow, problem: str, kind: str) -> UnusableRowError:
    return UnusableRowError(
        f"{row.sample_id} cannot be trained on: {problem}. Check the engine's and the reward's output.", kind=kind
    )


# ---------------------------------------------------------------------------------------------------------- leases


@dataclass(slots=True)
class LeasedBatch:
    """The samples that the loop has leased; it trains on them before it leases more."""

    samples: list[TrainSample] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    ended: bool = False
    """Whether the stream has ended, so that no further samples follow."""


class BatchSource:
    """Leases, fetches and prepares samples from the queue. Everything runs on one event loop, with one `fill` at a
    time."""

    def __init__(
        self,
        queue: SampleQueue,
        payloads: PayloadStore,
        rules: RowRules,
        *,
        max_consecutive_filtered: int | None,
        max_consecutive_unusable: int,
        call_s: float,
    ) -> None:
        """
        Args:
            max_consecutive_filtered: this many `filtered` samples in a row are an error; None: no limit.
            max_consecutive_unusable: this many samples in a row that `check_row` refuses are an error.
            call_s: longest single call to the queue; a wait for samples repeats such calls.
        """
        self._queue = queue
        self._payloads = payloads
        self._rules = rules
        self._max_consecutive_filtered = max_consecutive_filtered
        self._consecutive_filtered = 0
        self._max_consecutive_unusable = max_consecutive_unusable
        self._consecutive_unusable = 0
        self._payload_losses: Counter[SampleId] = Counter()
        """How often the payload of a sample was lost; reset once it arrives."""
        self._logged_kinds: set[str] = set()
        """Kinds of unusable rows that have been logged; each kind is logged once."""
        self._call_s = call_s
        self._stopping = False
        self._wait_scope: anyio.CancelScope | None = None

    def stop(self) -> None:
        """End every wait, so that `fill` returns with the samples that it has."""
        self._stopping = True
        if self._wait_scope is not None:
            self._wait_scope.cancel()

    async def fill(self, batch: LeasedBatch, num_samples: int, *, trainer_version: int) -> None:
        """Lease until `batch` has `num_samples`, the stream ends or `stop` is called.

        Raises:
            DataError: too many samples in a row were filtered or unusable (`check_row`).
            InfraError: one sample's payload was lost `MAX_PAYLOAD_LOSSES` times.
        """
        while len(batch.samples) < num_samples and not self._stopping:
            lease = await self._lease(num_samples - len(batch.samples), trainer_version)
            if lease is None:
                continue
            num_replaced = await self._add(batch, lease, trainer_version)
            # Dropped and lost samples are replaced even after the end of the stream.
            if lease.ended and num_replaced == 0:
                batch.ended = True
                break

    async def drop(self, sample_id: SampleId, reason: DropReason, response_tokens: int) -> None:
        await self._queue.drop(sample_id, reason)
        profile.note("sample.dropped", sample=str(sample_id), reason=str(reason), tokens=response_tokens)

    async def release(self, batch: LeasedBatch) -> None:
        """Give back the samples that are not committed."""
        for lease_id in batch.leases:
            await self._queue.release(lease_id)

    async def release_after_failure(self, batch: LeasedBatch) -> None:
        """Release leases even if the run is cancelled; the deadline of the queue bounds the call."""
        with anyio.CancelScope(shield=True):
            try:
                await self.release(batch)
            except AsyncRLError:
                logger.exception("leases %s could not be released after an earlier failure", batch.leases)

    async def _lease(self, num_samples: int, trainer_version: int) -> Lease | None:
        """Lease samples; None if `stop` was called first. A cancelled call leaves nothing leased."""
        lease = None
        with anyio.CancelScope() as self._wait_scope:
            lease = await self._queue.lease(num_samples, trainer_version=trainer_version, timeout_s=self._call_s)
        self._wait_scope = None
        return lease

    async def _add(self, batch: LeasedBatch, lease: Lease, trainer_version: int) -> int:
        """Fetch and prepare a lease's samples; return how many were lost or dropped."""
        if not lease.samples:
            return 0
        batch.leases.append(lease.lease_id)
        num_replaced = 0
        with profile.span("trainer.fetch", samples=len(lease.samples)):
            samples = await self._payloads.get([queued.payload for queued in lease.samples])
        for queued, sample in zip(lease.samples, samples, strict=True):
            # Preparing a sample takes milliseconds and a lease may take a second, so let other tasks run in between.
            await anyio.lowlevel.checkpoint()
            if sample is None:
                num_replaced += 1
                await self._queue.requeue(queued.meta.sample_id)
                self._count_lost(queued.meta.sample_id)
                continue
            self._payload_losses.pop(sample.sample_id, None)
            try:
                prepared = prepare_sample(
                    sample, lease_id=lease.lease_id, trainer_version=trainer_version, rules=self._rules
                )
            except UnusableRowError as error:
                num_replaced += 1
                await self.drop(sample.sample_id, DropReason.FAILED, queued.meta.response_tokens)
                self._count_unusable(error)
                continue
            self._consecutive_unusable = 0
            profile.note("sample.leased", sample=str(sample.sample_id), staleness=prepared.staleness)
            if prepared.untrainable is None:
                batch.samples.append(prepared)
                self._consecutive_filtered = 0
            else:
                num_replaced += 1
                await self.drop(prepared.sample_id, prepared.untrainable, prepared.response_tokens)
                self._count_filtered(prepared)
        return num_replaced

    def _count_unusable(self, error: UnusableRowError) -> None:
        self._consecutive_unusable += 1
        if self._consecutive_unusable >= self._max_consecutive_unusable:
            raise DataError(
                f"{self._consecutive_unusable} samples in a row could not be trained on, so probably none "
                f"can. The last one: {error.message}",
                error.cause,
            )
        if error.kind not in self._logged_kinds:
            self._logged_kinds.add(error.kind)
            logger.warning(
                "%s The sample was dropped as failed; further samples with %s are dropped without a message.",
                error.message,
                error.kind,
            )

    def _count_lost(self, sample_id: SampleId) -> None:
        self._payload_losses[sample_id] += 1
        if (losses := self._payload_losses[sample_id]) >= MAX_PAYLOAD_LOSSES:
            raise InfraError(
                f"the payload of {sample_id} was lost or damaged {losses} times and generated again in between, so "
                "generated samples do not reach the Trainer. The log names each cause; check the disk of the run "
                "directory, and whether this machine sees it as the Rollouter's does"
            )

    def _count_filtered(self, dropped: TrainSample) -> None:
        if dropped.untrainable is not DropReason.FILTERED:
            return
        self._consecutive_filtered += 1
        limit = self._max_consecutive_filtered
        if limit is not None and self._consecutive_filtered >= limit:
            raise DataError(
                f"{self._consecutive_filtered} samples in a row were filtered "
                f"(algorithm.filter_groups.max_consecutive = {limit}), the last one {dropped.sample_id} with rewards "
                f"{', '.join(f'{reward:g}' for reward in dropped.rewards[:8])}: the task is too hard or too easy for "
                "this model, so there is nothing to train on. Take other data, check reward.function, raise rollout.n "
                "or that limit, or set algorithm.filter_groups.enable=false"
            )
